"""Choice of the key tiles that each query tile reads: near and sink tiles always, far tiles by their mass.

The budget for far tiles is a share of the keys that the query tile sees, so it grows along the sequence.

Finding the n heaviest of J tiles needs no sort. Non-negative floats order like their bit patterns, so the n-th largest
mass is found exactly in 16 passes over the masses, two bits per pass. The number of passes is fixed because a loop
whose end depends on data makes a GPU wait for the host, and a mesh wait for all of its chips. The chosen ids then come
out in ascending order: the marks of kept tiles are packed 32 to a word, and each list slot is compared with the number
of marks before each word. That takes C * J / 32 vectorised comparisons per query tile; on a TPU, a sort or one look-up
per listed tile would be scalar work.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention.contract import AttentionSpec, Selection
from tessera.core.shapes import ceil_div

SLACK = 1e-3
"""Amount, in tiles, that is subtracted from the far budget before the budget is rounded up to whole tiles, so that
float32 errors never add a tile."""

OWN = 2**31 - 2
"""Rank of tiles that hold the query tile's own positions: above every mass. `keep_largest` adds 1, still an int32."""

ALWAYS = OWN - 1
"""Rank of local and sink tiles: above every mass but below OWN, so that a short list drops own tiles last."""

WORD = 32
"""Bits of an unsigned integer; each bit marks one tile."""

Fraction = float | Sequence[float] | Float[Array, "K"]
"""Share of the visible keys, from 0 to 1: one number for all KV heads, or one per KV head."""


class Tiles(NamedTuple):
    """Per query tile, ranges of key tile ids and the number of tiles to list. Ranges include both ends; last < first
    means an empty range.

    K' is K if there is one fraction per KV head, else 1.
    """

    first_visible: Int32[Array, "B I"]  # tiles with a key that some row of the query tile sees
    last_visible: Int32[Array, "B I"]
    first_own: Int32[Array, "B I"]  # visible tiles that hold a position of the query tile itself (the diagonal)
    last_own: Int32[Array, "B I"]
    first_local: Int32[Array, "B I"]  # tiles from here to last_own are always listed
    last_sink: int  # last of the sink tiles, which start at tile 0; -1 without sinks
    budget: Int32[Array, "B K' I"]  # tiles to list, own, local and sink tiles included; 0 for a query tile of padding


