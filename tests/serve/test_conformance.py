"""What the clients and the test suites of other servers expect, by server; and what is refused on purpose, and why.

`make conformance` prints the list. Each row is a request in the form that the peer's clients send, and what must come
back; most are made from the peer's documentation and from public bug reports. The model is small and random: only
what does not depend on the model is expected.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from live_server import KEY
from tiny import CONFIG

from tessera.serve import asking
from tessera.serve.api.protocol import ChatBody
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.parsing import parse

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
EOS = str(CONFIG.eos_ids[0])
PREFIX = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well, "}]
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}], "signature": "x", "closed": True}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Row(NamedTuple):
    """One expectation.

    Attributes:
        peer: server whose clients send the request.
        name: what is expected, in words.
        body: fields of the request; `prompt` or `messages` and `max_tokens` are added if they are missing.
        right: function of the answer that returns whether it is as expected.
        path: route; None takes that of `prompt` or `messages`.
    """

    peer: str
    name: str
    body: dict[str, Any]
    right: Callable[[Any], bool]
    path: str | None = None


class Refused(NamedTuple):
    """A request that is refused on purpose: its answer would not be what the client asks for."""

    peer: str
    field: str
    body: dict[str, Any]
    reason: str


def choice(answer):
    return answer["choices"][0]


def content(answer):
    return choice(answer)["message"]["content"] if "message" in choice(answer) else choice(answer)["text"]


def matches(pattern):
    return lambda answer: re.fullmatch(pattern, content(answer)) is not None


def unchanged(answer):
    """Only a marker: the answer is compared with that to a request without the field."""
    return answered(answer)


def answered(answer):
    return answer["usage"]["completion_tokens"] >= 1


def deltas(events):
    return [event["choices"][0].get("delta", {}) for event in events if event["choices"]]


def streamed(events):
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


FORCED = {"logit_bias": {"77": 100}}
OPENAI = [
    Row("openai", f"{field}={json.dumps(value)} changes no answer", {field: value, "temperature": 0}, unchanged)
    for field, value in {
        "store": True,
        "metadata": {"run": "1"},
        "service_tier": "auto",
        "safety_identifier": "user-1",
        "user": "user-1",
        "prompt_cache_key": "a",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "verbosity": "medium",
        "reasoning_effort": "medium",
        "parallel_tool_calls": True,
        "model": "",
        "n": 1,
    }.items()
]
OPENAI += [
    Row("openai", "seeds of 64 bits", {"seed": 2**63 - 1, "n": 3, "temperature": 1.5}, lambda answer: (
        len({one["message"]["content"] for one in answer["choices"]}) == 3)),
    Row("openai", "negative seeds", {"seed": -(2**62), "temperature": 2}, answered),
    Row("openai", "a presence penalty", {"presence_penalty": 2, "logit_bias": {"77": 96, "78": 95, "79": 94.5},
        "max_tokens": 3, "temperature": 0}, matches("M[MNO]{2}")),
    Row("openai", "a chat without max_tokens ends or fills the context", {"max_tokens": None}, lambda answer: (
        choice(answer)["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == 256)),
    Row("openai", "a stream begins with the role", {"stream": True}, lambda events: (
        deltas(events)[0] == {"role": "assistant", "content": ""})),
    Row("openai", "the last delta is empty", {"stream": True}, lambda events: deltas(events)[-1] == {}),
    Row("openai", "obfuscation is left out", {"stream": True, "stream_options": {"include_obfuscation": False}},
        lambda events: deltas(events)[-1] == {}),
    Row("openai", "logprobs=0 reports each token", {"logprobs": 0, "max_tokens": 2, "prompt": "x"}, lambda answer: (
        [len(top) for top in choice(answer)["logprobs"]["top_logprobs"]] == [1, 1])),
    Row("openai", "a token outside the best ones is among top_logprobs", {"prompt": "x", "logprobs": 1, **FORCED},
        lambda answer: "M" in choice(answer)["logprobs"]["top_logprobs"][0]),
    Row("openai", "echo with logprobs and no answer", {"prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 0},
        lambda answer: content(answer) == "hi" and len(choice(answer)["logprobs"]["tokens"]) == 3),
    Row("openai", "echo in a stream", {"prompt": "hi", "echo": True, "stream": True, "max_tokens": 2, **FORCED},
        lambda events: events[0]["choices"][0]["text"] == "hi" and streamed(events) == "hiMM"),
    Row("openai", "echo in a stream, with logprobs",
        {"prompt": "hi", "echo": True, "stream": True, "max_tokens": 2, "logprobs": 1, **FORCED},
        lambda events: streamed(events) == "hiMM" and [
            offset for event in events if event["choices"][0]["logprobs"]
            for offset in event["choices"][0]["logprobs"]["text_offset"]] == [0, 0, 1, 2, 3]),
    Row("openai", "echo in a stream, without an answer",
        {"prompt": "hi", "echo": True, "stream": True, "max_tokens": 0, "stream_options": {"include_usage": True}},
        lambda events: streamed(events) == "hi" and events[-1]["usage"]["completion_tokens"] == 0),
    Row("openai", "top_p=0 takes the best token", {"top_p": 0, "temperature": 2, "logit_bias": {"77": 50}},
        matches("M+")),
    Row("openai", "best_of equal to n", {"prompt": "x", "best_of": 2, "n": 2}, lambda answer: (
        len(answer["choices"]) == 2)),
    Row("openai", "whole numbers as floats", {"max_tokens": 2.0, "seed": 1.0, "n": 1.0, "top_k": 1.0, **FORCED},
        matches("MM")),
    Row("openai", "an empty prompt", {"prompt": ""}, lambda answer: answer["usage"]["prompt_tokens"] == 1),
    Row("openai", "a browser's question needs no key", {}, lambda answer: True, "OPTIONS " + CHAT),
]  # fmt: skip
LLAMA = [
    Row("llama.cpp", f"{field}={json.dumps(value)} changes no answer", {field: value, "temperature": 0}, unchanged)
    for field, value in {
        "cache_prompt": True,
        "id_slot": 0,
        "timings_per_token": True,
        "return_progress": True,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "typical_p": 1.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
        "dry_multiplier": 0.0,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0,
        "dynatemp_range": 0,
        "n_keep": 0,
        "min_keep": 0,
        "post_sampling_probs": False,
        "lora": [],
        "grammar": "",
        "top_k": 0,
    }.items()
]
LLAMA += [
    Row("llama.cpp", "max_tokens=-1 is what fits", {"max_tokens": -1, "ignore_eos": True}, lambda answer: (
        answer["usage"]["total_tokens"] == 256)),
    Row("llama.cpp", "n_predict", {"max_tokens": None, "n_predict": 3, **FORCED}, matches("MMM")),
    Row("llama.cpp", "a prompt of ids and text", {"prompt": [72, "ello ", 87], "echo": True, "max_tokens": 0},
        matches("Hello W")),
    Row("llama.cpp", "prompts of both kinds", {"prompt": ["Hi", [72, 105], [72, "i"]], "echo": True, "max_tokens": 0},
        lambda answer: [one["text"] for one in answer["choices"]] == ["Hi"] * 3),
    Row("llama.cpp", "a schema in json_object", {"response_format": {"type": "json_object", "schema": {"const": "42"}}},
        matches('"42"')),
    Row("llama.cpp", "json_schema", {"json_schema": {"const": "42"}}, matches('"42"')),
    Row("llama.cpp", "grammar", {"grammar": 'root ::= "a"{5,5}'}, matches("a{5}")),
    Row("llama.cpp", "biases as pairs", {"logit_bias": [[77, 100], [78, False]], "max_tokens": 2}, matches("MM")),
    Row("llama.cpp", "biases of texts", {"logit_bias": [["MN", 100], ["N", False]], "max_tokens": 2}, matches("MM")),
    Row("llama.cpp", "biases of texts in an object", {"logit_bias": {"MN": 100, "77": False, "N": 1.0}, "max_tokens":
        2}, matches("NN")),
    Row("llama.cpp", "/tokenize with parse_special=false", {"content": "<|eos|>", "parse_special": False},
        lambda answer: len(answer["tokens"]) == len("<|eos|>"), "/tokenize"),
    Row("llama.cpp", "/tokenize of ids and text", {"content": [72, "i", 72], "add_special": True},
        lambda answer: answer["tokens"] == [72, 105, 72], "/tokenize"),
    Row("llama.cpp", "/detokenize of nothing", {"tokens": []}, lambda answer: answer["content"] == "", "/detokenize"),
    Row("llama.cpp", "/tokenize with content", {"content": "Hi"}, lambda answer: answer["tokens"] == [72, 105],
        "/tokenize"),
    Row("llama.cpp", "/tokenize with pieces", {"content": "é", "with_pieces": True, "add_special": True},
        lambda answer: [one["piece"] for one in answer["tokens"]] == ["<|bos|>", [0xC3], [0xA9]], "/tokenize"),
    Row("llama.cpp", "/detokenize gives content", {"tokens": [72, 105]}, lambda answer: answer["content"] == "Hi",
        "/detokenize"),
    Row("llama.cpp", "a last message of the assistant is followed by a new one, unless continue_final_message asks",
        {"messages": PREFIX}, lambda answer: answer["usage"]["prompt_tokens"] == len("HelloWell, ") + 6),
    Row("llama.cpp", "/apply-template of a message to go on with", {"messages": PREFIX, "continue_final_message": True},
        lambda answer: answer["prompt"].endswith("Well, "), "/apply-template"),
    Row("llama.cpp", "/apply-template", {"messages": HELLO}, lambda answer: (
        answer["prompt"] == "<|bos|><|user|>Hello<|end|><|assistant|>"), "/apply-template"),
]  # fmt: skip
VLLM = [
    Row("vLLM", f"{field}={json.dumps(value)} changes no answer", {field: value, "temperature": 0}, unchanged)
    for field, value in {
        "request_id": "a",
        "priority": 1,
        "top_k": -1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "include_reasoning": True,
        "detokenize": True,
        "guided_decoding_backend": "guidance",
        "documents": [],
        "mm_processor_kwargs": {},
    }.items()
]
VLLM += [
    Row("vLLM", "structured_outputs.regex", {"structured_outputs": {"regex": r"\d{3}"}}, matches(r"\d{3}")),
    Row("vLLM", "structured_outputs.choice", {"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
    Row("vLLM", "structured_outputs.grammar", {"structured_outputs": {"grammar": 'root ::= "a"'}}, matches("a")),
    Row("vLLM", "guided_json", {"guided_json": {"const": 1}}, matches("1")),
    Row("vLLM", "guided_regex for a completion", {"prompt": "x", "guided_regex": "a{3}"}, matches("aaa")),
    Row("vLLM", "guided_choice", {"guided_choice": ["red", "blue"]}, matches("red|blue")),
    Row("vLLM", "guided_grammar in Lark", {"guided_grammar": '?start: "SELECT " x\nx: "a" | "b"'},
        matches("SELECT [ab]")),
    Row("vLLM", "continue_final_message", {"messages": PREFIX, "continue_final_message": True,
        "add_generation_prompt": False}, lambda answer: answer["usage"]["prompt_tokens"] == len("HelloWell, ") + 4),
    Row("vLLM", "add_generation_prompt=false", {"add_generation_prompt": False}, lambda answer: (
        answer["usage"]["prompt_tokens"] == len("Hello") + 3)),
    Row("vLLM", "chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}, answered),
    Row("vLLM", "min_tokens", {"min_tokens": 5, "max_tokens": 5, "logit_bias": {EOS: 100}}, lambda answer: (
        answer["usage"]["completion_tokens"] == 5)),
    Row("vLLM", "allowed_token_ids", {"allowed_token_ids": [65, 66]}, matches("[AB]+")),
    Row("vLLM", "stop_token_ids", {"stop_token_ids": [77], **FORCED}, lambda answer: (
        (content(answer), choice(answer)["finish_reason"]) == ("", "stop"))),
    Row("vLLM", "stop_token_ids with ignore_eos", {"stop_token_ids": [77], "ignore_eos": True, **FORCED},
        lambda answer: choice(answer)["finish_reason"] == "stop"),
    Row("vLLM", "special tokens shown", {"skip_special_tokens": False, "logit_bias": {"258": 100}, "max_tokens": 2},
        lambda answer: content(answer).startswith("<|")),
    Row("vLLM", "add_special_tokens=false", {"prompt": "Hi", "add_special_tokens": False}, lambda answer: (
        answer["usage"]["prompt_tokens"] == 2)),
    Row("vLLM", "prompt_logprobs of a completion", {"prompt": "Hi", "prompt_logprobs": 2}, lambda answer: (
        choice(answer)["prompt_logprobs"][0] is None
        and choice(answer)["prompt_logprobs"][1]["72"]["decoded_token"] == "H"
        and [one["rank"] for one in choice(answer)["prompt_logprobs"][2].values() if one["rank"]][-2:] == [1, 2])),
    Row("vLLM", "prompt_logprobs of a chat", {"prompt_logprobs": 0}, lambda answer: (
        [len(one or "") for one in answer["prompt_logprobs"]] == [0] + [1] * (len("Hello") + 3))),
    Row("vLLM", "/tokenize with return_token_strs", {"prompt": "Hi", "return_token_strs": True}, lambda answer: (
        answer["token_strs"] == ["<|bos|>", "H", "i"]), "/tokenize"),
    Row("vLLM", "/tokenize of a chat with tools", {"messages": HELLO, "tools": [TOOL]}, lambda answer: (
        answer["count"] == len(answer["tokens"]) > 60), "/tokenize"),
    Row("vLLM", "/tokenize of a chat to go on with", {"messages": PREFIX, "continue_final_message": True,
        "add_generation_prompt": False}, lambda answer: answer["count"] == len("HelloWell, ") + 4, "/tokenize"),
    Row("vLLM", "input_text and plain strings in a content list",
        {"messages": [{"role": "user", "content": ["Hello", {"type": "input_text", "text": "you"}]}]},
        lambda answer: answer["usage"]["prompt_tokens"] == len("Hello\nyou") + 4),
    Row("vLLM", "reasoning of an earlier answer, as a part",
        {"messages": [*HELLO, {"role": "assistant", "content": [THOUGHT, {"type": "output_text", "text": "Hi"}]}]},
        lambda answer: answer["usage"]["prompt_tokens"] == len("HelloHi") + 6),
    Row("vLLM", "/tokenize of a whole chat request", {"messages": HELLO, "max_tokens": 5, "temperature": 0,
        "tools": [TOOL], "tool_choice": "none", "stream_options": {"include_usage": True}, "logprobs": True,
        "stop": ["x"], "add_special_tokens": False}, lambda answer: answer["count"] == len("Hello") + 4, "/tokenize"),
    Row("vLLM", "special tokens shown, the end of the sequence too", {"skip_special_tokens": False, "ignore_eos": True,
        "logit_bias": {EOS: 100}, "max_tokens": 2}, matches(r"(<\|\w+\|>){2}")),
    Row("vLLM", "usage in each event", {"stream": True, "stream_options": {"include_usage": True,
        "continuous_usage_stats": True}}, lambda events: all("usage" in event for event in events)),
]  # fmt: skip
OTHERS = [
    Row("SGLang", "regex", {"regex": "(yes|no)"}, matches("yes|no")),
    Row("SGLang", "ebnf", {"ebnf": 'root ::= "Paris" | "London"'}, matches("Paris|London")),
    Row("SGLang", "json_schema as text", {"json_schema": '{"const": 5}'}, matches("5")),
    Row("SGLang", "rid", {"rid": "a"}, answered),
    Row("SGLang", "separate_reasoning", {"separate_reasoning": True, "stream_reasoning": True}, answered),
    Row("SGLang", "return_hidden_states=false", {"return_hidden_states": False, "lora_path": None}, answered),
    Row("MLC", "a grammar in response_format", {"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}},
        matches("a")),
    Row("MLC", "debug_config={}", {"debug_config": {}}, answered),
    Row("MLC", "a first delta with text", {"stream": True}, lambda events: deltas(events)[0]["content"] == ""),
    Row("TGI", "regex in response_format", {"response_format": {"type": "regex", "value": "ab?"}}, matches("ab?")),
    Row("TGI", "json in response_format", {"response_format": {"type": "json", "value": {"const": 1}}}, matches("1")),
    Row("OpenRouter", "provider, models, route, usage", {"provider": {"order": ["x"]}, "models": ["x"],
        "route": "fallback", "usage": {"include": True}, "transforms": []}, answered),
    Row("Ollama", "keep_alive", {"keep_alive": "5m"}, answered),
]  # fmt: skip
REFUSED = [
    Refused("openai", "audio", {"audio": {"voice": "a"}}, "answers are text"),
    Refused("openai", "modalities", {"modalities": ["text", "audio"]}, "answers are text"),
    Refused("openai", "web_search_options", {"web_search_options": {}}, "the server does not search"),
    Refused("openai", "verbosity", {"verbosity": "low"}, "the chat template has no such variable"),
    Refused("openai", "reasoning_effort", {"reasoning_effort": "high"}, "this chat template does not read it"),
    Refused("openai", "functions", {"functions": [{"name": "a"}]}, "replaced by tools"),
    Refused("openai", "function_call", {"function_call": "auto"}, "replaced by tool_choice"),
    Refused("openai", "suffix", {"prompt": "x", "suffix": "y"}, "marks for it depend on the model"),
    Refused("openai", "best_of", {"prompt": "x", "best_of": 2}, "answers are not ranked"),
    Refused("openai", "logit_bias", {"logit_bias": {"1000000": 1}}, "the vocabulary has no such token"),
    Refused("openai", "max_tokens", {"max_tokens": 0}, "an answer has at least one token"),
    Refused("llama.cpp", "mirostat", {"mirostat": 2}, "not implemented"),
    Refused("llama.cpp", "typical_p", {"typical_p": 0.5}, "not implemented"),
    Refused("llama.cpp", "repeat_penalty", {"repeat_penalty": 1.1}, "counts 64 tokens, repetition_penalty counts all"),
    Refused("llama.cpp", "samplers", {"samplers": ["top_k"]}, "the order is fixed"),
    Refused("llama.cpp", "n_probs", {"n_probs": 3}, "its response has another form; logprobs reports the same"),
    Refused("vLLM", "use_beam_search", {"use_beam_search": True}, "not implemented"),
    Refused("vLLM", "structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}, "use tools"),
    Refused("vLLM", "guided_json", {"guided_json": {}, "guided_regex": "a"}, "an answer follows one form"),
    Refused("vLLM", "continue_final_message", {"continue_final_message": True, "add_generation_prompt": True},
            "they contradict each other"),
    Refused("vLLM", "chat_template_kwargs", {"chat_template_kwargs": {"parse_special": True}}, "messages are text"),
    Refused("vLLM", "chat_template", {"chat_template": "{{ 1 }}"}, "the model's own is used"),
    Refused("vLLM", "min_tokens", {"min_tokens": 9, "max_tokens": 5}, "they contradict each other"),
    Refused("vLLM", "min_tokens", {"min_tokens": 5, "guided_regex": "[ab]{3}"}, "a form ends the answer"),
    Refused("vLLM", "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}, "not part of vLLM's streams either"),
    Refused("vLLM", "include_stop_str_in_output", {"include_stop_str_in_output": True}, "not implemented"),
    Refused("vLLM", "truncate_prompt_tokens", {"truncate_prompt_tokens": 5}, "a cut prompt is another prompt"),
    Refused("vLLM", "cache_salt", {"cache_salt": "a"}, "API keys separate caches"),
    Refused("SGLang", "stop_regex", {"stop_regex": "a+"}, "not implemented"),
    Refused("SGLang", "lora_path", {"lora_path": "a"}, "one model per server"),
    Refused("MLC", "response_format.type", {"response_format": {"type": "structural_tag"}}, "use tools"),
    Refused("Ollama", "options", {"options": {"num_ctx": 1}}, "its fields are fields of the body"),
    Refused("OpenRouter", "transforms", {"transforms": ["middle-out"]}, "a cut prompt is another prompt"),
    Refused("DeepSeek", "messages.1.prefix", {"messages": [HELLO[0], {**PREFIX[1], "prefix": True}]},
            "continue_final_message does it"),
    Refused("vLLM", "structured_outputs.whitespace_pattern", {"structured_outputs": {"json": {}, "whitespace_pattern":
            " "}}, "JSON is compact"),
    Refused("any", "temprature", {"temprature": 0}, "an unknown field may be a spelling mistake"),
]  # fmt: skip
ROWS = [*OPENAI, *LLAMA, *VLLM, *OTHERS]


def send(running, body, path=None):
    method, _, path = (path or (TEXT if "prompt" in body else CHAT)).rpartition(" ")
    if path in (CHAT, TEXT):
        body = {"max_tokens": 12} | ({} if "prompt" in body else {"messages": HELLO}) | body
    headers = {"Authorization": f"Bearer {KEY}"}
    if method:  # a browser's question
        headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    return httpx.request(method or "POST", running.url + path, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.peer}: {row.name}")
def test_a_request_that_a_peer_takes_is_answered_alike(running, row):
    found = send(running, row.body, row.path)
    assert found.status_code == 200, found.text
    if row.body.get("stream"):
        events = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        answer = [json.loads(event) for event in events]
    else:
        answer = json.loads(found.text) if found.headers["content-type"] == "application/json" else found.text
    assert row.right(answer), answer
    if row.right is unchanged:
        assert content(answer) == content(send(running, {"temperature": 0}).json())


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.peer}: {row.field} is refused: {row.reason}")
def test_a_request_that_cannot_be_honoured_is_refused_by_name(running, row):
    found = send(running, row.body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"].startswith(row.field), error
    assert row.field.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ messages }}", "medium", {}),
        ("{{ messages }}", "low", None),
        ("{{ enable_thinking }}", "high", None),
    ],
)
def test_reasoning_effort_reaches_a_template_that_reads_it(template, effort, variables):
    body = parse(ChatBody, json.dumps({"messages": HELLO, "reasoning_effort": effort}).encode(), 256)
    if variables is None:
        with pytest.raises(Refusal, match="reasoning_effort is not supported: the chat template does not read it"):
            asking._variables(body, template)
    else:
        assert asking._variables(body, template) == {"add_generation_prompt": True, **variables}
