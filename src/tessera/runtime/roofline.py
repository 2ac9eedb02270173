"""Predict how fast a model runs on a chip from the roofline of one device. No compiler and no device is needed.

    decode_s  = max(weights / bandwidth, products / peak) + cache / bandwidth + links
    prefill_s = max(chunks * weights / bandwidth, products / peak) + attention / peak + links

    weights   = bytes of the device's weights; every chunk of a prompt reads them once
    products  = 2 P flops per row, where P counts the parameters of the matrices that multiply the row
    cache     = bytes of keys and values read: 2 K H numbers per key that a layer reads
    attention = 4 N H flops for each key that a layer reads for a row, with N query heads, K KV heads and head dim H
    links     = bytes that a device sends / (LINK_BYTES_PER_S / 2), because that rate counts both directions. To add up
                an array over a ring of n devices, each device sends 2 (n - 1) / n of the array's bytes.

Bandwidth is the nominal bandwidth times BANDWIDTH_SHARE; peak is the nominal peak times a value of SHARES. The
prediction leaves out tile selection, the work of the host and the latency of exchanges. An int8, int4 or fp8 matrix is
read in that type and multiplied in bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from tessera.core.hardware import CHIPS, LINK_BYTES_PER_S, Chip, chip
from tessera.core.mesh import MeshShape
from tessera.core.shapes import ceil_div, round_up
from tessera.models.catalogue import ANCHORS
from tessera.models.config import MAX_SIZE, ModelConfig
from tessera.models.footprint import CACHE_TYPES, Types, divide, one_weight, weight_bytes
from tessera.models.weights import EMBED, layer_weights, shape_of
from tessera.runtime.step import CHUNK
from tessera.sparse.anchors import default_anchors
from tessera.sparse.kascade import Kascade

BANDWIDTH_SHARE = 0.8
"""Share of the nominal memory bandwidth that reads reach; from `deviceless.tpu.predict.CALIBRATED`, which was fitted to
measured times of v5p and v6e."""

SAMPLES = 256
"""Number of positions of a prompt at which `reading` counts keys; between them the count is nearly linear."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the nominal bfloat16 peak that a prefill reaches in linear layers, with the operations around them, and
    in attention by the layer's role (`Kascade.roles`). The work of a sparse layer counts every key of its tiles.
    """

    products: float
    dense: float
    score: float
    sparse: float


SHARES: Mapping[str, Shares] = MappingProxyType(
    {
        "v5e": Shares(products=0.95, dense=0.947, score=0.85, sparse=0.417),
        "v5p": Shares(products=0.9, dense=0.946, score=0.893, sparse=0.603),
        "v6e": Shares(products=0.863, dense=0.463, score=0.439, sparse=0.179),
        "v7x": Shares(products=0.9, dense=0.407, score=0.385, sparse=0.235),
        **dict.fromkeys(("v4", "h100", "h200"), Shares(products=0.7, dense=0.5, score=0.5, sparse=0.25)),
    }
)
"""Chip -> shares; none is measured. Shares of attention come from the compiler's schedules of a prefill of 131,072
tokens that reads a tenth of the keys, with heads of HEAD_DIM (evidence/tpu-figures.jsonl). Shares of products on v5e
and v6e come from the compiler's schedules of steps of an 8B model (evidence/tpu-steps.jsonl). All others are assumed:
products on v5p and v7x, and every share of v4, h100 and h200."""

HEAD_DIM = 128
"""Head dim of the schedules behind SHARES. Models with other head dims are predicted with the same shares. Narrower
heads fill less of the matrix unit, so their prefill takes longer than predicted (LOG.md has llama-3.2-1b, with heads of
64)."""

DERIVED = ("v5e", "v5p", "v6e", "v7x")
"""Chips whose attention shares come from the compiler's schedules."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Input of the planner: a model, the devices, and the requests.

    Attributes:
        devices: number of JAX devices that share every layer.
        batch: number of sequences that run together.
        length: number of tokens per sequence, prompt and answer together.
        policy: Kascade policy whose times are predicted.
        chunk: rows per sequence of one prefill call. Memory is that of a call with all sequences, although a pool
            prefills one at a time: what fits here fits there.
    """

    config: ModelConfig
    chip: str
    devices: int
    batch: int
    length: int
    policy: Kascade
    chunk: int = CHUNK

    def __post_init__(self):
        names = [known.name for known in CHIPS]
        if self.chip not in names:
            raise ValueError(f"chip={self.chip!r} must be one of {', '.join(names)}")
        for name in ("devices", "batch", "length", "chunk"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to {MAX_SIZE:,}")
        if len(self.policy.head_map) != self.config.num_layers:
            raise ValueError(
                f"the Kascade plan has {len(self.policy.head_map)} layers and the model {self.config.num_layers}: "
                "pass a plan made for this model"
            )

    @property
    def division(self) -> MeshShape:
        return divide(self.config, self.devices)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted times of one attention policy.

    Attributes:
        prefill_s: time to prefill the whole prompt of every sequence.
        decode_ms: time to decode one token of every sequence, when the sequences have their full length.
        tokens_per_s: decoded tokens per second of all sequences together.
        prefill_parts_s, decode_parts_ms: times of "weights", "products", "links", and "attention" or (decode) "cache".
            Weights and products overlap, so the parts may sum to more than the whole.
        prefill_bound, decode_bound: name of the longest part.
    """

    prefill_s: float
    decode_ms: float
    tokens_per_s: float
    prefill_parts_s: Mapping[str, float]
    decode_parts_ms: Mapping[str, float]
    prefill_bound: str
    decode_bound: str


