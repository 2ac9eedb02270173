"""Run a decoder over a KV cache that is allocated once: chunked prefill, then one token per step.

The batch is right-padded. Prompts are cut into chunks at fixed positions, multiples of the query tile, so the keys that
a row attends to depend neither on the other prompts nor on the chunk sizes. Memory: cache plus one chunk's activations,
both linear in length.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention.contract import Positions
from tessera.core.shapes import round_up
from tessera.models.cache import Cache, init_cache
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.layers import Params
from tessera.runtime.answers import Answer
from tessera.runtime.compilation import capacity_bucket, chunk_sizes, cut_chunks
from tessera.runtime.sampling import Choice, Sampling, choose
from tessera.sparse.contract import Policy, Reads

CHUNK = 1024
"""Maximum rows of one prefill call."""

LAG = 2
"""Steps an accelerator runs ahead of the host, so that the host reads tokens that are already computed."""


@partial(jax.jit, static_argnames=("config", "batch", "num_keys", "dtype", "stacked"))
def allocate(*, config: ModelConfig, batch: int, num_keys: int, dtype: str, stacked: bool) -> Cache:
    """Allocate an empty cache."""
    return init_cache(config, batch, num_keys, dtype=jnp.dtype(dtype), stacked=stacked)


@partial(jax.jit, static_argnames="num_keys")
def enlarge(cache: Cache, *, num_keys: int) -> Cache:
    """Copy a cache into one with room for `num_keys` keys."""

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[-2] = (0, num_keys - x.shape[-2])
        return jnp.pad(x, widths)

    return jax.tree.map(pad, cache)


@partial(jax.jit, static_argnames=("config", "policy"), donate_argnames=("cache", "last_BD"))
def prefill_chunk(
    params: Params,
    cache: Cache,
    last_BD: Float[Array, "B D"],
    tokens_BT: Int32[Array, "B T"],
    q_start_B: Int32[Array, "B"],
    q_len_B: Int32[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
) -> tuple[Cache, Float[Array, "B D"], Reads | None]:
    """Run one chunk; each sequence with rows in it writes its last row's hidden state to `last_BD`."""
    positions = Positions(q_start_B, jnp.where(q_len_B > 0, q_start_B + q_len_B, 0), q_len_B)
    hidden, cache, state = forward(params, tokens_BT, cache, positions, config=config, policy=policy)
    row = jnp.maximum(q_len_B - 1, 0)[:, None, None]
    picked = jnp.take_along_axis(hidden, row, axis=1)[:, 0]
    return cache, jnp.where((q_len_B > 0)[:, None], picked, last_BD), policy.reads(state)


