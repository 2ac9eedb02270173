"""Attention calls whose keys are dealt into pages.

All pages that no table lists hold NaN, and so do the null page, which fills the tables, and positions past kv_len.
"""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection
from tessera.attention.workloads import Workload

NUM_KEYS, LENGTHS = 640, (250, 140, 0)
"""Less than half of the keys are visible; else contiguous dense decode would run another program, `at_once`."""
SHARED = 128
"""Positions that sequences 0 and 1 share: one or two pages."""


@functools.cache
def draw(
    role: str,
    phase: str,
    keys: str,
    groups: int,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    num_keys: int = NUM_KEYS,
    head_dim: int = 16,
    tile: int = 16,
    fraction: float = 0.1,
    **options,
) -> oracle.Call:
    """Draw a contiguous call of ragged sequences whose first SHARED keys are those of sequence 0."""
    num_queries = 1 if phase == "decode" else 20
    spec = AttentionSpec(tile=tile, query_tile=16, **options)
    workload = Workload(
        name="pages",
        tags=(phase,),
        batch=len(lengths),
        num_queries=num_queries,
        num_keys=num_keys,
        num_heads=2 * groups,
        num_kv_heads=2,
        head_dim=head_dim,
        spec=spec,
        fraction=fraction,
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
    batch, count = len(call.k), call.k.shape[1] // page
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
        past = np.arange(j * page, (j + 1) * page) >= call.kv_len[b]  # of a shared page, another sequence's are kept
        for pool, x in zip(pools, (call.k, call.v)):
            held, new = pool[pages[b, j]], np.swapaxes(x[b, span], 0, 1)
            pool[pages[b, j]] = np.where(past[:, None], held, new)
        if scales is not None:
            held, new = scales[pages[b, j]], call.scales[b, ..., span]
            scales[pages[b, j]] = np.where(past, held, new)
    table = jnp.asarray(pages, jnp.int32)
    return KeyValues(*map(jnp.asarray, pools), table, None if scales is None else jnp.asarray(scales))


def contiguous(call: oracle.Call) -> KeyValues:
    """Return the call's keys as they are."""
    scales = None if call.scales is None else jnp.asarray(call.scales)
    return KeyValues.of(jnp.asarray(call.k), jnp.asarray(call.v))._replace(scales=scales)


@functools.cache
def program(kernel, spec: AttentionSpec, config):
    """Jit the kernel's launch: (q, kv, positions, selection) -> AttentionOut."""

    def launch(q, kv, positions, selection):
        return kernel.launch(q, kv, spec, positions, selection, config)

    return calls.jit_for(kernel, launch)


def run(kernel, call: oracle.Call, kv: KeyValues, config) -> list[np.ndarray]:
    """Run the kernel, in simulation if its chip is absent; return out, lse and, in the score role, mass."""
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    selection = None
    if kernel.role == "sparse":
        selection = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    spec = calls.spec_of(call, kernel.role)
    assert kernel.refusal(spec, kv.shapes(jnp.asarray(call.q), selection)) is None
    with calls.machine(kernel):
        out = jax.block_until_ready(program(kernel, spec, config)(jnp.asarray(call.q), kv, positions, selection))
    return [np.asarray(x) for x in out if x is not None]


TRUTHS = {}
"""Answers by the identity of the cached call's queries and the values that a kernel rounds."""


def truth(call: oracle.Call, **rounded: bool) -> tuple[oracle.Answer, oracle.Answer]:
    """Return the oracle's answer and the tolerance; kernels of one call share them."""
    key = (id(call.q), *rounded.values())
    if key not in TRUTHS:
        answer = oracle.attend(call)
        TRUTHS[key] = answer, oracle.tolerance(call, answer, "float32", **rounded)
    return TRUTHS[key]


def check_against_oracle(call: oracle.Call, result, kernel) -> None:
    """Assert that out, lse and mass are within the tolerance."""
    answer, allowed = truth(call, **calls.roundings(kernel))
    out, lse, *mass = result
    seen = np.isfinite(answer.lse)
    assert np.abs(out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(lse), ~seen)
    assert np.abs(lse[seen] - answer.lse[seen]).max() <= allowed.lse
    assert kernel.role != "score" or np.abs(mass[0] - answer.mass).max() <= allowed.mass
