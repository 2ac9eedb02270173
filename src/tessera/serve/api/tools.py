"""Tools: show a conversation with tools to a chat template, and give the schema of a forced call.

If a model's template takes no tools, a system message describes them. If a call is forced (`tool_choice` is "required"
or a function), a grammar makes the whole answer the JSON of one call: {"name": "add", "arguments": {"a": 1}}.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from tessera.models.text.tokenizer import Tokenizer
from tessera.serve.api.history import fitted, taught, told, without_system

DATA = {"const", "enum", "default", "examples"}
"""Keywords of JSON Schema whose values are data, not schemas."""
NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords of JSON Schema whose values are objects with a schema for each name."""


def encode(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **variables: Any
) -> list[int]:
    return tokenizer.encode_chat(**conversation(tokenizer, messages, tools), **variables)


def conversation(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the variables `messages` and, if the chat template describes tools, `tools` of a chat template."""
    used = tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if not used and messages[0]["role"] != "system":
        return {"messages": [{**message, "content": message["content"] or ""} for message in messages]}
    traits = tokenizer.traits(offered=bool(tools))
    teaches = bool(tools) and not traits.tools
    if teaches:
        traits = tokenizer.traits(offered=False)
    found = fitted(messages, traits) if traits.calls or not used else told(messages)
    found = taught(found, tools) if teaches else found
    found = found if traits.system else without_system(found)
    return {"messages": found, "tools": list(tools)} if tools and not teaches else {"messages": found}


def call_schema(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the JSON schema of a call of the tool `name`, or of any with None."""
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
