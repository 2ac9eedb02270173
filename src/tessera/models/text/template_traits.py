"""Find out what a chat template does with tools and calls, by rendering small conversations.

Templates disagree: about arguments as an object or as JSON text, about null content, about the length of ids, about
several calls in one message. A template that gets the wrong form fails, or silently leaves the call out. Its source
does not say which form it takes, but its renderings do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tessera.models.text.chat_template import Unavailable

Message = Mapping[str, Any]

QUESTION, TEXT, RESULT, CALLED, OFFERED, KEY, VALUE = (
    f"probed{name}" for name in ("Question", "Text", "Result", "Call", "Tool", "Key", "Value")
)
"""Texts of the small conversations, which no template writes by itself."""
TOOL = {
    "type": "function",
    "function": {
        "name": OFFERED,
        "description": OFFERED,
        "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]},
    },
}
SHORT_ID = 9
"""Length of the ids that Mistral's templates demand, of letters and digits; every template takes them."""
SLOW = "processor time"
"""Words of the error of a template that exceeds its limit on processor time. No further conversation is tried then."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a chat template does with tools and calls."""

    system: bool = True  # it takes a system message
    tools: bool = False  # it describes the tools that a conversation offers
    calls: bool = False  # it writes the calls of earlier answers and their results; the other attributes say how
    null_content: bool = True  # a message with calls and without text must have the content null, not ""
    text_arguments: bool = False  # arguments must be JSON text, not an object
    short_ids: bool = False  # ids must have SHORT_ID letters and digits
    beside_text: bool = True  # it writes the calls of a message that also has text
    several: bool = True  # it writes several calls of one message


def traits_of(render: Callable[..., str], *, offered: bool) -> Traits:
    """Return a template's traits in conversations that offer a tool or none; `render` is `Tokenizer.render_chat`."""
    tools, slow = [TOOL] if offered else None, False

    def rendered(messages: Sequence[Message]) -> str:
        nonlocal slow
        try:
            return "" if slow else render(messages, tools=tools)
        except Unavailable:
            raise
        except ValueError as error:
            slow = SLOW in str(error)
            return ""

    question = {"role": "user", "content": QUESTION}
    described = offered and OFFERED in rendered([question])
    system = TEXT in rendered([{"role": "system", "content": TEXT}, question])
    for null, text, short in product((True, False), (False, True), (False, True)):
        written = _written(rendered(list(_conversation(None if null else "", text, short))))
        if not written or (null and "None" in written):
            continue
        several = rendered(list(_conversation(None if null else "", text, short, count=2)))
        return Traits(
            system=system,
            tools=described,
            calls=True,
            null_content=null,
            text_arguments=text,
            short_ids=short,
            beside_text=bool(_written(rendered(list(_conversation(TEXT, text, short))))),
            several=f"{CALLED}1" in several and f"{RESULT}1" in several,
        )
    return Traits(system=system, tools=described)


def _conversation(content: str | None, text: bool, short: bool, count: int = 1) -> Iterator[Message]:
    """Yield a question, a message with `count` calls, and their results."""
    ids = [f"{'a' * (SHORT_ID - 1) if short else 'call_0123456789abcdef0123'}{index}" for index in range(count)]
    arguments = f'{{"{KEY}": "{VALUE}"}}' if text else {KEY: VALUE}
    names = [f"{CALLED}{index or ''}" for index in range(count)]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name in zip(ids, names)
    ]
    yield {"role": "user", "content": QUESTION}
    yield {"role": "assistant", "content": content, "tool_calls": calls}
    for index, (id, name) in enumerate(zip(ids, names)):
        yield {"role": "tool", "tool_call_id": id, "name": name, "content": f"{RESULT}{index or ''}"}


def _written(text: str) -> str:
    """Return what a rendering holds between question and result; "" if the call is missing there or wrong."""
    _, _, after = text.rpartition(QUESTION)
    written, result, _ = after.partition(RESULT)
    # an object that was printed rather than written as JSON; JSON text that was written as JSON once more
    wrong = f"'{KEY}'" in written or f'\\"{KEY}' in written
    return written if result and not wrong and all(name in written for name in (CALLED, KEY, VALUE)) else ""
