"""The jitted programs over a KV cache that is allocated once: prefill a chunk, decode a token, copy rows in and out.

The batch is right-padded. Prompts are cut into chunks at fixed positions, multiples of the query tile, so the keys that
a row attends to depend neither on the other prompts nor on the chunk sizes. Memory is the cache plus one chunk's
activations; both are linear in length.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from tessera.attention.contract import Positions
from tessera.core import interrupt
from tessera.core.memory import require
from tessera.core.shapes import round_up
from tessera.models.cache import Cache, head_bytes, init_cache
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.layers import Params
from tessera.runtime.compilation import capacity_bucket, chunk_sizes, cut_chunks
from tessera.sparse.contract import Policy, Reads

CHUNK = 1024
"""Maximum rows of one prefill call in generation. `score.CHUNK` is the limit for text that is scored."""


@partial(jax.jit, static_argnames=("config", "batch", "num_keys", "dtype", "stacked"))
def allocate(*, config: ModelConfig, batch: int, num_keys: int, dtype: str, stacked: bool) -> Cache:
    """Allocate an empty cache."""
    return init_cache(config, batch, num_keys, dtype=jnp.dtype(dtype), stacked=stacked)


@partial(jax.jit, static_argnames="num_keys")
def enlarge(cache: Cache, *, num_keys: int) -> Cache:
    """Copy a cache into one with room for `num_keys` keys."""

    def pad(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, num_keys - x.shape[axis])
        return jnp.pad(x, widths)

    axes = Cache(k=-2, v=-2, scales=-1)
    return Cache(*(jax.tree.map(partial(pad, axis=axis), part) for part, axis in zip(cache, axes)))


@partial(jax.jit, static_argnames=("config", "policy"), donate_argnames="cache")
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
    """Run one prefill chunk; return the cache, `last_BD` and the reads.

    Each sequence with rows in the chunk writes its last row's hidden state to `last_BD`. This argument is not donated,
    because the host waits for it to learn how far the device is.
    """
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
    """Feed one token per sequence; return the cache, next-token logits and the reads.

    Sequences that are not alive attend to nothing and count no reads.
    """
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
    """Compute logits at every position in one call without a cache, and whether those outside padding are finite."""
    positions = Positions(jnp.zeros_like(q_len_B), q_len_B, q_len_B)
    hidden, _, _ = forward(params, tokens_BT, None, positions, config=config, policy=policy)
    out = logits(params, hidden)
    padding = jnp.arange(tokens_BT.shape[1]) >= q_len_B[:, None]
    return out, jnp.all(jnp.isfinite(out) | padding[..., None])


@jax.jit
def take_row(cache: Cache, row: Int32[Array, ""]) -> Cache:
    """Copy one sequence out of a cache."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=x.ndim - 4), cache)


@partial(jax.jit, donate_argnames="cache")
def put_row(cache: Cache, part: Cache, row: Int32[Array, ""]) -> Cache:
    """Write a cache of one sequence into one row of a larger one."""

    def write(x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=x.ndim - 4)

    return jax.tree.map(write, cache, part)


