"""Choose, for a chat request, which marks in the answer mean reasoning and calls, and how the answer is split."""

from collections.abc import Sequence

from tessera.models.text.tokenizer import Tokenizer
from tessera.serve.api.call_forms import SPECIAL
from tessera.serve.api.calls import schemas
from tessera.serve.api.protocol import ChatBody
from tessera.serve.api.speech import THOUGHTS, Speech

LAST = 16
"""Number of tokens at the end of a prompt among which the mark that opens the reasoning is looked for."""


def speech_of(tokenizer: Tokenizer | None, body: ChatBody, prompt: Sequence[int], *, guided: bool) -> Speech:
    """Return the splitter of an answer.

    Args:
        tokenizer: the model's tokenizer.
        body: the request.
        prompt: the conversation's tokens.
        guided: whether a grammar holds from the answer's first token on. The answer then has neither reasoning nor
            calls, unless the grammar makes it one call.
    """
    if guided or tokenizer is None:
        return Speech(forced=guided and body.forced, tools=dict(schemas(body.offered)) if body.forced else None)
    end = tokenizer.decode(prompt[-LAST:], skip_special=False).rstrip()
    return Speech(
        dict(schemas(body.offered)),
        single=body.parallel_tool_calls is False,
        thoughts=THOUGHTS,  # of any model: fine-tuning teaches reasoning without a word in the template
        thinking=next((pair for pair in THOUGHTS if end.endswith(pair[0]) or _unclosed(body, pair)), None),
    )


def _unclosed(body: ChatBody, pair: tuple[str, str]) -> bool:
    """Return whether the answer goes on with a message whose reasoning has not ended."""
    text = "".join(body.messages[-1].texts) if body.continue_final_message else ""
    return text.rfind(pair[0]) > text.rfind(pair[1])


def shown_ids(tokenizer: Tokenizer | None, body: ChatBody) -> frozenset[int]:
    """Return the ids of the special tokens whose names must stay in the answer's text, so that it can be split."""
    if tokenizer is None:
        return frozenset()
    wanted = {mark for pair in THOUGHTS for mark in pair} | (SPECIAL if body.offered else frozenset())
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(id for id, token in added.items() if token.special and token.content in wanted)
