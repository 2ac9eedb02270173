"""A conversation with one model. All turns use one engine, so a turn reuses keys that earlier prefills wrote.

A turn gives the same result as a cold run of the whole conversation. It therefore prefills the previous answer again,
and reuses only keys that a prefill wrote, cut to whole units (`row_pool.RowPrefix`). Under a sparse policy, the keys
that decode wrote differ from the keys that a prefill would write: a decode row ranks the key tiles by its own scores,
a prefill row by the scores of its whole query tile. (In the demo model, the two differ by at least 12 % of the largest
absolute value, from layer 3 on.)

The engine compares tokens, not turns: after `undo`, `regenerate`, `load` or a new system message, it reuses the longest
prefix that the new prompt shares with the last prompt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.chat.turns import Turns, answered, opening
from tessera.generate import Interrupted, Model
from tessera.runtime.answers import Generation
from tessera.runtime.engine import Engine
from tessera.runtime.requests import Request
from tessera.runtime.sampling import Sampling, later_seed
from tessera.sparse.promise import promise_note

NEW_TOKENS = 256
"""Maximum number of new tokens per answer, if neither the user nor generation_config.json sets one."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One turn's answer.

    Attributes:
        generation: the answer and its statistics; its `density` covers this turn only.
        reused_tokens: number of prompt tokens whose keys and values were still in the cache.
        dropped_turns: number of the oldest turns (question and answer) that were dropped to stay within the context.
    """

    generation: Generation
    reused_tokens: int
    dropped_turns: int

    def usage(self) -> str:
        """Say in a few words what the answer cost."""
        return f"{self.reused_tokens} tokens from the cache; {self.generation.usage()}"


class Chat(Turns):
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
        super().__init__(model.source, system=system, seed=seed)
        self.model, self.sampling, self.max_new_tokens = model, sampling, max_new_tokens
        self.parse_special = parse_special
        self.note, self.draws = promise_note(model.plan), bool(sampling.temperature)
        self._engine: Engine | None = None

    def clear(self) -> None:
        """Delete all messages except the system message; drop the cached keys of all messages."""
        super().clear()
        self._engine = None

    def _answer(
        self,
        messages: list[dict[str, str]],
        attempts: int,
        stream: Callable[[str], Any] | None,
        progress: Callable[[int, int], Any] | None,
    ) -> Reply:
        """Answer the question that ends `messages`; store the messages and the answer, without the oldest turns if the
        conversation exceeds the context."""
        started_s = time.perf_counter()
        messages, tokens, dropped = self._fit(messages)
        seed = later_seed(self.seed, attempts)
        request = Request(prompt=tokens, max_new_tokens=self.max_new_tokens, sampling=self.sampling, seed=seed)
        engine = self.model.engine(slots=1) if self._engine is None else self._engine
        self._engine = None  # an interrupted call may leave a donated, unusable cache
        id = engine.submit(request, started_s=started_s)
        try:
            [end] = engine.drain(stream and (lambda _, piece: stream(piece)), progress)
        except KeyboardInterrupt:
            generation = engine.cancel(id)
            self.messages, self._attempts = answered(messages, generation.text), attempts
            raise Interrupted([generation]) from None
        self._engine = engine
        self.messages, self._attempts = answered(messages, end.generation.text), attempts
        return Reply(generation=end.generation, reused_tokens=end.reused_tokens, dropped_turns=dropped)

    def _checked(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return the messages; raise ValueError if the chat template refuses another question after them."""
        self._render([*messages, {"role": "user", "content": "hello"}])
        return messages

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return self.model.tokenizer.encode_chat(messages, parse_special=self.parse_special)

    def _fit(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int], int]:
        """Drop the oldest turns until prompt and answer fit the context.

        Return the remaining messages, their tokens, and the number of dropped turns.
        """
        limit, kept, dropped = self.model.config.max_positions, len(opening(self.system)), 0
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
