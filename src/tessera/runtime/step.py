"""Jitted programs over one KV cache: prefill a chunk, decode a token, copy a sequence in or out.

The batch is right-padded. Prompts are cut into chunks at fixed positions, multiples of the query tile, so the keys that
a row attends to depend neither on the other prompts nor on the chunk sizes. Memory is the cache plus one chunk's
activations; both are linear in length.
With `stripe`, each run of `stripe` positions of a sequence goes to the next device of a mesh (`attention/context.py`).
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from tessera.attention import context
from tessera.attention.contract import TILES, Positions
from tessera.core import interrupt, quant
from tessera.core.memory import require
from tessera.core.mesh import keep, local_devices, mesh_of, num_head_parts, num_stripes, program, put
from tessera.core.shapes import ceil_div, round_up
from tessera.models.cache import Cache, check_contiguous, init_cache, keep_split
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward, logits
from tessera.models.footprint import ONE_DEVICE, Division, Footprint, Load, Types, footprint
from tessera.models.layers import Params
from tessera.models.weights import device_bytes
from tessera.runtime.compilation import capacity_bucket, chunk_sizes, cut_chunks
from tessera.runtime.spread import Sharing
from tessera.sparse.contract import Policy, Reads

CHUNK = 1024
"""Maximum number of rows of a prefill call in generation. When text is scored, the limit is `score.CHUNK`."""


@program(static_argnums=0, static_argnames=("config", "batch", "num_keys", "dtype", "stacked", "stripe"))
def allocate(
    mesh: Mesh | None,
    *,
    config: ModelConfig,
    batch: int,
    num_keys: int,
    dtype: str,
    stacked: bool,
    stripe: int | None = None,
) -> Cache:
    """Allocate an empty cache in parts: a device only ever holds its KV heads and, with `stripe`, its positions."""
    return keep_split(init_cache(config, batch, num_keys, dtype=jnp.dtype(dtype), stacked=stacked), stripe)


@program(static_argnames=("num_keys", "stripe"))
def enlarge(cache: Cache, *, num_keys: int, stripe: int | None = None) -> Cache:
    """Copy a cache into one with room for `num_keys` keys."""
    check_contiguous(cache)
    parts = 1 if stripe is None else context.traced_stripes()

    def pad(x: Array, axis: int) -> Array:  # each device enlarges its own part
        lead, held, rest = x.shape[:axis], x.shape[axis], x.shape[axis:][1:]
        x = x.reshape(*lead, parts, held // parts, *rest)
        widths = [(0, 0)] * x.ndim
        widths[len(lead) + 1] = (0, (num_keys - held) // parts)
        return jnp.pad(x, widths).reshape(*lead, num_keys, *rest)

    axes = Cache(k=-2, v=-2, scales=-1)
    larger = Cache(*(jax.tree.map(partial(pad, axis=axis), part) for part, axis in zip(cache, axes)))
    return keep_split(larger, stripe)


@program(static_argnames=("config", "policy", "stripe", "spread"), donate_argnames="cache")
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
    stripe: int | None = None,
    spread: bool = False,
) -> tuple[Cache, Float[Array, "B D"], Reads | None]:
    """Run one prefill chunk; return the cache, the new `last_BD` and the key counts.

    In the new `last_BD`, a sequence with rows in the chunk has the hidden state of its last row. The old `last_BD` is
    not donated: after dispatching this chunk, the host waits for it, to know that the chunk before has ended.
    """
    positions = Positions(q_start_B, jnp.where(q_len_B > 0, q_start_B + q_len_B, 0), q_len_B)
    how = {"config": config, "policy": policy, "stripe": stripe, "spread": spread}
    hidden, cache, state = forward(params, tokens_BT, cache, positions, **how)
    row = jnp.maximum(q_len_B - 1, 0)[:, None, None]
    picked = jnp.take_along_axis(hidden, row, axis=1)[:, 0]
    last_BD = jnp.where((q_len_B > 0)[:, None], picked, last_BD)
    return keep_split(cache, stripe), *keep((last_BD, policy.reads(state)))


@program()
def read_head(params: Params, last_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Compute next-token logits after a prefill."""
    return keep(logits(params, last_BD), None, "vocab")


