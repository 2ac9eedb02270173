"""Draw random attention calls and run kernels on them, for the tests and `tessera verify`.

Padding is always NaN: keys at or past kv_len, rows at or past q_len. A kernel for a TPU or a GPU that is absent runs in
simulation, with race detection on and uninitialised memory filled with NaN.
"""

import contextlib
import dataclasses
import functools
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes, call_shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.gpu.warpgroup import OPERAND
from tessera.attention.kernel import Kernel
from tessera.attention.selection import select_tiles
from tessera.attention.tpu.matrix_unit import LANES
from tessera.attention.workloads import Workload, tagged
from tessera.core import hardware

SMALL_BLOCK = 16
SPEC_FIELDS = ("causal", "window", "scale", "softcap", "tile", "query_tile")
"""Fields that an AttentionSpec and a call of the oracle share."""
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for a simulated kernel. It runs only a few times, and optimising would take longer than the runs."""


class Race(RuntimeError):
    """Two threads of a simulated kernel accessed the same memory without synchronisation, and at least one wrote."""


def machine(kernel: Kernel):
    """Return a context in which the kernel runs on this machine, in simulation if the kernel's chip is absent. It
    raises Race on exit if the simulation found one."""
    if not is_simulated(kernel):
        return contextlib.nullcontext()
    return {"tpu": _simulated_tpu, "gpu": _simulated_gpu}[kernel.platform](kernel.name)


def is_simulated(kernel: Kernel) -> bool:
    """Return whether the kernel's chip is absent: JAX runs on another platform, or this GPU cannot run the kernel."""
    return kernel.platform not in ("any", jax.default_backend()) or not kernel.runs_on(hardware.gpu_capability())


@contextlib.contextmanager
def _simulated_tpu(name: str):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator  # the only report of races
    from jax.experimental.pallas import tpu as pltpu

    with _every(simulator, "RaceDetectionState") as states, _direct_callbacks():
        try:
            params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
            with pltpu.force_tpu_interpret_mode(params):
                yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # a failed call would otherwise fail every later one
    if any(state.races_found for state in states):
        raise Race(f"{name}: the simulator found a data race")


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
        raise Race(f"{name}: the simulator found a data race")


@contextlib.contextmanager
def _every(module, name: str):
    """Yield a list that collects the race detectors (instances of class `name` of `module`), one per kernel launch; the
    simulator itself keeps only the last one."""
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
    """Let the simulator's callbacks take and return numpy arrays, without copies through a device, which would take
    half of the simulation time of the Hopper kernels."""
    from jax._src import callback as callbacks

    def say(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*args))

    with patch.object(callbacks, "io_callback_impl", say):
        yield