def select_tiles(
    mass_BKIJ: Float[Array, "B K I J"],
    spec: AttentionSpec,
    *,
    fraction: Fraction = 0.1,
    minimum: int = 128,
    local: int = 0,
    sinks: int = 0,
    q_start: Int32[Array, "B"] | None = None,
    kv_len: Int32[Array, "B"] | None = None,
    q_len: Int32[Array, "B"] | None = None,
    capacity: int | None = None,
    pooled: bool = False,
) -> Selection:
    """List each query tile's own, local and sink tiles and its heaviest far tiles (Kascade, arXiv 2512.16391).

    A visible tile is always listed if it holds a position of the query tile itself, one of the `local` positions before
    the query tile's first row, or one of the first `sinks` positions of the sequence. All other visible tiles are far.
    The far budget is k = max(fraction * visible, minimum) keys, where `visible` is the number of keys that the query
    tile's last valid row sees. The heaviest ceil(k / tile) far tiles are listed, or all far tiles if there are fewer.
    fraction = 1 lists every far tile and fraction = 0 lists none, whatever the minimum is. Ties go to the lower id. A
    NaN mass counts as 0.

    Args:
        mass_BKIJ: probability mass per key tile, as `attention` returns it with spec.mass.
        spec: options of the call that returned the mass; only tile, query_tile, causal and window matter.
        fraction: share of the visible keys to read from far tiles, from 0 to 1: one number, or [K] for one per KV head.
            It may be traced if `capacity` is given; its range is then not checked.
        minimum: fewest keys to read from far tiles, if there are that many.
        local: number of positions before the query tile's first row that are always read, extended to whole tiles.
        sinks: number of positions at the start of the sequence that are always read, extended to whole tiles; a window
            hides the positions that it does not reach.
        q_start: absolute position of the first query row per sequence; zeros when None.
        kv_len: valid keys per sequence; J * tile when None.
        q_len: valid query rows per sequence; I * query_tile when None (pass 1 in decode).
        capacity: C, the length of each list; None means `capacity_for`, which fits every budget. A smaller capacity
            drops far tiles first, lightest first, then local and sink tiles, then own tiles.
        pooled: whether to rank tiles by the mass summed over all KV heads; each head still has its own budget.

    Returns:
        Selection with tiles [B,K,I,C] in ascending order and count [B,K,I]; entries past count repeat a valid id.

    Raises:
        ValueError: mass is not [B,K,I,J], the fraction is traced but capacity is None, or fraction, minimum, local,
            sinks or capacity is out of range.
    """
    if mass_BKIJ.ndim != 4:
        raise ValueError(f"mass.shape={tuple(mass_BKIJ.shape)} must have four sizes [B,K,I,J]")
    if capacity is not None and capacity < 1:
        raise ValueError(f"{capacity=} must be at least 1, or None")
    batch, num_kv_heads, num_query_tiles, num_tiles = mass_BKIJ.shape
    if np.shape(fraction) not in ((), (num_kv_heads,)):
        raise ValueError(f"fraction of shape {np.shape(fraction)} must be one number or {num_kv_heads=} numbers")
    keys = {"fraction": fraction, "minimum": minimum, "local": local, "sinks": sinks}
    if capacity is None:
        capacity = capacity_for(spec, num_tiles * spec.tile, num_query_tiles * spec.query_tile, **keys)
    capacity = min(capacity, num_tiles)
    q_start = jnp.zeros(batch, jnp.int32) if q_start is None else q_start
    kv_len = jnp.full(batch, num_tiles * spec.tile, jnp.int32) if kv_len is None else kv_len
    q_len = jnp.full(batch, num_query_tiles * spec.query_tile, jnp.int32) if q_len is None else q_len
    tiles = tile_budget(spec, num_query_tiles, q_start, kv_len, q_len, **keys)
    if pooled:
        mass_BKIJ = jnp.sum(mass_BKIJ, axis=1, keepdims=True)

    id_J = jnp.arange(num_tiles, dtype=jnp.int32)
    bits = jax.lax.bitcast_convert_type(jnp.where(mass_BKIJ > 0, mass_BKIJ, 0.0).astype(jnp.float32), jnp.int32)
    always = (id_J <= tiles.last_sink) | _between(id_J, tiles.first_local, tiles.last_own)
    rank = jnp.where(_between(id_J, tiles.first_own, tiles.last_own), OWN, jnp.where(always, ALWAYS, bits))
    rank = jnp.where(_between(id_J, tiles.first_visible, tiles.last_visible), rank, -1)
    shape = (batch, max(rank.shape[1], tiles.budget.shape[1]), num_query_tiles)
    rank = jnp.broadcast_to(rank, (*shape, num_tiles))
    count = jnp.broadcast_to(jnp.minimum(tiles.budget, capacity), shape)
    nth = jnp.minimum(jnp.arange(1, capacity + 1, dtype=jnp.int32), count[..., None])
    chosen = jnp.maximum(find_marks(keep_largest(rank, count), nth), 0)
    shape = (batch, num_kv_heads, num_query_tiles)
    return Selection(jnp.broadcast_to(chosen, (*shape, capacity)), jnp.broadcast_to(count, shape))


