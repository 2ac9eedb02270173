"""Small programs that the tests of the deviceless TPU compiler compile. The compiling process imports this module."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def scopes(blocks=4):
    """Build a product over `blocks` grid steps with the scopes first, full (every step) and last."""
    width = pltpu.get_tpu_info().mxu_column_size

    def body(x_ref, y_ref, out_ref, sum_ref):
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _():
            with jax.named_scope("first"):
                sum_ref[...] = jnp.zeros_like(sum_ref)

        with jax.named_scope("full"):
            sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(step == pl.num_programs(0) - 1)
        def _():
            with jax.named_scope("last"):
                out_ref[...] = sum_ref[...].astype(out_ref.dtype)

    size = 256
    call = pl.pallas_call(
        body,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((size, size), lambda i: (0, i)), pl.BlockSpec((size, size), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((size, size), lambda i: (0, 0)),
        scratch_shapes=[pltpu.VMEM((size, size), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
        name="subject",
    )
    x = jax.ShapeDtypeStruct((size, blocks * size), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((blocks * size, size), jnp.bfloat16)
    executions = {"step": blocks, "first": 1, "full": blocks, "last": 1, "hbm_bytes": 4.0 * blocks * size * size}
    return call, (x, y), {"executions": executions, "settings": f"{width} columns"}


def little():
    """Build two grid steps of one register each, the second with a loop of unknown length.

    tests/golden/schedule holds this program's schedule.
    """

    def body(turns_ref, x_ref, out_ref):
        with jax.named_scope("double"):
            out_ref[...] = x_ref[...] * 2

        @pl.when(pl.program_id(0) == 1)
        def _():
            def turn(i, carry):
                with jax.named_scope("turn"):
                    out_ref[...] += 1
                return carry

            jax.lax.fori_loop(0, turns_ref[0], turn, 0)

    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, turns: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, turns: (i, 0)),
        ),
        out_shape=x,
        name="little",
    )
    return call, (jax.ShapeDtypeStruct((1,), jnp.int32), x)


def long_list(entries=1 << 20):
    """Build a gather of rows whose list of ids is prefetched whole: too long for SMEM."""

    def body(ids_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...]

    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(entries,),
            in_specs=[pl.BlockSpec((8, 128), lambda i, ids: (ids[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, ids: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((8 * entries, 128), jnp.float32),
        name="long_list",
    )
    return call, (jax.ShapeDtypeStruct((entries,), jnp.int32), jax.ShapeDtypeStruct((1024, 128), jnp.float32))


def large_block(rows=1 << 17):
    """Build a kernel with two blocks of 64 MiB: too large for VMEM."""
    call = pl.pallas_call(
        lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] * 2),
        out_shape=jax.ShapeDtypeStruct((rows, 128), jnp.float32),
        in_specs=[pl.BlockSpec((rows, 128), lambda: (0, 0))],
        out_specs=pl.BlockSpec((rows, 128), lambda: (0, 0)),
    )
    return call, (jax.ShapeDtypeStruct((rows, 128), jnp.float32),)


def slow():
    """Sleep, so that the program never reaches the compiler."""
    import time

    time.sleep(600)


def decode_token(attention, cache, devices, num_keys=131072, stacked=False):
    """Build the engine's decode program for two layers, as `load` makes them, or stacked."""
    from tessera.core.mesh import MeshShape, build, sharding
    from tessera.models.cache import init_cache
    from tessera.models.config import ModelConfig
    from tessera.models.weights import abstract_params
    from tessera.runtime import step
    from tessera.runtime.roofline import recipe
    from tessera.sparse.baselines import Dense

    config = ModelConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=128, max_positions=131072, dtype="bfloat16", tie_embeddings=True,
    )  # fmt: skip
    policy = Dense() if attention == "dense" else recipe(config)
    mesh = build(MeshShape(1, 1), devices)

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, ()))

    held = jax.eval_shape(lambda: init_cache(config, 2, num_keys, dtype=cache, stacked=stacked))
    rows = [place(jax.ShapeDtypeStruct((2,), dtype)) for dtype in (jnp.int32, jnp.int32, bool)]

    class Bound:
        """The program with its static arguments, donation included."""

        def trace(self, *args):
            return step.decode_token._compiled.trace(*args, config=config, policy=policy)

    return Bound(), (abstract_params(config, mesh, stacked=stacked), jax.tree.map(place, held), *rows)
