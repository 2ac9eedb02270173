"""Cases that count faults: leaks, answers that differ under `--exact`, a bad shutdown, and the harm that SIGKILL does.

Each case takes a `Stand`, which runs the server, and a seed. It returns (name -> figure, name -> fact).
"""

import asyncio
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx2

from lab.served import load_client as load
from lab.served.child import KEYS, READY_S, Client, Server, header, serving
from lab.served.load_client import Outcome
from lab.served.speed import Found
from lab.served.stand import SLOTS, Stand, rate
from tessera.runtime.spill import CHECKSUM_BYTES, NAME, checksum

REQUESTS = 10_000
"""Number of requests that `leaks` sends."""
CANCELLED, SLOW = 0.3, 0.1
"""Share of REQUESTS that the client drops, and share that it reads slowly."""
OPEN = 3 * SLOTS
"""Maximum number of requests that `leaks` keeps open at once."""
SETTLED = 0.1
"""Share of REQUESTS that end before `leaks` first reads the memory. By then, allocators and caches have grown."""
PROMPTS = 1000
"""Number of prompts that `exact` sends, first one at a time, then SLOTS at a time."""
KILLS = 100
STREAMS = 50
"""Number of streams that are open when `loss` kills a replica."""
HANG_S = 120.0
"""Seconds after which `loss` counts a stream without an end as hung."""
COMPILED = "tessera:recompiles_total"


def leaks(stand: Stand, seed: int) -> Found:
    """Send requests, drop some of them and read some slowly; measure leaks of pages, file handles and memory.

    It also counts recompilations, requests still open at the end, and requests that ended without a reason.
    """
    server, count = stand.server(), stand.scaled(REQUESTS)
    handles, first = server.handles, int(SETTLED * count)
    compiled = server.metric(COMPILED)
    ends = server.drive(lambda client: torment(client, first, seed))
    settled = server.memory_bytes
    ends += server.drive(lambda client: torment(client, count - first, seed + 1))
    until(lambda: not still_open(server))
    until(lambda: server.handles <= handles)  # connections close a moment after their last byte
    more = server.handles - handles
    figures = {
        "pages": server.metric("vllm:kv_cache_usage_perc"),
        "handles": more,
        "memory_growth": server.memory_bytes / settled - 1,
        "recompiles": server.metric(COMPILED) - compiled,
        "unfinished": still_open(server) + ends["unnamed"],
    }
    return figures, {"requests": count, "ends": ends, "memory_bytes": settled}


def still_open(server: Server) -> float:
    """Return how many requests the server runs or keeps waiting."""
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def until(condition, limit_s: float = 60.0) -> bool:
    """Wait at most `limit_s` seconds until the condition holds; return whether it does."""
    end = time.monotonic() + limit_s
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return held


async def torment(client: Client, count: int, seed: int, *, clients: int = OPEN) -> Counter[str]:
    """Send requests of random sizes, drop some at random times, read some slowly; count them by how they ended."""
    rng = random.Random(seed)
    gate, ends = asyncio.Semaphore(clients), Counter()
    prompts = client.prompts(count, 200, seed=seed, shared=48)

    async def one(prompt: list[int], new: int, drop_s: float | None, pause_s: float) -> None:
        async with gate:
            end = "dropped"
            with suppress(TimeoutError):
                async with asyncio.timeout(drop_s):
                    end = await read(client, prompt, new, pause_s)
            ends[end] += 1

    draws = [
        (
            prompt[: rng.randint(1, 200)],
            rng.randint(1, 24),
            rng.expovariate(1.0) if rng.random() < CANCELLED else None,
            0.05 if rng.random() < SLOW else 0.0,
        )
        for prompt in prompts
    ]
    await asyncio.gather(*(one(*draw) for draw in draws))
    return ends


async def read(client: Client, prompt: list[int], new: int, pause_s: float) -> str:
    """Stream an answer with pauses; return its finish reason or error, or "unnamed" if it has neither."""
    end, body = "unnamed", {"prompt": prompt, "max_tokens": new, "stream": True}
    try:
        async with client.http.stream("POST", "/v1/completions", json=body) as found:
            if found.status_code != 200:
                return f"status {found.status_code}"
            async for line in found.aiter_lines():
                await asyncio.sleep(pause_s)
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    choice = (event.get("choices") or [{}])[0]
                    end = choice.get("finish_reason") or event.get("error", {}).get("message") or end
    except httpx2.HTTPError as error:
        return type(error).__name__
    return end


