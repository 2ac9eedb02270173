"""A conversation with one model. The engine lives across turns, so a turn reuses keys that earlier prefills wrote.

A turn gives the same result as a cold run of the whole conversation. It therefore prefills the previous answer again,
and reuses only keys that a prefill wrote, cut to whole query tiles (`Session.align`). Under a sparse policy, keys
that decode wrote would differ: a decode row ranks the key tiles by its own scores, a prefill row by the scores of its
whole query tile. (In the demo model the keys differ by 12 % of their maximum or more, from layer 3 on.)

The engine compares tokens, not turns: after `undo`, `regenerate`, `load` or a new system message, it reuses the longest
prefix that the new prompt shares with the last prompt.
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
"""Default maximum of new tokens per answer, if neither the user nor generation_config.json sets one."""
SCHEMA = 1
MESSAGE = record({"role": TEXT, "content": TEXT}, "")
FIELDS = MappingProxyType(
    {
        "tessera_chat": Rule(str(SCHEMA), lambda value: value == SCHEMA and value is not True),
        "model": TEXT,
        "messages": items(MESSAGE, "messages with role and content"),
    }
)
"""Fields of a saved conversation, each with the rule for its value."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One turn's answer.

    Attributes:
        generation: the answer and its statistics; its `density` counts only this turn's calls.
        reused_tokens: prompt tokens whose keys and values were still in the cache.
        dropped_turns: oldest turns (question and answer) dropped to stay within the context.
    """

    generation: Generation
    reused_tokens: int
    dropped_turns: int


class Chat:
    """A conversation: its messages, and the engine that holds their keys and values."""

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
        self._attempts = 0  # number of times that the last question was regenerated

    @property
    def system(self) -> str | None:
        """Text of the system message; None if there is none."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages after the system message: questions and answers in alternation."""
        return self.messages[len(_opening(self.system)) :]

    def set_system(self, text: str | None) -> None:
        """Replace the system message for the turns that follow; None removes it.

        Raises:
            ValueError: the chat template refuses the message; the conversation is then unchanged.
        """
        self.messages = self._checked([*_opening(text), *self.turns])

    def clear(self) -> None:
        """Delete all messages except the system message."""
        self.messages, self._attempts, self._engine = _opening(self.system), 0, None

    def undo(self) -> str:
        """Remove the last question and its answer; return the question.

        Raises:
            ValueError: the conversation has no question.
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
            ValueError: the message is empty, too long for the context even without earlier turns, or refused by the
                chat template; the conversation is then unchanged.
            Interrupted: Ctrl-C was pressed; the partial answer joins the conversation.
        """
        if not text.strip():
            raise ValueError("the message is empty: say something, or /help")
        return self._answer([*self.messages, {"role": "user", "content": text}], 0, stream, progress)

    def regenerate(
        self, stream: Callable[[str], Any] | None = None, progress: Callable[[int, int], Any] | None = None
    ) -> Reply:
        """Answer the last question again and replace its answer.

        The n-th regeneration draws with seed + n, so the answer changes unless the temperature is 0. Arguments and
        errors are those of `ask`.

        Raises:
            ValueError: the conversation has no question.
        """
        if not self.turns:
            raise ValueError("there is no answer to replace: the conversation is empty")
        return self._answer(self.messages[:-1], self._attempts + 1, stream, progress)

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation to a file, atomically.

        Raises:
            ValueError: the file exists and is not a saved conversation.
            OSError: the file cannot be written.
        """
        path = Path(path)
        check_writable(path, flag="the file")
        if path.exists():
            try:
                _read(path)
            except ValueError as error:
                raise ValueError(
                    f"{path} exists and is not a saved chat, so it is not overwritten: name another file"
                ) from error
        values = {"tessera_chat": SCHEMA, "model": self.model.source, "messages": self.messages}
        replace_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")

    def load(self, path: str | os.PathLike) -> None:
        """Replace the conversation, its system message included, with a saved one.

        Raises:
            ValueError: the file is not a saved conversation, or the chat template refuses its messages; this
                conversation is then unchanged.
            OSError: the file cannot be read.
        """
        self.messages, self._attempts = self._checked(_read(Path(path))), 0

    def _answer(
        self,
        messages: list[dict[str, str]],
        attempts: int,
        stream: Callable[[str], Any] | None,
        progress: Callable[[int, int], Any] | None,
    ) -> Reply:
        """Answer the last of `messages`, a question; then replace the conversation with `messages` and the answer."""
        started_s = time.perf_counter()
        messages, tokens, dropped = self._fit(messages)
        seed = (self.seed + attempts) % 2**32
        request = Request(prompt=tokens, max_new_tokens=self.max_new_tokens, sampling=self.sampling, seed=seed)
        engine = self.model.engine(slots=1) if self._engine is None else self._engine
        self._engine = None  # an interrupted call may leave a donated, unusable cache
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
        """Return the messages; raise ValueError if the chat template refuses them followed by another question."""
        self._render([*messages, {"role": "user", "content": "hello"}])
        return messages

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return self.model.tokenizer.encode_chat(messages, parse_special=self.parse_special)

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int], int]:
        """Drop the oldest turns until prompt and answer fit the context; return messages, tokens and turns dropped."""
        limit, kept, dropped = self.model.config.max_positions, len(_opening(self.system)), 0
        room = min(self.max_new_tokens, limit // 4)
        while True:
            tokens = self._render(messages)
            if len(tokens) + room <= limit:
                return messages, tokens, dropped
            if len(messages) <= kept + 1:
                raise ValueError(
                    f"the message has {len(tokens)} tokens, but the model's context of {limit} leaves "
                    f"{limit - room}, because {room} are reserved for the answer: shorten the message"
                )
            messages, dropped = messages[:kept] + messages[kept + 2 :], dropped + 1


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _answered(messages: list[dict[str, str]], generation: Generation) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": generation.text}]


def _read(path: Path) -> list[dict[str, str]]:
    """Return the messages of a saved conversation; raise ValueError if the file is not one."""
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
