"""Agent loops with OpenAI's client: calls in the forms of several families, whole and streamed, and sent back as they
came. The model's answers are scripted; the client, the server and the engine are real."""

import json

import httpx2 as httpx
import openai
import pytest
from live_server import start
from pydantic import BaseModel, create_model
from scripted import save_scripted

from tessera.chat.remote import RemoteChat
from tessera.generate import load
from tessera.serve import response

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
    },
}
SCRIPTS = {
    "h": [
        *("<think>", "Shall I ", "add?", "</think>", "\n\nLet ", "me. ", "<tool_call>"),
        *('\n{"name": "ad', 'd", "arguments": {"a": 1, "b": 2}}\n', "</tool_call>"),
    ],
    "m": ["[TOOL_CALLS]", '[{"name": "add", "arguments": {"a": 1,', ' "b": 2}}', "]"],
    "l": ['{"name": "ad', 'd", "parameters": {"a": 1, ', '"b": 2}}'],
    "d": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function", "<｜tool▁sep｜>", "add\n```json\n"),
        *('{"a": 1, "b": 2}\n```', "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ],
    "p": ["[add(a={1, ", "2}, b=3)]"],
    "t": ["Just ", "text ", "< "],
    "f": ['{"name":"ad', 'd","arguments":{"a":', "1,", '"b":', "2}}"],
    "j": ['{"name":"', "Paris", '","country":"', "Fran", 'ce"}'],
    "<|reserved0|>": ["It ", "is ", "3."],
}
"""Answers by the last character of the question: a call as Hermes, Mistral, Llama and DeepSeek write it, a text, a call
that must be one, and a form."""
SPECIAL = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
)
TEMPLATE = """
{%- if tools %}{{ tools | length }}{% endif %}
{%- for m in messages %}
    {{- '<|user|>' if m.role != 'assistant' else '<|assistant|>' }}{{ m.reasoning_content }}{{ m.content or '' }}
    {%- for c in m.tool_calls or [] %}{{ c.id ~ c.function.name ~ c.function.arguments | tojson }}{% endfor %}
    {{- '<|reserved0|>' if m.role == 'tool' }}
{%- endfor %}"""
FUNCTION = {"name": "add", "arguments": {}}
FAMILIES = ("h", "m", "l", "d")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = save_scripted(tmp_path_factory.mktemp("agents"), SCRIPTS, special=SPECIAL, template=TEMPLATE, context=512)
    found = start(load(folder), context=512)
    yield found
    found.close()


def ask(running, messages, **options):
    options = {"tools": [ADD], "temperature": 0, "max_tokens": 60} | options
    return running.client.chat.completions.create(model="tiny", messages=messages, **options)


def whole(running, messages):
    [choice] = ask(running, messages).choices
    return choice.message.model_dump(), choice.finish_reason


def sparse(running, messages):
    [choice] = ask(running, messages).choices
    return choice.message.to_dict(exclude_unset=True), choice.finish_reason


