"""Attention calls on random numbers, and kernels run on them: what tests and `tessera verify` share.

Padding is always NaN: keys at or past kv_len, rows at or past q_len. A TPU's or a GPU's kernel runs in simulation where
there is no such chip, with race detection on and fresh memory full of NaN.
"""

import contextlib
import dataclasses
import functools
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import (
    AttentionOut,
    AttentionSpec,
    Kernel,
    KeyValues,
    Positions,
    Selection,
    Shapes,
    call_shapes,
)
from tessera.attention.dispatch import KERNELS
from tessera.attention.gpu import cudnn as gpu_cudnn
from tessera.attention.gpu.warpgroup import OPERAND
from tessera.attention.selection import select_tiles
from tessera.attention.tpu.matrix_unit import LANES
from tessera.attention.workloads import Workload, tagged

SMALL_BLOCK = 16


class Race(RuntimeError):
    """Two threads of a simulated kernel touched the same memory, one writing, with nothing ordering them."""


def machine(kernel: Kernel):
    """A context in which the kernel runs here, in simulation if its chip is absent.

    Raises:
        Race: on leaving, if the simulation saw one.
    """
    if not is_simulated(kernel):
        return contextlib.nullcontext()
    return {"tpu": _simulated_tpu, "gpu": _simulated_gpu}[kernel.platform](kernel.name)


def is_simulated(kernel: Kernel) -> bool:
    """Whether the kernel's chip is absent."""
    return kernel.platform not in ("any", jax.default_backend())


@contextlib.contextmanager
def _simulated_tpu(name: str):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # only it says if a race was seen
    from jax.experimental.pallas import tpu as pltpu

    with _every(simulator, "RaceDetectionState") as states, _direct_callbacks():
        try:
            params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
            with pltpu.force_tpu_interpret_mode(params):
                yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # a failed call would otherwise fail every later one
    if any(state.races_found for state in states):
        raise Race(f"{name}: a data race")


@contextlib.contextmanager
def _simulated_gpu(name: str):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, shared_memory
    from jax.experimental.pallas import mosaic_gpu as plgpu

    changes = {
        "wgmma": functools.partial(_tracked_product, gpu_callbacks.wgmma),
        "_get": functools.partial(_tracked_read, gpu_callbacks._get),
    }
    with (
        _every(gpu_callbacks, "GPURaceDetectionState") as states,
        patch.multiple(gpu_callbacks, **changes),
        patch.object(shared_memory, "_to_int", _to_int),
        _direct_callbacks(),
    ):
        try:
            params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
            with plgpu.force_gpu_interpret_mode(params):
                yield
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
    if any(state.races_found for state in states):
        raise Race(f"{name}: a data race")


@contextlib.contextmanager
def _every(module, name: str):
    """Keep all that a simulator makes of its race detector: each launch makes a new one and forgets the one before."""
    plain, made = getattr(module, name), []

    def kept(**kwargs):
        made.append(plain(**kwargs))
        return made[-1]

    setattr(module, name, kept)
    try:
        yield made
    finally:
        setattr(module, name, plain)


@contextlib.contextmanager
def _direct_callbacks():
    """What a simulator's program says to its memory goes there as numpy arrays, not by way of a device, which takes
    half of the time that Hopper's kernels take here."""
    from jax._src import callback as callbacks

    def say(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*args))

    with patch.object(callbacks, "io_callback_impl", say):
        yield


