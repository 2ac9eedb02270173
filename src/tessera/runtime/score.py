"""Run text through the decoder in chunks of whole query tiles, and score the next-token predictions.

Each window of text runs under a policy with a separate cache. As in generation, each row's policy depends on the row's
position (`Policy.at_position`), and a chunk ends where another policy begins. The output head processes rows in blocks
of ROWS, so its memory is ROWS x vocabulary. Row t predicts the next token x with probabilities p under dense attention
and p' under the policy:

    loss = -ln p'(x)        KL = sum over tokens v of p(v) (ln p(v) - ln p'(v))
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

from tessera.attention.contract import Positions
from tessera.core import interrupt
from tessera.core.mesh import keep, program
from tessera.core.shapes import round_up
from tessera.models.cache import Cache, keep_split
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.layers import Params
from tessera.runtime.compilation import CHUNK_UNIT
from tessera.runtime.step import allocate
from tessera.sparse.contract import Policy, Reads

CHUNK = 512
"""Maximum number of rows per call, unless the query tile is larger. It is smaller than in generation (`step.CHUNK`),
because a recorder (`sparse.recording`) holds masses over all keys for each query tile of the chunk."""

ROWS = 256
"""Number of rows whose logits are computed at a time. With a large vocabulary, more rows would not fit in memory."""

PolicyOf = Policy | Callable[[Any], Policy]
"""A policy, or a function that makes one from an array. Either is a static argument of jit. With a function, one
program serves many arrays, because the array is traced; a policy that held a traced array could not be static."""


class Chunk(NamedTuple):
    """Result of one chunk of a window, of whose rows `count` hold tokens; the others are padding.

    `hidden` is after the final norm; `notes` is the policy's final state.
    """

    start: int
    count: int
    hidden: Float[Array, "T D"]
    notes: Any
    policy: Policy

    @property
    def reads(self) -> Reads | None:
        return self.policy.reads(self.notes)


@program(static_argnames=("config", "policy"), donate_argnames="cache")
def run_chunk(
    params: Params,
    cache: Cache,
    tokens_BT: Int32[Array, "1 T"],
    q_start_B: Int32[Array, "1"],
    q_len_B: Int32[Array, "1"],
    array: Any = None,
    *,
    config: ModelConfig,
    policy: PolicyOf,
) -> tuple[Float[Array, "1 T D"], Cache, Any]:
    """Run `q_len_B` tokens from position `q_start_B` on; return hidden states, cache and the policy's notes."""
    positions = Positions(q_start_B, q_start_B + q_len_B, q_len_B)
    policy = make_policy(policy, array)
    hidden, cache, notes = forward(params, tokens_BT, cache, positions, config=config, policy=policy)
    return keep(hidden), keep_split(cache), notes


def make_policy(policy: PolicyOf, array: Any) -> Policy:
    return policy if array is None else policy(array)


class Run:
    """One sequence under a policy: its cache, and the calls that fill it.

    Args:
        model: any object with `params` and `config`; its `kv_dtype`, if any, is that of the cache.
        policy: the policy, or a function that makes it from `array`; static under jit.
        num_keys: number of keys that the cache must hold. Each cache size compiles new programs, so pass the same
            number for sequences of different lengths.
    """

    def __init__(self, model: Any, policy: PolicyOf, num_keys: int, array: Any = None):
        self.model, self.policy, self.array = model, policy, array
        made = make_policy(policy, array)
        self.unit = lcm(CHUNK_UNIT, made.query_tile)  # as in generation, which rounds the cross-over up to it
        self.rows = round_up(min(CHUNK, round_up(num_keys, CHUNK_UNIT)), made.query_tile)
        cut = made.at_position(0, self.unit) != made
        size = round_up(num_keys, self.rows) + (self.rows if cut else 0)  # for the padding of the chunk before the cut
        kv_dtype = getattr(model, "kv_dtype", None)
        self.cache = allocate(model.params, config=model.config, batch=1, num_keys=size, kv_dtype=kv_dtype)

    def call(self, tokens: Any, start: int, rows: int) -> Chunk:
        """Run tokens, padded to `rows` rows, from a multiple of the query tile on, under the first one's policy."""
        return self._call(tokens, start, rows, self._at(start))

    def decode(self, token: int, position: int) -> Chunk:
        policy = self.policy if self.array is not None else self.policy.decode_at(position, self.unit)
        return self._call([token], position, 1, policy)

    def _at(self, position: int) -> PolicyOf:
        return self.policy if self.array is not None else self.policy.at_position(position, self.unit)

    def _call(self, tokens: Any, start: int, rows: int, policy: PolicyOf) -> Chunk:
        interrupt.check()
        padded = np.zeros((1, rows), np.int32)
        padded[0, : len(tokens)] = tokens
        where = (np.array([start], np.int32), np.array([len(tokens)], np.int32))
        hidden, self.cache, notes = run_chunk(
            self.model.params, self.cache, padded, *where, self.array, config=self.model.config, policy=policy
        )
        return Chunk(start, len(tokens), hidden[0], notes, make_policy(policy, self.array))

    def fill(self, tokens: Any) -> Iterator[Chunk]:
        start = 0
        while start < len(tokens):
            end = min(start + self.rows, len(tokens))
            first, units = self._at(start), range(round_up(start + 1, self.unit), end, self.unit)
            end = next((n for n in units if self._at(n) != first), end)
            yield self.call(tokens[start:end], start, self.rows)
            start = end


