"""Routes that turn text and conversations into tokens and back, under the names that vLLM and llama.cpp use."""

from functools import partial

from fastapi import FastAPI, Request

from tessera.serve.api.openapi import described
from tessera.serve.api.protocol import ChatBody, DetokenizeBody, TokenizeBody
from tessera.serve.api.schema import Refusal
from tessera.serve.asking import encode_parts, render, templated
from tessera.serve.edge.turns import in_turn
from tessera.serve.site import Site, check_model, tokenizer_of


def add_tokens(app: FastAPI, site: Site) -> None:

    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> dict:
        body = await site.bodies.of(request, TokenizeBody)
        check_model(site, body.model)
        if body.parts is None:
            tokens = await in_turn(request, site.encoding, render, site, body)
        else:
            encode = partial(encode_parts, add_special=body.adds_special, parse_special=body.parse_special)
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
        return {"prompt": await in_turn(request, site.encoding, templated, site, body)}

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
