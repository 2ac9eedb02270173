"""Turn a request's body into what the engine runs: tokens, a grammar for each answer, and one request per choice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import uuid4

from fastapi import Request

from tessera.models.chat_template import Unavailable
from tessera.runtime.requests import Guide, check_tokens
from tessera.runtime.requests import Request as Generate
from tessera.serve.protocol import CHAT_TOKENS, ChatBody, SamplingFields
from tessera.serve.schema import Refusal
from tessera.serve.site import Site, tokenizer_of
from tessera.serve.tools import encode
from tessera.serve.turns import in_turn

START, SLACK = 8, 64
"""Characters per token of the context to encode first, of a longer text, and tokens by which that may exceed the
context."""


def _check_start(site: Site, text: str, param: str) -> None:
    """Refuse a long text whose start alone exceeds the context, because encoding all of it could take most of a second.

    At the end of the start, a token may be cut into several; SLACK allows for it.
    """
    start = text[: START * site.context]
    if len(start) < len(text) and len(tokenizer_of(site).encode(start, add_special=False)) > site.context + SLACK:
        raise Refusal(400, f"{param} has over {site.context:,} tokens, but may have no more: shorten it", param=param)


def encode_prompt(site: Site, prompt: str | Sequence[int], name: str) -> list[int]:
    """Return the tokens of a prompt, which messages call `name`; raise Refusal if it cannot be encoded."""
    if isinstance(prompt, str) and site.model.tokenizer is not None:
        _check_start(site, prompt, "prompt")
    try:
        return site.model.encode_prompt(prompt, name)
    except ValueError as error:
        raise Refusal(400, str(error), param="prompt") from error


def render(site: Site, body: ChatBody) -> list[int]:
    """Return the tokens of a conversation; raise Refusal if the chat template refuses it, or it is too long."""
    _check_start(site, "".join(text for message in body.messages for text in message.texts), "messages")
    try:
        tokens = encode(tokenizer_of(site), [message.plain() for message in body.messages], body.offered)
        check_tokens(tokens, site.model.config, "the conversation")
    except Unavailable as error:
        raise Refusal(503, str(error), retry_s=5) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, str(error), param="messages") from error
    return tokens


async def guide_for(request: Request, site: Site, body: SamplingFields) -> Callable[[], Guide] | None:
    """Compile the grammar that the request asks for, and return a function that makes a guide for each answer.

    Return None if the request asks for no grammar.
    """
    schema = body.wanted()
    if schema is None:
        return None
    if body.ignore_eos:
        raise Refusal(400, "ignore_eos=true: JSON and tool calls end by themselves; drop it", param="ignore_eos")
    if site.grammars is None:
        raise Refusal(
            400,
            f"{site.name} has no tokenizer or no end-of-sequence token, but a JSON answer or a forced tool call needs "
            "both: ask for plain text",
        )
    try:
        return await in_turn(request, site.compiling, site.grammars.json, schema)
    except ValueError as error:
        raise Refusal(400, str(error), param=body.schema_field) from error


def requests_of(
    site: Site,
    body: SamplingFields,
    prompts: Sequence[Sequence[int]],
    guide: Callable[[], Guide] | None = None,
    tenant: str = "",
) -> list[Generate]:
    """Return one engine request per choice: `n` per prompt, with the seeds s, s + 1, ..., s + n - 1.

    s is the body's seed or, if the body has none, a random number.

    Raises:
        Refusal: a sampling parameter is wrong, or a prompt leaves no room for an answer.
    """
    usual = site.model.generation_config.sampling().get("temperature", 1.0)
    try:
        sampling = site.model.sampling(**{"temperature": usual} | body.sampling())
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    if wrong := [token for token in body.bias if token >= site.model.config.vocab_size]:
        last = site.model.config.vocab_size - 1
        raise Refusal(400, f"logit_bias has token {wrong[0]}: token ids are from 0 to {last}", param="logit_bias")
    seed = uuid4().int % 2**32 if body.seed is None else body.seed
    limit = site.model.max_new_tokens(None, CHAT_TOKENS) if body.limit is None else body.limit
    found = []
    for prompt in prompts:
        room = site.context - len(prompt)
        if room < min(limit, 1):
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} tokens, but prompt and answer may have at most {site.context} together: "
                f"shorten the prompt by at least {min(limit, 1) - room} tokens",
                param="messages" if isinstance(body, ChatBody) else "prompt",
            )
        one = Generate(
            prompt=prompt,
            max_new_tokens=max(1, min(limit, room)),  # an engine's answer has at least one token
            stop=body.stops,
            sampling=sampling,
            bias=body.bias,
            top_logprobs=body.ranks or 0,
            prompt_logprobs=body.ranks if body.echoes else None,
            guide=guide,
            tenant=tenant,
            ignore_eos=body.ignore_eos,
        )
        found += [replace(one, seed=(seed + choice) % 2**32) for choice in range(body.n)]
    return found