def recipe(config: ModelConfig, name: str | None = None, **options: Any) -> Kascade:
    """Return the Kascade policy of the paper, which reads a tenth of the keys; each head reuses its anchor's same head.

    If `name` is not a model whose anchors the paper gives, `default_anchors` of them are spread evenly. `options` set
    further fields of Kascade.
    """
    layers, count = config.num_layers, default_anchors(config.num_layers)
    anchors = ANCHORS.get(name, tuple(i * layers // count for i in range(count)))
    head_map = ((*range(config.num_kv_heads),),) * layers
    return Kascade(anchors=anchors, head_map=head_map, heads="identity", **{"tile": 128, **options})


class Reading(NamedTuple):
    """Numbers of keys that the layers of each role (`Kascade.roles`) read, summed over layers.

    `own` counts the keys that layers score to select tiles; the keys that they then read count as `sparse`.
    """

    dense: float = 0.0
    score: float = 0.0
    sparse: float = 0.0
    own: float = 0.0


def reading(config: ModelConfig, policy: Kascade | None, visible: int, *, decode: bool = False) -> Reading:
    """Count the keys that a row reads in all layers if it sees `visible` keys; `policy=None` means dense attention."""
    rule = None if policy is None else policy.decode_at if decode else policy.at_position
    sparse = rule is not None and rule(visible - 1, 1) is policy
    visible = min(visible, config.window or visible)
    if not sparse:
        return Reading(dense=config.num_layers * visible)
    always = policy.local + policy.sinks + policy.query_tile

    def listed(fraction: float) -> float:
        budget = max(fraction * visible, policy.minimum) if fraction > 0 else 0
        return min(visible, round_up(int(budget), policy.tile) + round_up(always, policy.tile))

    found = dict.fromkeys(Reading._fields, 0.0)
    for layer, role in enumerate(policy.roles()):
        if role in ("dense", "score"):
            found[role] += visible
            continue
        budgets = policy.budgets[layer] if policy.budgets else (policy.fraction,)
        found["sparse"] += sum(map(listed, budgets)) / len(budgets)
        found["own"] += visible if role == "own" else 0
    return Reading(**found)


def speed(q: Question, types: Types, policy: Kascade | None) -> Speed:
    """Predict the times of prefill and decode under a policy; `policy=None` means dense attention."""
    on, division = chip(q.chip), q.division
    prefill, decode = _prefill(q, on, division, types, policy), _decode(q, on, division, types, policy)
    prefill_s = max(prefill["weights"], prefill["products"]) + prefill["attention"] + prefill["links"]
    decode_s = max(decode["weights"], decode["products"]) + decode["cache"] + decode["links"]
    return Speed(
        prefill_s=prefill_s,
        decode_ms=1e3 * decode_s,
        tokens_per_s=q.batch / decode_s,
        prefill_parts_s=prefill,
        decode_parts_ms={name: 1e3 * seconds for name, seconds in decode.items()},
        prefill_bound=max(prefill, key=prefill.get),
        decode_bound=max(decode, key=decode.get),
    )


def layer_parameters(config: ModelConfig) -> int:
    """Count the parameters in the matrices of all layers, by which every row is multiplied."""
    shapes = (shape_of(weight, config) for weight in layer_weights(config) if weight.is_matrix)
    return config.num_layers * sum(rows * columns for rows, columns in shapes)


def _read_s(q: Question, on: Chip, types: Types) -> float:
    """Return the seconds in which a device reads its weights once; of an untied embedding, a token reads one row."""
    found = weight_bytes(q.config, types=types, division=q.division)
    table = 0 if q.config.tie_embeddings else one_weight(EMBED, q.config, types, q.division, EMBED.stored)
    return (sum(found.values()) - table) / (on.bytes_per_s / on.devices * BANDWIDTH_SHARE)


def _links_s(q: Question, division: MeshShape, rows: float, heads_rows: float) -> float:
    """Return the seconds to exchange `rows` rows of activations and `heads_rows` rows of attention outputs.

    Each layer adds up activations twice over the devices that divide the heads, and float32 attention outputs once over
    the devices that divide the keys. At the end, the logits of each sequence's last row are gathered.
    """
    config, rate = q.config, LINK_BYTES_PER_S[q.chip] / 2
    n, c = division.heads, division.context
    sums = config.num_layers * 2 * 2 * (n - 1) / n * rows * config.hidden_size * 2
    merged = config.num_layers * 2 * (c - 1) / c * heads_rows * config.num_heads * config.head_dim / n * 4
    gathered = (n - 1) / n * q.batch * config.vocab_size * 4
    return (sums + merged + gathered) / rate


def _prefill(q: Question, on: Chip, division: MeshShape, types: Types, policy: Kascade | None) -> dict[str, float]:
    config, peak, share = q.config, on.bf16_flops_per_s / on.devices, SHARES[q.chip]
    rows = q.batch * q.length
    steps = min(SAMPLES, q.length)
    found = [reading(config, policy, int((step + 0.5) * q.length / steps) + 1) for step in range(steps)]
    keys = Reading(*(sum(column) / steps * rows for column in zip(*found)))
    pair = 4.0 * config.num_heads * config.head_dim / division.devices / peak
    ranked = 0.0 if policy is None else keys.own / (2 * policy.score_keys * policy.score_rows)  # keys, no values
    head = 2.0 * q.batch * config.vocab_size * config.hidden_size / division.heads
    products = 2.0 * layer_parameters(config) * rows / division.devices + head
    return {
        "weights": ceil_div(q.length, q.chunk) * _read_s(q, on, types),
        "products": products / (peak * share.products),
        "attention": pair
        * (keys.dense / share.dense + keys.score / share.score + (keys.sparse + ranked) / share.sparse),
        "links": _links_s(q, division, rows / division.context, rows / division.context),
    }


def _decode(q: Question, on: Chip, division: MeshShape, types: Types, policy: Kascade | None) -> dict[str, float]:
    config, peak = q.config, on.bf16_flops_per_s / on.devices
    keys, stored = reading(config, policy, q.length, decode=True), CACHE_TYPES[types.cache]
    per_key = config.num_kv_heads * (config.head_dim * stored.element + stored.scale) / division.devices
    moved = q.batch * per_key * (2 * (keys.dense + keys.score + keys.sparse) + keys.own)
    matrices = layer_parameters(config) + config.vocab_size * config.hidden_size
    return {
        "weights": _read_s(q, on, types),
        "products": 2.0 * q.batch * matrices / division.heads / (peak * SHARES[q.chip].products),
        "cache": moved / (on.bytes_per_s / on.devices * BANDWIDTH_SHARE),
        "links": _links_s(q, division, q.batch, q.batch),
    }
