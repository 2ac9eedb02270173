"""Bytes by part against independent facts: abstract arrays, published counts, sums by hand, the compiler's records."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import tiny

from tessera.models.cache import init_cache
from tessera.models.catalogue import MODELS
from tessera.models.footprint import (
    Load,
    Types,
    activation_bytes,
    cache_bytes,
    divide,
    footprint,
    weight_bytes,
)
from tessera.models.weights import init_params, num_parameters

TINY = tiny.config(hidden_size=64, intermediate_size=96, max_positions=256)
FLOAT32 = Types(weights="float32", cache="float32", dtype="float32")
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters of each model's published checkpoint."""
FLAGS = ("tie_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm")


def abstract_bytes(make):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))


def test_names_have_the_published_counts():
    assert {name: num_parameters(config) for name, config in MODELS.items()} == PUBLISHED


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_that_init_makes(flags, dtype):
    config = replace(TINY, **dict.fromkeys(flags, True))
    types = Types(weights=dtype, cache=dtype, dtype=dtype)
    made = abstract_bytes(lambda: init_params(config, jax.random.key(0), jnp.dtype(dtype)))
    assert sum(weight_bytes(config, types=types).values()) == made


@pytest.mark.parametrize("stacked", [False, True])
def test_the_cache_is_the_one_that_init_makes(stacked):
    made = abstract_bytes(lambda: init_cache(TINY, 3, 256, dtype=jnp.float32, stacked=stacked))
    assert cache_bytes(TINY, 3, 256, types=FLOAT32) == made


def test_eight_billion_by_hand():
    """Llama 3.1 8B, 4 sequences of 131,072 tokens on eight devices: sums from the model's sizes, in bytes."""
    config, division = MODELS["llama-3.1-8b"], divide(MODELS["llama-3.1-8b"], 8)
    found = footprint(config, Load(batch=4, num_keys=131072), division=division)
    assert found.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) * 2 // 8
    assert found.mlp == 32 * 3 * 4096 * 14336 * 2 // 8
    assert found.vocabulary == 2 * 128256 * 4096 * 2 // 8
    assert found.vectors == 65 * 4096 * 2
    assert found.cache == 2 * 32 * 4 * 131072 * 128 * 2
    assert found.copies == 0
    # The compiler's arguments of this step: the same, and the tokens and positions.
    assert 10597967872 - 4096 < found.weights + found.cache <= 10597967872


def test_narrow_types():
    """int8: a byte per element, four per channel or two per token and head. The head is int8, too; a sample of each
    matrix takes 128 bytes. Norms and the embedding of an untied model keep their type."""
    config = MODELS["llama-3.1-8b"]
    wide, narrow, half = (weight_bytes(config, types=Types(weights=name)) for name in ("bfloat16", "int8", "int4"))
    channels = 32 * (2 * 4096 + 2 * 1024), 32 * (2 * 14336 + 4096)
    assert narrow["attention"] == wide["attention"] // 2 + 4 * channels[0] + 32 * 4 * 128
    assert half["mlp"] == wide["mlp"] // 4 + 4 * channels[1] + 32 * 3 * 128
    assert narrow["vocabulary"] == half["vocabulary"] == 128256 * 4096 * 3 + 128256 * 4 + 128
    assert wide["vectors"] == narrow["vectors"] == half["vectors"]
    grouped = weight_bytes(config, types=Types(weights="int4-g32"))
    assert grouped["mlp"] == wide["mlp"] // 4 + wide["mlp"] // 2 * 2 // 32 + 32 * 3 * 128
    full, quarter = cache_bytes(config, 1, 1024), cache_bytes(config, 1, 1024, types=Types(cache="int8"))
    assert quarter == full // 2 + 2 * 32 * 8 * 1024 * 2
    with pytest.raises(ValueError, match="weights='int2' must be one of float32, bfloat16, int8"):
        Types(weights="int2")


@pytest.mark.parametrize(
    ("devices", "expected"), [(1, (1, 1)), (2, (2, 1)), (8, (2, 4)), (3, (1, 3)), (6, (2, 3)), (16, (2, 8))]
)
def test_heads_first_then_context(devices, expected):
    found = divide(TINY, devices)
    assert (found.heads, found.context) == expected
    assert found.devices == devices
    assert cache_bytes(TINY, 2, 768, division=found) * devices == cache_bytes(TINY, 2, 768)


def test_an_axis_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="cannot split vocab_size=263 into 2 equal parts"):
        divide(replace(TINY, vocab_size=263), 2)
    with pytest.raises(ValueError, match="context of a model with a sliding window"):  # as `load` says
        divide(replace(TINY, window=64), 8)
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        divide(TINY, 0)


def test_more_devices_need_less_each():
    config = MODELS["llama-3.1-70b"]
    totals = [
        footprint(config, Load(batch=8, num_keys=8192, rows=1024), division=divide(config, n)).total
        for n in (1, 2, 4, 8, 16, 32)
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(("batch", "layers"), [(1, 2), (2, 3)])
def test_a_chunk_on_the_host_against_its_compiler(batch, layers):
    """XLA's CPU programs: one sequence holds 3 D + 3 F floats a row; more sequences copy half of the cache."""
    from tessera.runtime.step import prefill_chunk
    from tessera.sparse.baselines import Dense

    config, rows, num_keys = replace(TINY, num_layers=layers, intermediate_size=256), 64, 4096
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params.layers)
    params = replace(params, layers=(layer,) * layers)
    cache = jax.eval_shape(lambda: init_cache(config, batch, num_keys, dtype=jnp.float32, stacked=False))
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, rows), (batch,)))
    program = prefill_chunk.lower(params, cache, tokens, counts, counts, config=config, policy=Dense())
    held = program.compile().memory_analysis().temp_size_in_bytes
    load = Load(batch=batch, num_keys=num_keys, rows=rows, host=True)
    found = footprint(config, load, types=FLOAT32)
    assert activation_bytes(config, load, types=FLOAT32) == batch * rows * 3 * (64 + 256) * 4
    assert held == pytest.approx(found.copies + found.activations, rel=0.15, abs=200_000)  # blocks of scores
