"""Tool calls: found in answers, forced by a grammar, shown to templates; random cuts of a stream change nothing."""

import asyncio
import json
import random
from dataclasses import replace

import httpx2 as httpx
import pytest
from tiny import CONFIG, save_tiny

from tessera.generate import load
from tessera.models.tokenizer import BYTE_TEMPLATE
from tessera.serve import warm
from tessera.serve.app import create
from tessera.serve.bodies import Bodies
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service
from tessera.serve.site import Site
from tessera.serve.tools import Speech, call_schema, safe_end, split, taught

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def names(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("no call", "no call", []),
        (CALL, "", [("add", {"a": 1, "b": 2})]),
        (
            f"Let me see. {CALL}\n{CALL.replace('1', '7')}",
            "Let me see.",
            [("add", {"a": 1, "b": 2}), ("add", {"a": 7, "b": 2})],
        ),
        ("<tool_call>not json</tool_call> end", "<tool_call>not json</tool_call> end", []),
        (CALL[:-12], CALL[:-12], []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (
            '<tool_call>{"name": "x", "arguments": "y"}</tool_call>',
            '<tool_call>{"name": "x", "arguments": "y"}</tool_call>',
            [],
        ),
        (f"<tool_call>{CALL}", "<tool_call>", [("add", {"a": 1, "b": 2})]),
        (
            '<tool_call>{"name": "x\\ud83d", "arguments": {"\\ud83d": "é\\udfff\\ud83d\\ude00"}}</tool_call>',
            "",
            [("x\\ud83d", {"\ud83d": "é\udfff😀"})],
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "<tool_call>" + "[" * 100_000 + "</tool_call>", []),
    ],
)
def test_calls_are_found_and_all_else_stays_text(text, plain, calls):
    found, made = split(text, forced=False)
    assert (found, names(made)) == (plain, calls)
    json.dumps(made, ensure_ascii=False).encode()  # fails for a lone surrogate
    assert len({call["id"] for call in made}) == len(made)


@pytest.mark.parametrize("text", ["plain <tool", f"before {CALL} after", "a < b <tool_call> c", "<<tool_call", "x"])
def test_a_stream_shows_no_part_of_a_call_and_loses_nothing(text):
    rng = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        speech, shown = Speech(offered=True), ""
        for start, end in zip([0, *cuts], [*cuts, len(text)]):
            shown += speech.push(text[start:end])
            assert "<tool_call>" not in shown
        rest, calls = speech.finish(text)
        plain, expected = split(text, forced=False)
        assert "".join((shown + rest).split()) == "".join(plain.split())
        assert names(calls) == names(expected)


def test_one_call_counts_if_the_client_wants_no_parallel_ones():
    assert len(Speech(offered=True).finish(CALL + CALL)[1]) == 2
    assert len(Speech(offered=True, single=True).finish(CALL + CALL)[1]) == 1


def test_text_before_a_mark_is_shown_at_once():
    assert [safe_end(text) for text in ("abc", "abc<", "abc<tool_call", "abc<tool_call>d", "a<b")] == [3, 3, 3, 3, 3]


def test_a_model_that_knows_no_tools_is_taught_them():
    earlier = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "content": "3"}
    system, question, call, answer = taught([{"role": "user", "content": "1 + 2?"}, earlier, result], [ADD])
    assert system["role"] == "system"
    assert "Add two numbers" in system["content"]
    assert question["content"] == "1 + 2?"
    assert names(split(call["content"], forced=False)[1]) == [("add", {"a": 1})]
    assert answer == {"role": "user", "content": "3"}


def test_a_model_is_taught_no_tools_if_none_are_offered():
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    found = taught([*messages, {"role": "tool", "content": "1"}], [])
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert names(split(found[1]["content"], forced=False)[1]) == [("add", {"a": 1})]


def test_the_schema_of_a_call_is_of_the_named_tool():
    assert call_schema([ADD, STOP], "stop")["properties"]["name"] == {"const": "stop"}
    assert len(call_schema([ADD, STOP], None)["anyOf"]) == 2


