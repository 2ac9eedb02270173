"""Blocks of a decode call: which stretch of the cache, or of a list of tiles, each sequence's one row sees.

Everything a decode kernel must know before it copies a byte, in plain arithmetic: the sizes of blocks and pieces, and
per sequence the range [lo, hi) of keys, or of positions in a list of tiles laid side by side (ids ascend, so the row
sees one range there too).
"""

from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.tpu.matrix_unit import LANES
from tessera.attention.visibility import decode_range
from tessera.core.shapes import ceil_div, round_up

SUBLANES = 8
PACKED = 16
"""Rows of a packed bfloat16 register: every copy starts at a multiple of it."""
TILES_AT_ONCE = 32
"""Tiles whose copies start in straight-line scalar code: four bundles a copy instead of thirteen."""
PIECE_IDS = 1 << 14
"""Tile ids of one grid step in SMEM, all heads together: with the next step's, double-buffered, 256 KiB of 1 MiB."""


class Cut(NamedTuple):
    """One call cut into blocks: everything static the kernel body needs.

    K and V are `stored` keys long: num_keys, padded to whole registers (a model's cache never needs it).
    A chain is a head group and a split: steps of one chain run in order on one core. `rows` are the G query rows of a
    KV head, padded to whole registers. `unit` keys are the smallest copy. A list is `pieces` x `piece` ids. With
    `lanes` K and V are taken as [B, K, H, S]: the layout a TPU gives [B, K, S, H] where H does not fill its 128 lanes.
    A copy then takes at least 128 keys: lists of smaller tiles become lists of such units, with a bit per listed tile.
    So it does where keys are int8 (`scaled`): their scales lie in lanes. `exact`: queries are float32.
    """

    role: str
    spec: AttentionSpec
    batch: int
    num_keys: int
    stored: int
    kv_heads: int
    groups: int
    head_dim: int
    heads: int
    rows: int
    block_s: int
    unit: int
    splits: int
    pieces: int
    piece: int
    lanes: bool
    scaled: bool
    exact: bool

    @property
    def chains(self) -> int:
        return self.kv_heads // self.heads * self.splits

    @property
    def steps(self) -> int:
        """Grid steps of one chain."""
        return self.batch * self.pieces

    @property
    def paged(self) -> bool:
        """K and V are taken as [B * K * J, tile, H]: a listed tile's address then takes a shift and an add."""
        return self.role == "sparse" and not (self.lanes or self.scaled) and self.stored % self.unit == 0

    @property
    def tiles_per_unit(self) -> int:
        """Listed tiles that one copy may hold."""
        return self.unit // self.spec.tile if self.role == "sparse" else 1

    @property
    def tiles_at_once(self) -> int:
        """Tiles of a whole block whose copies start in one go."""
        per_block = self.block_s // self.unit
        return next(n for n in range(min(TILES_AT_ONCE, per_block), 0, -1) if per_block % n == 0)

    @property
    def banks(self) -> int:
        """Registers of 128 tiles that a row's masses fill."""
        return ceil_div(ceil_div(self.num_keys, self.spec.tile), LANES)


