"""A server as a child process: start it, wait until it is ready, read its metrics and its memory, end it."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx2

from lab.served import load_client as load

READY_S = 1800.0
"""Maximum seconds for a server to start and compile its programs, which takes long on a busy machine."""
ADDRESS = re.compile(r"http://[\d.]+:\d+")
KEYS = tuple(f"key-{number}" for number in range(32))
"""API keys of every server, one per tenant. Tenants do not share cached prompts."""


class Server:
    """A `tessera serve` process; `started` waits until it is ready.

    Args:
        flags: flags of `tessera serve`, except those for the port and the API keys.
        folder: folder for the server's API keys and log.
    """

    def __init__(self, flags: Sequence[str], folder: Path):
        keys, self._log = folder / "keys", folder / "log"
        keys.write_text("\n".join(KEYS))
        command = [sys.executable, "-m", "tessera", "serve", *flags, "--port", "0", "--api-key-file", str(keys)]
        with self._log.open("w") as log:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._began = time.monotonic()

    def started(self) -> Self:
        """Wait until the server is ready, and return it.

        Raises:
            ValueError: the process ended, or was not ready within READY_S seconds.
        """
        self.url = self._wait(lambda: ADDRESS.search(self.log))[0]
        self._wait(lambda: self._answers("/ready"))
        self.start_s = time.monotonic() - self._began
        return self

    @property
    def log(self) -> str:
        """Output of the process so far."""
        return self._log.read_text()

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        return int(Path(f"/proc/{self.process.pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024

    @property
    def processor_s(self) -> float:
        """Processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def handles(self) -> int:
        """Open file handles of the process, sockets included."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def metric(self, name: str, labels: str = "") -> float:
        """Return a metric's value: the sum over its lines that contain `labels`, such as 'of="row"'."""
        found = httpx2.get(f"{self.url}/metrics", headers=header(KEYS[0]), timeout=60).text.splitlines()
        chosen = (line for line in found if line.partition("{")[0].split()[0] == name and labels in line)
        return sum(float(line.rpartition(" ")[2]) for line in chosen)

    def drive[T](self, talk: Callable[["Client"], Awaitable[T]]) -> T:
        """Run `talk` with a client of this server and return its result."""

        async def run() -> T:
            async with Client(self.url) as client:
                return await talk(client)

        return asyncio.run(run())

    def kill(self) -> None:
        """Send SIGKILL if the process still runs, and wait until it has ended."""
        self.process.kill()
        self.process.wait()

    def _answers(self, path: str) -> bool:
        try:
            return httpx2.get(self.url + path, timeout=60).status_code == 200
        except httpx2.HTTPError:
            return False

    def _wait[T](self, condition: Callable[[], T | None]) -> T:
        end = time.monotonic() + READY_S
        while not (found := condition()):
            if self.process.poll() is not None:
                raise ValueError(
                    f"the server ended at start-up with exit code {self.process.returncode}: {self.log[-500:]}"
                )
            if time.monotonic() > end:
                raise ValueError(f"the server was not ready within {READY_S:g} s: {self.log[-500:]}")
            time.sleep(0.1)
        return found


class Client:
    """Client that sends completion requests to a server; each API key is a tenant. Use it with `async with`."""

    def __init__(self, url: str, keys: Sequence[str] = KEYS):
        self.url, self.keys = url, keys
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx2.AsyncClient(base_url=url, timeout=600.0, limits=limits, headers=header(keys[0]))
        self.tokens: list[int] = []

    async def __aenter__(self) -> Self:
        self.tokens = await load.tokens_of(self.http)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    def prompts(self, count: int, length: int, *, seed: int, shared: int = 0) -> list[list[int]]:
        """Draw `count` prompts of `length` tokens that share their first `shared` tokens."""
        return load.prompts(self.tokens, count, length, seed=seed, shared=shared)

    async def ask(self, prompt: Sequence[int], new_tokens: int, *, tenant: int = 0, **options: object) -> load.Outcome:
        """Stream one completion with the API key of this tenant.

        Raises:
            ValueError: the request failed.
        """
        found = await load.ask(self.http, prompt, new_tokens, header(self.keys[tenant]), **options)
        if found.error is not None:
            raise ValueError(f"a request of {len(prompt)} tokens failed: {found.error}")
        return found

    async def crowd(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, clients: int, tenant: int = 0, **options: object
    ) -> tuple[list[load.Outcome], float]:
        """Send the prompts, `clients` at a time; return the outcomes in the prompts' order, and the total seconds."""
        gate = asyncio.Semaphore(clients)

        async def one(prompt: Sequence[int]) -> load.Outcome:
            async with gate:
                return await self.ask(prompt, new_tokens, tenant=tenant, **options)

        began = time.perf_counter()
        found = await asyncio.gather(*map(one, prompts))
        return found, time.perf_counter() - began


def header(key: str) -> dict[str, str]:
    """Return the header that carries an API key."""
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """Run a server, and kill it at the end of the block if it still runs."""
    with tempfile.TemporaryDirectory(prefix="tessera-served-") as folder:
        server = Server(flags, Path(folder))
        try:
            yield server.started()
        finally:
            server.kill()
