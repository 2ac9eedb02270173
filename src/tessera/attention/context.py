"""Attention over a KV cache that is dealt over the mesh axis "context".

Positions are dealt to the C devices of the axis in stripes of w = spec.stripe positions: position p is on device
(p // w) % C, in slot p // (w * C) * w + p % w of that device's cache. However long the context is, a device thus holds
1/C of the keys that any row sees, to within one stripe. A prefill chunk has w * C rows: each device computes one stripe
of rows and stores the keys of that stripe.

In dense and sparse prefill, each device gathers the queries of the whole chunk and attends to its own keys. The
devices' results are then merged: if o_d and lse_d are the results of device d,
out = sum_d(e_d * o_d) / sum_d(e_d) with e_d = exp(lse_d - max_d lse_d). A device attends twice: to its slots before the
chunk, which every row sees, and to its own stripe of the chunk. Row r of the chunk sees key s of device d's stripe if
s <= r - d * w, which is the causal rule with q_start = -d * w. The bytes sent per chunk, about
(4 + itemsize) * B * T * N * H, do not depend on the number of keys. Decode merges the devices' results by the same
formula, with one maximum and one sum over the devices.

The devices' tile masses cannot be added up, because a mass is a sum over rows, and each device normalises each row by
the lse of that device's keys alone. In prefill, the score role therefore gathers K and V over the axis, and each device
scores its own rows. In decode, each device keeps one mass per query head until the lse over all devices is known.

Calls with a sliding window are refused: a kernel's window counts consecutive positions, but consecutive slots of a
device are not consecutive positions. Softcap and scale act on single scores, so they need no exchange.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int32

from tessera.attention import parallel
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection
from tessera.core.mesh import CONTEXT as AXIS

Run = Callable[[Array, KeyValues, AttentionSpec, Positions, Selection | None], AttentionOut]
"""Type of run(q, kv, spec, positions, selection), which runs one attention call on one device with the kernel that
`dispatch` chooses."""


class Stripes(NamedTuple):
    """Assignment of positions to devices: `width` consecutive positions to each of `parts` devices in turn."""

    width: int
    parts: int

    @property
    def chunk(self) -> int:
        """Rows of a prefill chunk: one stripe per device."""
        return self.width * self.parts

    def device(self, position: Array) -> Array:
        """Return the device that holds a position."""
        return position // self.width % self.parts

    def slot(self, position: Array) -> Array:
        """Return a position's slot in its device's cache."""
        return position // self.chunk * self.width + position % self.width

    def held(self, length: Array, device: Array) -> Array:
        """Count the filled slots of a device when `length` positions are stored; filled slots precede empty ones."""
        rest = length % self.chunk - device * self.width
        return length // self.chunk * self.width + jnp.clip(rest, 0, self.width)

    def gather(self, x: Array, axis: int) -> Array:
        """Reorder an axis that the mesh stores by device, then by slot, to the order of positions."""
        split = x.reshape(*x.shape[:axis], self.parts, -1, self.width, *x.shape[axis + 1 :])
        return jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)


def traced_stripes() -> int:
    """Count the devices that share each sequence's keys: the size of the mesh axis "context", or 1 without it."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def attend(
    run: Run,
    q_BTNH: Float[Array, "B T N H"],
    kv: KeyValues,
    spec: AttentionSpec,
    positions: Positions,
    selection: Selection | None,
) -> AttentionOut:
    """Compute `attention` over keys and values that are dealt in stripes, on the current mesh.

    In prefill, the rows are one chunk: q_start is a multiple of w * C, and T = w * C. The results equal those of one
    device that holds all keys in order of position. Selections and masses refer to tiles by their absolute ids.

    Raises:
        ValueError: T, S, the tile or the query tile does not fit the stripes, or the call has a window, pages or int8
            keys.
    """
    stripes = Stripes(spec.stripe, traced_stripes())
    check(q_BTNH.shape[1], kv, spec, stripes, sparse=selection is not None)
    heads = parallel.AXIS if parallel.traced_head_parts() > 1 else None
    by_row, by_slot, by_head = P(None, AXIS, heads), P(None, heads, AXIS), P(None, heads)
    spec = replace(spec, stripe=None)
    if q_BTNH.shape[1] == 1:
        body, rows = _decode_score if spec.mass else _decode, P(None, None, heads)
        mass = P(None, heads, None, None, AXIS)  # [B,K,I,stripe,device,tile of a stripe]
    else:
        body, rows = _prefill_score if spec.mass else _prefill, by_row
        mass = P(None, heads, AXIS)
    out = jax.shard_map(
        partial(body, run, spec=spec, stripes=stripes),
        in_specs=(rows, by_slot, P(), by_head),
        out_specs=AttentionOut(rows, rows, mass if spec.mass else None),
        check_vma=False,  # JAX cannot infer which mesh axes a Pallas kernel's outputs vary over
    )(q_BTNH, kv, positions, selection)
    return out if out.mass is None else out._replace(mass=out.mass.reshape(*out.mass.shape[:3], -1))


