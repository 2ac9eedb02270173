"""Whole-model steps under tensor parallelism, as programs to compile for a mesh that this machine lacks.

Weights are split by output (q, k, v, gate, up, head) or by input (o, down), so that a layer needs two sums over the
mesh; the cache and attention are split by KV head (`attention/parallel.py`). XLA's partitioner decides the rest.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.attention import tuned
from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.dispatch import choose
from tessera.attention.parallel import AXIS
from tessera.attention.selection import capacity_for
from tessera.core.mesh import MeshShape, build
from tessera.models.cache import init_cache
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.files.source import find_config
from tessera.models.weights import abstract_params
from tessera.runtime.roofline import recipe
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade


def model_step(
    model: str,
    *,
    phase: str,
    batch: int,
    length: int,
    queries: int,
    attention: str,
    tile: int,
    query_tile: int,
    fraction: float,
    devices: Any,
    weights: str | None = None,
    cache: str | None = None,
) -> tuple[Any, tuple, dict]:
    """Return (step, abstract arguments, about): prefill of the last `queries` of `length` tokens, or one decoded token.

    The step donates the cache, as the engine does, and returns the new cache and the last row's logits. Its layers run
    under a scan, which compiles fast; in a model from `tessera.load` they are unrolled.
    `attention` is "dense" or, for Kascade by its paper, "kascade"; `weights` and `cache` are types, as in
    `tessera.load`.
    """
    config, _ = find_config(model)
    mesh = build(MeshShape(len(devices), 1), devices)
    sizes = {"tile": tile, "query_tile": query_tile, "fraction": fraction}
    policy = Dense() if attention == "dense" else recipe(config, model, **sizes)
    rows = 1 if phase == "decode" else queries

    def place(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    dtype = cache or config.dtype
    empty = jax.eval_shape(lambda: init_cache(config, batch, length, dtype=dtype, stacked=True))
    held = jax.tree.map(lambda x: place(x.shape, x.dtype, None, None, AXIS), empty)
    whole = NamedSharding(mesh, P())

    def step(params, cache, tokens_BT, positions):
        hidden, cache, _ = forward(params, tokens_BT, cache, positions, config=config, policy=policy)
        return cache, logits(params, hidden[:, -1])

    function = jax.jit(step, donate_argnums=1, out_shardings=(jax.tree.map(lambda x: x.sharding, held), whole))
    tokens = place((batch, rows), jnp.int32)
    positions = Positions(*[place((batch,), jnp.int32)] * 3)
    params = abstract_params(config, mesh, stacked=True, weight_format=weights)
    shape = Shapes(batch, rows, length, config.num_heads // len(devices), config.num_kv_heads // len(devices),
                   config.head_dim, None, config.dtype)._replace(scaled=cache == "int8")  # fmt: skip
    about = {"roles": roles(policy, config)}
    about["calls"] = {role: attention_figures(role, policy, config, shape) for role in about["roles"]}
    return function, (params, held, tokens, positions), about


def attention_figures(role: str, policy: Policy, config: ModelConfig, shapes: Shapes) -> dict[str, Any]:
    """Return the kernel, executions of its scopes, flops and bytes of a role's attention call on one device.

    Call this in the context of the device's mesh, because kernels ask jax for the chip.
    """
    spec = AttentionSpec(window=config.window)
    if isinstance(policy, Kascade):
        spec = replace(spec, tile=policy.tile, query_tile=policy.query_tile, mass=role == "score")
    if role == "sparse":
        budget = {"fraction": policy.fraction, "minimum": policy.minimum}
        shapes = shapes._replace(capacity=capacity_for(spec, shapes.num_keys, shapes.num_queries, **budget))
    kernel = choose(spec, shapes, platform="tpu")
    settings = tuned.config(kernel, spec, shapes)
    counts = None if kernel.executions is None else dict(kernel.executions(spec, shapes, settings))
    return {"kernel": kernel.name, "executions": counts, **kernel.cost(spec, shapes)}


def roles(policy: Policy, config: ModelConfig) -> Mapping[str, int]:
    found = policy.roles() if isinstance(policy, Kascade) else ("dense",) * config.num_layers
    return {role: found.count(role) for role in ("dense", "score", "sparse") if role in found}
