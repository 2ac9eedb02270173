"""The HTTP routes: OpenAI's completions and chat completions, tokenization, health, metrics, and a chat page."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from tessera.runtime.requests import Event
from tessera.serve import asking
from tessera.serve.api.openapi import HEADERS, describe, described
from tessera.serve.api.openapi import page as reference
from tessera.serve.api.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingFields,
    StreamOptions,
    TokenizeBody,
)
from tessera.serve.api.replies import Reply
from tessera.serve.api.schema import Refusal
from tessera.serve.api.speech import Speech
from tessera.serve.edge import server
from tessera.serve.edge.front import TENANT
from tessera.serve.edge.turns import in_turn, unless_gone
from tessera.serve.metrics import METRICS_TYPE
from tessera.serve.page import page
from tessera.serve.response import ChoiceState, Stream, all_ends, echoes_of, put_prompts, stream, usage_of
from tessera.serve.service import Service
from tessera.serve.site import JSONResponse, Site, check_model, refusal_response, tokenizer_of

logger = logging.getLogger(__name__)


def create(site: Site) -> FastAPI:
    app = FastAPI(
        title="Tessera", version=version("tessera-attention"), docs_url=None, redoc_url=None, redirect_slashes=False
    )

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
        check_model(site, body.model)
        encoding = partial(asking.encode_prompt, add_special=body.add_special_tokens)
        # one turn per prompt: otherwise a request with 64 long prompts would hold the tokenizer for seconds
        prompts = [
            await in_turn(request, site.encoding, encoding, site, prompt, f"prompt {index}")
            for index, prompt in enumerate(body.prompts)
        ]
        return await _answer(request, site, body, prompts)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat(request: Request) -> Response:
        body = await site.bodies.of(request, ChatBody)
        check_model(site, body.model)
        tokens = await in_turn(request, site.encoding, asking.render, site, body)
        return await _answer(request, site, body, [tokens])

    served = {"id": site.name, "object": "model", "created": int(time.time()), "owned_by": "tessera"}
    served["max_model_len"] = site.context

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request) -> dict:
        check_model(site, request.path_params["name"])
        return served

    _add_pages(app)
    _add_tokens(app, site)
    _add_state(app, site.service)
    describe(app, (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody))  # last: it makes FastAPI read the routes
    return app


def run(site: Site, bound: socket.socket, keys: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
    """Serve on a socket from `server.listen` until SIGTERM, SIGHUP or Ctrl-C, and return after the last response."""
    running = server.Server(server.configured(create(site), keys, origins=origins), site.service)
    server.take_signals(running)
    closed = getattr(signal, "SIGHUP", None)  # of the server's terminal; Windows has no such signal
    if closed is not None and signal.getsignal(closed) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(closed, running.handle_exit)
    logger.info("%s at %s/v1, warming up", site.name, server.address(bound))
    running.run(sockets=[bound])


def _add_pages(app: FastAPI) -> None:
    html, headers = page()

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference(app.openapi()), headers=HEADERS)


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
        return Response(service.metrics.text(), media_type=METRICS_TYPE)


def _add_tokens(app: FastAPI, site: Site) -> None:
    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> dict:
        body = await site.bodies.of(request, TokenizeBody)
        check_model(site, body.model)
        if body.parts is None:
            tokens = await in_turn(request, site.encoding, asking.render, site, body)
        else:
            encode = partial(asking.encode_parts, add_special=body.adds_special, parse_special=body.parse_special)
            tokens = await in_turn(request, site.encoding, encode, site, body.parts)
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": site.context}
        if body.return_token_strs:
            found["token_strs"] = [tokenizer_of(site).backend.id_to_token(token) for token in tokens]
        if body.with_pieces:
            found["tokens"] = [{"id": token, "piece": _piece(site, token)} for token in tokens]
        return found

    @app.post("/apply-template", openapi_extra=described(ChatBody))
    async def apply_template(request: Request) -> dict:
        body = await site.bodies.of(request, ChatBody)
        check_model(site, body.model)
        return {"prompt": await in_turn(request, site.encoding, asking.templated, site, body)}

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody))
    async def detokenize(request: Request) -> dict:
        body = await site.bodies.of(request, DetokenizeBody)
        check_model(site, body.model)
        tokenizer = tokenizer_of(site)
        if (last := max(body.tokens, default=0)) >= tokenizer.vocab_size:
            said = f"tokens has {last}: token ids are from 0 to {tokenizer.vocab_size - 1}"
            raise Refusal(400, said, param="tokens")
        text = tokenizer.decode(body.tokens, skip_special=False)
        return {"prompt": text, "content": text}  # for vLLM's clients and for llama.cpp's

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict:
        specials = tokenizer_of(site).specials
        return {name: specials.get(name) for name in ("bos_token", "eos_token", "pad_token")}


def _piece(site: Site, token: int) -> str | list[int]:
    """Return the text of a token or, for a part of a character, its bytes, as llama.cpp does."""
    spelt = tokenizer_of(site).token_bytes(token)
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return list(spelt)


async def _answer(request: Request, site: Site, body: SamplingFields, prompts: Sequence[Sequence[int]]) -> Response:
    guide = await asking.guide_for(request, site, body)
    bias = await in_turn(request, site.encoding, asking.bias_of, site, body) if body.biases else {}
    asked = asking.requests_of(site, body, prompts, bias, guide, request.scope.get(TENANT, ""))
    chat, tokenizer, logged = isinstance(body, ChatBody), site.model.tokenizer, body.ranks is not None
    if chat:
        shown = asking.shown_ids(tokenizer, body)
        asked = [replace(one, shown=one.shown | shown) for one in asked]
    answers = [
        ChoiceState(
            index=index,
            prompt=index // body.n,
            policies=partial(site.service.policies_of, one),
            prompt_tokens=len(one.prompt),
            speech=asking.speech_of(tokenizer, body, one.prompt, guided=guide is not None) if chat else Speech(),
            tokens=[] if logged else None,
        )
        for index, one in enumerate(asked)
    ]
    if body.echoes:
        echoes = await asyncio.to_thread(echoes_of, site, body, prompts)
        for answer in answers:
            answer.echo = echoes[answer.prompt]
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def deliver(answer: ChoiceState, event: Event) -> None:
        with suppress(RuntimeError):  # the server has been stopped, and its loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, (answer, event))

    jobs = site.service.submit(*((one, partial(deliver, answer)) for one, answer in zip(asked, answers)))
    for answer, job in zip(answers, jobs):
        answer.job = job
    reply = Reply(site.name, chat, partial(_spell, site))
    if body.stream:
        pieces = stream(reply, answers, queue, body.stream_options or StreamOptions())
        return Stream(pieces, partial(_drop, site, answers))
    try:
        await unless_gone(request.receive, all_ends(queue, len(answers)))
    finally:
        _drop(site, answers)
    return JSONResponse(await asyncio.to_thread(_whole, body, reply, answers))


def _whole(body: SamplingFields, reply: Reply, answers: Sequence[ChoiceState]) -> dict[str, Any]:
    if body.echoes:
        put_prompts(answers)
    choices = [reply.choice(one.index, one.end.generation, one.speech, one.tokens) for one in answers]
    found = reply.whole(choices, usage_of(answers))
    if body.prompt_logprobs is not None:
        for answer, choice in zip(answers, found["choices"]):
            at = found if reply.chat else choice  # where vLLM has them
            at["prompt_logprobs"] = reply.prompt_logprobs(answer.end.prompt, body.prompt_logprobs)
    return found


def _drop(site: Site, answers: Sequence[ChoiceState]) -> None:
    """Cancel the choices that have not ended, because the client left or another choice failed."""
    for answer in answers:
        if answer.end is None:
            site.service.cancel(answer.job)


def _spell(site: Site, token: int) -> bytes:
    tokenizer = site.model.tokenizer
    return str(token).encode() if tokenizer is None else tokenizer.token_bytes(token)
