"""Hopper prefill beyond the catalogue of workloads: key ranges longer than the pipeline, every order of products,
chunks of queries, tiles wider than blocks, lengths that TMA cannot address, both ways to divide the gradient, and the
ranges of blocks against brute force."""

import dataclasses
import itertools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_subjects import lowering_error

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gpu import block_ranges
from tessera.attention.gpu import prefill as gpu_prefill
from tessera.attention.workloads import Workload
from tessera.deviceless.compiler import attention_program

DENSE, SCORE = gpu_prefill.KERNELS
LONG = Workload(
    name="long",
    num_queries=70,
    num_keys=500,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    dtype="bfloat16",
    spec=AttentionSpec(tile=128, query_tile=24),
    q_start=(420,),
    kv_len=(485,),
    tags=(),
)
"""Eight blocks of 64 keys: whole blocks, blocks on the diagonal, and the last valid key in the middle of a block."""
WINDOW = dataclasses.replace(LONG, name="window", spec=AttentionSpec(window=300, tile=16, query_tile=12))


def check(kernel, workload, config, dtype="bfloat16"):
    """Compare one call with the oracle; the simulation also fails on races."""
    call = calls.make(workload, kernel.role, dtype)
    answer = oracle.attend(call)
    allowed = oracle.tolerance(call, answer, dtype)
    result = calls.run(kernel, call, dtype, config)
    seen = ~np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), ~seen)
    assert np.abs(result.lse[seen] - answer.lse[seen]).max() <= allowed.lse
    assert result.mass is None or np.abs(result.mass - answer.mass).max() <= allowed.mass
    return result


@pytest.mark.parametrize(
    ("overlap", "turns", "stages"), [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 4)]
)
def test_every_order_of_products(overlap, turns, stages):
    """Key ranges have more blocks than the pipeline has stages, and are masked at one end or both."""
    config = gpu_prefill.Config(block_s=64, stages=stages, overlap=overlap, turns=turns)
    check(DENSE, WINDOW if turns else LONG, config)


def test_one_block_and_head_dim_256():
    """The keys do not fill a block, nor the query rows a product."""
    one = dataclasses.replace(LONG, num_queries=5, num_keys=40, head_dim=256, q_start=(30,), kv_len=(37,))
    check(DENSE, one, DENSE.default_config(one.spec, one.shapes("dense")))


def test_padding_changes_nothing_bit_for_bit():
    """Values at or past kv_len and q_len, NaN included, do not change the result."""
    ragged = dataclasses.replace(LONG, q_len=(60,), kv_len=(455,))
    call = calls.make(ragged, "dense", "bfloat16")
    assert np.isnan(call.k.astype(np.float32)).any()
    finite = call._replace(**{x: np.nan_to_num(getattr(call, x).astype(np.float32), nan=7.0) for x in "qkv"})
    a, b = (calls.run(DENSE, x, "bfloat16", gpu_prefill.Config(block_s=64)) for x in (call, finite))
    assert np.array_equal(a.out, b.out)
    assert np.array_equal(a.lse, b.lse)
    assert np.all(a.out[0, 60:] == 0)


@pytest.mark.parametrize(
    "workload",
    [
        dataclasses.replace(LONG, name="both", spec=AttentionSpec(window=300, tile=128, query_tile=12)),
        pytest.param(LONG, marks=pytest.mark.exhaustive),
        pytest.param(WINDOW, marks=pytest.mark.exhaustive),
    ],
    ids=["window and a tile wider than a block", "tile wider than a block", "window"],
)
def test_chunks_of_queries_change_nothing(workload, monkeypatch):
    """Tiles are wider than a block and query tiles not aligned for TMA; two chunks give the same bits as one."""
    workload = dataclasses.replace(workload, num_queries=400, q_start=(90,), q_len=(395,))
    config = gpu_prefill.Config(block_s=64)
    whole = check(SCORE, workload, config)
    cut = gpu_prefill.Cut(workload.role_spec("score"), config, 2, 500, 64, "bfloat16")
    monkeypatch.setattr(gpu_prefill, "BITS", 384 * 2 * cut.units)
    assert gpu_prefill.chunk_rows(1, 400, 2, cut) == 384
    calls.compiled.cache_clear()
    chunked = calls.run(SCORE, calls.make(workload, "score", "bfloat16"), "bfloat16", config)
    calls.compiled.cache_clear()
    for mine, other in zip(chunked, whole, strict=True):
        assert np.array_equal(mine, other)


