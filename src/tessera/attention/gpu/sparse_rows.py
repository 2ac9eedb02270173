"""What the two sparse prefill kernels of Hopper share: `gpu.sparse` reads tiles, `gpu.keys` single keys.

They differ in how keys get into shared memory and in how scores are masked (`Source`). A thread block has two compute
warpgroups and one that fetches. The compute warpgroups share the G * query_tile rows (query head, token) of a query
tile, or of a part of it, in one or two 64-row blocks each, and read the same keys. In `gpu.sparse`, if all rows fit in
one 64-row block, head_dim is at most 128 and keys are not int8, each has its own query tile and list instead.

Before the launch, XLA computes which part of each list some row sees, and which part every row sees in full
(`ListBounds`). Tile ids ascend, so each part is one range of the list, and entries that need masks lie between the ends
of the two ranges. A *unit* is the run of keys that one copy moves: a tile, or as much of a tile as fits in one block.

Blocks of keys that every row sees in full run in an unmasked loop that keeps the tensor core busy: it computes the
scores of a block and then the weighted values of the block before, while the scores are turned into weights. Other
blocks, at both ends of a list, run in a masked loop without overlap.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Int32

from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import int8_keys, warpgroup
from tessera.attention.gpu.warpgroup import ROW, ROWS, WARPGROUPS
from tessera.attention.online_softmax import LN_2
from tessera.core.shapes import ceil_div, round_up

SCRATCH_BYTES = 128
"""Bytes of shared memory for reductions across warps. A few suffice, because every row lies in one warp."""
RESERVED_BYTES = 2048
"""Bytes of shared memory for barriers and alignment, an upper bound."""
NEVER = 1 << 30
"""Position greater than every real position."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes."""

    rows: int = 64  # per compute warpgroup: 64 or 128
    block_s: int = 128  # keys per block in shared memory: 64 or 128
    stages: int = 2  # blocks of K, and of V, that shared memory holds per list

    def __post_init__(self):
        if self.rows not in (64, 128):
            raise ValueError(f"rows={self.rows} must be 64 or 128")
        if self.block_s not in (64, 128):
            raise ValueError(f"block_s={self.block_s} must be 64 or 128")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")


class Cut(NamedTuple):
    """Static sizes of a launch."""

    spec: AttentionSpec
    dtype: str
    num_queries: int
    num_keys: int
    groups: int  # G, query heads per KV head
    head_dim: int
    num_tiles: int  # query tiles of the call
    tokens: int  # per query tile, padded to a multiple of 8
    chunk: int  # tokens per copy of q, chosen so that no copy straddles two heads or two 64-row blocks
    chunks: int  # copies that hold the G * tokens rows of a query tile
    lists: int  # query tiles per thread block: 1 or 2
    row_blocks: int  # 64-row blocks per compute warpgroup
    parts: int  # thread blocks that share a query tile and its list
    unit: int  # keys per copy of K or V: a tile, or as much of a tile as fits in one block
    block_s: int
    stages: int  # blocks of K, and of V, that shared memory holds per list
    page: int | None  # positions per page; None if keys are contiguous
    scaled: bool  # keys are int8

    @property
    def units(self) -> int:
        """Copies per block of K (and of V)."""
        return self.block_s // self.unit

    @property
    def block_chunks(self) -> int:
        """Copies per 64-row block of q."""
        return ROWS // self.chunk

    @property
    def smem_bytes(self) -> int:
        """Upper bound on a thread block's shared memory, in bytes."""
        rows = WARPGROUPS * self.row_blocks * ROWS
        blocks = 2 * self.lists * self.block_s
        landing = blocks * self.head_dim if self.scaled else 0
        numbers = (rows + self.stages * blocks) * self.head_dim
        return numbers * jnp.dtype(self.dtype).itemsize + landing + 4 * rows + RESERVED_BYTES


