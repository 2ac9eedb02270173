"""Define the GPU script's attention calls, draw their random inputs, and choose and jit kernels for them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lab.gpu.session import Session
from tessera.attention import tuned
from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.kernel import Kernel
from tessera.attention.selection import select_tiles
from tessera.core import hardware
from tessera.core.shapes import ceil_div
from tessera.measure import trials

FRACTION = 0.1
TILES = (64, 128, 32, 16, 1)
MOST_SINGLE_KEYS = 16384
"""Maximum keys of a call with tile 1. With more keys, one mass and one list entry per key would take gigabytes."""
LLAMA_8B, LLAMA_70B = (32, 8), (64, 8)
"""(query heads, KV heads) of Llama 3.1 8B and 70B."""


class Setting(NamedTuple):
    """Sizes, mask and dtype of one attention call."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    causal: bool = True
    dtype: str = "bfloat16"

    @property
    def phase(self) -> str:
        return "decode" if self.queries == 1 else "prefill"

    def words(self) -> str:
        """Return the call's name in a record."""
        mask = "causal" if self.causal else "both ways"
        size = f"{self.batch} x {self.queries} x {self.keys}"
        return f"{self.phase} {size}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, {mask}"

    def call(self, role: str, tile: int = 64, query_tile: int = 32) -> tuple[AttentionSpec, Shapes]:
        """Return (spec, shapes) for a kernel's role. A sparse call's capacity is the length of `select`'s lists."""
        spec = AttentionSpec(causal=self.causal, tile=tile, query_tile=query_tile, mass=role == "score")
        capacity = None
        if role == "sparse":
            selection = jax.eval_shape(lambda: self.selection(spec, jax.random.key(0)))
            capacity = selection.tiles.shape[-1]
        return spec, Shapes(*self[:6], capacity, self.dtype)

    def positions(self) -> Positions:
        """Return positions with every key valid and the queries at the end of the keys."""
        starts = (self.keys - self.queries, self.keys, self.queries)
        return Positions(*(jnp.full((self.batch,), start, jnp.int32) for start in starts))

    def inputs(self, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draw normal q, k, v on the device, one sequence at a time to save memory."""

        @partial(jax.jit, static_argnums=1)
        def draw(key, size):
            keys = jax.random.split(key, self.batch)
            return jax.lax.map(lambda one: jax.random.normal(one, (*size, self.head_dim), self.dtype), keys)

        sizes = ((self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        return tuple(draw(one, size) for one, size in zip(jax.random.split(key, 3), sizes))

    @property
    def bytes(self) -> float:
        """Bytes of the call's arrays: q, out, and K and V twice, in the layouts of the cache and of other libraries."""
        queries, keys = self.queries * self.heads, self.keys * self.kv_heads
        return 2.0 * self.batch * self.head_dim * jnp.dtype(self.dtype).itemsize * (queries + 2 * keys)

    def masses(self, spec: AttentionSpec, key: jax.Array) -> jax.Array:
        """Draw a random mass for every sequence, KV head, query tile and key tile."""
        size = (ceil_div(self.queries, spec.query_tile), ceil_div(self.keys, spec.tile))
        return jax.random.uniform(key, (self.batch, self.kv_heads, *size))

    def select(self, spec: AttentionSpec, mass: jax.Array) -> Selection:
        """Return the tiles that `select_tiles` lists for these masses, with fraction FRACTION."""
        p = self.positions()
        return select_tiles(mass, spec, fraction=FRACTION, q_start=p.q_start, kv_len=p.kv_len, q_len=p.q_len)

    def selection(self, spec: AttentionSpec, key: jax.Array) -> Selection:
        """Return the tiles that `select_tiles` lists for random masses, with fraction FRACTION."""
        return self.select(spec, self.masses(spec, key))


def kernels_here(session: Session, phase: str | None = None) -> Iterator[Kernel]:
    """Yield the kernels in `dispatch.KERNELS` that this GPU runs, including kernels that call cuDNN.

    In a dry run, which needs no GPU, yield the first simulable kernel of each role and phase, and every simulable
    kernel that takes single keys.
    """
    capability = hardware.gpu_capability()
    found = [kernel for kernel in KERNELS if kernel.platform == "gpu" and kernel.runs_on(capability)]
    if session.dry:
        found = [kernel for kernel in found if kernel.simulable]
        first = {(kernel.role, kernel.phase): kernel for kernel in reversed(found)}
        found = [kernel for kernel in found if kernel in first.values() or takes_single_keys(kernel)]
    yield from (kernel for kernel in found if phase in (None, kernel.phase))


def takes_single_keys(kernel: Kernel) -> bool:
    """Return whether the kernel reads the keys of a sparse prefill call one by one (tile 1)."""
    spec = AttentionSpec(tile=1, causal=False)
    sparse = kernel.role == "sparse" and kernel.phase == "prefill"
    return sparse and kernel.refusal(spec, Shapes(1, 128, 256, 1, 1, 128, 64, "bfloat16")) is None


def taken(kernel: Kernel, setting: Setting, query_tile: int = 32) -> tuple[AttentionSpec, Shapes] | None:
    """Return (spec, shapes) with the first tile in TILES that the kernel takes; None if it takes none.

    Tile 1 counts only for calls of at most MOST_SINGLE_KEYS keys.
    """
    for tile in TILES if kernel.role != "dense" else TILES[:1]:
        if tile == 1 and setting.keys > MOST_SINGLE_KEYS:
            continue
        spec, shapes = setting.call(kernel.role, tile, query_tile)
        if kernel.refusal(spec, shapes) is None:
            return spec, shapes
    return None


def ready(kernel: Kernel, spec: AttentionSpec, shapes: Shapes, config: Any = None) -> Callable[..., Any]:
    """Return the kernel as a jitted function (q, KeyValues, Positions, Selection or None) -> AttentionOut.

    If `config` is None, the function uses the kernel's tuned block sizes.
    """
    config = tuned.config(kernel, spec, shapes) if config is None else config

    def call(q, kv, positions, selection):
        return kernel.launch(q, kv, spec, positions, selection, config)

    return jax.jit(call)


def machine(kernel: Kernel) -> contextlib.AbstractContextManager:
    """Return the context that the kernel runs in: this device, or the simulator in a dry run."""
    return trials.machine(kernel)


def fresh_key() -> tuple[int, jax.Array]:
    """Return (seed, random key), fresh from the system's entropy."""
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    return seed, jax.random.key(seed)
