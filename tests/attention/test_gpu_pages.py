"""Hopper kernels on keys in pages: the oracle's answer, and the bits of the same call on contiguous keys.

All pages that no table lists hold NaN, and so do the null page, which fills the tables, and positions past kv_len.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_calls import SHARED, contiguous, paged

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.dispatch import KERNELS, choose
from tessera.attention.workloads import Workload
from tessera.deviceless import inspection
from tessera.deviceless.compiler import attention_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import gates

NAMED = {kernel.name: kernel for kernel in KERNELS}
LENGTHS = (320, 65, 128, 0)
"""Valid keys of the sequences: all, one past a page's end, whole pages, none."""


def workload(queries: int, groups: int, tile: int, *, num_keys: int = 320, scaled: bool = False, **options) -> Workload:
    """Build ragged sequences whose last rows are the queries."""
    return Workload(
        name="pages",
        tags=("pages",),
        batch=len(LENGTHS),
        num_queries=queries,
        num_keys=num_keys,
        num_heads=2 * groups,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        fraction=0.6,
        spec=AttentionSpec(tile=tile, query_tile=32, **options),
        scaled=scaled,
        q_start=tuple(max(length - queries, 0) for length in LENGTHS),
        kv_len=LENGTHS,
        q_len=tuple(min(length, queries) for length in LENGTHS),
    )


# name -> kernel, page, workload, config beyond two stages of 64 keys; the first of a kernel runs by default
CASES = {
    "decode dense, a block of two pages, a last block past the table": (
        "gpu_decode_dense", 64, workload(1, 3, 128), {"block_s": 128, "splits": 2},
    ),
    "decode dense, int8, a block of four pages": (
        "gpu_decode_dense", 16, workload(1, 1, 128, scaled=True), {"splits": 2},
    ),
    "decode score, int8, a window": (
        "gpu_decode_score", 64, workload(1, 1, 16, scaled=True, window=150), {"splits": 1},
    ),
    "decode score, long pages": ("gpu_decode_score", 128, workload(1, 4, 64, num_keys=384), {"splits": 2}),
    "decode sparse": ("gpu_decode_sparse", 64, workload(1, 4, 16), {"splits": 2}),
    "decode sparse, int8, long pages": (
        "gpu_decode_sparse", 128, workload(1, 3, 32, num_keys=384, scaled=True), {"block_s": 128, "splits": 2},
    ),
    "prefill sparse": ("gpu_prefill_sparse", 64, workload(20, 3, 16), {}),
    "prefill sparse, int8, long pages": ("gpu_prefill_sparse", 128, workload(20, 4, 64, num_keys=384, scaled=True), {}),
    "prefill dense, a block of two pages, a last block past the table": (
        "gpu_prefill_dense", 64, workload(20, 3, 128, window=200), {"block_s": 128},
    ),
    "prefill dense, int8": ("gpu_prefill_dense", 64, workload(20, 4, 128, scaled=True), {"block_s": 128}),
    "prefill score, int8, long pages": (
        "gpu_prefill_score", 128, workload(20, 1, 16, num_keys=384, scaled=True), {},
    ),
    "prefill score, both ways": ("gpu_prefill_score", 64, workload(20, 4, 64, causal=False), {"block_s": 128}),
}  # fmt: skip
SPARSE = "decode sparse"


def cases():
    """Yield every case; all but each kernel's first are exhaustive."""
    met = set()
    for name, (kernel, *_) in CASES.items():
        yield pytest.param(name, marks=[pytest.mark.exhaustive] if kernel in met else [])
        met.add(kernel)


@functools.cache
def truth(name: str) -> tuple[oracle.Call, oracle.Answer, oracle.Answer]:
    """Return a case's call, whose sequences 0 and 1 begin with the same keys, the oracle's answer and the tolerance."""
    kernel, _, work, _ = CASES[name]
    call = calls.make(work, NAMED[kernel].role, "bfloat16")
    for x in (call.k, call.v):
        x[1, :SHARED] = x[0, :SHARED]
    if call.scales is not None:
        call.scales[1, ..., :SHARED] = call.scales[0, ..., :SHARED]
    answer = oracle.attend(call)
    return call, answer, oracle.tolerance(call, answer, "bfloat16", **calls.roundings(NAMED[kernel]))


def pages_of(name: str, *, shuffled: bool = True) -> KeyValues:
    """Return a case's keys in pages."""
    call = truth(name)[0]
    kv = paged(call, CASES[name][1], shuffled=shuffled)
    return kv._replace(k=kv.k.astype(call.k.dtype), v=kv.v.astype(call.v.dtype))


