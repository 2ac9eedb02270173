"""Let one thread post calls to an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mail:
    """A box for calls to an event loop. Waking a loop takes a system call, so calls share a wake-up if they can."""

    def __init__(self):
        self._calls: deque[Callable[[], object]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """Make the loop run `call`, which must not raise, after all calls posted before; a closed loop drops them."""
        if loop is not self._loop:  # the server has been restarted: nobody waits for the old loop's calls
            self._calls, self._loop, self._woken = deque(), loop, False
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._empty, self._calls)

    def _empty(self, calls: deque[Callable[[], object]]) -> None:
        self._woken = False
        while calls:
            calls.popleft()()