def cut_call(spec: AttentionSpec, shapes: Shapes, config: Config) -> Cut:
    """Compute the sizes of a launch from the call and the block sizes."""
    groups = shapes.num_heads // shapes.num_kv_heads
    tokens = round_up(min(spec.query_tile, shapes.num_queries), warpgroup.LEAST_TOKENS)
    chunk, rows = math.gcd(tokens, ROWS), groups * tokens
    row_blocks = config.rows // ROWS if rows > WARPGROUPS * ROWS else 1
    return Cut(
        spec=spec,
        dtype=shapes.dtype,
        num_queries=shapes.num_queries,
        num_keys=shapes.num_keys,
        groups=groups,
        head_dim=shapes.head_dim,
        num_tiles=ceil_div(shapes.num_queries, spec.query_tile),
        tokens=tokens,
        chunk=chunk,
        chunks=rows // chunk,
        # At head_dim 256, two lists exceed shared memory. Int8 keys are converted for one list at a time.
        lists=2 if rows <= ROWS and shapes.head_dim <= 128 and not shapes.scaled else 1,
        row_blocks=row_blocks,
        parts=ceil_div(rows, WARPGROUPS * row_blocks * ROWS),
        unit=min(spec.tile, config.block_s),
        block_s=config.block_s,
        stages=config.stages,
        page=shapes.page,
        scaled=shapes.scaled,
    )


class ListBounds(NamedTuple):
    """Numbers about one list, computed before the launch. Units are counted along the list."""

    begin: Array  # some row sees units [begin, end); the kernel reads only these
    end: Array
    whole_from: Array  # every row sees units [whole_from, whole_to) in full
    whole_to: Array
    first: Array  # absolute position of the query tile's first row
    rows: Array  # tokens of the query tile that are not padding
    kv_len: Array  # valid keys of the sequence


