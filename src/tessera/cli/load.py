"""The `tessera load` command, which measures a running server, and its flags.

Heavy modules are imported only when the command runs.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tessera.cli.flags import Command, Omittable


@dataclass(frozen=True, kw_only=True)
class Load(Command):
    """Send requests to a running server at random times, and measure latencies and throughput."""

    url: Annotated[str, tyro.conf.Positional]
    """Address of the server, such as http://127.0.0.1:8000."""
    rate: Omittable[float] = None
    """Mean number of requests per second; if not given, requests are sent as soon as --clients allows."""
    requests: int = 50
    """Number of requests."""
    clients: Omittable[int] = None
    """Maximum number of requests that are open at the same time; no limit if not given."""
    prompt_tokens: int = 256
    """Tokens per prompt."""
    shared_tokens: int = 0
    """Length, in tokens, of the prefix that all prompts share."""
    new_tokens: int = 32
    """Tokens per answer."""
    seed: int = 0
    """Seed of arrival times and prompts."""
    ttft_s: Omittable[float] = None
    """Maximum seconds to the first piece of text; goodput counts only requests that meet this limit."""
    itl_s: Omittable[float] = None
    """Maximum seconds between two pieces of text; goodput counts only requests that meet this limit."""
    api_key_file: Omittable[Path] = None
    """File whose first key is the API key."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Send the requests and print the summary; return 1 if a request failed.

        After Ctrl-C, print the summary of the requests that have ended, and return 130.
        """
        import asyncio

        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        from tessera.cli.keys import read_keys
        from tessera.core import interrupt
        from tessera.serve import load_client as client

        for name in ("requests", "clients", "prompt_tokens", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"--rate {self.rate} must be positive; leave it out to send all requests at once")
        if not 0 <= self.shared_tokens <= self.prompt_tokens:
            raise ValueError(
                f"--shared-tokens {self.shared_tokens} must be from 0 to --prompt-tokens {self.prompt_tokens}"
            )
        for name, limit in (("--ttft-s", self.ttft_s), ("--itl-s", self.itl_s)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} {limit} must be above 0; leave it out to set no limit")
        key = None if self.api_key_file is None else read_keys(self.api_key_file)[0]
        names = ("requests", "clients", "prompt_tokens", "shared_tokens", "new_tokens", "seed")
        sent = client.Load(rate=self.rate or float("inf"), **{name: getattr(self, name) for name in names})
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=self.requests)
            url = self.url.rstrip("/").removesuffix("/v1")
            done = asyncio.run(client.run(url, sent, key=key, progress=lambda _: bar.advance(task)))
        found = client.summary(sent, *done, ttft_s=self.ttft_s, itl_s=self.itl_s)
        print(json.dumps(found) if self.json else render(found))
        if interrupt.asked():
            interrupt.told()
            print("interrupted", file=sys.stderr)
            return interrupt.STATUS
        return 1 if found["errors"] else 0


def render(found: dict) -> str:
    lines = [f"{found['completed']} requests in {found['seconds']:.1f} s"]
    lines += [f"failed: {count} x {error}" for error, count in found["errors"].items()]
    lines.append(
        f"tokens per second: {found['tokens_per_s']:.1f} generated, {found['prompt_tokens_per_s']:.0f} in prompts"
    )
    lines.append(f"prompt tokens found in the cache: {found['cached_tokens']}")
    for name, about in (("ttft_s", "time to first text"), ("itl_s", "time between pieces of text")):
        if found[name] is not None:
            shown = ", ".join(f"{key} {1000 * value:.0f} ms" for key, value in found[name].items())
            lines.append(f"{about}: {shown}")
    if "density" in found:
        lines.append(f"keys read: {found['density']:.0%} of the visible keys")
    if "goodput_per_s" in found:
        lines.append(f"goodput: {found['goodput_per_s']:.2f} requests per second within the limits")
    return "\n".join(lines)
