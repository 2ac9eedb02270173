"""The forms in which model families write tool calls, as a table; `calls` finds calls in an answer with it.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>                      Hermes, Qwen, SmolLM3
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>         Qwen3-Coder
    <function=add>{"a": 1}</function>                                                  Llama 3.1, Functionary
    <|python_tag|>{"name": "add", "parameters": {"a": 1}}; ...                         Llama 3
    <|python_tag|>add.call(a=1)                                                        Llama 3, built-in tools
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                               Mistral
    [TOOL_CALLS]add[ARGS]{"a": 1}                                                      newer Mistral
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add ...                DeepSeek
    <TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>                      Nemotron
    >>>add\\n{"a": 1}                                                                   Functionary 3.2

These marks are unmistakable, except the last. Without one, JSON at the start of an answer or of a code block, and
Llama 3.2's [add(a=1)], is a call only if the request offers a tool of that name.
"""

import ast
import json
import re
import string
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool that a request offers, by the tool's name."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK, LANGUAGE = "```", "json"
"""Mark of a code block in Markdown, and the language that it may name."""
BETWEEN = string.whitespace + ",;"

NAME = r"[\w.-]{1,128}"
FUNCTION = re.compile(rf'\s*+<function(?:=|\s+name=")({NAME})"?>\s*+')
PARAMETER = re.compile(r"\s*+<parameter=([^>]{1,128})>\n?")
PARAMETER_END = re.compile("<parameter=|</function>")
"""A value ends where the next one begins, or the call ends: it may hold any other mark, its own end mark included."""
NAMED = re.compile(rf"\s*+({NAME})\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?(?:\[ARGS\])?\s*+(?=\{{)")
DEEPSEEK = re.compile(
    rf"\s*+(?:<｜tool▁call▁begin｜>\s*+)?(?:function<｜tool▁sep｜>)?({NAME})\s*+(?:<｜tool▁sep｜>)?\s*+(?:```json)?\s*+"
)
DEEPSEEK_END = re.compile(r"\s*+(?:```)?\s*+<｜tool▁call▁end｜>")
DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>", "<｜tool calls begin｜>", "<｜tool\\_calls\\_begin｜>"),
    "<｜tool▁calls｜>",
)
"""The mark, and how distilled models misspell it."""
BUILT_IN = re.compile(rf"\s*+({NAME})\.call(?=\()")


class Call(NamedTuple):
    """A call; `arguments` is None if the model wrote none."""

    name: str
    arguments: dict[str, Any] | None


class Found(NamedTuple):
    """Calls that a form's reader found, and the index of the first character after them."""

    calls: list[Call]
    end: int


Reader = Callable[[str, int, Tools], Found | None]
"""Function that reads the calls after a mark, given text, index and tools; it returns None if there are none."""


class Form(NamedTuple):
    """One form of calls.

    Attributes:
        mark: text with which calls begin; "" means the start of the answer.
        read: reader of what follows.
        sure: whether the mark is enough. If False, each call must also be of a tool that the request offers.
        begins: characters with which a call may begin after the mark; "" means any.
    """

    mark: str
    read: Reader
    sure: bool = True
    begins: str = "{["


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_constant)  # small models write line breaks inside strings