def bounds_of(selection: Selection, positions: Positions, cut: Cut) -> Int32[Array, "B K I 7"]:
    """Compute every list's `ListBounds`: ids ascend, so a bound is the number of listed units before a position."""
    spec, (tiles, count) = cut.spec, selection
    kv_len, q_len = jnp.minimum(positions.kv_len, cut.num_keys), jnp.minimum(positions.q_len, cut.num_queries)
    listed = jnp.arange(tiles.shape[3]) < count[..., None]
    start = tiles * spec.tile
    block = jnp.arange(tiles.shape[2]) * spec.query_tile
    rows = jnp.clip(q_len[:, None] - block, 0, spec.query_tile)[:, None, :, None]
    first = (positions.q_start[:, None] + block)[:, None, :, None]
    last, kv_len = first + rows - 1, jnp.broadcast_to(kv_len[:, None, None, None], first.shape)
    some_see, all_see = kv_len, kv_len  # some row sees keys before the first limit, every row those before the second
    if spec.causal:
        some_see, all_see = jnp.minimum(kv_len, last + 1), jnp.minimum(kv_len, first + 1)
    some_see = jnp.where(rows > 0, some_see, 0)
    window = NEVER if spec.window is None else spec.window

    def units(keys):
        """Count the listed units that lie wholly before a position; `keys` is that position minus each tile's start."""
        return jnp.sum(jnp.where(listed, jnp.clip(keys // cut.unit, 0, spec.tile // cut.unit), 0), -1)

    numbers = ListBounds(
        begin=units(first - window + 1 - start),
        end=units(some_see - start + cut.unit - 1),
        whole_from=units(last - window + 1 - start + cut.unit - 1),
        whole_to=units(all_see - start),
        first=first[..., 0],
        rows=rows[..., 0],
        kv_len=kv_len[..., 0],
    )
    return jnp.stack([jnp.broadcast_to(x, count.shape) for x in numbers], -1)


class Refs(NamedTuple):
    """References of the kernel body: arrays in global memory, then shared memory and barriers."""

    bounds: Array  # [B, K, I, 7]: `ListBounds`
    tiles: Array  # [B, K, I, C]
    q: Array  # [B, I * tokens, N, H]
    k: Array  # [B, K, S, H]
    v: Array
    scales: Array | None  # [B, K, 2, S]; int8 only
    pages: Array | None  # [B, J]; only if k, v and scales are pools of pages
    out: Array  # like q
    lse: Array  # [B, N, I * tokens], natural log
    q_smem: Array  # [row blocks, 64, H]: q and, at the end, out
    k_smem: Array  # [lists * stages, block_s, H]
    v_smem: Array
    lse_smem: Array  # [row blocks, 64]
    q_full: Array  # barrier [2], one per compute warpgroup
    k_full: Array  # barrier [lists * stages]
    v_full: Array  # likewise, and one more per list (see `gpu.sparse.unseen`)
    k_free: Array  # barrier [lists * stages]: the list's compute warpgroups have read the block
    v_free: Array
    ids: Array | None = None  # positions of the keys in shared memory; `gpu.keys` only
    landing: Array | None = None  # [2, block_s, H]: a block of K and one of V as int8; int8 only, as `landed`
    landed: Array | None = None


class Item(NamedTuple):
    """Work of a warpgroup."""

    b: Array  # sequence
    h: Array  # KV head
    i: Array  # query tile
    part: Array  # of the query tile's rows
    live: Array  # whether there is such a query tile
    lane: Array | int  # number of the list in the thread block, 0 or 1

    def slot(self, c: Array, cut: Cut) -> Array:
        return jax.lax.rem(c, cut.stages) + self.lane * cut.stages


def read_item(lane: Array | int, cut: Cut) -> Item:
    b, h, at = (jax.lax.axis_index(name) for name in ("batch", "head", "rows"))
    # Lists grow along a causal sequence: run the longest first, so that short ones fill the gaps at the end.
    at = jax.lax.axis_size("rows") - 1 - at
    i = jax.lax.div(at, cut.parts) * cut.lists + lane
    return Item(b, h, jnp.minimum(i, cut.num_tiles - 1), jax.lax.rem(at, cut.parts), i < cut.num_tiles, lane)


def read(refs: Refs, item: Item, name: str) -> Array:
    # Read where it is used: cheaper than keeping the number in the registers of every thread.
    return refs.bounds[item.b, item.h, item.i, ListBounds._fields.index(name)]


def blocks_of(refs: Refs, item: Item, cut: Cut) -> tuple[Array, Array, Array]:
    """Return (head, whole, stop): every row sees blocks [head, whole) of the list in full; the list has stop blocks."""
    begin, end, whole_from, whole_to = (read(refs, item, name) for name in ListBounds._fields[:4])
    end = jnp.where(item.live, end, begin)
    stop, head = (jax.lax.div(jnp.maximum(x - begin, 0) + cut.units - 1, cut.units) for x in (end, whole_from))
    head = jnp.minimum(head, stop)
    return head, jnp.clip(jax.lax.div(jnp.maximum(whole_to - begin, 0), cut.units), head, stop), stop


def chunk_of(item: Item, row_block: Array, n: int, cut: Cut) -> tuple[Array, Array, Array]:
    """Return whether the n-th chunk of a 64-row block holds rows, its query head, and its first token in the tile."""
    at = row_block * cut.block_chunks + n
    live, at = item.live & (at < cut.chunks), jnp.minimum(at, cut.chunks - 1)
    per_head = cut.tokens // cut.chunk
    return live, item.h * cut.groups + jax.lax.div(at, per_head), jax.lax.rem(at, per_head) * cut.chunk


def token_of(row_block: Array, cut: Cut) -> Int32[Array, "64"]:
    """Return the token, counted within the query tile, of every row of a 64-row block."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    return jax.lax.rem(row + row_block * ROWS, cut.tokens)


def compute(refs: Refs, wg: Array, hide: Callable, cut: Cut) -> None:
    """Run a compute warpgroup: absorb every block of the list for its rows, then write `out` and `lse`."""
    plgpu.set_max_registers(
        int8_keys.COMPUTE_REGISTERS if cut.scaled else warpgroup.LIST_COMPUTE_REGISTERS, action="increase"
    )
    item = read_item(wg if cut.lists == 2 else 0, cut)
    mine = [wg * cut.row_blocks + r for r in range(cut.row_blocks)]
    first_block = item.part * (WARPGROUPS * cut.row_blocks) + (0 if cut.lists == 2 else mine[0])
    for r in range(cut.row_blocks):
        for n in range(cut.block_chunks):
            _, head, token = chunk_of(item, first_block + r, n, cut)
            source = refs.q.at[item.b, pl.ds(item.i * cut.tokens + token, cut.chunk), head]
            target = refs.q_smem.at[mine[r], pl.ds(n * cut.chunk, cut.chunk)]
            plgpu.copy_gmem_to_smem(source, target, refs.q_full.at[wg])
    plgpu.barrier_wait(refs.q_full.at[wg])  # counts the copies of all chunks, of all row blocks

    rows = Rows(refs, item, first_block, mine, hide, cut)
    head, whole, stop = blocks_of(refs, item, cut)
    states = (warpgroup.initial_state(cut.head_dim),) * cut.row_blocks
    if cut.spec.window is not None:
        states = jax.lax.fori_loop(0, head, rows.masked, states)
    some = (whole > head).astype(jnp.int32)
    states = jax.lax.fori_loop(0, some, lambda _, states: rows.unmasked(head, whole, states), states)
    states = jax.lax.fori_loop(whole, stop, rows.masked, states)
    # Always 0, unknown to the compiler, which would otherwise keep all chunks' addresses in registers since q's copies.
    zero = jnp.minimum(read(refs, item, "rows"), 0)
    for r, state in enumerate(states):
        write(refs, item, mine[r] + zero, first_block + r + zero, state, cut)
    plgpu.wait_smem_to_gmem(0)  # a thread block's shared memory is gone once it ends


class Rows(NamedTuple):
    """64-row blocks of a compute warpgroup, with methods that update their online-softmax states (m, l, acc)."""

    refs: Refs
    item: Item
    first_block: Array  # number of the first 64-row block within the query tile
    mine: list  # the blocks' indices in shared memory
    hide: Callable
    cut: Cut

    def masked(self, c: Array, states: tuple) -> tuple:
        """Absorb block c of the list with the mask; a row may see no key of the block."""
        refs, cut = self.refs, self.cut
        slot, states = self.item.slot(c, cut), list(states)
        plgpu.barrier_wait(refs.k_full.at[slot])
        plgpu.barrier_wait(refs.v_full.at[slot])  # once for all row blocks: each wait takes one phase of the barrier
        # Always 0, unknown to the compiler: values that depend on it are computed when used, not held in registers.
        zero = jnp.minimum(c, 0)
        for r, (m, l, acc) in enumerate(states):  # noqa: E741
            s = warpgroup.scores(refs.q_smem.at[self.mine[r] + zero], refs.k_smem.at[slot])
            hide = functools.partial(
                self.hide, block=c, row_block=self.first_block + r + zero, refs=refs, item=self.item, cut=cut
            )
            m, l, alpha, p = weigh(s, m, l, cut, hide)  # noqa: E741
            acc = warpgroup.accumulate(acc * warpgroup.per_row(alpha, acc), p.astype(cut.dtype), refs.v_smem.at[slot])
            states[r] = (m, l, acc)
        # Only now: every row block reads the same keys, so the stage is free after the last one's products.
        plgpu.barrier_arrive(refs.k_free.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return tuple(states)

    def unmasked(self, first: Array, stop: Array, states: tuple) -> tuple:
        """Absorb blocks [first, stop) of the list, at least one, which every row sees in full.

        A round is one block of keys and one 64-row block. The tensor core computes the scores of a round and then the
        weighted values of the round before, while the vector units turn the scores into weights.
        """
        cut = self.cut
        carry = self.rounds(first, list(states), None)
        states, p = jax.lax.fori_loop(first + 1, stop, lambda c, carry: self.rounds(c, list(carry[0]), carry[1]), carry)
        (m, l, acc), slot = states[-1], self.item.slot(stop - 1, cut)  # noqa: E741
        if cut.row_blocks == 1:  # otherwise `rounds` has waited, for row block 0
            plgpu.barrier_wait(self.refs.v_full.at[slot])
        acc = warpgroup.accumulate(acc, p, self.refs.v_smem.at[slot])
        plgpu.barrier_arrive(self.refs.v_free.at[slot])
        return (*states[:-1], (m, l, acc))

    def rounds(self, c: Array, states: list, p: Array | None) -> tuple[tuple, Array]:
        """Run block c's rounds with the weights p of the round before; return new states and the last weights."""
        cut, refs = self.cut, self.refs
        slot, last = self.item.slot(c, cut), cut.row_blocks - 1
        plgpu.barrier_wait(refs.k_full.at[slot])
        for r in range(cut.row_blocks):

            def weights(s, r=r):
                if r == last:  # `weights` runs once the scores are there: no row block still needs the keys
                    plgpu.barrier_arrive(refs.k_free.at[slot])
                return weigh(s, *states[r][:2], cut)

            q_smem, k_smem = refs.q_smem.at[self.mine[r] + jnp.minimum(c, 0)], refs.k_smem.at[slot]
            if p is None:
                m, l, alpha, weight = weights(warpgroup.scores(q_smem, k_smem))  # noqa: E741
            else:
                before, v_slot = (r - 1, slot) if r else (last, self.item.slot(c - 1, cut))
                if before == 0:  # the first row block to multiply these values waits for them, on behalf of all
                    plgpu.barrier_wait(refs.v_full.at[v_slot])
                acc, (m, l, alpha, weight) = warpgroup.both_products(  # noqa: E741
                    q_smem, k_smem, states[before][2], p, refs.v_smem.at[v_slot], weights
                )
                states[before] = (*states[before][:2], acc)
                if before == last:
                    plgpu.barrier_arrive(refs.v_free.at[v_slot])
            acc = states[r][2]
            states[r] = (m, l, acc * warpgroup.per_row(alpha, acc))
            # Round only now: until here the tensor core reads the registers that receive the rounded weights.
            p = jax.lax.optimization_barrier(weight.astype(cut.dtype))
        return tuple(states), p


def weigh(s: Array, m: Array, l: Array, cut: Cut, hide: Callable | None = None) -> tuple:  # noqa: E741
    """Run a softmax update with scores s: return the new m, the new l, the factor on acc, and the weights."""
    new_m, alpha, p = warpgroup.weigh(s, m, cut.spec, cut.head_dim, hide)
    return new_m, l * alpha + p.sum(1), alpha, p


def write(refs: Refs, item: Item, mine: Array, row_block: Array, state: tuple, cut: Cut) -> None:
    """Write out = acc / l and lse = m ln 2 + ln l of a 64-row block; 0 and -inf for padding and rows without keys."""
    m, l, acc = state  # noqa: E741
    seen = (l > 0) & (token_of(row_block, cut) < read(refs, item, "rows"))
    inverse = jnp.where(seen, 1.0 / l, 0.0)
    out = jnp.where(warpgroup.per_row(inverse, acc) > 0, acc * warpgroup.per_row(inverse, acc), 0.0)
    out_smem, lse_smem = refs.q_smem.at[mine], refs.lse_smem.at[mine]
    out_smem[...] = out.astype(cut.dtype)
    lse_smem[...] = jnp.where(seen, m * LN_2 + jnp.log(l), -jnp.inf)
    plgpu.commit_smem()  # the copies below read through the async proxy, which sees threads' writes only after a fence
    for n in range(cut.block_chunks):
        live, head, first = chunk_of(item, row_block, n, cut)

        @pl.when(live)
        def store(n=n, head=head, first=first):
            rows, tokens = pl.ds(n * cut.chunk, cut.chunk), pl.ds(item.i * cut.tokens + first, cut.chunk)
            plgpu.copy_smem_to_gmem(out_smem.at[rows], refs.out.at[item.b, tokens, head])
            plgpu.copy_smem_to_gmem(lse_smem.at[rows], refs.lse.at[item.b, head, tokens])


class Source(NamedTuple):
    """Differences between the kernels that use this module: how keys reach shared memory, and how scores are masked."""

    name: str  # name of the kernel
    fetch: Callable  # (refs, items, cut) -> None, run by the fetching warpgroup: fills all blocks of the items' lists
    hide: Callable  # (s, block, row_block, refs, item, cut) -> scores, -inf where a row does not see a key
    arrivals: int  # arrivals at the barrier of a block of K (and of V) that complete the block
    scratch: Mapping[str, Any] = MappingProxyType({})  # by name, for the optional last fields of `Refs`


def body(*refs, source: Source, cut: Cut):
    """Run one thread block: two warpgroups compute, the third fetches."""
    optional = {"scales": cut.scaled, "pages": cut.page is not None}
    absent = [name for name, held in optional.items() if not held]
    names = [name for name in Refs._fields if name not in (*absent, *Refs._field_defaults)] + list(source.scratch)
    refs = Refs(**dict.fromkeys(absent), **dict(zip(names, refs, strict=True)))
    wg = jax.lax.axis_index("warpgroup")

    @pl.when(wg < WARPGROUPS)
    def compute_rows():
        compute(refs, wg, source.hide, cut)

    @pl.when(wg == WARPGROUPS)
    def fetch_keys():
        plgpu.set_max_registers(
            int8_keys.FETCH_REGISTERS if cut.scaled else warpgroup.LIST_FETCH_REGISTERS, action="decrease"
        )
        source.fetch(refs, [read_item(lane, cut) for lane in range(cut.lists)], cut)


def whole_tiles(q: Array, cut: Cut) -> Array:
    """Pad each query tile of q [B,T,N,H] to cut.tokens tokens, so that TMA can address it."""
    query_tile, (batch, num_queries, *row) = cut.spec.query_tile, q.shape
    if cut.num_tiles == 1 or cut.tokens == query_tile:
        return warpgroup.whole_lines(q, 1)
    q = jnp.pad(q, ((0, 0), (0, cut.num_tiles * query_tile - num_queries), (0, 0), (0, 0)))
    q = q.reshape(batch, cut.num_tiles, query_tile, *row)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, cut.tokens - query_tile), (0, 0), (0, 0)))
    return q.reshape(batch, cut.num_tiles * cut.tokens, *row)


