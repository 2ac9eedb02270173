"""Turn a request's body into what the engine runs: tokens, a grammar for each answer, and one request per choice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any
from uuid import uuid4

from fastapi import Request

from tessera.models.text.chat_template import Unavailable
from tessera.models.text.tokenizer import Tokenizer
from tessera.runtime.requests import Guide, check_tokens
from tessera.runtime.requests import Request as Generate
from tessera.serve.api.call_forms import SPECIAL
from tessera.serve.api.calls import schemas
from tessera.serve.api.fields import refusal_of
from tessera.serve.api.protocol import ChatBody, Conversation, Prompt, SamplingFields
from tessera.serve.api.schema import Refusal
from tessera.serve.api.speech import THOUGHTS, Speech
from tessera.serve.api.tools import conversation, encode
from tessera.serve.edge.turns import in_turn
from tessera.serve.site import Site, tokenizer_of

START, SLACK = 8, 64
"""Of a long text, first encode START characters per context token; refuse it if they exceed the context by SLACK
tokens, because a token may be cut into several at the end of the start."""
SEEDS = 2**64
LAST = 16
"""Number of tokens at the end of a prompt among which the mark that opens the reasoning is looked for."""


def _check_start(site: Site, text: str, param: str) -> None:
    """Refuse a long text whose start alone exceeds the context: encoding all of it could take most of a second."""
    start = text[: START * site.context]
    if len(start) < len(text) and len(tokenizer_of(site).encode(start, add_special=False)) > site.context + SLACK:
        raise Refusal(400, f"{param} has over {site.context:,} tokens, but may have no more: shorten it", param=param)


def encode_prompt(site: Site, prompt: Prompt, name: str, *, add_special: bool = True) -> list[int]:
    """Return the tokens of a prompt, which messages call `name`; `add_special` adds those that begin a text."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    for part in parts:
        if isinstance(part, str) and site.model.tokenizer is not None:
            _check_start(site, part, "prompt")
    try:
        return site.model.encode_prompt(encode_parts(site, parts, add_special=add_special), name)
    except ValueError as error:
        raise Refusal(400, str(error), param="prompt") from error


def encode_parts(site: Site, parts: Sequence[int | str], *, add_special: bool, parse_special: bool = True) -> list[int]:
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            special = add_special and index == 0
            tokens += tokenizer_of(site).encode(part, add_special=special, parse_special=parse_special)
        else:
            tokens.append(part)
    return tokens


def bias_of(site: Site, body: SamplingFields) -> dict[int, float]:
    """Return what to add to the logit of each token id: a text's tokens get its bias, and biases add up (llama.cpp)."""
    found: dict[int, float] = {}
    for key, value in body.biases:
        tokens = [key]
        if isinstance(key, str):
            tokens = tokenizer_of(site).encode(key, add_special=False, parse_special=False)
        for token in tokens:
            found[token] = found.get(token, 0.0) + (-inf if value is False else value)
    return found


def render(site: Site, body: Conversation) -> list[int]:
    """Return the tokens of a conversation; raise Refusal if the chat template refuses it, or it is too long."""
    _check_start(site, "".join(text for message in body.messages for text in message.texts), "messages")
    tokenizer = tokenizer_of(site)
    variables = _variables(body, tokenizer.chat_template or "")
    with _template_errors():
        tokens = encode(tokenizer, [message.plain() for message in body.messages], body.offered, **variables)
        check_tokens(tokens, site.model.config, "the conversation")
    return tokens


def templated(site: Site, body: Conversation) -> str:
    """Return the text that the chat template writes for a conversation; raise Refusal as `render` does."""
    render(site, body)
    tokenizer = tokenizer_of(site)
    told = conversation(tokenizer, [message.plain() for message in body.messages], body.offered)
    with _template_errors():
        return tokenizer.render_chat(**told, **_variables(body, tokenizer.chat_template or ""))


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        raise Refusal(503, str(error), retry_s=5) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, str(error), param="messages") from error


