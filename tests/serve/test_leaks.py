"""A real server after requests that ended in every way: finished, dropped anywhere, read slowly."""

import asyncio
import os

import pytest
from live_server import KEY, start, tiny_model

from tessera.workbench.served import faults
from tessera.workbench.served.child import Client


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    found = start(tiny_model(tmp_path_factory.mktemp("leaks")), keys=(KEY,))
    yield found
    found.close()


async def torment(url, count):
    async with Client(url, keys=(KEY,)) as client:
        return await faults.torment(client, count, seed=1, clients=12)


def test_three_hundred_requests_leave_nothing_behind(running):
    asyncio.run(torment(running.url, 4))
    handles = len(os.listdir("/proc/self/fd"))
    compiled = running.metric(faults.COMPILED)
    ends = asyncio.run(torment(running.url, 300))
    assert sum(ends.values()) == 300
    assert ends.keys() <= {"dropped", "length", "stop"}
    assert ends["dropped"] > 20
    running.until(lambda: running.service.open == 0)
    running.until(lambda: running.metric("vllm:kv_cache_usage_perc") == 0)
    running.until(lambda: len(os.listdir("/proc/self/fd")) <= handles)
    assert running.metric(faults.COMPILED) == compiled
    assert running.metric("tessera:requests_failed_total") == 0
