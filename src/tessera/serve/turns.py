"""Work for clients: slow work on one thread, in fair order, and none for clients that have gone away."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request

from tessera.serve.front import TENANT
from tessera.serve.protocol import Refusal


class Turns:
    """A thread that serves tenants in turn: each has at most one call that waits for the thread or runs on it.

    A tenant with many calls thus delays another by at most one of them, and calls never fill the threads that other
    work needs. A call whose caller is cancelled while it waits is dropped.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._own: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run[Result](self, tenant: str, work: Callable[..., Result], *args: object) -> Result:
        """Call `work` on the thread at the tenant's turn, and return its result."""
        async with self._own[tenant]:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


async def in_turn[Result](request: Request, turns: Turns, work: Callable[..., Result], *args: Any) -> Result:
    """Call `work` at the turn of the request's tenant, unless the client goes away before."""
    return await unless_gone(request, turns.run(request.scope.get(TENANT, ""), work, *args))


async def unless_gone[Result](request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; raise Refusal as soon as the client closes its connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if tasks[0] not in done:
        raise Refusal(499, "the client closed the connection")
    return tasks[0].result()
