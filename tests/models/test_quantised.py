"""Quantised weights: rounding, products against a float64 oracle, loading, what is kept, refusals, TPU programs."""

import itertools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf_files import Q, tiny_model, write_gguf
from jax.sharding import AbstractMesh, AxisType
from quant_subjects import dequantised
from tiny import CONFIG, load_stacked, save_tiny

import tessera
from tessera.cli import flags
from tessera.cli.main import main
from tessera.core import hardware, quant
from tessera.core.mesh import AXES, MeshShape
from tessera.core.quant import FORMS, Form, Quantised, is_quantised
from tessera.deviceless import hlo
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.models import products
from tessera.models.files import parts
from tessera.models.files.checkpoint import fingerprint, load_params
from tessera.models.files.forms import check_forms, check_split
from tessera.models.files.gguf_file import read_gguf_rows
from tessera.models.files.source import open_source
from tessera.models.footprint import Types, weight_bytes
from tessera.models.weights import LAYER, OUTER, abstract_params, device_bytes, form_of, quantised_axes
from tessera.train import loop

RNG = np.random.default_rng(17)
WIDE = replace(CONFIG, intermediate_size=64)  # inputs in multiples of 32
TESTS = Path(__file__).parents[1]


def matrix(outputs=24, inputs=128) -> np.ndarray:
    """Draw a matrix whose rows differ in size by 1,000, so that a scale of the wrong row shows."""
    return (RNG.normal(size=(outputs, inputs)) * np.logspace(-2, 1, outputs)[:, None]).astype(np.float32)


def weight(w: np.ndarray, form: Form, packed: bool, zero: np.ndarray | None = None) -> Quantised:
    """Build a quantised matrix; with zero points [G,E], a GGUF's Q4_1, whose integers count from 0."""
    values, scale = quant.round_rows(w, form)
    kind = form.kind if zero is None else "uint4"
    if form.group:
        values, scale = values.transpose(1, 2, 0) + np.int8(0 if zero is None else 8), scale.T
    else:
        values, scale = values[:, 0], scale[:, 0]
    if kind in ("int4", "uint4"):
        values = quant.pack(values, values.ndim - (2 if form.group else 1)) if packed else values.astype(kind)
    leaves = {"values": values, "scale": scale, "zero": zero, "sample": np.zeros(64, ml_dtypes.bfloat16)}
    return Quantised(
        **{name: None if leaf is None else jnp.asarray(leaf) for name, leaf in leaves.items()}, kind=kind,
        group=form.group, rounds_rows=form.rounds_rows, float_dtype="float32",
    )  # fmt: skip


