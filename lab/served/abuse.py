"""The case that attacks a server while it serves others: hostile bodies, costly requests and slow connections.

A separate process with one API key is the attacker. It sends the bodies one after another and, at the same time, the
costly requests one after another. It also keeps SLOW connections open that never send a whole request.
"""

import asyncio
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from lab.served.child import KEYS, Client
from lab.served.speed import Found, poisson
from lab.served.stand import SLOTS, Stand, first_s, percentile

SHARE = 0.3
"""Rate of the others' requests, as a share of the throughput."""
REQUESTS = 8 * SLOTS
"""Number of the others' requests, without the attacker and again beside it."""
SLOW = 500
"""Number of connections that the attacker keeps open without sending a whole request."""
PAUSE_S = 0.05
"""Seconds between attacks, like those of a client on another continent. Without them, the attacker's own process would
take a core, which the server needs too."""
LIMIT_S = 60.0
"""Seconds after which an attack without a response counts as a hang."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _call(arguments: str) -> dict[str, Any]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _schema(schema: Mapping[str, Any]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return _json({"messages": HELLO, "response_format": form, "max_tokens": 8})


def _references(count: int) -> dict[str, Any]:
    """Return a schema of `count` alternatives, each of which has all alternatives."""
    all_ = [{"$ref": f"#/$defs/{number}"} for number in range(count)]
    return {"$ref": "#/$defs/0", "$defs": {str(number): {"anyOf": all_} for number in range(count)}}


BODIES: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "33 MB": (COMPLETION, lambda: b" " * 33_000_000),
    "nested lists": (COMPLETION, lambda: b'{"prompt": ' + b"[" * 100_000),
    "many answers": (COMPLETION, lambda: _json({"prompt": "x", "n": 10**9})),
    "a long number": (COMPLETION, lambda: b'{"prompt": "x", "n": ' + b"9" * 100_000 + b"}"),
    "a million stops": (COMPLETION, lambda: _json({"prompt": "x", "stop": ["a"] * 1_000_000})),
    "many stops": (COMPLETION, lambda: _json({"prompt": "x", "stop": ["a"] * 250_000})),
    "many wrong tokens": (COMPLETION, lambda: _json({"prompt": [-1] * 250_000})),
    "many unknown fields": (COMPLETION, lambda: _json({"prompt": "x"} | {f"a{i}": 1 for i in range(45_000)})),
    "long arguments": (CHAT, lambda: _json({"messages": [_call("[" + "1," * 250_000 + "1]"), *HELLO]})),
    "many parts": (CHAT, lambda: _json({"messages": [{"role": "user", "content": [{"type": "text"}] * 4096}] * 10})),
    "many tools": (CHAT, lambda: _json({"messages": HELLO, "tools": [{}] * 250_000})),
    "a long text": (COMPLETION, lambda: _json({"prompt": "x" * 15_000_000})),
}
"""Name -> path and body of each hostile request that must be refused at once."""
COSTLY: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "many chunks": (COMPLETION, lambda: b"1\r\nx\r\n" * 50_000 + b"0\r\n\r\n"),
    "references": (CHAT, lambda: _schema(_references(40))),
    "itself": (CHAT, lambda: _schema({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})),
    "parentheses": (CHAT, lambda: _schema({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000})),
    "repetitions": (CHAT, lambda: _schema({"type": "string", "pattern": "((((a{1,1000}){1,1000}){1,1000}))"})),
    "many items": (CHAT, lambda: _schema({"type": "array", "minItems": 10**9, "items": {"type": "null"}})),
    "many values": (CHAT, lambda: _schema({"enum": list(range(100_000))})),
}
"""Name -> path and body of each request that takes long to read or to compile. It is refused, or answered."""
HANGS = -1
"""Status of an attack that got no response and was not cut within LIMIT_S seconds."""

type Ends = Mapping[str, Sequence[tuple[int, float]]]
"""Name of an attack, or "slow" -> status and seconds of each time; 0 if the server closed without a response."""


def abuse(stand: Stand, seed: int) -> Found:
    """Measure the time to first text of other tenants without and beside an attacker, and how the attacks end."""
    sizes, server, count = stand.sizes, stand.server(), stand.scaled(REQUESTS)

    async def talk(client: Client) -> Found:
        prompts = client.prompts(2 * SLOTS + 2 * count, sizes.prompt, seed=seed)
        _, most_s = await client.crowd(prompts[: 2 * SLOTS], sizes.new, clients=SLOTS)
        per_s = SHARE * 2 * SLOTS / most_s
        without = await poisson(client, prompts[2 * SLOTS :][:count], sizes.new, per_s=per_s, seed=seed)
        with attacker(server.url) as pipe:
            await asyncio.to_thread(pipe.recv)  # it has begun
            beside = await poisson(client, prompts[-count:], sizes.new, per_s=per_s, seed=seed)
            pipe.send("end")
            ends = await asyncio.to_thread(pipe.recv)
        p99_s = [percentile(first_s(told), 99) for told in (without, beside)]
        figures = {"others_p99_ratio": p99_s[1] / p99_s[0]} | judged(ends)
        facts = {name: {"count": len(found), "longest_s": max(s for _, s in found)} for name, found in ends.items()}
        return figures, {"requests_per_s": per_s, "first_p99_s": p99_s, "attacks": facts}

    return server.drive(talk)


def judged(ends: Ends) -> dict[str, float]:
    """Return the figures of the attacks: seconds to a refusal, seconds to an end, and attacks that ended otherwise."""
    bodies = {name: [seconds for _, seconds in ends[name]] for name in BODIES}
    others = [seconds for name in (*COSTLY, "slow") for _, seconds in ends[name]]
    wrong = [status for name in BODIES for status, _ in ends[name] if not 400 <= status < 500]
    wrong += [status for name in COSTLY for status, _ in ends[name] if not 200 <= status < 500]
    wrong += [status for status, _ in ends["slow"] if status not in (0, 408)]
    return {
        "refused_s": max(percentile(found, 50) for found in bodies.values()),
        "cut_s": max(others),
        "wrong": len(wrong),
    }


@contextmanager
def attacker(url: str) -> Iterator[Connection]:
    """Run `attack` in a process and yield the other end of its pipe; kill the process at the end."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=attack, args=(url, other), daemon=True)
    process.start()
    other.close()
    try:
        yield pipe
    except EOFError as error:
        raise ValueError("the attacker's process ended early") from error
    finally:
        process.kill()
        process.join()


