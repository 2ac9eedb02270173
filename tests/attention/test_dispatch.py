"""Dispatch: which calls are refused with which reason, which kernel is chosen, and what `explain` reports."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tessera.attention import reference
from tessera.attention.contract import AttentionSpec, KeyValues, Selection, Shapes, call_shapes
from tessera.attention.dispatch import KERNELS, attend, attention, choose, explain

SPEC = AttentionSpec(tile=16, query_tile=8)
SHAPES = Shapes(1, 128, 128, 4, 2, 16, None, "float32")


def tensors(num_queries=8, num_keys=40, heads=4, kv_heads=2, dim=16, dtype=jnp.float32):
    q = jnp.ones((2, num_queries, heads, dim), dtype)
    k = jnp.ones((2, num_keys, kv_heads, dim), dtype)
    return q, k, k


def lists(lead=(2, 2, 1), capacity=2, dtype=jnp.int32):
    return Selection(jnp.zeros((*lead, capacity), dtype), jnp.ones(lead, dtype))


BAD = {
    "rank": (lambda q, k, v: (q[0], k, v), {}, r"q\.shape=\(8, 4, 16\) must have four sizes \[B,T,N,H\]"),
    "empty": (lambda q, k, v: (q, k[:, :0], v[:, :0]), {}, r"k\.shape=.* none zero"),
    "values": (
        lambda q, k, v: (q, k, v[:, :-1]),
        {},
        r"v\.shape=\(2, 39, 2, 16\) must equal k\.shape=\(2, 40",
    ),
    "dtype": (lambda q, k, v: (q, k, v.astype(jnp.bfloat16)), {}, "float32, float32, bfloat16"),
    "batch": (lambda q, k, v: (q[:1], k, v), {}, "must have the same H"),
    "head_dim": (lambda q, k, v: (q[..., :8], k, v), {}, "must have the same H"),
    "groups": (lambda q, k, v: (q[:, :, :3], k, v), {}, "num_heads=3 must be a multiple of num_kv_heads=2"),
    "q_start": (None, {"q_start": jnp.zeros(3, jnp.int32)}, r"q_start must be int32 of shape \[B\] = \(2,\)"),
    "kv_len": (None, {"kv_len": jnp.zeros(2)}, "kv_len must be int32 .* got float32"),
    "q_len": (None, {"q_len": jnp.zeros((2, 1), jnp.int32)}, "q_len must be int32"),
    "tiles": (None, {"selection": lists((2, 2, 3))}, r"selection\.tiles\.shape=\(2, 2, 3, 2\) must be \[B,K,I,C\]"),
    "no_tiles": (None, {"selection": lists(capacity=0)}, "C >= 1"),
    "count": (None, {"selection": Selection(lists().tiles, jnp.ones((2, 2), jnp.int32))}, r"selection\.count\.shape"),
    "ids": (None, {"selection": lists(dtype=jnp.float32)}, "must be int32, got float32"),
    "backend": (None, {"backend": "nope"}, "backend='nope' must be one of .*reference_dense"),
    "role": (None, {"backend": "reference_score"}, "its role is score, but the call's is dense"),
    "phase": (None, {"backend": "xla_decode"}, "takes one query row per sequence, but the call has 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    change, options, words = BAD[case]
    arrays = tensors() if change is None else change(*tensors())
    with pytest.raises(ValueError, match=words):
        attention(*arrays, SPEC, **options)


def test_mass_of_a_selection_is_refused():
    with pytest.raises(ValueError, match="needs selection=None"):
        attention(*tensors(), AttentionSpec(mass=True, tile=16, query_tile=8), selection=lists())


def test_a_dtype_no_kernel_takes_is_refused_with_every_reason():
    arrays = (x.astype(jnp.int8) for x in tensors())
    with pytest.raises(ValueError, match=r"no kernel can run.*dtype int8 is not one of"):
        attention(*arrays, SPEC)


@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
@pytest.mark.parametrize("num_queries", [1, 128])
def test_explain_agrees_with_what_runs(role, num_queries):
    """Exactly one kernel is chosen, the first without a refusal, and every other one has a reason."""
    spec = AttentionSpec(mass=role == "score")
    shapes = SHAPES._replace(num_queries=num_queries, capacity=4 if role == "sparse" else None)
    choices = explain(spec, shapes)
    assert [c.kernel for c in choices] == [k.name for k in KERNELS]
    assert sum(c.chosen for c in choices) == 1
    assert all((c.reason is None) == c.chosen for c in choices)
    chosen = next(c for c in choices if c.chosen)
    assert choose(spec, shapes).name == chosen.kernel
    assert chosen.kernel.endswith(role)
    later = [c for c in choices[choices.index(chosen) + 1 :] if c.reason.endswith("comes first")]
    assert any(c.kernel == f"reference_{role}" for c in later)
    if jax.default_backend() == "cpu":
        assert chosen.kernel == f"xla_{'decode' if num_queries == 1 else 'prefill'}_{role}"


def test_platform_kernels_are_refused_elsewhere():
    for choice, kernel in zip(explain(SPEC, SHAPES, platform="tpu"), KERNELS, strict=True):
        if kernel.platform not in ("any", "tpu") and kernel.role == "dense":
            assert choice.reason == f"it runs on {kernel.platform}, but this call runs on tpu"
    assert any(c.chosen for c in explain(SPEC, SHAPES, platform="tpu"))


def test_the_reference_is_not_taken_by_surprise():
    """Above its size limit the reference kernel runs only if named; the refusal says how to name it."""
    large = SHAPES._replace(num_queries=32768, num_keys=32768)
    assert large.num_scores > reference.AUTOMATIC_SCORES
    reason = next(c.reason for c in explain(SPEC, large) if c.kernel == "reference_dense")
    assert "backend='reference'" in reason
    assert choose(SPEC, large, backend="reference").name == "reference_dense"


def test_a_family_name_covers_the_three_roles():
    q, k, v = tensors()
    assert choose(SPEC, call_shapes(q, k), backend="reference").role == "dense"
    assert choose(SPEC, call_shapes(q, k, lists()), backend="reference").role == "sparse"
    assert choose(AttentionSpec(mass=True), call_shapes(q, k), backend="xla_prefill").role == "score"
    assert choose(SPEC, call_shapes(q[:, :1], k), backend="xla_prefill_dense").phase == "prefill"


def test_backends_agree_under_jit():
    key = jax.random.key(0)
    q = jax.random.normal(key, (1, 24, 4, 16))
    k, v = jax.random.normal(key, (2, 1, 24, 2, 16))
    mine = jax.jit(lambda *x: attention(*x, SPEC).out)(q, k, v)
    named = jax.jit(lambda *x: attention(*x, SPEC, backend="reference").out)(q, k, v)
    assert jnp.abs(mine - named).max() < 1e-5


@pytest.mark.parametrize("num_queries", [1, 6])
def test_lengths_are_clipped_to_the_arrays(num_queries):
    """Lengths past the arrays act as the arrays' sizes, and negative lengths as 0, in out, lse and mass."""
    q, k = jnp.ones((2, num_queries, 4, 8)), jnp.ones((2, 21, 2, 8))
    spec = AttentionSpec(causal=False, tile=16, query_tile=8, mass=True)
    call = jax.jit(lambda kv_len, q_len: attention(q, k, k, spec, kv_len=kv_len, q_len=q_len))

    def answer(kv_len, q_len):
        return jax.tree.leaves(call(*(jnp.asarray(x, jnp.int32) for x in (kv_len, q_len))))

    for past, lengths in (((30, -3), (21, 0)), ((20, 99), (20, 21))):
        wanted = answer(lengths, (num_queries,) * 2)
        assert all(map(jnp.array_equal, answer(past, (num_queries + 5, num_queries)), wanted))


