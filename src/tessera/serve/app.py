"""The HTTP routes: OpenAI's completions and chat completions, tokenization, health, metrics, and a chat page."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.responses import JSONResponse as UnicodeResponse

from tessera.generate import Model
from tessera.models.chat_template import Unavailable
from tessera.runtime.requests import Event, Guide, check_tokens
from tessera.runtime.requests import Request as Generate
from tessera.serve.bodies import Bodies
from tessera.serve.front import TENANT
from tessera.serve.grammar import Grammars
from tessera.serve.mail import Mail
from tessera.serve.page import page
from tessera.serve.protocol import (
    CHAT_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingFields,
    StreamOptions,
    TokenizeBody,
)
from tessera.serve.reference import HEADERS, describe, described
from tessera.serve.reference import page as reference
from tessera.serve.replies import Reply, echoed
from tessera.serve.response import Answer, Stream, all_ends, stream, usage_of
from tessera.serve.schema import Refusal
from tessera.serve.service import Service
from tessera.serve.tools import Speech, encode
from tessera.serve.turns import Turns, in_turn, unless_gone

START, SLACK = 8, 64
"""Characters per token of the context to encode first, of a longer text, and tokens by which that may exceed the
context."""


class JSONResponse(UnicodeResponse):
    """Response of JSON in ASCII: an answer may hold half of a surrogate pair, which has no UTF-8 bytes."""

    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Site:
    """The model that the routes serve, and the service that runs it.

    Attributes:
        model: model with its tokenizer.
        name: the model's name in the API.
        service: thread that runs the engine.
        context: maximum tokens of one request, prompt and answer together.
        grammars: compiler of grammars for JSON answers; None if the model has no tokenizer or no end-of-sequence token.
        bodies: parser of request bodies.
        encoding: the only thread that encodes text, because the tokenizer is not thread-safe.
        compiling: the only thread that compiles grammars.
        mail: carries events from the service's thread to the event loop.
    """

    model: Model
    name: str
    service: Service
    context: int
    grammars: Grammars | None = None
    bodies: Bodies
    encoding: Turns = field(default_factory=Turns)
    compiling: Turns = field(default_factory=Turns)
    mail: Mail = field(default_factory=Mail)


def create(site: Site) -> FastAPI:
    """Build the FastAPI application that answers all routes for `site`."""
    app = FastAPI(
        title="Tessera", version=version("tessera-attention"), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    describe(app, (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody))

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        return refusal_response(error)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        # request.url would parse the Host header, which may be nonsense
        response = refusal_response(
            Refusal(error.status_code, f"no route {request.method} {request['path']:.200}: see /docs")
        )
        response.headers.update(error.headers or {})  # Allow, of a 405
        return response

    @app.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await site.bodies.of(request, CompletionBody)
        _check_model(site, body.model)
        # one turn per prompt: otherwise a request with 64 long prompts would hold the tokenizer for seconds
        prompts = [
            await in_turn(request, site.encoding, _encode, site, prompt, f"prompt {index}")
            for index, prompt in enumerate(body.prompts)
        ]
        return await _answer(request, site, body, prompts)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat(request: Request) -> Response:
        body = await site.bodies.of(request, ChatBody)
        _check_model(site, body.model)
        tokens = await in_turn(request, site.encoding, _render, site, body)
        return await _answer(request, site, body, [tokens])

    served = {"id": site.name, "object": "model", "created": int(time.time()), "owned_by": "tessera"}
    served["max_model_len"] = site.context

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request) -> dict:
        _check_model(site, request.path_params["name"])
        return served

    _add_pages(app)
    _add_tokens(app, site)
    _add_state(app, site.service)
    return app


def refusal_response(error: Refusal) -> JSONResponse:
    """Return the response that tells a client why its request is refused."""
    headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _add_pages(app: FastAPI) -> None:
    html, headers = page()

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference(app.openapi()), headers=HEADERS)


def _add_tokens(app: FastAPI, site: Site) -> None:
    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> dict:
        body = await site.bodies.of(request, TokenizeBody)
        _check_model(site, body.model)
        encode = partial(_tokenizer(site).encode, add_special=body.add_special_tokens)
        tokens = await in_turn(request, site.encoding, encode, body.prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": site.context}

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody))
    async def detokenize(request: Request) -> dict:
        body = await site.bodies.of(request, DetokenizeBody)
        _check_model(site, body.model)
        tokenizer = _tokenizer(site)
        if max(body.tokens) >= tokenizer.vocab_size:
            said = f"tokens has {max(body.tokens)}: token ids are from 0 to {tokenizer.vocab_size - 1}"
            raise Refusal(400, said, param="tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict:
        specials = _tokenizer(site).specials
        return {name: specials.get(name) for name in ("bos_token", "eos_token", "pad_token")}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.alive else 500)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if service.ready and not service.draining else 503)

    @app.get("/version")
    async def which() -> dict:
        return {"version": app.version}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_model(site: Site, name: str | None) -> None:
    if name is not None and name != site.name:
        raise Refusal(404, f"model={name!r:.80} is not served here: use {site.name!r}", param="model")


def _tokenizer(site: Site):
    if site.model.tokenizer is None:
        raise Refusal(400, f"{site.name} has no tokenizer: pass token ids to /v1/completions")
    return site.model.tokenizer


def _check_start(site: Site, text: str, param: str) -> None:
    """Refuse a long text whose start alone exceeds the context, because encoding all of it could take most of a second.

    At the end of the start, a token may be cut into several; SLACK allows for it.
    """
    start = text[: START * site.context]
    if len(start) < len(text) and len(_tokenizer(site).encode(start, add_special=False)) > site.context + SLACK:
        raise Refusal(400, f"{param} has over {site.context:,} tokens, but may have no more: shorten it", param=param)


def _encode(site: Site, prompt: str | Sequence[int], name: str) -> list[int]:
    if isinstance(prompt, str) and site.model.tokenizer is not None:
        _check_start(site, prompt, "prompt")
    try:
        return site.model.encode_prompt(prompt, name)
    except ValueError as error:
        raise Refusal(400, str(error), param="prompt") from error


def _render(site: Site, body: ChatBody) -> list[int]:
    _check_start(site, "".join(text for message in body.messages for text in message.texts), "messages")
    try:
        tokens = encode(_tokenizer(site), [message.plain() for message in body.messages], body.offered)
        check_tokens(tokens, site.model.config, "the conversation")
    except Unavailable as error:
        raise Refusal(503, str(error), retry_s=5) from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, str(error), param="messages") from error
    return tokens


async def _guide(request: Request, site: Site, body: SamplingFields) -> Callable[[], Guide] | None:
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


async def _answer(request: Request, site: Site, body: SamplingFields, prompts: Sequence[Sequence[int]]) -> Response:
    """Submit the choices of a request and return the response, whole or as a stream."""
    asked = requests_of(site, body, prompts, await _guide(request, site, body), request.scope.get(TENANT, ""))
    chat = isinstance(body, ChatBody)
    logged, tools = body.ranks is not None, {}
    if chat and body.offered:
        tools = {"offered": True, "forced": body.forced, "single": body.parallel_tool_calls is False}
    answers = [
        Answer(
            index=index,
            prompt=index // body.n,
            policy=site.service.policy_of(one),
            prompt_tokens=len(one.prompt),
            speech=Speech(**tools),
            tokens=[] if logged else None,
        )
        for index, one in enumerate(asked)
    ]
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(answer: Answer, event: Event) -> None:
        site.mail.post(loop, partial(queue.put_nowait, (answer, event)))

    jobs = site.service.submit(*((one, partial(deliver, answer)) for one, answer in zip(asked, answers)))
    for answer, job in zip(answers, jobs):
        answer.job = job
    reply, prompt_tokens = Reply(site.name, chat, partial(_spell, site)), sum(map(len, prompts))
    if body.stream:
        pieces = stream(reply, answers, queue, body.stream_options or StreamOptions(), prompt_tokens)
        return Stream(pieces, partial(_drop, site, answers))
    try:
        await unless_gone(request, all_ends(queue, len(answers)))
    finally:
        _drop(site, answers)
    return JSONResponse(await asyncio.to_thread(_whole, site, body, reply, answers, prompt_tokens))


def _whole(
    site: Site, body: SamplingFields, reply: Reply, answers: Sequence[Answer], prompt_tokens: int
) -> dict[str, Any]:
    if body.echoes:
        _echo(site, body, answers)
    generations, tokens = [answer.end.generation for answer in answers], [answer.tokens for answer in answers]
    speeches = [answer.speech for answer in answers]
    return reply.whole(generations, usage_of(answers, prompt_tokens), tokens, speeches)


def _echo(site: Site, body: CompletionBody, answers: Sequence[Answer]) -> None:
    """Put each choice's prompt before its answer."""
    for answer in answers:
        prompt = body.prompts[answer.prompt]
        if not isinstance(prompt, str):
            tokenizer = site.model.tokenizer
            prompt = "" if tokenizer is None else tokenizer.decode(prompt, skip_special=False)
        pieces = _pieces(site, answer.job.request.prompt, prompt)
        generation, answer.tokens = echoed(answer.end, prompt, body.limit, answer.tokens, pieces)
        answer.end = answer.end._replace(generation=generation)


def _pieces(site: Site, tokens: Sequence[int], text: str) -> list[str]:
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


def _drop(site: Site, answers: Sequence[Answer]) -> None:
    """Cancel the choices that have not ended, because the client disconnected or another choice failed."""
    for answer in answers:
        if answer.end is None:
            site.service.cancel(answer.job)


def _spell(site: Site, token: int) -> bytes:
    tokenizer = site.model.tokenizer
    return str(token).encode() if tokenizer is None else tokenizer.token_bytes(token)
