"""A conversation with a model behind a server that speaks OpenAI's API, `tessera serve` or another."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from tessera.chat.turns import Turns, answered
from tessera.core import interrupt
from tessera.core.escapes import escaped
from tessera.generate import Interrupted

WAIT_S = 1.0
"""Seconds between two requests that ask whether the server is ready."""
CONNECT_S, SILENT_S = 10.0, 600.0
"""Maximum seconds to connect, and to wait for the next byte: a server sends nothing while it reads a long prompt."""


@dataclass(frozen=True, kw_only=True)
class RemoteReply:
    """Token counts of one turn's answer, as far as the server reports them."""

    counts: Mapping[str, Any]
    dropped_turns: int = 0

    def usage(self) -> str:
        """Say in a few words what the answer cost."""
        if not self.counts:
            return ""
        cached = (self.counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        parts = [
            f"{cached} tokens from the cache",
            f"{self.counts['prompt_tokens']} tokens",
            f"{self.counts['completion_tokens']} new",
        ]
        if own := self.counts.get("tessera"):
            parts.append(f"{own['density']:.0%} of keys read")
        return "; ".join(parts)


class RemoteChat(Turns):
    """A conversation whose answers come from a server; the server keeps no state, so every question sends all messages.

    Args:
        url: the server's address, such as http://127.0.0.1:8000, with or without /v1.
        key: API key.
        options: fields of the request's body, such as temperature.
        system: system message.
        seed: seed of the first answer to each question.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        options: Mapping[str, Any] | None = None,
        system: str | None = None,
        seed: int = 0,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url} must start with http:// or https://")
        super().__init__("", system=system, seed=seed)
        self.url, self.options = url.rstrip("/").removesuffix("/v1"), dict(options or {})
        self.draws = self.options.get("temperature") != 0
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Timeout(SILENT_S, connect=CONNECT_S)
        self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=limits)

    def connect(self, say: Callable[[str], Any]) -> None:
        """Wait until the server is ready, then ask for its model's name. `say` prints remarks.

        Raises:
            ValueError: no server answers at the address, or the server refuses the key.
        """
        with self._errors():
            waited = False
            while self._client.get("/ready").status_code == 503:  # a server without this route answers 404
                if not waited:
                    say(
                        f"{self.url} is not ready: it is loading its model or shutting down. "
                        f"Waiting; Ctrl-C ends the wait."
                    )
                waited = True
                with interrupt.at_once():
                    time.sleep(WAIT_S)
            models = self._client.get("/v1/models")
        if models.status_code != 200:
            raise ValueError(self._refusal(models))
        try:
            self.source = str(models.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.url}/v1/models names no model: correct --url") from error
        say(f"{escaped(self.source)} at {self.url}")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _answer(
        self,
        messages: list[dict[str, str]],
        attempts: int,
        stream: Callable[[str], Any] | None,
        progress: Callable[[int, int], Any] | None,
    ) -> RemoteReply:
        text, counts = "", {}
        body = {"model": self.source, "messages": messages, "seed": (self.seed + attempts) % 2**32, "stream": True}
        body |= self.options | {"stream_options": {"include_usage": True}}
        request = self._client.stream("POST", "/v1/chat/completions", json=body)
        try:
            with self._errors(), interrupt.at_once(), request as response:  # Ctrl-C closes the connection
                for event in self._events(response):
                    counts = event.get("usage") or counts
                    piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                    if piece:
                        text += piece
                        if stream is not None:
                            stream(piece)
        except KeyboardInterrupt:
            self._keep(messages, text, attempts)
            raise Interrupted([]) from None
        self._keep(messages, text, attempts)
        return RemoteReply(counts=counts)

    def _keep(self, messages: list[dict[str, str]], text: str, attempts: int) -> None:
        self.messages, self._attempts = answered(messages, text), attempts

    def _events(self, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        """Yield a stream's events; raise ValueError if the server refuses the request or its stream ends early."""
        if response.status_code != 200:
            response.read()
            raise ValueError(self._refusal(response))
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(f"{self.url}: {event['error']['message']}")
                yield event
        raise ValueError(f"{self.url} closed the connection before the answer was complete: ask again")

    def _refusal(self, response: httpx2.Response) -> str:
        """Say why the server refused a request."""
        if response.status_code == 401:
            return f"{self.url} refuses the API key: pass a file that holds a valid key with --api-key-file"
        try:
            said = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):  # not a server with OpenAI's API
            said = response.text[:200]
        return f"{self.url} answers {response.status_code}: {said}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn connection errors into ValueError."""
        try:
            yield
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            raise ValueError(f"{self.url} does not answer ({what}): start `tessera serve`, or correct --url") from error
