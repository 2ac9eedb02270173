"""The TPU kernel for products with 4-bit groups: in the simulator against float64, and through the TPU compiler."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_subjects
from jax.experimental.pallas import tpu as pltpu
from quant_subjects import dequantised

from tessera.core.quant import FORMS, Form, Quantised, round_rows
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.models import grouped, products

RNG = np.random.default_rng(23)
TESTS = str(Path(quant_subjects.__file__).parent)


def weight(outputs: int, inputs: int, form: Form, zeros: bool = False) -> Quantised:
    """Round a random matrix whose outputs differ in size by 1,000, so that a scale of the wrong output shows."""
    w = RNG.normal(size=(outputs, inputs)) * np.logspace(-2, 1, outputs)[:, None]
    values, scale = (array.T for array in round_rows(w.astype(np.float32), form))  # [g,G,E] and [G,E]
    values, kind, zero = values.swapaxes(0, 1), form.kind, None
    if zeros:
        values, kind, zero = values + np.int8(8), "uint4", jnp.asarray(RNG.normal(size=scale.shape), jnp.float16)
    return Quantised(
        values=jnp.asarray(values.astype(kind)), scale=jnp.asarray(scale), zero=zero,
        sample=jnp.zeros(64, jnp.bfloat16), kind=kind, group=form.group, rounds_rows=False, float_dtype="bfloat16",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "zeros", "rows"),
    [(FORMS["int4-g32"], True, 40), (FORMS["int4-g128"], False, 32), (Form(kind="int8", group=32), False, 3)],
    ids=["Q4_1", "g128", "Q8_0"],
)
def test_the_kernel_equals_the_dequantised_matrix(form, zeros, rows, monkeypatch):
    """W is rounded to bfloat16 once: an error of 2^-9 of each |x w|. Blocks are small, so that all indices count."""
    for name, size in (("MOST_ROWS", 16), ("MOST_OUTPUTS", 128), ("MOST_INPUTS", 128)):
        monkeypatch.setattr(grouped, name, size)
    held, x = weight(256, 384, form, zeros), jnp.asarray(RNG.normal(size=(rows, 384)), jnp.bfloat16)
    got = np.asarray(grouped.product(x, held, interpret=pltpu.InterpretParams(detect_races=True)))
    exact, w = np.asarray(x, np.float64), dequantised(held).astype(np.float64)
    assert got.dtype == np.float32
    assert (np.abs(got - exact @ w.T) <= 2.0**-8.9 * (np.abs(exact) @ np.abs(w).T)).all()


def test_blocks_of_rows_are_equal():
    """1,040 rows are two blocks of 528, not one of 1,024 and another that is nearly empty."""
    assert grouped.cut(1040, 4096, 14336, 128) == (528, 512, 512)
    assert grouped.cut(1024, 14336, 4096, 32).rows == 512  # of 14,336 inputs, fewer rows fit
    assert grouped.cut(64, 2816, 11008, 128) == (64, 256, 256)


@pytest.mark.parametrize(
    ("rows", "dtype", "platform", "kernel"),
    [
        (64, "bfloat16", "tpu", True),
        (63, "bfloat16", "tpu", False),
        (64, "float32", "tpu", False),
        (64, "bfloat16", "cpu", False),
    ],
)
def test_many_bfloat16_rows_on_a_tpu_take_the_kernel(rows, dtype, platform, kernel):
    held, x = weight(128, 256, FORMS["int4-g32"]), jnp.ones((rows, 256), dtype)
    lowered = jax.jit(products.product).trace(x, held).lower(lowering_platforms=(platform,))
    assert ("grouped_product" in lowered.as_text()) == kernel


def test_the_compiled_kernel_reads_quantised_bytes_and_keeps_the_matrix_unit_busy():
    sizes = {"rows": 1024, "group": 32, "size": (2048, 2048)}
    found = tpu.compile_for("v6e", factory_program("quant_subjects:grouped_kernel", **sizes), paths=[TESTS])
    assert found.error is None, found.error
    assert found.memory["temp"] < 2048 * 2048 / 8
    turn = found.schedules[0].region("turn")
    assert turn.product_cycles > 0.7 * turn.bundles
