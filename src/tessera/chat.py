"""A conversation with one model. Its engine outlives each turn: the next one reuses the keys that prefill wrote.

A turn gives the same result as a cold run of the whole conversation. Under a sparse policy, decode writes different
keys than prefill: a decode row ranks the tiles by its own scores, a prefill row by those of its whole query tile (the
demo model's keys then differ by 12 % of their maximum and more, from layer 3 on). The next turn therefore prefills the
answer again, under every policy, and `Session.align` cuts the reused prefix to whole query tiles.
"""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tessera.generate import Interrupted, Model
from tessera.runtime.answers import Generation
from tessera.runtime.engine import Engine
from tessera.runtime.requests import Request
from tessera.runtime.sampling import Sampling
from tessera.sparse.promise import promise_note

COMMANDS = MappingProxyType(
    {
        "/help": "list these commands",
        "/reset": "forget the conversation",
        "/exit": "leave (so does end of input)",
    }
)


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
        self, model: Model, sampling: Sampling, *, max_new_tokens: int, system: str | None = None, seed: int = 0
    ):
        if model.tokenizer is None:
            raise ValueError(f"chat needs a tokenizer and {model.source} has none: add its tokenizer.json")
        if model.tokenizer.chat_template is None:
            raise ValueError(
                f"{model.source} has no chat template: add its chat_template.jinja, or use `tessera generate`"
            )
        self.model, self.sampling, self.max_new_tokens, self.seed = model, sampling, max_new_tokens, seed
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)
        self._engine: Engine | None = None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)
        self._engine = None

    def ask(self, text: str, stream: Callable[[str], Any] | None = None) -> Reply:
        """Send a message and return the reply.

        Raises:
            ValueError: the message is empty, by itself too long for the context, or refused by the chat template; the
                conversation is unchanged.
            Interrupted: Ctrl-C; the partial answer joins the conversation.
        """
        started_s = time.perf_counter()
        if not text.strip():
            raise ValueError("the message is empty: say something, or /help")
        messages, tokens, dropped = self._fit([*self.messages, {"role": "user", "content": text}])
        request = Request(prompt=tokens, max_new_tokens=self.max_new_tokens, sampling=self.sampling, seed=self.seed)
        engine = self.model.engine(slots=1) if self._engine is None else self._engine
        self._engine = None  # an interrupted call may leave the cache donated
        id = engine.submit(request, started_s=started_s)
        try:
            [end] = engine.drain(stream and (lambda _, piece: stream(piece)))
        except KeyboardInterrupt:
            generation = engine.cancel(id)
            self.messages = [*messages, {"role": "assistant", "content": generation.text}]
            raise Interrupted([generation]) from None
        self._engine = engine
        self.messages = [*messages, {"role": "assistant", "content": end.generation.text}]
        return Reply(generation=end.generation, reused_tokens=end.reused_tokens, dropped_turns=dropped)

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int], int]:
        """Drop the oldest turns until prompt and answer fit the context."""
        limit, kept, dropped = self.model.config.max_positions, len(self._opening), 0
        room = min(self.max_new_tokens, limit // 4)
        while True:
            tokens = self.model.tokenizer.encode_chat(messages)
            if len(tokens) + room <= limit:
                return messages, tokens, dropped
            if len(messages) <= kept + 1:
                raise ValueError(
                    f"the message makes {len(tokens)} tokens but the model's context of {limit} leaves "
                    f"{limit - room}, as {room} are reserved for the answer: shorten it"
                )
            messages, dropped = messages[:kept] + messages[kept + 2 :], dropped + 1


def converse(chat: Chat, lines: Iterable[str], *, interactive: bool) -> bool:
    """Answer each line until the input ends or /exit; answers go to standard output, remarks to standard error.

    Returns:
        Whether every line was answered or obeyed, for scripts, which do not read the remarks.
    """
    from rich.console import Console

    remarks, good = Console(stderr=True, highlight=False, soft_wrap=True), True
    for line in lines:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            chat.reset()
            remarks.print("The conversation is forgotten.", style="dim")
        elif text.startswith("/"):
            if text != "/help":
                remarks.print(f"error: {text.split()[0]} is not a command", style="red", markup=False)
                good = False
            remarks.print("\n".join(f"{name:8}{what}" for name, what in COMMANDS.items()), markup=False)
        elif text:
            good &= _turn(chat, text, remarks, interactive)
    return good


def _turn(chat: Chat, text: str, remarks: Any, interactive: bool) -> bool:
    """Ask one question; return False if it was refused."""

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    try:
        reply = chat.ask(text, show)
    except ValueError as error:
        remarks.print(f"error: {error}", style="red", markup=False)
        return False
    except Interrupted:
        print()
        if not interactive:
            raise
        remarks.print("(interrupted)", style="dim")
        return True
    print(flush=True)
    if reply.dropped_turns:
        remarks.print(f"The oldest {reply.dropped_turns} turns were forgotten: the context is full.", style="yellow")
    if interactive:
        note = promise_note(chat.model.plan)
        parts = [f"{reply.reused_tokens} tokens from the cache", reply.generation.usage(), *([note] if note else [])]
        remarks.print(f"({'; '.join(parts)})", style="dim")
    return True


def typed_lines() -> Iterable[str]:
    """Yield lines typed at a prompt; plain lines when standard input is not a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):  # Windows has none: its terminal edits lines itself
        import readline  # noqa: F401  (gives input() line editing and history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
