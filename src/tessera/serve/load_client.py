"""A load client: sends completion requests to a server at random times and measures the latencies that users see.

Arrivals are a Poisson process (open loop): a slow server does not slow the clients down, so queueing shows. Latencies
are measured between pieces of text:

    ttft        time of the first piece - time when the request was sent
    itl         time of a piece - time of the piece before it
    goodput     complete requests per second whose ttft and largest itl are within the given limits
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx2
import numpy as np

from tessera.core import interrupt
from tessera.core.escapes import escaped

PERCENTILES = (50, 90, 99)
TEXT = (
    "A tile is a run of consecutive keys. The plan fixes, for every layer and head of one model, how many tiles it "
    "reads and which layer chooses them. Who asks for the number of the red door? It is written on the third page, "
    "under the picture of the harbour, where 4 ships wait for the tide and 17 gulls for the cook."
)
"""Text whose tokens make up the prompts."""
LOOK_S = 0.1
"""Seconds between checks for Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to send to a server.

    Attributes:
        rate: mean requests per second; inf sends all at once.
        clients: maximum number of open requests; None sets no limit. With a limit and rate inf, each new request waits
            until an earlier one has ended (closed loop).
        shared_tokens: number of leading tokens that all prompts share.
        seed: seed of arrival times and prompts.
        limit_s: seconds without a byte from the server after which a request counts as failed.
    """

    rate: float
    requests: int
    clients: int | None = None
    prompt_tokens: int = 256
    shared_tokens: int = 0
    new_tokens: int = 32
    seed: int = 0
    limit_s: float = 600.0


@dataclass(eq=False)
class Outcome:
    """Result of one request: text, seconds from sending the request to each piece of text, usage, and any error."""

    text: str = ""
    pieces_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None


def arrivals(load: Load) -> list[float]:
    """Return the seconds after the start at which to send each request."""
    rng, at, found = random.Random(load.seed), 0.0, []
    for _ in range(load.requests):
        found.append(at)
        at += 0.0 if load.rate == float("inf") else rng.expovariate(load.rate)
    return found


def prompts(load: Load, tokens: Sequence[int]) -> list[list[int]]:
    """Return the prompts, made of random runs of `tokens`; all prompts start with the same `shared_tokens` tokens."""
    rng = random.Random(load.seed + 1)

    def draw(count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            start = rng.randrange(len(tokens))
            found += tokens[start : start + rng.randint(3, 12)]
        return found[:count]

    shared = draw(load.shared_tokens)
    return [shared + draw(load.prompt_tokens - len(shared)) for _ in range(load.requests)]


async def run(
    url: str, load: Load, *, key: str | None = None, progress: Callable[[Outcome], Any] | None = None
) -> tuple[list[Outcome], float]:
    """Send the load to a server; return the outcomes in the order of sending, and the seconds of the whole run.

    Ctrl-C ends the run; the outcomes are then those of the requests that have ended. `progress` is called with each
    outcome as soon as its request has ended.

    Raise ValueError if `url` is not an address, or the server does not answer or refuses /tokenize.
    """
    try:
        address = httpx2.URL(url.strip())
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url} is not an address ({error}): pass one such as http://127.0.0.1:8000") from error
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=load.clients or 100)
    gate = asyncio.Semaphore(load.clients or load.requests)
    async with httpx2.AsyncClient(base_url=address, headers=headers, timeout=load.limit_s, limits=limits) as client:
        texts = prompts(load, await tokens_of(client, str(address.copy_with(userinfo=b""))))
        ended: dict[int, Outcome] = {}
        began = time.perf_counter()

        async def one(index: int, at: float, prompt: Sequence[int]) -> None:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            async with gate:
                ended[index] = await ask(client, prompt, load.new_tokens)
            if progress is not None:
                progress(ended[index])

        all_sent = asyncio.gather(*(one(*each) for each in zip(itertools.count(), arrivals(load), texts)))
        while not all_sent.done() and not interrupt.asked():
            await asyncio.wait([all_sent], timeout=LOOK_S)
        seconds = time.perf_counter() - began
        all_sent.cancel()
        with suppress(asyncio.CancelledError):
            await all_sent
        return [ended[index] for index in sorted(ended)], seconds


async def tokens_of(client: httpx2.AsyncClient, url: str) -> list[int]:
    """Return the server's tokens of TEXT; raise ValueError if it does not answer /tokenize with token ids."""
    try:
        found = await client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})
    except httpx2.HTTPError as error:
        raise ValueError(f"{url} does not answer ({error}): start `tessera serve`, or use another URL") from error
    if found.status_code == 401:
        raise ValueError(f"{url} refuses the API key: pass a file that holds a valid key with --api-key-file")
    if found.status_code != 200:
        raise ValueError(f"{url}/tokenize answers {_refusal(found)}")
    try:
        tokens = [int(token) for token in found.json()["tokens"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url}/tokenize does not answer as `tessera serve` or vLLM does: use another URL") from error
    if not tokens:
        raise ValueError(f"{url}/tokenize answers without tokens: use another URL")
    return tokens


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
    """Add an event of a stream to the outcome. Other servers leave out fields, or send null."""
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
        outcome.error = escaped(failure.get("message", failure) if isinstance(failure, dict) else failure, 100)
    match event:
        case {"usage": {"prompt_tokens": int(), "completion_tokens": int()} as usage}:
            outcome.usage = usage


def _refusal(response: httpx2.Response) -> str:
    """Return the status with which a server refused a request, and why."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):  # not a server with OpenAI's API
        said = response.text
    return f"status {response.status_code}: {escaped(said, 200)}".removesuffix(": ")


def summary(
    load: Load, outcomes: Sequence[Outcome], seconds: float, *, ttft_s: float | None = None, itl_s: float | None = None
) -> dict[str, Any]:
    """Summarise a run of `seconds` as JSON data: counts, tokens per second, and percentiles of ttft and itl in seconds.

    Include the goodput if at least one of its limits, `ttft_s` and `itl_s` (seconds), is given.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    ttft = [outcome.pieces_s[0] for outcome in good if outcome.pieces_s]
    itl = [gap for outcome in good for gap in np.diff(outcome.pieces_s).tolist()]
    usages = [outcome.usage for outcome in good]
    found = {
        "load": asdict(load) | {"rate": None if load.rate == float("inf") else load.rate},
        "seconds": seconds,
        "completed": len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        "prompt_tokens_per_s": sum(usage["prompt_tokens"] for usage in usages) / seconds,
        "tokens_per_s": sum(usage["completion_tokens"] for usage in usages) / seconds,
        "cached_tokens": sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages),
        "ttft_s": _percentiles(ttft),
        "itl_s": _percentiles(itl),
    }
    densities = [usage["tessera"]["density"] for usage in usages if "tessera" in usage]
    if densities:
        found["density"] = float(np.mean(densities))
    if ttft_s is not None or itl_s is not None:
        met = [outcome for outcome in good if _meets(outcome, ttft_s, itl_s)]
        found["goodput_per_s"] = len(met) / seconds
    return found


def _meets(outcome: Outcome, ttft_s: float | None, itl_s: float | None) -> bool:
    gaps = np.diff(outcome.pieces_s)
    first = outcome.pieces_s[0] if outcome.pieces_s else 0.0
    return (ttft_s is None or first <= ttft_s) and (itl_s is None or not gaps.size or gaps.max() <= itl_s)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