def _to_int(x):
    """Return int(x), also for numpy integers, which the simulator's own function refuses; return tracers unchanged."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


def _tracked_product(product, **call):
    """Check the reads of a matrix product's operands for races, which the simulator does not, then run its product.

    The hardware reads the operands through its asynchronous proxy, which sees threads' writes only after a fence
    (`commit_smem`). The simulated product ends before its thread continues, so the check misses a buffer that is
    released while real hardware would still read it.
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
    """Run the simulator's read. In the name scope `warpgroup.OPERAND`, check it as a read of a product's operand."""
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
    """Yield the simulator's memory and the vector clock of the asynchronous proxy's next access for `thread`."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())  # a separate thread: unfenced writes must not count as ordered
    yield memory, clock
    with memory.lock:
        memory.clocks[thread].update(clock)


def jit_for(kernel: Kernel, launch):
    """Jit a function that launches the kernel; compile without optimisation if the kernel is simulated."""
    return jax.jit(launch, compiler_options=UNOPTIMISED if is_simulated(kernel) else None)


@functools.cache
def compiled(kernel: Kernel, spec: AttentionSpec, config: object):
    """Return the kernel as a jitted function (q, k, v, positions, selection, scales) -> AttentionOut."""

    def launch(q, k, v, positions, selection, scales=None):
        return kernel.launch(q, KeyValues.of(k, v)._replace(scales=scales), spec, positions, selection, config)

    return jit_for(kernel, launch)


def run(kernel: Kernel, call: oracle.Call, dtype: str, config: object = None) -> AttentionOut:
    """Run the kernel on a call of numpy arrays, with the smallest blocks if `config` is None; return float32 arrays."""
    spec = spec_of(call, kernel.role)
    scales = None if call.scales is None else jnp.asarray(call.scales)
    q, k, v = (
        jnp.asarray(x if x.dtype == np.int8 else x.astype(oracle.DTYPES[dtype])) for x in (call.q, call.k, call.v)
    )
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    selection = None
    if kernel.role == "sparse":
        selection = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    shapes = call_shapes(q, k, selection)._replace(scaled=scales is not None)
    config = small_config(kernel, spec, shapes) if config is None else config
    with machine(kernel):
        out = jax.block_until_ready(compiled(kernel, spec, config)(q, k, v, positions, selection, scales))
    assert out.out.dtype == q.dtype
    assert out.lse.dtype == jnp.float32
    return AttentionOut(*(None if x is None else np.asarray(x).astype(np.float32) for x in out))


def small_config(kernel: Kernel, spec: AttentionSpec | None = None, shapes: Shapes | None = None) -> object:
    """Return the kernel's smallest block sizes; the catalogue's calls are larger, so every loop runs more than once. On
    Hopper, matrix instructions and registers limit them, so they come from the call's search space."""
    if kernel.platform == "gpu":
        return min(kernel.search_space(spec, shapes), key=lambda config: sum(dataclasses.astuple(config)))
    sizes = {field.name: LANES for field in dataclasses.fields(kernel.Config) if field.type in (int, "int")}
    for name in sizes:
        with contextlib.suppress(ValueError):
            kernel.Config(**(sizes | {name: SMALL_BLOCK}))
            sizes[name] = SMALL_BLOCK
    return kernel.Config(**sizes)


def roundings(kernel: Kernel) -> dict[str, bool]:
    """Return which intermediate values the kernel rounds, as keyword arguments of `oracle.tolerance`.

    "folded": a TPU's kernels multiply the softmax scale into q, because scaling the scores would cost a tenth of the
    speed. "dequantised": prefill kernels of TPUs and GPUs multiply int8 keys and values by their scales.
    """
    return {"folded": kernel.platform == "tpu", "dequantised": kernel.platform != "any" and kernel.phase == "prefill"}


def spec_of(call: oracle.Call, role: str) -> AttentionSpec:
    """Return the spec of the oracle's call. With role "score", it also asks for each key tile's probability mass."""
    return AttentionSpec(**{name: getattr(call, name) for name in SPEC_FIELDS}, mass=role == "score")


@functools.cache
def make(workload: Workload, role: str, dtype: str = "float32", seed: int = 0) -> oracle.Call:
    """Draw random inputs for a workload's call, in `dtype`, for kernels of this role; all padding is NaN."""
    w = workload
    rng = np.random.default_rng(seed)
    store = oracle.DTYPES[dtype]
    q = rng.standard_normal((w.batch, w.num_queries, w.num_heads, w.head_dim)).astype(store)
    k = (2 * rng.standard_normal((w.batch, w.num_keys, w.num_kv_heads, w.head_dim))).astype(store)
    v = rng.standard_normal((w.batch, w.num_keys, w.num_kv_heads, w.head_dim)).astype(store)
    q_start = np.array(w.q_start or [0] * w.batch)
    kv_len = np.array(w.kv_len or [w.num_keys] * w.batch)
    q_len = np.array(w.q_len or [w.num_queries] * w.batch)
    scales = None
    if w.scaled:
        (k, k_scale), (v, v_scale) = round_keys(k), round_keys(v)
        scales = np.stack([k_scale, v_scale], 2)
    for b in range(w.batch):
        if w.scaled:  # no int8 is NaN: the scale is
            scales[b, :, :, kv_len[b] :] = np.nan
        else:
            k[b, kv_len[b] :] = v[b, kv_len[b] :] = np.nan
        q[b, q_len[b] :] = np.nan
    lists = random_lists if w.budget is None else budget_lists
    tiles, count = lists(w, rng) if role == "sparse" else (None, None)
    fields = {name: getattr(w.spec, name) for name in SPEC_FIELDS} | {"tiles": tiles, "count": count, "scales": scales}
    return oracle.Call(q=q, k=k, v=v, q_start=q_start, kv_len=kv_len, q_len=q_len, **fields)