def test_scratch_is_bounded():
    """A chunk's scratch exceeds neither q's size nor BITS, unless the chunk is a single block of 128 rows."""
    spec = AttentionSpec(tile=16, query_tile=32, mass=True)
    for num_queries, num_keys in ((4096, 4096), (131072, 131072), (100, 131072)):
        cut = gpu_prefill.Cut(spec, gpu_prefill.Config(), 4, num_keys, 128, "bfloat16")
        rows = gpu_prefill.chunk_rows(1, num_queries, 32, cut)
        assert rows % 128 == 0
        bound = min(gpu_prefill.BITS, num_queries * 32 * 128)
        assert rows == 128 or rows * 32 * cut.units <= bound


def test_query_tiles_of_a_chunk_fit_the_grid():
    """Query tiles lie along CUDA's second grid axis, whose limit is 65,535; chunks are cut to stay within it."""
    for query_tile, num_queries, num_keys in ((1, 1 << 18, 1 << 12), (7, 1 << 20, 1 << 12), (32, 1 << 23, 1 << 12)):
        spec = AttentionSpec(tile=128, query_tile=query_tile, causal=False, mass=True)
        cut = gpu_prefill.Cut(spec, gpu_prefill.Config(), 1, num_keys, 128, "bfloat16")
        rows = gpu_prefill.chunk_rows(1, num_queries, 1, cut)
        assert rows % 128 == rows % query_tile == 0
        assert 30000 < rows // query_tile <= 65535


ODD = [(50, 208), (56, 203), (1001, 1001), (500, 5001)]
"""(rows, keys), not both multiples of 8: the interpreter accepts such arrays, TMA does not."""


@pytest.mark.parametrize(
    ("kernel", "num_queries", "num_keys"),
    [
        pytest.param(kernel, *sizes, id=f"{kernel.role}-{sizes[0]}-{sizes[1]}", marks=[pytest.mark.exhaustive] * other)
        for first, kernel in enumerate((DENSE, SCORE))
        for other, sizes in zip(itertools.cycle((first, 1 - first)), ODD)
    ],
)
def test_odd_lengths_lower_for_hopper(kernel, num_queries, num_keys):
    """Lower each pair of ODD for one of the two kernels by default; the last pair scores in chunks."""
    spec = AttentionSpec(tile=16, query_tile=32, mass=kernel is SCORE)
    shapes = Shapes(2, num_queries, num_keys, 4, 1, 128, None, "bfloat16")
    assert lowering_error(attention_program(kernel.name, spec, shapes)) is None


def dense_call(num_queries, num_keys, head_dim, softcap=None):
    """Return dense attention as a function of (q, k, v, positions), and abstract arguments for it."""
    positions, spec = Positions(*[jax.ShapeDtypeStruct((2,), jnp.int32)] * 3), AttentionSpec(softcap=softcap)
    q, k = (
        jax.ShapeDtypeStruct((2, tokens, heads, head_dim), jnp.bfloat16)
        for tokens, heads in ((num_queries, 4), (num_keys, 1))
    )

    def call(q, k, v, positions):
        return DENSE.launch(q, KeyValues.of(k, v), spec, positions, None, CONFIG)

    return call, (q, k, k, positions)


def gradient_call(num_queries, num_keys, head_dim, softcap=None):
    """Return the gradient (dq, dk, dv) of sum(out) + sum(lse) of `dense_call`, and its abstract arguments."""
    call, arguments = dense_call(num_queries, num_keys, head_dim, softcap)
    return jax.grad(lambda *x: sum(y.sum().astype(jnp.float32) for y in call(*x)[:2]), argnums=(0, 1, 2)), arguments


BACKWARD = ("gpu_backward_rows", "gpu_backward_keys")


def test_the_gradient_of_odd_lengths_lowers_for_hopper():
    """The gradients have the shapes of q, k and v."""
    gradient, arguments = gradient_call(1001, 203, 128)
    lowered = jax.jit(gradient).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert [x.shape for x in lowered.out_info] == [x.shape for x in arguments[:3]]
    assert all(name in lowered.as_text() for name in BACKWARD)


