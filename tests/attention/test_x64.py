"""Where JAX allows 64-bit types, as many scientific programs tell it to, the same programs run in 32 bits."""

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention.contract import AttentionSpec, call_shapes
from tessera.attention.dispatch import attention
from tessera.attention.selection import select_tiles
from tessera.attention.workloads import WORKLOADS

NAMED = {workload.name: workload for workload in WORKLOADS}
BLOCKS = {"small": lambda kernel, call: None, "default": lambda kernel, call: default_config(kernel, call)}


def default_config(kernel, call):
    return kernel.default_config(calls.spec_of(call, kernel.role), call_shapes(call.q, call.k))


@pytest.mark.parametrize("kernel", [k for k in calls.kernels() if k.platform == "any"], ids=lambda k: k.name)
@pytest.mark.parametrize("name", ["ragged", "window_softcap"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_portable_kernel_gives_the_same(kernel, name, blocks):
    call = calls.make(NAMED["decode_ragged" if kernel.phase == "decode" else name], kernel.role)
    config = BLOCKS[blocks](kernel, call)
    expected = calls.run(kernel, call, "float32", config)
    with jax.enable_x64(True):
        result = calls.run(kernel, call, "float32", config)
    for one, other in zip(expected, result):
        assert (one is None and other is None) or np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 40], ids=["decode", "prefill"])
def test_gradients_are_the_same(num_queries):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, 2, 16), np.float32) for length in (num_queries, 40, 40))

    def loss(*arrays):
        return jnp.sum(attention(*arrays, AttentionSpec(window=20)).out ** 2)

    expected = jax.grad(loss, (0, 1, 2))(q, k, v)
    with jax.enable_x64(True):
        result = jax.grad(loss, (0, 1, 2))(q, k, v)
    for one, other in zip(expected, result):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "num_queries"), [("xla_prefill", 40), ("xla_decode", 1), ("reference", 40)])
def test_nothing_becomes_float64(backend, num_queries):
    with jax.enable_x64(True):
        q, k = jnp.ones((1, num_queries, 2, 16), jnp.float32), jnp.ones((1, 40, 1, 16), jnp.float32)
        result = attention(q, k, k, AttentionSpec(tile=16, mass=True), backend=backend)
    assert [x.dtype for x in result] == [jnp.float32] * 3


def test_selections_are_the_same():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = np.random.default_rng(0).random((2, 2, 40, 40), np.float32)
    expected = select_tiles(mass, spec, minimum=32)
    with jax.enable_x64(True):
        result = select_tiles(mass, spec, minimum=32)
    for one, other in zip(expected, result):
        assert other.dtype == jnp.int32
        np.testing.assert_array_equal(one, other)
