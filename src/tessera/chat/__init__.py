"""A conversation with one model. All turns use one engine, so a turn reuses keys that earlier prefills wrote.

A turn gives the same result as a cold run of the whole conversation, so it prefills the previous answer again: under a
sparse policy, a decode row ranks the key tiles by its own scores, a prefill row by those of its whole query tile, and
the keys differ (in the demo model by at least 12 % of the largest absolute value, from layer 3 on). The engine compares
tokens, not turns: it reuses the longest prefix that the new prompt shares with the last one.
"""

import time

from tessera.chat.turns import Messages, Progress, Reply, Stream, Turns, answered, opening
from tessera.generate import Interrupted, Model
from tessera.runtime.engine import Engine
from tessera.runtime.requests import Request
from tessera.runtime.sampling import Sampling, later_seed
from tessera.sparse.promise import promise_note

NEW_TOKENS = 256
"""Maximum number of new tokens per answer, if neither the user nor generation_config.json sets one."""


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
        super().clear()
        self._engine = None

    def _answer(self, messages: Messages, attempts: int, stream: Stream | None, progress: Progress | None) -> Reply:
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
        usage = f"{end.reused_tokens} tokens from the cache; {end.generation.usage()}"
        return Reply(usage=usage, dropped_turns=dropped, generation=end.generation, reused_tokens=end.reused_tokens)

    def _checked(self, messages: Messages) -> Messages:
        self._render([*messages, {"role": "user", "content": "hello"}])
        return messages

    def _render(self, messages: Messages) -> list[int]:
        return self.model.tokenizer.encode_chat(messages, parse_special=self.parse_special)

    def _fit(self, messages: Messages) -> tuple[Messages, list[int], int]:
        """Drop the oldest turns until prompt and answer fit the context; return what is left, its tokens, and how many
        turns were dropped."""
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
