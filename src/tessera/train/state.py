"""The state of training: float32 weights and AdamW's moments, with their initial values and their shardings."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import Source
from tessera.models.layers import Params
from tessera.models.weights import abstract_params, init_params
from tessera.train.recipes import Recipe


class State(NamedTuple):
    """Float32 master weights and the optimizer's moments, carried between steps."""

    params: Params
    optimizer: Any


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Build the optimizer: gradient clipping, Adam, and decoupled weight decay of matrices (not of norms and biases).
    `train_step` applies the learning rate."""

    def decayed(params: Params) -> Any:
        def is_matrix(path, leaf) -> bool:
            name = jax.tree_util.keystr(path)
            return not ("norm" in name or "bias" in name)

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=recipe.b1, b2=recipe.b2),
        optax.add_decayed_weights(recipe.weight_decay, mask=decayed),
    )


def init_state(recipe: Recipe) -> State:
    return _begin(init_params(recipe.config, jax.random.key(recipe.seed)), recipe)


def start(recipe: Recipe, mesh: Mesh, base: Source | None) -> State:
    """Return the state at step 0 on a mesh, with fresh weights or those of `base`, the files of the recipe's base. Each
    device computes, or reads from the files, only the parts that it holds."""
    placed = shardings(recipe, mesh)
    if base is None:
        return jax.jit(init_state, static_argnums=0, out_shardings=placed)(recipe)
    params = load_params(base, dtype=jnp.float32, stacked=True, mesh=mesh)
    return jax.jit(_begin, static_argnums=1, out_shardings=placed, donate_argnums=0)(params, recipe)


def _begin(params: Params, recipe: Recipe) -> State:
    if recipe.base is None:
        params = recipe.data.prepare(params, recipe.config)
    return State(params, optimizer(recipe).init(params))


def shardings(recipe: Recipe, mesh: Mesh) -> State:
    """Return the sharding of each array of the state: a moment is split like its weight, and every device holds the
    optimizer's step count."""
    params = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(recipe.config, mesh, dtype=jnp.float32))
    moments = jax.eval_shape(partial(init_state, replace(recipe, base=None))).optimizer
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = optax.tree.map_params(
        optimizer(recipe), lambda _, where: where, moments, params, transform_non_params=lambda _: everywhere
    )
    return State(params, placed)
