"""Find tool calls in an answer, in each of the forms in which model families write them.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                      Hermes, Qwen, SmolLM3
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>         Qwen3-Coder
    <function=add>{"a": 1}</function>                                                  Llama 3.1, Functionary
    <|python_tag|>{"name": "add", "parameters": {"a": 1}}; ...                         Llama 3
    <|python_tag|>add.call(a=1)                                                        Llama 3, built-in tools
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                               Mistral
    [TOOL_CALLS]add[ARGS]{"a": 1}                                                      newer Mistral
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add ...                DeepSeek

The marks are unmistakable, so all forms are looked for, whatever the model. Without a mark, JSON at the start of an
answer or of a code block, and Llama 3.2's [add(a=1)], is a call only if the request offers a tool of that name.
"""

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool that a request offers, by the tool's name."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Characters of a call's id. Mistral's templates demand nine letters and digits; all others take any id."""

DECODER = json.JSONDecoder(strict=False)  # small models write line breaks inside strings
NAME = r"[\w.-]{1,128}"
FUNCTION = re.compile(rf"\s*<function=({NAME})>\s*")
PARAMETER = re.compile(r"\s*<parameter=([^>]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
NAMED = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{{)")
DEEPSEEK = re.compile(
    rf"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?({NAME})\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"
)
DEEPSEEK_END = re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>")
BUILT_IN = re.compile(rf"\s*({NAME})\.call(?=\()")
BLOCK, LANGUAGE = "```", "json"
"""Mark of a code block in Markdown, and the language that it may name."""
BETWEEN = string.whitespace + ",;"
"""Characters that may separate calls."""
KEYS = ('"name"', '"arguments"', '"parameters"', '"function"', '"type"', '"id"')
"""Keys with which a call without a mark can begin."""


class Call(NamedTuple):
    """A call; `arguments` is None if the model wrote none."""

    name: str
    arguments: dict[str, Any] | None


class Found(NamedTuple):
    """Calls that a form's reader found, and the index of the first character after them."""

    calls: list[Call]
    end: int


class Form(NamedTuple):
    """One form of calls.

    Attributes:
        mark: text with which calls begin; "" means the start of the answer.
        read: function that reads the calls after the mark, given text, index and tools; None if there are none.
        sure: whether the mark is enough. If False, each call must also be of a tool that the request offers.
    """

    mark: str
    read: Callable[[str, int, Tools], Found | None]
    sure: bool = True


def _value(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value at an index, after white space, and the index of its end; None if there is none."""
    at = _past(text, at)
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _past(text: str, at: int, characters: str = string.whitespace) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _call(value: Any) -> Call | None:
    """Return the call that a JSON value spells; None if it spells none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in OpenAI's API
    name = isinstance(value, dict) and value.get("name", value.get("function"))
    if not isinstance(name, str):
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    arguments = given[0] if given else None
    if isinstance(arguments, str):
        found = _value(arguments, 0) if arguments.strip() else ({}, 0)
        arguments = found and found[0]
    elif given and arguments is None:
        arguments = {}
    if given and not isinstance(arguments, dict):
        return None
    return Call(name, arguments)


def _objects(text: str, at: int, tools: Tools) -> Found | None:
    """Read calls as JSON: objects one after the other, or lists of them."""
    calls: list[Call] = []
    while text.startswith(("{", "["), begin := _past(text, at, BETWEEN)) and (found := _value(text, begin)):
        value, end = found
        made = [_call(part) for part in (value if isinstance(value, list) else [value])]
        if not made or None in made:
            break
        calls, at = calls + made, end
    return Found(calls, at) if calls else None


def _block(text: str, at: int, tools: Tools) -> Found | None:
    """Read calls as JSON in a code block."""
    return _objects(text, at + len(LANGUAGE) * text.startswith(LANGUAGE, at), tools)


def _closed(close: str, *readers: Callable[[str, int, Tools], Found | None]) -> Callable:
    """Return a reader that tries `readers`, then skips a closing mark, if any, and stray braces before it."""

    def read(text: str, at: int, tools: Tools) -> Found | None:
        found = next((found for reader in readers if (found := reader(text, at, tools))), None)
        if found is None:
            return None
        after = _past(text, found.end, string.whitespace + "}")
        return Found(found.calls, after + len(close)) if text.startswith(close, after) else found

    return read


def _tagged(text: str, at: int, tools: Tools) -> Found | None:
    """Read <function=NAME> with a JSON object or with <parameter=KEY>VALUE</parameter>."""
    head = FUNCTION.match(text, at)
    return head and _body(text, head, tools)


def _body(text: str, head: re.Match, tools: Tools) -> Found | None:
    name, at, arguments = head[1], head.end(), {}
    if text.startswith("{", at):
        found = _value(text, at)
        if found is None:
            return None
        arguments, at = found
    else:
        properties = tools.get(name, {}).get("properties", {})
        while part := PARAMETER.match(text, at):
            arguments[part[1]], at = _typed(part[2], properties.get(part[1])), part.end()
    end = _past(text, at)
    return Found([Call(name, arguments)], end + len("</function>") if text.startswith("</function>", end) else at)


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value, which is written without quotation marks if it is a text."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    found = _value(text, 0)
    return found[0] if found and not text[found[1] :].strip() else text


def _mistral(text: str, at: int, tools: Tools) -> Found | None:
    """Read a list of calls, or NAME[ARGS]{...}, in which the mark [ARGS] may be missing."""
    if head := NAMED.match(text, at):
        found = _value(text, head.end())
        return found and isinstance(found[0], dict) and Found([Call(head[1], found[0])], found[1]) or None
    return _objects(text, at, tools)


def _deepseek(text: str, at: int, tools: Tools) -> Found | None:
    """Read the calls of a list; each has a name, then JSON in a code block or, since V3.1, plain JSON."""
    calls: list[Call] = []
    while (head := DEEPSEEK.match(text, at)) and (found := _value(text, head.end())) and isinstance(found[0], dict):
        end = DEEPSEEK_END.match(text, found[1])
        calls, at = [*calls, Call(head[1], found[0])], end.end() if end else found[1]
    return Found(calls, at) if calls else None


def _built_in(text: str, at: int, tools: Tools) -> Found | None:
    """Read Llama 3's NAME.call(KEY=VALUE)."""
    head = BUILT_IN.match(text, at)
    found = head and _python(f"[{head[1]}{text[head.end() :].strip()}]")
    return Found(found, len(text)) if found else None


def _list(text: str, at: int, tools: Tools) -> Found | None:
    """Read Llama 3.2's [NAME(KEY=VALUE), ...], which must be the rest of the answer."""
    found = _python(text[at:].strip()) if text.startswith("[", _past(text, at)) else None
    return Found(found, len(text)) if found else None


def _python(text: str) -> list[Call] | None:
    try:
        tree = ast.parse(text, mode="eval").body
        parts = tree.elts if isinstance(tree, ast.List) else []
        if not all(isinstance(part, ast.Call) and not part.args for part in parts):
            return None
        return [
            Call(ast.unparse(part.func), {word.arg: ast.literal_eval(word.value) for word in part.keywords if word.arg})
            for part in parts
        ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _either(*readers: Callable[[str, int, Tools], Found | None]) -> Callable:
    return lambda text, at, tools: next((found for read in readers if (found := read(text, at, tools))), None)


FORMS: Sequence[Form] = (
    Form(OPEN, _closed(CLOSE, _objects, _tagged)),
    Form("[TOOL_CALLS]", _mistral),
    Form("<|python_tag|>", _either(_objects, _built_in)),
    Form("<｜tool▁calls▁begin｜>", _closed("<｜tool▁calls▁end｜>", _deepseek)),
    Form("<｜tool▁call▁begin｜>", lambda text, at, tools: _deepseek(text, at - len("<｜tool▁call▁begin｜>"), tools)),
    Form("<function=", lambda text, at, tools: _tagged(text, at - len("<function="), tools)),
    Form(BLOCK, _closed(BLOCK, _block), sure=False),
    Form("<tools>", _closed("</tools>", _objects), sure=False),
    Form("<function_call>", _closed("</function_call>", _objects), sure=False),
)
BARE = Form("", _either(_closed(CLOSE, _objects), _list), sure=False)
"""The form without a mark, at the start of an answer."""
BY_MARK = {form.mark: form for form in FORMS}
MARK = re.compile("|".join(map(re.escape, BY_MARK)))
LONGEST = max(map(len, BY_MARK))
SPECIAL = frozenset(
    {
        *(form.mark for form in FORMS if form.sure and form.mark.endswith((">", "]"))),
        *(CLOSE, "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    }
)
"""Parts of calls that are special tokens of some tokenizers, whose names must stay in the answer's text."""


def split(text: str, tools: Tools, *, start: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into text and tool calls; return the calls as OpenAI's API writes them.

    A call that is incomplete, has no name, or has no arguments although its tool requires some stays text: a tool must
    not run with other arguments than the model meant.

    Args:
        text: the answer, or the rest of it.
        tools: the tools that the request offers.
        start: whether the text is the whole answer, which may begin with a call without a mark.
    """
    plain, calls, at, shown = "", [], 0, 0
    while place := _next(text, at, start):
        index, form = place
        found = form.read(text, index + len(form.mark), tools)
        start = False
        if found is None or not all(_valid(call, tools, form.sure) for call in found.calls):
            at = max(index + len(form.mark), at)
            continue
        plain += text[shown:index]
        calls += [_written(call) for call in found.calls]
        at = shown = found.end
    plain += text[shown:]
    return (plain.strip() if calls else plain), calls


def forced(text: str) -> dict[str, Any] | None:
    """Return the call that a whole answer is; None if it is not the JSON of a call."""
    found = _value(text, 0)
    call = found and _call(found[0])
    return _written(call) if call else None


def safe_end(text: str, tools: Tools, *, start: bool = True) -> int:
    """Return how many characters at the start of a growing answer, or of its rest, cannot be part of a tool call.

    `start` is as in `split`.
    """
    at = 0
    while place := _next(text, at, start):
        index, form = place
        start = False
        if form.sure or _may_begin(text[index + len(form.mark) :], form.mark, tools):
            return index
        at = index + len(form.mark)
    tail = max(at, len(text) - LONGEST + 1)
    partial = (index for index in range(tail, len(text)) if any(mark.startswith(text[index:]) for mark in BY_MARK))
    return next(partial, len(text))


def _next(text: str, at: int, start: bool) -> tuple[int, Form] | None:
    """Return the index and form of the first mark from an index on; with `start`, that may be BARE."""
    begin = _past(text, 0)
    if start and (begin == len(text) or text[begin] in "{[") and not MARK.match(text, begin):
        return 0, BARE
    found = MARK.search(text, at)
    return found and (found.start(), BY_MARK[found[0]])


def _may_begin(text: str, mark: str, tools: Tools) -> bool:
    """Return whether a growing text after `mark` may become a call, although the mark is not unmistakable."""
    if mark == BLOCK and LANGUAGE.startswith(text):
        return True
    rest = text.removeprefix(LANGUAGE if mark == BLOCK else "").lstrip()
    if rest.startswith("["):
        rest = rest[1:].lstrip()
        if any(_agree(name, rest) for name in tools):
            return True
    key = rest[1:].lstrip()
    return not rest or (rest[0] == "{" and any(_agree(known, key) for known in KEYS))


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _valid(call: Call, tools: Tools, sure: bool) -> bool:
    if call.name not in tools:
        return sure
    return call.arguments is not None or (sure and not tools[call.name].get("required"))


def _written(call: Call) -> dict[str, Any]:
    arguments = json.dumps(call.arguments or {}, ensure_ascii=False)
    function = {"name": _utf8(call.name), "arguments": _utf8(arguments)}
    return {"id": new_id(), "type": "function", "function": function}


def new_id() -> str:
    """Return a random id of ID_LENGTH letters and digits."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def _utf8(text: str) -> str:
    """Return the text with its lone surrogates, which have no UTF-8 bytes, as JSON's escapes, such as \\ud83d."""
    return text.encode(errors="backslashreplace").decode()


def schemas(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the schema of the parameters of each tool of a request."""
    for tool in tools:
        yield tool["function"]["name"], tool["function"].get("parameters") or {}