@functools.cache
def program(name: str):
    """Jit a case's launch: (q, kv, positions, selection) -> AttentionOut."""
    kernel, sizes = NAMED[CASES[name][0]], CASES[name][3]
    spec, config = calls.spec_of(truth(name)[0], kernel.role), kernel.Config(**({"block_s": 64, "stages": 2} | sizes))
    return calls.jit_for(kernel, lambda q, kv, *where: kernel.launch(q, kv, spec, *where, config))


def run(name: str, kv: KeyValues) -> list[np.ndarray]:
    """Run a case in simulation on these keys: out, lse and, in the score role, mass."""
    kernel, (call, *_) = NAMED[CASES[name][0]], truth(name)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    q, lists = jnp.asarray(call.q), None
    if kernel.role == "sparse":
        lists = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    assert kernel.refusal(calls.spec_of(call, kernel.role), kv.shapes(q, lists)) is None
    with calls.machine(kernel):
        out = jax.block_until_ready(program(name)(q, kv, positions, lists))
    return [np.asarray(x).astype(np.float32) for x in out if x is not None]


def excess(name: str, kv: KeyValues) -> float:
    """Run a case on these keys; return its largest error in tolerances, infinite if it is wrong about empty rows."""
    _, true, allowed = truth(name)
    out, lse, *mass = run(name, kv)
    empty = np.isinf(true.lse)
    if not np.array_equal(np.isneginf(lse), empty) or np.any(out[empty]):
        return np.inf
    errors = [np.abs(out - true.out).max() / allowed.out]
    errors.append(np.abs(lse[~empty] - true.lse[~empty]).max() / (2 * allowed.lse))  # sums run in another order
    errors += [np.abs(x - true.mass).max() / allowed.mass for x in mass]
    return np.inf if np.isnan(errors).any() else max(errors)


@pytest.mark.parametrize("name", list(cases()))
def test_shuffled_pages_meet_the_oracle(name):
    assert excess(name, pages_of(name)) <= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_pages_equal_contiguous_keys_bit_for_bit(name):
    """The portable kernels' promise holds here too; blocks are the same whatever the page."""
    whole = run(name, contiguous(truth(name)[0]))
    for shuffled in (False, True):
        parts = run(name, pages_of(name, shuffled=shuffled))
        assert [x.tobytes() for x in parts] == [x.tobytes() for x in whole]


FAULTS = {
    "the page before": lambda pages: pages - (pages > 0),
    "another sequence's table": lambda pages: np.roll(pages, 1, 0),
    "the next entry of the table": lambda pages: np.roll(pages, -1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_table_misses_the_oracle(fault):
    """The oracle can tell which page is read. This call is compiled already."""
    kv = pages_of(SPARSE, shuffled=False)
    with np.errstate(invalid="ignore"):
        assert excess(SPARSE, kv._replace(pages=jnp.asarray(FAULTS[fault](np.asarray(kv.pages))))) > 2


SHAPES = Shapes(4, 1, 131072, 32, 8, 128, None, "bfloat16", page=128)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
def test_hopper_takes_pages_without_being_asked(role, phase, scaled):
    spec, capacity = AttentionSpec(tile=64, mass=role == "score"), 205 if role == "sparse" else None
    shapes = SHAPES._replace(num_queries=1 if phase == "decode" else 256, capacity=capacity, scaled=scaled)
    assert choose(spec, shapes, platform="gpu", capability="9.0").name == f"gpu_{phase}_{role}"


@pytest.mark.parametrize(
    ("name", "page", "scaled", "least"),
    [("gpu_decode_dense", 24, False, 16), ("gpu_prefill_dense", 8, False, 16), ("gpu_prefill_dense", 96, True, 64)],
)
def test_pages_that_no_copy_fits_are_refused(name, page, scaled, least):
    shapes = SHAPES._replace(num_queries=1 if "decode" in name else 256, num_keys=960, page=page, scaled=scaled)
    reason = NAMED[name].refusal(AttentionSpec(), shapes)
    assert reason == f"page size {page} must be a multiple of {least}: a copy moves that many keys or more"
    assert choose(AttentionSpec(), shapes, platform="gpu", capability="9.0").platform == "any"


@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
def test_decode_reads_the_pool_in_place(role):
    """The pool is nearly all that the program holds: no contiguous copy of it."""
    spec, shapes = inspection.call(
        role=role, phase="decode", batch=2, length=32768, heads=8, kv_heads=2, head_dim=128, dtype="bfloat16",
        spec=AttentionSpec(tile=64), fraction=0.1,
    )  # fmt: skip
    found = gpu.compile_for("h200", attention_program(f"gpu_decode_{role}", spec, shapes._replace(page=64)))
    assert found.error is None
    assert gates.broken_program(found.kernels) == []
    pool = 2 * 2 * 2 * 32768 * 128 * 2
    assert pool <= found.hbm_bytes < 1.1 * pool