def deltas(running, messages):
    """Collect a stream as agent loops do: put the deltas together, and send back whatever they held."""
    message, finish = {"role": "assistant", "content": ""}, None
    for chunk in ask(running, messages, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            delta, finish = choice.delta.model_dump(exclude_none=True), choice.finish_reason or finish
            message["content"] += delta.get("content", "")
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls", []))
            message["reasoning_content"] = message.get("reasoning_content", "") + delta.get("reasoning_content", "")
    return message, finish


def final(running, messages):
    """Return the message that the client's own helper collects."""
    options = {"tools": [ADD], "temperature": 0, "max_tokens": 60}
    with running.client.chat.completions.stream(model="tiny", messages=messages, **options) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    return choice.message.to_dict(), choice.finish_reason


@pytest.mark.parametrize("collect", [whole, sparse, deltas, final])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_agent_gets_a_call_and_sends_it_back(running, family, collect):
    messages = [{"role": "user", "content": f"1 + 2? {family}"}]
    message, finish = collect(running, messages)
    assert finish == "tool_calls"
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    if family == "h":
        assert (message["reasoning_content"], message["content"].strip()) == ("Shall I add?", "Let me.")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    message, finish = collect(running, [*messages, message, result])
    assert (message["content"], finish, message.get("tool_calls") or None) == ("It is 3.", "stop", None)
    again = [*messages, message, {"role": "user", "content": "Thanks! t"}]
    assert collect(running, again)[0]["content"] == "Just text < "


class City(BaseModel):
    name: str
    country: str


def asked(running, question, **options):
    """Ask whole, and through the client's helper for streams; return both responses."""
    given = {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0, **options}
    with running.client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        return running.client.chat.completions.parse(**given), stream.get_final_completion()


def test_a_pydantic_model_is_a_response_format(running):
    for found in asked(running, "Paris? j", response_format=City, max_tokens=40):
        assert (found.choices[0].message.parsed, found.choices[0].finish_reason) == (
            City(name="Paris", country="France"),
            "stop",
        )


def test_a_call_that_must_be_one_is_parsed(running):
    add = openai.pydantic_function_tool(create_model("add", a=int, b=int))
    for found in asked(running, "1 + 2? f", tools=[add], tool_choice="required", max_tokens=40):
        [call] = found.choices[0].message.tool_calls
        assert (call.function.parsed_arguments.model_dump(), found.choices[0].finish_reason) == (
            {"a": 1, "b": 2},
            "tool_calls",
        )


def test_what_the_template_reads_of_a_call_that_came_back(running):
    """The id, the arguments and the reasoning reach the template; `count_tokens` of the two prompts shows it."""
    history = [{"role": "user", "content": "t"}, {"role": "assistant", "content": None, "reasoning_content": "abcd"}]
    history[1]["tool_calls"] = [{"id": "x" * 9, "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    history.append({"role": "tool", "tool_call_id": "x" * 9, "content": "3"})
    long = ask(running, history, max_tokens=1).usage.prompt_tokens
    history[1].pop("reasoning_content")
    assert long - ask(running, history, max_tokens=1).usage.prompt_tokens == 4
    history[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    assert long - ask(running, history, max_tokens=1).usage.prompt_tokens == 4 - len('"a": 1')


def test_marks_that_are_special_tokens_stay_out_of_text_without_tools(running):
    [choice] = ask(running, [{"role": "user", "content": "m"}], tools=None or []).choices
    assert choice.message.content == '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    assert choice.message.tool_calls is None


def test_probabilities_of_a_streamed_call_lose_no_token(running):
    tokens = [
        entry.token
        for chunk in ask(running, [{"role": "user", "content": "h"}], stream=True, logprobs=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert tokens == [*SCRIPTS["h"], "<|eos|>"]


@pytest.mark.parametrize(
    ("extra", "content"),
    [
        (
            {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": {}}}]},
            None,
        ),
        ({"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": None}}]}, ""),
        ({"tool_calls": [], "annotations": [], "refusal": None, "audio": None, "function_call": None}, "Yes."),
        ({"parsed": {"a": 1}, "provider_specific_fields": {}, "cache_control": {"type": "ephemeral"}}, "Yes."),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "a"}], "reasoning_details": [], "id": "msg_1"}, "Yes."),
        ({"type": "message", "status": "completed", "images": [], "timestamp": 1, "tool_name": "add"}, "Yes."),
        ({"tool_calls": [{"function": FUNCTION, "extra_content": {}, "provider_specific_fields": {}}]}, None),
        ({"refusal": "I may not."}, None),
        (
            {"reasoning": "hm", "name": "bot"},
            [{"type": "text", "text": "Yes.", "cache_control": {"type": "ephemeral"}}],
        ),
        ({}, [{"type": "refusal", "refusal": "I may not."}]),
        ({}, []),
        ({}, None),
    ],
)
def test_answers_of_other_servers_are_accepted(running, extra, content):
    history = [{"role": "user", "content": "t"}, {"role": "assistant", "content": content} | extra]
    assert ask(running, [*history, {"role": "user", "content": "t"}]).choices[0].message.content == "Just text < "


def test_the_terminals_chat_shows_reasoning_and_sends_only_the_answer_back(running):
    chat, shown = RemoteChat(f"{running.url}", options={"temperature": 0, "max_tokens": 60}), []
    chat.connect(shown.append)
    shown.clear()
    chat.ask("1 + 2? h", shown.append)
    assert "".join(shown).startswith("<think>\nShall I add?\n</think>\n\nLet me. ")
    assert chat.messages[-1]["content"].startswith("Let me. ")
    chat.close()


def test_a_broken_call_breaks_no_stream(running):
    """Python's values that are no JSON stay text, in a stream too."""
    [choice] = ask(running, [{"role": "user", "content": "p"}]).choices
    assert (choice.message.content, choice.finish_reason) == ("[add(a={1, 2}, b=3)]", "stop")
    message, finish = deltas(running, [{"role": "user", "content": "p"}])
    assert (message["content"], finish) == ("[add(a={1, 2}, b=3)]", "stop")


def test_a_silent_stream_sends_comments(running, monkeypatch):
    """Clients give up on a connection that is silent while a long call is written."""
    monkeypatch.setattr(response, "QUIET_S", 0.0)
    body = {"messages": [{"role": "user", "content": "l"}], "tools": [ADD], "temperature": 0, "stream": True}
    text = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).text
    assert response.COMMENT in text
    assert deltas(running, body["messages"])[1] == "tool_calls"


def test_an_answer_goes_on_inside_its_reasoning(running):
    history = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "<think>\nLet us see t"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    [choice] = ask(running, history, extra_body=more).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Just text <", "")


def test_parts_are_joined_by_a_line_break(running):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "t"}]
    joined, lines, spaces = (
        ask(running, [{"role": "user", "content": content}], max_tokens=1).usage.prompt_tokens
        for content in (parts, "a\nt", "at")
    )
    assert joined == lines == spaces + 1


def test_a_picture_is_refused_by_name(running):
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    found = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert found.status_code == 400
    assert "messages.0.content" in found.json()["error"]["param"]
