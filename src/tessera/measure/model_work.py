"""What timings of whole models share: fresh inputs, the work that a call must do, and comparisons of two sides."""

from collections.abc import Mapping, Sequence

import numpy as np

from tessera.measure import timing
from tessera.measure.evidence import INTERVAL_ROUNDS, Comparison
from tessera.models.config import ModelConfig
from tessera.sparse.contract import Reads


def versus(against: str, baseline: Sequence[float], ours: Sequence[float], target: float | None) -> Comparison:
    """Compare medians: the ratio baseline / ours, its interval if there are enough samples, and whether it meets the
    target."""
    found = timing.ratio(baseline, ours)
    return Comparison(
        against=against,
        ratio=found,
        interval=timing.ratio_interval(baseline, ours) if len(ours) >= INTERVAL_ROUNDS else None,
        target=None if target is None else f">= {target:.4g}",
        met=None if target is None else found >= target,
    )


def draw_tokens(config: ModelConfig, seed: int, length: int) -> list[int]:
    return np.random.default_rng([seed & 0xFFFFFFFF, 7]).integers(0, config.vocab_size, length).tolist()


def fresh_seed(number: int) -> int:
    """Return a seed for a round. It is positive, even though warm-up rounds have negative numbers."""
    return number + 1000


def causal_pairs(length: int) -> float:
    """Count the visible (query, key) pairs of a causal prefill of T = `length` tokens: T (T + 1) / 2."""
    return length * (length + 1) / 2


def model_work(config: ModelConfig, length: int, *, past: int = 0, density: float = 1.0) -> Mapping[str, float]:
    """Return the FLOPs and minimum bytes of one forward call of `length` new tokens after `past` cached ones.

    Counts 2 FLOPs per weight and token, and 4 x head dim per layer, query head and visible (query, key) pair. The
    output head runs on the last token only. The bytes are the float32 weights and the cached keys and values that are
    read, each counted once. `density` is the share of visible keys read.
    """
    c = config
    per_layer = c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) * c.hidden_size
    per_layer += 3 * c.hidden_size * c.intermediate_size
    pairs = causal_pairs(length) + length * past
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs * density
    head = 2.0 * c.vocab_size * c.hidden_size
    cache = 2.0 * c.num_layers * c.num_kv_heads * c.head_dim * (past + length) * 4 * density
    return {
        "flops": 2.0 * c.num_layers * per_layer * length + attention + head,
        "bytes": 4.0 * (c.num_layers * per_layer + c.vocab_size * c.hidden_size) + cache,
    }


def layer_densities(reads: Sequence[Reads]) -> tuple[float, ...]:
    """Return keys read / keys visible for each layer of one prefill, over all its chunks."""
    read_L, visible_L = (sum(np.asarray(r[i], np.float64).sum(1) for r in reads) for i in (0, 1))
    return tuple((read_L / visible_L).tolist())