def cut_call(role: str, spec: AttentionSpec, shapes: Shapes, block_s: int, block_heads: int, splits: int) -> Cut:
    """Clip the block sizes to the call."""
    kv_heads, groups = shapes.num_kv_heads, shapes.num_heads // shapes.num_kv_heads
    heads = next(h for h in range(min(block_heads, kv_heads), 0, -1) if kv_heads % h == 0)
    stored = round_up(shapes.num_keys, LANES if shapes.scaled else PACKED)
    pieces = piece = 1
    if role == "dense":
        unit = next(u for u in (128, 64, 32, 16) if stored % u == 0)
        block_s = round_up(min(block_s, stored), unit)
    elif role == "score":  # a block is 2^n tiles, so that its sums never straddle two banks
        unit = next(u for u in (128, 64, 32, 16) if stored % u == 0)
        tiles = max(min(block_s, stored) // spec.tile, 1)
        block_s = max(min(1 << tiles.bit_length() - 1, LANES) * spec.tile, unit)
    else:
        stored = max(stored, spec.tile)
        unit = LANES if (shapes.scaled or shapes.head_dim % LANES) and stored % LANES == 0 else spec.tile
        per_block = max(min(block_s // unit, shapes.capacity), 1)
        block_s = per_block * unit
        piece = round_up(min(shapes.capacity, max(PIECE_IDS // heads, 1)), per_block)
        pieces = ceil_div(shapes.capacity, piece)
    return Cut(
        role=role,
        spec=spec,
        batch=shapes.batch,
        num_keys=shapes.num_keys,
        stored=stored,
        kv_heads=kv_heads,
        groups=groups,
        head_dim=shapes.head_dim,
        heads=heads,
        rows=round_up(groups, SUBLANES),
        block_s=block_s,
        unit=unit,
        splits=1 if role == "score" else splits,
        pieces=pieces,
        piece=piece,
        lanes=shapes.head_dim % LANES != 0 and stored % LANES == 0 and unit == LANES,
        scaled=shapes.scaled,
        exact=shapes.dtype == "float32",
    )


class Ranges(NamedTuple):
    """Run-time scalars: lo and hi [B * K] bound what a row sees; the others are per chain and step, flat.

    first: the step's first block; count: its blocks; before: the chain's blocks before it (the parity picks the
    buffer); every head sees all of blocks [whole_from, whole_to).
    """

    lo: Int32[Array, "..."]
    hi: Int32[Array, "..."]
    first: Int32[Array, "..."]
    count: Int32[Array, "..."]
    before: Int32[Array, "..."]
    whole_from: Int32[Array, "..."]
    whole_to: Int32[Array, "..."]


class Lists(NamedTuple):
    """Units of keys that each row reads, ascending [B, K, C], their number [B, K], and which tiles of them it reads."""

    units: Int32[Array, "B K C"]
    count: Int32[Array, "B K"]
    bits: Int32[Array, "B K C"] | None


def list_units(cut: Cut, selection: Selection) -> Lists:
    """Convert the selection of one row per sequence, several tiles to a unit if need be; no id is outside the cache.

    Ids out of range become the last tile's, so ids may repeat: a unit's bits must not add up to more than its tiles.
    """
    tiles, count = selection.tiles[:, :, 0], selection.count[:, :, 0]
    per_unit = cut.tiles_per_unit
    tiles = jnp.clip(tiles, 0, (cut.stored - 1) // cut.spec.tile)
    if per_unit == 1:
        return Lists(tiles, count, None)
    listed = jnp.arange(tiles.shape[-1], dtype=jnp.int32) < count[..., None]
    unit = tiles // per_unit
    before = jnp.pad(tiles, [(0, 0), (0, 0), (1, 0)], constant_values=-per_unit)[..., :-1]
    fresh, new = listed & (unit != before // per_unit), listed & (tiles != before)
    entry = jnp.where(listed, jnp.cumsum(fresh, axis=-1, dtype=jnp.int32) - 1, tiles.shape[-1])
    sequence, head = (jax.lax.broadcasted_iota(jnp.int32, tiles.shape, d) for d in (0, 1))
    empty = jnp.zeros_like(tiles)
    units = empty.at[sequence, head, entry].max(unit, mode="drop")
    bits = empty.at[sequence, head, entry].add(jnp.where(new, 1 << tiles % per_unit, 0), mode="drop")
    return Lists(units, fresh.sum(-1, dtype=jnp.int32), bits & (1 << per_unit) - 1)


def find_ranges(cut: Cut, positions: Positions, lists: Lists | None) -> Ranges:
    """Find the range that each row sees, in keys or in list positions, and the blocks that hold it."""
    visible = decode_range(cut.spec, positions, cut.num_keys)
    lo, hi = (jnp.broadcast_to(x[:, None], (cut.batch, cut.kv_heads)) for x in visible)
    if lists is not None:
        units, count, _ = lists
        listed = jnp.arange(units.shape[-1], dtype=jnp.int32) < count[..., None]
        lo, hi = (
            jnp.where(listed, jnp.clip(x[..., None] - units * cut.unit, 0, cut.unit), 0).sum(-1, dtype=jnp.int32)
            for x in (lo, hi)
        )
    lo, hi = jnp.where(hi > lo, lo, 0), jnp.where(hi > lo, hi, 0)
    by_group = (cut.batch, cut.kv_heads // cut.heads, cut.heads)
    start = jnp.where(hi > lo, lo, cut.stored).reshape(by_group).min(-1).T // cut.block_s
    stop = (hi.reshape(by_group).max(-1).T + cut.block_s - 1) // cut.block_s  # [groups of heads, B]
    size = (jnp.maximum(stop - start, 0) + cut.splits - 1) // cut.splits
    split = jnp.arange(cut.splits, dtype=jnp.int32)[:, None]
    piece = jnp.arange(cut.pieces, dtype=jnp.int32) * (cut.piece * cut.unit // cut.block_s)
    begin = (start[:, None] + split * size[:, None])[..., None]  # [groups of heads, splits, B, 1]
    end = jnp.minimum(begin + size[:, None, :, None], stop[:, None, :, None])
    if cut.pieces > 1:
        begin, end = jnp.maximum(begin, piece), jnp.minimum(end, piece + cut.piece * cut.unit // cut.block_s)
    count = jnp.maximum(end - begin, 0).reshape(cut.chains, cut.steps)
    before = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    whole_from = (lo.reshape(by_group).max(-1).T + cut.block_s - 1) // cut.block_s
    whole_to = hi.reshape(by_group).min(-1).T // cut.block_s
    whole_from, whole_to = (
        jnp.broadcast_to(x[:, None, :, None], (*x.shape[:1], cut.splits, cut.batch, cut.pieces))
        for x in (whole_from, whole_to)
    )
    return Ranges(*(x.reshape(-1) for x in (lo, hi, begin, count, before, whole_from, whole_to)))


def stream_lists(cut: Cut, lists: Lists) -> Array:
    """Ids [groups of heads, steps, 1, 2 * heads * piece]: each step's piece of its lists, then the next step's.

    With several tiles to a unit, an entry is the unit's id times 256, plus a bit for each of its tiles that is listed.
    In a paged cache it is the page: the unit's index among all sequences' and heads'.
    """
    tiles = lists.units if cut.tiles_per_unit == 1 else lists.units * 256 + lists.bits
    if cut.paged:
        head = jnp.arange(cut.batch * cut.kv_heads, dtype=jnp.int32).reshape(cut.batch, cut.kv_heads, 1)
        tiles = tiles + head * (cut.stored // cut.unit)
    tiles = jnp.pad(tiles, [(0, 0), (0, 0), (0, cut.pieces * cut.piece - tiles.shape[-1])])
    tiles = tiles.reshape(cut.batch, -1, cut.heads, cut.pieces, cut.piece)
    tiles = tiles.transpose(1, 0, 3, 2, 4).reshape(-1, cut.steps, cut.heads * cut.piece)
    return jnp.concatenate([tiles, jnp.roll(tiles, -1, axis=1)], axis=-1)[:, :, None]


def merge(out: Array, lse: Array) -> tuple[Array, Array]:
    """Merge the results of P runs of keys [P, ...]: the mean of `out` with weights exp(lse), and the joint lse."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    top = jnp.where(jnp.isneginf(lse).all(0), 0.0, lse.max(0))
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    safe = jnp.where(total > 0, total, 1.0)
    return (weight[..., None] * out).sum(0) / safe[..., None], jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)


def bytes_copied(cut: Cut, ranges: Ranges, width: int) -> Array:
    """Bytes of K and V that the copies of one call move: every unit that holds a key some row sees, once."""
    start, stop = ranges.lo // cut.unit, (ranges.hi + cut.unit - 1) // cut.unit
    return (stop - start).sum() * (2 * cut.unit * cut.head_dim * width)


def count_blocks(cut: Cut, lo: int, hi: int) -> Counter[str]:
    """How often each named scope of the kernel runs if every row sees [lo, hi)."""
    parts = ("tiles", "head", "run", "tile") if cut.role == "sparse" else ("unit",)
    scopes = [f"{name}_{part}" for name in ("lead", "start", "wait") for part in ("whole", "part", *parts)]
    blanks = () if cut.scaled else ("blank", "blank_head", "blank_unit")
    counts = Counter(dict.fromkeys([*scopes, *blanks], 0))  # list every scope, even those that run 0 times
    first, last = lo // cut.block_s, ceil_div(hi, cut.block_s)
    size = ceil_div(last - first, cut.splits)
    for split in range(cut.splits):
        begin = first + split * size
        for block in range(begin, min(begin + size, last)):
            low, high = (min(max(x - block * cut.block_s, 0), cut.block_s) for x in (lo, hi))
            units, whole = ceil_div(high, cut.unit) - low // cut.unit, (low, high) == (0, cut.block_s)
            cut_units = cut.block_s // cut.unit - max(high // cut.unit - ceil_div(low, cut.unit), 0)
            lead = int(block == begin)  # the first block of a chain is not fetched ahead
            counts.update(block=cut.batch, prefetch=cut.batch - lead, lead_in=lead, units=cut.batch * units)
            for name, times in (("start", cut.batch - lead), ("lead", lead), ("wait", cut.batch)):
                counts[f"{name}_whole" if whole else f"{name}_part"] += times
                if whole and cut.role == "sparse" and name != "wait":
                    counts[f"{name}_tiles"] += times * cut.heads * (cut.block_s // cut.unit // cut.tiles_at_once)
                elif not whole and cut.role == "sparse":
                    runs = 0 if name == "wait" else max(units - (cut.stored % cut.unit > 0), 0) // cut.tiles_at_once
                    singles = units - runs * cut.tiles_at_once
                    found = {"head": 1, "run": runs, "tile": singles}
                    counts.update({f"{name}_{part}": times * cut.heads * n for part, n in found.items()})
                elif not whole:
                    counts[f"{name}_unit"] += times * units
            if not whole and blanks:
                heads = cut.batch * cut.heads
                counts.update(blank=cut.batch, blank_head=heads, blank_unit=heads * cut_units)
    return Counter({name: times * (cut.kv_heads // cut.heads) for name, times in counts.items()})


def count_scopes(cut: Cut, lo: int, hi: int, width: int) -> dict[str, float]:
    """Extend `count_blocks` by scopes run once per sequence and bytes moved (as stored, with lanes H leaves empty)."""
    counts = count_blocks(cut, lo, hi)
    sequences = cut.chains * cut.batch
    lanes = cut.head_dim if cut.lanes else round_up(cut.head_dim, LANES)
    moved = 2 * counts.pop("units") * cut.heads * cut.unit * (lanes + 2 if cut.scaled else lanes * width)
    moved += sequences * cut.heads * cut.rows * 4 * (2 * lanes + LANES)  # q, out and lse
    counts.update(step=cut.chains * cut.steps, begin=sequences, finish=sequences)
    if cut.role == "score":
        banks = ceil_div(ceil_div(hi, cut.spec.tile), LANES) - lo // cut.spec.tile // LANES
        counts.update(one_hot=cut.chains, clear=sequences * cut.banks, mass=sequences * banks)
        moved += sequences * cut.heads * cut.banks * LANES * 4
    if cut.role == "sparse":
        moved += cut.chains // cut.splits * cut.steps * 2 * cut.heads * cut.piece * 4
    return {**counts, "hbm_bytes": moved}
