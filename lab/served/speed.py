"""Cases that measure speed: many clients at once, a shared document, a steady load, a greedy tenant.

Each case takes a `Stand`, which runs the server, and a seed. It returns (name -> figure, name -> fact). A figure of
speed divides one measurement by another from the same run, so a busy machine affects both.
"""

import asyncio
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from lab.served.child import Client
from lab.served.load_client import Outcome
from lab.served.stand import SLOTS, Sizes, Stand, first_s, gaps_s, jain, percentile, rate

Found = tuple[Mapping[str, float], Mapping[str, Any]]

QUESTIONS, QUESTION_TOKENS = 8, 32
ANSWER_TOKENS = 16
"""Tokens of the answer to a question about a document."""
LOAD = 0.7
"""Request rate at which `load` measures latencies, as a share of the measured throughput."""
STREAMS, STREAM_TOKENS = 8, 256
"""Number of streams that run while a long prompt is prefilled, and the tokens of each stream."""
CHUNK = 256
"""Tokens of a server's largest prefill step on a CPU."""
CHUNKS = 5
"""Number of prompts by which the time of one such step is measured."""
OTHERS, GREEDY = 3, 10
"""Number of tenants besides the greedy one, and load of the greedy tenant as a multiple of another tenant's."""
OTHERS_SHARE = 0.1
"""Load of each other tenant, as a share of the throughput, while `fairness` measures latencies."""