@program(static_argnames=("config", "policy", "stripe"), donate_argnames="cache")
def decode_token(
    params: Params,
    cache: Cache,
    token_B: Int32[Array, "B"],
    position_B: Int32[Array, "B"],
    alive_B: Bool[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
    stripe: int | None = None,
) -> tuple[Cache, Float[Array, "B V"], Reads | None]:
    """Feed one token per sequence; return the cache, next-token logits and the key counts.

    Sequences that are not alive attend to nothing and count no keys.
    """
    positions = Positions(position_B, jnp.where(alive_B, position_B + 1, 0), alive_B.astype(jnp.int32))
    hidden, cache, state = forward(
        params, token_B[:, None], cache, positions, config=config, policy=policy, stripe=stripe
    )
    scores = keep(logits(params, hidden[:, 0]), None, "vocab")
    return keep_split(cache, stripe), scores, keep(policy.reads(state))


@program(static_argnames=("config", "policy"))
def score_tokens(
    params: Params,
    tokens_BT: Int32[Array, "B T"],
    q_len_B: Int32[Array, "B"],
    *,
    config: ModelConfig,
    policy: Policy,
) -> tuple[Float[Array, "B T V"], Bool[Array, ""]]:
    """Compute logits at every position without a cache, and whether all logits outside padding are finite."""
    positions = Positions(jnp.zeros_like(q_len_B), q_len_B, q_len_B)
    hidden, _, _ = forward(params, tokens_BT, None, positions, config=config, policy=policy)
    out = logits(params, hidden)
    padding = jnp.arange(tokens_BT.shape[1]) >= q_len_B[:, None]
    finite = jnp.all(jnp.isfinite(out) | padding[..., None])
    return keep(out, None, None, "vocab"), keep(finite)


@program(static_argnames="stripe")
def take_row(cache: Cache, row: Int32[Array, ""], stripe: int | None = None) -> Cache:
    """Copy one sequence out of a cache."""
    check_contiguous(cache)
    part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=x.ndim - 4), cache)
    return keep_split(part, stripe)


@program(static_argnames="stripe", donate_argnames="cache")
def put_row(cache: Cache, part: Cache, row: Int32[Array, ""], stripe: int | None = None) -> Cache:
    """Write a cache of one sequence into one row of a larger cache."""
    check_contiguous(cache)

    def write(x: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, row, axis=x.ndim - 4)

    return keep_split(jax.tree.map(write, cache, part), stripe)


