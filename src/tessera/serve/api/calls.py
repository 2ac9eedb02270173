"""Find tool calls in an answer, in each of the forms in which model families write them (`call_forms`)."""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.serve.api.call_forms import BARE, BLOCK, FORMS, LANGUAGE, LEFT, Call, Form, Tools, call_of, past, value_at

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Characters of a call's id. Mistral's templates demand nine letters and digits; all others take any id."""
MOST_TRIES = 64
"""Marks without a call after which the rest of an answer is text. Each may cost a reading of the whole rest."""
WINDOW = 256
"""Characters after a mark that tell whether a call may begin there."""

KEYS = ('"name"', '"arguments"', '"parameters"', '"function"', '"type"', '"id"')
"""Keys with which a call without a sure mark can begin."""
BY_MARK = {form.mark: form for form in FORMS}
MARK = re.compile("|".join(map(re.escape, BY_MARK)))
LONGEST = max(map(len, BY_MARK))


def split(text: str, tools: Tools, *, start: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer, or the rest of it, into text and calls in OpenAI's form; `start` allows a call without a mark.

    A call that is incomplete, has no name, has arguments that are not JSON, or has none although its tool requires some
    stays text: a tool must not run with other arguments than the model meant.
    """
    plain, calls, at, shown, tries = "", [], 0, 0, 0
    while tries < MOST_TRIES and (place := _next(text, at, start)):
        index, form = place
        start = False
        made = _calls(text, form, index + len(form.mark), tools)
        if made is None:
            at, tries = max(index + len(form.mark), at), tries + 1
            continue
        plain += text[shown:index]
        calls += made[0]
        at = shown = made[1]
    plain += text[shown:]
    return (LEFT.sub("", plain).strip() if calls else plain), calls


def forced(text: str) -> dict[str, Any] | None:
    """Return the call that a whole answer is; None if it is not the JSON of a call."""
    found = value_at(text, 0)
    call = found and call_of(found[0])
    return _written(call) if call else None


def finish_of(reason: str, text: str, calls: Sequence[Any]) -> str:
    """Return why an answer ended. If the limit has cut a call, the client must learn that calls are missing."""
    cut = reason == "length" and MARK.search(text)
    return "tool_calls" if calls and not cut else reason


def safe_end(text: str, tools: Tools, *, start: bool = True, settle: bool = True) -> int:
    """Return how many characters at the start of a growing answer, or of its rest, cannot be part of a tool call.

    `start` is as in `split`. With `settle`, complete JSON that is no call is safe; that takes time to find out.
    """
    at = tries = 0
    while tries < MOST_TRIES and (place := _next(text, at, start)):
        index, form = place
        start, after = False, index + len(form.mark)
        if _may_begin(text[after : after + WINDOW], form, tools) and not (
            settle and _is_none(text, form, after, tools)
        ):
            return index
        at, tries = after, tries + 1
    tail = max(at, len(text) - LONGEST + 1)
    partial = (index for index in range(tail, len(text)) if any(mark.startswith(text[index:]) for mark in BY_MARK))
    return len(text) if tries == MOST_TRIES else next(partial, len(text))


def _next(text: str, at: int, start: bool) -> tuple[int, Form] | None:
    """Return the index and form of the first mark from an index on; with `start`, that may be BARE."""
    begin = past(text, 0)
    if start and (begin == len(text) or text[begin] in "{[") and not MARK.match(text, begin):
        return 0, BARE
    found = MARK.search(text, at)
    return found and (found.start(), BY_MARK[found[0]])


def _calls(text: str, form: Form, at: int, tools: Tools) -> tuple[list[dict[str, Any]], int] | None:
    found = form.read(text, at, tools)
    if found is None or not all(_valid(call, tools, form.sure) for call in found.calls):
        return None
    made = [_written(call) for call in found.calls]
    return None if None in made else (made, found.end)


def _may_begin(text: str, form: Form, tools: Tools) -> bool:
    """Return whether a growing text after a mark may become a call."""
    if form.mark == BLOCK:
        if LANGUAGE.startswith(text):
            return True
        text = text.removeprefix(LANGUAGE)
    rest = text.lstrip()
    if not rest or (form.sure and not form.begins):
        return True
    if form.sure:
        return rest[0] in form.begins
    if not form.begins:
        return any(_agree(name, rest) for name in tools)
    if rest.startswith("["):
        rest = rest[1:].lstrip()
        if any(_agree(name, rest) for name in tools):
            return True
    return not rest or (rest[0] == "{" and any(_agree(key, rest[1:].lstrip()) for key in KEYS))


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _is_none(text: str, form: Form, at: int, tools: Tools) -> bool:
    """Return whether the JSON after a mark is complete, and is no call."""
    at = past(text, at + len(LANGUAGE) * (form.mark == BLOCK and text.startswith(LANGUAGE, at)))
    complete = text.startswith(("{", "["), at) and value_at(text, at) is not None
    return complete and _calls(text, form, at, tools) is None


def _valid(call: Call, tools: Tools, sure: bool) -> bool:
    if call.name not in tools:
        return sure
    return call.arguments is not None or (sure and not tools[call.name].get("required"))


def _written(call: Call) -> dict[str, Any] | None:
    """Return the call as OpenAI's API writes it; None if its arguments are not JSON."""
    try:
        arguments = json.dumps(call.arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    function = {"name": _utf8(call.name), "arguments": _utf8(arguments)}
    id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
    return {"id": id, "type": "function", "function": function}


def _utf8(text: str) -> str:
    """Return the text with its lone surrogates, which have no UTF-8 bytes, as JSON's escapes, such as \\ud83d."""
    return text.encode(errors="backslashreplace").decode()


def schemas(tools: Sequence[Mapping[str, Any]]) -> Tools:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
