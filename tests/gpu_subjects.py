"""Small Hopper programs for the tests of the CUDA compiler, which compile them or run them in the interpreter."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic.error_handling import MosaicError
from jax._src.pallas.mosaic_gpu.lowering import LoweringError
from jax.experimental import pallas as pl

from tessera.attention.gpu.warpgroup import ROWS, filled, swizzled
from tessera.deviceless.programs import attention_call

WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def product(blocks=4, columns=128, stages=2, dtype="bfloat16"):
    """Build x @ y for x [64, blocks * 64] and y [blocks * 64, columns]: one warp copies, a warpgroup multiplies."""
    width = 64
    tiles = swizzled(dtype)

    def body(x_ref, y_ref, out_ref, x_smem, y_smem, out_smem, full, empty):
        group = lax.axis_index("group")

        @pl.when(group == 0)
        def _():
            def step(i, acc):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])

                def multiply(ref):
                    plgpu.wgmma(ref, x_smem.at[slot], y_smem.at[slot])
                    return ref[...]

                part = pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))
                plgpu.barrier_arrive(empty.at[slot])
                return acc + part

            acc = lax.fori_loop(0, blocks, step, filled((ROWS, columns), 0.0))
            out_smem[...] = acc.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_ref)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(group == 1)
        def _():
            def issue(i, _):
                slot = lax.rem(i, jnp.int32(stages))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                keys = pl.ds(i * width, width)
                plgpu.copy_gmem_to_smem(x_ref.at[:, keys], x_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(y_ref.at[keys], y_smem.at[slot], full.at[slot])
                return None

            lax.fori_loop(0, blocks, issue, None)

            def drain(i, _):
                plgpu.barrier_wait(empty.at[lax.rem(i, jnp.int32(stages))])
                return None

            lax.fori_loop(max(blocks - stages, 0), blocks, drain, None)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ROWS, columns), dtype),
        scratch_types=[
            plgpu.SMEM((stages, ROWS, width), dtype, transforms=tiles),
            plgpu.SMEM((stages, width, columns), dtype, transforms=tiles),
            plgpu.SMEM((ROWS, columns), dtype, transforms=tiles),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(1,),
        grid_names=("step",),
        num_threads=2,
        thread_name="group",
        compiler_params=WARPGROUP,
        kernel_name="subject_product",
    )
    x = jax.ShapeDtypeStruct((ROWS, blocks * width), dtype)
    y = jax.ShapeDtypeStruct((blocks * width, columns), dtype)
    return call, (x, y), {"settings": f"{stages} stages"}


def spilling(columns=256):
    """Build a kernel with two accumulators of `columns` in one warpgroup: more than 255 registers per thread."""
    tiles = swizzled("bfloat16")

    def body(x_ref, y_ref, out_ref, x_smem, y_smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, x_smem, barrier)
        plgpu.copy_gmem_to_smem(y_ref, y_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(ref):
            plgpu.wgmma(ref, x_smem, y_smem)
            return ref[...]

        first = pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))
        second = jnp.exp2(first)
        third = pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))
        out_ref[...] = (first + second * third).astype(jnp.bfloat16)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((ROWS, columns), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((ROWS, 64), jnp.bfloat16, transforms=tiles),
            plgpu.SMEM((64, columns), jnp.bfloat16, transforms=tiles),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(1,),
        grid_names=("step",),
        compiler_params=WARPGROUP,
    )
    return call, (jax.ShapeDtypeStruct((ROWS, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, columns), jnp.bfloat16))


def copied(rows, columns, shape, index=..., transforms=()):
    """Build a kernel that copies a slice of an array of `shape` to shared memory and out again."""

    def body(x_ref, out_ref, x_smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[index], x_smem, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[...] = x_smem[...]

    size = (rows, columns)
    scratch = [plgpu.SMEM(size, jnp.bfloat16, transforms=transforms), plgpu.Barrier()]
    return simple(body, jax.ShapeDtypeStruct(size, jnp.bfloat16), scratch, jax.ShapeDtypeStruct(shape, jnp.bfloat16))


def simple(body, out, scratch, *arguments):
    """Build a kernel of one thread block and one warpgroup."""
    call = plgpu.kernel(
        body, out_type=out, scratch_types=scratch, grid=(1,), grid_names=("step",), compiler_params=WARPGROUP
    )
    return call, arguments


def large_shared():
    """Build a kernel with one buffer of 256 KiB."""
    return copied(1024, 128, (4096, 128), pl.ds(0, 1024), swizzled("bfloat16"))


def wide_copy():
    """Build a kernel that copies 512 rows at once."""
    return copied(512, 64, (4096, 64), pl.ds(0, 512))


def odd_rows():
    """Build a kernel that copies from rows of 24 bytes."""
    return copied(64, 4, (4096, 12), (pl.ds(0, 64), pl.ds(0, 4)))


def sorting():
    """Build a kernel that sorts."""
    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    return simple(lambda x_ref, out_ref: out_ref.__setitem__(..., jnp.sort(x_ref[...])), x, [], x)


def two_layouts():
    """Build a sum of two arrays whose register layouts are fixed and differ."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def body(x_ref, out_ref):
        a = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        b = plgpu.layout_cast(x_ref[...], plgpu.Layout.WG_STRIDED((64, 64), 2))
        out_ref[...] = a + b

    return simple(body, x, [], x)


def odd_registers():
    """Build a kernel whose register count is not a multiple of 8."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def body(x_ref, out_ref):
        plgpu.set_max_registers(237, action="increase")
        out_ref[...] = x_ref[...]

    return simple(body, x, [], x)


def odd_product():
    """Build a product of 48 rows."""
    x = jax.ShapeDtypeStruct((48, 48), jnp.float32)

    def body(x_ref, out_ref, smem):
        def multiply(ref):
            plgpu.wgmma(ref, smem, smem.transpose((1, 0)))
            return ref[...]

        out_ref[...] = pl.run_scoped(multiply, plgpu.ACC((48, 48), jnp.float32))

    return simple(body, x, [plgpu.SMEM((48, 64), jnp.bfloat16, transforms=swizzled("bfloat16"))], x)


def slow():
    """Sleep, so that the program never reaches the compiler."""
    import time

    time.sleep(600)


def lowering_error(program):
    """Lower an `attention_program` for CUDA with the installed jax; return the error, or None if it lowers.

    This runs the whole Mosaic lowering for Hopper and needs no CUDA compiler.
    """
    function, arguments, _ = attention_call(**program["kwargs"])
    try:
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError, MosaicError, LoweringError) as error:
        return f"{type(error).__name__}: {error}"
    return None