def with_zero(w: np.ndarray) -> Quantised:
    return weight(w, FORMS["int4-g32"], True, RNG.normal(size=(w.shape[1] // 32, len(w))).astype(np.float16))


# --- rounding


@pytest.mark.parametrize("name", FORMS)
def test_rounding_errs_by_half_a_step(name):
    form, w = FORMS[name], matrix()
    w[3] = 0
    got = dequantised(weight(w, form, False))
    grouped = np.abs(w).reshape(24, -1, form.group or 128)
    step = np.repeat(grouped.max(-1) / quant.LARGEST[form.kind], grouped.shape[-1], -1)
    slack = np.abs(w) * 2.0**-11 if form.group else 1e-6 * step  # float16 scales
    half = np.maximum(np.abs(w) * 2.0**-4, step * 2.0**-10) if form.kind == "fp8" else step / 2
    assert (np.abs(got - w) <= half + slack + 1e-12).all()
    assert not got[3].any()


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32"])
def test_rounding_keeps_what_it_can_hold(name):
    form = FORMS[name]
    top = int(quant.LARGEST[form.kind])
    whole = RNG.integers(-top, top + 1, (8, 4, 32))
    whole[..., 0] = top
    w = (whole * 2.0 ** RNG.integers(-6, 3, (8, 1, 1))).reshape(8, 128).astype(np.float32)
    for packed in (False, True):
        np.testing.assert_array_equal(dequantised(weight(w, form, packed)), w)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("signed", [True, False])
def test_packing_is_undone(axis, signed):
    values = (RNG.integers(-8, 8, (6, 10)) + (0 if signed else 8)).astype(np.int8)
    halves = quant.unpack(jnp.asarray(quant.pack(values, axis)), signed)
    np.testing.assert_array_equal(np.concatenate([*map(np.asarray, halves)], axis), values)


def test_bytes_count_four_bits_as_half_a_byte():
    held = weight(matrix(24, 128), FORMS["int4"], False)
    assert held.nbytes == weight(matrix(24, 128), FORMS["int4"], True).nbytes == 24 * 64 + 24 * 4 + 128


# --- products


def oracle_error(x: np.ndarray, held: Quantised, product) -> float:
    """Return the largest error of a product, as a share of sum |x| |w| of its row and channel."""
    exact, w = np.asarray(x, np.float64), dequantised(held).astype(np.float64)
    got = np.asarray(jax.jit(product)(x, held))
    assert got.dtype == np.float32
    assert held.shape == w.shape
    return float(np.max(np.abs(got - exact @ w.T) / (np.abs(exact) @ np.abs(w).T)))


@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32", "fp8", "zero", "int8-g32"])
def test_products_on_cpu_equal_the_dequantised_matrix(name, rows):
    """Digits of activations err by a / 508 of a = max |x| / 127; with normal activations that is 2e-5 of the sum."""
    w = matrix()
    x = RNG.normal(size=(rows, 128)).astype(np.float32) * np.logspace(-3, 3, rows)[:, None]
    form = FORMS.get(name, Form(kind="int8", group=32))
    held = with_zero(w) if name == "zero" else weight(w, form, True)
    assert oracle_error(x.astype(np.float32), held, products.product) <= 2e-5


@pytest.mark.parametrize("name", ["int8", "int4-g32", "fp8", "zero"])
def test_products_for_tpu_and_gpu_equal_the_dequantised_matrix(name):
    w, x = matrix(), RNG.normal(size=(3, 128)).astype(np.float32)
    held = with_zero(w) if name == "zero" else weight(w, FORMS[name], False)
    if name == "zero":
        held = replace(held, values=jnp.concatenate(quant.unpack(held.values, False), 1).astype(jnp.uint4))
    assert oracle_error(x, held, products._fused) <= 1e-6


def test_w8a8_rounds_activations_of_long_calls_only():
    held = weight(matrix(), FORMS["w8a8"], True)
    x = RNG.normal(size=(products.ROUNDED_ROWS, 128)).astype(np.float32)
    assert oracle_error(x[:-1], held, products.product) <= 2e-5
    assert 5e-4 <= oracle_error(x, held, products.product) <= 1e-2


def test_rows_do_not_touch_each_other():
    """A row of NaN or infinity stays in its row: integers would hide it."""
    x = RNG.normal(size=(3, 128)).astype(np.float32)
    broken = x.copy()
    broken[1, 5] = np.nan
    held, run = weight(matrix(), FORMS["int8"], True), jax.jit(products.product)
    good, got = np.asarray(run(x, held)), np.asarray(run(broken, held))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], good[[0, 2]])
    broken[1, 5] = np.inf
    assert not np.isfinite(np.asarray(run(broken, held))[1]).any()


@pytest.mark.parametrize("name", ["int8", "zero"])
def test_lookups_are_rows(name):
    w = matrix()
    held = with_zero(w) if name == "zero" else weight(w, FORMS[name], True)
    tokens = np.array([[3, 0], [23, 3]])
    np.testing.assert_allclose(products.lookup(held, tokens), dequantised(held)[tokens], rtol=1e-6)


# --- models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("quantised"), WIDE)


def test_a_quantised_model_runs_keeps_its_plan_and_is_not_saved(folder, tmp_path):
    """Its logits are those of the dequantised weights; the plan of the float weights fits; saving is refused."""
    tokens = RNG.integers(0, 256, (1, 20))
    model = load_stacked(folder, weights="int8", attention="kascade")
    assert fingerprint(model.params, model.config) == fingerprint(tessera.load(folder).params, model.config)
    assert str(model.params.embed.dtype) == "float32"
    assert model.precision == "float32, int8 weights"

    def whole(leaf):
        if not is_quantised(leaf):
            return leaf
        if leaf.values.ndim == 2:
            return jnp.asarray(dequantised(leaf))
        layers = [jax.tree.map(lambda x, i=i: x[i], leaf) for i in range(WIDE.num_layers)]
        return jnp.stack([*map(dequantised, layers)])

    params = jax.tree.map(whole, model.params, is_leaf=is_quantised)
    plain = np.asarray(replace(model, params=params).logits(tokens))
    np.testing.assert_allclose(model.logits(tokens), plain, atol=2e-3 * np.abs(plain).max())
    first, second = (
        replace(model, kv_dtype=kv_dtype).generate([[1, 2, 3]], max_new_tokens=4)[0].tokens
        for kv_dtype in (None, "int8")
    )
    assert first == second
    with pytest.raises(ValueError, match="load the model without weights="):
        tessera.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def held_bytes(params) -> int:
    return sum(map(quant.num_bytes, jax.tree.leaves(params)))


def planned_bytes(config, **types) -> int:
    return sum(weight_bytes(config, types=Types(dtype=config.dtype, **types)).values())


@pytest.mark.parametrize("name", FORMS)
def test_bytes_and_axes_are_what_loading_makes(folder, name):
    """The table tells bytes and axes before anything is loaded; stacked weights are the layers' own."""
    source = open_source(folder)
    if name in ("int4-g64", "int4-g128"):
        with pytest.raises(ValueError, match="pass weights='int4-g32' or 'int4'"):
            check_forms(source, name)
        return
    params, stacked = (load_params(source, weight_format=name, stacked=stacked) for stacked in (False, True))
    assert held_bytes(params) == planned_bytes(WIDE, weights=name)
    for entry in (*LAYER, *OUTER):
        held = getattr(params if entry in OUTER else params.layers[1], entry.name, None)
        form = form_of(entry, WIDE, name)
        if form is None or held is None:
            assert not isinstance(held, Quantised)
            continue
        for leaf, axes in quantised_axes(entry, form).items():
            assert getattr(held, leaf) is None or getattr(held, leaf).ndim == len(axes)
        if entry in LAYER:
            whole = getattr(stacked.layers, entry.name)
            assert whole.shape == (3, *held.shape)
            np.testing.assert_array_equal(whole.values[1], held.values)


def test_abstract_weights_have_the_planned_bytes():
    """Every form, tied and untied, on one device and on four that share it, which `inspect --model` compiles for."""
    config = replace(WIDE, hidden_size=128, intermediate_size=512, num_heads=16, num_kv_heads=4, head_dim=32)
    for name, tied, heads in itertools.product(FORMS, (False, True), (1, 4)):
        config = replace(config, tie_embeddings=tied)
        mesh = AbstractMesh((heads, 1), AXES, axis_types=(AxisType.Auto,) * 2)
        params = abstract_params(config, mesh, weight_format=name, dtype="bfloat16")
        types, division = Types(weights=name), MeshShape(heads=heads)
        planned = sum(weight_bytes(config, types=types, division=division).values())
        assert device_bytes(params) == planned, (name, tied, heads)


def test_an_untied_embedding_stays_a_float(tmp_path):
    config = replace(WIDE, tie_embeddings=False)
    params = load_params(open_source(save_tiny(tmp_path, config, plan=False)), weight_format="int4")
    assert held_bytes(params) == planned_bytes(config, weights="int4")
    assert not isinstance(params.embed, Quantised)
    assert params.head.kind == "int8"
    assert params.layers[0].q.kind == "int4"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file_is_held_as_stored(tmp_path, kind):
    """Blocks equal the dequantised float32 weights bit for bit, rows of q and k in Hugging Face's order included."""
    import gguf

    metadata, tensors = tiny_model(256, hidden=64)

    def encoded(array):
        return (gguf.quants.quantize(array, Q[kind]), Q[kind]) if array.ndim == 2 else (array, Q.F32)

    path = write_gguf(tmp_path / "x.gguf", metadata, {name: encoded(array) for name, (array, _) in tensors.items()})
    plain, held = tessera.load(path), tessera.load(path, weights="gguf")
    assert fingerprint(plain.params, plain.config) == fingerprint(held.params, held.config)
    kinds = open_source(path).kinds
    assert set(kinds.values()) == {{"Q4_0": "int4", "Q4_1": "uint4", "Q8_0": "int8"}[kind]}
    assert held_bytes(held.params) == planned_bytes(held.config, weights="gguf", kinds=kinds)
    for name in ("q", "k", "down"):
        want, got = getattr(plain.params.layers[0], name), getattr(held.params.layers[0], name)
        np.testing.assert_array_equal(dequantised(got), want)
        bits = {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5}[kind]  # as in the file
        assert got.nbytes - 128 == want.size * bits / 8
    tokens = RNG.integers(0, 256, (1, 12))
    want = np.asarray(plain.logits(tokens))
    np.testing.assert_allclose(held.logits(tokens), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32", "gguf"])
def test_a_process_reads_only_its_part(tmp_path, name):
    """One box of rows and one of inputs, as one of several processes reads them: values, scales, and a sample that is
    the whole matrix's. A channel's scale is that of all its inputs; rows of q come in llama.cpp's order."""
    import gguf

    metadata, tensors = tiny_model(256, hidden=128)
    kind = Q.Q4_1 if name == "gguf" else Q.F32

    def encoded(array):
        return (gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else (array, Q.F32)

    path = write_gguf(tmp_path / "x.gguf", metadata, {n: encoded(array) for n, (array, _) in tensors.items()})
    stored = open_source(path).tensors
    for tensor, box in (("q_proj", (64, 128, 0, 128)), ("o_proj", (0, 128, 32, 96))):
        full = f"model.layers.0.self_attn.{tensor}.weight"
        given = {full: stored[full]}
        form = parts.stored_form(given) if name == "gguf" else FORMS[name]
        how = {"form": form, "kept": name == "gguf", "packed": False, "dtype": np.float32}
        whole = 0, 128, 0, 128
        wanted, want_sample = parts.read_parts(read_gguf_rows, given, [whole], **how)
        found, sample = parts.read_parts(read_gguf_rows, given, [box], **how)
        np.testing.assert_array_equal(sample, want_sample)
        rows, inputs = slice(*box[:2]), slice(*box[2:])
        groups = slice(box[2] // (form.group or 1), box[3] // (form.group or 1))
        cuts = {"values": (0, rows, inputs), "scale": (0, rows)}
        if form.group:
            cuts = {"values": (0, groups, slice(None), rows), **dict.fromkeys(("scale", "zero"), (0, groups, rows))}
        for leaf, array in found[box].arrays.items():
            np.testing.assert_array_equal(array[0], wanted[whole].arrays[leaf][cuts[leaf]])


# --- refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int4-g64", "multiple of 64 inputs, but mlp.down_proj.weight has 32 on each of 2 .*'int4-g32' or 'int4'$"),
        ("int4-g128", "multiple of 128 inputs, but self_attn.q_proj.weight has 32: pass weights='int4-g32' or 'int4'$"),
        ("int4", None),
    ],
)
def test_groups_are_split_whole(name, words):
    config = replace(WIDE, hidden_size=64 if name == "int4-g64" else 32, num_heads=8)
    if words is None:
        check_split(config, name, 2)
        with pytest.raises(ValueError, match="needs an even number of inputs, but mlp.down_proj.weight has 33 on each"):
            check_split(replace(config, intermediate_size=66), name, 2)
        return
    with pytest.raises(ValueError, match=words):
        check_split(config, name, 2)


def test_refusals(folder, tmp_path):
    with pytest.raises(ValueError, match="weights='int5' must be one of int8, int4"):
        tessera.load(folder, weights="int5")
    with pytest.raises(ValueError, match="weights='int8,int4' must be one of int8, int4"):
        tessera.load(folder, weights="int8,int4", kv_dtype="int8")
    with pytest.raises(ValueError, match="kv_dtype='int4' must be 'int8', or None"):
        tessera.load(folder, weights="int8", kv_dtype="int4")
    with pytest.raises(ValueError, match="is a folder: pass weights='int8'"):
        tessera.load(folder, weights="gguf")
    with pytest.raises(
        ValueError, match=r"multiple of 32 inputs, but mlp.down_proj.weight has 48: pass weights='int4'$"
    ):
        tessera.load(save_tiny(tmp_path / "narrow"), weights="int4-g32")
    import gguf

    metadata, tensors = tiny_model(256, hidden=64)
    tensors["blk.0.ffn_up.weight"] = gguf.quants.quantize(tensors["blk.0.ffn_up.weight"][0], Q.Q5_0), Q.Q5_0
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(ValueError, match=r"up_proj.weight in .* is Q5_0: pass weights='int8'"):
        tessera.load(path, weights="gguf")
    plain = write_gguf(tmp_path / "y.gguf", *tiny_model(256, hidden=64))
    with pytest.raises(ValueError, match="holds only floats: pass weights='int8'"):
        tessera.load(plain, weights="gguf")
    params = load_params(open_source(folder), weight_format="int8", stacked=True)
    with pytest.raises(ValueError, match="quantised weights cannot be trained"):
        loop.loss_sums(params, np.zeros((1, 8), np.int32), np.ones((1, 8)), config=WIDE, remat=False, dtype="float32")


def test_commands_say_why_a_form_does_not_fit(tmp_path, capsys):
    folder = save_tiny(tmp_path / "narrow")
    assert main(["generate", "hello", "--model", str(folder), "--weights", "int4-g32"]) != 0
    said = capsys.readouterr().err.strip()
    assert "pass weights='int4'" in said
    assert "\n" not in said
    assert main(["bench", "--weights", "int8"]) != 0
    assert "--weights int8 needs --model" in capsys.readouterr().err


def test_the_flag_lists_every_form():
    assert flags.Weights.__args__ == quant.NAMES


# --- programs for TPU


def compiled(name: str | None, rows: int, inputs: int = 2048, outputs: int = 8192) -> tpu.Compiled:
    program = factory_program("quant_subjects:weight_product", name=name, rows=rows, inputs=inputs, outputs=outputs)
    found = tpu.compile_for("v6e", program, paths=[str(TESTS)], limit_s=200)
    assert found.error is None, found.error
    return found


def check_program(name: str, rows: int, **sizes: int) -> None:
    """Check that a product moves only quantised bytes, activations and result, and makes no temporary array."""
    found = compiled(name, rows, **sizes)
    inputs, outputs = sizes.get("inputs", 2048), sizes.get("outputs", 8192)
    form = FORMS[name]
    values = inputs * outputs * form.bits // 8
    scales = 2 * inputs * outputs // form.group if form.group else 4 * outputs
    others = 2 * max(rows, 16) * (inputs + 4 * outputs)  # rows fill tiles of 8 or 16; XLA counts some twice
    moved = sum(operation.bytes for operation in found.operations)
    assert values <= moved <= 1.01 * (values + scales) + others
    assert found.memory["temp"] <= 1 << 16
    if name == "int8" and rows <= 8:
        assert moved <= 0.51 * 2 * inputs * outputs + others


@pytest.mark.parametrize(("name", "rows"), [("int8", 8), ("int4", 64)])
def test_a_tpu_program_reads_only_quantised_bytes(name, rows):
    check_program(name, rows)


def check_sum(name: str) -> None:
    """Check that devices which share the inputs add up once, in bfloat16, and make no temporary matrix."""
    sizes = {"rows": 8, "inputs": 4096, "outputs": 2048}
    program = factory_program("quant_subjects:split_product", name=name, **sizes)
    found = tpu.compile_for("v6e", program, topology="v6e:2x2", devices=4, paths=[str(TESTS)], limit_s=200)
    assert found.error is None, found.error
    sent = [(c.opcode, c.bytes) for c in hlo.collectives(found.program)]
    assert sent == [("all-reduce", 2 * sizes["rows"] * sizes["outputs"])]
    assert found.memory["temp"] <= 1 << 17


def test_devices_of_a_tpu_add_up_once_in_bfloat16():
    check_sum("int8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["int4", "fp8", "int4-g32", "int4-g128"])
def test_devices_of_a_tpu_add_up_once_in_every_form(name):
    check_sum(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "int4-g32", "int4-g128"])
def test_a_tpu_program_of_a_large_product_reads_only_quantised_bytes(name, rows):
    check_program(name, rows, inputs=4096, outputs=14336)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_int4_products_are_predicted_to_beat_bfloat16(rows):
    """A product takes the longer of its bytes and its cycles."""

    def seconds(name):
        found = compiled(name, rows, inputs=4096, outputs=14336)
        moved, cycles = (sum(getattr(o, what) or 0 for o in found.operations) for what in ("bytes", "cycles"))
        return max(moved / hardware.chip("v6e").bytes_per_s, cycles / hardware.chip("v6e").clock_hz)

    assert seconds(None) >= 2.7 * seconds("int4")
