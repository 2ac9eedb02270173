"""Shares of a device's peak rates that an answer used: model FLOPs utilisation (MFU) and bandwidth use.

    MFU           = flops / (seconds * peak)
    bandwidth use = (weights + cache bytes read) / (seconds * bandwidth)

    flops of a prefill of T tokens = 2 P T + 2 V D + 4 H G keys
    flops of n decoded tokens      = 2 (P + V D) n + 4 H G keys
    cache bytes of decode          = keys * bytes of one position's key and value in one KV head

P is the number of elements in the layers' matrices, V D that in the output head, which a prefill applies to one row
only. `keys` is the number of key positions read, summed over layers, KV heads and rows; a group of G query heads shares
each read. H is the head dim. Work left out (padding, masked keys, recomputation, tile selection) lowers the shares. The
peaks come from the device's data sheet and are summed over the devices of the mesh. CPUs have no data sheet here; for
them, `generate --stats` measures the rates.
"""

from dataclasses import dataclass

import jax

from tessera.core import hardware
from tessera.core.mesh import mesh_of
from tessera.core.quant import num_bytes
from tessera.models.config import ModelConfig
from tessera.models.footprint import CACHE_TYPES
from tessera.models.layers import Params
from tessera.runtime.answers import Generation
from tessera.runtime.roofline import layer_parameters


@dataclass(frozen=True, kw_only=True)
class Peaks:
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


def weight_bytes(params: Params) -> int:
    """Return the bytes of the weights that a decode step reads: of an untied embedding, only one row per sequence."""
    read = (params.layers, params.final_norm, params.embed if params.head is None else params.head)
    return sum(num_bytes(leaf) for tree in read for leaf in jax.tree.leaves(tree))


def use(answer: Generation, config: ModelConfig, params: Params, kv_dtype: str | None, peaks: Peaks | None) -> Use:
    """Compute the shares of the peak rates that one answer used; each answer is charged for reading all weights."""
    if peaks is None:
        return Use()
    head, row = 2.0 * config.vocab_size * config.hidden_size, 2.0 * layer_parameters(config)
    key = 4.0 * config.head_dim * (config.num_heads // config.num_kv_heads)  # per query head, 2 H for q.k, 2 H for p v
    found = {}
    if answer.tokens:
        done = row * answer.prompt_tokens + head + key * answer.prefill_keys
        found["prefill_mfu"] = done / (answer.ttft_s * peaks.flops_per_s)
    if answer.decode_tokens_per_s > 0:
        steps, stored = len(answer.tokens) - 1, CACHE_TYPES[kv_dtype or str(params.embed.dtype)]
        seconds = steps / answer.decode_tokens_per_s
        done = (row + head) * steps + key * answer.decode_keys
        found["decode_mfu"] = done / (seconds * peaks.flops_per_s)
        key_bytes = 2 * (config.head_dim * stored.element + stored.scale)
        moved = weight_bytes(params) * steps + key_bytes * answer.decode_keys
        found["decode_bandwidth"] = moved / (seconds * peaks.bytes_per_s)
    return Use(**found)
