"""Requests that end in every way leave nothing behind. `python -m lab study serving --case leaks` sends 10,000."""

import asyncio
import os

from live_server import KEY, start, tiny_model

from lab.served.child import Client
from lab.served.faults import COMPILED, torment

PAGES, RUNNING, WAITING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_dropped_and_slowly_read_requests_leave_no_page_handle_or_program(tmp_path):
    async def drive(count, seed):
        async with Client(running.url, keys=[KEY]) as client:
            return await torment(client, count, seed, clients=8)

    running = start(tiny_model(tmp_path), keys=[KEY])
    try:
        asyncio.run(drive(20, seed=1))  # opens what stays open
        compiled, before = running.metric(COMPILED), handles()
        ends = asyncio.run(drive(200, seed=2))
        running.until(lambda: running.metric(RUNNING) + running.metric(WAITING) == 0)
        running.until(lambda: handles() <= before)
        assert running.metric(PAGES) == 0
        assert running.metric(COMPILED) == compiled
    finally:
        running.close()
    assert set(ends) <= {"stop", "length", "dropped"}, ends
    assert ends["dropped"] > 5, ends
    assert ends["stop"] + ends["length"] > 100, ends
