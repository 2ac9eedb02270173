"""Sparse prefill attention for TPU: each query tile reads only its listed key tiles, in place.

A grid step computes a few row blocks; a row block is a query tile (or part of one) times the G heads of one KV head. K
and V stay in HBM. Each row block's listed tiles are copied end to end into one of two buffers of block_s keys, while
the other buffer is computed on. The last buffer of a grid step overlaps with the first copies of the next step, so the
lists are read one step ahead. Lists pass through SMEM one grid step at a time, so only the longest list (at most about
64,000 tiles) has to fit; if lists are long, a grid step takes fewer row blocks.

Tile ids ascend, so a mask can cut tiles only at the ends of a list: the window's edge at the start; the diagonal,
kv_len and the end of the list itself at the end. For a buffer of uncut tiles, straight-line code runs block_s / chunk
online-softmax updates. In any other buffer, masked updates of mask_s keys each cover the listed tiles. Ids past count
have no effect.

Int8 tiles are converted to the queries' dtype in VMEM. Scores are in bits: q is multiplied by scale * log2(e). Where
the matrix unit has idle columns, the row sum comes from ones appended to V. Work: 4 H flops per (row, listed key) pair.
HBM traffic: 2 H elements per (row block, listed key).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention import work
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import distinct, family
from tessera.attention.online_softmax import FLOOR, LN_2, LOG2_E, query_factor
from tessera.attention.tpu import pages, sparse_tiles
from tessera.attention.tpu.matrix_unit import chip, dot, estimate, widen
from tessera.attention.tpu.prefill_rows import Rows, weigh
from tessera.attention.tpu.sparse_tiles import LANES, NEVER, PACKED, SMEM_BYTES, Cut, Item, Next, Refs, cut_call
from tessera.core.shapes import ceil_div

DTYPES = ("float32", "bfloat16")
VMEM_BYTES = 56 << 20
"""Bytes of VMEM that the kernel may use; a v5p or v7x core has 64 MiB."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes and where the row sum is computed; numbers of keys mean whole tiles, at least one."""

    rows: int  # maximum rows (tokens x G) of a row block; a larger query tile is cut into parts that share the list
    step_rows: int  # rows per grid step, which takes up to four query tiles and computes them together
    block_s: int  # keys per buffer
    chunk: int  # keys per unmasked online-softmax update, clipped to block_s
    mask_s: int  # keys per masked update
    matrix_sums: bool = True  # whether row sums come from ones appended to V: free if the matrix unit has idle columns
    half_exp: bool = False  # see `prefill_blocks.Config`

    def __post_init__(self):
        for name in ("rows", "step_rows", "block_s", "chunk", "mask_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def load(refs: Refs, p: int) -> Rows:
    return Rows(refs.m[p], refs.acc[p], None if refs.sums is None else refs.sums[p])


def store(refs: Refs, p: int, state: Rows) -> None:
    refs.m[p], refs.acc[p] = state.m, state.acc
    if refs.sums is not None:
        refs.sums[p] = state.sums


def absorb(state: Rows, q: Array, k: Array, v: Array, cut: Cut, mask: Array | None = None) -> Rows:
    """Add keys k and values v [X,H] to the state; mask [R,X] is false where a row does not see a key."""
    s = dot(q, k, 1)
    if cut.spec.softcap:
        s = jnp.tanh(s) * (cut.spec.softcap * LOG2_E)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    m = jnp.maximum(state.m, jnp.broadcast_to(s.max(-1, keepdims=True), state.m.shape))
    alpha = jnp.exp2(state.m - m)
    p = weigh(s - widen(m, s.shape[1]), cut.half_exp)
    if cut.ones:
        v = jnp.concatenate([v, jnp.ones((v.shape[0], cut.ones), v.dtype)], 1)
    acc = state.acc * widen(alpha, state.acc.shape[1]) + dot(p.astype(v.dtype), v, 0)
    if state.sums is None:
        return Rows(m, acc, None)
    sums = state.sums * alpha
    for at in range(0, p.shape[1], LANES):  # sums per lane take one addition per register; `write` adds the lanes
        part = p[:, at : at + LANES].astype(jnp.float32)
        sums = sums + (part if part.shape[1] == LANES else jnp.pad(part, ((0, 0), (0, LANES - part.shape[1]))))
    return Rows(m, acc, sums)


def masked_update(refs: Refs, p: int, begin: Array, u: Array, slot: int, item: Item, cut: Cut) -> Rows:
    """Absorb run u (mask_tiles tiles, u from 0) of row block p's buffer, whose first tile is list entry `begin`."""
    spec, keys = cut.spec, cut.mask_tiles * cut.spec.tile
    position = sparse_tiles.key_positions(refs, p, begin + u * cut.mask_tiles, item, cut)
    if spec.causal:  # `position` is NEVER for hidden keys, which is after every row
        row = jax.lax.broadcasted_iota(jnp.int32, (cut.groups, cut.block_t, keys), 1).reshape(cut.rows, keys)
        row = row + item.first
        mask = position <= row
        if spec.window is not None:
            mask = mask & (position > row - spec.window)
    else:
        mask = jnp.broadcast_to(position < NEVER, (cut.rows, keys))
    at = pl.ds(pl.multiple_of(u * keys, PACKED), keys)
    k, v = refs.keys(p, at, slot)
    return absorb(load(refs, p), refs.q_scaled[p], k, v, cut, mask)


def body(q_start, kv_len, q_len, *refs, cut: Cut):
    """Run grid step (b, h, i): the i-th group of row blocks of KV head h."""
    refs = refs if cut.scaled else (*refs[:5], None, *refs[5:-2], None, None, *refs[-2:])
    refs = refs if cut.page else (*refs[:6], None, *refs[6:])
    refs = Refs(*refs) if not cut.ones else Refs(*refs[:12], None, *refs[12:])
    positions, step = Positions(q_start, kv_len, q_len), pl.program_id(2)
    items = [sparse_tiles.read_item(refs.lists, p, step, positions, cut) for p in range(cut.items)]
    ahead = [sparse_tiles.read_item(refs.ahead, p, step + 1, positions, cut) for p in range(cut.items)]

    # Only the first grid step of a head waits for its first buffers; every later step finds them on their way.
    @pl.when(step == 0)
    def first():
        refs.turn[0] = 0
        counts = [jnp.minimum(item.count, cut.block_tiles) for item in items]
        sparse_tiles.fetch_from(refs, 0, Next(0, jnp.int32(0), counts, jnp.bool_(True)), "fetch_first", cut)

    for p in range(cut.items):
        take_queries(refs, p, cut)
    refs.m[...] = jnp.full_like(refs.m, FLOOR)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    if refs.sums is not None:
        refs.sums[...] = jnp.zeros_like(refs.sums)
    turn = refs.turn[0]
    longest = functools.reduce(jnp.maximum, [item.count for item in items])
    # At least one turn, even if all lists are empty: the turn's copies feed the next grid step.
    buffers = jnp.maximum((longest + cut.block_tiles - 1) // cut.block_tiles, 1)

    def buffer_step(c, _):
        with jax.named_scope("buffer"):
            own = c + 1 < buffers
            buffer = jnp.where(own, c + 1, 0)
            counts = [jnp.where(own, i.count, a.count) for i, a in zip(items, ahead, strict=True)]
            counts = [jnp.clip(n - buffer * cut.block_tiles, 0, cut.block_tiles) for n in counts]
            for slot in (0, 1):  # the two buffers are separate arrays (see `Refs.tiles`), so each needs separate code

                @pl.when((turn + c) % 2 == slot)
                def either(slot=slot):
                    with jax.named_scope("turn"):
                        absorb_buffer(refs, items, c, slot, Next(1 - slot, buffer, counts, own), cut)

    jax.lax.fori_loop(0, buffers, buffer_step, None)
    refs.turn[0] = (turn + buffers) % 2
    for p in range(cut.items):
        write(refs, p, items[p], cut)


def absorb_buffer(refs: Refs, items: list[Item], c: Array, slot: int, target: Next, cut: Cut) -> None:
    """Run the row blocks of a grid step against their c-th buffers, which are in `slot`, while `target` is fetched."""
    begin, row_blocks = c * cut.block_tiles, range(cut.items)
    held = [jnp.clip(item.count - begin, 0, cut.block_tiles) for item in items]
    for p in row_blocks:
        sparse_tiles.wait(refs, p, held[p], slot, cut)
    # All row blocks of the grid step take the same path, so that their latencies overlap.
    whole = [(item.whole_from <= begin) & (begin + cut.block_tiles <= item.whole) for item in items]
    whole = functools.reduce(jnp.logical_and, whole)

    @pl.when(whole)
    def unmasked():
        with jax.named_scope("full"):
            for j in range(cut.block_tiles):  # straight-line code, so that starting copies overlaps with the products
                for p in row_blocks:
                    sparse_tiles.fetch(refs, p, j, target, cut)
            states = [load(refs, p) for p in row_blocks]
            keys = cut.chunk_tiles * cut.spec.tile
            for at in range(0, cut.block_tiles * cut.spec.tile, keys):
                for p in row_blocks:
                    k, v = refs.keys(p, slice(at, at + keys), slot)
                    states[p] = absorb(states[p], refs.q_scaled[p], k, v, cut)
            for p in row_blocks:  # only now: the states stay values while the row blocks' updates interleave
                store(refs, p, states[p])

    @pl.when(~whole)
    def masked():
        with jax.named_scope("masked"):
            updates = (functools.reduce(jnp.maximum, held) + cut.mask_tiles - 1) // cut.mask_tiles
            # Updates run up to the end of the longest list: shorter lists meet stale tiles, whose values are zeroed.
            for p in row_blocks:
                sparse_tiles.clear_values(refs, p, c, held[p], updates * cut.mask_tiles, slot, items[p], cut)

            def update(u, _):
                with jax.named_scope("update"):
                    sparse_tiles.fetch_run(
                        refs, u, target, cut
                    )  # a share of the copies per update, so that both overlap
                    states = [masked_update(refs, p, begin, u, slot, items[p], cut) for p in row_blocks]
                    for p in row_blocks:
                        store(refs, p, states[p])

            jax.lax.fori_loop(0, updates, update, None)
            sparse_tiles.fetch_from(refs, updates, target, "fetch_rest", cut)


def take_queries(refs: Refs, p: int, cut: Cut) -> None:
    """Scale the queries of row block p into VMEM as rows [G, block_t]."""
    factor = query_factor(cut.spec, cut.head_dim)
    tokens = slice(p * cut.block_t, (p + 1) * cut.block_t)
    for g in range(cut.groups):
        x = (refs.q[0, g, tokens].astype(jnp.float32) * factor).astype(refs.q_scaled.dtype)
        refs.q_scaled[p, g * cut.block_t : (g + 1) * cut.block_t] = x


def write(refs: Refs, p: int, item: Item, cut: Cut) -> None:
    """Write out = acc / l and lse = ln 2 (m + log2 l); 0 and -inf for padding rows and rows that saw no key."""
    m, acc, first = refs.m[p], refs.acc[p], item.block * cut.tokens
    if cut.ones:
        l = acc[:, cut.head_dim :] if cut.ones == LANES else acc[:, cut.head_dim : cut.head_dim + 1]  # noqa: E741
    else:
        l = refs.sums[p].sum(-1, keepdims=True)  # noqa: E741
    l = jnp.broadcast_to(l, m.shape)  # noqa: E741
    token = jax.lax.broadcasted_iota(jnp.int32, (cut.groups, cut.block_t, LANES), 1).reshape(m.shape)
    seen = (l > 0) & (token < item.q_len - first)
    inverse = jnp.where(seen, 1.0 / l, 0.0)
    out = jnp.where(widen(seen, cut.head_dim), acc[:, : cut.head_dim] * widen(inverse, cut.head_dim), 0.0)
    out = out.astype(refs.out.dtype)
    tokens = slice(p * cut.block_t, (p + 1) * cut.block_t)
    for g in range(cut.groups):
        mine = out[g * cut.block_t : (g + 1) * cut.block_t]
        if cut.flat:
            refs.out[0, tokens, g * cut.head_dim : (g + 1) * cut.head_dim] = mine
        else:
            refs.out[0, g, tokens] = mine
    # All lanes of m and l are equal: one transposition turns both into lanes, and log2 then fills whole registers.
    lane = jax.lax.broadcasted_iota(jnp.int32, m.shape, 1)
    columns = jnp.where(lane == 0, m, jnp.where(seen, l, 0.0)).T
    m, l = columns[:1], columns[1:2]  # noqa: E741
    refs.lse[0, 0, p] = jnp.where(l > 0, (m + jnp.log2(l)) * LN_2, -jnp.inf)


def launch(
    q, kv: KeyValues, spec: AttentionSpec, positions: Positions, selection: Selection, config: Config
) -> AttentionOut:
    """Run attention over the listed tiles only; not differentiable."""
    batch, num_queries, num_heads, head_dim = q.shape
    shapes, (k, v) = kv.shapes(q, selection), kv[:2]
    kv_heads = shapes.num_kv_heads
    cut = cut_call(spec, shapes, config)
    lengths = jnp.minimum(positions.kv_len, shapes.num_keys), jnp.minimum(positions.q_len, num_queries)
    positions = Positions(positions.q_start, *lengths)  # clip: padding must not count as valid keys or rows
    if cut.page is None and cut.num_keys > k.shape[2]:  # pad S to a multiple of 16, where copies must start
        k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, cut.num_keys - x.shape[2]), (0, 0)]) for x in (k, v))
    scales = (kv.scales,) * cut.scaled
    if cut.scaled and cut.page is None:
        scales = (jnp.pad(kv.scales, [(0, 0), (0, 0), (0, 0), (0, cut.num_keys - shapes.num_keys)]),)
    lists = sparse_tiles.pack_lists(selection, cut)
    tables = () if cut.page is None else (pages.clipped(kv.pages, k)[:, None],)

    length = cut.num_blocks * cut.block_t
    padded = cut.tokens != cut.block_t
    if padded:  # pad each query tile to a multiple of 16 tokens
        q = jnp.pad(q, [(0, 0), (0, cut.num_blocks * cut.tokens - num_queries), (0, 0), (0, 0)])
        q = q.reshape(batch, cut.num_blocks, cut.tokens, num_heads, head_dim)
        q = jnp.pad(q, [(0, 0), (0, 0), (0, cut.block_t - cut.tokens), (0, 0), (0, 0)])
        q = q.reshape(batch, length, num_heads, head_dim)
    elif num_queries < cut.items * cut.block_t:
        q = jnp.pad(q, [(0, 0), (0, cut.items * cut.block_t - num_queries), (0, 0), (0, 0)])
    q = jnp.swapaxes(q, 1, 2)

    num_steps = ceil_div(cut.num_blocks, cut.items)
    # The grid's pipeline moves only queries and results. K and V stay in HBM, from which the body copies listed tiles.
    row = pl.BlockSpec((1, cut.groups, cut.items * cut.block_t, head_dim), lambda b, h, i, *_: (b, h, i, 0))
    out, out_shape = row, q.shape
    if cut.flat:  # write [B,T,N*H], the layout that the model's output projection reads
        out_shape = (batch, q.shape[2], num_heads * head_dim)
        out = pl.BlockSpec((1, cut.items * cut.block_t, cut.groups * head_dim), lambda b, h, i, *_: (b, i, h))

    # The kernel gets the lists twice: of its own grid step, and of the next, whose first tiles it starts to copy.
    def listed(ahead: int) -> pl.BlockSpec:
        shape = (1, 1, cut.items, 1, lists.shape[-1])
        return pl.BlockSpec(
            shape,
            lambda b, h, i, *_: (b, h, jnp.minimum(i + ahead, num_steps - 1) // cut.parts, 0, 0),
            memory_space=pltpu.SMEM,
        )

    rows = (cut.items, cut.rows)
    state = [(*rows, LANES), (*rows, head_dim + cut.ones), *([] if cut.ones else [(*rows, LANES)])]
    block_s = cut.block_tiles * spec.tile
    tiles = pltpu.VMEM((cut.items, block_s, head_dim), k.dtype)
    in_lanes = pltpu.VMEM((cut.items, 2, block_s), jnp.bfloat16)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    out, lse = pl.pallas_call(
        functools.partial(body, cut=cut),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, num_steps),
            in_specs=[listed(0), listed(1), row, *[in_hbm] * (2 + cut.scaled), *map(pages.table_spec, tables)],
            out_specs=[out, pl.BlockSpec((1, 1, cut.items, 1, cut.rows), lambda b, h, i, *_: (b, h, i, 0, 0))],
            scratch_shapes=[
                pltpu.VMEM((*rows, head_dim), q.dtype),
                *(pltpu.VMEM(shape, jnp.float32) for shape in state),
                *[tiles] * 4,
                *[in_lanes] * (2 * cut.scaled),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out_shape, q.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, cut.num_blocks, 1, cut.rows), jnp.float32),
        ],
        # A step fetches for the next step, so a head's row blocks must run in order on one core; heads are independent.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,  # tile ids are clipped already; a check costs 7 instruction bundles per copy
        ),
        cost_estimate=estimate(work.sparse_prefill(spec, shapes), head_dim),
        name="tpu_sparse_prefill",
    )(*positions, lists, lists, q, k, v, *scales, *tables)

    out = out.reshape(*out.shape[:2], num_heads, head_dim) if cut.flat else jnp.swapaxes(out, 1, 2)
    lse = lse.reshape(batch, kv_heads, cut.num_blocks, cut.groups, cut.block_t)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(batch, length, num_heads)
    if padded:
        out, lse = (x.reshape(batch, cut.num_blocks, cut.block_t, *x.shape[2:])[:, :, : cut.tokens] for x in (out, lse))
        out, lse = (x.reshape(batch, -1, *x.shape[3:]) for x in (out, lse))
    return AttentionOut(out[:, :num_queries], lse[:, :num_queries])


