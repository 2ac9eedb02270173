"""Meters against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny

from tessera.cli import stats
from tessera.generate import Model
from tessera.measure.timing import Ceilings
from tessera.models.weights import init_params
from tessera.runtime import meters
from tessera.runtime.answers import Generation
from tessera.runtime.sampling import GREEDY
from tessera.sparse.baselines import Dense, Window

CONFIG = tiny.config(vocab_size=100, hidden_size=8, intermediate_size=16, head_dim=2, max_positions=64)
MATRICES = 3 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16)
"""Elements of q, k and v, o, and the MLP's three, in three layers: 3 * 576 = 1,728."""
LOGITS = 100 * 8
PEAKS = meters.Peaks(flops_per_s=1e6, bytes_per_s=1e7, source="a test")
ANSWER = Generation(
    text="", tokens=[1, 2, 3], logprobs=[0.0] * 3, finish_reason="length", prompt_tokens=4, ttft_s=0.5,
    decode_tokens_per_s=4.0, density=1.0, layer_density=(), prefill_keys=60.0, decode_keys=66.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    stacked = init_params(CONFIG, jax.random.key(0), jnp.float32)
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked.layers) for i in range(3))
    return dataclasses.replace(stacked, layers=layers)


def test_use_equals_numbers_worked_out_by_hand(params):
    """4 H G = 16 flops per key; a key and value are 2 * 2 * 4 = 16 bytes; 3 layers have 6 norms of 8 weights."""
    found = meters.use(ANSWER, CONFIG, params, None, PEAKS)
    assert found.prefill_mfu == pytest.approx((2 * MATRICES * 4 + 2 * LOGITS + 16 * 60) / (0.5 * 1e6))
    assert found.decode_mfu == pytest.approx(((2 * MATRICES + 2 * LOGITS) * 2 + 16 * 66) / (0.5 * 1e6))
    weights = 4 * (MATRICES + LOGITS + 7 * 8)  # the embedding, 800 more, is not read whole
    assert meters.weight_bytes(params) == weights
    assert found.decode_bandwidth == pytest.approx((2 * weights + 16 * 66) / (0.5 * 1e7))
    eight_bits = meters.use(ANSWER, CONFIG, params, "int8", PEAKS)  # 2 * (2 + 2) = 8 bytes: values and scales
    assert eight_bits.decode_bandwidth == pytest.approx((2 * weights + 8 * 66) / (0.5 * 1e7))
    assert str(found) == "MFU 3.3% in prefill, 2.2% in decode; bandwidth use 0.4% in decode"


def test_unknown_peaks_and_answers_of_one_token_invent_nothing(params):
    assert meters.nominal_peaks(params) is None  # a CPU
    assert meters.use(ANSWER, CONFIG, params, None, None) == meters.Use()
    assert str(meters.Use()) == "MFU unknown in prefill, unknown in decode; bandwidth use unknown in decode"
    short = dataclasses.replace(ANSWER, tokens=[1], decode_tokens_per_s=float("nan"))
    found = meters.use(short, CONFIG, params, None, PEAKS)
    assert found.prefill_mfu is not None
    assert found.decode_mfu is found.decode_bandwidth is None


@pytest.mark.parametrize("sparse", [False, True])
def test_keys_are_those_read_before_and_after_the_first_token(params, sparse):
    """Row p of 6 reads p + 1 keys in 3 layers and 2 KV heads; then two tokens are fed back, at 6 and 7."""
    policy = Window(window=2, sinks=1, tile=16, query_tile=16) if sparse else Dense()
    [answer] = Model(config=CONFIG, params=params, tokenizer=None, policy=policy).generate(
        [[1, 2, 3, 4, 5, 6]], max_new_tokens=3, **GREEDY
    )
    assert len(answer.tokens) == 3
    assert (answer.prefill_keys, answer.decode_keys) == (6 * 21, 6 * (7 + 8))


def test_stats_name_the_peaks_that_they_divide_by(params, monkeypatch):
    """Measuring takes seconds, so the rates are given here."""
    monkeypatch.setattr(stats, "ceilings", lambda rounds: Ceilings(flops_per_s={"float32": 1e6}, bytes_per_s=1e7))
    model = Model(config=CONFIG, params=params, tokenizer=None, policy=Dense())
    line, rates = stats.stats_lines(model, [ANSWER])
    assert line == f"{ANSWER.usage()}; {meters.use(ANSWER, CONFIG, params, None, PEAKS)}"
    assert "measured now in float32: 0 GFLOP/s" in rates
    monkeypatch.setattr(stats, "local_cpu", lambda: None)
    assert stats.stats_lines(model, [ANSWER])[1] == "peak rates of this device: unknown"