def check(num_rows: int, kv: KeyValues, spec: AttentionSpec, stripes: Stripes, *, sparse: bool) -> None:
    """Raise ValueError unless a call fits its stripes; the message names the value and what it must be."""
    width, parts = stripes
    if spec.window is not None:
        raise ValueError(
            f"window={spec.window} on a mesh with {AXIS}={parts} is not supported: use a mesh with {AXIS}=1, which "
            "suffices because a window bounds the keys that a row sees"
        )
    if kv.pages is not None or kv.scales is not None:
        layout = "paged" if kv.pages is not None else "int8"
        raise ValueError(f"keys dealt over {AXIS}={parts} must be contiguous and in q's dtype, got {layout} keys")
    if num_rows not in (1, stripes.chunk):
        raise ValueError(
            f"num_queries={num_rows} must be 1 or {stripes.chunk} (one stripe of {width} on each of {parts} devices)"
        )
    if kv.k.shape[2] % stripes.chunk:
        raise ValueError(f"num_keys={kv.k.shape[2]} must be a multiple of {stripes.chunk} ({parts} stripes of {width})")
    if (spec.mass or sparse) and width % spec.tile:
        raise ValueError(f"tile={spec.tile} must divide the stripe of {width} positions")
    if spec.mass and num_rows > 1 and width % spec.query_tile:
        raise ValueError(f"query_tile={spec.query_tile} must divide the stripe of {width} rows")


def append(
    cache: Float[Array, "*L B K S H"],
    rows: Float[Array, "B K T H"],
    q_start: Int32[Array, "B"],
    layer: tuple[Int32[Array, ""], ...],
    width: int,
) -> Float[Array, "*L B K S H"]:
    """Write the keys (or values) of a chunk or of one token into a dealt cache; each device writes only its own slots.

    `layer` holds the indices of the layer in a stacked cache; `width` is w. The positions must fit, and a chunk must
    have w * C rows and start at a multiple of w * C.
    """
    stripes, decode = Stripes(width, traced_stripes()), rows.shape[2] == 1
    heads = parallel.AXIS if parallel.traced_head_parts() > 1 else None
    lead = (None,) * (cache.ndim - 3)

    def write(cache, rows, q_start, layer):
        rank, zero = jax.lax.axis_index(AXIS), jnp.int32(0)
        position = q_start if decode else q_start + rank * width
        for b in range(rows.shape[0]):  # one in-place update per sequence, as in models.cache.append
            at = (*layer, zero + b, zero, stripes.slot(position[b]), zero)
            row = jnp.expand_dims(rows[b], range(cache.ndim - 3))
            if decode:  # devices that do not hold the position write back their old row
                old = jax.lax.dynamic_slice(cache, at, row.shape)
                row = jnp.where(stripes.device(position[b]) == rank, row, old)
            cache = jax.lax.dynamic_update_slice(cache, row, at)
        return cache

    held = P(*lead, heads, AXIS)
    new = P(None, heads, None if decode else AXIS)
    return jax.shard_map(write, in_specs=(held, new, P(), P()), out_specs=held, check_vma=False)(
        cache, rows, q_start, layer
    )


