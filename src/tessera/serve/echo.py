"""Put a completion's prompt before its answer, as `echo` asks."""

from collections.abc import Sequence
from dataclasses import replace

from tessera.runtime.answers import Generation
from tessera.runtime.requests import End, Token
from tessera.serve.protocol import CompletionBody
from tessera.serve.response import Answer
from tessera.serve.site import Site


def put_prompts(site: Site, body: CompletionBody, answers: Sequence[Answer]) -> None:
    """Put each choice's prompt before its answer."""
    for answer in answers:
        prompt = body.prompts[answer.prompt]
        if not isinstance(prompt, str):
            tokenizer = site.model.tokenizer
            tokens = answer.job.request.prompt
            prompt = "" if tokenizer is None else tokenizer.decode(tokens, skip_special=False)
        pieces = pieces_of(site, answer.job.request.prompt, prompt)
        generation, answer.tokens = echoed(answer.end, prompt, body.limit, answer.tokens, pieces)
        answer.end = answer.end._replace(generation=generation)


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


def echoed(
    end: End, text: str, limit: int, tokens: Sequence[Token] | None, pieces: Sequence[str]
) -> tuple[Generation, Sequence[Token] | None]:
    """Put a prompt before its answer.

    Args:
        end: the answer's last event.
        text: the prompt's text.
        limit: maximum tokens of the answer; with 0, the one token that the engine generated is left out.
        tokens: the answer's tokens; None if no probabilities are reported.
        pieces: the text that each token of the prompt adds to the prompt's text; together they are `text`.

    Returns:
        the answer, whose text now begins with the prompt, and the tokens of prompt and answer (None if no probabilities
        are reported).
    """
    generation = end.generation
    if limit == 0:
        generation, tokens = replace(generation, text="", tokens=[], finish_reason="length"), tokens and []
    if tokens is not None:
        tokens = [*(token._replace(text=piece) for token, piece in zip(end.prompt, pieces)), *tokens]
    return replace(generation, text=text + generation.text), tokens
