"""Turn the events of a request's choices into its response: whole, or a stream of server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi.responses import StreamingResponse

from tessera.runtime.requests import End, Failure, Token
from tessera.serve.api.calls import finish_of
from tessera.serve.api.protocol import CompletionBody, StreamOptions
from tessera.serve.api.replies import Reply
from tessera.serve.api.schema import Refusal
from tessera.serve.api.speech import Said, Speech
from tessera.serve.service import Job
from tessera.serve.site import Site


@dataclass(frozen=True)
class Echo:
    """A prompt that is put before its answer.

    Attributes:
        pieces: the text that each token of the prompt adds; empty if no token is reported.
        ranks: number of most probable tokens to report at each position.
        alone: whether the answer is left out. The engine has generated one token all the same.
    """

    text: str
    pieces: Sequence[str]
    ranks: int
    alone: bool

    def tokens(self, end: End) -> list[Token]:
        return [
            token._replace(text=piece, top=token.top[: self.ranks]) for token, piece in zip(end.prompt, self.pieces)
        ]

    def cut(self, end: End) -> End:
        """Return an answer's last event; if the answer is left out, with an empty answer."""
        if not self.alone:
            return end
        return end._replace(generation=replace(end.generation, text="", tokens=[], finish_reason="length"))


QUIET_S = 10.0
"""Seconds without an event, because a call is still incomplete, after which a stream sends COMMENT: clients give up on
a silent connection."""
COMMENT = ": a call is being written\n\n"


@dataclass(eq=False)
class ChoiceState:
    """One choice of a response while it is generated.

    Attributes:
        prompt: number of its prompt in the request, from 0.
        policies: function that returns the names of the choice's attention policies, by the number of its tokens.
        tokens: the choice's tokens so far; None unless the response reports token probabilities.
        job: the choice's request in the service.
        new_tokens, characters: length of the answer so far.
        end: the engine's last event for the choice; None until the choice is complete.
    """

    index: int
    prompt: int
    policies: Callable[[int], set[str]]
    prompt_tokens: int
    speech: Speech
    echo: Echo | None = None
    tokens: list[Token] | None = None
    job: Job | None = None
    new_tokens: int = 0
    characters: int = 0
    end: End | None = None


