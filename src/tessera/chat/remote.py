"""A conversation with a model behind a server that speaks OpenAI's API, `tessera serve` or another."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from tessera.chat.turns import Messages, Progress, Reply, Stream, Turns, answered, opening
from tessera.core import interrupt
from tessera.core.escapes import escaped, quoted
from tessera.generate import Interrupted
from tessera.runtime.sampling import later_seed

WAIT_S, READ_S = 1.0, 5.0
"""Seconds between two requests that ask whether the server is ready, and maximum seconds for an answer to them."""
CONNECT_S, SILENT_S = 10.0, 600.0
"""Maximum seconds to connect, and to wait for the next byte: a server sends nothing while it reads a long prompt."""
THOUGHT = ("<think>\n", "\n</think>\n\n")
"""Marks that show where a model's reasoning begins and ends; a server sends it apart from the answer's text."""
FULL = re.compile("context|shorten")
"""Words of a refusal that says that a conversation exceeds the model's context. Servers share no error code for it."""


class ContextFull(ValueError):
    """The server refuses a conversation because it exceeds the model's context."""


class RemoteChat(Turns):
    """A conversation with a server, which keeps no state; `options` are fields of each request, such as temperature."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        options: Mapping[str, Any] | None = None,
        system: str | None = None,
        seed: int = 0,
    ):
        try:
            address = httpx2.URL(url.strip().rstrip("/").removesuffix("/v1"))
        except httpx2.InvalidURL as error:
            raise ValueError(
                f"--url {url} is not an address ({error}): pass one such as http://127.0.0.1:8000"
            ) from error
        if address.scheme not in ("http", "https"):
            raise ValueError(f"--url {url} must start with http:// or https://")
        super().__init__("", system=system, seed=seed)
        self.url = str(address.copy_with(userinfo=b""))  # messages show it, so it holds no password
        self.options = dict(options or {})
        self.draws = self.options.get("temperature") != 0
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Timeout(SILENT_S, connect=CONNECT_S)
        self._client = httpx2.Client(base_url=address, headers=headers, timeout=limits)

    def connect(self, say: Callable[[str], Any]) -> None:
        """Wait until the server is ready, then ask for its model's name. `say` prints remarks."""
        with self._errors():
            waited = False
            while True:
                models = self._get("/v1/models")
                ready = models if models is None or models.status_code == 401 else self._get("/ready")
                if ready is not None and ready.status_code != 503:  # a server without this route answers 404
                    break
                if not waited:
                    say(
                        f"{self.url} is not ready: it is loading its model or shutting down. "
                        f"Waiting; Ctrl-C ends the wait."
                    )
                waited = True
                with interrupt.at_once():
                    time.sleep(WAIT_S)
        if models.status_code != 200:
            raise ValueError(self._refusal(models))
        try:
            self.source = str(models.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.url}/v1/models names no model: correct --url") from error
        say(f"{escaped(self.source)} at {self.url}")

    def _get(self, path: str) -> httpx2.Response | None:
        """Return the answer to a GET; None if it does not come soon, because the server is still loading its model."""
        try:
            with interrupt.at_once():
                return self._client.get(path, timeout=httpx2.Timeout(READ_S, connect=CONNECT_S))
        except httpx2.ReadTimeout:
            return None

    def close(self) -> None:
        self._client.close()

    def _answer(self, messages: Messages, attempts: int, stream: Stream | None, progress: Progress | None) -> Reply:
        """Answer the question that ends `messages`; drop the oldest turns that the server's context has no room for."""
        messages, first, dropped = self._checked(messages), len(opening(self.system)), 0
        whole = messages
        while True:
            try:
                return self._asked(messages, attempts, stream, whole, dropped)
            except ContextFull:
                if len(messages) <= first + 1:
                    raise
                messages, dropped = messages[:first] + messages[first + 2 :], dropped + 1

    def _asked(self, messages: Messages, attempts: int, stream: Stream | None, whole: Messages, dropped: int) -> Reply:
        """Send `messages`, which are `whole` without its `dropped` oldest turns, and keep the answer."""
        text, thought, counts = "", "", {}
        body = {"model": self.source, "messages": messages, "seed": later_seed(self.seed, attempts), "stream": True}
        body |= self.options | {"stream_options": {"include_usage": True}}
        request = self._client.stream("POST", "/v1/chat/completions", json=body)
        try:
            with self._errors(), interrupt.at_once(), request as response:  # Ctrl-C closes the connection
                for piece, reasoning, usage in self._pieces(response):
                    counts = usage or counts
                    shown = (("" if thought else THOUGHT[0]) + reasoning) if reasoning else ""
                    shown += (THOUGHT[1] if thought and not text else "") + piece if piece else ""
                    text, thought = text + piece, thought + reasoning  # only the text is sent back
                    if shown and stream is not None:
                        stream(shown)
        except KeyboardInterrupt:
            # with what was dropped, of which the user was not told
            self.messages, self._attempts = answered(whole, text), attempts
            raise Interrupted([]) from None
        self.messages, self._attempts = answered(messages, text), attempts
        return Reply(usage=_usage(counts), dropped_turns=dropped)

    def _checked(self, messages: Messages) -> Messages:
        try:
            json.dumps(messages, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            held = quoted(error.object[error.start])
            raise ValueError(f"the text is not UTF-8: it holds {held}: convert it to UTF-8") from error
        return messages

    def _pieces(self, response: httpx2.Response) -> Iterator[tuple[str, str, Any]]:
        """Yield the text, the reasoning and the token counts of each event of a stream."""
        if response.status_code != 200:
            response.read()
            said = self._refusal(response)
            if response.status_code == 400 and FULL.search(said):
                raise ContextFull(said)
            raise ValueError(said)
        try:
            for event in httpx2.EventSource(response):
                if event.data.strip() == "[DONE]":
                    return
                if event.data:
                    yield self._piece(event.data)
        except httpx2.SSEError as error:
            raise ValueError(f"{self.url} sends no stream of events ({error}): correct --url") from error
        except httpx2.HTTPError as error:
            raise ValueError(f"{self.url} broke off the answer ({_cause(error)}): ask again") from error
        raise ValueError(f"{self.url} closed the connection before the answer was complete: ask again")

    def _piece(self, data: str) -> tuple[str, str, Any]:
        """Return the text, reasoning and token counts of an event. Other servers leave out fields, or send null."""
        try:
            event = json.loads(data)
            failure = event.get("error")
            choice = (event.get("choices") or [{}])[0]
            delta = choice.get("delta") or {}
            text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
            for part in (text, reasoning):
                part.encode()  # only text has this method, and it raises ValueError for half a character
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.url} sent an event that is not one of OpenAI's API ({quoted(data, 200)}): correct --url"
            ) from error
        if failure:
            said = failure.get("message", failure) if isinstance(failure, dict) else failure
            raise ValueError(f"{self.url}: {said}")
        return text, reasoning, event.get("usage")

    def _refusal(self, response: httpx2.Response) -> str:
        if response.status_code == 401:
            return f"{self.url} refuses the API key: pass a file that holds a valid key with --api-key-file"
        try:
            said = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):  # not a server with OpenAI's API
            said = response.text[:200]
        return f"{self.url} answers {response.status_code}: {said}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx2.HTTPError as error:
            raise ValueError(
                f"{self.url} does not answer ({_cause(error)}): start `tessera serve`, or correct --url"
            ) from error


def _usage(counts: Mapping[str, Any]) -> str:
    """Say what an answer cost, as far as the server reports it."""
    parts = []
    match counts:
        case {"prompt_tokens_details": {"cached_tokens": int(cached)}}:
            parts.append(f"{cached} tokens from the cache")
    match counts:
        case {"prompt_tokens": int(prompt), "completion_tokens": int(new)}:
            parts += [f"{prompt} tokens", f"{new} new"]
    match counts:
        case {"tessera": {"density": float(density)}}:
            parts.append(f"{density:.0%} of keys read")
    return "; ".join(parts)


def _cause(error: httpx2.HTTPError) -> str:
    return str(error) or type(error).__name__
