"""Fresh weights with which a small model learns to copy in hundreds of steps instead of thousands."""

from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
from jax import Array

from lab.training.data import Library
from tessera.models.config import ModelConfig
from tessera.models.layers import Params, rope_frequencies

LOOK_BACK_PAIRS = 10
LOOK_BACK_SHARPNESS = 7.6


def look_back(params: Params, config: ModelConfig) -> Params:
    """Initialise query heads 0 and 1 of layer 0 to attend mostly to the tokens one and two positions back.

    If each KV head has only one query head, only head 0 is initialised in this way.
    A unit vector u is added to every embedding, and the q and k of these heads read only u. Before rotation, each of
    them is thus the same at all positions. The rotary embedding, with frequencies f_i, turns the product of q and k
    into sum_i cos(f_i (distance - shift)), which is largest at the wanted distance. Given this half of the copying
    circuit, the other half forms in a few hundred steps instead of thousands (LOG.md).
    """
    size, head = config.hidden_size, config.head_dim
    u = jax.random.normal(jax.random.key(7), (size,))
    u = u / jnp.linalg.norm(u)
    frequency, _ = rope_frequencies(config.rope, head)
    fast = jnp.arange(head // 2) < LOOK_BACK_PAIRS
    scale = LOOK_BACK_SHARPNESS / (size / 2) ** 0.5

    def direction(shift: float) -> Array:
        angle = shift * frequency
        return jnp.concatenate([jnp.where(fast, jnp.cos(angle), 0), jnp.where(fast, jnp.sin(angle), 0)]) * scale

    q = params.layers.q.at[0, :head].set(jnp.outer(direction(0.0), u))
    if config.groups > 1:  # a second query head of the same KV head
        q = q.at[0, head : 2 * head].set(jnp.outer(direction(-1.0), u))
    k = params.layers.k.at[0, :head].set(jnp.outer(direction(1.0), u))
    return replace(params, embed=params.embed + u, layers=replace(params.layers, q=q, k=k))


class LookingBack(Library):
    """Library text, on weights whose layer 0 looks one and two tokens back."""

    name = "library, look back"

    def prepare(self, params, config):
        """Initialise the heads of `look_back`."""
        return look_back(params, config)


LOOKING_BACK: Final = LookingBack()
