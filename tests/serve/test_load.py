"""The load client: what it sends, and what it measures."""

import json
from dataclasses import replace

import numpy as np
import pytest
from live_server import KEY

from tessera.serve import load_client


def test_a_load_is_measured(running, tmp_path, capsys):
    from tessera.cli.main import main

    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    sent = ["--requests", "6", "--rate", "50", "--prompt-tokens", "40", "--new-tokens", "8", "--shared-tokens", "20"]
    assert main(["load", running.url, *sent, "--api-key-file", str(file), "--json", "--ttft-s", "1e9"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["errors"]) == (6, {})
    assert found["prompt_tokens_per_s"] * found["seconds"] == pytest.approx(240)
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p99"] <= found["seconds"]
    assert found["goodput_per_s"] * found["seconds"] == pytest.approx(6)
    assert main(["load", running.url, *sent]) == 2
    assert "refuses the API key" in capsys.readouterr().err


def test_arrivals_are_a_poisson_process_and_prompts_share_their_beginning():
    sent = load_client.Load(rate=4.0, requests=4000, prompt_tokens=30, shared_tokens=10)
    gaps = np.diff(load_client.arrivals(sent))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.08)
    drawn = load_client.prompts(replace(sent, requests=20), list(range(500)))
    assert {len(prompt) for prompt in drawn} == {30}
    assert len({tuple(prompt[:10]) for prompt in drawn}) == 1
    assert len({tuple(prompt[10:]) for prompt in drawn}) == 20


def test_failures_are_counted_and_limits_judge_every_gap():
    good, slow, failed = load_client.Outcome(), load_client.Outcome(), load_client.Outcome(error="status 429")
    for outcome, pieces in ((good, [0.1, 0.2, 0.3]), (slow, [0.1, 0.2, 0.9])):
        outcome.pieces_s, outcome.usage = pieces, {"prompt_tokens": 5, "completion_tokens": 3}
    sent = load_client.Load(rate=1.0, requests=3)
    found = load_client.summary(sent, [good, slow, failed], 2.0, ttft_s=0.15, itl_s=0.5)
    assert (found["completed"], found["errors"]) == (2, {"status 429": 1})
    assert found["goodput_per_s"] == 0.5
    assert found["tokens_per_s"] == 3.0
    assert found["itl_s"]["p50"] == pytest.approx(0.1)
