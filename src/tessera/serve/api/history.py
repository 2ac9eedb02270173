"""Give the calls and results of a conversation the form that a model's chat template takes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from tessera.models.text.template_traits import SHORT_ID, Traits
from tessera.serve.api.call_forms import CLOSE, OPEN
from tessera.serve.api.calls import ID_CHARACTERS

Message = Mapping[str, Any]

TEACH = """You may call these functions:
{tools}
To call one, answer with {open}{{"name": NAME, "arguments": ARGUMENTS}}{close} and nothing else."""


def fitted(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """Return the messages with calls, results, ids and null content as a template with these traits takes them.

    Results get the name of their function, and the id of their call if they have none.
    """
    found: list[dict[str, Any]] = []
    waiting: list[Message] = []  # calls whose results have not come yet
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            call = next((call for call in waiting if given in (None, call["given"])), None)
            waiting = [other for other in waiting if other is not call]
            id = call["id"] if call else given or ""
            own = {"content": message["content"] or "", "tool_call_id": _short(id) if traits.short_ids else id}
            found.append(({"name": call["function"]["name"]} if call else {}) | message | own)
        elif "tool_calls" in message:
            waiting = list(_numbered(message["tool_calls"], index))
            found += _asked({**message, "tool_calls": waiting}, traits)
        else:
            found.append({**message, "content": message["content"] or ""})
    return found if traits.several else list(_one_by_one(found))


def _numbered(calls: Sequence[Message], index: int) -> Iterator[dict[str, Any]]:
    """Yield the calls of a message, each with an id that no other has; "given" is the id that the client gave."""
    seen: set[str] = set()
    for place, call in enumerate(calls):
        given = call.get("id")
        id = given if given and given not in seen else f"call{index:04}{place}"
        seen.add(id)
        yield {**call, "id": id, "given": given or id}


def _asked(message: Message, traits: Traits) -> Iterator[dict[str, Any]]:
    """Yield a message that has calls, as one or, if the template would lose the calls, as two messages."""
    content, silent = message["content"], None if traits.null_content else ""
    if content and not traits.beside_text:
        yield {key: value for key, value in message.items() if key != "tool_calls"}
        message = {"role": message["role"]} | {"tool_calls": message["tool_calls"]}
        content = ""
    yield {
        **message,
        "content": content or silent,
        "tool_calls": [_call(call, traits) for call in message["tool_calls"]],
    }


def _one_by_one(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages with one call each, and each call's results after it."""
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        count = next((at for at, later in enumerate(left) if later["role"] != "tool"), len(left))
        results, left = left[:count], left[count:]
        for index, call in enumerate(calls):
            last = index == len(calls) - 1
            own = [result for result in results if last or result["tool_call_id"] == call["id"]]
            results = [result for result in results if result not in own]
            yield {**message, "tool_calls": [call]}
            yield from own
            message = {"role": message["role"], "content": message["content"] and None}


def _call(call: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if traits.text_arguments:
        arguments = (
            (arguments or "{}") if isinstance(arguments, str | None) else json.dumps(arguments, ensure_ascii=False)
        )
    else:
        arguments = parsed(arguments)
    id = _short(call["id"]) if traits.short_ids else call["id"]
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; none, null and an empty text are an empty one."""
    found = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments
    if found and not isinstance(found, dict) or found in (False, 0):
        raise ValueError("not an object")
    return found or {}


def _short(id: str) -> str:
    """Return an id of SHORT_ID letters and digits; the same one for the same id."""
    if re.fullmatch(rf"[A-Za-z0-9]{{{SHORT_ID}}}", id):
        return id
    number = int.from_bytes(blake2b(id.encode(errors="backslashreplace"), digest_size=8).digest())
    return "".join(
        ID_CHARACTERS[number // len(ID_CHARACTERS) ** place % len(ID_CHARACTERS)] for place in range(SHORT_ID)
    )


def told(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with calls and results as plain text, for a template that knows neither.

    Results, and what the user says after them, are one message of the user: some templates demand that roles alternate.
    """
    found: list[dict[str, Any]] = []
    result = False  # whether the last message holds a result
    for message in messages:
        text = message["content"] or ""
        for call in message.get("tool_calls", ()):
            function = {"name": call["function"]["name"], "arguments": parsed(call["function"]["arguments"])}
            text += OPEN + json.dumps(function, ensure_ascii=False) + CLOSE
        others = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        own = message["role"] in ("tool", "user")
        if own and (result or message["role"] == "tool") and found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({**others, "role": "user" if own else message["role"], "content": text})
        result = own and (result or message["role"] == "tool")
    return found


def taught(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tools described in the system message, for a template that describes none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = TEACH.format(tools=lines, open=OPEN, close=CLOSE)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{system}"}, *rest]
    return [{"role": "system", "content": system}, *messages]


def without_system(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the system message at the start of the next one, for a template that takes none."""
    first, *rest = messages
    if first["role"] != "system" or not rest or rest[0]["role"] != "user":
        return list(messages)
    return [{**rest[0], "content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