class Session:
    """The KV cache of one batch and the programs that fill it. (This is not the session of a client.)

    Args:
        params, config, policy: of the model.
        batch: sequences.
        num_keys: keys per sequence to allocate at least.
        sizes: rows of a prefill call, descending multiples of the policy's query tile.
        cache: dtype of keys and values, "int8" or None for the weights' own.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        batch: int,
        num_keys: int,
        sizes: Sequence[int] | None = None,
        cache: str | None = None,
    ):
        self.params, self.config, self.policy, self.batch = params, config, policy, batch
        self.dtype = str(params.embed.dtype)
        self.stacked = not isinstance(params.layers, tuple)
        self.sizes = chunk_sizes(policy.query_tile, CHUNK) if sizes is None else tuple(sizes)
        self.num_keys = self.bucket(num_keys)
        self.cache = allocate(
            config=config, batch=batch, num_keys=self.num_keys, dtype=cache or self.dtype, stacked=self.stacked
        )

    @property
    def cache_dtype(self) -> str | None:
        """The argument `cache`: "int8", or None for the weights' dtype."""
        return None if self.cache.scales is None else "int8"

    def reserve(self, num_keys: int) -> None:
        """Grow the cache to hold `num_keys` keys in total, keeping its contents."""
        if self.bucket(num_keys) > self.num_keys:
            self.num_keys = self.bucket(num_keys)
            self.cache = enlarge(self.cache, num_keys=self.num_keys)

    def bucket(self, num_keys: int) -> int:
        """Return the cache size for `num_keys` keys and the last chunk's padding; XLA silently clamps later writes."""
        return capacity_bucket(round_up(num_keys, self.sizes[-1]))

    def align(self, position: int) -> int:
        """Round a position down to a multiple of the smallest chunk, and so of the query tile.

        Before the result, keys that a prefill wrote equal those of a cold prefill of any longer prompt with the same
        prefix: each query tile there was full, and so ranked the key tiles by the same rows. (A prompt's last query
        tile may be partial.) Chunks of other sizes run other programs, which may round differently; on a CPU, keys and
        selections are bit-identical for chunks of 64, 256 and 1,024 rows and caches of 1,536 and 2,048 keys.
        """
        return position - position % self.sizes[-1]

    def row(self, index: int) -> "Session":
        """Copy one sequence into a session of batch 1, where a prefill disturbs no other sequence; see `put`."""
        part = copy(self)
        part.batch, part.cache = 1, take_row(self.cache, np.int32(index))
        return part

    def put(self, index: int, part: "Session") -> None:
        """Replace one sequence by a session of batch 1 that `row` made."""
        self.cache = put_row(self.cache, part.cache, np.int32(index))

    def prefill(self, prompts: Sequence[Sequence[int]], start: int = 0) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Run the prompts' tokens from `start` on; return next-token logits and each chunk's reads; see `Prefill`."""
        run = Prefill(self, prompts, start)
        while not run.done:
            interrupt.check()
            run.advance()
        return run.scores(), run.reads

    def chunk(
        self, last: Float[Array, "B D"], tokens: np.ndarray, first: int, q_len: np.ndarray
    ) -> tuple[Float[Array, "B D"], Reads | None]:
        """Run one chunk of every sequence from position `first`; see `prefill_chunk`."""
        q_start = np.full(self.batch, first, np.int32)
        self.cache, last, reads = prefill_chunk(
            self.params, self.cache, last, tokens, q_start, q_len, config=self.config, policy=self.policy
        )
        return last, reads

    def decode(
        self, token_B: Array, position_B: np.ndarray, alive_B: np.ndarray
    ) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Feed one token per sequence at its position; return next-token logits and reads.

        Sequences that are not alive write a key at their position, too.
        """
        self.cache, out, reads = decode_token(
            self.params, self.cache, token_B, position_B, alive_B, config=self.config, policy=self.policy
        )
        return out, [] if reads is None else [reads]

    def warm(self, *, decode: bool = True) -> int:
        """Run every program for this cache size once, on empty sequences; return their number.

        `decode` includes the decode program. `Lane.warm` calls this and adds sampling, and `Engine.warm` calls
        `Lane.warm` for each lane. `Model.warmup` calls this for each cache size up to its longest request.
        """
        no_rows = np.zeros(self.batch, np.int32)
        last = np.zeros((self.batch, self.config.hidden_size), self.dtype)
        sizes = [size for size in self.sizes if size <= self.num_keys]
        for size in sizes:
            last, _ = self.chunk(last, np.zeros((self.batch, size), np.int32), 0, no_rows)
        out = read_head(self.params, last)
        if decode:
            self.decode(jnp.argmax(out, axis=-1).astype(jnp.int32), no_rows, no_rows.astype(bool))
        jax.block_until_ready((self.cache, out))
        return len(sizes) + 1 + decode


