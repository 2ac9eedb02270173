"""The simulated chips detect planted faults: races in any launch, and reads of memory that was never written."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.dispatch import KERNELS
from tessera.core import hardware
from tessera.measure import trials

TPU = next(k for k in KERNELS if k.platform == "tpu")
GPU = next(k for k in KERNELS if k.platform == "gpu" and "cudnn" not in k.name)


def tpu_copy(x, *, early: bool):
    """Return x by a copy into scratch; `early` reads the scratch before waiting for the copy."""

    def body(x_ref, out_ref, scratch, semaphore):
        copy = pltpu.make_async_copy(x_ref, scratch, semaphore)
        copy.start()
        if early:
            out_ref[...] = scratch[...]
        copy.wait()
        if not early:
            out_ref[...] = scratch[...]

    return pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )(x)


def gpu_copy(x, *, early: bool):
    """Return x by a TMA copy on a simulated Hopper; `early` reads the buffer before waiting for the copy."""

    def body(x_ref, out_ref, shared, barrier):
        plgpu.copy_gmem_to_smem(x_ref, shared, barrier)
        if early:
            out_ref[...] = shared[...]
        plgpu.barrier_wait(barrier)
        if not early:
            out_ref[...] = shared[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )(x)


@pytest.mark.parametrize(("kernel", "copy"), [(TPU, tpu_copy), (GPU, gpu_copy)], ids=["tpu", "gpu"])
@pytest.mark.parametrize("early", [(), (0,), (1,)], ids=["none", "first", "last"])
def test_a_race_of_any_launch_is_seen(kernel, copy, early):
    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)
    program = jax.jit(lambda x: copy(copy(x, early=0 in early), early=1 in early))
    with pytest.raises(trials.Race, match="a data race") if early else contextlib.nullcontext():
        with trials.machine(kernel):
            out = jax.block_until_ready(program(x))
    if not early:
        assert np.array_equal(out, x)


def test_fresh_memory_is_nan():
    def body(out_ref, scratch):
        out_ref[...] = scratch[...]

    def call():
        shape = (8, 128)
        return pl.pallas_call(
            body, out_shape=jax.ShapeDtypeStruct(shape, jnp.float32), scratch_shapes=[pltpu.VMEM(shape, jnp.float32)]
        )()

    with trials.machine(TPU):
        assert np.isnan(jax.block_until_ready(jax.jit(call)())).all()


def test_a_portable_kernel_needs_no_simulator():
    assert not trials.is_simulated(next(k for k in KERNELS if k.platform == "any"))


def test_a_gpu_of_another_generation_simulates_a_kernel_and_a_gpu_check_leaves_it_out(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for here, absent in (("9.0", False), ("10.0", True)):
        monkeypatch.setattr(hardware, "gpu_capability", lambda here=here: here)
        assert trials.is_simulated(GPU) == absent
        assert (GPU in trials.kernels(simulate=False)) != absent
        assert GPU in trials.kernels()