def _prefill(run: Run, q, kv: KeyValues, positions: Positions, selection, *, spec, stripes: Stripes) -> AttentionOut:
    """Attend with all rows of the chunk to this device's keys; return the merged result of this device's own rows."""
    rank = jax.lax.axis_index(AXIS)
    rows = jax.lax.all_gather(q, AXIS, axis=1, tiled=True)
    slot = stripes.slot(positions.q_start + rank * stripes.width)
    filled = stripes.held(positions.kv_len, rank)
    before = Positions(jnp.full_like(slot, kv.k.shape[2]), jnp.minimum(filled, slot), positions.q_len)
    own = Positions(jnp.zeros_like(slot) - rank * stripes.width, jnp.maximum(filled - slot, 0), positions.q_len)
    own_kv = KeyValues(*(_take_stripe(x, slot, stripes.width) for x in kv[:2]))
    lists = None, None
    if selection is not None:
        first, count = slot // spec.tile, stripes.width // spec.tile
        lists = (
            localise(selection, stripes, spec.tile, rank, jnp.zeros_like(slot), first, kv.k.shape[2] // spec.tile),
            localise(selection, stripes, spec.tile, rank, first, first + count, count),
        )
    parts = run(rows, kv, spec, before, lists[0]), run(rows, own_kv, spec, own, lists[1])
    return _merge(parts, q.dtype, scatter=True)


def _prefill_score(run: Run, q, kv: KeyValues, positions: Positions, selection, *, spec, stripes) -> AttentionOut:
    """Attend with this device's rows to all keys, gathered in order of position, and compute the rows' tile masses."""
    rank = jax.lax.axis_index(AXIS)
    whole = (stripes.gather(jax.lax.all_gather(x, AXIS, axis=2, tiled=True), 2) for x in kv[:2])
    first = rank * stripes.width
    q_len = jnp.clip(positions.q_len - first, 0, stripes.width)
    return run(q, KeyValues(*whole), spec, Positions(positions.q_start + first, positions.kv_len, q_len), None)


def _decode(run: Run, q, kv: KeyValues, positions: Positions, selection, *, spec, stripes: Stripes) -> AttentionOut:
    """Attend, dense or sparse, to this device's keys, and merge the results of all devices."""
    rank = jax.lax.axis_index(AXIS)
    own = _decode_positions(kv, positions, spec, stripes)
    if selection is not None:
        num_tiles = kv.k.shape[2] // spec.tile
        low = jnp.zeros_like(own.kv_len)
        selection = localise(selection, stripes, spec.tile, rank, low, low + num_tiles, num_tiles)
    return _merge((run(q, kv, spec, own, selection),), q.dtype, scatter=False)


def _decode_score(run: Run, q, kv: KeyValues, positions: Positions, selection, *, spec, stripes) -> AttentionOut:
    """Attend to this device's keys, and compute tile masses per query head, because each head is rescaled differently.

    The G query heads of a KV head become G query rows of one head, with query_tile=1, which share one read of each key.
    Each head's masses are then multiplied by exp(lse of this device's keys - merged lse).
    """
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = kv.k.shape[1]
    own = _decode_positions(kv, positions, spec, stripes)
    own = own._replace(q_len=jnp.where(positions.q_len > 0, num_heads // num_kv_heads, 0))
    rows = jnp.swapaxes(q.reshape(batch, num_kv_heads, -1, head_dim), 1, 2)
    part = run(rows, kv, replace(spec, query_tile=1), own, None)
    out, lse = (jnp.swapaxes(x, 1, 2).reshape(batch, 1, num_heads, *x.shape[3:]) for x in part[:2])
    merged = _merge((AttentionOut(out, lse),), q.dtype, scatter=False)
    share = jnp.exp(jnp.where(jnp.isneginf(lse), -jnp.inf, lse - merged.lse))
    mass = (part.mass * share.reshape(batch, num_kv_heads, -1, 1)).sum(2, keepdims=True)
    per_stripe = stripes.width // spec.tile
    return merged._replace(mass=mass.reshape(*mass.shape[:3], -1, 1, per_stripe))


def _decode_positions(kv: KeyValues, positions: Positions, spec: AttentionSpec, stripes: Stripes) -> Positions:
    """Return positions with which a call on this device's cache sees exactly the slots that hold visible keys."""
    end = jnp.minimum(positions.kv_len, positions.q_start + 1) if spec.causal else positions.kv_len
    filled = stripes.held(jnp.maximum(end, 0), jax.lax.axis_index(AXIS))
    return Positions(jnp.full_like(filled, kv.k.shape[2]), filled, positions.q_len)


def tile_masses(
    estimate: Callable[[Array, Array, Positions], Float[Array, "B K I J"]],
    q_BTNH: Float[Array, "B T N H"],
    k_BKSH: Float[Array, "B K S H"],
    spec: AttentionSpec,
    positions: Positions,
) -> Float[Array, "B K I J"]:
    """Compute, from dealt keys alone, the tile masses by which a layer selects its own tiles.

    In prefill, the keys are gathered in order of position, and each device runs estimate(q, k, positions) for its rows.
    In decode, each device scores its keys exactly, and the devices exchange one maximum and one sum.
    """
    stripes = Stripes(spec.stripe, traced_stripes())
    decode = q_BTNH.shape[1] == 1
    check(q_BTNH.shape[1], KeyValues(k_BKSH, k_BKSH), replace(spec, mass=True), stripes, sparse=False)
    heads = parallel.AXIS if parallel.traced_head_parts() > 1 else None

    def own_rows(q, k, positions):
        first = jax.lax.axis_index(AXIS) * stripes.width
        q_len = jnp.clip(positions.q_len - first, 0, stripes.width)
        whole = stripes.gather(jax.lax.all_gather(k, AXIS, axis=2, tiled=True), 2)
        return estimate(q, whole, Positions(positions.q_start + first, positions.kv_len, q_len))

    def one_row(q, k, positions):
        batch, num_kv_heads, num_slots, head_dim = k.shape
        rows = q.reshape(batch, num_kv_heads, -1, head_dim)
        scale = head_dim**-0.5 if spec.scale is None else spec.scale
        z = scale * jnp.einsum("bkgh,bksh->bkgs", rows, k, preferred_element_type=jnp.float32)
        z = z if spec.softcap is None else spec.softcap * jnp.tanh(z / spec.softcap)
        own = _decode_positions(KeyValues(k, k), positions, spec, stripes)
        filled = jnp.where(positions.q_len > 0, own.kv_len, 0)
        z = jnp.where(jnp.arange(num_slots) < filled[:, None, None, None], z, -jnp.inf)
        top = jax.lax.pmax(z.max(-1, keepdims=True), AXIS)
        e = jnp.exp(z - jnp.where(jnp.isneginf(top), 0.0, top))
        total = jax.lax.psum(e.sum(-1, keepdims=True), AXIS)
        mass = (e / jnp.where(total > 0, total, 1.0)).sum(2)
        return mass.reshape(batch, num_kv_heads, 1, -1, 1, stripes.width // spec.tile, spec.tile).sum(-1)

    rows = P(None, None, heads) if decode else P(None, AXIS, heads)
    mass = jax.shard_map(
        one_row if decode else own_rows,
        in_specs=(rows, P(None, heads, AXIS), P()),
        out_specs=P(None, heads, None, None, AXIS) if decode else P(None, heads, AXIS),
        check_vma=False,
    )(q_BTNH, k_BKSH, positions)
    return mass.reshape(*mass.shape[:3], -1)


def _take_stripe(x: Float[Array, "B K S H"], slot: Int32[Array, "B"], width: int) -> Float[Array, "B K w H"]:
    sequences = range(x.shape[0])
    return jnp.stack([jax.lax.dynamic_slice_in_dim(x[b], slot[b], width, axis=1) for b in sequences])


def localise(
    selection: Selection, stripes: Stripes, tile: int, rank: Array, low: Array, high: Array, most: int
) -> Selection:
    """Return the listed tiles that device `rank` holds at an index in [low, high) of its cache, as that index - `low`.

    The bounds [B] count tiles of the device's cache; `most`, at least high - low, bounds the new lists' capacity.
    """
    tiles, count = selection
    position = tiles * tile
    local = stripes.slot(position) // tile
    low, high = (bound[:, None, None, None] for bound in (low, high))
    listed = jnp.arange(tiles.shape[-1], dtype=jnp.int32) < count[..., None]
    mine = listed & (stripes.device(position) == rank) & (local >= low) & (local < high)
    # Slots of one device ascend with their positions, so sorting only closes the gaps.
    last = jnp.iinfo(jnp.int32).max
    packed = jnp.sort(jnp.where(mine, local - low, last), axis=-1)[..., : min(most, tiles.shape[-1])]
    return Selection(jnp.where(packed == last, 0, packed), mine.sum(-1, dtype=jnp.int32))


def _merge(parts: tuple[AttentionOut, ...], dtype, *, scatter: bool) -> AttentionOut:
    """Merge results of the same rows over different keys: the `parts` of this device and those of all other devices.

    With `scatter`, each device gets the merged result for one stripe of rows, otherwise for all rows.
    """
    largest = parts[0].lse
    for part in parts[1:]:
        largest = jnp.maximum(largest, part.lse)
    largest = jax.lax.pmax(largest, AXIS)
    finite = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weights = [jnp.exp(part.lse - finite) for part in parts]
    sums = sum(part.out.astype(jnp.float32) * weight[..., None] for part, weight in zip(parts, weights)), sum(weights)
    if scatter:
        size = finite.shape[1] // jax.lax.axis_size(AXIS)
        out, total = (jax.lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in sums)
        finite = jax.lax.dynamic_slice_in_dim(finite, jax.lax.axis_index(AXIS) * size, size, axis=1)
    else:
        out, total = jax.lax.psum(sums, AXIS)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    return AttentionOut((out / safe[..., None]).astype(dtype), jnp.where(seen, finite + jnp.log(safe), -jnp.inf))
