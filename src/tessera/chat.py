"""A conversation with one model. Its engine outlives each turn: the next one reuses the keys that prefill wrote.

A turn gives the same result as a cold run of the whole conversation. Under a sparse policy, decode writes different
keys than prefill: a decode row ranks the tiles by its own scores, a prefill row by those of its whole query tile (the
demo model's keys then differ by 12 % of their maximum and more, from layer 3 on). The next turn therefore prefills the
answer again, under every policy, and `Session.align` cuts the reused prefix to whole query tiles. The engine compares
tokens, not turns: after `undo`, `regenerate`, `load` or another system message it reuses what the new prompt shares
with the last one, and no more.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.core.fields import TEXT, Rule, check_fields, items, read_json, record
from tessera.core.files import check_writable, replace_text
from tessera.generate import Interrupted, Model
from tessera.runtime.answers import Generation
from tessera.runtime.engine import Engine
from tessera.runtime.requests import Request
from tessera.runtime.sampling import Sampling

NEW_TOKENS = 256
"""Maximum new tokens of an answer where neither the user nor generation_config.json sets any."""
SCHEMA = 1
MESSAGE = record({"role": TEXT, "content": TEXT}, "")
FIELDS = MappingProxyType(
    {
        "tessera_chat": Rule(str(SCHEMA), lambda value: value == SCHEMA and value is not True),
        "model": TEXT,
        "messages": items(MESSAGE, "messages with role and content"),
    }
)
"""What a saved conversation holds."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One turn's answer.

    Attributes:
        generation: the answer and its statistics; density counts this turn's calls only.
        reused_tokens: prompt tokens whose keys and values were still in the cache.
        dropped_turns: oldest turns (question and answer) dropped to stay within the context.
    """

    generation: Generation
    reused_tokens: int
    dropped_turns: int


class Chat:
    """Messages so far, and an engine that holds their keys and values."""

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        system: str | None = None,
        seed: int = 0,
        parse_special: bool = False,
    ):
        """Open a conversation. With `parse_special`, names of special tokens in messages become those tokens."""
        if model.tokenizer is None:
            raise ValueError(f"chat needs a tokenizer and {model.source} has none: add its tokenizer.json")
        if model.tokenizer.chat_template is None:
            raise ValueError(
                f"{model.source} has no chat template: add its chat_template.jinja, or use `tessera generate`"
            )
        self.model, self.sampling, self.max_new_tokens, self.seed = model, sampling, max_new_tokens, seed
        self.parse_special = parse_special
        self.messages: list[dict[str, str]] = _opening(system)
        self._engine: Engine | None = None
        self._attempts = 0  # answers to the last question before this one

    @property
    def system(self) -> str | None:
        """The system message, if any."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages without the system's: questions and answers by turns."""
        return self.messages[len(_opening(self.system)) :]

    def set_system(self, text: str | None) -> None:
        """Replace the system message, from the next turn on; None removes it.

        Raises:
            ValueError: the chat template refuses it; the conversation is unchanged.
        """
        self.messages = self._checked([*_opening(text), *self.turns])

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages, self._attempts, self._engine = _opening(self.system), 0, None

    def undo(self) -> str:
        """Take back the last question and its answer; return the question.

        Raises:
            ValueError: there is none.
        """
        if not self.turns:
            raise ValueError("there is no turn to take back: the conversation is empty")
        *self.messages, question, _ = self.messages
        self._attempts = 0
        return question["content"]

    def ask(
        self,
        text: str,
        stream: Callable[[str], Any] | None = None,
        progress: Callable[[int, int], Any] | None = None,
    ) -> Reply:
        """Send a message and return the reply.

        Args:
            text: the message.
            stream: called with each piece of the answer.
            progress: called with (prompt tokens read, prompt tokens to read) while the prompt is being read.

        Raises:
            ValueError: the message is empty, by itself too long for the context, or refused by the chat template; the
                conversation is unchanged.
            Interrupted: Ctrl-C; the partial answer joins the conversation.
        """
        if not text.strip():
            raise ValueError("the message is empty: say something, or /help")
        return self._answer([*self.messages, {"role": "user", "content": text}], 0, stream, progress)

    def regenerate(
        self, stream: Callable[[str], Any] | None = None, progress: Callable[[int, int], Any] | None = None
    ) -> Reply:
        """Answer the last question again, as if the last answer had not been given.

        The n-th time draws with seed + n, so the answer is another one unless the temperature is 0. Arguments and
        errors are those of `ask`.

        Raises:
            ValueError: there is no question.
        """
        if not self.turns:
            raise ValueError("there is no answer to replace: the conversation is empty")
        return self._answer(self.messages[:-1], self._attempts + 1, stream, progress)

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation to a file, whole or not at all.

        Raises:
            ValueError: the file exists and is no saved conversation.
            OSError: it cannot be written.
        """
        path = Path(path)
        check_writable(path, flag="/save")
        if path.exists():
            try:
                _read(path)
            except ValueError as error:
                raise ValueError(
                    f"{path} exists and is no saved chat, so it is not overwritten: name another file"
                ) from error
        values = {"tessera_chat": SCHEMA, "model": self.model.source, "messages": self.messages}
        replace_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")

    def load(self, path: str | os.PathLike) -> None:
        """Replace the conversation, its system message included, with a saved one.

        Raises:
            ValueError: the file is no saved conversation, or the chat template refuses it; the conversation is
                unchanged.
            OSError: it cannot be read.
        """
        self.messages, self._attempts = self._checked(_read(Path(path))), 0

    def _answer(
        self,
        messages: list[dict[str, str]],
        attempts: int,
        stream: Callable[[str], Any] | None,
        progress: Callable[[int, int], Any] | None,
    ) -> Reply:
        """Answer the question that `messages` end with; they join the conversation once there is an answer."""
        started_s = time.perf_counter()
        messages, tokens, dropped = self._fit(messages)
        seed = (self.seed + attempts) % 2**32
        request = Request(prompt=tokens, max_new_tokens=self.max_new_tokens, sampling=self.sampling, seed=seed)
        engine = self.model.engine(slots=1) if self._engine is None else self._engine
        self._engine = None  # an interrupted call may leave the cache donated
        id = engine.submit(request, started_s=started_s)
        try:
            [end] = engine.drain(stream and (lambda _, piece: stream(piece)), progress)
        except KeyboardInterrupt:
            generation = engine.cancel(id)
            self.messages, self._attempts = _answered(messages, generation), attempts
            raise Interrupted([generation]) from None
        self._engine = engine
        self.messages, self._attempts = _answered(messages, end.generation), attempts
        return Reply(generation=end.generation, reused_tokens=end.reused_tokens, dropped_turns=dropped)

    def _checked(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return messages that the template takes, another question after them included."""
        self._render([*messages, {"role": "user", "content": "hello"}])
        return messages

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return self.model.tokenizer.encode_chat(messages, parse_special=self.parse_special)

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int], int]:
        """Drop the oldest turns until prompt and answer fit the context."""
        limit, kept, dropped = self.model.config.max_positions, len(_opening(self.system)), 0
        room = min(self.max_new_tokens, limit // 4)
        while True:
            tokens = self._render(messages)
            if len(tokens) + room <= limit:
                return messages, tokens, dropped
            if len(messages) <= kept + 1:
                raise ValueError(
                    f"the message makes {len(tokens)} tokens but the model's context of {limit} leaves "
                    f"{limit - room}, as {room} are reserved for the answer: shorten it"
                )
            messages, dropped = messages[:kept] + messages[kept + 2 :], dropped + 1


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _answered(messages: list[dict[str, str]], generation: Generation) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": generation.text}]


def _read(path: Path) -> list[dict[str, str]]:
    """Read the messages of a saved conversation; raise ValueError unless it is one."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file that /save wrote")
    values = read_json(path, retry="name a file that /save wrote")
    if "tessera_chat" not in values:
        raise ValueError(f"{path} is no saved chat: name a file that /save wrote")
    check_fields(values, FIELDS, str(path))
    messages: list[Mapping[str, str]] = values["messages"]
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(
            f"the messages of {path} must be questions (user) and answers (assistant) by turns, after a system message "
            f"if there is one"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]