class Prefill:
    """A prefill of a session's whole batch, which runs chunk by chunk.

    Attributes:
        position: the device has computed every row before this position.

    Args:
        session: session whose cache is large enough for the prompts; see `Session.reserve`.
        prompts: token ids, one list per sequence.
        start: position of the first token to run, a multiple of the smallest chunk; the cache holds the tokens before.
    """

    def __init__(self, session: Session, prompts: Sequence[Sequence[int]], start: int = 0):
        self.session, self.reads, self.position = session, [], start
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(self._lengths.max())
        self._rows = np.zeros((session.batch, longest + session.sizes[0]), np.int32)
        for row, prompt in zip(self._rows, prompts):
            row[: len(prompt)] = prompt
        self._last = np.zeros((session.batch, session.config.hidden_size), session.dtype)
        self._chunks = deque((start + offset, size) for offset, size in cut_chunks(longest - start, session.sizes))

    @property
    def done(self) -> bool:
        """Whether every chunk has run."""
        return not self._chunks

    def advance(self) -> None:
        """Dispatch the next chunk and wait for the one before it.

        The device always has a chunk to work on, so it never idles. The host learns how far the device is, and can
        react to Ctrl-C between chunks.
        """
        first, size = self._chunks.popleft()
        before = self._last
        q_len = np.clip(self._lengths - first, 0, size)
        self._last, counted = self.session.chunk(self._last, self._rows[:, first : first + size], first, q_len)
        if counted is not None:
            self.reads.append(counted)
        jax.block_until_ready(before)
        self.position = first

    def scores(self) -> Float[Array, "B V"]:
        """Compute the next-token logits, once every chunk has run."""
        return read_head(self.session.params, self._last)


def cache_bytes(config: ModelConfig, batch: int, num_keys: int, itemsize: int, cache: str | None = None) -> int:
    """Return 2 L B K S H itemsize, the bytes of the cache; S is `num_keys` rounded up to a capacity bucket.

    An int8 cache has 2 L B K S (H + 2).
    """
    per_head = head_bytes(config.head_dim, itemsize, int8=cache == "int8")
    return 2 * config.num_layers * batch * config.num_kv_heads * per_head * capacity_bucket(num_keys)


def chunk_bytes(config: ModelConfig, batch: int, num_tokens: int, itemsize: int) -> int:
    """Estimate the bytes of one prefill chunk's activations: residual, projections, both halves of the MLP, and their
    float32 copies."""
    rows = batch * min(num_tokens, CHUNK)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return rows * width * (itemsize + 4)


def require_room(
    params: Params, config: ModelConfig, *, batch: int, num_keys: int, num_tokens: int, cache: str | None = None
) -> None:
    """Raise MemoryError unless a cache of `num_keys` keys and one chunk of a prompt of `num_tokens` fit."""
    itemsize = params.embed.dtype.itemsize
    require(
        cache_bytes(config, batch, num_keys, itemsize, cache) + chunk_bytes(config, batch, num_tokens, itemsize),
        next(iter(params.embed.devices())),
        f"a cache for {batch} sequences of {num_keys} tokens",
        "pass fewer or shorter prompts per call, or a smaller max_new_tokens",
    )


def explain_not_finite(params: Params) -> str:
    """Explain in one sentence why scores are not finite; name the weights that are not, if any."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    broken = [jax.tree_util.keystr(path) for path, leaf in leaves if not bool(jnp.isfinite(leaf).all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return f"the model's scores are not finite: its weights params{broken[0]}{more} hold NaN or inf; reload them"
    what = "the model's scores are not finite although its weights are"
    if params.embed.dtype == jnp.float32:
        return f"{what}, and float32 is the widest dtype: download the model again"
    return f"{what}: load it with dtype='float32'"