@pytest.mark.parametrize(("num_queries", "num_keys", "pads"), [(64, 208, False), (50, 208, True), (64, 203, True)])
def test_only_what_is_not_whole_is_copied(num_queries, num_keys, pads):
    """Arrays whose lengths TMA accepts are passed without padding."""
    call, arguments = dense_call(num_queries, num_keys, 64)
    assert (" pad[" in str(jax.make_jaxpr(call)(*arguments))) == pads


WINDOWED = AttentionSpec(window=150)
CAPPED = AttentionSpec(window=150, softcap=3.0)
BOTH_WAYS = AttentionSpec(causal=False)


@pytest.mark.parametrize(
    ("head_dim", "spec"),
    [(128, CAPPED), pytest.param(64, WINDOWED, marks=pytest.mark.exhaustive), (64, BOTH_WAYS), (256, CAPPED)],
)
def test_gradient_through_out_and_lse(head_dim, spec, monkeypatch):
    """Both kernels' ways to divide dk and dv, and plain JAX, with G = 2 and more steps than stages. The causal mask
    alone would show keys past kv_len; lse has a cotangent too."""
    monkeypatch.setattr(gpu_backward, "SCORES", 32 * 2 * 224)  # gives three blocks of rows
    workload = dataclasses.replace(LONG, num_keys=220, head_dim=head_dim, spec=spec, q_start=(140,), kv_len=(190,))
    call = calls.make(workload, "dense", "bfloat16")
    rng = np.random.default_rng(5)
    d_out, d_lse = rng.standard_normal(call.q.shape), rng.standard_normal(call.q.shape[:3])
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    config = DENSE.default_config(spec, workload.shapes("dense"))

    def loss(q, k, v):
        result = DENSE.launch(q, KeyValues.of(k, v), spec, positions, None, config)
        return jnp.sum(result.out * d_out) + jnp.sum(result.lse * d_lse)

    with calls.machine(DENSE):
        got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(jnp.asarray(x) for x in (call.q, call.k, call.v)))
    exact = [x + y for x, y in zip(oracle.gradients(call, d_out), lse_gradients(call, d_lse), strict=True)]
    for mine, truth in zip(got, exact, strict=True):
        assert np.abs(np.asarray(mine, np.float32) - truth).max() <= 2**-5 * max(1.0, np.abs(truth).max())
    assert not any(np.asarray(mine[:, 190:], np.float32).any() for mine in got[1:])


@pytest.mark.parametrize("spec", [AttentionSpec(scale=-0.1), AttentionSpec(causal=False)], ids=["causal", "both ways"])
def test_gradient_in_plain_jax_of_ragged_sequences(spec, monkeypatch):
    """Head dim 256, NaN padding, rows before the first key, a sequence without keys; blocks of 128 and of 4 rows."""
    sizes = {"batch": 3, "num_queries": 50, "num_keys": 90, "num_heads": 4, "num_kv_heads": 2, "head_dim": 256}
    places = {"q_start": (40, -20, 0), "kv_len": (90, 31, 0), "q_len": (50, 37, 50)}
    call = calls.make(Workload(name="ragged", spec=spec, tags=(), **sizes, **places), "dense", "bfloat16")
    truth, d_out = oracle.attend(call), np.random.default_rng(7).standard_normal(call.q.shape)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    result = AttentionOut(jnp.asarray(truth.out, jnp.bfloat16), jnp.asarray(truth.lse, jnp.float32))
    slopes = AttentionOut(jnp.asarray(d_out), jnp.zeros_like(result.lse))
    exact = oracle.gradients(call, d_out)
    for scores in (gpu_backward.SCORES, 4 * 3 * 4 * 96):  # the 90 keys are padded to 96
        monkeypatch.setattr(gpu_backward, "SCORES", scores)
        q, k, v = (jnp.asarray(x) for x in call[:3])
        gradients = jax.jit(lambda *call: gpu_backward.gradients(*call, spec, positions))
        dq, *head_major = gradients(q, *KeyValues.of(k, v)[:2], result, slopes)
        got = dq, *KeyValues.of(*head_major)[:2]
        for mine, truth, like in zip(got, exact, call[:3], strict=True):
            assert mine.shape == like.shape
            assert np.abs(np.asarray(mine, np.float32) - truth).max() <= 2**-6 * max(1.0, np.abs(truth).max())