def crowd(stand: Stand, seed: int) -> Found:
    """Compare the tokens per second of SLOTS concurrent clients with those of one client."""
    sizes, server = stand.sizes, stand.server()

    async def talk(client: Client) -> Found:
        prompts = client.prompts(SLOTS // 2 + 2 * SLOTS, sizes.prompt, seed=seed)
        before_s = server.processor_s
        alone, alone_s = await client.crowd(prompts[: SLOTS // 2], sizes.new, clients=1)
        between_s = server.processor_s
        many, many_s = await client.crowd(prompts[SLOTS // 2 :], sizes.new, clients=SLOTS)
        one, all_ = rate(alone, alone_s), rate(many, many_s)
        facts = {
            "one_processor_s_per_token": 1 / rate(alone, between_s - before_s),
            "crowd_processor_s_per_token": 1 / rate(many, server.processor_s - between_s),
            "one_tokens_per_s": one,
            "crowd_tokens_per_s": all_,
            "one_gap_p50_s": percentile(gaps_s(alone), 50),
            "crowd_gap_p50_s": percentile(gaps_s(many), 50),
            "one_first_p50_s": percentile(first_s(alone), 50),
        }
        return {"speedup": all_ / one}, facts

    return server.drive(talk)


def document(stand: Stand, seed: int) -> Found:
    """Compare the time to first text of later questions about one document with that of the first question.

    Tenants with empty caches ask the same questions and must get the same answers. As a control, the comparison is
    repeated with prompts of the same length that share no tokens.
    """
    sizes, count = stand.sizes, QUESTIONS

    async def talk(client: Client) -> Found:
        prompts = client.prompts(count, sizes.document + QUESTION_TOKENS, seed=seed, shared=sizes.document)
        others = client.prompts(count, sizes.document + QUESTION_TOKENS, seed=seed + 500)
        told = [await client.ask(prompt, ANSWER_TOKENS) for prompt in prompts]
        apart = [await client.ask(prompt, ANSWER_TOKENS) for prompt in others]
        cold = [await client.ask(prompt, ANSWER_TOKENS, tenant=1 + i) for i, prompt in enumerate(prompts)]
        if any(cached(found) for found in (*apart, *cold)):
            raise ValueError("a prompt that should be new was found in the cache: run this case on a new server")
        first, *later = first_s(told)
        other, *others_later = first_s(apart)
        figures = {
            "later_of_first": percentile(later, 50) / first,
            "control": percentile(others_later, 50) / other,
            "differing": sum(a.text != b.text for a, b in zip(told, cold, strict=True)),
        }
        facts = {"first_s": first, "later_s": later, "cached_tokens": [cached(found) for found in told]}
        return figures, facts | {"document_tokens": sizes.document}

    return stand.server().drive(talk)


def cached(outcome: Outcome) -> int:
    """Return the number of prompt tokens that the server found in its cache."""
    return (outcome.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def load(stand: Stand, seed: int) -> Found:
    """Measure latencies at LOAD times the throughput, and the gaps in running streams when a long prompt joins them."""
    sizes, count = stand.sizes, stand.scaled(4 * SLOTS)

    async def talk(client: Client) -> Found:
        prompts = client.prompts(QUESTIONS + 2 * SLOTS + count, sizes.prompt, seed=seed)
        quiet, _ = await client.crowd(prompts[:QUESTIONS], sizes.new, clients=1)
        most = prompts[QUESTIONS : QUESTIONS + 2 * SLOTS]
        _, most_s = await client.crowd(most, sizes.new, clients=SLOTS)
        per_s = LOAD * len(most) / most_s
        told = await poisson(client, prompts[-count:], sizes.new, per_s=per_s, seed=seed)
        unloaded, gaps = percentile(first_s(quiet), 50), gaps_s(told)
        figures = {
            "first_p99_of_unloaded": percentile(first_s(told), 99) / unloaded,
            "gap_p99_of_p50": percentile(gaps, 99) / percentile(gaps, 50),
        }
        facts = {"requests_per_s": per_s, "unloaded_first_p50_s": unloaded, "gap_p50_s": percentile(gaps, 50)}
        more, beside = await long_prompt(client, stand, seed)
        return figures | more, facts | beside

    return stand.server().drive(talk)


async def poisson(
    client: Client, prompts: list[list[int]], new_tokens: int, *, per_s: float, seed: int, tenant: int = 0
) -> list[Outcome]:
    """Send prompts at random times, `per_s` a second on average, without waiting for earlier answers."""
    starts = np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, len(prompts)))

    async def one(at_s: float, prompt: list[int]) -> Outcome:
        await asyncio.sleep(at_s)
        return await client.ask(prompt, new_tokens, tenant=tenant)

    return await asyncio.gather(*map(one, starts, prompts))


async def long_prompt(client: Client, stand: Stand, seed: int) -> Found:
    """Measure how long a long prompt stalls running streams.

    The figure is the longest gap between a stream's texts during the long prompt's prefill, divided by the time of one
    chunk plus the usual gap. The time of a chunk is the median time to the first text of equally long prompts of which
    all but the last CHUNK tokens are in the server's cache, sent while no other request runs.
    """
    length = stand.sizes.long
    first, second, *others = client.prompts(2 + CHUNKS, length, seed=seed + 700)
    alone_s = first_s([await client.ask(first, 1)])[0]
    told = [await client.ask(first[:-CHUNK] + other[-CHUNK:], 1) for other in others]
    if any(cached(found) != length - CHUNK for found in told):
        raise ValueError(f"the cache should hold {length - CHUNK} tokens of these prompts: {[*map(cached, told)]}")
    chunk_s = percentile(first_s(told), 50)
    streams = client.prompts(2 * STREAMS, 64, seed=seed + 800)
    _, start_s = await client.crowd(streams[STREAMS:], 2, clients=STREAMS)
    began = time.perf_counter()
    running = asyncio.create_task(client.crowd(streams[:STREAMS], STREAM_TOKENS, clients=STREAMS))
    await asyncio.sleep(2 * start_s)
    sent_s = time.perf_counter() - began
    joined_s = sent_s + first_s([await client.ask(second, 1)])[0]
    told, _ = await running
    inside, outside = [], []
    for found in told:
        for before, after in pairwise(found.pieces_s):
            (inside if before < joined_s and after > sent_s else outside).append(after - before)
    facts = {
        "long_tokens": length,
        "long_alone_s": alone_s,
        "long_beside_s": joined_s - sent_s,
        "chunk_s": chunk_s,
        "usual_gap_s": percentile(outside, 50),
        "longest_gap_s": percentile(inside, 100),
        "streams_beside": sum(found.pieces_s[-1] > joined_s for found in told),
    }
    return {"gap_of_chunk": facts["longest_gap_s"] / (chunk_s + facts["usual_gap_s"])}, facts


def fairness(stand: Stand, seed: int) -> Found:
    """Serve three equal tenants and one with ten times the load of each: with full queues, then at fixed rates."""
    sizes, count = stand.sizes, stand.scaled(12 * SLOTS)
    tenants = range(OTHERS + 1)  # the first is the greedy one

    async def talk(client: Client) -> Found:
        served, seconds = await contend(client, sizes, count, seed)
        per_s = OTHERS_SHARE * sum(served) / (sizes.prompt + sizes.new) / seconds
        each = stand.scaled(SLOTS)
        prompts = client.prompts((GREEDY + 2 * OTHERS) * each, sizes.prompt, seed=seed + 300)

        async def others(start: int) -> float:
            parts = [prompts[start + i * each : start + (i + 1) * each] for i in range(OTHERS)]
            told = await asyncio.gather(
                *(
                    poisson(client, part, sizes.new, per_s=per_s, seed=seed + i, tenant=i)
                    for i, part in zip(tenants[1:], parts)
                )
            )
            return percentile([s for part in told for s in first_s(part)], 99)

        without = await others(0)
        greedy = asyncio.create_task(
            poisson(client, prompts[-GREEDY * each :], sizes.new, per_s=GREEDY * per_s, seed=seed)
        )
        beside = await others(OTHERS * each)
        await greedy
        facts = {"served_tokens": served, "requests_per_s": per_s, "first_p99_s": [without, beside]}
        return {"jain": jain(served), "others_p99_ratio": beside / without}, facts

    return stand.server().drive(talk)


async def contend(client: Client, sizes: Sizes, count: int, seed: int) -> tuple[list[int], float]:
    """Let all tenants keep requests open until `count` have ended in total; return tokens per tenant, and seconds.

    The greedy tenant keeps GREEDY * SLOTS / 2 requests open, and each other tenant SLOTS / 2. The tokens and seconds of
    the first third of the requests are not counted, since a tenant may at first get ahead by its longest request.
    """
    clients = [SLOTS // 2] * OTHERS
    clients.insert(0, GREEDY * SLOTS // 2)
    tokens, ends_s = [0] * len(clients), []
    prompts = iter(client.prompts(count + sum(clients), sizes.prompt, seed=seed))
    began = time.perf_counter()

    async def worker(tenant: int) -> None:
        while len(ends_s) < count:
            found = await client.ask(next(prompts), sizes.new, tenant=tenant)
            if len(ends_s) < count:
                tokens[tenant] += found.usage["total_tokens"] * (len(ends_s) >= count // 3)
                ends_s.append(time.perf_counter() - began)

    await asyncio.gather(*(worker(tenant) for tenant, open_ in enumerate(clients) for _ in range(open_)))
    return tokens, ends_s[-1] - ends_s[count // 3]
