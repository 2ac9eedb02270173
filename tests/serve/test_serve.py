"""The server under the official client gives the same answers as `generate`."""

import functools
import json
import operator
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import openai
import pytest
from live_server import CONTEXT, KEY, ask
from tiny import CONFIG

from tessera.runtime.requests import Request
from tessera.serve import warm

EOS = CONFIG.eos_ids[0]
QUESTION = [{"role": "user", "content": "What is the number of the door?"}]


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
    assert running.metric("tessera:step_cost_seconds") > 0
    assert running.metric("tessera:step_limit_seconds") > 0
    several = ask(running, prompts[:3], max_tokens=9)
    assert [choice.text for choice in several.choices] == expected[:3]


def test_a_prompt_that_repeats_is_partly_in_the_cache(running):
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, queries = map(running.metric, names)
    cached = [ask(running, [70] * 90, max_tokens=2).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[1] == 64
    assert [*map(running.metric, names)] == [hits + sum(cached), queries + 180]


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
