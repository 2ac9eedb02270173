"""Check a measured gain against Amdahl's law: time every attention call of a prefill without the rest of the model.

    predicted gain = 1 / ((1 - p) + p / s)

Here, p is attention's share of the dense prefill's time, and s is the speed-up of attention alone. Neither uses the
measured end-to-end gain, so prediction and measurement can differ: a smaller measured gain means time lost outside
attention.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from lab.bench.attention import check_output, oracle_rows
from lab.bench.stand import draw
from tessera.attention.contract import AttentionSpec, KeyValues, Positions
from tessera.measure import timing
from tessera.measure.model_work import fresh_seed, layer_densities
from tessera.models.cache import Cache
from tessera.runtime.row_pool import RowPool
from tessera.sparse.contract import Policy, Reads


@partial(jax.jit, static_argnames=("spec", "policy"))
def attend_layers(
    q: Float[Array, "B T N H"], cache: Cache, positions: Positions, *, spec: AttentionSpec, policy: Policy
) -> tuple[Float[Array, "B T N H"], Reads | None]:
    """Run a chunk's attention in every layer of the cache; return (sum of the outputs, counts of keys read)."""
    pairs = [KeyValues(k, v) for k, v in zip(cache.k, cache.v)]
    state, total = policy.init_state(len(pairs), pairs[0].shapes(q), spec), jnp.zeros_like(q)
    for layer, kv in enumerate(pairs):
        out, state = policy.attend(layer, q, kv, spec, positions, state)
        total += out
    return total, policy.reads(state)


class AttentionAlone:
    """The attention calls that prefill one prompt in the pool's chunks, on random keys and values.

    Args:
        pool: an empty pool of one row with the policy to time. A copy of its cache is filled with random numbers.
        length: tokens of the prompt.
    """

    def __init__(self, pool: RowPool, length: int):
        self.policy, self.config, self.length = pool.policy, pool.config, length
        self.chunks: list[tuple[int, int]] = []  # (first row, rows), as `RowPool.run` cuts a prompt
        while (start := sum(size for _, size in self.chunks)) < length:
            self.chunks.append((start, pool.size_for(start, length - start, pool.sizes[0])))
        self.spec = AttentionSpec(window=self.config.window)
        leaves, tree = jax.tree.flatten(pool.cache)
        self.cache = tree.unflatten(jnp.asarray(draw([0, i], x.shape), x.dtype) for i, x in enumerate(leaves))
        self.reads: list[Reads] = []
        for size in {size for _, size in self.chunks}:  # compile and warm up each chunk size, with no valid rows
            self._attend(jnp.zeros((1, size, self.config.num_heads, self.config.head_dim)), 0, 0)

    def sample(self, number: int) -> float:
        """Return the seconds that all calls take on fresh queries; check the outputs of the prompt's last row.

        Raises:
            ValueError: an output is not finite, or an output of dense attention differs from the float64 result.
        """
        rows = self.chunks[-1][0] + self.chunks[-1][1]
        q = draw([fresh_seed(number), 2], (1, rows, self.config.num_heads, self.config.head_dim))
        chunks = [(jnp.asarray(q[:, first : first + size]), first) for first, size in self.chunks]
        jax.block_until_ready((chunks, self.cache))
        start = time.perf_counter()
        done = [self._attend(part, first, min(part.shape[1], self.length - first)) for part, first in chunks]
        jax.block_until_ready(done)
        seconds = time.perf_counter() - start
        self.reads = [counted for _, counted in done]
        self._check(q, np.asarray(done[-1][0][0, self.length - 1 - chunks[-1][1]]))
        return seconds

    @property
    def density(self) -> float:
        """Share of visible keys that the last sample's calls read, averaged over layers."""
        return float(np.mean(layer_densities(self.reads)))

    def _attend(self, q: Array, first: int, count: int) -> tuple[Array, Reads]:
        positions = Positions(*(np.array([value], np.int32) for value in (first, first + count, count)))
        return attend_layers(q, self.cache, positions, spec=self.spec, policy=self.policy)

    def _check(self, q: np.ndarray, found_NH: np.ndarray) -> None:
        if not np.isfinite(found_NH).all():
            raise ValueError(f"{self.policy.name} attention alone gave numbers that are not finite on a timed call")
        if self.policy.name == "dense":
            pairs = (jnp.swapaxes(jnp.stack(pair), 2, 3) for pair in zip(self.cache.k, self.cache.v))
            expected = sum(oracle_rows(q, k, v, [self.length - 1]) for k, v in pairs)
            check_output(found_NH[:, None], expected, "float32", "dense attention alone")


def amdahl_gain(share: float, gain: float) -> float:
    """Return the overall speed-up if a `share` of the time becomes `gain` times faster: 1 / (1 - share + share / gain).

    Raises:
        ValueError: `share` is not between 0 and 1, or `gain` is not positive.
    """
    if not 0 <= share <= 1 or not gain > 0:
        raise ValueError(f"{share=} must be between 0 and 1, and {gain=} must be positive")
    return 1 / ((1 - share) + share / gain)


def predict(dense: Sequence[float], attention: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the gain that Amdahl's law predicts, and the law's inputs, as facts of a record.

    "attention_share" is median(attention["dense"]) / median(dense), and "attention_gain" is
    median(attention["dense"]) / median(attention["kascade"]).

    Args:
        dense: seconds of the whole prefill under dense attention.
        attention: seconds of the attention calls, by "dense" and "kascade".

    Returns:
        {"attention_share", "attention_gain", "amdahl_gain", "attention_dense_s", "attention_kascade_s"}; the last two
        are lists of samples. "amdahl_gain" is missing if attention alone took longer than the whole prefill, which
        means that the prompt was too short to time.
    """
    share = 1 / timing.ratio(dense, attention["dense"])
    gain = timing.ratio(attention["dense"], attention["kascade"])
    parts = {"attention_share": share, "attention_gain": gain}
    parts |= {"amdahl_gain": amdahl_gain(share, gain)} if share <= 1 else {}
    return parts | {f"attention_{name}_s": list(samples) for name, samples in attention.items()}
