"""Keys and values in pages: the portable kernels equal contiguous ones, bit for bit, and the float64 oracle.

All pages that no table lists hold NaN, and so do the null page, which fills the tables, and positions past kv_len.
"""

import dataclasses
import functools
import itertools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.dispatch import KERNELS, attend
from tessera.attention.workloads import Workload

PAGED = [kernel for kernel in KERNELS if kernel.paged and kernel.platform == "any"]
BLOCKED = [kernel for kernel in PAGED if kernel.family != "reference"]
NUM_KEYS, LENGTHS = 640, (250, 140, 0)
"""Less than half of the keys are visible; else contiguous dense decode would run another program, `at_once`."""
SHARED = 128
"""Positions that sequences 0 and 1 share: one or two pages."""
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


TRUTHS = {}
"""Answers by the identity of the cached call's queries."""


@functools.cache
def draw(role: str, phase: str, keys: str, groups: int, lengths=LENGTHS, **options) -> oracle.Call:
    """Draw a contiguous call of ragged sequences whose first SHARED keys are those of sequence 0."""
    num_queries = 1 if phase == "decode" else 20
    spec = AttentionSpec(tile=16, query_tile=16, **options)
    workload = Workload(
        name="pages",
        tags=(phase,),
        batch=len(lengths),
        num_queries=num_queries,
        num_keys=NUM_KEYS,
        num_heads=2 * groups,
        num_kv_heads=2,
        head_dim=16,
        spec=spec,
        q_start=tuple(max(length - num_queries, 0) for length in lengths),
        kv_len=lengths,
        q_len=tuple(min(length, num_queries) for length in lengths),
        scaled=keys == "int8",
    )
    call = calls.make(workload, role, "float32", seed=groups)
    for x in (call.k, call.v):
        x[1, :SHARED] = x[0, :SHARED]
    if call.scales is not None:
        call.scales[1, ..., :SHARED] = call.scales[0, ..., :SHARED]
    return call


def paged(call: oracle.Call, page: int, *, shuffled: bool) -> KeyValues:
    """Deal a contiguous call's keys into pages; sequences 0 and 1 share the pages of their first SHARED positions."""
    batch, count = len(call.k), NUM_KEYS // page
    pages = 1 + np.arange(batch * count).reshape(batch, count)
    if shuffled:
        pages = np.random.default_rng(page).permutation(3 * batch * count)[pages] + 1
    pages[1, : SHARED // page] = pages[0, : SHARED // page]
    for row, length in zip(pages, call.kv_len):
        row[-(-length // page) :] = 0
    size = 3 * batch * count + 1
    heads, dim = call.k.shape[2:]
    rng = np.random.default_rng(1)
    pools = [np.full((size, heads, page, dim), np.nan, np.float32) for _ in "kv"]
    if call.scales is not None:
        pools = [rng.integers(-127, 128, pool.shape).astype(np.int8) for pool in pools]
    scales = None if call.scales is None else np.full((size, heads, 2, page), np.nan, call.scales.dtype)
    for b, j in np.ndindex(batch, count):
        if pages[b, j] == 0:
            continue
        span = slice(j * page, (j + 1) * page)
        for pool, x in zip(pools, (call.k, call.v)):
            held, new = pool[pages[b, j]], np.swapaxes(x[b, span], 0, 1)
            past = (
                np.arange(j * page, (j + 1) * page) >= call.kv_len[b]
            )  # of a shared page, another sequence's are kept
            pool[pages[b, j]] = np.where(past[:, None], held, new)
        if scales is not None:
            held, new = scales[pages[b, j]], call.scales[b, ..., span]
            scales[pages[b, j]] = np.where(past, held, new)
    table = jnp.asarray(pages, jnp.int32)
    return KeyValues(*map(jnp.asarray, pools), table, None if scales is None else jnp.asarray(scales))


def contiguous(call: oracle.Call) -> KeyValues:
    scales = None if call.scales is None else jnp.asarray(call.scales)
    return KeyValues.of(jnp.asarray(call.k), jnp.asarray(call.v))._replace(scales=scales)


def config(kernel, block_s: int):
    """Return small blocks of rows, and block_s keys per block."""
    sizes = {"block_s": block_s} if hasattr(calls.small_config(kernel), "block_s") else {}
    return dataclasses.replace(calls.small_config(kernel), **sizes)


@functools.cache
def program(kernel, spec: AttentionSpec, config):
    def launch(q, kv, positions, selection):
        return kernel.launch(q, kv, spec, positions, selection, config)

    return jax.jit(launch)


def run(kernel, call: oracle.Call, kv: KeyValues, block_s: int):
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    selection = None
    if kernel.role == "sparse":
        selection = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    spec = calls.spec_of(call, kernel.role)
    assert kernel.refusal(spec, kv.shapes(jnp.asarray(call.q), selection)) is None
    out = program(kernel, spec, config(kernel, block_s))(jnp.asarray(call.q), kv, positions, selection)
    return [np.asarray(x) for x in out if x is not None]


def truth(call: oracle.Call) -> tuple[oracle.Answer, oracle.Answer]:
    """Return the oracle's answer and the tolerance; kernels of one call share them."""
    if id(call.q) not in TRUTHS:
        answer = oracle.attend(call)
        TRUTHS[id(call.q)] = answer, oracle.tolerance(call, answer, "float32")
    return TRUTHS[id(call.q)]


def check_against_oracle(call: oracle.Call, result, role: str) -> None:
    answer, allowed = truth(call)
    out, lse, *mass = result
    seen = np.isfinite(answer.lse)
    assert np.abs(out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(lse), ~seen)
    assert np.abs(lse[seen] - answer.lse[seen]).max() <= allowed.lse
    assert role != "score" or np.abs(mass[0] - answer.mass).max() <= allowed.mass


@pytest.mark.parametrize(("kernel", "keys", "groups", "page"), list(cells()))
def test_pages_equal_contiguous_keys_bit_for_bit(kernel, keys, groups, page):
    call = draw("sparse" if kernel.role == "sparse" else "dense", kernel.phase, keys, groups)
    whole = run(kernel, call, contiguous(call), 128)
    if groups == 3:  # the others differ in nothing that concerns pages
        check_against_oracle(call, whole, kernel.role)
    for shuffled in (False, True):
        parts = run(kernel, call, paged(call, page, shuffled=shuffled), 128)
        assert [x.tobytes() for x in parts] == [x.tobytes() for x in whole]


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
    check_against_oracle(call, run(kernel, call, paged(call, 128, shuffled=True), 256), kernel.role)


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
        (small, tiled, "pages of 16 positions must be a multiple of tile=32"),
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


def test_kernels_that_read_no_pages_refuse_them():
    assert {kernel.family for kernel in PAGED} == {"xla_decode", "xla_prefill", "reference"}
    assert [k.name for k in KERNELS if k.platform == "gpu" and not k.paged] == ["gpu_cudnn_dense", "gpu_keys_sparse"]
    shapes = KeyValues(jnp.zeros((3, 2, 16, 16)), None, jnp.zeros((1, 2), jnp.int32)).shapes(jnp.zeros((1, 1, 2, 16)))
    for kernel in (kernel for kernel in KERNELS if not kernel.paged):
        spec, lists = AttentionSpec(mass=kernel.role == "score"), 3 if kernel.role == "sparse" else None
        assert kernel.refusal(spec, shapes._replace(capacity=lists)) == "it reads contiguous keys, the call's are paged"
