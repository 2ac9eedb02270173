"""Choose the next token: penalties, temperature, top-k, top-p and min-p, in this order, as in transformers and vLLM.

Top-k, top-p and min-p each keep the tokens above some score, so together they are one threshold on z = penalised
logits / temperature. All ties at the threshold are kept (transformers drops some of them in top-p, by sort order).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32, UInt32

from tessera.core.mesh import keep, program
from tessera.runtime.limits import RANKS


@dataclass(frozen=True, kw_only=True)
class Method:
    """Optional steps of the sampling program. Static under jit, so that greedy decoding neither sorts nor draws.

    `filtered` applies top-k, top-p and min-p, and `penalised` the three penalties. `extra` adds a bias to the logits
    and returns the best tokens. Steps share a flag because each flag doubles the number of programs that a server
    compiles.
    """

    draw: bool = False
    filtered: bool = False
    penalised: bool = False
    extra: bool = False

    def __or__(self, other: "Method") -> "Method":
        return Method(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)})


GREEDY = MappingProxyType({"temperature": 0.0, "repetition_penalty": 1.0})
"""Arguments of Model.generate that make it take the best token, whatever the model's generation_config.json says."""


COLDEST = 1e-6
"""Minimum temperature above 0; a lower one counts as 0. Divided by much less, float32 logits become infinite."""
KINDS = MappingProxyType(
    {
        "temperature": float,
        "top_k": int,
        "top_p": float,
        "min_p": float,
        "repetition_penalty": float,
        "frequency_penalty": float,
        "presence_penalty": float,
    }
)
"""Parameter of `Sampling` -> type of its value."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Checked sampling parameters; see Model.generate. The values are not static under jit.

    These values switch a step off: temperature 0 (takes the best token), top_k 0 or -1, top_p 1, min_p 0,
    repetition_penalty 1, frequency_penalty 0, presence_penalty 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self):
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k is not None and (int(self.top_k) != self.top_k or self.top_k < -1):
            raise ValueError(f"top_k={self.top_k} must be a positive whole number, or 0 or -1 to keep all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 (keeps all tokens) and 1")
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive; 1.0 has no effect")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise ValueError(f"{name}={value} must be between -2 and 2; 0 has no effect")
        for name, kind in KINDS.items():  # arrays are not hashable, and caches have these values as keys
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def method(self) -> Method:
        draw = self.temperature > 0
        # greedy decoding needs no filter: every filter keeps the best token
        filters = bool(self.top_k) or self.top_p not in (None, 1) or bool(self.min_p)
        penalised = self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)
        return Method(draw=draw, filtered=draw and filters, penalised=penalised)

    def values(self, vocab_size: int) -> "Values":
        """Return the parameters as NumPy scalars; a parameter that is not set gets the value that has no effect."""
        return Values(
            temperature=np.float32(self.temperature),
            top_k=np.int32(vocab_size if not self.top_k else min(self.top_k, vocab_size)),
            top_p=np.float32(1.0 if self.top_p is None else self.top_p),
            min_p=np.float32(0.0 if self.min_p is None else self.min_p),
            repetition=np.float32(self.repetition_penalty),
            frequency=np.float32(self.frequency_penalty),
            presence=np.float32(self.presence_penalty),
        )


class Values(NamedTuple):
    """Sampling parameters as arguments of the jitted program: scalars, or one value per sequence [B]."""

    temperature: Float[np.ndarray, "#B"]
    top_k: Int32[np.ndarray, "#B"]
    top_p: Float[np.ndarray, "#B"]
    min_p: Float[np.ndarray, "#B"]
    repetition: Float[np.ndarray, "#B"]
    frequency: Float[np.ndarray, "#B"]
    presence: Float[np.ndarray, "#B"]


class Choice(NamedTuple):
    """One token per sequence.

    Attributes:
        logprob: ln of each chosen token's probability under softmax(logits), before penalties, temperature and filters.
        counts: `token_counts` with the chosen tokens included; None unless `method.penalised`.
        ranks: the RANKS most probable tokens, best first, each with its `logprob`; None unless `method.extra`.
    """

    token: Int32[Array, "B"]
    logprob: Float[Array, "B"]
    counts: Int32[Array, "B V"] | None
    ranks: tuple[Int32[Array, "B R"], Float[Array, "B R"]] | None = None


@program(static_argnames="method")
def choose(
    logits_BV: Float[Array, "B V"],
    counts_BV: Int32[Array, "B V"] | None,
    seeds_B: UInt32[Array, "B"],
    step: Int32[Array, "#B"],
    values: Values,
    bias_BV: Float[Array, "B V"] | None = None,
    *,
    method: Method,
) -> Choice:
    """Choose one token per sequence; a draw depends only on that sequence's seed, logits and step (its token's index).

    With `method.extra`, `bias_BV` is added to the logits first; -inf forbids a token. `method` holds every step that
    any sequence needs; for the others, values that switch a step off leave the token unchanged.
    """
    logits_BV = keep(logits_BV)  # gathered once: sorting a split vocabulary would gather it again and again
    z_BV = logits_BV + bias_BV if method.extra else logits_BV
    z_BV = distribution(z_BV, counts_BV, values, method=method)
    token_B = jnp.argmax(z_BV, axis=-1).astype(jnp.int32)
    if method.draw:
        keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(
            seeds_B, jnp.broadcast_to(step, token_B.shape)
        )
        drawn_B = jax.vmap(jax.random.categorical)(keys, z_BV).astype(jnp.int32)
        token_B = jnp.where(values.temperature > 0, drawn_B, token_B)
    chosen = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    total_B = jax.nn.logsumexp(logits_BV, axis=-1)
    ranks = None
    if method.extra:
        best, ids = jax.lax.top_k(logits_BV, min(RANKS, logits_BV.shape[-1]))
        ranks = ids, best - total_B[:, None]
    if method.penalised:
        counts_BV = counts_BV.at[jnp.arange(token_B.shape[0]), token_B].add(2)
    return keep(Choice(token_B, chosen - total_B, counts_BV, ranks))


def distribution(
    logits_BV: Float[Array, "B V"], counts_BV: Int32[Array, "B V"] | None, values: Values, *, method: Method
) -> Float[Array, "B V"]:
    """Return the scores to sample from: penalised, divided by the temperature, -inf where filtered out."""
    z_BV = logits_BV
    values = Values(*(jnp.broadcast_to(value, z_BV.shape[:1])[:, None] for value in values))
    if method.penalised:
        penalised = jnp.where(z_BV < 0, z_BV * values.repetition, z_BV / values.repetition)
        z_BV = jnp.where(counts_BV > 0, penalised, z_BV)
        answered_BV = counts_BV // 2  # the prompt's tokens do not count for these two
        z_BV -= values.frequency * answered_BV + values.presence * (answered_BV > 0)
    if method.draw:
        z_BV = z_BV / jnp.where(values.temperature > 0, values.temperature, 1)
    if method.filtered:
        z_BV = jnp.where(z_BV >= threshold(z_BV, values), z_BV, -jnp.inf)
    return z_BV


def threshold(z_BV: Float[Array, "B V"], values: Values) -> Float[Array, "B 1"]:
    """Return the lowest score that survives top-k, then top-p over the survivors, then min-p; each value is [B,1]."""
    ascending = jnp.sort(z_BV, axis=-1)
    vocab_size = z_BV.shape[-1]
    kth_B1 = jnp.take_along_axis(ascending, vocab_size - values.top_k, axis=-1)
    kept = jnp.where(ascending >= kth_B1, ascending, -jnp.inf)
    cumulative = jnp.cumsum(jax.nn.softmax(kept, axis=-1), axis=-1)
    removed = jnp.sum(cumulative <= 1 - values.top_p, axis=-1, keepdims=True)  # the first ones: cumulative ascends
    nucleus_B1 = jnp.take_along_axis(ascending, jnp.minimum(removed, vocab_size - 1), axis=-1)
    relative_B1 = ascending[:, -1:] + jnp.log(values.min_p)
    return jnp.maximum(jnp.maximum(kth_B1, nucleus_B1), relative_B1)


def token_counts(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], vocab_size: int
) -> Int32[np.ndarray, "B V"]:
    """Return twice the number of times that each token is in the answer, plus 1 if it is in the prompt.

    One array for both, because the repetition penalty needs only whether a token is in either.
    """
    counts = np.zeros((len(prompts), vocab_size), np.int32)
    for row, prompt, answer in zip(counts, prompts, answers, strict=True):
        row[np.asarray(prompt)] = 1
        np.add.at(row, np.asarray(answer, np.int32), 2)
    return counts


def check_seeds(seed: int | Sequence[int], batch: int) -> list[int]:
    """Return one seed per sequence, the same one for all if `seed` is a number; raise ValueError if one is invalid."""
    seeds = [seed] * batch if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != batch:
        raise ValueError(f"seed has {len(seeds)} values for {batch} prompts: pass one integer, or one per prompt")
    return [check_seed(value) for value in seeds]


def check_seed(seed: int) -> int:
    """Return the seed as a Python integer; raise ValueError unless it is one of 64 bits, with or without a sign."""
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed={seed} must be a whole number from -2**63 to 2**64 - 1")
    return int(seed)


def fold_seed(seed: int) -> int:
    """Return the 32-bit seed of the random draws: the low half of a 64-bit seed XOR a hash of its high half.

    A seed below 2**32 keeps its value, because the hash of 0 is 0. A negative seed counts as its two's complement. The
    hash is the last step of MurmurHash3 (Appleby, 2011), which maps no two values to one.
    """
    high, low = divmod(seed % 2**64, 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        high = (high ^ high >> shift) * factor % 2**32
    return low ^ high


def later_seed(seed: int, count: int) -> int:
    """Return seed + count, wrapped to 64 bits with a sign: the seed of the choice or the attempt `count` after this."""
    return (seed + count + 2**63) % 2**64 - 2**63