def value_at(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value at an index, after white space, and the index of its end; None if there is none."""
    try:
        return DECODER.raw_decode(text, past(text, at))
    except (ValueError, RecursionError):
        return None


def past(text: str, at: int, characters: str = string.whitespace) -> int:
    """Return the index of the first character from an index on that is none of `characters`."""
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def call_of(value: Any) -> Call | None:
    """Return the call that a JSON value spells; None if it spells none. "parameters" mean "arguments"."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in OpenAI's API
    name = isinstance(value, dict) and value.get("name", value.get("function"))
    if not isinstance(name, str) or ("description" in value and "arguments" not in value):
        return None  # with a description, it is a tool's definition
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    arguments = given[0] if given else None
    if isinstance(arguments, str) and arguments.strip():
        found = value_at(arguments, 0)
        if found is None or not isinstance(found[0], dict):
            return None
        arguments = found[0]
    if arguments in (None, ""):
        return Call(name, None)
    return Call(name, arguments) if isinstance(arguments, dict) else None


def _objects(text: str, at: int, tools: Tools) -> Found | None:
    """Read calls as JSON: objects one after the other, or lists of them; also in a code block."""
    begin = past(text, at)
    if text.startswith(BLOCK, begin):
        found = _block(text, begin + len(BLOCK), tools)
        end = found and past(text, found.end)
        return Found(found.calls, end + len(BLOCK) if text.startswith(BLOCK, end) else found.end) if found else None
    calls: list[Call] = []
    while text.startswith(("{", "["), begin := past(text, at, BETWEEN)) and (found := value_at(text, begin)):
        value, end = found
        made = [call_of(part) for part in (value if isinstance(value, list) else [value])]
        if not made or None in made:
            break
        calls, at = calls + made, end
    return Found(calls, at) if calls else None


def _block(text: str, at: int, tools: Tools) -> Found | None:
    at += len(LANGUAGE) * text.startswith(LANGUAGE, at)
    return None if text.startswith(BLOCK, past(text, at)) else _objects(text, at, tools)


def _closed(close: str, *readers: Reader) -> Reader:
    """Return a reader that tries `readers`, then skips a closing mark, if any, and stray braces before it."""

    def read(text: str, at: int, tools: Tools) -> Found | None:
        found = _either(*readers)(text, at, tools)
        if found is None:
            return None
        after = past(text, found.end, string.whitespace + "}")
        return Found(found.calls, after + len(close)) if text.startswith(close, after) else found

    return read


def _either(*readers: Reader) -> Reader:
    return lambda text, at, tools: next((found for read in readers if (found := read(text, at, tools))), None)


def _tagged(text: str, at: int, tools: Tools) -> Found | None:
    """Read <function=NAME> with a JSON object, or with <parameter=KEY>VALUE</parameter> and </function>.

    Without its end mark, the second kind may lack parameters.
    """
    head = FUNCTION.match(text, at)
    if head is None:
        return None
    name, at, arguments = head[1], head.end(), {}
    plain = text.startswith("{", at)
    if plain:
        found = value_at(text, at)
        if found is None:
            return None
        arguments, at = found
    elif text.find("</function>", at) < 0:
        return None  # cut: the last value may be longer
    else:
        properties = tools.get(name, {}).get("properties", {})
        while part := PARAMETER.match(text, at):
            at = PARAMETER_END.search(text, part.end()).start()
            value = text[part.end() : at].rstrip().removesuffix("</parameter>").removesuffix("\n")
            arguments[part[1]] = _typed(value, properties.get(part[1]))
    end = past(text, at)
    if text.startswith("</function>", end):
        return Found([Call(name, arguments or None)], end + len("</function>"))
    return Found([Call(name, arguments)], at) if plain else None


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value, which is written without quotation marks if it is a text."""
    kinds = _kinds(schema)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    if "boolean" in kinds and text in ("True", "False"):  # as in Python
        return text == "True"
    found = value_at(text, 0)
    return found[0] if found and not text[found[1] :].strip() else text


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type", [])
    kinds = {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= _kinds(part)
    constants = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return kinds | {"string" for each in constants if isinstance(each, str)}


def _mistral(text: str, at: int, tools: Tools) -> Found | None:
    """Read a list of calls, or NAME[ARGS]{...}, in which the mark [ARGS] may be missing."""
    if head := NAMED.match(text, at):
        found = value_at(text, head.end())
        return Found([Call(head[1], found[0])], found[1]) if found and isinstance(found[0], dict) else None
    return _objects(text, at, tools)


def _deepseek(text: str, at: int, tools: Tools) -> Found | None:
    """Read the calls of a list; each has a name, then JSON in a code block or, since V3.1, plain JSON."""
    calls: list[Call] = []
    while (head := DEEPSEEK.match(text, at)) and (found := value_at(text, head.end())) and isinstance(found[0], dict):
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
    found = _python(text[at:].strip()) if text.startswith("[", past(text, at)) else None
    return Found(found, len(text)) if found else None


def _python(text: str) -> list[Call] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape such as "\d" in a string
            tree = ast.parse(text, mode="eval").body
        parts = tree.elts if isinstance(tree, ast.List) else []
        if not all(isinstance(part, ast.Call) and not part.args for part in parts):
            return None
        return [
            Call(ast.unparse(part.func), {_key(word.arg): _literal(word.value) for word in part.keywords})
            for part in parts
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the JSON data that a Python or JSON literal spells; raise ValueError if it spells none."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key and _literal(key)): _literal(value) for key, value in zip(keys, values)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError(f"{type(node).__name__} is no JSON")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{key} is no name")
    return key


def _again(mark: str, read: Reader) -> Reader:
    """Return a reader that reads the mark itself, too."""
    return lambda text, at, tools: read(text, at - len(mark), tools)


FORMS = (
    Form(OPEN, _closed(CLOSE, _objects, _tagged), begins="{[<`"),
    Form("[TOOL_CALLS]", _mistral, begins=""),
    Form("<|python_tag|>", _either(_objects, _built_in), begins=""),
    *(Form(mark, _closed("<｜tool▁calls▁end｜>", _deepseek), begins="") for mark in DEEPSEEK_MARKS),
    Form("<｜tool▁call▁begin｜>", _again("<｜tool▁call▁begin｜>", _deepseek), begins=""),
    Form("<TOOLCALL>", _closed("</TOOLCALL>", _objects)),
    Form("<|tool_call|>", _closed("<|/tool_call|>", _objects)),
    Form("<function=", _again("<function=", _tagged), begins=""),
    Form("<function name=", _again("<function name=", _tagged), begins=""),
    Form(BLOCK, _closed(BLOCK, _block), sure=False),
    Form(">>>", _mistral, sure=False, begins=""),
    Form("functools[", _again("[", _objects), sure=False),
    Form("<tools>", _closed("</tools>", _objects), sure=False),
    Form("<function_call>", _closed("</function_call>", _objects), sure=False),
)
BARE = Form("", _either(_closed(CLOSE, _objects), _list), sure=False)
"""The form without a mark, at the start of an answer."""
LEFT = re.compile(r"</tool_call>|```(?:json)?\s*```")
"""What may be left of marks around calls: a second end mark, an empty code block."""
SPECIAL = frozenset(
    {form.mark for form in FORMS if form.sure}
    | {CLOSE, "[ARGS]", "[CALL_ID]", "</TOOLCALL>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"}
)
"""Parts of calls that are special tokens of some tokenizers, whose names must stay in the answer's text."""
