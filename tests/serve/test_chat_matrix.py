"""Chat requests under seven families' chat templates: the prompts equal transformers', and the calls are found.

golden/make_chat.py describes the templates and made the prompts.
"""

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tessera.models.text.tokenizer import byte_tokenizer
from tessera.serve.api import tools
from tessera.serve.api.calls import schemas
from tessera.serve.api.protocol import ChatBody
from tessera.serve.api.speech import THOUGHTS, Speech

FOLDER = Path(__file__).parents[1] / "golden" / "chat"
GOLDEN = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
FAMILIES = list(GOLDEN["families"])
CELLS = [(family, case) for family, made in GOLDEN["families"].items() for case in made["prompts"]]
ID = re.compile(r'(?<="id": ")\w{9}(?=")|(?<="call_id": ")\w{9}(?=")')
"""Ids in Mistral's prompts. The server chooses them; which of them are equal matters."""


@cache
def tokenizer_of(family):
    template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    return replace(byte_tokenizer(), chat_template=template, specials=GOLDEN["families"][family]["specials"])


def parsed(request):
    return ChatBody.model_validate_json(json.dumps(request))


def conversation(family, request):
    body = parsed(request)
    return tools.conversation(tokenizer_of(family), [message.plain() for message in body.messages], body.offered)


def prompt(family, request):
    """Return the prompt of a request; leave out the tools that the server describes because the template does not."""
    found = conversation(family, request)
    text = tokenizer_of(family).render_chat(**found, **(parsed(request).chat_template_kwargs or {}))
    if "tools" in request and not found.get("tools"):
        first, given = found["messages"][0], request["messages"][0]
        assert first["role"] == "system"
        assert all(tool["function"]["name"] in first["content"] for tool in request["tools"])
        before = parsed({"messages": [given]}).messages[0].plain()["content"] if given["role"] != "user" else ""
        assert first["content"].startswith(before)
        text = text.replace(first["content"], before, 1)
    return text


def numbered(text):
    """Return the text with each id replaced by the number of ids that came before its first use."""
    seen = {}
    return ID.sub(lambda found: f"{seen.setdefault(found[0], len(seen)):09}", text)


@pytest.mark.parametrize(("family", "case"), CELLS)
def test_the_prompt_of_a_request_equals_transformers(family, case):
    assert numbered(prompt(family, GOLDEN["requests"][case])) == numbered(GOLDEN["families"][family]["prompts"][case])


def empty_content(message):
    message["content"] = message["content"] or ""  # which some templates demand to be null, and others not to be


def no_content(message):
    return message["content"] or message.pop("content")


def no_parts(message):
    message["content"] = message["content"] or []


def objects(message):
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "null")


def streamed(message):
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index  # which the server sends, too


def no_type(message):
    for call in message.get("tool_calls", ()):
        del call["type"]


def no_ids(message):
    message.pop("tool_call_id", None)
    for call in message.get("tool_calls", ()):
        del call["id"]


def nulls(message):
    for key in ("name", "refusal", "reasoning_content", "tool_calls", "tool_call_id"):
        message.setdefault(key)


SPELLINGS = (empty_content, no_content, no_parts, objects, streamed, no_type, no_ids, nulls)


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_clients_write_the_same_history_in_several_ways(family, spell):
    """They spell the assistant's calls, and a result without text, in other ways than the golden requests."""
    for case in ("several", "nothing"):
        request = deepcopy(GOLDEN["requests"][case])
        for message in request["messages"]:
            if message["role"] in ("assistant", "tool"):
                spell(message)
        assert request != GOLDEN["requests"][case]
        assert numbered(prompt(family, request)) == numbered(GOLDEN["families"][family]["prompts"][case])


def call_of(messages):
    return next(message for message in messages if "tool_calls" in message)


def as_text(messages):
    function = call_of(messages)["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])


def as_object(messages):
    function = call_of(messages)["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])


def together(messages):
    call_of(messages)["tool_calls"] *= 2


def long_ids(messages):
    call_of(messages)["tool_calls"][0]["id"] = messages[-1]["tool_call_id"] = "call_00000000000000000000000a"


def content(value):
    return lambda messages: call_of(messages).update(content=value)


@pytest.mark.parametrize(
    ("family", "change", "consequence"),
    [
        ("qwen25", as_text, '\\"city\\"'),  # JSON text written as JSON once more
        ("llama31", as_text, '\\"city\\"'),
        ("mistral_v3", as_text, '\\"city\\"'),
        ("hermes2pro", as_text, '\\"city\\"'),
        ("functionary31", as_object, ValueError),
        ("deepseek_r1_distill", as_object, ValueError),
        ("qwen3", content(None), ValueError),
        ("deepseek_r1_distill", content(""), None),  # the call is lost
        ("deepseek_r1_distill", content("Let me look."), None),
        ("llama31", together, ValueError),
        ("mistral_v3", long_ids, ValueError),
        ("hermes2pro", lambda messages: messages[-1].pop("name"), ValueError),
    ],
)
def test_each_rule_of_a_template_matters(family, change, consequence):
    """Each change undoes one thing that the server does to a history. Without it, the prompt fails or is wrong."""
    tokenizer, found = tokenizer_of(family), deepcopy(conversation(family, GOLDEN["requests"]["one"]))
    change(found["messages"])
    if consequence is ValueError:
        with pytest.raises(ValueError, match="the chat template cannot render the conversation"):
            tokenizer.render_chat(**found)
        return
    asked, _, written = tokenizer.render_chat(**found).partition("How is the weather in Paris?")
    assert asked
    assert consequence in written if consequence else "get_weather" not in written


OFFERED = GOLDEN["requests"]["offered"]["tools"]
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 3})
TIME = ("get_time", {"zone": "Europe/Rome"})
WRITTEN = {
    "qwen25": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "Europe/Rome"}}\n</tool_call>',
    ),
    "llama31": (
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
        '; {"name": "get_time", "parameters": {"zone": "Europe/Rome"}}',
    ),
    "mistral_v3": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}, "id": "000000000"}',
        ', {"name": "get_time", "arguments": {"zone": "Europe/Rome"}, "id": "000000001"}]',
    ),
    "hermes2pro": (
        '<tool_call>\n{ "arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}\n</tool_call> ',
        '\n<tool_call>\n{ "arguments": {"zone": "Europe/Rome"}, "name": "get_time"}\n</tool_call> ',
    ),
    "deepseek_r1_distill": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>',
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
        '{"zone": "Europe/Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "functionary31": (
        '<function=get_weather>{"city": "Rome", "days": 3}</function>',
        '<function=get_time>{"zone": "Europe/Rome"}</function>',
    ),
}
WRITTEN["qwen3"] = WRITTEN["qwen25"]
"""The first of two calls as each family's models write them, and the second one after it."""