def _to_int(x):
    """An integer of the simulator's, which takes those of jax alone; tracers go on as they are."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


def _tracked_product(product, **call):
    """The simulator's matrix product, the reads of its operands counted as races too, which the simulator leaves out.

    They are the asynchronous proxy's: what threads wrote is visible to it only after a fence (commit_smem). A product
    is taken to end before its thread goes on: that a buffer is handed back while it is still read goes unseen.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with _asynchronous(call["thread"]) as (memory, reads):
        for operand in "ab":
            key = gpu_callbacks.HostAllocationKey.from_array(call[f"{operand}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(call[f"{operand}_transforms"])
            access = memory.access(key, jax.tree.map(int, transforms))
            clock = reads.async_smem_clock.copy()
            gpu_callbacks.get_races().check_read(call["thread"], clock, key, access, source_info=call["source_info"])
    return product(**call)


def _tracked_read(read, token, mesh_location, thread, *call, source_info=None, **options):
    """The simulator's read, one of an operand (`warpgroup.OPERAND`) as a product does it."""
    if OPERAND not in str(getattr(source_info, "name_stack", "")):
        return read(token, mesh_location, thread, *call, source_info=source_info, **options)
    key, transforms, block, step, _ = call
    with _asynchronous(thread) as (_, reads):
        clock = reads.copy()
        clock.generic_clock = clock.async_smem_clock
        options |= {"clock": clock, "increment_clock": False, "source_info": source_info}
        return read(token, mesh_location, thread, key, transforms, block, step, **options)


@contextlib.contextmanager
def _asynchronous(thread):
    """The simulator's memory and the clock of what `thread` has the asynchronous proxy do now."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())  # beside the thread: else what it has not fenced would be ordered
    yield memory, clock
    with memory.lock:
        memory.clocks[thread].update(clock)


@functools.cache
def compiled(kernel: Kernel, spec: AttentionSpec, config: object):
    """The kernel under jit: (q, k, v, positions, selection) -> AttentionOut; k and v [B,S,K,H]."""

    def launch(q, k, v, positions, selection):
        return kernel.launch(q, KeyValues.of(k, v), spec, positions, selection, config)

    return jax.jit(launch)


def run(kernel: Kernel, call: oracle.Call, dtype: str, config: object = None) -> AttentionOut:
    """Run the kernel on a numpy call; results as numpy float32. The smallest blocks if no config is given."""
    spec = spec_of(call, kernel.role)
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (call.q, call.k, call.v))
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    selection = None
    if kernel.role == "sparse":
        selection = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    config = small_config(kernel, spec, call_shapes(q, k, selection)) if config is None else config
    with machine(kernel):
        out = jax.block_until_ready(compiled(kernel, spec, config)(q, k, v, positions, selection))
    assert out.out.dtype == q.dtype
    assert out.lse.dtype == jnp.float32
    return AttentionOut(*(None if x is None else np.asarray(x.astype(jnp.float32)) for x in out))


def small_config(kernel: Kernel, spec: AttentionSpec | None = None, shapes: Shapes | None = None) -> object:
    """The smallest blocks it takes, far below the catalogue's sizes, so that every loop runs more than once.

    Hopper's blocks are what its products and registers allow: the least of those it ships, which needs the call.
    """
    if kernel.platform == "gpu":
        return min(kernel.search_space(spec, shapes), key=lambda config: sum(dataclasses.astuple(config)))
    sizes = {field.name: LANES for field in dataclasses.fields(kernel.Config) if field.type in (int, "int")}
    for name in sizes:
        with contextlib.suppress(ValueError):
            kernel.Config(**(sizes | {name: SMALL_BLOCK}))
            sizes[name] = SMALL_BLOCK
    return kernel.Config(**sizes)


def spec_of(call: oracle.Call, role: str) -> AttentionSpec:
    """The call's spec in this role."""
    names = ("causal", "window", "scale", "softcap", "tile", "query_tile")
    return AttentionSpec(**{name: getattr(call, name) for name in names}, mass=role == "score")


@functools.cache
def make(workload: Workload, role: str, dtype: str = "float32", seed: int = 0) -> oracle.Call:
    """Random numbers of the dtype in a workload's shapes; everything that is padding is NaN."""
    w = workload
    rng = np.random.default_rng(seed)
    store = oracle.DTYPES[dtype]
    q = rng.standard_normal((w.batch, w.num_queries, w.num_heads, w.head_dim)).astype(store)
    k = (2 * rng.standard_normal((w.batch, w.num_keys, w.num_kv_heads, w.head_dim))).astype(store)
    v = rng.standard_normal((w.batch, w.num_keys, w.num_kv_heads, w.head_dim)).astype(store)
    q_start = np.array(w.q_start or [0] * w.batch)
    kv_len = np.array(w.kv_len or [w.num_keys] * w.batch)
    q_len = np.array(w.q_len or [w.num_queries] * w.batch)
    for b in range(w.batch):
        k[b, kv_len[b] :] = np.nan
        v[b, kv_len[b] :] = np.nan
        q[b, q_len[b] :] = np.nan
    lists = random_lists if w.budget is None else budget_lists
    tiles, count = lists(w, rng) if role == "sparse" else (None, None)
    s = w.spec
    return oracle.Call(
        q, k, v, q_start, kv_len, q_len, s.causal, s.window, s.scale, s.softcap, s.tile, s.query_tile, tiles, count
    )


def random_lists(w: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ascending random tiles, a different number per query tile, zero included; entries past count are rubbish."""
    shape = (w.batch, w.num_kv_heads, w.num_query_tiles)
    count = rng.integers(0, w.capacity + 1, shape)
    count.flat[0] = w.capacity
    tiles = rng.integers(0, w.num_key_tiles, (*shape, w.capacity))
    for index in np.ndindex(*shape):
        tiles[index][: count[index]] = np.sort(rng.permutation(w.num_key_tiles)[: count[index]])
    return tiles, count


def budget_lists(w: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What select_tiles lists of random masses under the workload's budget; entries past count are rubbish."""
    mass = rng.random((w.batch, w.num_kv_heads, w.num_query_tiles, w.num_key_tiles), np.float32)
    where = {n: getattr(w, n) for n in ("q_start", "kv_len", "q_len") if getattr(w, n) is not None}
    where |= {n: jnp.asarray(x, jnp.int32) for n, x in where.items()}
    where.setdefault("q_len", jnp.full(w.batch, w.num_queries, jnp.int32))
    chosen = jax.jit(lambda: select_tiles(jnp.asarray(mass), w.spec, **w.budget._asdict(), **where))()
    tiles, count = np.array(chosen.tiles), np.array(chosen.count)
    past = np.arange(tiles.shape[-1]) >= count[..., None]
    return np.where(past, rng.integers(0, w.num_key_tiles, tiles.shape), tiles), count


def kernels(role: str | None = None, phase: str | None = None, *, simulate: bool = True) -> list[Kernel]:
    """Kernels of the table that run here, absent chips' too with `simulate`; prefill kernels take decode calls too."""
    platforms = ("any", jax.default_backend(), *(("tpu", "gpu") if simulate else ()))
    found = [k for k in KERNELS if k.platform in platforms and role in (None, k.role)]
    found = [k for k in found if k not in gpu_cudnn.KERNELS or not is_simulated(k)]  # no simulator knows cuDNN
    return [k for k in found if phase != "prefill" or k.phase == "prefill"]


def dtype_of(kernel: Kernel) -> str:
    """float32, or the first dtype it takes where that is not one of them."""
    return "float32" if "float32" in kernel.dtypes else kernel.dtypes[0]


def catalogue(kernel: Kernel) -> tuple[Workload, ...]:
    """The small workloads that a kernel is held against the oracles on; those about tiles if it takes their tiles."""
    found = tagged("test") + (tagged("hopper") if kernel.platform == "gpu" else ())
    found = tuple(w for w in found if kernel.phase == "prefill" or "decode" in w.tags)
    tag = {"sparse": "lists", "score": "tiles"}.get(kernel.role)
    lists = tagged(tag, kernel.phase) if tag else ()
    return found + tuple(w for w in lists if (fit := taken(kernel, w)) is None or fit.spec.tile == w.spec.tile)


def taken(kernel: Kernel, workload: Workload, dtype: str | None = None) -> Workload | None:
    """The workload, at tile 16 or head dim 64 if the kernel refuses less; None if it refuses that too."""
    dtype = dtype or dtype_of(kernel)
    for head_dim in (workload.head_dim, max(workload.head_dim, 64)):
        for tile in (workload.spec.tile, max(workload.spec.tile, 16), 1):
            spec = dataclasses.replace(workload.spec, tile=tile)
            w = dataclasses.replace(workload, spec=spec, head_dim=head_dim)
            if kernel.supports(w.role_spec(kernel.role), w.shapes(kernel.role, dtype)) is None:
                return w
    return None
