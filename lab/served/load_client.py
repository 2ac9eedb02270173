"""Send completion requests to a server, and note when each piece of text comes back."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

TEXT = (
    "A tile is a run of consecutive keys. The plan fixes, for every layer and head of one model, how many tiles it "
    "reads and which layer chooses them. Who asks for the number of the red door? It is written on the third page, "
    "under the picture of the harbour, where 4 ships wait for the tide and 17 gulls for the cook."
)
"""Text whose tokens make up the prompts."""


@dataclass(eq=False)
class Outcome:
    """Result of one request: text, seconds from sending the request to each piece of text, usage, and any error."""

    text: str = ""
    pieces_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None


async def tokens_of(client: httpx2.AsyncClient) -> list[int]:
    """Return the server's tokens of TEXT."""
    found = await client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})
    return found.raise_for_status().json()["tokens"]


def prompts(tokens: Sequence[int], count: int, length: int, *, seed: int, shared: int = 0) -> list[list[int]]:
    """Return prompts of `length` tokens, made of random runs of `tokens`; all start with the same `shared` tokens."""
    rng = random.Random(seed + 1)

    def draw(size: int) -> list[int]:
        found: list[int] = []
        while len(found) < size:
            start = rng.randrange(len(tokens))
            found += tokens[start : start + rng.randint(3, 12)]
        return found[:size]

    start = draw(shared)
    return [start + draw(length - shared) for _ in range(count)]


async def ask(
    client: httpx2.AsyncClient,
    prompt: Sequence[int],
    new_tokens: int,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Stream one completion and return its outcome.

    `options` are further fields of the request's body. Without a temperature among them, decoding is greedy.
    """
    body = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "stream": True} | options
    outcome, began = Outcome(), time.perf_counter()
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}, headers=headers
        ) as found:
            if found.status_code != 200:
                await found.aread()
                outcome.error = _refusal(found)
                return outcome
            async for event in httpx2.EventSource(found):
                if event.data.strip() not in ("", "[DONE]"):
                    _take(event.data, time.perf_counter() - began, outcome)
    except httpx2.HTTPError as error:
        outcome.error = type(error).__name__
    if outcome.usage is None and outcome.error is None:
        outcome.error = "the stream ended early, or without token counts"
    return outcome


def _take(data: str, now_s: float, outcome: Outcome) -> None:
    """Add an event of a stream to the outcome."""
    try:
        event = json.loads(data)
        failure = event.get("error")
        text = (event.get("choices") or [{}])[0].get("text") or ""
        outcome.text += text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        outcome.error = "an event is not one of OpenAI's API"
        return
    if text:
        outcome.pieces_s.append(now_s)
    if failure:
        outcome.error = str(failure.get("message", failure) if isinstance(failure, dict) else failure)[:100]
    match event:
        case {"usage": {"prompt_tokens": int(), "completion_tokens": int()} as usage}:
            outcome.usage = usage


def _refusal(response: httpx2.Response) -> str:
    """Return the status with which a server refused a request, and why."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):  # not a server with OpenAI's API
        said = response.text
    return f"status {response.status_code}: {said:.200}".removesuffix(": ")
