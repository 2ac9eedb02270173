"""Table of a decoder's weights: their names in files, their axes, when each exists, and how each is initialised.

Initialisation, loading, saving, sharding and the parameter count all use this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tessera.core import mesh
from tessera.core.quant import FORMS, Form, Quantised, arrays_of, num_bytes
from tessera.models.config import ModelConfig
from tessera.models.layers import Layer, Params


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One weight of a decoder, as an entry of this table."""

    name: str  # field of Layer, or of Params
    stored: str  # Hugging Face's name; for a layer's weight, the part after "model.layers.N."
    gguf: str  # llama.cpp's name; for a layer's weight, the part after "blk.N."
    axes: tuple[str, ...]  # logical axes, [out, in] for a matrix; `sizes` gives their sizes, and a mesh splits some
    needs: str | None = None  # ModelConfig flag that enables the weight, unless it always exists
    residual: bool = False  # whether the matrix's product is added to the residual stream; see `init_params`

    @property
    def is_matrix(self) -> bool:
        """Whether this is a matrix. Other weights are norms, which are initialised to one, and biases, to zero."""
        return len(self.axes) == 2


def _matrix(name: str, stored: str, gguf: str, *axes: str, residual: bool = False) -> Weight:
    stored, gguf = f"{stored}.weight", f"{gguf}.weight"
    return Weight(name=name, stored=stored, gguf=gguf, axes=axes, residual=residual)


def _vector(name: str, stored: str, gguf: str, axis: str, needs: str | None = None) -> Weight:
    kind = "bias" if name.endswith("bias") else "weight"
    return Weight(name=name, stored=f"{stored}.{kind}", gguf=f"{gguf}.{kind}", axes=(axis,), needs=needs)


LAYER = (
    _vector("attn_norm", "input_layernorm", "attn_norm", "model"),
    _matrix("q", "self_attn.q_proj", "attn_q", "heads", "model"),
    _matrix("k", "self_attn.k_proj", "attn_k", "kv_heads", "model"),
    _matrix("v", "self_attn.v_proj", "attn_v", "kv_heads", "model"),
    _matrix("o", "self_attn.o_proj", "attn_output", "model", "heads", residual=True),
    # In every family here, this is the norm before the MLP. In Gemma 2's files, another norm has this name.
    _vector("mlp_norm", "post_attention_layernorm", "ffn_norm", "model"),
    _matrix("gate", "mlp.gate_proj", "ffn_gate", "mlp", "model"),
    _matrix("up", "mlp.up_proj", "ffn_up", "mlp", "model"),
    _matrix("down", "mlp.down_proj", "ffn_down", "model", "mlp", residual=True),
    _vector("q_bias", "self_attn.q_proj", "attn_q", "heads", "attention_bias"),
    _vector("k_bias", "self_attn.k_proj", "attn_k", "kv_heads", "attention_bias"),
    _vector("v_bias", "self_attn.v_proj", "attn_v", "kv_heads", "attention_bias"),
    _vector("o_bias", "self_attn.o_proj", "attn_output", "model", "output_bias"),
    _vector("gate_bias", "mlp.gate_proj", "ffn_gate", "mlp", "mlp_bias"),
    _vector("up_bias", "mlp.up_proj", "ffn_up", "mlp", "mlp_bias"),
    _vector("down_bias", "mlp.down_proj", "ffn_down", "model", "mlp_bias"),
    _vector("q_norm", "self_attn.q_norm", "attn_q_norm", "head_dim", "qk_norm"),
    _vector("k_norm", "self_attn.k_norm", "attn_k_norm", "head_dim", "qk_norm"),
)
"""Weights of one layer, which are the fields of Layer."""

EMBED = _matrix("embed", "model.embed_tokens", "token_embd", "vocab", "model")
FINAL_NORM = _vector("final_norm", "model.norm", "output_norm", "model")
HEAD = _matrix("head", "lm_head", "output", "vocab", "model")
OUTER = (EMBED, FINAL_NORM, HEAD)
"""Weights outside the layers: the fields of Params except `layers`. A model with tied embeddings has no head."""


