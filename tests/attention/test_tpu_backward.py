"""The TPU gradient kernel in simulation: masks and shapes, blocks much smaller than the call, NaN in all padding."""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions
from tessera.attention.dispatch import KERNELS
from tessera.attention.tpu import backward as tpu_backward
from tessera.attention.xla import prefill as xla_prefill

DENSE = next(k for k in KERNELS if k.name == "tpu_prefill_dense")
SMALL = tpu_backward.Config(block_t=128, block_s=256, chunk=128)
NAN = np.float32(np.nan)


def make(spec, shape, positions, dtype, seed=0):
    """Return (oracle call, d_out, d_lse) with NaN in all padding."""
    batch, num_queries, num_keys, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    store = oracle.DTYPES[dtype]
    q = rng.standard_normal((batch, num_queries, heads, dim)).astype(store)
    k = (1.5 * rng.standard_normal((batch, num_keys, kv_heads, dim))).astype(store)
    v = rng.standard_normal((batch, num_keys, kv_heads, dim)).astype(store)
    d_out = rng.standard_normal(q.shape).astype(store)
    d_lse = rng.standard_normal(q.shape[:3]).astype(np.float32)
    q_start, kv_len, q_len = (np.array(x) for x in positions)
    for b in range(batch):
        k[b, kv_len[b] :], v[b, kv_len[b] :] = NAN, NAN
        q[b, q_len[b] :], d_out[b, q_len[b] :], d_lse[b, q_len[b] :] = NAN, NAN, NAN
    call = oracle.Call(
        q, k, v, q_start, kv_len, q_len, spec.causal, spec.window, spec.scale, spec.softcap, spec.tile, spec.query_tile
    )
    return call, d_out, d_lse


def exact(call, d_out, d_lse, spec):
    """Compute float32 results and gradients by the portable kernel, which the oracle checks in test_attention.py."""
    clean = [np.nan_to_num(np.asarray(x, np.float32)) for x in (call.q, call.k, call.v, d_out, d_lse)]
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    return portable(spec)(*clean, positions)


@functools.cache
def portable(spec):
    """Jit the portable kernel: (q, k, v, d_out, d_lse, positions) -> its results and gradients."""
    config = xla_prefill.Config(block_t=64, block_s=64)

    def both(q, k, v, d_out, d_lse, positions):
        def forward(q, k, v):
            return xla_prefill.launch(q, KeyValues.of(k, v), spec, positions, None, config)[:2]

        results, backward = jax.vjp(forward, q, k, v)
        return results, backward((d_out, d_lse))

    return jax.jit(both)


def run(call, results, d_out, d_lse, spec, dtype, config):
    """Simulate the kernel on the forward results, with NaN in `out` where a row sees no key; return dq, dk, dv."""
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    out, lse = (np.asarray(x) for x in results)
    poisoned = np.where(np.isfinite(lse)[..., None], out, NAN).astype(oracle.DTYPES[dtype])
    given = (jnp.asarray(x) for x in (call.q, call.k, call.v, poisoned, lse, d_out, d_lse))
    with calls.machine(DENSE):
        got = jax.block_until_ready(simulated(spec, config)(*given, positions))
    assert all(x.dtype == dtype for x in got)
    return [np.asarray(x).astype(np.float32) for x in got]


@functools.cache
def simulated(spec, config):
    """Jit the simulated kernel: (q, k, v, out, lse, d_out, d_lse, positions) -> dq, dk, dv."""

    def gradients(q, k, v, out, lse, d_out, d_lse, positions):
        results = AttentionOut(out, lse), AttentionOut(d_out, d_lse)
        found = tpu_backward.gradients(q, *KeyValues.of(k, v)[:2], *results, spec, positions, config)
        return found[0], *KeyValues.of(*found[1:])[:2]

    return calls.jit_for(DENSE, gradients)


def distance(mine, truth):
    truth = np.asarray(truth)
    return np.abs(mine - truth).max() / max(1.0, np.abs(truth).max())


