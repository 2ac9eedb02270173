"""Jitted programs over one KV cache: prefill a chunk, decode a token, copy a page or row in or out.

Prompts are cut into chunks at fixed positions, multiples of the query tile, so the keys that a row attends to depend
neither on the other prompts nor on the chunk sizes. Memory is the cache plus one chunk's activations.
With `stripe`, each run of `stripe` positions of a sequence goes to the next device of a mesh (`attention/context.py`).
"""

from functools import partial
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention import context
from tessera.attention.contract import TILES, Positions
from tessera.core import quant
from tessera.core.memory import require
from tessera.core.mesh import ONE_DEVICE, MeshShape, keep, local_devices, mesh_of, num_head_parts, num_stripes, program
from tessera.core.shapes import ceil_div, round_up
from tessera.models.cache import Cache, init_cache, keep_split
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.footprint import Footprint, Load, Types, footprint
from tessera.models.layers import Params
from tessera.models.weights import device_bytes
from tessera.runtime.compilation import capacity_bucket
from tessera.runtime.spread import Sharing
from tessera.sparse.contract import Policy, Reads

CHUNK = 1024
"""Maximum number of rows of a prefill call in generation. When text is scored, the limit is `score.CHUNK`."""


@program(static_argnames=("config", "batch", "num_keys", "kv_dtype", "stripe"))
def allocate(
    params: Params, *, config: ModelConfig, batch: int, num_keys: int, kv_dtype: str | None, stripe: int | None = None
) -> Cache:
    """Allocate an empty cache in parts: a device only ever holds its KV heads and, with `stripe`, its positions."""
    dtype, stacked = jnp.dtype(kv_dtype or params.embed.dtype), not isinstance(params.layers, tuple)
    return keep_split(init_cache(config, batch, num_keys, dtype=dtype, stacked=stacked), stripe)