@jax.jit
def read_head(params: Params, last_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Compute next-token logits after a prefill."""
    return logits(params, last_BD)


@partial(jax.jit, static_argnames=("config", "policy"), donate_argnames="cache")
def decode_token(
    params: Params,
    cache: Cache,
    token_B: Int32[Array, "B"],
    position_B: Int32[Array, "B"],
    alive_B: Bool[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
) -> tuple[Cache, Float[Array, "B V"], Reads | None]:
    """Feed one token per sequence; sequences that are not alive attend to nothing and count no reads."""
    positions = Positions(position_B, jnp.where(alive_B, position_B + 1, 0), alive_B.astype(jnp.int32))
    hidden, cache, state = forward(params, token_B[:, None], cache, positions, config=config, policy=policy)
    return cache, logits(params, hidden[:, 0]), policy.reads(state)


@partial(jax.jit, static_argnames=("config", "policy"))
def score_tokens(
    params: Params,
    tokens_BT: Int32[Array, "B T"],
    q_len_B: Int32[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
) -> tuple[Float[Array, "B T V"], Bool[Array, ""]]:
    """Compute logits at every position in one call without a cache, and whether all except the padding's are finite."""
    positions = Positions(jnp.zeros_like(q_len_B), q_len_B, q_len_B)
    hidden, _, _ = forward(params, tokens_BT, None, positions, config=config, policy=policy)
    out = logits(params, hidden)
    padding = jnp.arange(tokens_BT.shape[1]) >= q_len_B[:, None]
    return out, jnp.all(jnp.isfinite(out) | padding[..., None])


class Session:
    """One batch's cache, and the programs that fill it."""

    def __init__(self, params: Params, config: ModelConfig, policy: Policy, *, batch: int, num_keys: int):
        self.params, self.config, self.policy, self.batch = params, config, policy, batch
        self.dtype = str(params.embed.dtype)
        self.stacked = not isinstance(params.layers, tuple)
        self.sizes = chunk_sizes(getattr(policy, "query_tile", 1), CHUNK)
        self.num_keys = self._bucket(num_keys)
        self.cache = allocate(
            config=config, batch=batch, num_keys=self.num_keys, dtype=self.dtype, stacked=self.stacked
        )

    def reserve(self, num_keys: int) -> None:
        """Grow the cache to hold `num_keys` keys in total, keeping its contents."""
        if self._bucket(num_keys) > self.num_keys:
            self.num_keys = self._bucket(num_keys)
            self.cache = enlarge(self.cache, num_keys=self.num_keys)

    def _bucket(self, num_keys: int) -> int:
        """Return the capacity, with room for the last chunk's padding: XLA silently clamps a write past the end."""
        return capacity_bucket(round_up(num_keys, self.sizes[-1]))

    def align(self, position: int) -> int:
        """Round a position down to where a chunk may start, a multiple of the query tile.

        Keys that prefill wrote below it equal those of a cold prefill of any longer prompt with the same prefix: each
        query tile below it was full, so it ranked the key tiles by the same rows. The last query tile of a shorter
        prompt was not. Chunks of other sizes run other programs, which may round differently; on a CPU, keys and
        selections are bit-identical for chunks of 64, 256 and 1,024 rows and caches of 1,536 and 2,048 keys.
        """
        return position - position % self.sizes[-1]

    def prefill(self, prompts: Sequence[Sequence[int]], start: int = 0) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Run the prompts' tokens from `start` on -> next-token logits, reads of each chunk.

        `start` is a multiple of the smallest chunk, and the cache already holds the tokens before it. The cache must be
        large enough for the prompts; see `reserve`.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        rows = np.zeros((self.batch, int(lengths.max()) + self.sizes[0]), np.int32)
        for index, prompt in enumerate(prompts):
            rows[index, : len(prompt)] = prompt
        last = np.zeros((self.batch, self.config.hidden_size), self.dtype)
        reads = []
        for offset, size in cut_chunks(int(lengths.max()) - start, self.sizes):
            first = start + offset
            last, counted = self._chunk(last, rows[:, first : first + size], first, np.clip(lengths - first, 0, size))
            if counted is not None:
                reads.append(counted)
        return read_head(self.params, last), reads

    def _chunk(self, last, tokens, first, q_len):
        q_start = np.full(self.batch, first, np.int32)
        self.cache, last, reads = prefill_chunk(
            self.params, self.cache, last, tokens, q_start, q_len, config=self.config, policy=self.policy
        )
        return last, reads

    def decode(
        self, token_B: Array, position_B: np.ndarray, alive_B: np.ndarray
    ) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Feed one token per sequence at its position -> next-token logits."""
        position_B = np.minimum(position_B, self.num_keys - 1)  # a finished sequence's position may lie past the end
        self.cache, out, reads = decode_token(
            self.params, self.cache, token_B, position_B, alive_B, config=self.config, policy=self.policy
        )
        return out, [] if reads is None else [reads]

    def warm(self) -> int:
        """Run every program for this cache size once, on empty sequences; return how many."""
        no_rows = np.zeros(self.batch, np.int32)
        last = np.zeros((self.batch, self.config.hidden_size), self.dtype)
        sizes = [size for size in self.sizes if size <= self.num_keys]
        for size in sizes:
            last, _ = self._chunk(last, np.zeros((self.batch, size), np.int32), 0, no_rows)
        out = read_head(self.params, last)
        self.decode(jnp.argmax(out, axis=-1).astype(jnp.int32), no_rows, no_rows.astype(bool))
        jax.block_until_ready(self.cache)
        return len(sizes) + 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts that run together under one policy.

    Attributes:
        indices: the index that `stream` gets for each prompt.
        prompts: token lists.
        answers: one per prompt, extended in place.
        seeds: [B].
        sampling: how tokens are chosen.
        stream: called with (index, text piece).
    """

    indices: Sequence[int]
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Answer]
    seeds: np.ndarray
    sampling: Sampling
    stream: Callable[[int, str], Any] | None = None


