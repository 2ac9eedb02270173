"""Render chat templates in a worker process, because a template is an untrusted program that may never end."""

import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tessera.core.child import Ended, Worker
from tessera.core.escapes import escaped

WORKER = Path(__file__).with_name("template_worker.py")

LIMIT_S, WAIT_S = 10.0, 30.0
"""Maximum seconds of processor time to render a template, and maximum seconds to wait for it on a busy machine. Both
grow by one second per MILLION characters of the conversation, which may take seconds to cross the pipe."""
MILLION = 1_000_000
READY_S, EXIT_S = 60.0, 2.0
"""Maximum seconds until the worker is ready, which takes 0.2 s on an idle machine, and until it exits."""
FREE_CHARACTERS = 1 << 20
"""Characters that any template may write; GROWTH more are allowed per character of the conversation as JSON."""
GROWTH = 4
LONGEST_REASON = 300
LOST = "the process that renders conversations does not answer: try again later"


class Unavailable(ValueError):
    """Error: the worker does not start, or got no processor time, neither of which the conversation has caused."""


class Renderer:
    """Worker process that renders templates. It starts at the first rendering and ends when this object is deleted."""

    def __init__(self):
        self._worker = Worker([sys.executable, "-P", str(WORKER)], ready_s=READY_S, exit_s=EXIT_S)
        self._lock = threading.Lock()
        weakref.finalize(self, self._worker.close)

    def __reduce__(self):
        return Renderer, ()  # a copy of a tokenizer starts another process

    def render(self, template: str, variables: Mapping[str, Any], size: int = 0) -> str:
        """Render a jinja template with plain JSON data; raise ValueError if it fails or exceeds a limit.

        The limits on time and output grow with `size`, the number of characters of the conversation as JSON. Raise
        Unavailable if the worker does not start, or did not use its processor time and yet did not answer in time.
        """
        limit_s = LIMIT_S + size // MILLION
        request = {"template": template, "variables": variables, "limit_s": limit_s}
        request["limit_characters"] = FREE_CHARACTERS + GROWTH * size
        with self._lock, ExitStack() as stack:
            stack.push(self._worker)  # after Ctrl-C, kill the worker: its late reply must not answer the next request
            try:
                self._worker.start()
            except (Ended, OSError) as error:
                raise Unavailable(LOST) from error
            try:
                reply = self._worker.ask_again(request, WAIT_S + size // MILLION)
            except Ended as ended:
                if ended.late:
                    raise Unavailable(LOST) from ended
                raise _refusal(_reason(ended, limit_s)) from ended
            stack.pop_all()
        if "error" in reply:
            raise _refusal(reply["error"])
        return reply["text"]


def _reason(ended: Ended, limit_s: float) -> str:
    if ended.spent:
        return f"it takes over {limit_s:g} s of processor time"
    if "MemoryError" in ended.said:
        return "it needs more memory than its limit allows"
    return f"its process ended with exit status {ended.status}: {ended.said}"


def _refusal(reason: str) -> ValueError:
    return ValueError(f"the chat template cannot render the conversation: {escaped(reason, LONGEST_REASON)}")
