"""Tool calls: found in answers, forced by a grammar, shown to templates; random cuts of a stream change nothing."""

import asyncio
import json
import random
import re
from dataclasses import replace

import httpx2 as httpx
import pytest
from tiny import CONFIG, save_tiny

from tessera.generate import load
from tessera.models.text.tokenizer import BYTE_TEMPLATE, byte_tokenizer
from tessera.serve import warm
from tessera.serve.api import calls as calls_module
from tessera.serve.api.calls import finish_of, schemas, split
from tessera.serve.api.speech import THOUGHTS, Speech
from tessera.serve.api.tools import call_schema, conversation
from tessera.serve.app import create
from tessera.serve.edge.bodies import Bodies
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service
from tessera.serve.site import Site

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
SUM = ("add", {"a": 1, "b": 2})
TOOLS = schemas([ADD, STOP])
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
XML = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
2
</parameter>
</function>
</tool_call>"""


def names(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ("no call", "no call", []),
        (CALL, "", [SUM]),
        (f"Let me see. {CALL}\n{CALL.replace('1', '7')}", "Let me see.", [SUM, ("add", {"a": 7, "b": 2})]),
        (CALL.replace("arguments", "parameters"), "", [SUM]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [SUM]),
        (
            '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("x", {"a": "</tool_call>"})],
        ),
        ('<tool_call>{"name": "x", "arguments": {"a": "two\nlines"}}</tool_call>', "", [("x", {"a": "two\nlines"})]),
        ('<tool_call>{"type": "function", "function": {"name": "stop", "arguments": null}}', "", [("stop", {})]),
        (CALL[:-12], "", [SUM]),  # no end mark
        (CALL[:-12] + "}\n</tool_call> Done.", "Done.", [SUM]),  # one brace too many
        ('<tool_call>[{"name": "stop", "arguments": {}}]</tool_call>', "", [("stop", {})]),
        ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", {})]),
        (XML, "", [SUM]),
        ('<function=add>{"a": 1, "b": 2}</function>', "", [SUM]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [SUM]),
        (
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "stop", "parameters": {}}',
            "",
            [SUM, ("stop", {})],
        ),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [SUM]),
        ("<|python_tag|>add.call(a=1, b=2)", "", [SUM]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "", [SUM]),  # only the end mark
        ("[add(a=1, b=2), stop()]", "", [SUM, ("stop", {})]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]', "", [SUM]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]stop{}', "", [SUM, ("stop", {})]),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}', "", [SUM]),
        (f"First. {DEEPSEEK}", "First.", [SUM]),
        (DEEPSEEK.replace("function<｜tool▁sep｜>add\n```json\n", "add<｜tool▁sep｜>").replace("\n```", ""), "", [SUM]),
        ('```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', "", [SUM]),
    ],
)
def test_calls_are_found_in_every_familys_form(text, plain, calls):
    found, made = split(text, TOOLS)
    assert (found, names(made)) == (plain, calls)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call["id"]) for call in made)  # Mistral's templates take no other ids
    assert len({call["id"] for call in made}) == len(made)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call> end",
        CALL[:-14],  # cut by max_tokens: the arguments may be incomplete
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "x", "arguments": "y"}</tool_call>',
        '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',  # add requires arguments
        '<tool_call>{"name": "add", "args": {"a": 1, "b": 2}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '{"name": "bob", "arguments": {}}',  # no such tool: an answer in JSON
        '{"name": "add"}',
        "[1, 2]",
        "[add(1, 2)]",
        '```json\n{"name": "bob"}\n```',
        "<|python_tag|>print(1)",
        "[TOOL_CALLS] none",
        "<｜tool▁calls▁begin｜>none",
    ],
)
def test_all_else_stays_text(text):
    assert split(text, TOOLS) == (text, [])


def test_lone_surrogates_in_calls_have_bytes():
    text = '<tool_call>{"name": "x\\ud83d", "arguments": {"\\ud83d": "é\\udfff\\ud83d\\ude00"}}</tool_call>'
    plain, made = split(text, {})
    assert (plain, names(made)) == ("", [("x\\ud83d", {"\ud83d": "é\udfff😀"})])
    json.dumps(made, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    [
        *("plain <tool", f"before {CALL} after", "a < b <tool_call> c", "<<tool_call", "x", XML, DEEPSEEK, " [1, 2] x"),
        *('{"name": "add", "parameters": {"a": 1, "b": 2}}', '{"name": "bob"}', "[add(a=1, b=2)]", "[TOOL_", "``` x"),
        *(
            '```json\n{"name": "stop", "arguments": {}}\n```',
            "```python\nprint({})\n```\nso",
            "<|python_tag|>stop.call()",
        ),
        *(
            f"<think>\na {CALL} b\n</think>\n\nyes {CALL}",
            "<think>\n a",
            "<think></think>",
            "<thin air",
            " <think>a</thi",
        ),
    ],
)
def test_a_stream_shows_no_part_of_a_call_and_loses_nothing(text):
    rng = random.Random(len(text))
    whole, expected = Speech(TOOLS, thoughts=THOUGHTS).whole(text)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        speech, shown = Speech(TOOLS, thoughts=THOUGHTS), []
        for start, end in zip([0, *cuts], [*cuts, len(text)]):
            shown.append(speech.push(text[start:end]))
        rest, calls = speech.finish()
        reasoning, plain = ("".join(parts) for parts in zip(*shown, rest))
        assert reasoning == whole.reasoning
        assert "".join(plain.split()) == "".join(whole.text.split())
        assert names(calls) == names(expected)
        assert not expected or "arguments" not in "".join(said.text for said in shown)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "plain"),
    [
        (f"<think>\nTry {CALL}?\n</think>\n\nNo.", None, f"Try {CALL}?", "No."),
        ("hm\n</think>\n\nYes.", THOUGHTS[0], "hm", "Yes."),  # the prompt ends with <think>
        ("\nhm", THOUGHTS[0], "hm", ""),
        ("[THINK]hm[/THINK]Yes.", None, "hm", "Yes."),
        ("Use <think> and </think>.", None, "", "Use <think> and </think>."),
    ],
)
def test_reasoning_is_split_off_and_holds_no_calls(text, thinking, reasoning, plain):
    said, calls = Speech(TOOLS, thoughts=THOUGHTS, thinking=thinking).whole(text)
    assert (said.reasoning, said.text, calls) == (reasoning, plain, [])
    assert Speech(TOOLS).whole("<think>a</think>")[0].text == "<think>a</think>"  # of a model without such marks


def test_one_call_counts_if_the_client_wants_no_parallel_ones():
    assert len(Speech(TOOLS).whole(CALL + CALL)[1]) == 2
    assert len(Speech(TOOLS, single=True).whole(CALL + CALL)[1]) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(
            ("abc", "abc"),
            ("abc<", "abc"),
            ("abc<tool_call", "abc"),
            ("abc<tool_call>d", "abc<tool_call>d"),
            ("a<b", "a<b"),
        ),
        *(("{", ""), ('{"na', ""), ('{"x"', '{"x"'), ("[", ""), ("[ad", ""), ("[1", "[1"), ("``", ""), ("```js", "")),
        ("```py", "```py"),
    ],
)
def test_text_that_is_no_call_is_shown_at_once(text, shown):
    assert Speech(TOOLS).push(text).text == shown


# --- the form in which a template takes a history

QUESTION = {"role": "user", "content": "1 + 2?"}
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_0001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"id": "call_0002", "type": "function", "function": {"name": "stop", "arguments": ""}},
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": f"call_000{index}", "content": f"result {index}"} for index in (1, 2)]
CALLS = "{% for m in messages %}[{{ m.role }}{% if m.content is not none %}:{{ m.content }}{% endif %}"
IDS = "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
OBJECTS = "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]{% endfor %}"
TEXTS = "({{ c.function.name }} {{ '' + c.function.arguments }}){% endfor %}]{% endfor %}"
EACH = "{% for c in m.tool_calls or [] %}"
ALONE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
SILENT = "{% for c in (m.tool_calls or [] if m.content is none else []) %}"
JOINED = "{% for m in messages %}[{{ m.role + m.content }}" + EACH


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CALLS + EACH + OBJECTS, '[assistant(add {"a": 1, "b": 2})(stop {})][tool:result 1][tool:result 2]'),
        (CALLS + EACH + TEXTS, '[assistant(add {"a": 1, "b": 2})(stop {})][tool:result 1][tool:result 2]'),
        (CALLS + IDS + OBJECTS, '[assistant(add {"a": 1, "b": 2})(stop {})][tool:result 1][tool:result 2]'),
        (
            CALLS + ALONE + EACH + OBJECTS,
            '[assistant(add {"a": 1, "b": 2})][tool:result 1][assistant(stop {})][tool:result 2]',
        ),
        (JOINED + OBJECTS, '[assistant(add {"a": 1, "b": 2})(stop {})][toolresult 1][toolresult 2]'),
        (
            "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}",
            '[assistant:<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
            '<tool_call>{"name": "stop", "arguments": {}}</tool_call>][user:result 1\nresult 2]',
        ),
    ],
)  # fmt: skip
def test_a_history_gets_the_form_that_its_template_takes(template, expected):
    tokenizer = replace(byte_tokenizer(), chat_template=template)
    shown = tokenizer.render_chat(**conversation(tokenizer, [QUESTION, ASKED, *RESULTS], []))
    assert shown.partition("]")[2] == expected
    assert shown.startswith("[user")


def test_a_call_that_a_template_would_lose_is_split_off_its_text():
    tokenizer = replace(byte_tokenizer(), chat_template=CALLS + SILENT + TEXTS)
    messages = [QUESTION, ASKED | {"content": "Let me see."}, *RESULTS]
    shown = tokenizer.render_chat(**conversation(tokenizer, messages, []))
    assert "[assistant:Let me see.][assistant(add" in shown
    shown = tokenizer.render_chat(**conversation(tokenizer, [QUESTION, ASKED | {"content": ""}, *RESULTS], []))
    assert "?][assistant(add" in shown


def test_results_get_names_and_ids_that_fit_their_calls():
    tokenizer = replace(byte_tokenizer(), chat_template=CALLS + IDS + OBJECTS)
    first, second = ASKED["tool_calls"]
    asked = ASKED | {"tool_calls": [first, {**second, "id": None}]}
    results = [RESULTS[0], {"role": "tool", "content": "result 2"}]
    found = conversation(tokenizer, [QUESTION, asked, *results], [])["messages"]
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert [(m["tool_call_id"], m["name"]) for m in found[2:]] == list(zip(ids, ("add", "stop")))
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)


MUTE = replace(byte_tokenizer(), chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}")
"""Tokenizer of a model whose template writes messages, but neither tools nor calls."""


def test_a_model_that_knows_no_tools_is_taught_them():
    system, question, call, answer = conversation(MUTE, [QUESTION, ASKED, *RESULTS], [ADD])["messages"]
    assert system["role"] == "system"
    assert "Add two numbers" in system["content"]
    assert question["content"] == "1 + 2?"
    assert names(split(call["content"], TOOLS)[1]) == [SUM, ("stop", {})]
    assert (answer["role"], answer["content"]) == ("user", "result 1\nresult 2")
    first, *rest = conversation(byte_tokenizer(), [QUESTION, ASKED, *RESULTS], [ADD])["messages"]
    assert first == {"role": "user", "content": f"{system['content']}\n\n1 + 2?"}  # the template has no system message
    assert rest == [call, answer]


def test_a_model_is_taught_no_tools_if_none_are_offered():
    found = conversation(byte_tokenizer(), [QUESTION, ASKED, *RESULTS], [])["messages"]
    assert [message["role"] for message in found] == ["user", "assistant", "user"]


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


# --- what an attacker found


@pytest.mark.parametrize(
    "text",
    [
        *("[add(a={1, 2}, b=3)]", '[add(a=b"x", b=1)]', "[add(a=..., b=1)]", "[add(a=1j, b={(1, 2): 3})]"),
        *("<|python_tag|>add.call(a={1, 2})", f"[add(a=0x{'f' * 4000}, b=1)]", '[add(**{"a": 1})]', "[add(a=x, b=1)]"),
        *('<tool_call>{"name": "add", "arguments": {"a": NaN, "b": 1}}</tool_call>',),
        *('<tool_call>{"name": "add", "arguments": {"a": 1e400, "b": 1}}</tool_call>',),
        *('<tool_call>{"name": "add", "arguments": null}</tool_call>', '{"name": "add", "arguments": ""}'),
        "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2",  # cut: b may be longer
        "<tool_call><function=add><parameter=a>1</parameter>",
        *(
            "<function=add>",
            "<function=add>Paris</function>",
            "<function=add>[1]</function>",
            "Write <function=add> so.",
        ),
        '{"name": "add", "description": "Add", "parameters": {"type": "object", "properties": {}}}',  # a definition
    ],
)
def test_calls_that_would_run_with_other_arguments_stay_text(text):
    assert split(text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "<function=put><parameter=text>see </parameter> here</parameter></function>",
            {"text": "see </parameter> here"},
        ),
        ("<function=put><parameter=text>12</function>", {"text": "12"}),  # its type is text or null
        ("<function=put><parameter=text>null</parameter></function>", {"text": None}),
        (
            "<function=put><parameter=size>12</parameter><parameter=on>True</parameter></function>",
            {"size": 12, "on": True},
        ),
        ("[put(on=true, text=null, size=-1)]", {"on": True, "text": None, "size": -1}),
        ('[put(text="\\d")]', {"text": "\\d"}),
        ('<tool_call>\n```json\n{"name": "put", "arguments": {"size": 1}}\n```\n</tool_call>', {"size": 1}),
        ('```\n<tool_call>{"name": "put", "arguments": {"size": 1}}</tool_call>\n```', {"size": 1}),
        ('<tool_call>{"name": "put", "arguments": {"size": 1}}</tool_call>\n</tool_call>', {"size": 1}),
        ('<TOOLCALL>[{"name": "put", "arguments": {"size": 1}}]</TOOLCALL>', {"size": 1}),
        ('<function name="put">{"size": 1}</function>', {"size": 1}),
        ('>>>put\n{"size": 1}', {"size": 1}),
        (' functools[{"name": "put", "arguments": {"size": 1}}]', {"size": 1}),
        ('<|tool_call|>[{"name": "put", "arguments": {"size": 1}}]', {"size": 1}),
        (DEEPSEEK.replace("▁calls▁begin", "_calls_begin").replace("add", "put"), {"a": 1, "b": 2}),
        ("<｜tool▁calls｜>function<｜tool▁sep｜>put\n```json\n{}\n```<｜tool▁call▁end｜>", {}),
    ],
)
def test_odd_spellings_of_a_call_are_read(text, arguments):
    kinds = {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "on": {"type": "boolean"}}
    assert split(text, {"put": {"properties": kinds}})[0] == ""
    assert names(split(text, {"put": {"properties": kinds}})[1]) == [("put", arguments)]


@pytest.mark.parametrize(
    ("mark", "count"),
    [
        *(("[TOOL_CALLS]a" + " " * 1000, 1000), ("<function=a><parameter=b>\n", 10_000), ("<tool_call>[", 20_000)),
        *(("<|python_tag|>a.call(", 10_000), ("<｜tool▁call▁begin｜>a<｜tool▁sep｜>{", 10_000), ("```\n{", 20_000)),
    ],
)
def test_a_hostile_answer_is_read_a_few_times(monkeypatch, mark, count):
    """Each reading may take time in proportion to the whole answer."""
    reads = []
    read = calls_module._calls
    monkeypatch.setattr(calls_module, "_calls", lambda *args: reads.append(args) or read(*args))
    assert split(mark * count, TOOLS)[1] == []
    assert Speech(TOOLS).whole(mark * count)[0].text == mark * count
    assert len(reads) <= 3 * calls_module.MOST_TRIES


def test_json_that_is_no_call_is_shown_when_it_is_complete():
    speech = Speech(TOOLS)
    assert speech.push('```json\n{"name": "pkg",').text == ""
    assert speech.push('\n"version": 1').text == ""
    assert speech.push("}\n```\nThat is").text == '```json\n{"name": "pkg",\n"version": 1}\n```\nThat is'
    assert Speech(TOOLS).push("Use <tool_call> tags.").text == "Use <tool_call> tags."


def test_a_limit_that_cuts_a_later_call_is_told():
    text, calls = split(CALL + '<tool_call>{"name": "add", "arg', TOOLS)
    assert finish_of("length", text, calls) == "length"
    assert [finish_of("length", "", calls), finish_of("stop", "a", calls), finish_of("stop", "a", [])] == [
        *("tool_calls", "tool_calls", "stop")
    ]


def test_ids_that_come_twice_are_told_apart():
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "null"}}
    other = call | {"function": {"name": "stop", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": "call_0", "content": text} for text in ("first", "second")]
    template = CALLS + ALONE + EACH + OBJECTS
    tokenizer = replace(byte_tokenizer(), chat_template=template)
    found = conversation(
        tokenizer, [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call, other]}, *results], []
    )
    shown = tokenizer.render_chat(**found).partition("]")[2]
    assert shown == "[assistant(add {})][tool:first][assistant(stop {})][tool:second]"


def test_what_the_user_says_after_results_joins_them():
    question = {"role": "user", "content": "And now?"}
    *_, last = conversation(byte_tokenizer(), [QUESTION, ASKED, *RESULTS, question], [])["messages"]
    assert last == {"role": "user", "content": "result 1\nresult 2\nAnd now?"}


def test_a_system_message_goes_to_the_user_if_the_template_takes_none():
    found = conversation(byte_tokenizer(), [{"role": "system", "content": "Be brief."}, QUESTION], [])
    assert found["messages"] == [{"role": "user", "content": "Be brief.\n\n1 + 2?"}]
