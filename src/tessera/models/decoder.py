"""The decoder: embed tokens, run the layers under any attention policy, and compute logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Shapes
from tessera.core.mesh import keep
from tessera.core.quant import gathered
from tessera.models.cache import Cache, extend
from tessera.models.config import ModelConfig
from tessera.models.layers import Layer, Params, linear, matmul, mlp, rms_norm, rope_tables, rotate
from tessera.models.products import lookup
from tessera.sparse.contract import Policy


def forward(
    params: Params,
    tokens_BT: Int32[Array, "B T"],
    cache: Cache | None,
    positions: Positions,
    *,
    config: ModelConfig,
    policy: Policy,
    remat: bool = False,
    stripe: int | None = None,
    spread: bool = False,
    gather: Callable[[Layer], Layer] | None = None,
) -> tuple[Float[Array, "B T D"], Cache | None, Any]:
    """Run all layers over T new tokens per sequence; return hidden states after the final norm, cache and policy state.

    Args:
        params: weights; stacked layers run under lax.scan, a tuple of layers is unrolled.
        tokens_BT: token ids; in each sequence, those from index positions.q_len on are padding.
        cache: earlier keys and values, laid out like the layers (stacked or tuple). With None, the new tokens attend
            only to each other.
        positions: positions of the new tokens; `positions.kv_len` counts the new tokens, too.
        config, policy: static arguments under jax.jit.
        remat: recompute each layer in the backward pass instead of storing its intermediate results.
        stripe: positions per stripe, if the devices of the mesh axis "context" hold the cache in stripes
            (`attention.context`); the new tokens are then divided among these devices, too.
        spread: let each device of the mesh axis "heads" compute a part of the new tokens with a layer's whole weights,
            which are gathered layer by layer; attention and cache stay split by heads (`runtime.spread`).
        gather: function that gathers a layer's weights, which a mesh splits, when the layer runs. The backward pass
            calls it again, so that memory holds the whole weights of only one layer at a time (`train.mesh`).
    """
    batch, num_queries = tokens_BT.shape
    spec = AttentionSpec(window=config.window, stripe=stripe)
    position_BT = positions.q_start[:, None] + jnp.arange(num_queries, dtype=jnp.int32)
    tables = rope_tables(config.rope, config.head_dim, position_BT)
    x = lookup(params.embed, tokens_BT)
    unrolled = isinstance(params.layers, tuple)
    shapes = _shapes(x.shape[:2], str(x.dtype), cache, config)
    state = policy.init_state(config.num_layers, shapes, spec)

    def block(index, x, layer: Layer, cache, state):
        if gather is not None:
            layer = gather(layer)
        if stripe is not None and num_queries > 1:
            x = keep(x, None, "rows")
        if spread:
            x, layer = keep(x, None, "spread_rows"), gathered(keep(layer))
        h = rms_norm(x, layer.attn_norm, config.norm_eps)
        q, k, v = project(h, layer, tables, config)
        if spread:  # by rows first: else XLA splits v's projection by heads and gathers h for it
            q, k, v = keep(keep((q, k, v), None, "spread_rows"), None, None, "heads")
        if cache is not None:  # one layer's cache, or all layers' stacked
            at = () if unrolled else (index,)
            cache = extend(cache, k, v, positions.q_start, at, stripe, positions.q_len)
            kv = cache.key_values(at)
        else:
            kv = KeyValues.of(k, v)
        out, state = policy.attend(index, q, kv, spec, positions, state)
        out = out.reshape(batch, num_queries, -1)
        if spread:
            out = keep(out, None, "spread_rows")
        y = x + linear(out, layer.o, layer.o_bias)
        state = policy.observe(index, x, y, positions, state)
        y = y + mlp(rms_norm(y, layer.mlp_norm, config.norm_eps), layer)
        return y, cache, state

    if remat or gather is not None:
        kept = None if remat else _all_but_gathered
        block = jax.checkpoint(block, static_argnums=(0,) if unrolled else (), policy=kept)
    elif unrolled and policy.layers_alike:
        block = partial(_traced_once, jax.jit(block))
    run = _unrolled if unrolled else _scanned
    x, cache, state = run(block, params.layers, x, cache, state)
    return rms_norm(x, params.final_norm, config.norm_eps), cache, state


def _shapes(rows: tuple[int, int], dtype: str, cache: Cache | None, config: ModelConfig) -> Shapes:
    """Return the shapes of a layer's dense attention call; `rows` is (B, T)."""
    num_keys = rows[1] if cache is None else cache.num_keys
    shapes = Shapes(*rows, num_keys, config.num_heads, config.num_kv_heads, config.head_dim, None, dtype)
    if cache is None:
        return shapes
    return shapes._replace(scaled=cache.scales is not None, page=cache.page)


def project(h: Array, layer: Layer, tables: tuple[Array, Array], config: ModelConfig) -> tuple[Array, Array, Array]:
    """Compute rotated queries [B,T,N,H], rotated keys [B,T,K,H] and values [B,T,K,H]."""
    heads = (*h.shape[:2], -1, config.head_dim)
    q = linear(h, layer.q, layer.q_bias).reshape(heads)
    k = linear(h, layer.k, layer.k_bias).reshape(heads)
    v = linear(h, layer.v, layer.v_bias).reshape(heads)
    if layer.q_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
    return rotate(q, tables), rotate(k, tables), v


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Tell jax.checkpoint to keep every intermediate result except gathered weights."""
    return primitive.name != "sharding_constraint"


def _traced_once(block, index, *arguments):
    """Run a layer through the jitted `block`, which is traced once for all layers because `index` becomes an array.

    With compiled programs in JAX's cache, tracing takes most of the start-up time. XLA inlines the calls again.
    """
    return block(jnp.int32(index), *arguments)


def _unrolled(block, layers, x, cache, state):
    held = []
    for index, layer in enumerate(layers):
        mine = None if cache is None else cache.layer(index)
        x, mine, state = block(index, x, layer, mine, state)
        held.append(mine)
    return x, (None if cache is None else Cache.of_layers(held)), state


def _scanned(block, layers, x, cache, state):
    def step(carry, scanned):  # the cache is carried and written in place; as scan outputs it would be copied each call
        x, cache, state = carry
        index, layer = scanned
        return block(index, x, layer, cache, state), None

    count = jax.tree.leaves(layers)[0].shape[0]
    (x, cache, state), _ = jax.lax.scan(step, (x, cache, state), (jnp.arange(count, dtype=jnp.int32), layers))
    return x, cache, state


def logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Compute the logits of hidden states in float32, with the output head or the tied embedding."""
    return matmul(hidden, params.embed if params.head is None else params.head)