def sizes(config: ModelConfig) -> Mapping[str, int]:
    return {
        "vocab": config.vocab_size,
        "model": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


def shape_of(weight: Weight, config: ModelConfig) -> tuple[int, ...]:
    """Return a weight's shape, without the leading L of stacked layers."""
    size = sizes(config)
    return tuple(size[axis] for axis in weight.axes)


def layer_weights(config: ModelConfig) -> tuple[Weight, ...]:
    return tuple(weight for weight in LAYER if weight.needs is None or getattr(config, weight.needs))


def outer_weights(config: ModelConfig) -> tuple[Weight, ...]:
    return OUTER[:2] if config.tie_embeddings else OUTER


def layer_name(index: int, weight: Weight) -> str:
    return f"model.layers.{index}.{weight.stored}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Map Hugging Face's name of each tensor that a checkpoint must hold to the tensor's shape."""
    shapes = {weight.stored: shape_of(weight, config) for weight in outer_weights(config)}
    layer = {weight: shape_of(weight, config) for weight in layer_weights(config)}
    for index in range(config.num_layers):
        shapes |= {layer_name(index, weight): shape for weight, shape in layer.items()}
    return shapes


def split_sizes(config: ModelConfig) -> Mapping[str, int]:
    """Return the sizes that a mesh splits. It splits q, k and v by whole KV heads, each with its query heads."""
    return {
        "num_kv_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }


def abstract_params(
    config: ModelConfig,
    on: Mesh,
    *,
    dtype: DTypeLike | None = None,
    stacked: bool = True,
    weight_format: str | None = None,
) -> Params:
    """Return the weights of a model as shapes, dtypes and shardings on a mesh, in a form of `core.quant.FORMS`."""
    dtype = jnp.dtype(dtype or config.dtype)

    def array(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike, lead: tuple[int, ...]):
        where = mesh.sharding(on, (*(None for _ in lead), *axes))
        return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=where)

    def place(weight: Weight, lead: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct | Quantised:
        shape, form = shape_of(weight, config), form_of(weight, config, weight_format)
        if form is None:
            return array(shape, weight.axes, dtype, lead)
        axes = quantised_axes(weight, form)
        held = {name: array(x.shape, axes[name], x.dtype, lead) for name, x in arrays_of(*shape, form).items()}
        return Quantised(
            **held, kind=form.kind, group=form.group, rounds_rows=form.rounds_rows,
            shared=input_parts(weight, mesh.num_head_parts(on)), float_dtype=dtype.name,
        )  # fmt: skip

    def layer(lead: tuple[int, ...] = ()) -> Layer:
        return Layer(**{weight.name: place(weight, lead) for weight in layer_weights(config)})

    layers = layer((config.num_layers,)) if stacked else tuple(layer() for _ in range(config.num_layers))
    return Params(layers=layers, **{weight.name: place(weight) for weight in outer_weights(config)})


def device_bytes(params: Params) -> int:

    def held(leaf: Array | jax.ShapeDtypeStruct) -> int:
        return num_bytes(jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype))

    return sum(map(held, jax.tree.leaves(params)))


def num_parameters(config: ModelConfig) -> int:
    """Count the parameters in all weights; tied embeddings count once."""

    def count(weights: tuple[Weight, ...]) -> int:
        return sum(prod(shape_of(weight, config)) for weight in weights)

    return config.num_layers * count(layer_weights(config)) + count(outer_weights(config))


def form_of(weight: Weight, config: ModelConfig, name: str | None) -> Form | None:
    """Return the form in which `load(weights=name)` stores a weight, for a name in `core.quant.FORMS`; None for floats.

    The matrix that computes logits (the head, or a tied embedding) takes int8 whatever the name: errors of fewer bits
    would go straight into the logits, and in a small model it is a fifth of the bytes that a decoded token reads. An
    untied embedding stays in floats, because a lookup reads only one row.
    """
    if name is None or not weight.is_matrix:
        return None
    if weight in OUTER:
        return FORMS["int8"] if weight == (EMBED if config.tie_embeddings else HEAD) else None
    return FORMS[name]


def quantised_axes(weight: Weight, form: Form) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes of each array of a `Quantised`, by the array's name."""
    outputs, inputs = weight.axes
    if not form.group:
        return {"values": (outputs, inputs), "scale": (outputs,), "sample": (None,)}
    per_group = (inputs, outputs)
    return {"values": (inputs, None, outputs), "scale": per_group, "zero": per_group, "sample": (None,)}


def input_parts(weight: Weight, heads: int) -> int:
    """Return into how many parts `heads` devices along the mesh axis "heads" split a matrix's inputs: `heads` or 1."""
    return heads if mesh.RULES.get(weight.axes[1]) == mesh.HEADS else 1


def init_params(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Initialise stacked weights: norms to one, biases to zero, matrices to random normal values.

    The standard deviation is inputs ** -0.5, and (2 L) ** -0.5 times as much for a matrix with `Weight.residual`.
    Models with smaller initial values never learned to copy (LOG.md).
    """
    keys = iter(jax.random.split(key, 16))
    count, shrink = config.num_layers, (2 * config.num_layers) ** -0.5

    def fresh(weight: Weight, *lead: int) -> Array:
        shape = (*lead, *shape_of(weight, config))
        if not weight.is_matrix:
            return (jnp.zeros if weight.name.endswith("bias") else jnp.ones)(shape, dtype)
        scale = shape[-1] ** -0.5 * (shrink if weight.residual else 1.0)
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(dtype)

    layers = Layer(**{weight.name: fresh(weight, count) for weight in layer_weights(config)})
    # The head before the embedding: recorded runs used the random keys in this order.
    outer = {weight.name: fresh(weight) for weight in reversed(outer_weights(config))}
    return Params(layers=layers, **outer)