def lse_gradients(call, d_lse):
    """Compute the gradients of sum(d_lse * lse) with respect to q, k and v, row by row."""
    dq, dk, dv = (np.zeros(x.shape) for x in (call.q, call.k, call.v))
    group, scale = call.q.shape[2] // call.k.shape[2], call.q.shape[-1] ** -0.5
    for b, t, head in np.ndindex(*call.q.shape[:3]):
        seen, kv = np.flatnonzero(oracle.sees(call, b, t, head)), head // group
        z = oracle.scores(call._replace(k=call.k[:, seen]), b, t, head)
        d_z = d_lse[b, t, head] * np.exp(z - z.max()) / np.exp(z - z.max()).sum() * scale
        d_z = d_z * (1.0 if call.softcap is None else 1 - (z / call.softcap) ** 2)
        dq[b, t, head] += d_z @ call.k[b, seen, kv].astype(np.float64)
        dk[b, seen, kv] += np.outer(d_z, call.q[b, t, head].astype(np.float64))
    return dq, dk, dv


def test_what_it_cannot_do_is_refused():
    shapes = Shapes(1, 64, 64, 2, 1, 96, None, "bfloat16")
    assert "head_dim=96" in DENSE.refusal(AttentionSpec(), shapes)
    assert "tile=1" in SCORE.refusal(AttentionSpec(tile=1, mass=True), shapes._replace(head_dim=64))
    assert "float32" in DENSE.refusal(AttentionSpec(), shapes._replace(head_dim=64, dtype="float32"))
    with pytest.raises(ValueError, match="block_s=96"):
        gpu_prefill.Config(block_s=96)


CONFIG = gpu_prefill.Config(block_s=64)


def test_ranges_of_blocks_against_brute_force():
    """Blocks [start, stop) hold every visible (row, key) pair; all pairs in blocks [whole, masked) are visible."""
    rng = np.random.default_rng(6)
    for causal, window, size in itertools.product((True, False), (None, 1, 37, 64), (16, 64)):
        if window is not None and not causal:
            continue
        spec = AttentionSpec(causal=causal, window=window)
        for _ in range(40):
            q_start, kv_len, q_len = (int(rng.integers(*x)) for x in ((-50, 150), (0, 200), (0, 130)))
            row, key = np.arange(128)[:, None], np.arange(256)[None]
            pairs = (key <= row + q_start) | (not causal)
            pairs &= (key > row + q_start - window) if window is not None else True
            mask = pairs & (key < kv_len) & (row < q_len)
            run = slice(64, 128)
            keys = block_ranges.key_blocks(q_start + 64, min(q_len - 64, 64), kv_len, spec, size)
            compare(mask[run][: max(min(q_len - 64, 64), 0)], keys, size)
            pairs |= row >= q_len  # row_blocks counts rows past q_len as seeing every key, and keys past kv_len as seen
            rows = block_ranges.row_blocks(64, 64, q_start, (kv_len, q_len), spec, size)
            compare(mask[:q_len, run].T, rows, size, pairs[:, run].T)


def compare(mask, blocks, size, padded=None):
    """Compare `mask` [fixed axis, swept axis] with the ranges of blocks along the swept axis."""
    start, whole, masked, stop = (int(x) for x in blocks)
    assert start <= whole <= masked <= stop
    swept = np.flatnonzero(mask.any(0)) // size
    assert swept.size == 0 or (start <= swept.min() and swept.max() < stop)
    assert (mask if padded is None else padded)[:, whole * size : masked * size].all()


def test_a_window_beside_256_sums_leaves_out_the_order_that_spills():
    """With head dim 256 and a window, `overlap=False` spills registers, so the search space of dense omits it."""

    def orders(window, mass):
        spec = AttentionSpec(window=window, mass=mass)
        shapes = Shapes(1, 8192, 8192, 8, 2, 256, None, "float16")
        return {config.overlap for config in gpu_prefill.search_space(spec, shapes)}

    assert orders(None, False) == {True, False}
    assert orders(1000, False) == {True}
    assert False in orders(1000, True)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_heads_of_256_are_scored_from_tiles_of_64_on(tile):
    """Tiles below 64 are refused: at head dim 256 with two sequences, the compiler spills registers."""
    spec, shapes = AttentionSpec(tile=tile, mass=True), Shapes(2, 8192, 8192, 8, 2, 256, None, "bfloat16")
    refused = gpu_prefill.supports(spec, shapes)
    assert refused is None if tile >= 64 else f"tile={tile}" in refused
