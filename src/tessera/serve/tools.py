"""Tool calls: describe tools to a model, give the schema of a forced call, and find the calls in an answer.

A call is written in the form that Qwen's and Hermes' templates teach, one JSON object between two marks:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

If a model's template takes no tools, a system message describes them. If a call is forced (`tool_choice` is "required"
or a function), a grammar makes the whole answer one call, without the marks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any
from uuid import uuid4

from tessera.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TEACH = """You may call these functions:
{tools}
To call one, answer with {open}{{"name": NAME, "arguments": ARGUMENTS}}{close} and nothing else."""

DATA = {"const", "enum", "default", "examples"}
"""Keywords of JSON Schema whose values are data, not schemas."""
NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords of JSON Schema whose values are objects with a schema for each name."""


def takes_tools(template: str | None) -> bool:
    """Return whether a chat template mentions the variable `tools`."""
    return template is not None and "tools" in template


def encode(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the token ids of a conversation that offers tools; raise ValueError as `Tokenizer.encode_chat` does."""
    used = tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if used and not takes_tools(tokenizer.chat_template):
        messages, tools = taught(messages, tools), []
    return tokenizer.encode_chat(messages, **({"tools": tools} if tools else {}))


def taught(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls and results as plain text, and with the tools described in the system message.

    Without tools, which a conversation may offer no longer after some calls, no system message is added.
    """
    found = []
    for message in messages:
        text = message["content"] or ""
        for call in message.get("tool_calls", ()):
            text += OPEN + json.dumps(call["function"], ensure_ascii=False) + CLOSE
        role = "user" if message["role"] == "tool" else message["role"]
        found.append({"role": role, "content": text})
    if not tools:
        return found
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = TEACH.format(tools=lines, open=OPEN, close=CLOSE)
    if found[0]["role"] == "system":
        found[0]["content"] += "\n\n" + system
        return found
    return [{"role": "system", "content": system}, *found]


def call_schema(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the tools, or of the tool `name`.

    Raises:
        ValueError: the parameters of a tool are not an object.
    """
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if len(wanted) == 1:
        return _call_of(wanted[0], "#")
    return {"anyOf": [_call_of(function, f"#/anyOf/{index}") for index, function in enumerate(wanted)]}


def _call_of(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the JSON schema of a call of one function; `place` is the reference to this schema in the whole schema."""
    parameters = deepcopy(function.get("parameters") or {})
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(
            f"the parameters of the tool {function['name']} have the type {kind!r:.80}, but must be an object"
        )
    parameters["type"] = "object"
    base = str(parameters.pop("$id", "")).removesuffix("#")  # with an id, "#" would still mean the parameters
    for schema in subschemas(parameters):
        reference = str(schema.get("$ref", "")).removeprefix(base)
        if reference == "#" or reference.startswith("#/"):
            schema["$ref"] = f"{place}/properties/arguments{reference[1:]}"
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a JSON schema and all schemas inside it."""
    if isinstance(schema, list):
        for part in schema:
            yield from subschemas(part)
    elif isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            if keyword in NAMED and isinstance(value, dict):
                yield from subschemas(list(value.values()))
            elif keyword not in DATA:
                yield from subschemas(value)


class Speech:
    """Splitter of a growing chat answer into text and tool calls.

    It returns text as soon as the text cannot be part of a call, and the calls at the end.

    Args:
        offered: whether the request offers tools; without tools, everything is text.
        forced: whether a grammar makes the whole answer one call.
        single: whether to return only the first call.
    """

    def __init__(self, *, offered: bool = False, forced: bool = False, single: bool = False):
        self.offered, self.forced, self.single = offered, forced, single
        self._text, self._shown = "", 0

    def push(self, piece: str) -> str:
        """Append a piece of the answer; return the text that may be shown now."""
        if not self.offered:
            return piece
        self._text += piece
        end = 0 if self.forced else safe_end(self._text)
        shown, self._shown = self._text[self._shown : end], max(self._shown, end)
        return shown

    def finish(self, whole: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text that `push` has not returned yet, and the calls.

        If the request offers no tools, return all of `whole`, the complete answer, and no calls.
        """
        if not self.offered:
            return whole, []
        text, calls = split(whole[self._shown :], forced=self.forced)
        return text, calls[:1] if self.single else calls


def split(text: str, *, forced: bool) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into text and tool calls; return the calls as OpenAI's API writes them.

    A call that is incomplete, or is not a JSON object with a name, stays text.

    Args:
        text: the answer, without the text that `Speech.push` has already returned.
        forced: whether a grammar has made the whole answer one call.
    """
    if forced:
        call = _call(text)
        return ("", [call]) if call else (text, [])
    plain, calls = "", []
    while True:
        before, mark, rest = text.partition(OPEN)
        inner, end, after = rest.partition(CLOSE)
        call = _call(inner) if mark and end else None
        if not mark:
            return (plain + text).strip() if calls else plain + text, calls
        if call is None:
            plain, text = plain + before + mark, rest
            continue
        plain, text = plain + before, after
        calls.append(call)


def safe_end(text: str) -> int:
    """Return how many characters at the start of a growing answer cannot be part of a tool call.

    These characters end before the first <tool_call>, or before an incomplete <tool_call> at the end of the text.
    """
    at = text.find(OPEN)
    if at >= 0:
        return at
    held = (count for count in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:count]))
    return len(text) - next(held, 0)


def _call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": _utf8(found["name"]), "arguments": _utf8(json.dumps(arguments, ensure_ascii=False))}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _utf8(text: str) -> str:
    """Return the text with its lone surrogates, which have no UTF-8 bytes, as JSON's escapes, such as \\ud83d."""
    return text.encode(errors="backslashreplace").decode()
