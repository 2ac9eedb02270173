"""Routes that turn text into tokens and back, under the names that vLLM uses."""

from functools import partial

from fastapi import FastAPI, Request

from tessera.serve.protocol import DetokenizeBody, TokenizeBody
from tessera.serve.reference import described
from tessera.serve.schema import Refusal
from tessera.serve.site import Site, check_model, tokenizer_of
from tessera.serve.turns import in_turn


def add_tokens(app: FastAPI, site: Site) -> None:
    """Add the routes that turn text into tokens and back."""

    @app.post("/tokenize", openapi_extra=described(TokenizeBody))
    async def tokenize(request: Request) -> dict:
        body = await site.bodies.of(request, TokenizeBody)
        check_model(site, body.model)
        encode = partial(tokenizer_of(site).encode, add_special=body.add_special_tokens)
        tokens = await in_turn(request, site.encoding, encode, body.prompt)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": site.context}

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody))
    async def detokenize(request: Request) -> dict:
        body = await site.bodies.of(request, DetokenizeBody)
        check_model(site, body.model)
        tokenizer = tokenizer_of(site)
        if max(body.tokens) >= tokenizer.vocab_size:
            said = f"tokens has {max(body.tokens)}: token ids are from 0 to {tokenizer.vocab_size - 1}"
            raise Refusal(400, said, param="tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special=False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict:
        specials = tokenizer_of(site).specials
        return {name: specials.get(name) for name in ("bos_token", "eos_token", "pad_token")}