class Stream(StreamingResponse):
    """Response of server-sent events. It calls `dropped` when it ends, even if the client leaves before any event."""

    def __init__(self, pieces: AsyncIterator[str], dropped: Callable[[], None]):
        super().__init__(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.dropped = dropped

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.dropped()


async def all_ends(queue: asyncio.Queue, count: int) -> None:
    """Wait until all choices are complete; raise Refusal if one fails."""
    while count:
        answer, event = await queue.get()
        if isinstance(event, Failure):
            raise _failed(event)
        if isinstance(event, End):
            answer.end, count = event, count - 1
        elif answer.tokens is not None:
            answer.tokens.append(event)


async def stream(
    reply: Reply, answers: Sequence[ChoiceState], queue: asyncio.Queue, options: StreamOptions
) -> AsyncIterator[str]:
    """Yield the server-sent events of a queue of (choice, event) until all choices have ended, or one has failed."""
    left, begun = len(answers), False
    continuous = options.include_usage and options.continuous_usage_stats

    def said(answer: ChoiceState, data: dict[str, Any]) -> str:
        if continuous:
            return _event(data | {"usage": counts(answer.prompt_tokens, answer.new_tokens)})
        return _event(data | {"usage": None} if options.include_usage else data)

    sent_s = time.monotonic()
    while left:
        answer, event = await queue.get()
        if begun and time.monotonic() - sent_s > QUIET_S:
            sent_s = time.monotonic()
            yield COMMENT
        if not begun:  # only now: while nothing has been sent, the front of several replicas may ask another
            begun = True
            for each in answers:
                if reply.chat or (each.echo is not None and each.tokens is None):
                    yield said(each, _first(reply, each))
        if isinstance(event, Failure):
            yield _event(_failed(event).body())
            return
        if isinstance(event, End):
            event = event if answer.echo is None else answer.echo.cut(event)
            answer.end, left = event, left - 1
        answer.new_tokens += isinstance(event, Token) and not (answer.echo is not None and answer.echo.alone)
        for data in _pieces(reply, answer, event):
            sent_s = time.monotonic()
            yield said(answer, data)
    if options.include_usage:
        yield _event(reply.last(usage_of(answers)))
    yield "data: [DONE]\n\n"


def _first(reply: Reply, answer: ChoiceState) -> dict[str, Any]:
    if answer.echo is None:
        return reply.piece(answer.index, first=True)
    answer.characters = len(answer.echo.text)
    return reply.piece(answer.index, Said(text=answer.echo.text))


def _pieces(reply: Reply, answer: ChoiceState, event: Token | End) -> Iterator[dict[str, Any]]:
    if answer.echo is not None and (answer.echo.alone or answer.tokens is not None):
        yield from _held(reply, answer, event)
        return
    if isinstance(event, Token):
        said, shown = answer.speech.push(event.text), None if answer.tokens is None else event
        if any(said) or shown is not None:
            yield reply.piece(answer.index, said, token=shown, offset=answer.characters)
        answer.characters += len(event.text)
        return
    rest, calls = answer.speech.finish()
    if any(rest):
        yield reply.piece(answer.index, rest)
    if calls:
        yield reply.calls(answer.index, calls)
    yield reply.piece(answer.index, finish=finish_of(event.generation.finish_reason, rest.text, calls))


def _held(reply: Reply, answer: ChoiceState, event: Token | End) -> Iterator[dict[str, Any]]:
    """Yield the events of a choice that begins with the prompt's probabilities, which come with the answer's end."""
    if isinstance(event, Token):
        if answer.tokens is not None and not answer.echo.alone:
            answer.tokens.append(event)
        return
    if answer.tokens is not None:
        yield reply.prompt(answer.index, answer.echo.text, answer.echo.tokens(event))
        answer.characters = len(answer.echo.text)
    for token in answer.tokens or ():
        yield reply.piece(answer.index, Said(text=token.text), token=token, offset=answer.characters)
        answer.characters += len(token.text)
    yield reply.piece(answer.index, finish=event.generation.finish_reason)


def usage_of(answers: Sequence[ChoiceState]) -> dict[str, Any]:
    """Build the field "usage" of a response.

    "tessera" holds the answers' mean density (keys read / keys visible) and the policies of their first and last
    tokens: "dense+kascade" if a prompt ran under the plan and decode below its own cross-over.
    """
    prompts = {answer.prompt: answer.prompt_tokens for answer in answers}
    cached = dict(prompts)  # of each prompt: later choices also reuse what earlier ones have computed
    for answer in answers:
        cached[answer.prompt] = min(answer.end.reused_tokens, cached[answer.prompt])
    generations = [answer.end.generation for answer in answers]
    policies = set().union(*(answer.policies(len(one.tokens)) for answer, one in zip(answers, generations)))
    density = sum(one.density for one in generations) / len(generations)
    return counts(sum(prompts.values()), sum(len(one.tokens) for one in generations)) | {
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "tessera": {"density": round(density, 4), "policy": "+".join(sorted(policies))},
    }


def counts(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    total = prompt_tokens + new_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def _event(data: dict) -> str:
    # in ASCII: some clients end a line at U+2028, and half of a surrogate pair has no UTF-8 bytes
    return f"data: {json.dumps(data)}\n\n"


def _failed(event: Failure) -> Refusal:
    if isinstance(event.error, Refusal):
        return event.error
    status = 400 if isinstance(event.error, ValueError | MemoryError) else 500
    return Refusal(status, str(event.error) or type(event.error).__name__)


def echoes_of(site: Site, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[Echo]:
    """Return what to put before the answers to each prompt, of which `prompts` are the tokens."""
    found, tokenizer = [], site.model.tokenizer
    for text, tokens in zip(body.prompts, prompts):
        if not isinstance(text, str):
            text = "" if tokenizer is None else tokenizer.decode(tokens, skip_special=False)
        pieces = [] if body.logprobs is None else pieces_of(site, tokens, text)
        found.append(Echo(text, pieces, body.logprobs or 0, alone=body.limit == 0))
    return found


def put_prompts(answers: Sequence[ChoiceState]) -> None:
    """Put each choice's prompt before its answer, once all are complete."""
    for answer in answers:
        end = answer.echo.cut(answer.end)
        answer.end = end._replace(generation=replace(end.generation, text=answer.echo.text + end.generation.text))
        if answer.tokens is not None:
            answer.tokens = answer.echo.tokens(end) + ([] if answer.echo.alone else answer.tokens)


def pieces_of(site: Site, tokens: Sequence[int], text: str) -> list[str]:
    """Cut a prompt's text into the pieces that its tokens add; a leading token that the encoder added gets ""."""
    if site.model.tokenizer is None:
        return [""] * len(tokens)
    decoder = site.model.tokenizer.stream(skip_special=False)
    pieces = [decoder.push(token) for token in tokens]
    pieces[-1] += decoder.finish()
    added = len("".join(pieces)) - len(text)
    for index, piece in enumerate(pieces):
        pieces[index], added = piece[max(added, 0) :], added - len(piece)
    return pieces
