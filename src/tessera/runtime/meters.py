"""Shares of a device's peak rates that an answer used: model FLOPs utilisation (MFU) and bandwidth use.

    MFU           = flops / (seconds * peak)
    bandwidth use = (weights + cache bytes read) / (seconds * bandwidth)

    flops of a prefill of T tokens = 2 P T + 2 V D + 4 H G keys
    flops of n decoded tokens      = 2 (P + V D) n + 4 H G keys
    cache bytes of decode          = keys * bytes of one position's key and value in one KV head

P is the number of elements in the layers' matrices. V D is the number of elements in the output head, which a prefill
applies to one row only. `keys` is the number of key positions read, summed over layers, KV heads and rows; a group of G
query heads shares each read. H is the head dim.
Work that the formulas leave out (padding, masked keys, recomputation, tile selection) lowers the shares. The peaks come
from the device's data sheet and are summed over the devices of the mesh. CPUs have no data sheet here; for them,
`generate --stats` measures the rates.
"""

import math
from dataclasses import dataclass

import jax

from tessera.core import hardware
from tessera.core.mesh import mesh_of
from tessera.core.quant import num_bytes
from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.models.weights import layer_weights, shape_of
from tessera.runtime.answers import Generation


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak rates of the devices that run a model, and the source of these numbers."""

    flops_per_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Use:
    """Shares of the peak rates that an answer used (a prefill's time includes compilation); None where unknown."""

    prefill_mfu: float | None = None
    decode_mfu: float | None = None
    decode_bandwidth: float | None = None

    def __str__(self) -> str:
        def share(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.1%}"

        return (
            f"MFU {share(self.prefill_mfu)} in prefill, {share(self.decode_mfu)} in decode; "
            f"bandwidth use {share(self.decode_bandwidth)} in decode"
        )


def nominal_peaks(params: Params) -> Peaks | None:
    """Return data-sheet rates, summed over the devices that share these weights; None if there is no data sheet."""
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    mesh, found = mesh_of(params), hardware.chip(device.device_kind)
    if found is None:
        return None
    count = (1 if mesh is None else mesh.size) / found.devices
    return Peaks(
        flops_per_s=count * found.bf16_flops_per_s,
        bytes_per_s=count * found.bytes_per_s,
        source=f"{found.name}'s data sheet",
    )


def matrix_elements(config: ModelConfig) -> int:
    """Count the elements of all layers' matrices, by which every row is multiplied."""
    shapes = (shape_of(weight, config) for weight in layer_weights(config))
    return config.num_layers * sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def attention_flops(config: ModelConfig, keys: float) -> float:
    """Return the flops of attention over `keys` positions per KV head: 4 H in each query head that shares them."""
    return 4.0 * config.head_dim * (config.num_heads // config.num_kv_heads) * keys


def prefill_flops(config: ModelConfig, tokens: int, keys: float) -> float:
    """Return the flops of a prefill that read `keys` positions, including the logits of its last token."""
    return 2.0 * matrix_elements(config) * tokens + _logits_flops(config) + attention_flops(config, keys)


def decode_flops(config: ModelConfig, tokens: int, keys: float) -> float:
    """Return the flops of `tokens` decoded tokens that together read `keys` positions."""
    return (2.0 * matrix_elements(config) + _logits_flops(config)) * tokens + attention_flops(config, keys)


def decode_bytes(
    config: ModelConfig, tokens: int, keys: float, *, weights: int, itemsize: int, scaled: bool = False
) -> float:
    """Return the bytes that `tokens` decoded tokens read: all weights per token, and `keys` positions of the cache.

    `weights` is from `weight_bytes`. With `scaled`, the cache is int8, with a bfloat16 scale per key and value.
    """
    return weights * tokens + keys * 2.0 * (config.head_dim * itemsize + (2 if scaled else 0))


def weight_bytes(params: Params) -> int:
    """Return the bytes of the weights that a decode step reads: of an untied embedding, only one row per sequence."""
    read = (params.layers, params.final_norm, params.embed if params.head is None else params.head)
    return sum(num_bytes(leaf) for tree in read for leaf in jax.tree.leaves(tree))


def use(answer: Generation, config: ModelConfig, params: Params, kv_dtype: str | None, peaks: Peaks | None) -> Use:
    """Compute the shares of the peak rates that one answer used, to a prompt of which no keys were reused.

    If several answers are decoded together, each of them is charged for reading all weights.
    """
    if peaks is None:
        return Use()
    size = 1 if kv_dtype else params.embed.dtype.itemsize
    steps, found = len(answer.tokens) - 1, {}
    if answer.tokens:
        done = prefill_flops(config, answer.prompt_tokens, answer.prefill_keys)
        found["prefill_mfu"] = done / (answer.ttft_s * peaks.flops_per_s)
    if answer.decode_tokens_per_s > 0:
        seconds = steps / answer.decode_tokens_per_s
        moved = decode_bytes(
            config, steps, answer.decode_keys, weights=weight_bytes(params), itemsize=size, scaled=kv_dtype is not None
        )
        found["decode_mfu"] = decode_flops(config, steps, answer.decode_keys) / (seconds * peaks.flops_per_s)
        found["decode_bandwidth"] = moved / (seconds * peaks.bytes_per_s)
    return Use(**found)


def _logits_flops(config: ModelConfig) -> float:
    return 2.0 * config.vocab_size * config.hidden_size