RAGGED = ((37, -150, 0), (300, 145, 300), (300, 300, 10))
CASES = {
    "causal": (AttentionSpec(), (1, 300, 300, 2, 2, 16), ((0,), (300,), (300,)), SMALL),
    "one_slab": (AttentionSpec(), (1, 300, 300, 2, 1, 16), ((0,), (300,), (300,)), None),
    "ragged": (AttentionSpec(), (3, 300, 337, 4, 2, 8), RAGGED, SMALL),
    "both_ways": (AttentionSpec(causal=False), (2, 140, 600, 2, 1, 24), ((0, 0), (600, 333), (140, 100)), SMALL),
    "nothing": (AttentionSpec(), (2, 150, 300, 2, 1, 16), ((0, 5), (0, 300), (150, 0)), SMALL),
    "window": (AttentionSpec(window=70), (2, 400, 400, 2, 1, 64), ((0, 0), (400, 390), (400, 300)), SMALL),
    "window_softcap": (
        AttentionSpec(window=150, softcap=2.0, scale=0.4), (1, 300, 420, 4, 1, 32), ((120,), (420,), (300,)), SMALL,
    ),
    "softcap": (AttentionSpec(softcap=3.0), (1, 200, 300, 8, 1, 16), ((100,), (300,), (200,)), None),
    "wide_head": (AttentionSpec(), (1, 140, 260, 2, 1, 160), ((120,), (260,), (140,)), SMALL),
    "one_chunk_slabs": (
        AttentionSpec(), (1, 260, 500, 2, 1, 128), ((240,), (500,), (260,)),
        tpu_backward.Config(block_t=128, block_s=128, chunk=128),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in CASES if name != "softcap"),
        ("ragged", "bfloat16"),
        pytest.param("softcap", "float32", marks=pytest.mark.exhaustive),  # window_softcap covers it
        pytest.param("window_softcap", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("one_slab", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_match_the_portable_kernel(name, dtype):
    spec, shape, positions, config = CASES[name]
    call, d_out, d_lse = make(spec, shape, positions, dtype)
    results, truth = exact(call, d_out, d_lse, spec)
    got = run(call, results, d_out, d_lse, spec, dtype, config)
    for which, mine, right in zip(("dq", "dk", "dv"), got, truth):
        assert np.all(np.isfinite(mine)), which
        assert distance(mine, right) <= (5e-6 if dtype == "float32" else 2e-2), which
    assert np.all(got[0][np.isneginf(results[1])] == 0)
    for b, length in enumerate(call.kv_len):
        assert not got[1][b, length:].any()
        assert not got[2][b, length:].any()


def test_future_rows_and_keys_change_no_gradient_bit_for_bit():
    """Later keys do not change early rows' dq, and early rows do not change later keys' dk and dv."""
    spec, shape, positions, config = CASES["causal"]
    call, d_out, d_lse = make(spec, shape, positions, "float32")
    results, _ = exact(call, d_out, d_lse, spec)
    before = run(call, results, d_out, d_lse, spec, "float32", config)
    cut = 171
    k, v, d_early = call.k.copy(), call.v.copy(), d_out.copy()
    k[:, cut:], v[:, cut:] = -2 * k[:, cut:], 100 * v[:, cut:]
    after = run(call._replace(k=k, v=v), results, d_out, d_lse, spec, "float32", config)
    assert np.array_equal(before[0][:, :cut], after[0][:, :cut])
    assert not np.array_equal(before[0][:, cut:], after[0][:, cut:])
    d_early[:, :cut] *= -3
    after = run(call, results, d_early, d_lse, spec, "float32", config)
    assert np.array_equal(before[1][:, cut:], after[1][:, cut:])
    assert np.array_equal(before[2][:, cut:], after[2][:, cut:])
    assert not np.array_equal(before[2][:, :cut], after[2][:, :cut])


def test_executions_count_every_turn_of_a_small_call():
    """Compare with a brute-force count: 512 rows from position 0 and 512 keys, in slabs of two chunks."""
    shapes = tpu_backward.Shapes(2, 512, 512, 4, 2, 128, None, "float32")
    counts = tpu_backward.executions(AttentionSpec(window=130), shapes, SMALL)
    see = np.tril(np.ones((512, 512))) - np.tril(np.ones((512, 512)), -130)
    part = see.reshape(4, 128, 4, 128).sum((1, 3))
    per_head = {name: counts[name] / 4 for name in counts}
    assert per_head["whole_chunk"] == (part == 128 * 128).sum() == 0
    assert per_head["masked_chunk"] + per_head["window_chunk"] == (part > 0).sum()
    assert per_head["step"] == 8
    live = part.reshape(4, 2, 2).any(2)
    assert per_head["first"] == live.sum()
    assert per_head["fetch_rows"] == live[:, 1].sum()
