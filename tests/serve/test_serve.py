"""The server under the official client: the same answers as `generate`, clear refusals, nothing left behind."""

import functools
import json
import logging
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import openai
import pytest
from live_server import CONTEXT, KEY, Running, start, tiny_model
from tiny import CONFIG

from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Failure, Request
from tessera.serve import load as load_client
from tessera.serve import service, warm
from tessera.serve.api.schema import Refusal
from tessera.serve.edge import front, server
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service

EOS = CONFIG.eos_ids[0]
QUESTION = [{"role": "user", "content": "What is the number of the door?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def running(model):
    found = start(model, keys=(KEY, "another"))
    yield found
    found.close()


def schema_of(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def alone(model, prompt, count):
    """Return the answer of an engine like the server's that has cached nothing."""
    paging = warm.paging_for(model, slots=2, context=CONTEXT)
    engine = model.engine(slots=2, num_keys=CONTEXT, paging=paging)
    engine.submit(Request(prompt=prompt, max_new_tokens=count))
    return next(engine.drain()).generation


def spelling(model, token):
    own = model.tokenizer.token_bytes(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def ask(running, prompt, **options):
    return running.client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0} | options)


# --- answers


@pytest.mark.parametrize(("length", "policy"), [(20, "dense"), (150, "kascade")])
def test_a_completion_is_what_the_request_gets_alone(running, model, length, policy):
    prompt = list(range(32, 32 + length % 90)) + [65] * (length - length % 90)
    expected = alone(model, prompt, 12)
    found = ask(running, prompt, max_tokens=12)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage.prompt_tokens == length
    assert found.usage.completion_tokens == len(expected.tokens)
    assert found.usage.tessera == {"density": round(expected.density, 4), "policy": policy}
    assert (expected.density < 1) == (policy == "kascade")


def test_a_stream_gives_the_whole_answer_in_pieces(running, model):
    client, options = running.client, {"model": "tiny", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    tokens = model.tokenizer.encode_chat(QUESTION)
    [expected] = model.generate([tokens], max_new_tokens=12)
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage.total_tokens == len(tokens) + len(expected.tokens)
    events = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == expected.text
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == expected.finish_reason
    assert len(events) > 4
    assert events[-1].usage.completion_tokens == len(expected.tokens)
    assert len({event.id for event in events}) == 1


def test_choices_differ_by_seed_and_repeat(running):
    options = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 10}
    first, second = (ask(running, "x", **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_a_crowd_gets_the_answers_that_each_gets_alone(running, model, monkeypatch):
    prompts = [[65 + i] * (10 + 20 * i) for i in range(8)]
    expected = [answer.text for answer in model.generate(prompts, max_new_tokens=9)]
    seen, gauge = [], running.service.metrics.gauge
    monkeypatch.setattr(running.service.metrics, "gauge", lambda **counts: seen.append(counts) or gauge(**counts))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: ask(running, prompt, max_tokens=9).choices[0].text, prompts))
    assert found == expected
    assert 2 <= max(counts["running"] for counts in seen) <= 4  # two rows for each policy
    assert 2 < max(counts["waiting"] for counts in seen) <= 8
    assert running.metric("tessera:recompiles_total") == 0
    assert running.metric("tessera:step_cost_seconds") > 0
    assert running.metric("tessera:step_limit_seconds") > 0
    several = ask(running, prompts[:3], max_tokens=9)
    assert [choice.text for choice in several.choices] == expected[:3]


def test_a_prompt_that_repeats_is_partly_in_the_cache(running):
    prompt = [70] * 90
    ask(running, prompt, max_tokens=2)
    assert ask(running, prompt, max_tokens=2).usage.prompt_tokens_details.cached_tokens == 64


def test_stop_texts_end_the_answer(running, model):
    [whole] = model.generate([[65] * 20], max_new_tokens=20)
    stop = whole.text[4:6]
    found = ask(running, [65] * 20, max_tokens=20, stop=[stop, "zzz"]).choices[0]
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.finish_reason == "stop"


def test_text_becomes_tokens_and_back(running, model):
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{running.url}/tokenize", json={"prompt": "héllo"}, headers=headers).json()
    assert found["count"] == len(found["tokens"]) == 7
    back = httpx.post(f"{running.url}/detokenize", json={"tokens": found["tokens"][1:]}, headers=headers).json()
    assert back == {"prompt": "héllo", "content": "héllo"}
    info = httpx.get(f"{running.url}/tokenizer_info", headers=headers).json()
    assert info == {name: model.tokenizer.specials[name] for name in ("bos_token", "eos_token", "pad_token")}


def test_an_answer_is_json_of_the_schema(running):
    """The model is random: only the grammar can make its text JSON."""
    schema = {
        "type": "object",
        "properties": {"door": {"type": "integer", "maximum": 99}, "open": {"type": "boolean"}},
        "required": ["door", "open"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "door", "schema": schema}}
    options = {"model": "tiny", "messages": QUESTION, "max_tokens": 100, "response_format": form}
    for temperature in (0, 1.5):
        found = running.client.chat.completions.create(**options, temperature=temperature, seed=3).choices[0]
        assert found.finish_reason == "stop"
        value = json.loads(found.message.content)
        assert set(value) == {"door", "open"}
        assert (type(value["door"]), type(value["open"])) == (int, bool)
    free = running.client.chat.completions.create(**{**options, "response_format": {"type": "text"}}, temperature=0)
    with pytest.raises(ValueError):
        json.loads(free.choices[0].message.content)


def test_probabilities_are_reported_as_each_route_does(running, model):
    [expected] = model.generate([[65] * 20], max_new_tokens=5)
    found = ask(running, [65] * 20, max_tokens=5, logprobs=3).choices[0].logprobs
    np.testing.assert_allclose(found.token_logprobs, expected.logprobs, atol=1e-5)
    assert found.tokens == [spelling(model, token) for token in expected.tokens]
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    chat = {"model": "tiny", "messages": QUESTION, "max_tokens": 5, "temperature": 0, "logprobs": True}
    whole = running.client.chat.completions.create(**chat, top_logprobs=2).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in whole] == [2] * len(whole)
    assert [token.top_logprobs[0].token for token in whole] == [token.token for token in whole]
    events = running.client.chat.completions.create(**chat, stream=True)
    streamed = [token for event in events if event.choices[0].logprobs for token in event.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in whole]


PARTS = "é日"


@pytest.mark.parametrize("prompt", [PARTS, list(PARTS.encode())], ids=["text", "ids"])
def test_tokens_that_are_parts_of_a_character_have_spellings_of_their_own(running, prompt):
    said = ask(running, prompt, max_tokens=0, echo=True, logprobs=20).choices[0]
    first, *tokens = said.logprobs.tokens if isinstance(prompt, str) else ["<|bos|>", *said.logprobs.tokens]
    assert (said.text, first) == (PARTS, "<|bos|>")
    assert tokens == [f"bytes:\\x{byte:02x}" for byte in PARTS.encode()]
    assert said.logprobs.text_offset[-5:] == [0, 0, 1, 1, 1]  # a character counts once its last byte has come
    for own, top in list(zip(said.logprobs.tokens, said.logprobs.top_logprobs, strict=True))[1:]:
        assert (own in top, len(top) in (20, 21)) == (True, True)  # it may be none of the best
    chat = {"model": "tiny", "messages": QUESTION, "max_tokens": 1, "logit_bias": {"240": 100}, "logprobs": True}
    [token] = running.client.chat.completions.create(**chat).choices[0].logprobs.content
    assert (token.token, token.bytes) == ("bytes:\\xf0", [0xF0])


def test_offsets_of_an_answer_count_a_prompt_that_ends_inside_a_character(running):
    said = ask(running, list("aé".encode())[:2], max_tokens=1, echo=True, logprobs=0, logit_bias={"77": 100}).choices[0]
    assert (said.text, said.logprobs.text_offset) == ("a\ufffdM", [0, 1, 2])


def test_offsets_count_the_characters_of_the_text_before_a_token(running):
    forced = {"max_tokens": 3, "logprobs": 0, "logit_bias": {"77": 100}}
    said = ask(running, "héllo", echo=True, **forced).choices[0]
    for token, offset in list(zip(said.logprobs.tokens, said.logprobs.text_offset, strict=True))[1:]:
        assert token.startswith("bytes") or said.text[offset] == token
    streamed = [event.choices[0].logprobs for event in ask(running, "héllo", stream=True, **forced)]
    assert [one.text_offset for one in streamed if one] == [[0], [1], [2]]


def test_a_temperature_too_low_for_float32_takes_the_best_token(running):
    answers = {ask(running, "ab", max_tokens=9, temperature=t, top_p=0.9).choices[0].text for t in (0, 1.2e-38, 1e-7)}
    assert len(answers) == 1


def test_null_is_as_good_as_nothing(running):
    first = running.client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    body = {"messages": [*QUESTION, first.choices[0].message.model_dump(), *QUESTION], "max_tokens": 2}
    body |= dict.fromkeys(("n", "stream", "logprobs", "tools", "store", "metadata"))
    found = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert found.status_code == 200, found.text


def test_the_api_is_described_without_a_key_and_without_other_sites(running):
    api = httpx.get(running.url + "/openapi.json").json()
    for reference in re.findall(r'"#/([^"]+)"', json.dumps(api)):
        functools.reduce(operator.getitem, reference.split("/"), api)  # exists
    page = httpx.get(running.url + "/docs").text
    assert set(re.findall(r'(?:src|href)="([^#"]+)', page)) == {"/openapi.json"}
    for name, schema in api["components"]["schemas"].items():
        assert f'<h2 id="{name}">' in page
        assert all(f"<td>{field}<td>" in page for field in schema["properties"])
    assert httpx.head(running.url + "/health").status_code == 200


def test_the_model_is_listed_and_found_by_name(running):
    [listed] = running.client.models.list().data
    assert running.client.models.retrieve("tiny") == listed
    assert listed.created <= time.time()
    with pytest.raises(openai.NotFoundError, match="'org/other' is not served"):
        running.client.models.retrieve("org/other")


def test_a_bias_forbids_and_forces_tokens(running):
    assert ask(running, "x", max_tokens=3, logit_bias={"77": 100}).choices[0].text == "MMM"


# --- refusals


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "", "add_special_tokens": False}, 400, "prompt 0 is an empty token list"),
        ({"prompt": []}, 400, "prompt=[]"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "foo": 1}, 400, "unknown field foo"),
        ({"prompt": "x", "max-tokens": 1}, 400, "unknown field max-tokens"),
        ({"prompt": "x", "Temperature" * 1000: 1}, 400, "unknown field TemperatureTemp"),
        ({"prompt": "x", "best_of": 2}, 400, "best_of is not supported"),
        ({"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty=3"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "needs stream=true"),
        ({"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, "include_usage"),
        ({"prompt": "x", "logit_bias": {"999": 1}, "stream": True}, 400, "token 999"),
        ({"prompt": "x", "ignore_eos": True, "response_format": {"type": "json_object"}}, 400, "ignore_eos=true"),
        ({"prompt": ["x"] * 10, "n": 8}, 400, "or start the server with a larger --queue or --slots"),
        ({"prompt": "x", "n": 10**9}, 400, "n=1000000000"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens=0"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature='hot'"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature=-1"),
        ({"prompt": "x", "seed": 2**64}, 400, "seed=18446744073709551616"),
        ({"prompt": "x", "stop": ["a"] * 1_000_000}, 413, "300,000 commas"),
        ({"prompt": "x", "stream_options": {"x": 1}}, 400, "unknown field stream_options.x"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs=21"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias has token -1"),
        ({"prompt": "x", "logit_bias": {"": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999": 1}}, 400, "token 999"),
        ({"prompt": "x", "logit_bias": {"1": 1000}}, 400, "logit_bias.1=1000"),
        ({"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "takes json_schema or schema"),
        ({"prompt": "x", "response_format": schema_of({"type": "wizard"})}, 400, "Invalid type: wizard"),
        ({"prompt": [1, 10**6]}, 400, "token 1000000"),
        ({"prompt": [1, -1]}, 400, "prompt.1=-1"),
        ({"prompt": "x" * 300}, 400, "301 tokens"),
        ({"prompt": "x" * 10_000}, 400, "prompt has over 256 tokens"),
        ({"prompt": "x" * 255}, 400, "256 tokens"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "'gpt-4' is not served"),
        ("[" * 100_000, 400, "JSON"),
        ("nonsense", 400, "JSON"),
        ('{"prompt": "\\ud800"}', 400, "JSON"),
    ],
)
def test_a_bad_request_is_refused_by_name(running, body, status, said):
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
    error = found.json()["error"]
    assert (found.status_code, said in error["message"]) == (status, True), error
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role='wizard'"),
        ([{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "system", "content": "x"}], "role system must be user or assistant"),
    ],
)
def test_a_bad_conversation_is_refused(running, messages, said):
    with pytest.raises(openai.BadRequestError, match=said):
        running.client.chat.completions.create(model="tiny", messages=messages)


def test_only_holders_of_a_key_are_served(running):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for path in ("/v1/models", "/metrics", "/version"):
            found = httpx.get(running.url + path, headers=headers)
            assert found.status_code == 401
            assert found.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert running.client.with_options(api_key="another").models.list().data[0].id == "tiny"


def test_unknown_routes_and_methods_are_refused_in_the_apis_form(running):
    headers = {"Authorization": f"Bearer {KEY}", "x-request-id": "my-id"}
    for method, path, status in (("GET", "/v1/nothing", 404), ("DELETE", "/v1/completions", 405)):
        found = httpx.request(method, running.url + path, headers=headers)
        assert (found.status_code, found.headers["x-request-id"]) == (status, "my-id")
        assert path in found.json()["error"]["message"]


# --- clients that go away, send too much, or take too long


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_its_row(running, stream, monkeypatch):
    before, engine = running.metric("tessera:requests_cancelled_total"), running.service._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    body = {"prompt": [65] * 20, "stream": stream, "max_tokens": 200, "temperature": 0}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + content)
        running.until(lambda: running.service.open)
        if stream:
            client.recv(100)
    running.until(lambda: not running.service.open)
    running.until(lambda: running.metric("tessera:requests_cancelled_total") == before + 1)


def test_a_body_may_be_neither_large_nor_slow(running, monkeypatch):
    monkeypatch.setattr(front, "MAX_BODY", 1000)
    headers = {"Authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{running.url}/v1/completions", content=b"x" * 1001, headers=headers)
    assert (found.status_code, "larger than" in found.text) == (413, True)
    pieces = (b"x" * 400 for _ in range(5))  # without a declared length
    assert httpx.post(f"{running.url}/v1/completions", content=pieces, headers=headers).status_code == 413
    monkeypatch.setattr(front, "BODY_S", 0.3)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 10\r\n\r\n12"
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_slow_headers_end_the_connection(running, monkeypatch):
    monkeypatch.setattr(server, "HEADER_S", 0.3)
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost")
        assert client.recv(100) == b""


def test_a_full_queue_says_when_to_try_again(running, monkeypatch):
    monkeypatch.setattr(running.service, "room", 3)
    held = running.service.submit((Request(prompt=[65], max_new_tokens=200), lambda event: None))
    with pytest.raises(openai.RateLimitError) as refused:
        ask(running, "x", n=3)
    assert refused.value.response.headers["retry-after"] == "1"
    running.service.cancel(held[0])
    running.until(lambda: not running.service.open)
    assert len(ask(running, "x", n=3, max_tokens=1).choices) == 3


def test_one_tenant_cannot_keep_the_others_out(running, monkeypatch):
    def submit(tenant, count=1):
        asked = [(Request(prompt=[65], max_new_tokens=200, tenant=tenant), lambda event: None)] * count
        with suppress(Refusal):
            held.extend(running.service.submit(*asked))
        return len(held)

    held = []
    monkeypatch.setattr(running.service, "shared", True)
    monkeypatch.setattr(running.service, "room", 10)
    assert [submit("greedy") for _ in range(20)][-1] == 5
    assert submit("other") == 6
    assert [submit("third") for _ in range(20)][-1] == 8
    for job in held:
        running.service.cancel(job)
    running.until(lambda: not running.service.open)


def test_a_step_that_fails_ends_its_requests_and_not_the_server(running, monkeypatch):
    engine = running.service._engine

    def broken():
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(engine, "step", broken)
    failed = running.metric("tessera:requests_failed_total")
    with pytest.raises(openai.InternalServerError, match="on fire"):
        ask(running, "x", max_tokens=4)
    running.until(lambda: running.service._engine is not engine)  # the answer does not wait for the new engine
    assert running.metric("tessera:requests_failed_total") == failed + 1
    assert running.metric("tessera:engine_restarts_total") == 1
    assert ask(running, "x", max_tokens=4).usage.completion_tokens == 4
    assert not running.service.open


def test_a_bug_in_a_step_ends_the_server_by_name(model, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda found: seen.append(found.exc_value))
    service = Service(lambda: model.engine(slots=1), queue=1, metrics=Metrics())
    service.start(lambda engine: None)
    running = Running(model, service)
    monkeypatch.setattr(running.service._engine, "step", lambda: {}["no such key"])
    with pytest.raises(openai.APIStatusError, match="stopped before the answer"):
        ask(running, "x")
    running.close()
    assert isinstance(seen[0], KeyError)
    assert not running.service.ended


def test_a_request_that_fails_inside_a_stream_says_so(running, monkeypatch):
    engine, step = running.service._engine, running.service._engine.step

    def failing():
        return [Failure(event.id, ValueError("not finite")) for event in step()]

    monkeypatch.setattr(engine, "step", failing)
    with pytest.raises(openai.APIError, match="not finite"):
        list(ask(running, "x", max_tokens=4, stream=True))
    monkeypatch.undo()
    running.until(lambda: not running.service.open)


# --- the load client


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


# --- fields of vLLM's API that tools send


@pytest.mark.parametrize("chat", [False, True])
def test_each_event_of_a_stream_can_tell_the_tokens_so_far_of_its_choice(running, chat):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "max_tokens": 5, "n": 2, "logit_bias": {str(EOS): -100}}
    create = running.client.chat.completions.create if chat else running.client.completions.create
    prompt = {"messages": QUESTION} if chat else {"prompt": "x"}
    *events, last = create(**asked, **prompt, stream=True, stream_options=usage)
    for choice in range(2):
        counts = [event.usage.completion_tokens for event in events if event.choices[0].index == choice]
        assert counts == sorted(counts)
        assert (counts[-1], len(set(counts)) > 2) == (5, True)
    assert {event.usage.prompt_tokens for event in events} == {last.usage.prompt_tokens}
    assert last.usage.completion_tokens == 10


def test_an_answer_can_go_on_after_the_end_token(running):
    forced = {"model": "tiny", "prompt": "x", "max_tokens": 6, "logit_bias": {str(EOS): 100}}
    ends = [
        running.client.completions.create(**forced, extra_body={"ignore_eos": ignored}) for ignored in (False, True)
    ]
    found = [(end.choices[0].finish_reason, end.usage.completion_tokens) for end in ends]
    assert found == [("stop", 1), ("length", 6)]


# --- the process


@contextmanager
def serving(folder, until):
    """Run `tessera serve`; yield the process and its address once it has printed a line that begins with `until`."""
    flags = ["--port", "0", "--slots", "1", "--name", "tiny"]
    command = [sys.executable, "-m", "tessera", "serve", str(folder), *flags]
    environment, url = os.environ | {"JAX_PLATFORMS": "cpu"}, None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            for line in process.stderr:
                url = next((word.rstrip(",") for word in line.split() if word.startswith("http://")), url)
                if line.startswith(until):
                    break
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_after_the_open_answers(model, number):
    server = serving(model.source, "ready")
    with server as (process, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "prompt": "x"}
        events = iter(client.completions.create(**asked, n=8, max_tokens=200, stream=True, temperature=0))
        next(events)
        late = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{")
        for _ in range(2 if number == signal.SIGHUP else 1):  # a terminal that closes sends two
            process.send_signal(number)
            time.sleep(0.1)
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**asked)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert [event.choices[0].finish_reason for event in events][-1] in ("stop", "length")
        late.sendall(b'"prompt": "x"}')
        with late:
            assert late.recv(12) == b"HTTP/1.1 503"  # not cut, though no answer was open any more
        said = process.stderr.read()
        assert (process.wait(20), "Traceback" in said) == (0, False), said


def unwarmed(model, **options):
    found = Service(lambda: model.engine(slots=1, num_keys=CONTEXT), metrics=Metrics(), **options)
    found.start(lambda engine: None)
    while not found.ready:
        time.sleep(0.01)
    return found


def test_stopping_waits_until_the_pages_are_on_disk(model, monkeypatch):
    monkeypatch.setattr(service, "STOP_S", 0.1)
    found, closed = unwarmed(model, queue=1), []
    monkeypatch.setattr(found._engine, "close", lambda: (time.sleep(1.0), closed.append(True)))
    found.stop()
    assert closed


def test_with_several_keys_and_no_queue_one_request_runs(model):
    found, events = unwarmed(model, queue=0, shared=True), []
    found.submit((Request(prompt=[1], max_new_tokens=1), events.append))
    while not any(isinstance(event, End) for event in events):
        time.sleep(0.01)
    found.stop()


def test_a_signal_in_the_middle_of_a_write_to_the_log_is_not_lost(caplog):
    """Python runs signal handlers inside writes too, and a write inside a write raises RuntimeError."""
    work = SimpleNamespace(draining=False, open=0, alive=True)
    work.drain = lambda: setattr(work, "draining", True)
    found = server.Server(server.configured(lambda *_: None), work)

    class Writing(logging.Handler):
        def emit(self, record):
            raise RuntimeError("reentrant call")

    handler = Writing()
    server.logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO):
            found.handle_exit(signal.SIGTERM, None)
    finally:
        server.logger.removeHandler(handler)
    assert (work.draining, found.should_exit) == (True, True)


def test_ctrl_c_ends_the_warm_up_at_once(model):
    with serving(model.source, "tiny at") as (process, _):
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said = process.stderr.read()
        assert (process.wait(20), "Traceback" in said) == (0, False), said
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", ""], '--host "" is empty'),
        (["--name", ""], '--name "" is empty'),
        (["--name", "mod\udce9le"], r"the model's name 'mod\udce9le' cannot be shown"),
        (["--name", "\x1b[31mred"], r"the model's name '\x1b[31mred' cannot be shown"),
        (["--pin"], "--pin names no file"),
        (["--cors"], "--cors names no origin"),
        (["--cors", "example.org"], "--cors 'example.org' is no origin"),
        (["--pin", ""], "--pin names no file"),
        (["--spill-gb", "nan"], "--spill-gb nan must be"),
        (["--port", "99999"], "--port 99999"),
        (["--context", "100000"], "exceeds the model's context"),
        (["-np", "0"], "--slots 0"),
        (["-m", "other"], "given twice"),
        (["--spill", __file__], "--spill"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(model, flags, said, capsys):
    from tessera.cli.main import main

    assert main(["serve", model.source, *flags]) == 2
    assert said in capsys.readouterr().err


def test_pins_that_leave_no_room_for_a_request_are_refused_at_once(model):
    paging = Paging(num_pages=9, page=64, unit=64, sizes=(64,), batches=(1,))
    with pytest.raises(ValueError, match="--pin keeps 4 pages .2 times.* has 3"):
        warm.start(model, context=300, slots=1, queue=1, paging=paging, pins=[[5] * 130], tenants=("one", "two")).stop()


def test_a_file_of_keys_may_come_from_any_editor(tmp_path):
    from tessera.cli.serve import Serve

    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n# team two\r\ntwo\r\none\r\n")
    assert Serve(api_key_file=file).keys() == ("one", "two")
    for wrong, said in (
        ("one".encode("utf-16"), "UTF-8"),
        (b" \n", "no key"),
        ("k\u00e9y".encode(), "outside printable ASCII"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"{file} .*{said}"):
            Serve(api_key_file=file).keys()


def test_addresses_of_this_machine_alone_need_no_keys():
    from tessera.cli.serve import Serve

    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert Serve(host=host).keys() == ()
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(ValueError, match=f"--host {host} may let other machines connect"):
            Serve(host=host).keys()


def test_a_port_in_use_is_named_before_the_model_is_loaded(capsys):
    from tessera.cli.main import main

    with server.listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    assert f"port {port} (Address already in use): use another --port" in capsys.readouterr().err


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1 port 0 .*: use another --host"):
        server.listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("long.txt", b"x" * (CONTEXT + 1), "has 258 tokens"),
        ("short.txt", b"x" * 10, "has 11 tokens, but needs at least 64"),
        ("binary.txt", bytes(range(256)), "byte 128 is not UTF-8"),
        ("list.json", b"[1]", "not a JSON object"),
        ("other.json", b'{"messages": [{"role": "user", "content": "x"}], "foo": 1}', "unknown field foo"),
        ("deep.json", b"[" * 100_000, "recursion"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused_by_name(model, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        warm.pinned(model, [tmp_path / name], CONTEXT, 64)
    assert f"--pin {tmp_path / name}" in str(refused.value)


def test_a_pin_has_the_tokens_that_a_request_with_its_text_has(model, tmp_path):
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\n" * 20)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two " * 20}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    text, chat = warm.pinned(model, [tmp_path / "marked.txt", tmp_path / "chat.json"], CONTEXT, 64)
    assert text == model.tokenizer.encode("one\r\n" * 20)
    assert chat == model.tokenizer.encode_chat([{"role": "user", "content": "one \n" + "two " * 20}])