def answered(family, text, *, size=None):
    """Return reasoning, text and calls of an answer that comes in pieces of `size` characters, or whole."""
    ahead = GOLDEN["families"][family]["prompts"]["plain"].rstrip()
    thinking = next((pair for pair in THOUGHTS if ahead.endswith(pair[0])), None)
    speech = Speech(schemas(OFFERED), thoughts=THOUGHTS, thinking=thinking)
    said = [speech.push(text[at : at + size]) for at in range(0, len(text), size)] if size else [speech.push(text)]
    rest, calls = speech.finish()
    said.append(rest)
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call["id"]) for call in calls)  # which Mistral's templates take back
    return "".join(one.reasoning for one in said), "".join(one.text for one in said).strip(), made


def variants(family):
    """Yield answers of a family's models with their text and calls."""
    first, second = WRITTEN[family]
    one = first + "]" if family == "mistral_v3" else first
    one += "<｜tool▁calls▁end｜>" if family == "deepseek_r1_distill" else ""
    yield one, "", [ROME]
    yield f"\n {one}\n", "", [ROME]
    yield first + second, "", [ROME, TIME]
    if family != "llama31":  # whose calls have no mark, and so are calls only at the start
        yield f"Let me look.\n\n{first}{second}", "Let me look.", [ROME, TIME]
    yield "It is 18 °C in Rome.", "It is 18 °C in Rome.", []
    yield '{"city": "Rome"}', '{"city": "Rome"}', []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_that_a_familys_models_write_are_found(family):
    prompts = GOLDEN["families"][family]["prompts"]
    for part in WRITTEN[family]:  # what the models write is what the template shows them
        assert part.removeprefix("; ") in numbered(prompts["several"])
    opened = prompts["plain"].rstrip().endswith("<think>")
    assert opened == (family == "deepseek_r1_distill")
    for text, plain, calls in variants(family):
        thought = f"Shall I?\n{WRITTEN[family][0]}\nYes."  # calls in the reasoning are none
        answers = [(thought, f"{'' if opened else '<think>'}\n{thought}\n</think>\n\n{text}")]
        answers += [] if opened else [("", text)]
        for reasoning, whole in answers:
            for size in (None, 1, 7):
                assert answered(family, whole, size=size) == (reasoning, plain, calls), (whole, size)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("llama31", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ("llama31", '<|python_tag|>get_weather.call(city="Paris")', [PARIS]),
        ("llama31", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ("llama31", '[get_weather(city="Paris"), get_time(zone="Europe/Rome")]', [PARIS, TIME]),
        ("mistral_v3", '[TOOL_CALLS][{"name":"get_weather","arguments":{"city":"Paris"}}]', [PARIS]),
        ("mistral_v3", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
        ("functionary31", '<function=get_weather>\n{"city": "Paris"}\n</function>', [PARIS]),
        ("functionary31", '<function=get_weather>{"city": "Paris"}', [PARIS]),
        ("hermes2pro", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
        ("qwen25", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```', [PARIS]),
    ],
)
def test_other_forms_that_a_familys_models_write_are_calls(family, text, calls):
    for size in (None, 1, 7):
        assert answered(family, text, size=size) == ("", "", calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_come_back_as_the_model_wrote_them(family):
    """The awkward arguments hold quotes, a line break, and the marks that end a call."""
    prompts, request = GOLDEN["families"][family]["prompts"], GOLDEN["requests"]["awkward"]
    asked, call = request["messages"][:2]
    function = call["tool_calls"][0]["function"]
    _, _, written = prompts["awkward"].rpartition(asked["content"])
    written = written[written.index("{") :] if family == "llama31" else written  # whose calls begin an answer
    written = f"</think>{written}" if family == "deepseek_r1_distill" else written  # whose prompts open the reasoning
    reasoning, _, calls = answered(family, written)
    assert (reasoning, calls) == ("", [(function["name"], json.loads(function["arguments"]))])