def launch(q, kv: KeyValues, positions: Positions, selection: Selection, cut: Cut, source: Source) -> AttentionOut:
    """Run the whole call: plan every list, then launch one kernel."""
    batch, num_queries, num_heads, head_dim = q.shape
    length, query_tile = cut.num_tiles * cut.tokens, cut.spec.query_tile
    line, slots, row_blocks = warpgroup.swizzled(q.dtype), cut.lists * cut.stages, WARPGROUPS * cut.row_blocks
    keys = plgpu.SMEM((slots, cut.block_s, head_dim), q.dtype, transforms=line)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS // cut.lists, num_barriers=slots)
    out, lse = plgpu.kernel(
        functools.partial(body, source=source, cut=cut),
        out_type=[
            jax.ShapeDtypeStruct((batch, length, num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((row_blocks, ROWS, head_dim), q.dtype, transforms=line),
            keys,
            keys,
            plgpu.SMEM((row_blocks, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=cut.row_blocks * cut.block_chunks, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=slots),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=slots + cut.lists),
            free,
            free,
            *source.scratch.values(),
        ],
        grid=(batch, selection.tiles.shape[1], ceil_div(cut.num_tiles, cut.lists) * cut.parts),
        grid_names=("batch", "head", "rows"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=SCRATCH_BYTES,
        ),
        kernel_name=source.name,
    )(
        bounds_of(selection, positions, cut),
        selection.tiles,
        whole_tiles(q, cut),
        *(x for x in (kv.k, kv.v, kv.scales, kv.pages) if x is not None),
    )
    if cut.tokens != query_tile and cut.num_tiles > 1:  # undo whole_tiles
        out = out.reshape(batch, cut.num_tiles, cut.tokens, num_heads, head_dim)[:, :, :query_tile]
        out = out.reshape(batch, -1, num_heads, head_dim)
        lse = lse.reshape(batch, num_heads, cut.num_tiles, cut.tokens)[..., :query_tile]
        lse = lse.reshape(batch, num_heads, -1)
    return AttentionOut(out[:, :num_queries], jnp.swapaxes(lse, 1, 2)[:, :num_queries])
