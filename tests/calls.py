"""Attention calls made from the workload catalogue, for every test of attention."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place that says whether a race was seen
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.contract import AttentionOut, AttentionSpec, Kernel, Positions, Selection
from tessera.attention.dispatch import KERNELS
from tessera.workloads import Workload

SMALL_BLOCK = 16
LANES = 128


@contextlib.contextmanager
def machine(kernel: Kernel):
    """What the kernel runs on here: a TPU kernel on a simulated TPU: fresh memory is NaN, races count."""
    if kernel.platform != "tpu" or jax.default_backend() == "tpu":
        yield
        return
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
        try:
            yield
        finally:
            races = interpret_pallas_call.races
            pltpu.reset_tpu_interpret_mode_state()  # a failed call would otherwise fail every later one
    assert races is None or not races.races_found, f"{kernel.name}: a data race"


@functools.cache
def compiled(kernel: Kernel, spec: AttentionSpec, config: object):
    """The kernel under jit: (q, k, v, positions, selection) -> AttentionOut."""
    return jax.jit(lambda q, k, v, positions, selection: kernel.launch(q, k, v, spec, positions, selection, config))


def run(kernel: Kernel, call: oracle.Call, dtype: str, config: object = None) -> AttentionOut:
    """Run the kernel on a numpy call; results as numpy float32."""
    spec = spec_of(call, kernel.role)
    q, k, v = (jnp.asarray(x).astype(dtype) for x in (call.q, call.k, call.v))
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    selection = None
    if kernel.role == "sparse":
        selection = Selection(jnp.asarray(call.tiles, jnp.int32), jnp.asarray(call.count, jnp.int32))
    config = small_config(kernel) if config is None else config
    with machine(kernel):
        out = jax.block_until_ready(compiled(kernel, spec, config)(q, k, v, positions, selection))
    assert out.out.dtype == q.dtype
    assert out.lse.dtype == jnp.float32
    return AttentionOut(*(None if x is None else np.asarray(x.astype(jnp.float32)) for x in out))


def small_config(kernel: Kernel) -> object:
    """The smallest blocks it takes, far below the catalogue's sizes, so that every loop runs more than once."""
    sizes = {field.name: LANES for field in dataclasses.fields(kernel.Config) if field.type in (int, "int")}
    for name in sizes:
        with contextlib.suppress(ValueError):
            kernel.Config(**(sizes | {name: SMALL_BLOCK}))
            sizes[name] = SMALL_BLOCK
    return kernel.Config(**sizes)


def other_config(kernel: Kernel) -> object:
    """Blocks four times those, and every switch the other way round."""
    small = small_config(kernel)
    values = {field.name: getattr(small, field.name) for field in dataclasses.fields(small)}
    return kernel.Config(**{n: not v if isinstance(v, bool) else 4 * v for n, v in values.items()})


def spec_of(call: oracle.Call, role: str) -> AttentionSpec:
    """The call's spec in this role."""
    return AttentionSpec(
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        softcap=call.softcap,
        tile=call.tile,
        query_tile=call.query_tile,
        mass=role == "score",
    )


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
    tiles, count = random_lists(w, rng) if role == "sparse" else (None, None)
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


def kernels(role: str | None = None, phase: str | None = None) -> list[Kernel]:
    """Kernels of the table that run on this machine, a TPU's in simulation; a prefill kernel takes decode calls too."""
    platforms = ("any", "tpu", jax.default_backend())
    found = [k for k in KERNELS if k.platform in platforms and role in (None, k.role)]
    return [k for k in found if phase != "prefill" or k.phase == "prefill"]


def taken(kernel: Kernel, workload: Workload, dtype: str = "float32") -> Workload | None:
    """The workload, at tile 16 if the kernel refuses single keys; None if it refuses that too."""
    for tile in (workload.spec.tile, max(workload.spec.tile, 16)):
        w = dataclasses.replace(workload, spec=dataclasses.replace(workload.spec, tile=tile))
        if kernel.supports(w.role_spec(kernel.role), w.shapes(kernel.role, dtype)) is None:
            return w
    return None
