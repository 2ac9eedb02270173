"""With JAX's 64-bit types enabled, as many scientific programs have them, Tessera's programs still run in 32 bits."""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec
from tessera.attention.dispatch import attention
from tessera.attention.selection import select_tiles
from tessera.attention.workloads import WORKLOADS

NAMED = {workload.name: workload for workload in WORKLOADS}


def portable_cases():
    """Yield each portable kernel with small blocks and with its own; the other two pairs are exhaustive."""
    for kernel in (k for k in calls.kernels() if k.platform == "any"):
        decode = ("decode_window", "decode_ragged")
        own, small = decode if kernel.phase == "decode" else ("window_softcap", "ragged")
        for name, blocks in ((small, "small"), (own, "own"), (own, "small"), (small, "own")):
            marks = () if (name, blocks) in ((small, "small"), (own, "own")) else pytest.mark.exhaustive
            yield pytest.param(kernel, name, blocks, id=f"{kernel.name}-{name}-{blocks}", marks=marks)


@functools.cache
def truth(name, role):
    call = calls.make(NAMED[name], role)
    answer = oracle.attend(call)
    return call, answer, oracle.tolerance(call, answer, "float32")


@pytest.mark.parametrize(("kernel", "name", "blocks"), list(portable_cases()))
def test_every_portable_kernel_meets_the_oracle(kernel, name, blocks):
    call, answer, allowed = truth(name, "sparse" if kernel.role == "sparse" else "dense")
    shapes = NAMED[name].shapes(kernel.role)
    config = kernel.default_config(calls.spec_of(call, kernel.role), shapes) if blocks == "own" else None
    with jax.enable_x64(True):
        result = calls.run(kernel, call, "float32", config)
    seen = ~np.isneginf(answer.lse)
    assert np.array_equal(np.isneginf(result.lse), ~seen)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.abs(result.lse[seen] - answer.lse[seen]).max() <= allowed.lse
    assert kernel.role != "score" or np.abs(result.mass - answer.mass).max() <= allowed.mass


@pytest.mark.parametrize("num_queries", [1, 40], ids=["decode", "prefill"])
def test_gradients_are_the_same(num_queries):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, 2, 16), np.float32) for length in (num_queries, 40, 40))

    def loss(*arrays):
        return jnp.sum(attention(*arrays, AttentionSpec(window=20)).out ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = gradient(q, k, v)
    with jax.enable_x64(True):
        result = gradient(q, k, v)
    for one, other in zip(expected, result):
        assert other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "num_queries"), [("xla_prefill", 40), ("xla_decode", 1), ("reference", 40)])
def test_nothing_becomes_float64(backend, num_queries):
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, num_queries, 2, 16), (1, 40, 1, 16)))
    with jax.enable_x64(True):
        call = functools.partial(attention, spec=AttentionSpec(tile=16, mass=True), backend=backend)
        result = jax.eval_shape(call, q, k, k)
    assert [x.dtype for x in result] == [jnp.float32] * 3


def test_selections_are_the_same():
    spec = AttentionSpec(tile=16, query_tile=16)
    mass = np.random.default_rng(0).random((2, 2, 40, 40), np.float32)
    select = jax.jit(lambda mass: select_tiles(mass, spec, minimum=32))
    expected = select(mass)
    with jax.enable_x64(True):
        result = select(mass)
    for one, other in zip(expected, result):
        assert other.dtype == jnp.int32
        np.testing.assert_array_equal(one, other)
