"""The decoder against transformers on golden checkpoints of every family: in one pass, in chunks and step by step."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention.contract import Positions
from tessera.models.cache import init_cache
from tessera.models.config import ModelConfig, Rope
from tessera.models.decoder import forward, logits
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
from tessera.models.layers import Params
from tessera.sparse.baselines import Dense

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
GREEDY = 64
CHUNK = 16


def positions_of(start: int, length: int, batch: int = 1) -> Positions:
    """Return positions of rows [start, start + length) in a sequence that ends with them."""
    full = partial(jnp.full, (batch,), dtype=jnp.int32)
    return Positions(full(start), full(start + length), full(length))


# Compiling takes nearly all of these tests' time; these options shorten it.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@partial(jax.jit, static_argnames="config", compiler_options=FAST_COMPILE)
def whole_logits(params, tokens, *, config):
    hidden, _, _ = forward(params, tokens, None, positions_of(0, tokens.shape[1]), config=config, policy=Dense())
    return logits(params, hidden)


@partial(jax.jit, static_argnames="config", donate_argnames="cache", compiler_options=FAST_COMPILE)
def cached_logits(params, tokens, cache, start, *, config):
    place = Positions(start[None], start[None] + tokens.shape[1], jnp.full(1, tokens.shape[1], jnp.int32))
    hidden, cache, _ = forward(params, tokens, cache, place, config=config, policy=Dense())
    return logits(params, hidden), cache


def relative_error(ours, theirs) -> float:
    return float(np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs)))


def load_case(name: str, *, stacked: bool) -> tuple[ModelConfig, Params, np.ndarray, np.ndarray]:
    config = open_source(GOLDEN / name).config
    params = load_params(open_source(GOLDEN / name), dtype="float32", stacked=stacked)
    with np.load(GOLDEN / name / "expected.npz") as expected:
        return config, params, expected["tokens"], expected["logits"]


def test_every_kind_of_rotation_has_a_golden_case():
    kinds = {open_source(GOLDEN / name).config.rope.kind for name in CASES}
    assert kinds == {"default", "linear", "llama3", "yarn"}


@pytest.mark.parametrize("name", CASES)
def test_logits_match_transformers(name):
    config, params, tokens, theirs = load_case(name, stacked=True)
    ours = whole_logits(params, tokens[None], config=config)
    assert ours.dtype == jnp.float32
    assert relative_error(ours[0], theirs) <= 1e-4


# Cases that depend on the cache: windows, positions across chunks, both layouts. The others repeat earlier tests.
CHUNKED = {
    ("llama2", False),
    ("mistral_window", True),
    ("qwen3_window", False),
    ("qwen2_biases", True),
    ("rope_yarn", False),
}


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'stacked' if case[1] else 'tuple'}",
            marks=() if case in CHUNKED else pytest.mark.exhaustive,
        )
        for case in product(CASES, (False, True))
    ],
)
def test_chunked_prefill_then_greedy_decode_matches_transformers(name, stacked):
    config, params, tokens, theirs = load_case(name, stacked=stacked)
    prompt = len(tokens) - GREEDY
    cache = init_cache(config, 1, len(tokens) + CHUNK, dtype=jnp.float32, stacked=stacked)
    rows = []
    for start in range(0, prompt, CHUNK):  # the last chunk is padded; later keys overwrite the padding
        chunk = np.zeros(CHUNK, np.int32)
        chunk[: min(CHUNK, prompt - start)] = tokens[start : min(start + CHUNK, prompt)]
        out, cache = cached_logits(params, chunk[None], cache, np.int32(start), config=config)
        rows.extend(np.asarray(out[0]))
    rows, greedy = rows[:prompt], []
    for step in range(GREEDY):
        greedy.append(int(np.argmax(rows[-1])))
        out, cache = cached_logits(params, np.int32([[greedy[-1]]]), cache, np.int32(prompt + step), config=config)
        rows.append(np.asarray(out[0, 0]))
    assert greedy == tokens[prompt:].tolist()
    assert relative_error(rows, theirs) <= 1e-4


@pytest.mark.exhaustive  # tests the committed cases, which no change of Tessera can affect
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral_window", {"window": None}),
        ("mistral_window", {"window": 13}),
        ("qwen3_window", {"window": 8}),
        ("rope_linear", {"rope": Rope(theta=1000.0)}),
        ("llama31", {"rope": Rope(theta=500.0)}),
        ("llama3", {"rope": Rope(theta=510.0)}),
        ("rope_yarn", {"rope": Rope(theta=1000.0)}),
        ("rope_yarn", {"rope": Rope(kind="yarn", theta=1000.0, factor=8.0, original_max_positions=64)}),
        ("qwen2_biases", {"norm_eps": 1e-3}),
    ],
)
def test_golden_cases_notice_a_wrong_config(name, change):
    """A wrong value of any feature moves the logits by more than ten times the tolerance."""
    config, params, tokens, theirs = load_case(name, stacked=True)
    ours = whole_logits(params, tokens[None], config=replace(config, **change))
    assert relative_error(ours[0], theirs) > 1e-3