def capacity_for(
    spec: AttentionSpec,
    num_keys: int,
    num_queries: int,
    *,
    fraction: Fraction = 0.1,
    minimum: int = 128,
    local: int = 0,
    sinks: int = 0,
) -> int:
    """Return a list length C that holds every list of `select_tiles` with this budget, anywhere among num_keys keys."""
    if isinstance(fraction, jax.core.Tracer):
        raise ValueError("a traced fraction gives no static list length: pass capacity to select_tiles")
    check_budget(fraction, minimum, local, sinks)
    largest = float(np.max(fraction))
    rows = min(spec.query_tile, num_queries)
    visible = num_keys if spec.window is None else min(num_keys, spec.window)
    span = num_keys if spec.window is None else visible + rows - 1  # from the first row's window to the last row's
    everything = min(ceil_div(num_keys, spec.tile), _span(span, spec.tile))
    if largest >= 1:
        return everything
    far = 0
    if largest > 0:
        exact = largest * visible / spec.tile * (1 + 2**-22)  # tile_budget rounds to float32 three times
        far = max(int(-(-(exact - SLACK) // 1)), ceil_div(minimum, spec.tile))
    return min(far + _span(rows + local, spec.tile) + ceil_div(sinks, spec.tile), everything)


def tile_budget(
    spec: AttentionSpec,
    num_query_tiles: int,
    q_start: Int32[Array, "B"],
    kv_len: Int32[Array, "B"],
    q_len: Int32[Array, "B"],
    *,
    fraction: Fraction,
    minimum: int,
    local: int = 0,
    sinks: int = 0,
) -> Tiles:
    """Compute each query tile's ranges of visible, own, local and sink tiles, and the number of tiles to list."""
    check_budget(fraction, minimum, local, sinks)
    row = jnp.arange(num_query_tiles, dtype=jnp.int32) * spec.query_tile
    last_row = jnp.minimum(row + spec.query_tile, q_len[:, None]) - 1
    first_p, last_p, keys = q_start[:, None] + row, q_start[:, None] + last_row, kv_len[:, None]
    end = jnp.minimum(keys, last_p + 1) if spec.causal else keys + 0 * last_p
    floor = jnp.zeros_like(end)
    if spec.window is not None:
        floor = jnp.maximum(first_p - spec.window + 1, 0)
    visible = end - (floor if spec.window is None else jnp.maximum(last_p - spec.window + 1, 0))
    visible = jnp.where(last_row >= row, jnp.maximum(visible, 0), 0)

    first_visible, last_visible = floor // spec.tile, (end - 1) // spec.tile
    last_own = (jnp.minimum(last_p + 1, end) - 1) // spec.tile
    first_own, first_local = (
        jnp.maximum(jnp.maximum(first_p - before, 0) // spec.tile, first_visible) for before in (0, local)
    )
    last_sink = ceil_div(sinks, spec.tile) - 1
    num_near = _length(first_local, last_own)
    num_sinks = _length(first_visible, jnp.minimum(last_visible, last_sink))
    num_always = num_near + num_sinks - _length(first_local, jnp.minimum(last_own, last_sink))
    num_far = _length(first_visible, last_visible) - num_always
    far = jnp.minimum(_far_budget(spec, visible, fraction, minimum), num_far[:, None])
    budget = jnp.where((visible > 0)[:, None], num_always[:, None] + far, 0)
    return Tiles(first_visible, last_visible, first_own, last_own, first_local, last_sink, budget)


def _far_budget(spec: AttentionSpec, visible_BI: Array, fraction: Fraction, minimum: int) -> Int32[Array, "B K' I"]:
    """Return the far budget in tiles. It may exceed the number of far tiles, so the caller must limit it."""
    share = jnp.atleast_1d(jnp.asarray(fraction, jnp.float32))[:, None]
    tiles = jnp.ceil(visible_BI[:, None].astype(jnp.float32) * (share / spec.tile) - SLACK).astype(jnp.int32)
    tiles = jnp.maximum(tiles, ceil_div(minimum, spec.tile))
    return jnp.where(share >= 1, jnp.iinfo(jnp.int32).max, jnp.where(share > 0, tiles, 0))


def keep_largest(rank_BKIJ: Int32[Array, "B K I J"], count_BKI: Int32[Array, "B K I"]) -> Bool[Array, "B K I J"]:
    """Mark the `count` largest ranks along J; ties go to the lower index.

    Ranks must be at least -1, and at least `count` of them must be at least 0.
    """

    key = (rank_BKIJ + 1).astype(jnp.uint32)

    def refine(step: Int32[Array, ""], low: Array) -> Array:
        shift = jnp.uint32(30) - 2 * step.astype(jnp.uint32)
        found = low
        for digit in (1, 2, 3):
            probe = low + (jnp.uint32(digit) << shift)
            enough = jnp.sum(key >= probe[..., None], axis=-1, dtype=jnp.int32) >= count_BKI
            found = jnp.where(enough, probe, found)
        return found

    # Threshold: the largest number that at least `count` keys reach. With count 0 it is all ones, which no key reaches.
    threshold = jax.lax.fori_loop(0, 16, refine, jnp.zeros(count_BKI.shape, jnp.uint32))
    threshold = threshold[..., None]
    above, equal = key > threshold, key == threshold
    room = count_BKI - jnp.sum(above, axis=-1, dtype=jnp.int32)
    last_equal = find_marks(equal, room[..., None])
    return above | (equal & (jnp.arange(rank_BKIJ.shape[-1]) <= last_equal))


def find_marks(mark_BKIJ: Bool[Array, "B K I J"], nth_BKIC: Int32[Array, "B K I C"]) -> Int32[Array, "B K I C"]:
    """Return the index along J of the nth mark, counted from 1: -1 if nth is 0, J - 1 if there are fewer than n marks.

    Marks are packed 32 to a word. The nth mark is in the last word that has fewer than n marks before it. A reduction
    over the words finds that word and also returns its bits, because a TPU does per-element look-ups one by one.
    """
    num_tiles = mark_BKIJ.shape[-1]
    num_words = ceil_div(num_tiles, WORD)
    padded = jnp.pad(mark_BKIJ, ((0, 0), (0, 0), (0, 0), (0, num_words * WORD - num_tiles))).astype(jnp.uint32)
    lanes = padded.reshape(*mark_BKIJ.shape[:-1], num_words, WORD)
    word = jnp.sum(lanes << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    size = jax.lax.population_count(word).astype(jnp.int32)
    before = jnp.cumsum(size, axis=-1) - size

    begun = before[..., None, :] < nth_BKIC[..., None]
    index = jnp.where(begun, jnp.arange(num_words, dtype=jnp.int32), -1)
    before, word = (jnp.broadcast_to(x[..., None, :], begun.shape) for x in (before, word))
    none = (jnp.int32(-1), jnp.int32(0), jnp.uint32(0))
    index, before, word = jax.lax.reduce((index, before, word), none, _later, (begun.ndim - 1,))
    return jnp.where(nth_BKIC > 0, jnp.minimum(index * WORD + _nth_bit(word, nth_BKIC - before), num_tiles - 1), -1)


def _later(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return, for each element, the entries of the tuple (index, ...) that has the larger index."""
    return tuple(jnp.where(b[0] > a[0], y, x) for x, y in zip(a, b))


def _nth_bit(word: Array, nth: Array) -> Int32[Array, "B K I C"]:
    """Bisect a 32-bit word for the position of its nth set bit, counted from 1; 31 if fewer than n bits are set."""
    position = jnp.zeros(word.shape, jnp.int32)
    for width in (16, 8, 4, 2, 1):
        low = jax.lax.population_count(word & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        higher = nth > low
        nth = jnp.where(higher, nth - low, nth)
        word = jnp.where(higher, word >> width, word)
        position = jnp.where(higher, position + width, position)
    return position


def _between(id_J: Array, first_BI: Array, last_BI: Array) -> Bool[Array, "B 1 I J"]:
    return ((id_J >= first_BI[..., None]) & (id_J <= last_BI[..., None]))[:, None]


def _length(first_BI: Array, last_BI: Array) -> Int32[Array, "B I"]:
    return jnp.maximum(last_BI - first_BI + 1, 0)


def _span(length: int, tile: int) -> int:
    """Return the maximum number of tiles that `length` consecutive positions can touch."""
    return 1 if length <= 1 else (length - 2) // tile + 2


def check_budget(fraction: Fraction, minimum: int, local: int = 0, sinks: int = 0) -> None:
    """Raise ValueError if a fraction is outside [0, 1], or minimum, local or sinks is outside [0, 2**31)."""
    if not isinstance(fraction, jax.core.Tracer) and not all(0 <= share <= 1 for share in np.ravel(fraction)):
        raise ValueError(f"{fraction=} must be from 0 to 1")
    for name, keys in (("minimum", minimum), ("local", local), ("sinks", sinks)):
        if keys < 0:
            raise ValueError(f"{name}={keys} must be at least 0 keys")
        if keys >= 2**31:
            raise ValueError(f"{name}={keys} must be below {2**31:,} keys: positions are int32")
