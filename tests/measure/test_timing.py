"""Timing and intervals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.core import hardware
from tessera.measure import timing


def test_interleave_takes_turns_in_alternating_order():
    calls = []

    def contender(name, seconds):
        return lambda number: calls.append((name, number)) or seconds

    taken = timing.interleave({"a": contender("a", 1.0), "b": contender("b", 2.0)}, rounds=3, warmup=1)
    assert taken == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    with pytest.raises(ValueError, match="rounds"):
        timing.interleave({}, rounds=0)


def test_time_call_waits_for_the_result():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.ones((300, 300)) * 0.01
    timing.time_call(slow, x)
    seconds, out = timing.time_call(slow, x)
    assert out.is_ready()
    assert seconds > 40 * 2 * 300**3 / 1e14  # faster is impossible: the call was not waited for


def test_ratio_interval_holds_the_ratio_and_widens_with_noise():
    rng = np.random.default_rng(1)
    ours = 1.0 + 0.01 * rng.random(9)
    steady, noisy = 2 * ours, 2 * ours * (1 + 0.5 * rng.random(9))
    low, high = timing.ratio_interval(steady, ours)
    assert low == pytest.approx(2.0, rel=0.02)
    assert high == pytest.approx(2.0, rel=0.02)
    wide = timing.ratio_interval(noisy, ours)
    assert wide[0] <= timing.ratio(noisy, ours) <= wide[1]
    assert wide[1] - wide[0] > high - low
    with pytest.raises(ValueError, match="paired"):
        timing.ratio_interval([1.0], [1.0, 2.0])


def test_ceilings_are_rates_of_this_device():
    found = timing.ceilings(size=256, read_bytes=1 << 22, rounds=2)
    assert set(found.flops_per_s) == {"float32", "bfloat16"}
    assert found.flops_per_s["float32"] > 1e8
    assert found.bytes_per_s > 1e7
    assert found.floor_s("float32", found.flops_per_s["float32"], 0) == pytest.approx(1.0)


def test_ceilings_have_a_clock_of_their_own(monkeypatch):
    """A timer that skips the work must not raise the ceilings that bound its rates."""
    monkeypatch.setattr(timing, "time_call", lambda function, *args: (1e-9, function(*args)))
    found = timing.ceilings(size=512, read_bytes=1 << 24, rounds=2)
    assert max(found.flops_per_s.values()) < 1e14
    assert found.bytes_per_s < 1e13


def test_no_ceiling_is_above_the_data_sheet():
    chip = hardware.chip("v4")
    assert chip.devices == 1
    high = timing.Ceilings(flops_per_s={"float32": 1e12, "bfloat16": 1e18}, bytes_per_s=1e18)
    found = timing.capped(high, chip)
    assert found.flops_per_s == {"float32": 1e12, "bfloat16": chip.bf16_flops_per_s}
    assert found.bytes_per_s == chip.bytes_per_s
    assert timing.capped(high, None) == high