def attack(url: str, pipe: Connection) -> None:
    """Attack a server. Send True at the start, and `Ends` after a message has come and all attacks have ended."""
    pipe.send(asyncio.run(_attack(url, pipe)))


async def _attack(url: str, pipe: Connection) -> Ends:
    parts, ends = urlsplit(url), defaultdict(list)

    async def repeat(attacks: Sequence[tuple[str, bytes]]) -> None:
        while not pipe.poll():
            for name, sent in attacks:
                ends[name].append(await send(parts.hostname, parts.port, sent))
                await asyncio.sleep(PAUSE_S)

    requests = [[(name, _request(path, body())) for name, (path, body) in each.items()] for each in (BODIES, COSTLY)]
    starts = (b"", b"GET /hea", _request(COMPLETION, b"{}")[:-1])
    slow = [[("slow", starts[number % len(starts)])] for number in range(SLOW)]
    pipe.send(True)
    await asyncio.gather(*map(repeat, [*requests, *slow]))
    return dict(ends)


def _request(path: str, body: bytes) -> bytes:
    size = "Transfer-Encoding: chunked" if body.startswith(b"1\r\n") else f"Content-Length: {len(body)}"
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEYS[-1]}", size)
    return "\r\n".join((*lines, "", "")).encode() + body


async def send(host: str, port: int, sent: bytes) -> tuple[int, float]:
    """Send bytes on a new connection; return the status of the response and the seconds until its first line."""
    began, line, writer = time.perf_counter(), b"", None
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent)
            line = await reader.readline()
    except TimeoutError:
        return HANGS, LIMIT_S
    except ConnectionError:
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
    return int(line.split()[1]) if line else 0, time.perf_counter() - began