def run_window(
    model: Any, tokens: Any, policy: PolicyOf, array: Any = None, *, num_keys: int | None = None
) -> Iterator[Chunk]:
    return Run(model, policy, num_keys or len(tokens), array).fill(tokens)


def run_whole(
    model: Any, tokens: Any, policy: PolicyOf, array: Any = None, *, num_keys: int | None = None
) -> tuple[np.ndarray, list[Any]]:
    """Run a window of W token ids; return hidden states [W,D] and the notes of each chunk, both on the host."""
    hidden, notes = [], []
    for chunk in run_window(model, tokens, policy, array, num_keys=num_keys):
        hidden.append(np.asarray(chunk.hidden)[: chunk.count])
        notes.append(jax.device_get(chunk.notes))
    return np.concatenate(hidden), notes


class Scored(NamedTuple):
    """How well some rows of a run predict their next tokens: -ln p in nats, and whether the token is the top-1."""

    loss: Float32[np.ndarray, "rows"]
    right: Bool[np.ndarray, "rows"]


class Compared(NamedTuple):
    """Rows of a run under a policy, compared with the same rows under dense attention.

    Attributes:
        kl: KL(dense || policy), in nats.
        loss_dense, loss: -ln p of the next token, in nats.
        right_dense, right: whether the next token is the top-1 prediction.
        same: whether both top-1 predictions are the same.
    """

    kl: Float32[np.ndarray, "rows"]
    loss_dense: Float32[np.ndarray, "rows"]
    loss: Float32[np.ndarray, "rows"]
    right_dense: Bool[np.ndarray, "rows"]
    right: Bool[np.ndarray, "rows"]
    same: Bool[np.ndarray, "rows"]


@program()
def _score_block(params, hidden, targets):
    logp = jax.nn.log_softmax(logits(params, hidden).astype(jnp.float32))
    return keep(Scored(-jnp.take_along_axis(logp, targets[:, None], -1)[:, 0], logp.argmax(-1) == targets))


@program()
def _compare_block(params, other, dense, ours, targets):
    runs = ((params, dense), (other, ours))
    pair = [jax.nn.log_softmax(logits(own, x).astype(jnp.float32)) for own, x in runs]
    kl = jnp.sum(jnp.exp(pair[0]) * (pair[0] - pair[1]), -1)
    losses = [-jnp.take_along_axis(x, targets[:, None], -1)[:, 0] for x in pair]
    best = [x.argmax(-1) for x in pair]
    return keep(Compared(kl, *losses, *(x == targets for x in best), best[0] == best[1]))


def score_rows(model: Any, hidden: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> Scored:
    """Score rows of a run over a window of W tokens with hidden states [W,D]; row t predicts token t + 1."""
    return Scored(*_by_block(partial(_score_block, model.params), (hidden,), tokens, rows))


def compare_rows(
    model: Any, dense: np.ndarray, ours: np.ndarray, tokens: np.ndarray, rows: np.ndarray, *, other: Any = None
) -> Compared:
    """Compare rows of a run, by the model `other` if given, with the same rows under dense attention."""
    judge = partial(_compare_block, model.params, (other or model).params)
    return Compared(*_by_block(judge, (dense, ours), tokens, rows))


def predicting(tokens: np.ndarray) -> np.ndarray:
    """Return the positions of all rows of a window except the last, whose next token is not in the window."""
    return np.arange(len(tokens) - 1)


def _by_block(judge: Callable[..., tuple], runs: tuple[np.ndarray, ...], tokens: np.ndarray, rows: np.ndarray) -> list:
    """Call `judge` for ROWS rows at a time and join the results. Copies of the last row pad the last block."""
    blocks = []
    for first in range(0, len(rows), ROWS):
        part = rows[first : first + ROWS]
        padded = np.pad(part, (0, ROWS - len(part)), mode="edge")
        found = jax.device_get(judge(*(run[padded] for run in runs), tokens[padded + 1]))
        blocks.append([values[: len(part)] for values in found])
    return [np.concatenate(values) for values in zip(*blocks)]
