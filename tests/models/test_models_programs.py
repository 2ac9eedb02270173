"""The decoder's programs: dtypes of every operation, donation of the cache, small matrix products, layouts."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from beartype import beartype
from jaxtyping import jaxtyped
from tiny import random_params

from tessera.attention.contract import Positions
from tessera.models import cache as cache_module
from tessera.models import decoder, layers
from tessera.models.cache import Cache, append, init_cache
from tessera.models.config import Rope
from tessera.models.decoder import forward, logits
from tessera.models.layers import linear, matmul, rms_norm, rope_tables, rotate, rotate_by_halves, rotate_by_product
from tessera.models.thin import thin
from tessera.models.weights import init_params, num_parameters
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy

CONFIG = tiny.config(
    family="qwen3",
    vocab_size=96,
    intermediate_size=64,
    num_layers=2,
    max_positions=128,
    rope=Rope(kind="yarn", factor=4.0, original_max_positions=32),
    attention_bias=True,
    output_bias=True,
    qk_norm=True,
)


def at(start, length) -> Positions:
    start, length = jnp.int32(start), jnp.int32(length)
    return Positions(start[None], (start + length)[None], length[None])


@jax.jit
def run(params, tokens, cache, positions):
    hidden, cache, _ = forward(params, tokens, cache, positions, config=CONFIG, policy=Dense())
    return logits(params, hidden), cache


def unstack(params):
    rows = [jax.tree.map(lambda leaf, i=i: leaf[i], params.layers) for i in range(CONFIG.num_layers)]
    return layers.Params(embed=params.embed, layers=tuple(rows), final_norm=params.final_norm, head=params.head)


def half(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def equations(jaxpr):
    """Yield every equation of a program, inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("num_queries", [1, 32], ids=["decode", "prefill"])
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_bfloat16_programs_accumulate_in_float32(stacked, num_queries):
    params = half(random_params(CONFIG))
    params = params if stacked else unstack(params)
    cache = init_cache(CONFIG, 1, 64, dtype=jnp.bfloat16, stacked=stacked)
    tokens = jnp.zeros((1, num_queries), jnp.int32)
    program = jax.make_jaxpr(run)(params, tokens, cache, at(3, num_queries))
    assert program.out_avals[0].dtype == jnp.float32
    assert not any(out.weak_type for out in program.out_avals)
    seen = set()
    for eqn in equations(program.jaxpr):
        name = eqn.primitive.name
        out = str(eqn.outvars[0].aval.dtype) if eqn.outvars and hasattr(eqn.outvars[0].aval, "dtype") else ""
        if name in ("dot_general", "reduce_sum", "exp", "exp2", "rsqrt", "cos", "sin", "log"):
            assert out not in ("bfloat16", "float16"), eqn
            seen.add(name)
    assert {"dot_general", "rsqrt", "cos", "sin"} <= seen
    assert seen & {"exp", "exp2"}