def _variables(body: Conversation, template: str) -> dict[str, Any]:
    """Return the arguments of `tools.encode` that a body sets; refuse one that the template could not follow."""
    found = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.opens}
    if body.continue_final_message:
        found["continue_final"] = True
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" in template:
        found.setdefault("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in template:
        found.setdefault("enable_thinking", False)
    elif effort not in (None, "medium"):  # OpenAI's default, which clients send to every model
        raise Refusal(400, refusal_of("reasoning_effort"), param="reasoning_effort")
    return found


async def guide_for(request: Request, site: Site, body: SamplingFields) -> Callable[[], Guide] | None:
    """Compile the grammar that the request asks for, if any; return a function that makes a guide for each answer."""
    form = body.form()
    if form is None:
        return None
    if body.ignore_eos:
        said = f"ignore_eos=true: an answer that follows {form.field} ends by itself; drop ignore_eos"
        raise Refusal(400, said, param="ignore_eos")
    if body.min_tokens > 1:  # an answer of no tokens follows no form
        said = f"min_tokens={body.min_tokens}: an answer that follows {form.field} ends by itself; drop min_tokens"
        raise Refusal(400, said, param="min_tokens")
    if site.grammars is None:
        raise Refusal(
            400,
            f"{form.field} needs a tokenizer and an end-of-sequence token; {site.name} lacks one: ask for plain text",
            param=form.field,
        )
    try:
        return await in_turn(request, site.compiling, site.grammars.guides, form)
    except ValueError as error:
        raise Refusal(400, str(error), param=form.field) from error


def requests_of(
    site: Site,
    body: SamplingFields,
    prompts: Sequence[Sequence[int]],
    bias: Mapping[int, float],
    guide: Callable[[], Guide] | None = None,
    tenant: str = "",
) -> list[Generate]:
    """Return one engine request per choice: `n` per prompt, with the seeds s, s + 1, ..., s + n - 1."""
    usual = site.model.generation_config.sampling().get("temperature", 1.0)
    try:
        sampling = site.model.sampling(**{"temperature": usual} | body.sampling())
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    named = {
        "logit_bias": bias,
        "allowed_token_ids": body.allowed_token_ids,
        "stop_token_ids": body.stop_token_ids,
    }
    for field, tokens in named.items():
        if wrong := [token for token in tokens or () if not 0 <= token < site.model.config.vocab_size]:
            last = site.model.config.vocab_size - 1
            raise Refusal(400, f"{field} has token {wrong[0]}: token ids are from 0 to {last}", param=field)
    seed = uuid4().int % SEEDS if body.first_seed is None else body.first_seed
    limit = site.model.max_new_tokens(body.limit, site.context)
    if body.min_tokens > max(limit, 1):
        raise Refusal(400, f"min_tokens={body.min_tokens} exceeds max_tokens={limit}: lower it", param="min_tokens")
    shown = frozenset() if body.skip_special_tokens else special_ids(site, ends=body.ignore_eos)
    reported = (body.prompt_logprobs, body.ranks if body.echoes else None)
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
            bias=bias,
            top_logprobs=body.ranks or 0,
            prompt_logprobs=max((ranks for ranks in reported if ranks is not None), default=None),
            guide=guide,
            tenant=tenant,
            ends=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            min_tokens=min(body.min_tokens, max(1, min(limit, room))),
            allowed=body.allowed_token_ids,
            shown=shown,
        )
        found += [replace(one, seed=(seed + choice) % SEEDS) for choice in range(body.n)]
    return found


def speech_of(tokenizer: Tokenizer | None, body: ChatBody, prompt: Sequence[int], *, guided: bool) -> Speech:
    """Return the splitter of the answer, which with a grammar has no reasoning, and no call but a forced one."""
    if guided or tokenizer is None:
        return Speech(forced=guided and body.forced, tools=schemas(body.offered) if body.forced else None)
    end = tokenizer.decode(prompt[-LAST:], skip_special=False).rstrip()
    begun = "".join(body.messages[-1].texts) if body.continue_final_message else ""
    thinking = (pair for pair in THOUGHTS if end.endswith(pair[0]) or begun.rfind(pair[0]) > begun.rfind(pair[1]))
    return Speech(
        schemas(body.offered),
        single=body.parallel_tool_calls is False,
        thoughts=THOUGHTS,  # of any model: fine-tuning teaches reasoning without a word in the template
        thinking=next(thinking, None),
    )


def special_ids(site: Site, *, ends: bool) -> frozenset[int]:
    """Return the ids of the special tokens; those that end an answer only with `ends`."""
    eos = () if ends else site.model.config.eos_ids
    return frozenset(id for id, _ in _specials(site.model.tokenizer) if id not in eos)


def shown_ids(tokenizer: Tokenizer | None, body: ChatBody) -> frozenset[int]:
    """Return the ids of the special tokens whose names must stay in the answer's text, so that it can be split."""
    wanted = {mark for pair in THOUGHTS for mark in pair} | (SPECIAL if body.offered else frozenset())
    return frozenset(id for id, name in _specials(tokenizer) if name in wanted)


def _specials(tokenizer: Tokenizer | None) -> list[tuple[int, str]]:
    added = {} if tokenizer is None else tokenizer.backend.get_added_tokens_decoder()
    return [(id, token.content) for id, token in added.items() if token.special]