class Pending(NamedTuple):
    """A step that the device may still be computing."""

    choice: Choice
    reads: list[Reads]


def respond(session: Session, request: Request, start: int = 0, *, lag: int | None = None) -> bool:
    """Prefill the prompts from `start` on and decode until every answer is complete.

    Args:
        session: a cache with room for the longest prompt and its answer.
        request: the prompts and their answers.
        start: number of tokens of every prompt that the cache already holds; see `Session.align`.
        lag: steps the device runs ahead of the host; None is LAG on accelerators and 0 on a CPU, where a step past
            the end of an answer costs as much as any other.

    Returns:
        False if the scores are not finite; the answers then keep the tokens of earlier steps.
    """
    answers, vocab_size = request.answers, session.config.vocab_size
    values, method = request.sampling.values(vocab_size), request.sampling.method
    lengths = np.array([len(prompt) for prompt in request.prompts], np.int32)
    limits = np.array([answer.limit for answer in answers], np.int32)
    if lag is None:
        lag = 0 if jax.default_backend() == "cpu" else LAG

    def advance(step: int, scores: Array, seen: Array | None, reads: list[Reads]) -> Pending:
        return Pending(choose(scores, seen, request.seeds, np.int32(step), values, method=method), reads)

    scores, reads = session.prefill(request.prompts, start)
    newest = advance(0, scores, seen_tokens(request.prompts, vocab_size) if method.penalised else None, reads)
    queue, step = deque([newest]), 1
    while queue:
        if len(queue) > lag:
            if not take(queue.popleft(), request):
                return False
        alive = np.array([not answer.done for answer in answers]) & (limits > step)
        if alive.any():
            scores, reads = session.decode(newest.choice.token, lengths + (step - 1), alive)
            newest = advance(step, scores, newest.choice.seen, reads)
            queue.append(newest)
            step += 1
        elif queue and not take(queue.popleft(), request):
            return False
    return True


def take(pending: Pending, request: Request) -> bool:
    """Wait for one step and append its tokens to the answers; return False if a log-probability is not finite."""
    tokens, logprobs = np.asarray(pending.choice.token), np.asarray(pending.choice.logprob)
    open_answers = [(row, answer) for row, answer in enumerate(request.answers) if not answer.done]
    if not all(np.isfinite(logprobs[row]) for row, answer in open_answers):
        return False
    read_LB, visible_LB = (sum(np.asarray(r[i], np.float64) for r in pending.reads) for i in (0, 1))
    now_s = time.perf_counter()
    for row, answer in open_answers:
        if pending.reads:
            answer.count(read_LB[:, row], visible_LB[:, row])
        piece = answer.push(int(tokens[row]), float(logprobs[row]), now_s)
        if piece and request.stream is not None:
            request.stream(request.indices[row], piece)
    return True


def seen_tokens(prompts: Sequence[Sequence[int]], vocab_size: int) -> Bool[np.ndarray, "B V"]:
    """Mark the tokens that each prompt contains."""
    seen = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(seen, prompts):
        row[np.asarray(prompt)] = True
    return seen


def cache_bytes(config: ModelConfig, batch: int, num_keys: int, itemsize: int) -> int:
    """Return the bytes of the cache for a request of `num_keys` keys: 2 L B K S H itemsize."""
    per_key = 2 * config.num_layers * batch * config.num_kv_heads * config.head_dim * itemsize
    return per_key * capacity_bucket(num_keys)


def chunk_bytes(config: ModelConfig, batch: int, num_rows: int, itemsize: int) -> int:
    """Estimate one prefill chunk's activation bytes: residual, projections, both halves of the MLP, float32 copies."""
    rows = batch * min(num_rows, CHUNK)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return rows * width * (itemsize + 4)
