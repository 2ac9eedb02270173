"""Hopper kernels on keys in pages: the oracle's answer, and the bits of the same call on contiguous keys.

All pages that no table lists hold NaN, and so do the null page, which fills the tables, and positions past kv_len.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pools
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.dispatch import KERNELS
from tessera.attention.workloads import Workload

NAMED = {kernel.name: kernel for kernel in KERNELS}
LENGTHS = (320, 65, 128, 0)
"""Valid keys of the sequences: all, one past a page's end, whole pages, none."""


def workload(queries: int, groups: int, tile: int, lengths=LENGTHS, **options) -> Workload:
    """Build ragged sequences whose last rows are the queries."""
    scaled = options.pop("scaled", False)
    return Workload(
        name="pages",
        tags=("pages",),
        batch=len(lengths),
        num_queries=queries,
        num_keys=320,
        num_heads=2 * groups,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        fraction=0.6,
        spec=AttentionSpec(tile=tile, query_tile=32, **options),
        scaled=scaled,
        q_start=tuple(max(length - queries, 0) for length in lengths),
        kv_len=lengths,
        q_len=tuple(min(length, queries) for length in lengths),
    )


# name -> kernel, page, workload, config
CASES = {
    "decode dense, a block of two pages, a last block past the table": (
        "gpu_decode_dense", 64, workload(1, 3, 128), {"block_s": 128, "stages": 2, "splits": 2},
    ),
    "decode score, int8, a window": (
        "gpu_decode_score", 64, workload(1, 1, 16, scaled=True, window=150), {"block_s": 64, "stages": 2, "splits": 1},
    ),
    "decode sparse": ("gpu_decode_sparse", 64, workload(1, 4, 16), {"block_s": 64, "stages": 2, "splits": 2}),
    "prefill sparse": ("gpu_prefill_sparse", 64, workload(20, 3, 16), {"block_s": 64, "stages": 2}),
    "prefill dense, a block of two pages, a last block past the table": (
        "gpu_prefill_dense", 64, workload(20, 3, 128, window=200), {"block_s": 128, "stages": 2},
    ),
    "prefill score, int8": ("gpu_prefill_score", 64, workload(20, 1, 16, scaled=True), {"block_s": 64, "stages": 2}),
}  # fmt: skip


@functools.cache
def truth(name: str) -> tuple[oracle.Call, oracle.Answer, oracle.Answer]:
    """Return a case's call, the oracle's answer and the tolerance."""
    kernel, _, work, _ = CASES[name]
    call = calls.make(work, NAMED[kernel].role, "bfloat16")
    answer = oracle.attend(call)
    return call, answer, oracle.tolerance(call, answer, "bfloat16", **calls.roundings(NAMED[kernel]))


def run(name: str, kv: KeyValues) -> list[np.ndarray]:
    """Run a case in simulation on these keys: out, lse and, in the score role, mass."""
    kernel, (call, *_), config = NAMED[CASES[name][0]], truth(name), CASES[name][3]
    spec, q = calls.spec_of(call, kernel.role), jnp.asarray(call.q, jnp.bfloat16)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    lists = None
    if kernel.role == "sparse":
        lists = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    assert kernel.refusal(spec, kv.shapes(q, lists)) is None
    launch = functools.partial(kernel.launch, spec=spec, config=kernel.Config(**config))
    ready = calls.jit_for(kernel, lambda q, kv, at, lists: launch(q, kv, positions=at, selection=lists))
    with calls.machine(kernel):
        out = jax.block_until_ready(ready(q, kv, positions, lists))
    return [np.asarray(x).astype(np.float32) for x in out if x is not None]


def excess(name: str, kv: KeyValues) -> float:
    """Run a case on these keys; return its largest error in tolerances, infinite if it is wrong about empty rows."""
    _, true, allowed = truth(name)
    out, lse, *mass = run(name, kv)
    empty = np.isinf(true.lse)
    if not np.array_equal(np.isneginf(lse), empty) or np.any(out[empty]):
        return np.inf
    errors = [np.abs(out - true.out).max() / allowed.out]
    errors.append(np.abs(lse[~empty] - true.lse[~empty]).max() / (2 * allowed.lse))
    errors += [np.abs(x - true.mass).max() / allowed.mass for x in mass]
    return float(np.nan_to_num(max(errors), nan=np.inf))


@pytest.mark.parametrize("name", CASES)
def test_shuffled_pages_meet_the_oracle(name):
    assert excess(name, pools.paged(truth(name)[0], CASES[name][1], shuffled=True)) <= 1
