"""Keys and values in pages: the portable kernels equal contiguous ones, bit for bit, and the float64 oracle."""

import dataclasses
import itertools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_calls import check_against_oracle, contiguous, draw, paged, program, run

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.dispatch import KERNELS, attend

PAGED = [kernel for kernel in KERNELS if kernel.paged and kernel.platform == "any"]
BLOCKED = [kernel for kernel in PAGED if kernel.family != "reference"]
CELLS = (
    (("float32", 1, 64), ("int8", 4, 128)),
    (("float32", 3, 128), ("int8", 3, 64)),
    (("int8", 1, 128), ("float32", 4, 64)),
)
"""Type of keys, G and page size that kernels run by default, in turn; together they hold every pair of values."""


def cells():
    """Yield every kernel with every type of keys, G and page size; those not in CELLS are exhaustive."""
    for number, kernel in enumerate(PAGED):
        default = CELLS[number % len(CELLS)]
        if kernel not in BLOCKED:  # they gather all pages at the start
            default = default[:1] if kernel.role == "score" else ()
        for cell in itertools.product(("float32", "int8"), (1, 3, 4), (64, 128)):
            marks = () if cell in default else pytest.mark.exhaustive
            yield pytest.param(kernel, *cell, id="-".join(map(str, (kernel.name, *cell))), marks=marks)


def config(kernel, block_s: int):
    """Return small blocks of rows, and block_s keys per block."""
    sizes = {"block_s": block_s} if hasattr(calls.small_config(kernel), "block_s") else {}
    return dataclasses.replace(calls.small_config(kernel), **sizes)


@pytest.mark.parametrize(("kernel", "keys", "groups", "page"), list(cells()))
def test_pages_equal_contiguous_keys_bit_for_bit(kernel, keys, groups, page):
    call = draw("sparse" if kernel.role == "sparse" else "dense", kernel.phase, keys, groups)
    whole = run(kernel, call, contiguous(call), config(kernel, 128))
    if groups == 3:  # the others differ in nothing that concerns pages
        check_against_oracle(call, whole, kernel)
    for shuffled in (False, True):
        parts = run(kernel, call, paged(call, page, shuffled=shuffled), config(kernel, 128))
        assert [x.tobytes() for x in parts] == [x.tobytes() for x in whole]


@pytest.mark.parametrize("kernel", [k for k in BLOCKED if k.phase == "decode"], ids=lambda kernel: kernel.name)
def test_the_bits_of_a_sequence_do_not_depend_on_the_others(kernel):
    """Compare a sequence in a full batch with the same one beside unused rows: `tessera serve --exact` needs this."""
    role = "sparse" if kernel.role == "sparse" else "dense"
    call = draw(role, "decode", "float32", 4, lengths=(600, 640, 640), head_dim=64)
    kv = paged(call, 64, shuffled=True)
    alone = call._replace(q_start=(599, 0, 0), kv_len=(600, 0, 0), q_len=(1, 0, 0))
    if role == "sparse":
        alone = alone._replace(count=call.count * np.array([1, 0, 0])[:, None, None])
    beside, single = (run(kernel, each, kv, config(kernel, 64)) for each in (call, alone))
    assert [x[0].tobytes() for x in beside] == [x[0].tobytes() for x in single]


@pytest.mark.parametrize("kernel", [k for k in BLOCKED if k.role != "sparse"], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    "options",
    [{"window": 290, "softcap": 20.0}, pytest.param({"causal": False}, marks=pytest.mark.exhaustive)],
    ids=lambda options: next(iter(options)),
)
def test_a_short_last_block_meets_the_oracle(kernel, options):
    """Five pages in blocks of two: the last block starts a page early. All keys are in use."""
    call = draw(
        "sparse" if kernel.role == "sparse" else "dense", kernel.phase, "float32", 3, lengths=(640, 389, 513), **options
    )
    check_against_oracle(call, run(kernel, call, paged(call, 128, shuffled=True), config(kernel, 256)), kernel)