def supports(spec: AttentionSpec, shapes: Shapes) -> str | None:
    if spec.tile < PACKED:
        return f"tile={spec.tile} must be at least {PACKED}: a copy moves whole packed registers"
    if shapes.scaled and spec.tile != LANES:
        return f"tile={spec.tile} must be {LANES} with int8 keys: one copy moves that many scales"
    if shapes.head_dim > 256:
        return f"head_dim={shapes.head_dim} must be at most 256"
    scale = 1.0 if spec.scale is None else spec.scale
    if not scale > 0:
        return f"scale={scale} must be positive"
    needed = sparse_tiles.list_bytes(shapes.capacity, cut_call(spec, shapes, default_config(spec, shapes)).block_tiles)
    room = SMEM_BYTES - pages.table_bytes(shapes)
    if needed > room:
        return f"capacity={shapes.capacity} is too large: a list takes {needed} bytes of SMEM, which has {room} free"
    return pages.refusal(shapes, in_rows=True)


def default_config(spec: AttentionSpec, shapes: Shapes) -> Config:
    """Choose block sizes with enough independent work to hide the latency of a softmax update (schedules in LOG.md).

    One update per buffer gives the fewest dependent steps, but on v7x, whose registers spill sooner, short updates are
    faster. In float32, a product takes six passes of the matrix unit, so the block sizes matter little.
    """
    wide, newest = chip().columns >= 2 * LANES, chip().generation >= 7
    sums = shapes.head_dim % LANES != 0 or (wide and shapes.head_dim == LANES)
    if shapes.dtype == "float32":
        return Config(rows=512, step_rows=512, block_s=1024, chunk=512, mask_s=512, matrix_sums=sums)
    block_s = 2048 if shapes.capacity * spec.tile >= 3072 else 1024  # a short list should still fill a buffer
    chunk = (256 if shapes.head_dim <= LANES else 512) if newest else 2048
    sizes = {"rows": 512, "step_rows": 1024, "block_s": block_s, "chunk": chunk, "mask_s": 512}
    return Config(**sizes, matrix_sums=sums, half_exp=wide)


def search_space(spec: AttentionSpec, shapes: Shapes) -> Iterator[Config]:
    axes = {
        "rows": (256, 512, 1024),
        "step_rows": (256, 512, 1024, 2048),
        "block_s": (512, 1024, 2048, 4096),
        "chunk": (256, 512, 1024, 2048),
        "mask_s": (256, 512, 1024),
        "matrix_sums": (False, True),
    }
    return distinct(default_config(spec, shapes), axes, functools.partial(cut_call, spec, shapes))


KERNELS = family(
    "tpu_prefill",
    ("sparse",),
    dtypes=DTYPES,
    supports=supports,
    launch=launch,
    Config=Config,
    default_config=default_config,
    search_space=search_space,
    executions=lambda spec, shapes, config: sparse_tiles.executions(shapes, cut_call(spec, shapes, config)),
    scaled=True,
    paged=True,
)