def exact(stand: Stand, seed: int) -> Found:
    """Compare the speed with and without `--exact`; then compare each prompt's answer alone with its answer in a crowd.

    Both answers are given under `--exact`. A prompt is alone if requests are sent one at a time, and in a crowd if
    SLOTS requests run at a time. As a control, a second crowd samples with other seeds; most of its answers must
    differ.
    """
    sizes, count = stand.sizes, stand.scaled(PROMPTS)

    async def speed(client: Client) -> float:
        prompts = client.prompts(2 * SLOTS, sizes.prompt, seed=seed)
        return rate(*await client.crowd(prompts, sizes.new, clients=SLOTS))

    async def answers(client: Client, *, clients: int, tenant: int, shift: int = 0) -> list[str]:
        prompts, gate = client.prompts(count, sizes.prompt, seed=seed + 100), asyncio.Semaphore(clients)

        async def one(number: int, prompt: list[int]) -> str:
            async with gate:
                length = 1 + number % len(prompt)
                options = {"temperature": 1.0, "seed": number + shift, "tenant": tenant}
                return (await client.ask(prompt[:length], 16, **options)).text

        return await asyncio.gather(*map(one, range(count), prompts))

    usual = stand.server().drive(speed)
    server = stand.server("--exact")
    slow = server.drive(speed)
    alone = server.drive(lambda client: answers(client, clients=1, tenant=1))
    many = server.drive(lambda client: answers(client, clients=SLOTS, tenant=2))
    others = server.drive(lambda client: answers(client, clients=SLOTS, tenant=3, shift=count))
    figures = {
        "slower": usual / slow - 1,
        "differing": sum(a != b for a, b in zip(alone, many, strict=True)),
        "control": sum(a != b for a, b in zip(alone, others, strict=True)) / count,
    }
    return figures, {"prompts": count, "usual_tokens_per_s": usual, "exact_tokens_per_s": slow}


def shutdown(stand: Stand, seed: int) -> Found:
    """Send SIGTERM to a server with a full queue; check its responses, and time how long open requests take to end."""
    stand.close()
    with serving(*stand.sizes.model, "--slots", "2", "--queue", "6", "--context", "512") as server:

        async def talk(client: Client) -> Found:
            prompts = client.prompts(8, 64, seed=seed)
            open_ = [asyncio.create_task(client.ask(prompt, 192)) for prompt in prompts]
            await asyncio.sleep(0.5)
            full = await refused(client)
            began = time.monotonic()
            server.process.terminate()
            await asyncio.sleep(0.2)
            late = await refused(client)
            ended = await asyncio.gather(*open_, return_exceptions=True)
            seconds = time.monotonic() - began
            figures = {
                "full_queue": float(full == 429),
                "new_refused": float(late == 503),
                "unfinished": sum(isinstance(found, BaseException) for found in ended),
                "seconds": seconds,
            }
            return figures, {"open": len(open_)}

        figures, facts = server.drive(talk)
        code = server.process.wait(60)
        return dict(figures) | {"exit_code": code}, facts


async def refused(client: Client) -> int:
    """Send a request that the server should refuse; return the status, or 0 if the response lacks Retry-After."""
    found = await client.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    return found.status_code if int(found.headers.get("retry-after", 0)) > 0 else 0


