"""The model that the routes serve, and what all routes share: checks and the JSON response of a refusal."""

import json
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse as UnicodeResponse

from tessera.generate import Model
from tessera.models.text.tokenizer import Tokenizer
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.bodies import Bodies
from tessera.serve.edge.turns import Turns
from tessera.serve.grammar import Grammars
from tessera.serve.service import Service


class JSONResponse(UnicodeResponse):
    """Response of JSON in ASCII: an answer may hold half of a surrogate pair, which has no UTF-8 bytes."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Site:
    """The model that the routes serve, and the service that runs it.

    Attributes:
        context: maximum tokens of one request, prompt and answer together.
        grammars: compiler of grammars; None if the model has no tokenizer or no end-of-sequence token.
        encoding: the only thread that encodes text, because the tokenizer is not thread-safe.
        compiling: the only thread that compiles grammars.
    """

    model: Model
    name: str
    service: Service
    context: int
    grammars: Grammars | None = None
    bodies: Bodies
    encoding: Turns = field(default_factory=Turns)
    compiling: Turns = field(default_factory=Turns)


def refusal_response(error: Refusal) -> JSONResponse:
    headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def check_model(site: Site, name: str | None) -> None:
    if name and name != site.name:  # "" is as good as nothing
        raise Refusal(404, f"model={name!r:.80} is not served here: use {site.name!r}", param="model")


def tokenizer_of(site: Site) -> Tokenizer:
    if site.model.tokenizer is None:
        raise Refusal(400, f"{site.name} has no tokenizer: pass token ids to /v1/completions")
    return site.model.tokenizer
