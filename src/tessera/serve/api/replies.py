"""Bodies of the OpenAI API's responses, whole or as the events of a stream."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from tessera.runtime.answers import Generation
from tessera.runtime.requests import Token
from tessera.serve.api.calls import finish_of
from tessera.serve.api.speech import Said, Speech

NOTHING = Said()
CHUNK = "chat.completion.chunk"


class Reply:
    """Builder of one request's response or stream events, which all carry the same id and time.

    `spell` returns the bytes of a token id, for the report of token probabilities.
    """

    def __init__(self, model: str, chat: bool, spell: Callable[[int], bytes]):
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self.model, self.chat, self.spell, self.created = model, chat, spell, int(time.time())

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion" if self.chat else "text_completion"), "choices": choices, "usage": usage}

    def choice(
        self, index: int, generation: Generation, speech: Speech, tokens: Sequence[Token] | None
    ) -> dict[str, Any]:
        """Build one choice of a whole response; `tokens` None reports no token probabilities."""
        said, calls = speech.whole(generation.text)
        body = {"text": said.text}
        if self.chat:
            message = {"role": "assistant", "content": None if calls and not said.text else said.text}
            message |= {"reasoning_content": said.reasoning} if said.reasoning else {}
            body = {"message": message | ({"tool_calls": calls} if calls else {})}
        finish = finish_of(generation.finish_reason, said.text, calls)
        return {"index": index, **body, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def piece(
        self,
        index: int,
        new: Said = NOTHING,
        *,
        finish: str | None = None,
        first: bool = False,
        token: Token | None = None,
        offset: int = 0,
    ) -> dict[str, Any]:
        """Build one event of a stream. `first` adds the role, as in the first event of a chat.

        `token` is one whose probability is reported, after `offset` characters of the choice's text.
        """
        delta = ({"role": "assistant"} if first else {}) | ({"content": new.text} if new.text or first else {})
        delta |= {"reasoning_content": new.reasoning} if new.reasoning else {}
        said = {"delta": delta} if self.chat else {"text": new.text}
        return self._chunk(index, said, self._logprobs(None if token is None else [token], offset), finish)

    def prompt(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._chunk(index, {"text": text}, self._logprobs(tokens))

    def prompt_logprobs(self, tokens: Sequence[Token], ranks: int) -> list[dict[str, Any] | None]:
        """Build vLLM's field of the same name: for each token of a prompt but the first, it and the best ones."""
        found: list[dict[str, Any] | None] = []
        for token in tokens:
            best = {id: (rank, value) for rank, (id, value) in enumerate(token.top, 1)}
            named = {token.token: (best.get(token.token, (None,))[0], token.logprob)}
            named |= {id: (rank, value) for id, (rank, value) in best.items() if rank <= ranks}
            row = {
                str(id): {"logprob": value, "rank": rank, "decoded_token": self._text(id)}
                for id, (rank, value) in named.items()
            }
            found.append(None if token.logprob is None else row)
        return found

    def calls(self, index: int, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._chunk(index, {"delta": {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}})

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._head(CHUNK if self.chat else "text_completion") | {"choices": [], "usage": usage}

    def _chunk(
        self, index: int, said: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}
        return self._head(CHUNK if self.chat else "text_completion") | {"choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[Token] | None, offset: int = 0) -> dict[str, Any] | None:
        if tokens is None:
            return None
        if self.chat:
            content = [
                self._spelt(token.token, token.logprob) | {"top_logprobs": [self._spelt(*one) for one in token.top]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {self._text(id): value for id, value in self._top(token)}
                for token in tokens
            ],
            "text_offset": [*accumulate((len(token.text) for token in tokens), initial=offset)][:-1],
        }

    def _top(self, token: Token) -> Sequence[tuple[int, float]]:
        """Return the best tokens and, as OpenAI's API does, the token itself."""
        own = (token.token, token.logprob)
        return token.top if token.token in dict(token.top) else (*token.top, own)

    def _spelt(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(id), "logprob": logprob, "bytes": list(self.spell(id))}

    def _text(self, id: int) -> str:
        """Return a token's text; for a part of a character, a spelling of its bytes, as OpenAI's API does."""
        spelt = self.spell(id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