@pytest.mark.parametrize("keys", ["int8", pytest.param("float32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernel", BLOCKED, ids=lambda kernel: kernel.name)
def test_no_program_copies_the_pool_or_a_sequence(kernel, keys):
    """Compile, without running, a call on 4 sequences of 256 Ki keys: all temporaries are smaller than one's keys."""
    batch, count, page, heads, dim = 4, 4096, 64, 2, 64
    size = batch * count + 1
    shape = jax.ShapeDtypeStruct
    pool = shape((size, heads, page, dim), keys)
    scales = shape((size, heads, 2, page), jnp.bfloat16) if keys == "int8" else None
    kv = KeyValues(pool, pool, shape((batch, count), jnp.int32), scales)
    num_queries = 1 if kernel.phase == "decode" else 16
    spec = AttentionSpec(tile=64, query_tile=16, mass=kernel.role == "score")
    q = shape((batch, num_queries, 2 * heads, dim), jnp.float32)
    where = Positions(*[shape((batch,), jnp.int32)] * 3)
    lists = Selection(shape((batch, heads, 1, 32), jnp.int32), shape((batch, heads, 1), jnp.int32))
    selection = lists if kernel.role == "sparse" else None
    launch = program(kernel, spec, kernel.default_config(spec, kv.shapes(q, selection)))
    used = launch.lower(q, kv, where, selection).compile().memory_analysis()
    assert used.temp_size_in_bytes < count * page * heads * dim * (4 if keys == "float32" else 1)


def test_a_call_on_pages_is_checked_by_name():
    q, keys, table = jnp.zeros((1, 4, 2, 16)), jnp.zeros((3, 2, 16, 16)), jnp.zeros((1, 2), jnp.int32)
    small, tiled = KeyValues(keys, keys, table), AttentionSpec(tile=32, query_tile=16, mass=True)
    for kv, spec, reason in (
        (small._replace(pages=table[0]), tiled, r"pages must be int32 \[B,J\] with B=1 and J >= 1, got int32 \(2,\)"),
        (small._replace(pages=jnp.repeat(table, 2, 0)), tiled, r"with B=1 and J >= 1, got int32 \(2, 2\)"),
        (small._replace(pages=table.astype(jnp.float32)), tiled, r"got float32 \(1, 2\)"),
        (small._replace(pages=table[:, :0]), tiled, r"got int32 \(1, 0\)"),
        (small, tiled, "page size 16 must be a multiple of tile=32"),
        (small._replace(k=keys[:, :, :, 0]), tiled, r"k.shape=\(3, 2, 16\) must have four sizes \[P,K,S,H\]"),
        (small._replace(k=keys.astype(jnp.int8)), AttentionSpec(), "dtypes of q, k and v must be equal"),
        (
            small._replace(
                k=keys.astype(jnp.int8), v=keys.astype(jnp.int8), scales=jnp.zeros((1, 2, 2, 32), jnp.bfloat16)
            ),
            AttentionSpec(),
            r"bfloat16 \[P,K,2,page\] = \(3, 2, 2, 16\), got bfloat16 \(1, 2, 2, 32\)",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            attend(q, kv, spec)
    assert attend(q, small, q_start=jnp.array([28], jnp.int32)).out.shape == q.shape  # dense calls have no tiles


def test_two_kernels_refuse_pages():
    """cuDNN takes no page table, and the kernel of single keys, which compares, copies keys from contiguous rows."""
    kernels = [kernel for kernel in KERNELS if not kernel.paged]
    assert [kernel.name for kernel in kernels] == ["gpu_cudnn_dense", "gpu_keys_sparse"]
    shapes = KeyValues(jnp.zeros((3, 2, 16, 16)), None, jnp.zeros((1, 2), jnp.int32)).shapes(jnp.zeros((1, 1, 2, 16)))
    for kernel in kernels:
        spec, lists = AttentionSpec(mass=kernel.role == "score"), 3 if kernel.role == "sparse" else None
        reason = "it reads contiguous keys, but the call's are paged"
        assert kernel.refusal(spec, shapes._replace(capacity=lists)) == reason