def round_keys(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round x [batch, keys, heads, head dim] to int8 numbers and bfloat16 scales [batch, heads, keys], with the largest
    |number| of each key and head about 127."""
    scale = (np.abs(x).max(-1).astype(np.float32) / 127).astype(ml_dtypes.bfloat16)
    whole = np.round(x.astype(np.float32) / scale[..., None].astype(np.float32))
    return np.clip(whole, -127, 127).astype(np.int8), np.swapaxes(scale, 1, 2)


def random_lists(w: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw ascending lists of random key tiles, (tiles, count). Each query tile's count is random and may be 0; entries
    of `tiles` past the count are garbage."""
    shape = (w.batch, w.num_kv_heads, w.num_query_tiles)
    count = rng.integers(0, w.capacity + 1, shape)
    count.flat[0] = w.capacity
    tiles = rng.integers(0, w.num_key_tiles, (*shape, w.capacity))
    for index in np.ndindex(*shape):
        tiles[index][: count[index]] = np.sort(rng.permutation(w.num_key_tiles)[: count[index]])
    return tiles, count


def budget_lists(w: Workload, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the lists (tiles, count) that `select_tiles` makes from random masses under the workload's budget; entries
    of `tiles` past the count are garbage."""
    mass = rng.random((w.batch, w.num_kv_heads, w.num_query_tiles, w.num_key_tiles), np.float32)
    where = {n: getattr(w, n) for n in ("q_start", "kv_len", "q_len") if getattr(w, n) is not None}
    where |= {n: jnp.asarray(x, jnp.int32) for n, x in where.items()}
    where.setdefault("q_len", jnp.full(w.batch, w.num_queries, jnp.int32))
    chosen = jax.jit(lambda: select_tiles(jnp.asarray(mass), w.spec, **w.budget._asdict(), **where))()
    tiles, count = np.array(chosen.tiles), np.array(chosen.count)
    past = np.arange(tiles.shape[-1]) >= count[..., None]
    return np.where(past, rng.integers(0, w.num_key_tiles, tiles.shape), tiles), count


def kernels(role: str | None = None, phase: str | None = None, *, simulate: bool = True) -> list[Kernel]:
    """Return the kernels that run here and, with `simulate`, those of absent chips that can be simulated. `phase`
    "decode" does not exclude prefill kernels, which take decode calls too."""
    platforms = ("any", jax.default_backend(), *(("tpu", "gpu") if simulate else ()))
    found = [k for k in KERNELS if k.platform in platforms and role in (None, k.role)]
    found = [k for k in found if not is_simulated(k) or (simulate and k.simulable)]
    return [k for k in found if phase != "prefill" or k.phase == "prefill"]


def dtype_of(kernel: Kernel) -> str:
    return "float32" if "float32" in kernel.dtypes else kernel.dtypes[0]


def catalogue(kernel: Kernel) -> tuple[Workload, ...]:
    """Return the small workloads to check a kernel on, without those tagged "lists" or "tiles" that the kernel takes
    only at another tile size."""
    found = tagged("test") + (tagged("hopper") if kernel.platform == "gpu" else ())
    found = tuple(w for w in found if kernel.phase == "prefill" or "decode" in w.tags)
    tag = {"sparse": "lists", "score": "tiles"}.get(kernel.role)
    lists = tagged(tag, kernel.phase) if tag else ()
    if kernel.scaled:
        found += tuple(w for w in tagged("int8") if kernel.phase == "prefill" or "decode" in w.tags)
    return found + tuple(w for w in lists if (fit := taken(kernel, w)) is None or fit.spec.tile == w.spec.tile)


def taken(kernel: Kernel, workload: Workload, dtype: str | None = None) -> Workload | None:
    """Return the workload, with another tile or head dim if the kernel needs it; None if the kernel takes no variant.

    Tiles in order: the workload's own, at least 16, and 1; then the same with a head dim of at least 64.
    """
    dtype = dtype or dtype_of(kernel)
    for head_dim in (workload.head_dim, max(workload.head_dim, 64)):
        for tile in (workload.spec.tile, max(workload.spec.tile, 16), 1):
            spec = dataclasses.replace(workload.spec, tile=tile)
            w = dataclasses.replace(workload, spec=spec, head_dim=head_dim)
            if kernel.refusal(w.role_spec(kernel.role), w.shapes(kernel.role, dtype)) is None:
                return w
    return None
