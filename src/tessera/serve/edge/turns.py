"""Run slow work for clients on one thread: tenants take turns, and work for clients that disconnect is dropped."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request

from tessera.serve.api.schema import Refusal
from tessera.serve.edge.front import TENANT, Receive


class Turns:
    """A thread that serves tenants in turn: each tenant has at most one call that waits for the thread or runs on it.

    A tenant with many calls thus delays another tenant by at most one call, and no call occupies the threads that other
    work needs. If a caller is cancelled before its call starts, the call is dropped.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._own: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run[Result](self, tenant: str, work: Callable[..., Result], *args: object) -> Result:
        async with self._own[tenant]:
            call = self._thread.submit(work, *args)
            ended = asyncio.wrap_future(call)
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                if not call.cancel():  # it runs: the tenant's next call must wait until it has ended
                    await asyncio.wait([ended])
                    ended.exception()  # read it, because asyncio logs an exception that nothing reads
                raise
            return ended.result()


async def in_turn[Result](request: Request, turns: Turns, work: Callable[..., Result], *args: Any) -> Result:
    """Call `work` when it is the turn of the request's tenant; raise Refusal as soon as the client disconnects."""
    return await unless_gone(request.receive, turns.run(request.scope.get(TENANT, ""), work, *args))


async def unless_gone[Result](receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` and return the result; raise Refusal as soon as the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
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