class Session:
    """The KV cache of one batch, with the programs that fill it. (It has nothing to do with a client's session.)

    Args:
        params, config, policy: the model's weights, config and attention policy.
        batch: number of sequences.
        num_keys: minimum number of keys to allocate per sequence.
        sizes: lengths of prefill chunks, descending multiples of the policy's query tile; None chooses them.
        cache: dtype of keys and values: "int8", or None for the dtype of the weights.
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
        self.dtype, self.mesh = str(params.embed.dtype), mesh_of(params)
        self.stacked = not isinstance(params.layers, tuple)
        self.sharing = sharing(params, config)
        self.sizes = self._sizes(num_keys) if sizes is None else tuple(sizes)
        self.stripe = self._stripe()
        self.num_keys = self.bucket(num_keys)
        self.cache = allocate(
            self.mesh,
            config=config,
            batch=batch,
            num_keys=self.num_keys,
            dtype=cache or self.dtype,
            stacked=self.stacked,
            stripe=self.stripe,
        )

    @property
    def cache_dtype(self) -> str | None:
        """Value of the argument `cache`: "int8", or None for the dtype of the weights."""
        return None if self.cache.scales is None else "int8"

    def reserve(self, num_keys: int) -> None:
        """Grow the cache, if it is smaller, to hold `num_keys` keys per sequence; its contents are kept."""
        if self.bucket(num_keys) > self.num_keys:
            self.num_keys = self.bucket(num_keys)
            self.cache = enlarge(self.cache, num_keys=self.num_keys, stripe=self.stripe)

    def bucket(self, num_keys: int) -> int:
        """Return a cache size for `num_keys` keys and the last chunk's padding: XLA shifts writes past the end."""
        size = capacity_bucket(round_up(num_keys, self.sizes[-1]))
        return size if self.stripe is None else round_up(size, self.sizes[-1])

    def _sizes(self, num_keys: int) -> tuple[int, ...]:
        parts = num_stripes(self.mesh)
        if parts > 1:  # a chunk is one stripe per device, so there is one size
            return (stripe_rows(self.policy.query_tile, parts) * parts,)
        sizes = chunk_sizes(self.policy.query_tile, CHUNK)
        large = spread_chunk(self.params, self.config, batch=self.batch, num_keys=num_keys, unit=sizes[0])
        return sizes if large is None else (large, *(size for size in sizes if size < large))

    def _stripe(self) -> int | None:
        parts = num_stripes(self.mesh)
        if parts == 1:
            return None
        if len(self.sizes) > 1 or self.sizes[0] % parts:
            raise ValueError(
                f"sizes={self.sizes} must be one chunk size, a multiple of {parts}, because {parts} devices share it"
            )
        return self.sizes[0] // parts

    def align(self, position: int) -> int:
        """Round a position down to a multiple of the smallest chunk, and so of the query tile.

        Before the returned position, a prefill wrote the keys that a prefill of any longer prompt with this prefix
        would write: each query tile there was full, so the same rows ranked its key tiles. (A prompt's last query tile
        may be partial.) Chunks of other sizes run other programs, which may round differently; on a CPU, keys and
        selections are bit-identical for chunks of 64, 256 and 1,024 rows and caches of 1,536 and 2,048 keys.
        """
        return position - position % self.sizes[-1]

    def row(self, index: int) -> "Session":
        """Copy one sequence into a session of batch 1, where a prefill disturbs no other sequence; see `put`."""
        part = copy(self)
        part.batch, part.cache = 1, take_row(self.cache, np.int32(index), stripe=self.stripe)
        return part

    def put(self, index: int, part: "Session") -> None:
        """Replace one sequence with the sequence of `part`, a session of batch 1 that `row` made."""
        self.cache = put_row(self.cache, part.cache, np.int32(index), stripe=self.stripe)

    def prefill(self, prompts: Sequence[Sequence[int]], start: int = 0) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Run a whole `Prefill` of the prompts from `start` on; return next-token logits and key counts per chunk."""
        run = Prefill(self, prompts, start)
        while not run.done:
            interrupt.check()
            run.advance()
        return run.scores(), run.reads

    def chunk(
        self, last: Float[Array, "B D"], tokens: np.ndarray, first: int, q_len: np.ndarray
    ) -> tuple[Float[Array, "B D"], Reads | None]:
        """Run one chunk of every sequence from position `first` on; see `prefill_chunk`."""
        q_start = np.full(self.batch, first, np.int32)
        self.cache, last, reads = prefill_chunk(
            self.params,
            self.cache,
            last,
            tokens,
            q_start,
            q_len,
            config=self.config,
            policy=self.policy,
            stripe=self.stripe,
            spread=self.stripe is None and self.sharing.by_rows(self.batch, tokens.shape[1]),
        )
        return last, reads

    def decode(
        self, token_B: Array, position_B: np.ndarray, alive_B: np.ndarray
    ) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Feed one token per sequence at its position; return next-token logits and key counts.

        Sequences that are not alive write a key at their position, too.
        """
        self.cache, out, reads = decode_token(
            self.params,
            self.cache,
            token_B,
            position_B,
            alive_B,
            config=self.config,
            policy=self.policy,
            stripe=self.stripe,
        )
        return out, [] if reads is None else [reads]

    def no_rows(self) -> Float[Array, "B D"]:
        """Return the hidden states that a prefill starts with: zeros, on every device."""
        return put(np.zeros((self.batch, self.config.hidden_size), self.dtype), self.mesh)

    def warm(self, *, prefill: bool = True, decode: bool = True) -> int:
        """Run the wanted programs (`prefill`, `decode`) once on empty sequences; return the number of programs.

        `Lane.warm` calls this and adds sampling, and `Engine.warm` calls `Lane.warm` for each lane. `Model.warmup`
        calls this for each cache size that requests can need, up to the longest that it was told of.
        """
        no_rows = np.zeros(self.batch, np.int32)
        last = self.no_rows()
        sizes = [size for size in self.sizes if size <= self.num_keys and prefill]
        for size in sizes:
            last, _ = self.chunk(last, np.zeros((self.batch, size), np.int32), 0, no_rows)
        if prefill:
            read_head(self.params, last)
        if decode:
            self.decode(put(no_rows, self.mesh), no_rows, no_rows.astype(bool))
        jax.block_until_ready(self.cache)
        return len(sizes) + prefill + decode