class Through(Policy):
    """Replace attention by passing the values through, so that the decoder's own operations are traced alone."""

    def init_state(self, num_layers, shapes, spec):
        return None

    def attend(self, layer, q, kv, spec, positions, state):
        heads = jnp.repeat(kv.v[:, :, : q.shape[1]], q.shape[2] // kv.v.shape[1], axis=1)
        return jnp.swapaxes(heads, 1, 2), state


@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_no_float64_even_where_jax_allows_it(stacked):
    with jax.enable_x64(True):  # otherwise JAX would turn a stray float64 into float32 and hide it
        params = half(random_params(CONFIG))
        params = params if stacked else unstack(params)
        cache = init_cache(CONFIG, 1, 64, dtype=jnp.bfloat16, stacked=stacked)

        def program(params, tokens, cache):
            hidden, cache, _ = forward(params, tokens, cache, at(3, 8), config=CONFIG, policy=Through())
            return logits(params, hidden), cache

        traced = jax.make_jaxpr(program)(params, jnp.zeros((1, 8), jnp.int32), cache)
    dtypes = {str(v.aval.dtype) for eqn in equations(traced.jaxpr) for v in eqn.outvars}
    assert "float64" not in dtypes
    assert {"float32", "bfloat16"} <= dtypes


def test_the_audit_would_see_bfloat16_accumulation():
    x = jnp.ones((4, 4), jnp.bfloat16)
    found = [
        e.outvars[0].aval.dtype
        for e in equations(jax.make_jaxpr(jax.jit(jnp.dot))(x, x).jaxpr)
        if e.primitive.name == "dot_general"
    ]
    assert found == [jnp.bfloat16]


@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_the_cache_is_updated_in_place(stacked):
    """In the compiled program each cache buffer aliases an output; temporary memory is smaller than the cache."""
    params = random_params(CONFIG)
    params = params if stacked else unstack(params)
    cache = init_cache(CONFIG, 1, 4096, dtype=jnp.float32, stacked=stacked)
    step = jax.jit(run.__wrapped__, donate_argnames="cache")
    compiled = step.lower(params, jnp.zeros((1, 1), jnp.int32), cache, at(7, 1)).compile()
    header = compiled.as_text().splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == len(jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


def test_stacked_layers_write_only_new_rows_into_the_cache():
    params = random_params(CONFIG)
    cache = init_cache(CONFIG, 2, 64, dtype=jnp.float32, stacked=True)
    lengths = jnp.full(2, 8, jnp.int32)

    def program(params, tokens, cache):
        positions = Positions(3 + 0 * lengths, 3 + lengths, lengths)
        return forward(params, tokens, cache, positions, config=CONFIG, policy=Through())[1]

    traced = equations(jax.make_jaxpr(program)(params, jnp.zeros((2, 8), jnp.int32), cache).jaxpr)
    written = {"dynamic_update_slice": 1, "scatter": 2}
    sizes = [e.invars[written[e.primitive.name]].aval.size for e in traced if e.primitive.name in written]
    assert sizes == [CONFIG.num_kv_heads * 8 * CONFIG.head_dim] * 4  # keys and values of two sequences


def test_stacked_and_tuple_caches_agree():
    """A chunk and then a token, for two sequences at different positions, give the same hidden states and cache."""
    params = random_params(CONFIG, 6)
    tokens = np.random.default_rng(7).integers(0, CONFIG.vocab_size, (2, 17)).astype(np.int32)
    first = Positions(*(np.array(x, np.int32) for x in ([0, 5], [16, 14], [16, 9])))
    then = Positions(*(np.array(x, np.int32) for x in ([16, 14], [17, 15], [1, 1])))
    found = []
    for stacked in (True, False):
        weights = params if stacked else unstack(params)
        cache = init_cache(CONFIG, 2, 64, dtype=jnp.float32, stacked=stacked)
        chunk, cache = run(weights, tokens[:, :16], cache, first)
        token, cache = run(weights, tokens[:, 16:], cache, then)
        found.append((chunk[0], chunk[1, :9], token, np.stack(list(cache.k)), np.stack(list(cache.v))))
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert np.count_nonzero(np.any(found[0][3], axis=(0, 2, 4))[0]) == 17


# Row and output counts at the ends of each path of `matmul`: `thin` has no blocks for 8,191 outputs, a prime.
PRODUCTS = {
    jnp.float32: {(1, 12), (2, 12), (5, 12), (1, 8192), (2, 8192), (4, 8192), (5, 8192), (3, 8191)},
    jnp.bfloat16: {(1, 12), (4, 12), (5, 12), (3, 8192)},
}


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "dtype"),
    [
        pytest.param(*size, dtype, marks=() if size in few else pytest.mark.exhaustive)
        for dtype, few in PRODUCTS.items()
        for size in product(range(1, 6), (12, 8192, 8191))
    ],
)
def test_products_with_a_few_rows(num_rows, num_outputs, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((num_rows, 1, 320)), dtype)
    w = jnp.asarray(random.standard_normal((num_outputs, 320)), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    out = jax.jit(matmul)(x, w)
    assert out.shape == (num_rows, 1, num_outputs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=1e-4)
    assert linear(x, w).dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_thin_products_pack_the_rows_and_not_the_matrix(dtype):
    """Of XLA's product on CPU, the right operand is packed: it must be x, here 8 rows, and exact for integers."""
    random = np.random.default_rng(1)
    x, w = (jnp.asarray(random.integers(-127, 128, (n, 320)), dtype) for n in (2, 64))
    accumulated = jnp.int32 if dtype == jnp.int8 else jnp.float32
    compiled = jax.jit(thin, static_argnums=2).lower(x, w, accumulated).compile()
    np.testing.assert_array_equal(compiled(x, w), np.asarray(x, np.int64) @ np.asarray(w, np.int64).T)
    name = jnp.dtype(dtype).name.replace("bfloat", "bf").replace("int", "s")
    [product] = [line for line in compiled.as_text().splitlines() if " dot(" in line]
    shapes = dict(re.findall(r"(%[\w.]+) = (\w+\[[\d,]*\])", compiled.as_text()))
    operands = re.findall(r"%[\w.]+", product.partition(" dot(")[2])[:2]
    assert [shapes[operand] for operand in operands] == [f"{name}[4,16,320]", f"{name}[4,8,320]"], product


def test_stacked_and_tuple_agree_without_a_cache():
    params = random_params(CONFIG)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, 24)).astype(np.int32)
    full = np.full(2, 24, np.int32)
    positions = Positions(0 * full, full, full)

    @jax.jit
    def hidden(params):
        return forward(params, tokens, None, positions, config=CONFIG, policy=Dense())[0]

    np.testing.assert_allclose(hidden(unstack(params)), hidden(params), rtol=1e-5, atol=1e-5)


def test_unrolled_layers_that_are_alike_share_one_trace():
    traced = []

    class Noting(Dense):
        def attend(self, layer, *arguments):
            traced.append(layer)
            return super().attend(layer, *arguments)

    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def hidden(params, tokens, start):
        return forward(params, tokens, None, Positions(start, start + 8, start + 8), config=CONFIG, policy=Noting())[0]

    jax.jit(hidden).trace(unstack(random_params(CONFIG)), tokens, one)
    assert len(traced) == 1 < CONFIG.num_layers