def test_public_names_stay_callable_after_their_modules_are_imported():
    """`tessera.attention` is both a package and a function; importing its modules must not hide the function."""
    program = (
        "import tessera.attention.contract, tessera.calibration.calibrate, tessera, jax.numpy as jnp\n"
        "x = jnp.ones((1, 4, 2, 16))\n"
        "assert tessera.attention(x, x, x).out.shape == x.shape\n"
        "assert callable(tessera.calibrate) and callable(tessera.select_tiles) and callable(tessera.explain)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_kernel_names_are_unique_and_tables_are_immutable():
    assert isinstance(KERNELS, tuple)
    assert len({k.name for k in KERNELS}) == len(KERNELS)
    assert all(k.name.endswith(f"_{k.role}") for k in KERNELS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_costs_and_search_spaces_are_usable(kernel):
    capacity = 4 if kernel.role == "sparse" else None
    num_queries = 1 if kernel.phase == "decode" else 128
    shapes = SHAPES._replace(num_queries=num_queries, capacity=capacity)
    if kernel.platform == "gpu":  # shapes that the GPU's matrix units accept
        shapes = shapes._replace(head_dim=128, dtype=kernel.dtypes[0])
    tiles = (16, 1) if kernel.role == "sparse" else (16,)
    specs = [AttentionSpec(tile=tile, mass=kernel.role == "score") for tile in tiles]
    spec = next(spec for spec in specs if kernel.refusal(spec, shapes) is None)
    price = kernel.cost(spec, shapes)
    assert price["flops"] > 0
    assert price["bytes"] > 0
    assert isinstance(kernel.default_config(spec, shapes), kernel.Config)
    assert all(isinstance(c, kernel.Config) for c in kernel.search_space(spec, shapes))


@pytest.mark.parametrize(
    ("keys", "scales", "reason"),
    [
        (jnp.float32, (jnp.bfloat16, (1, 2, 2, 8)), "scales need int8 keys and values, got float32 and float32"),
        (jnp.int8, None, "dtypes of q, k and v must be equal, got float32, int8, int8"),
        (jnp.int8, (jnp.float32, (1, 2, 2, 8)), r"bfloat16 \[B,K,2,S\] = \(1, 2, 2, 8\), got float32 \(1, 2, 2, 8\)"),
        (jnp.int8, (jnp.bfloat16, (1, 2, 8, 2)), r"bfloat16 \[B,K,2,S\] = \(1, 2, 2, 8\), got bfloat16 \(1, 2, 8, 2\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_a_reason(keys, scales, reason):
    q, keys = jnp.zeros((1, 4, 2, 16)), jnp.zeros((1, 2, 8, 16), keys)
    with pytest.raises(ValueError, match=reason):
        attend(q, KeyValues(keys, keys, scales=None if scales is None else jnp.zeros(scales[1], scales[0])))