class Prefill:
    """A prefill of a session's whole batch, which runs chunk by chunk.

    Attributes:
        position: the device has computed all rows before this position.

    Args:
        session: session whose cache is large enough for the prompts; see `Session.reserve`.
        prompts: token ids, one list per sequence.
        start: position of the first token to run, a multiple of the smallest chunk; the cache must hold earlier keys.
    """

    def __init__(self, session: Session, prompts: Sequence[Sequence[int]], start: int = 0):
        self.session, self.reads, self.position = session, [], start
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(self._lengths.max())
        self._rows = np.zeros((session.batch, longest + session.sizes[0]), np.int32)
        for row, prompt in zip(self._rows, prompts):
            row[: len(prompt)] = prompt
        self._last = session.no_rows()
        self._chunks = deque((start + offset, size) for offset, size in cut_chunks(longest - start, session.sizes))

    @property
    def done(self) -> bool:
        """Whether every chunk has run."""
        return not self._chunks

    def advance(self) -> None:
        """Dispatch the next chunk and wait for the chunk before it.

        The device thus always has a chunk to work on, and the host knows how far the device is and can react to Ctrl-C
        between chunks.
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
        """Compute the next-token logits; every chunk must have run."""
        return read_head(self.session.params, self._last)


def needed(
    config: ModelConfig,
    *,
    dtype: str,
    batch: int,
    num_keys: int,
    num_tokens: int,
    host: bool = False,
    cache: str | None = None,
    division: Division = ONE_DEVICE,
) -> Footprint:
    """Compute the bytes on one device while prompts of `num_tokens` tokens fill a cache of `num_keys` keys each."""
    load = Load(batch=batch, num_keys=capacity_bucket(num_keys), rows=min(num_tokens, CHUNK), host=host)
    return footprint(config, load, types=Types(weights=dtype, cache=cache or dtype, dtype=dtype), division=division)


def stripe_rows(query_tile: int, parts: int) -> int:
    """Return the number of positions per stripe: a chunk has about CHUNK rows, and a stripe has whole tiles."""
    return round_up(ceil_div(CHUNK, parts), lcm(max(TILES), query_tile))


def sharing(params: Params, config: ModelConfig) -> Sharing:
    """Return the sizes that decide whether the devices of the weights' mesh share a chunk by heads or by rows."""
    layer_bytes = sum(map(quant.num_bytes, jax.tree.leaves(params.layers))) // config.num_layers
    devices = num_head_parts(mesh_of(params))
    return Sharing(config=config, devices=devices, itemsize=params.embed.dtype.itemsize, layer_bytes=layer_bytes)


def spread_chunk(params: Params, config: ModelConfig, *, batch: int, num_keys: int, unit: int) -> int | None:
    """Return the rows per sequence of a prefill chunk that devices share by rows; None if they share by heads.

    See `Sharing.chunk`. On each device, the activations of the chunk take at most as many bytes as the weights.
    """
    mesh = mesh_of(params)
    if num_head_parts(mesh) == 1 or num_stripes(mesh) > 1:
        return None
    rows = device_bytes(params) // row_bytes(config, params.embed.dtype.itemsize)
    return sharing(params, config).chunk(batch=batch, num_keys=num_keys, unit=unit, rows_per_device=rows)


def row_bytes(config: ModelConfig, itemsize: int, parts: int = 1) -> int:
    """Estimate the bytes of one row's activations: residual, attention, MLP, and a float32 copy of each."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 4 * config.hidden_size + (2 * heads + 3 * config.intermediate_size) // parts
    return width * (itemsize + 4)


def require_room(
    params: Params, config: ModelConfig, *, batch: int, num_keys: int, num_tokens: int, cache: str | None = None
) -> None:
    """Raise MemoryError if a device has no room for the cache and a prefill chunk of prompts of `num_tokens` tokens."""
    mesh, devices = mesh_of(params), local_devices(params)
    parts, stripes = num_head_parts(mesh), num_stripes(mesh)
    sizes = {"batch": batch, "num_keys": num_keys, "num_tokens": num_tokens, "cache": cache}
    dtype, host = params.embed.dtype, devices[0].platform == "cpu"
    held = needed(config, dtype=str(dtype), host=host, division=Division(heads=parts, context=stripes), **sizes)
    num_bytes = held.beyond_weights
    if stripes > 1:  # anchor layers gather one layer's keys and values
        num_bytes += held.cache * stripes // config.num_layers
    if large := spread_chunk(params, config, batch=batch, num_keys=num_keys, unit=CHUNK):
        own = batch * large // parts * row_bytes(config, dtype.itemsize)
        whole = max(2 * sharing(params, config).layer_bytes, params.embed.nbytes)  # two layers, while one is gathered
        num_bytes += max(0, own + whole - held.activations)
    require(
        num_bytes,
        devices,
        f"a cache for {batch} sequences of {num_keys} tokens",
        "pass fewer or shorter prompts per call, or a smaller max_new_tokens",
    )
