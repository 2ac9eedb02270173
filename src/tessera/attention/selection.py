"""From tile masses to the key tiles each query tile reads: a rolling budget, the diagonal always, the best of the rest.

Choosing the n heaviest of J tiles needs no sort. Non-negative floats order like their bit patterns, so the n-th largest
mass is found exactly, two bits a pass, in 16 passes over the masses: always as many, since a loop that ends by what it
finds makes a GPU wait for the host and a mesh for all of its chips. The ids follow in ascending order from running
counts of kept tiles, 32 to a word, by comparing each place in the list with each word: C * J / 32 steps of vector
work per query tile where a sort, or a look-up per listed tile, is scalar work on a TPU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention.contract import AttentionSpec, Selection
from tessera.shapes import ceil_div

SLACK = 1e-3
"""Tiles by which fraction * visible / tile may exceed an integer and still count as it: float32 rounding, no more."""

ALWAYS = 2**31 - 2
"""Rank above every mass, the diagonal's; one short of the largest int32, as ranks are counted from 1 in the search."""


WORD = 32
"""Marks packed into one unsigned integer."""


class Tiles(NamedTuple):
    """What each query tile may and must list, and how many; tile ids are inclusive, last < first is empty.

    Attributes:
        first_visible, last_visible: tiles that hold a key some row of the query tile sees.
        first_own, last_own: tiles that hold a position of the query tile's own rows (the diagonal), visible ones.
        budget: how many tiles the query tile lists, diagonal included; 0 for padding.
    """

    first_visible: Int32[Array, "B I"]
    last_visible: Int32[Array, "B I"]
    first_own: Int32[Array, "B I"]
    last_own: Int32[Array, "B I"]
    budget: Int32[Array, "B I"]


def select_tiles(
    mass_BKIJ: Float[Array, "B K I J"],
    spec: AttentionSpec,
    *,
    fraction: float = 0.1,
    minimum: int = 128,
    q_start: Int32[Array, "B"] | None = None,
    kv_len: Int32[Array, "B"] | None = None,
    q_len: Int32[Array, "B"] | None = None,
    capacity: int | None = None,
    pooled: bool = False,
) -> Selection:
    """List each query tile's own tiles and the heaviest others, within the budget (Kascade, arXiv 2512.16391).

    Budget in keys: k = min(max(fraction * visible, minimum), visible), where visible counts the keys that the query
    tile's last valid row sees; ceil(k / tile) tiles, all visible ones if k = visible. The tiles that hold the query
    tile's own positions are always listed and count within the budget, which grows to hold them. Ties go to the
    lower id. NaN mass counts as none.

    Args:
        mass_BKIJ: probability per key tile, as `attention` returns it with spec.mass.
        spec: the spec the mass was made with (tile, query_tile, causal, window).
        fraction: share of the visible keys to read, above 0 and at most 1.
        minimum: fewest keys to read, where as many are visible.
        q_start: absolute position of the first query row per sequence; zeros when None.
        kv_len: valid keys per sequence; J * tile when None.
        q_len: valid query rows per sequence; I * query_tile when None (pass 1 in decode).
        capacity: C; None is `capacity_for`, which never cuts a budget. A smaller one drops the lightest tiles.
        pooled: one set for all KV heads, chosen by the mass summed over them.

    Returns:
        Selection with tiles [B,K,I,C] ascending and count [B,K,I]; entries past count repeat a valid id.

    Raises:
        ValueError: mass is not [B,K,I,J], or fraction, minimum or capacity is out of range.
    """
    if mass_BKIJ.ndim != 4:
        raise ValueError(f"mass.shape={tuple(mass_BKIJ.shape)} must have four sizes [B,K,I,J]")
    if capacity is not None and capacity < 1:
        raise ValueError(f"{capacity=} must be at least 1, or None")
    batch, num_kv_heads, num_query_tiles, num_tiles = mass_BKIJ.shape
    if capacity is None:
        capacity = capacity_for(
            spec, num_tiles * spec.tile, num_query_tiles * spec.query_tile, fraction=fraction, minimum=minimum
        )
    capacity = min(capacity, num_tiles)
    q_start = jnp.zeros(batch, jnp.int32) if q_start is None else q_start
    kv_len = jnp.full(batch, num_tiles * spec.tile, jnp.int32) if kv_len is None else kv_len
    q_len = jnp.full(batch, num_query_tiles * spec.query_tile, jnp.int32) if q_len is None else q_len
    tiles = tile_budget(spec, num_query_tiles, q_start, kv_len, q_len, fraction=fraction, minimum=minimum)
    if pooled:
        mass_BKIJ = jnp.sum(mass_BKIJ, axis=1, keepdims=True)

    id_J = jnp.arange(num_tiles, dtype=jnp.int32)
    bits = jax.lax.bitcast_convert_type(jnp.where(mass_BKIJ > 0, mass_BKIJ, 0.0).astype(jnp.float32), jnp.int32)
    own = _between(id_J, tiles.first_own, tiles.last_own)
    seen = _between(id_J, tiles.first_visible, tiles.last_visible)
    rank = jnp.where(own, ALWAYS, jnp.where(seen, bits, -1))
    count = jnp.broadcast_to(jnp.minimum(tiles.budget, capacity)[:, None], rank.shape[:3])
    nth = jnp.minimum(jnp.arange(1, capacity + 1, dtype=jnp.int32), count[..., None])
    chosen = jnp.maximum(find_marks(keep_largest(rank, count), nth), 0)
    shape = (batch, num_kv_heads, num_query_tiles)
    return Selection(jnp.broadcast_to(chosen, (*shape, capacity)), jnp.broadcast_to(count, shape))


