"""Put a completion's prompt before its answer, as `echo` asks."""

from collections.abc import Sequence
from dataclasses import replace

from tessera.serve.api.protocol import CompletionBody
from tessera.serve.response import Answer, Echo
from tessera.serve.site import Site


def echo_of(site: Site, body: CompletionBody, prompt: int, tokens: Sequence[int]) -> Echo:
    """Return what to put before the answers to a prompt.

    Args:
        site: the site.
        body: the request.
        prompt: number of the prompt in the request.
        tokens: the prompt's tokens.
    """
    text, tokenizer = body.prompts[prompt], site.model.tokenizer
    if not isinstance(text, str):
        text = "" if tokenizer is None else tokenizer.decode(tokens, skip_special=False)
    pieces = [] if body.logprobs is None else pieces_of(site, tokens, text)
    return Echo(text, pieces, body.logprobs or 0, alone=body.limit == 0)


def put_prompts(answers: Sequence[Answer]) -> None:
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
