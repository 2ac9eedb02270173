"""Deal the keys of a contiguous call into pages of a pool, for tests of kernels that read pages."""

import jax.numpy as jnp
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import KeyValues


def paged(call: oracle.Call, page: int, *, shuffled: bool, shared: int = 0) -> KeyValues:
    """Deal a call's keys into pages; sequences 0 and 1 share the pages of their first `shared` positions.

    Two thirds of the pool are in no table; they hold NaN (int8 keys: random bytes with NaN as scales), and so does the
    null page, which fills the tables from kv_len on. Positions at or past kv_len are NaN too.
    """
    batch, num_keys, heads, dim = call.k.shape
    count = num_keys // page
    pages = 1 + np.arange(batch * count).reshape(batch, count)
    if shuffled:
        pages = np.random.default_rng(page).permutation(3 * batch * count)[pages] + 1
    if shared:
        pages[1, : shared // page] = pages[0, : shared // page]
    for row, length in zip(pages, call.kv_len):
        row[-(-length // page) :] = 0
    size = 3 * batch * count + 1
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
    pools = (jnp.asarray(pool, call.k.dtype) for pool in pools)
    return KeyValues(*pools, jnp.asarray(pages, jnp.int32), None if scales is None else jnp.asarray(scales))


def contiguous(call: oracle.Call) -> KeyValues:
    """Return a call's keys as they are."""
    scales = None if call.scales is None else jnp.asarray(call.scales)
    return KeyValues.of(jnp.asarray(call.k), jnp.asarray(call.v))._replace(scales=scales)