def test_sequences_of_different_lengths_do_not_see_each_other():
    """The second sequence runs alone next to a copy of itself, which needs no second program."""
    params = random_params(CONFIG)
    tokens = np.random.default_rng(4).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    found = []
    for rows, lengths in ((tokens, [16, 5]), (tokens[[1, 1]], [5, 5])):
        lengths = np.array(lengths, np.int32)
        cache = init_cache(CONFIG, 2, 64, dtype=jnp.float32, stacked=True)
        found.append(run(params, rows, cache, Positions(0 * lengths, lengths, lengths))[0][1, :5])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


def test_append_writes_each_sequence_at_its_own_place():
    cache = jnp.zeros((2, 1, 8, 4))
    new = jnp.arange(1, 17, dtype=jnp.float32).reshape(2, 2, 1, 4)
    out = np.asarray(append(cache, new, jnp.array([1, 5], jnp.int32)))
    np.testing.assert_array_equal(out[0, 0, 1:3], new[0, :, 0])
    np.testing.assert_array_equal(out[1, 0, 5:7], new[1, :, 0])
    assert np.count_nonzero(out) == 16


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotation_is_an_isometry_that_sees_only_distances(kind):
    rope = Rope(kind=kind, theta=1000.0, factor=4.0, original_max_positions=64, attention_factor=1.0)
    q, k = np.random.default_rng(5).normal(size=(2, 1, 1, 1, 32)).astype(np.float32)

    @jax.jit
    def dot_at(*places):
        a, b = (rotate(x, rope_tables(rope, 32, jnp.full((1, 1), p, jnp.int32))) for x, p in zip((q, k), places))
        return jnp.sum(a * b)

    assert dot_at(100, 90) == pytest.approx(dot_at(40, 30), abs=1e-3)
    assert dot_at(100, 90) != pytest.approx(dot_at(100, 80), abs=1e-3)
    assert dot_at(0, 0) == pytest.approx((q * k).sum(), abs=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_rotation_by_a_product_equals_the_halves(batch):
    """Bit for bit, since both forms add the same two rounded products."""
    x = jnp.asarray(np.random.default_rng(6).normal(size=(batch, 3, 2, 32)) * 100, jnp.bfloat16)
    tables = rope_tables(Rope(), 32, jnp.arange(3 * batch, dtype=jnp.int32).reshape(batch, 3) * 999)
    with jax.disable_jit():  # compiled, one product of each sum may skip its rounding
        np.testing.assert_array_equal(rotate_by_product(x, *tables), rotate_by_halves(x, *tables))


@pytest.mark.parametrize(
    ("dtype", "platform", "products"), [("bfloat16", "tpu", 1), ("bfloat16", "cpu", 0), ("float32", "tpu", 0)]
)
def test_only_a_tpu_rotates_by_a_product(dtype, platform, products):
    x, table = jnp.ones((1, 3, 2, 32), dtype), jnp.ones((1, 3, 1, 16))
    lowered = jax.jit(rotate).trace(x, (table, table)).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("stablehlo.dot_general") == products


@pytest.mark.parametrize("function", [linear, matmul, rms_norm, rotate, rope_tables, append, init_cache, logits])
def test_annotations_hold(function):
    """Check the function's jaxtyping annotations at run time on one call."""
    checked = jaxtyped(typechecker=beartype)(function)
    x = jnp.ones((2, 3, 4, 16))
    calls = {
        linear: (jnp.ones((2, 3, 16)), jnp.ones((5, 16))),
        matmul: (jnp.ones((3, 16)), jnp.ones((5, 16))),
        rms_norm: (x, jnp.ones(16), 1e-6),
        rope_tables: (Rope(), 16, jnp.zeros((2, 3), jnp.int32)),
        rotate: (x, rope_tables(Rope(), 16, jnp.zeros((2, 3), jnp.int32))),
        append: (jnp.ones((2, 4, 8, 16)), x, jnp.zeros(2, jnp.int32)),
        logits: (jax.tree.map(jnp.asarray, random_params(CONFIG)), jnp.ones((2, 32))),
    }
    if function is init_cache:
        assert isinstance(checked(CONFIG, 2, 8, dtype=jnp.float32, stacked=False), Cache)
    else:
        checked(*calls[function])


def test_annotations_would_fail_on_a_wrong_shape():
    checked = jaxtyped(typechecker=beartype)(append)
    with pytest.raises(Exception, match="append"):
        checked(jnp.ones((2, 4, 8, 16)), jnp.ones((2, 3, 5, 16)), jnp.zeros(2, jnp.int32))


def test_config_counts_its_parameters():
    for config in (CONFIG, replace(CONFIG, tie_embeddings=True, mlp_bias=True)):
        leaves = jax.tree.leaves(jax.eval_shape(partial(init_params, config), jax.random.key(0)))
        assert num_parameters(config) == sum(leaf.size for leaf in leaves)


def test_module_doc_names_no_policy():
    assert "kascade" not in (decoder.__doc__ + cache_module.__doc__).lower()