def capacity_for(
    spec: AttentionSpec, num_keys: int, num_queries: int, *, fraction: float = 0.1, minimum: int = 128
) -> int:
    """Return the C that no budget exceeds, wherever the query tiles stand among num_keys keys."""
    _check_budget(fraction, minimum)
    rows = min(spec.query_tile, num_queries)
    visible = num_keys if spec.window is None else min(num_keys, spec.window)
    wanted = max(_tiles_of(fraction, visible, spec.tile), ceil_div(min(minimum, visible), spec.tile))
    if spec.window is not None and (fraction >= 1 or minimum >= visible):
        wanted = _span(visible + rows - 1, spec.tile)  # all visible: the window of the first row to that of the last
    return min(max(wanted, _span(rows, spec.tile)), ceil_div(num_keys, spec.tile))


def tile_budget(
    spec: AttentionSpec,
    num_query_tiles: int,
    q_start: Int32[Array, "B"],
    kv_len: Int32[Array, "B"],
    q_len: Int32[Array, "B"],
    *,
    fraction: float,
    minimum: int,
) -> Tiles:
    """Return the range of visible tiles, the range of own tiles and the budget of every query tile."""
    _check_budget(fraction, minimum)
    row = jnp.arange(num_query_tiles, dtype=jnp.int32) * spec.query_tile
    last_row = jnp.minimum(row + spec.query_tile, q_len[:, None]) - 1
    first_p, last_p, keys = q_start[:, None] + row, q_start[:, None] + last_row, kv_len[:, None]
    end = jnp.minimum(keys, last_p + 1) if spec.causal else keys + 0 * last_p
    floor = jnp.zeros_like(end)
    if spec.window is not None:
        floor = jnp.maximum(first_p - spec.window + 1, 0)
    visible = end - (floor if spec.window is None else jnp.maximum(last_p - spec.window + 1, 0))
    visible = jnp.where(last_row >= row, jnp.maximum(visible, 0), 0)

    by_fraction = jnp.ceil(visible.astype(jnp.float32) * (fraction / spec.tile) - SLACK).astype(jnp.int32)
    by_minimum = -(-jnp.minimum(minimum, visible) // spec.tile)
    first_visible, last_visible = floor // spec.tile, (end - 1) // spec.tile
    first_own, last_own = jnp.maximum(first_p, 0) // spec.tile, (jnp.minimum(last_p + 1, end) - 1) // spec.tile
    first_own = jnp.maximum(first_own, first_visible)
    num_visible = jnp.maximum(last_visible - first_visible + 1, 0)
    num_own = jnp.maximum(last_own - first_own + 1, 0)
    budget = jnp.minimum(jnp.maximum(jnp.maximum(by_fraction, by_minimum), num_own), num_visible)
    everything = num_visible if fraction >= 1 else jnp.where(visible <= minimum, num_visible, budget)
    budget = jnp.where(visible > 0, everything, 0)
    return Tiles(first_visible, last_visible, first_own, last_own, budget)


def keep_largest(rank_BKIJ: Int32[Array, "B K I J"], count_BKI: Int32[Array, "B K I"]) -> Bool[Array, "B K I J"]:
    """Mark the `count` largest ranks per row, ties to the lower index; ranks are -1 or more, at least count >= 0."""

    key = (rank_BKIJ + 1).astype(jnp.uint32)

    def refine(step: Int32[Array, ""], low: Array) -> Array:
        shift = jnp.uint32(30) - 2 * step.astype(jnp.uint32)
        found = low
        for digit in (1, 2, 3):
            probe = low + (jnp.uint32(digit) << shift)
            enough = jnp.sum(key >= probe[..., None], axis=-1, dtype=jnp.int32) >= count_BKI
            found = jnp.where(enough, probe, found)
        return found

    # The largest number that at least `count` keys reach; all ones where count is 0: then no key does.
    threshold = jax.lax.fori_loop(0, 16, refine, jnp.zeros(count_BKI.shape, jnp.uint32))
    threshold = threshold[..., None]
    above, equal = key > threshold, key == threshold
    room = count_BKI - jnp.sum(above, axis=-1, dtype=jnp.int32)
    last_equal = find_marks(equal, room[..., None])
    return above | (equal & (jnp.arange(rank_BKIJ.shape[-1]) <= last_equal))


def find_marks(mark_BKIJ: Bool[Array, "B K I J"], nth_BKIC: Int32[Array, "B K I C"]) -> Int32[Array, "B K I C"]:
    """Return the index of the nth marked entry (from 1) per row: -1 for nth = 0, J - 1 where there are fewer.

    Marks are packed 32 to a word. Of the J / 32 words the nth mark is in the last one that begins before it; a
    reduction over the words carries that word along, as a TPU looks up ids of its own per element one by one.
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
    """Of two (index, ...) the one with the larger index."""
    return tuple(jnp.where(b[0] > a[0], y, x) for x, y in zip(a, b))


def _nth_bit(word: Array, nth: Array) -> Int32[Array, "B K I C"]:
    """Position of the nth set bit (from 1) of a 32-bit word, by halves; 31 if there are fewer."""
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


def _tiles_of(fraction: float, num_keys: int, tile: int) -> int:
    exact = fraction * num_keys / tile - SLACK
    return int(-(-exact // 1))


def _span(length: int, tile: int) -> int:
    """Most tiles that `length` consecutive positions can touch."""
    return 1 if length <= 1 else (length - 2) // tile + 2


def _check_budget(fraction: float, minimum: int) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"{fraction=} must be above 0 and at most 1")
    if minimum < 1:
        raise ValueError(f"{minimum=} must be at least 1 key")
