"""The messages of a conversation, and what a user does with them: ask, undo, regenerate, save, load."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.core.fields import TEXT, Rule, check_fields, items, read_json, record
from tessera.core.files import check_writable, replace_text
from tessera.runtime.answers import Generation

SCHEMA = 1
MESSAGE = record({"role": TEXT, "content": TEXT}, "")
FIELDS = MappingProxyType(
    {
        "tessera_chat": Rule(str(SCHEMA), lambda value: value == SCHEMA and value is not True),
        "model": TEXT,
        "messages": items(MESSAGE, "messages with role and content"),
    }
)
"""Fields of a saved conversation's file."""
Messages = list[dict[str, str]]
Stream = Callable[[str], Any]
"""Function that gets each piece of the answer."""
Progress = Callable[[int, int], Any]
"""Function that gets (prompt tokens read, prompt tokens to read) while the prompt is being read."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One turn's answer.

    Attributes:
        usage: what the answer cost, in a few words.
        dropped_turns: number of the oldest turns that were dropped to stay within the context.
        generation: the answer and its statistics, of this turn only; None if it came from a server.
        reused_tokens: number of prompt tokens whose keys and values were still in the cache.
    """

    usage: str
    dropped_turns: int
    generation: Generation | None = None
    reused_tokens: int = 0


class Turns(ABC):
    """A conversation; subclasses implement `_answer`, which answers a question.

    Attributes:
        source: name of the model; saved conversations contain it.
        messages: the system message, if any, then questions and answers in alternation.
        note: remark that a user should see with every answer; "" if there is none.
        draws: whether two answers to the same question may differ.
    """

    note = ""
    draws = True

    def __init__(self, source: str, *, system: str | None = None, seed: int = 0):
        self.source, self.seed = source, seed
        self.messages: Messages = opening(system)
        self._attempts = 0  # number of times that the last question was regenerated

    @property
    def system(self) -> str | None:
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def turns(self) -> Messages:
        """The messages after the system message: questions and answers in alternation."""
        return self.messages[len(opening(self.system)) :]

    def set_system(self, text: str | None) -> None:
        """Replace the system message for the turns that follow; None removes it; an error leaves it unchanged."""
        self.messages = self._checked([*opening(text), *self.turns])

    def clear(self) -> None:
        self.messages, self._attempts = opening(self.system), 0

    def undo(self) -> str:
        """Remove the last question and its answer; return the question."""
        if not self.turns:
            raise ValueError("there is no turn to take back: the conversation is empty")
        *self.messages, question, _ = self.messages
        self._attempts = 0
        return question["content"]

    def ask(self, text: str, stream: Stream | None = None, progress: Progress | None = None) -> Reply:
        """Send a message and return the reply.

        Raises:
            ValueError: the message is empty, too long for the context even without earlier turns, or refused by the
                chat template; the conversation is then unchanged.
            Interrupted: Ctrl-C was pressed; the partial answer joins the conversation.
        """
        if not text.strip():
            raise ValueError("the message is empty: say something, or /help")
        return self._answer([*self.messages, {"role": "user", "content": text}], 0, stream, progress)

    def regenerate(self, stream: Stream | None = None, progress: Progress | None = None) -> Reply:
        """Answer the last question again and replace its answer; raise what `ask` raises.

        The n-th regeneration draws with seed + n, so the answer changes unless the temperature is 0.
        """
        if not self.turns:
            raise ValueError("there is no answer to replace: the conversation is empty")
        return self._answer(self.messages[:-1], self._attempts + 1, stream, progress)

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation to a file, atomically; refuse to replace another kind of file."""
        path = Path(path)
        check_writable(path, flag="the file")
        if path.exists():
            try:
                _read(path)
            except ValueError as error:
                raise ValueError(
                    f"{path} exists and is not a saved chat, so it is not overwritten: name another file"
                ) from error
        values = {"tessera_chat": SCHEMA, "model": self.source, "messages": self.messages}
        replace_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")

    def load(self, path: str | os.PathLike) -> None:
        """Replace the conversation, its system message included, with a saved one; an error leaves it unchanged."""
        self.messages, self._attempts = self._checked(_read(Path(path))), 0

    @abstractmethod
    def _answer(self, messages: Messages, attempts: int, stream: Stream | None, progress: Progress | None) -> Reply:
        """Answer the question that ends `messages`; keep `messages` and the answer as the conversation."""

    def _checked(self, messages: Messages) -> Messages:
        """Return the messages; raise ValueError if the model cannot continue them."""
        return messages


def opening(system: str | None) -> Messages:
    return [] if system is None else [{"role": "system", "content": system}]


def answered(messages: Messages, text: str) -> Messages:
    return [*messages, {"role": "assistant", "content": text}]


def _read(path: Path) -> Messages:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file that /save wrote")
    values = read_json(path, retry="name a file that /save wrote")
    if "tessera_chat" not in values:
        raise ValueError(f"{path} is not a saved chat: name a file that /save wrote")
    check_fields(values, FIELDS, str(path))
    messages: list[Mapping[str, str]] = values["messages"]
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(
            f"the messages of {path} must alternate between questions (user) and answers (assistant), after an "
            f"optional system message"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]
