"""The metrics of several replicas as those of one server."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from replicated import counters_of

from tessera.serve.edge import server
from tessera.serve.replicas import supervisor
from tessera.serve.replicas.summed import Totals, parsed


def test_metrics_of_replicas_add_up_and_shares_are_means():
    text = (
        '# TYPE a_total counter\na_total{{kind="x"}} {0}\n# TYPE a_created gauge\na_created 5e9\n'
        '# TYPE b histogram\nb_bucket{{le="1.0"}} {0}\nb_bucket{{le="+Inf"}} {0}\nb_count {0}\nb_sum 2\n'
        "# TYPE c_perc gauge\nc_perc 0.{0}\n"
    )
    found = Totals().text([parsed(text.format(n)) for n in (1, 3)], ready=2, lost=1, retried=4).decode()
    samples = {s.name: s.value for f in text_string_to_metric_families(found) for s in f.samples}
    assert samples["a_total"] == samples["b_count"] == samples["b_bucket"] == 4
    assert (samples["b_sum"], samples["c_perc"]) == (4, pytest.approx(0.2))
    assert "a_created" not in samples
    assert (samples["tessera:replicas_ready"], samples["tessera:requests_retried_total"]) == (2, 4)


def test_counters_of_ended_processes_stay_and_their_gauges_go():
    text = "# TYPE a_total counter\na_total {0}\n# TYPE b gauge\nb {0}\n# TYPE c_perc gauge\nc_perc {0}\n"
    assert (0.4 + 0.1) + 0.2 < (0.1 + 0.2) + 0.4  # a counter must not fall by a rounding error either
    first, second, last = (parsed(text.format(value)) for value in (0.1, 0.2, 0.4))
    totals, own = Totals(), {"ready": 2, "lost": 0, "retried": 0}
    before = counters_of(totals.text([first, second, last], **own).decode())
    totals.end(last)
    found = totals.text([first, second], **own).decode()
    assert counters_of(found) == before
    samples = {s.name: s.value for f in text_string_to_metric_families(found) for s in f.samples}
    assert (samples["b"], samples["c_perc"]) == (pytest.approx(0.3), pytest.approx(0.15))
    assert counters_of(totals.text([first], **own).decode()) == before  # an older answer came last


def test_a_process_that_reports_late_is_counted_once():
    async def late(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await ended.wait()
        body = b"# TYPE a_total counter\na_total 2\n"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def run():
        several = supervisor.Replicas(SimpleNamespace(key="x"), 1)
        async with await asyncio.start_server(late, "127.0.0.1", 0) as process:
            replica = several.all[0]
            replica.url, replica.ready = server.address(process.sockets[0]), True
            replica.metrics = parsed("# TYPE a_total counter\na_total 1\n")
            answer = asyncio.create_task(several.metrics())
            await asked.wait()
            several._forget(replica)
            ended.set()
            found = await answer
        await several.client.aclose()
        return counters_of(found.decode())

    asked, ended = asyncio.Event(), asyncio.Event()
    assert asyncio.run(run())["a_total",] == 1
