"""How fast a model runs on a chip: rooflines of one device, nothing compiled and no device asked.

    decode_s  = max(weights / bandwidth, products / peak) + keys and values read / bandwidth + links
    prefill_s = the sum over a prompt's chunks of max(weights / bandwidth, products / peak) + attention / peak + links

    products  = 2 P flops per row, P the parameters in the matrices that a row meets
    attention = 4 N H flops per (row, key) that a layer reads; a decoded row reads 2 K H numbers per key and layer
    links     = bytes that a device sends / (half of LINK_BYTES_PER_S); a ring of n devices sends 2 (n - 1) / n of a sum

Bandwidth and peak are the nominal rates times BANDWIDTH_SHARE and SHARES. Left out: the latency of exchanges, tile
selection, and the host. An int8, int4 or fp8 matrix is read at its size and multiplied in bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from tessera.core.hardware import CHIPS, LINK_BYTES_PER_S, Chip, chip
from tessera.core.shapes import ceil_div, round_up
from tessera.models.catalogue import ANCHORS
from tessera.models.config import MAX_SIZE, ModelConfig
from tessera.models.footprint import CACHE_TYPES, Division, Types, divide, outer_bytes, weight_bytes
from tessera.models.weights import EMBED, layer_weights, shape_of
from tessera.runtime.step import CHUNK
from tessera.sparse.anchors import default_anchors
from tessera.sparse.kascade import Kascade

BANDWIDTH_SHARE = 0.8
"""Share of the nominal memory bandwidth that reads reach: `deviceless.tpu.predict.CALIBRATED`, fitted to measured
times of v5p and v6e."""

SAMPLES = 256
"""Positions of a prompt at which keys are counted; between them the count is nearly straight."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the nominal bfloat16 peak that a prefill reaches.

    Attributes:
        products: linear layers, with the operations around them.
        dense, score, sparse: attention of each role; sparse counts whole listed tiles of 128 keys.
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
"""Attention: the compiler's schedules of a prefill of 131,072 tokens, a tenth of the keys (evidence/tpu-figures.jsonl).
Products of v5e and v6e: its schedules of 8B steps (evidence/tpu-steps.jsonl). Products of v5p and v7x, and all of v4,
h100 and h200, are assumed. Nothing here is measured."""