@pytest.mark.parametrize("kind", ["string", ["string", "null"], 5])
def test_the_parameters_of_a_tool_are_an_object(kind):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": kind}}}
    with pytest.raises(ValueError, match="tool add"):
        call_schema([STOP, tool], None)


@pytest.mark.parametrize("parameters", [None, {}, {"type": ["object", "null"]}, {"anyOf": [{}, {"type": "string"}]}])
def test_arguments_are_an_object_whatever_the_parameters_say(parameters):
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    assert call_schema([tool], None)["properties"]["arguments"]["type"] == "object"


# --- through the server


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    model = load(save_tiny(tmp_path_factory.mktemp("tools"), CONFIG))
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + BYTE_TEMPLATE
    model = replace(model, tokenizer=replace(model.tokenizer, chat_template=template))
    service = Service(lambda: model.engine(slots=1, num_keys=CONFIG.max_positions), queue=4, metrics=Metrics())
    service.start(lambda engine: None)
    grammars = warm.grammars_for(model)
    context, bodies = CONFIG.max_positions, Bodies(CONFIG.max_positions)
    yield Site(model=model, name="tiny", service=service, context=context, grammars=grammars, bodies=bodies)
    service.stop()


def post(site, **body):
    body = {"messages": [{"role": "user", "content": "1 + 2?"}], "max_tokens": 80, "temperature": 0} | body

    async def send():
        transport = httpx.ASGITransport(app=create(site))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(send())


def test_a_forced_call_is_made_by_a_random_model(site):
    [choice] = post(site, tools=[STOP, ADD], tool_choice={"type": "function", "function": {"name": "add"}}).json()[
        "choices"
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [(name, arguments)] = names(choice["message"]["tool_calls"])
    assert (name, set(arguments)) == ("add", {"a", "b"})
    lines = post(site, tools=[STOP, ADD], tool_choice="required", stream=True).text.split("\n\n")
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    calls = [call for event in events for call in event["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"] in ("add", "stop")) for call in calls] == [(0, True)]
    assert events[-1]["finish_reason"] == "tool_calls"
    assert not any(event["delta"].get("content") for event in events)


@pytest.mark.parametrize("text", ["<|end|>", "a<|user|>b"])
def test_an_answer_spells_the_name_of_a_special_token(site, text):
    form = {"type": "json_schema", "json_schema": {"schema": {"const": text}}}
    [choice] = post(site, response_format=form).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (json.dumps(text), "stop")


def test_a_forced_call_follows_the_definitions_of_its_tool(site):
    city = {"const": "Oslo"}
    parameters = {"$defs": {"City": city}, "type": "object", "properties": {"to": {"$ref": "#/$defs/City"}}}
    parameters |= {"required": ["to"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "book", "parameters": parameters}}
    [choice] = post(site, tools=[tool], tool_choice="required").json()["choices"]
    assert names(choice["message"]["tool_calls"]) == [("book", {"to": "Oslo"})]


def test_a_free_answer_without_a_call_is_text(site):
    plain = post(site, tools=[ADD], max_tokens=10).json()["choices"][0]
    assert plain["finish_reason"] in ("stop", "length")
    assert plain["message"]["content"]
    assert "tool_calls" not in plain["message"]
    none = post(site, tools=[ADD], max_tokens=10, tool_choice="none").json()
    offered = post(site, tools=[ADD], max_tokens=10).json()
    assert none["usage"]["prompt_tokens"] < offered["usage"]["prompt_tokens"]  # the template shows tools


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice=required needs"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice=sub needs"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "cannot be combined"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name='a b'"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{"}}]}]},
            "not JSON",
        ),
    ],
)  # fmt: skip
def test_wrong_tools_are_refused(site, body, said):
    found = post(site, **body)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


def test_a_wrong_schema_is_named_by_the_field_that_has_it(site):
    wrong = {"type": "wizard"}
    tool = {"type": "function", "function": {"name": "add", "parameters": wrong}}
    forced = post(site, tools=[tool], tool_choice="required").json()["error"]
    plain = post(site, response_format={"type": "json_schema", "json_schema": {"schema": wrong}}).json()["error"]
    assert (forced["param"], plain["param"]) == ("tools", "response_format")
