"""Compare our server with llama.cpp's, on the same model file and machine, with the same prompts and clients."""

from pathlib import Path

from lab.bench.same_file import SCRIPT
from lab.peers.process import Peer
from lab.served.child import Client
from lab.served.speed import Found
from lab.served.stand import SLOTS, Stand, rate
from tessera.core import hardware
from tessera.models.files.fetch import fetch

PYTHON = Path(".venv-peers/bin/python")
"""Python interpreter of the environment that `make peers` builds."""


def llama_cpp(stand: Stand, seed: int) -> Found:
    """Compare the tokens per second of SLOTS concurrent clients on our server and on llama.cpp's.

    Our server is timed before and after llama.cpp's; both stay loaded.

    Raises:
        ValueError: the peers' environment is missing.
    """
    sizes, threads = stand.sizes, hardware.cpu().cores
    if not PYTHON.exists():
        raise ValueError(f"{PYTHON} does not exist: run `make peers` to build the peers' environment")
    server, peer = stand.server(), Peer(PYTHON, SCRIPT)

    def prompts(client: Client, part: int) -> list[list[int]]:
        return client.prompts(3 * SLOTS, sizes.prompt, seed=seed)[part * SLOTS : (part + 1) * SLOTS]

    async def ours(client: Client, part: int) -> float:
        return rate(*await client.crowd(prompts(client, part), sizes.new, clients=SLOTS))

    async def theirs(client: Client) -> float:
        other = Client(peer.ask("address")["url"])
        async with other.http:
            found = await other.crowd(prompts(client, 1), sizes.new, clients=SLOTS, cache_prompt=False)
        return rate(*found)

    try:
        version = peer.ask("hello")
        room = SLOTS * (sizes.prompt + sizes.new + 8)
        peer.ask("load", path=str(fetch(*sizes.model)), context=room, threads=threads, parallel=SLOTS)
        first = server.drive(lambda client: ours(client, 0))
        other = server.drive(theirs)
        second = server.drive(lambda client: ours(client, 2))
    finally:
        peer.close()
    facts = {"tokens_per_s": [first, second], "llama_cpp_tokens_per_s": other, "threads": threads, **version}
    return {"of_llama_cpp": (first + second) / 2 / other}, facts