DERIVED = ("v5e", "v5p", "v6e", "v7x")
"""Chips whose attention shares come from schedules."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned: a model, the devices, and the requests.

    Attributes:
        config: the model.
        chip: short name of a chip in `core.hardware.CHIPS`.
        devices: jax devices that share every layer.
        batch: sequences at a time.
        length: tokens per sequence, prompt and answer.
        policy: Kascade, for the times with a plan.
        chunk: rows of one prefill call per sequence.
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
                "pass a plan of this model"
            )

    @property
    def division(self) -> Division:
        """How the devices divide the model."""
        return divide(self.config, self.devices)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted times of one attention policy.

    Attributes:
        prefill_s: of the whole prompt; the time to its first token.
        decode_ms: of one token per sequence, at the end of the length.
        tokens_per_s: of all sequences together.
        prefill_parts_s, decode_parts_ms: weights, products, attention, keys and values, links; what overlaps is not
            added, so they may sum to more.
        prefill_bound, decode_bound: the largest part.
    """

    prefill_s: float
    decode_ms: float
    tokens_per_s: float
    prefill_parts_s: Mapping[str, float]
    decode_parts_ms: Mapping[str, float]
    prefill_bound: str
    decode_bound: str


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that one device sends per layer of a prefill chunk, and the rows per call from which `rows` sends fewer."""

    tensor_bytes: float
    rows_bytes: float
    break_even_rows: int


def recipe(config: ModelConfig, name: str | None = None, **options: Any) -> Kascade:
    """Return Kascade as the paper sets it up: its anchors for a model it names, else as many in proportion, evenly
    spread; a tenth of the keys; each head reads its own choice. `options` are further fields of Kascade."""
    layers, count = config.num_layers, default_anchors(config.num_layers)
    anchors = ANCHORS.get(name, tuple(i * layers // count for i in range(count)))
    head_map = ((*range(config.num_kv_heads),),) * layers
    return Kascade(anchors=anchors, head_map=head_map, heads="identity", **{"tile": 128, **options})


class Reading(NamedTuple):
    """Keys that rows read, summed over the layers of each role; `own` counts the keys that cheap scores rank."""

    dense: float = 0.0
    score: float = 0.0
    sparse: float = 0.0
    own: float = 0.0


def reading(config: ModelConfig, policy: Kascade | None, visible: int) -> Reading:
    """Count the keys that one row with `visible` keys reads in all layers; dense without a policy."""
    visible = min(visible, config.window or visible)
    if policy is None or visible < policy.crossover_tokens:
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
    """Predict both phases; dense without a policy."""
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
    """Count the parameters in the matrices of all layers."""
    shapes = (shape_of(weight, config) for weight in layer_weights(config) if weight.is_matrix)
    return config.num_layers * sum(rows * columns for rows, columns in shapes)


def exchanged(q: Question) -> Exchange:
    """Compute what one device sends per layer of a prefill chunk, in two ways.

        tensor: two sums of rows' activations, 2 x 2 (n - 1) / n x R D w
        rows: the layer's weights gathered, and queries, keys, values and outputs sent from rows to heads and back,
              (n - 1) / n x (weights + R / n x (2 N + 2 K) H w)

    over n devices and R = batch x chunk rows of w = 2 bytes.
    """
    config, n = q.config, q.division.heads
    share, width = (n - 1) / n, 2
    per_row = share * 2 * 2 * config.hidden_size * width
    turned = share * 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * width / n
    gathered = share * layer_parameters(config) / config.num_layers * width
    rows = q.batch * min(q.chunk, q.length)
    saved = per_row - turned
    return Exchange(
        tensor_bytes=rows * per_row,
        rows_bytes=rows * turned + gathered,
        break_even_rows=ceil_div(int(gathered), int(saved)) if saved > 0 else MAX_SIZE,
    )


def _read_s(q: Question, on: Chip, types: Types) -> float:
    """Seconds in which a device reads the weights that every row meets: all except an untied embedding's table."""
    found = weight_bytes(q.config, types=types, division=q.division)
    table = 0 if q.config.tie_embeddings else outer_bytes(EMBED, q.config, types=types, division=q.division)
    return (sum(found.values()) - table) / (on.bytes_per_s / on.devices * BANDWIDTH_SHARE)


def _links_s(q: Question, division: Division, rows: float, heads_rows: float) -> float:
    """Seconds of the exchanges: per layer two sums of activations over the devices that share heads, and one sum of
    float32 attention outputs over those that share keys; at the end, the last rows' logits."""
    config, rate = q.config, LINK_BYTES_PER_S[q.chip] / 2
    n, c = division.heads, division.context
    sums = config.num_layers * 2 * 2 * (n - 1) / n * rows * config.hidden_size * 2
    merged = config.num_layers * 2 * (c - 1) / c * heads_rows * config.num_heads * config.head_dim / n * 4
    gathered = (n - 1) / n * q.batch * config.vocab_size * 4
    return (sums + merged + gathered) / rate


def _prefill(q: Question, on: Chip, division: Division, types: Types, policy: Kascade | None) -> dict[str, float]:
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


def _decode(q: Question, on: Chip, division: Division, types: Types, policy: Kascade | None) -> dict[str, float]:
    config, peak = q.config, on.bf16_flops_per_s / on.devices
    keys, stored = reading(config, policy, q.length), CACHE_TYPES[types.cache]
    per_key = config.num_kv_heads * (config.head_dim * stored.bits / 8 + stored.scale_bytes) / division.devices
    moved = q.batch * per_key * (2 * (keys.dense + keys.score + keys.sparse) + keys.own)
    matrices = layer_parameters(config) + config.vocab_size * config.hidden_size
    return {
        "weights": _read_s(q, on, types),
        "products": 2.0 * q.batch * matrices / division.heads / (peak * SHARES[q.chip].products),
        "cache": moved / (on.bytes_per_s / on.devices * BANDWIDTH_SHARE),
        "links": _links_s(q, division, q.batch, q.batch),
    }