@program(static_argnames=("num_keys", "stripe"))
def enlarge(cache: Cache, *, num_keys: int, stripe: int | None = None) -> Cache:
    """Copy a contiguous cache into one with room for `num_keys` keys."""
    parts = 1 if stripe is None else context.traced_stripes()

    def pad(x: Array, axis: int) -> Array:  # each device enlarges its own part
        lead, held, rest = x.shape[:axis], x.shape[axis], x.shape[axis:][1:]
        x = x.reshape(*lead, parts, held // parts, *rest)
        widths = [(0, 0)] * x.ndim
        widths[len(lead) + 1] = (0, (num_keys - held) // parts)
        return jnp.pad(x, widths).reshape(*lead, num_keys, *rest)

    axes = Cache(k=-2, v=-2, scales=-1)
    larger = Cache(*(jax.tree.map(partial(pad, axis=axis), part) for part, axis in zip(cache, axes)))
    return keep_split(larger, stripe)


class Rows(NamedTuple):
    """Hidden states of a prefill: those of its last tokens, which predict the next ones, and those of all its rows."""

    last: Float[Array, "B D"]
    hidden: Float[Array, "B T D"]


@program(static_argnames=("config", "policy", "stripe", "spread"), donate_argnames="cache")
def prefill_chunk(
    params: Params,
    cache: Cache,
    tokens_BT: Int32[Array, "B T"],
    q_start_B: Int32[Array, "B"],
    q_len_B: Int32[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
    stripe: int | None = None,
    spread: bool = False,
) -> tuple[Cache, Rows, Reads | None]:
    """Prefill `q_len_B` tokens per sequence from position `q_start_B` on; the rest of the T rows is padding.

    Devices that share the rows keep the hidden states of theirs.
    """
    positions = Positions(q_start_B, jnp.where(q_len_B > 0, q_start_B + q_len_B, 0), q_len_B)
    how = {"config": config, "policy": policy, "stripe": stripe, "spread": spread}
    hidden, cache, state = forward(params, tokens_BT, cache, positions, **how)
    row = jnp.maximum(q_len_B - 1, 0)[:, None, None]
    last, reads = keep((jnp.take_along_axis(hidden, row, axis=1)[:, 0], policy.reads(state)))
    hidden = keep(hidden, None, "spread_rows" if spread else None if stripe is None else "rows")
    return keep_split(cache, stripe), Rows(last, hidden), reads


@program()
def read_head(params: Params, last_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    return keep(logits(params, last_BD), None, "vocab")


@program(static_argnames=("config", "policy", "stripe"), donate_argnames="cache")
def decode_token(
    params: Params,
    cache: Cache,
    token_B: Int32[Array, "B"],
    position_B: Int32[Array, "B"],
    alive_B: Bool[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
    stripe: int | None = None,
) -> tuple[Cache, Float[Array, "B V"], Reads | None]:
    """Feed one token per sequence; sequences that are not alive attend to nothing and count no keys."""
    positions = Positions(position_B, jnp.where(alive_B, position_B + 1, 0), alive_B.astype(jnp.int32))
    hidden, cache, state = forward(
        params, token_B[:, None], cache, positions, config=config, policy=policy, stripe=stripe
    )
    scores = keep(logits(params, hidden[:, 0]), None, "vocab")
    return keep_split(cache, stripe), scores, keep(policy.reads(state))


@program()
def score_hidden(params: Params, hidden_BTD: Float[Array, "B T D"]) -> tuple[Float[Array, "B T V"], Bool[Array, "B T"]]:
    """Compute the logits of hidden states, and which rows' logits are all finite."""
    out = logits(params, hidden_BTD)
    return keep(out, None, None, "vocab"), keep(jnp.isfinite(out).all(-1))


@program(static_argnames="stripe")
def read_page(cache: Cache, page: Int32[Array, ""], stripe: int | None = None) -> Cache:
    """Copy one page out of a pool, or one row out of a contiguous cache, as a cache of batch 1."""
    part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, page, 1, axis=x.ndim - 4), cache)
    return keep_split(part, stripe)


@program(static_argnames="stripe", donate_argnames="cache")
def write_page(cache: Cache, part: Cache, page: Int32[Array, ""], stripe: int | None = None) -> Cache:
    """Overwrite one page or row with `part`, which has the form that `read_page` returns."""

    def write(x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, page, axis=x.ndim - 4)

    return keep_split(jax.tree.map(write, cache, part), stripe)


def needed(
    config: ModelConfig,
    *,
    dtype: str,
    batch: int,
    num_keys: int,
    num_tokens: int,
    host: bool = False,
    kv_dtype: str | None = None,
    division: MeshShape = ONE_DEVICE,
) -> Footprint:
    """Compute the bytes on one device while prompts of `num_tokens` tokens fill a cache of `num_keys` keys each."""
    load = Load(batch=batch, num_keys=capacity_bucket(num_keys), rows=min(num_tokens, CHUNK), host=host)
    return footprint(config, load, types=Types(weights=dtype, cache=kv_dtype or dtype, dtype=dtype), division=division)


def stripe_rows(query_tile: int, parts: int) -> int:
    """Return the number of positions per stripe: a chunk has about CHUNK rows, and a stripe has whole tiles."""
    return round_up(ceil_div(CHUNK, parts), lcm(max(TILES), query_tile))


def sharing(params: Params, config: ModelConfig) -> Sharing:
    """Return the sizes that decide whether the devices of the weights' mesh share a chunk by heads or by rows."""
    layer_bytes = sum(map(quant.num_bytes, jax.tree.leaves(params.layers))) // config.num_layers
    devices = num_head_parts(mesh_of(params))
    return Sharing(config=config, devices=devices, itemsize=params.embed.dtype.itemsize, layer_bytes=layer_bytes)


def spread_chunk(params: Params, config: ModelConfig, *, num_keys: int, unit: int) -> int | None:
    """Return the rows of a prefill chunk that devices share by rows, or None; see `Sharing.chunk`.

    On each device, the activations of the chunk take at most as many bytes as the weights.
    """
    mesh = mesh_of(params)
    if num_head_parts(mesh) == 1 or num_stripes(mesh) > 1:
        return None
    rows = device_bytes(params) // row_bytes(config, params.embed.dtype.itemsize)
    return sharing(params, config).chunk(num_keys=num_keys, unit=unit, rows_per_device=rows)


def row_bytes(config: ModelConfig, itemsize: int) -> int:
    """Estimate the bytes of one row's activations: residual, attention, MLP, and a float32 copy of each."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return width * (itemsize + 4)


def require_room(
    params: Params, config: ModelConfig, *, batch: int, num_keys: int, num_tokens: int, kv_dtype: str | None = None
) -> None:
    """Raise MemoryError if a device has no room for the cache and a prefill chunk of prompts of `num_tokens` tokens."""
    mesh, devices = mesh_of(params), local_devices(params)
    parts, stripes = num_head_parts(mesh), num_stripes(mesh)
    sizes = {"batch": batch, "num_keys": num_keys, "num_tokens": num_tokens, "kv_dtype": kv_dtype}
    dtype, host = params.embed.dtype, devices[0].platform == "cpu"
    held = needed(config, dtype=str(dtype), host=host, division=MeshShape(parts, stripes), **sizes)
    num_bytes = held.beyond_weights
    if stripes > 1:  # anchor layers gather one layer's keys and values
        num_bytes += held.cache * stripes // config.num_layers
    if large := spread_chunk(params, config, num_keys=num_keys, unit=CHUNK):
        own = large // parts * row_bytes(config, dtype.itemsize)
        whole = max(2 * sharing(params, config).layer_bytes, params.embed.nbytes)  # two layers, while one is gathered
        num_bytes += max(0, own + whole - held.activations)
    require(
        num_bytes,
        devices,
        f"a cache for {batch} sequences of {num_keys} tokens",
        "pass fewer or shorter prompts per call, or a smaller max_new_tokens",
    )