def kills(stand: Stand, seed: int) -> Found:
    """Start servers on one disk cache and kill each at a random time; each must start and give the expected answers.

    The expected answers come from a server without a disk cache. The pool holds only two requests, so every new prompt
    moves an older prompt's pages to disk.
    """
    stand.close()
    count, rng = stand.scaled(KILLS), random.Random(seed)
    whole, damaged, differing, starts = [], 0, 0, []
    with tempfile.TemporaryDirectory(prefix="tessera-spill-") as folder:
        flags = (*stand.sizes.model, "--slots", "2", "--context", "1024", "--pages", "32")

        async def answers(client: Client) -> list[str]:
            prompts = client.prompts(6, 640, seed=seed)
            return [(await client.ask(prompt, 8)).text for prompt in prompts]

        with serving(*flags) as server:
            expected = server.drive(answers)
        for _ in range(count):
            with serving(*flags, "--spill", folder) as server:
                starts.append(server.start_s)
                differing += sum(a != b for a, b in zip(expected, server.drive(answers), strict=True))
                timer = threading.Timer(rng.uniform(0.0, 3.0), server.process.kill)
                timer.start()
                with suppress(ValueError, httpx2.HTTPError):
                    while server.process.poll() is None:
                        server.drive(lambda client: busy(client, rng.randrange(1 << 30)))
                timer.join()
            good, bad = audit(Path(folder))
            whole.append(good)
            damaged += bad
    figures = {"damaged": damaged, "differing": differing, "failed_starts": count - len(starts)}
    return figures, {"kills": count, "pages_on_disk": whole, "start_s": starts}


def audit(folder: Path) -> tuple[int, int]:
    """Return how many pages in the folder of a `Spill` are whole, and how many are damaged."""
    whole = damaged = 0
    for path in folder.glob("*/*"):
        if NAME.fullmatch(path.name) and NAME.fullmatch(path.parent.name):
            data = path.read_bytes()
            key, hash = bytes.fromhex(path.parent.name), bytes.fromhex(path.name)
            good = checksum(key, hash, memoryview(data)[CHECKSUM_BYTES:]) == data[:CHECKSUM_BYTES]
            whole, damaged = whole + good, damaged + (not good)
    return whole, damaged


async def busy(client: Client, seed: int) -> None:
    """Send prompts that fill the server's pool."""
    await client.crowd(client.prompts(4, 640, seed=seed), 4, clients=2)


def loss(stand: Stand, seed: int) -> Found:
    """Kill one of two replicas under STREAMS streams; count streams that hang, and time until both are ready again.

    A stream whose client had text may end with an error. Any other must be answered by the other replica.
    """
    stand.close()
    flags = (*stand.sizes.model, "--slots", "4", "--queue", "256", "--context", "512", "--replicas", "2")
    with serving(*flags) as server:
        try:
            load_s = server.start_s + wait_for_both(server)

            async def talk(client: Client) -> list[Outcome | BaseException]:
                prompts = client.prompts(STREAMS, 64, seed=seed)
                asked = [load.ask(client.http, prompt, 96, header(KEYS[0])) for prompt in prompts]
                streams = [asyncio.create_task(asyncio.wait_for(each, HANG_S)) for each in asked]
                await asyncio.sleep(1.0)
                os.kill(actors(server.process.pid)[0], signal.SIGKILL)
                return await asyncio.gather(*streams, return_exceptions=True)

            began = time.monotonic()
            ended = server.drive(talk)
            until(lambda: server.metric("tessera:replicas_lost_total") == 1)
            wait_for_both(server)
            back_s = time.monotonic() - began
            told = [found for found in ended if isinstance(found, Outcome)]
            cut = [found for found in told if found.error is not None]
            figures = {
                "hung": len(ended) - len(told),
                "lost_unstarted": sum(not found.pieces_s for found in cut),
                "late_s": back_s - load_s,
            }
            retried = server.metric("tessera:requests_retried_total")
            errors = dict(Counter(found.error for found in cut))
            facts = {"streams": STREAMS, "errors": errors, "retried": retried, "load_s": load_s, "back_s": back_s}
            return figures, facts
        finally:
            server.process.terminate()  # SIGKILL would leave Ray's processes behind
            server.process.wait(60)


def wait_for_both(server: Server) -> float:
    """Wait until both replicas are ready; return the seconds that this took."""
    began = time.monotonic()
    if not until(lambda: server.metric("tessera:replicas_ready") == 2, READY_S):
        raise ValueError(f"a replica is not ready after {READY_S:g} s: {server.log[-300:]}")
    return time.monotonic() - began


def actors(server: int) -> list[int]:
    """Return the process ids of the replicas of the server with this process id: descendants that Ray names so."""
    parents, named = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(b"ray::Actor"):
                named.append(pid)

    def descends(pid: int) -> bool:
        return pid == server or (pid in parents and descends(parents[pid]))

    return sorted(filter(descends, named))
