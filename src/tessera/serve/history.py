"""Give the calls and results of a conversation the form that a model's chat template takes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from tessera.models.template_traits import SHORT_ID, Traits
from tessera.serve.calls import CLOSE, ID_CHARACTERS, OPEN

Message = Mapping[str, Any]

TEACH = """You may call these functions:
{tools}
To call one, answer with {open}{{"name": NAME, "arguments": ARGUMENTS}}{close} and nothing else."""


def fitted(messages: Sequence[Message], traits: Traits) -> list[dict[str, Any]]:
    """Return the messages with calls, results, ids and null content as a template with these traits takes them.

    If the template would lose the calls of a message that also has text, or takes one call per message, the message is
    split. Results get the name of their function, and the id of their call if they have none.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the calls whose results have not come yet, by id
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            id = message.get("tool_call_id") or next(iter(names), "")
            named = {"name": names.pop(id)} if id in names else {}
            own = {"content": message["content"] or "", "tool_call_id": _short(id) if traits.short_ids else id}
            found.append({**named, **message, **own})
        elif "tool_calls" in message:
            calls = [
                {**call, "id": call.get("id") or f"call{index:04}{place}"}
                for place, call in enumerate(message["tool_calls"])
            ]
            names = {call["id"]: call["function"]["name"] for call in calls}
            found += _asked({**message, "tool_calls": calls}, traits)
        else:
            found.append({**message, "content": message["content"] or ""})
    return found if traits.several else list(_one_by_one(found))


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


def parsed(arguments: Any) -> Any:
    """Return the arguments of a call as JSON data; none, or an empty text, are an empty object."""
    if not isinstance(arguments, str):
        return arguments or {}
    return json.loads(arguments) if arguments.strip() else {}


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

    Results of one message are one message of the user: some templates demand that the roles alternate.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        text = message["content"] or ""
        for call in message.get("tool_calls", ()):
            function = {"name": call["function"]["name"], "arguments": parsed(call["function"]["arguments"])}
            text += OPEN + json.dumps(function, ensure_ascii=False) + CLOSE
        others = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool" and found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({**others, "role": "user" if message["role"] == "tool" else message["role"], "content": text})
    return found


def taught(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], traits: Traits) -> list[dict[str, Any]]:
    """Return the messages with the tools described in the system message, for a template that describes none.

    If the template takes no system message either, the first message describes them.
    """
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = TEACH.format(tools=lines, open=OPEN, close=CLOSE)
    first, *rest = messages
    if first["role"] == "system" and (traits.system or not rest):
        return [{**first, "content": f"{first['content']}\n\n{system}"}, *rest]
    if traits.system:
        return [{"role": "system", "content": system}, *messages]
    if first["role"] == "system":
        system, (first, *rest) = f"{first['content']}\n\n{system}", rest
    return [{**first, "content": f"{system}\n\n{first['content'] or ''}"}, *rest]
