"""The simulator of serving: its times are the roofline's, no page or request gets lost, and equal seeds agree."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lab.commands import main
from lab.report import documents, served
from lab.simulate import scenarios, study
from lab.simulate.cluster import simulate, summary
from lab.simulate.machine import MACHINES, MODEL, TYPES, UNIT, pool_pages, step_times
from lab.simulate.replica import Open, Replica
from lab.simulate.traffic import MIXES, Arrival, Stream, Text
from tessera.measure import evidence
from tessera.models.catalogue import MODELS
from tessera.runtime.costs import LinearCosts
from tessera.runtime.roofline import Question, recipe, speed
from tessera.runtime.scheduler import Scheduler, Work

COSTS = LinearCosts(base=1e-3, row=1e-5, pair=1e-9, answer=1e-5, key=1e-8)
H200 = replace(MACHINES["h200-8"], replicas=2)


def stream(seconds: float, **more) -> Stream:
    return Stream(mix=MIXES["mixed"], rate=4.0, seconds=seconds, seed=1, **more)


def arrival(at: float, prompt: int, answer: int, text: Text) -> Arrival:
    return Arrival(at_s=at, kind="chat", tenant="", text=text, prompt_tokens=prompt, answer_tokens=answer)


def open_of(replica: Replica, id: int, each: Arrival) -> Open:
    hashes = replica.prefix.hashes(each.text.tokens())[: (each.prompt_tokens - 1) // UNIT]
    deadline = each.at_s + 1.0
    work = Work(
        id=id,
        tenant="",
        arrived_s=each.at_s,
        deadline_s=deadline,
        prompt_tokens=each.prompt_tokens,
        position=0,
        generated=0,
    )
    return Open(arrival=each, work=work, hashes=hashes)


def replica(pages: int) -> Replica:
    return Replica(Scheduler(COSTS, unit=UNIT, sizes=(1, 4, 16), step_s=0.05), pages)


@pytest.mark.parametrize("attention", ["dense", "kascade"])
def test_steps_take_the_time_of_the_roofline(attention):
    """A prompt of 61,440 tokens in chunks of 4,096, and a step of 8 answers of 32,768 keys."""
    config, policy = MODELS[MODEL], recipe(MODELS[MODEL], MODEL)
    kascade = policy if attention == "kascade" else None

    def expected(length: int, batch: int):
        q = Question(config=config, chip="h200", devices=2, batch=batch, length=length, policy=policy, chunk=4096)
        return speed(q, TYPES, kascade)

    found = step_times(H200, attention)
    prefill = sum(found.step_s([(first, 4096)], []) for first in range(0, 61440, 4096))
    assert prefill == pytest.approx(expected(61440, 1).prefill_s, rel=0.02)
    assert found.step_s([], [32768] * 8) == pytest.approx(1e-3 * expected(32768, 8).decode_ms, rel=0.02)


def test_the_plan_is_never_slower_than_dense_and_much_faster_far_out():
    dense, kascade = step_times(H200, "dense"), step_times(H200, "kascade")
    gain = [dense.step_s([(at, UNIT)], [at]) / kascade.step_s([(at, UNIT)], [at]) for at in range(0, 126_000, 2048)]
    assert min(gain) >= 1
    assert gain[-1] > 2


def test_a_pool_holds_what_the_weights_leave():
    room = {name: pool_pages(machine) * UNIT for name, machine in MACHINES.items()}
    assert 700_000 < room["v6e-8"] < 1_000_000  # (4 x 31.2 - 15 GiB) / 128 KiB
    assert 1_300_000 < room["h200-8"] < 1_600_000


def test_every_request_ends_even_if_a_replica_is_lost():
    arrivals = stream(40.0).arrivals()
    outcome = simulate(H200, "kascade", "edf", arrivals, losses=[(20.0, 0)])
    assert len(outcome.ended) == len(arrivals) > 100
    assert {id(each.arrival) for each in outcome.ended} == set(map(id, arrivals))
    for each in outcome.ended:
        assert each.work.arrived_s < each.first_s <= each.ended_s
        assert each.work.generated == each.arrival.answer_tokens
    for each in outcome.replicas:
        pages = each.prefix.pages
        assert not pages.active
        assert len(pages.free) + len(pages.cached) == pages.size - 1
    assert outcome.replicas[0].busy_s < 0.8 * outcome.replicas[1].busy_s


def test_equal_seeds_give_equal_results():
    first, second = (summary(simulate(H200, "dense", "edf", stream(15.0).arrivals())) for _ in range(2))
    assert first == second


def test_a_text_asked_again_is_found_in_the_cache():
    one, text = replica(100), Text(5, 8192)
    for id, at in enumerate((0.0, 5.0)):
        one.run_until(at)
        one.submit(open_of(one, id, arrival(at, 8200, 4, text)))
    one.run_until(10.0)
    first, second = one.ended
    assert (first.cached_tokens, second.cached_tokens) == (0, 8192)
    alone = sum(COSTS.step_s([(start, 4096)], []) for start in (0, 4096)) + COSTS.step_s([(8192, UNIT)], [])
    assert first.first_s == pytest.approx(alone)
    assert second.first_s - 5.0 == pytest.approx(COSTS.step_s([(8192, UNIT)], []))


def test_a_full_pool_makes_requests_give_way_and_all_still_end():
    one = replica(40)  # 9,984 positions
    for id in range(6):
        one.submit(open_of(one, id, arrival(0.0, 1300, 900, Text(id, 1300))))
    one.run_until(100.0)
    assert one.preempted > 0
    assert sorted(each.work.id for each in one.ended) == list(range(6))
    assert all(each.work.generated == 900 for each in one.ended)


@pytest.mark.parametrize("factor", [1.0, 50.0])
@pytest.mark.parametrize("documents", [1, 2, 4])
def test_a_chat_beside_documents_waits_for_one_bounded_step(factor, documents):
    """The machine is `factor` times slower than the scheduler's costs say, which were measured while it was quiet."""
    slow = LinearCosts(**{name: factor * value for name, value in vars(COSTS).items()})
    one = Replica(Scheduler(COSTS, unit=UNIT, sizes=(1, 2, 4), step_s=0.01), 1000, slots=3, costs=slow)
    asked = [arrival(0.0, 20_000, 50, Text(id, 20_000)) for id in range(documents)]
    for id, each in enumerate(asked):
        one.submit(open_of(one, id, each))
        one.waiting[id].work.deadline_s = None
    one.run_until(0.4 * slow.step_s([(0, 20_000)], []))
    at_s = one.now_s - 0.5 * slow.step_s([(0, UNIT)], [])  # in the middle of a step
    one.submit(open_of(one, 99, arrival(at_s, 32, 5, Text(99, 32))))
    one.waiting[99].work.deadline_s = None
    one.run_until(one.now_s + factor * 10)
    chat = next(each for each in one.ended if each.work.id == 99)
    assert chat.first_s - at_s < factor * 0.01 + 2 * slow.step_s([(0, UNIT)], [])
    assert len(one.ended) == documents + 1 or documents > 1


def test_arrivals_have_the_rate_and_texts_share_what_they_should():
    found = Stream(mix=MIXES["long"], rate=2.0, seconds=2000.0, daily=True).arrivals()
    assert len(found) / 2000 == pytest.approx(2.0 * 0.55, rel=0.1)
    busy = sum(1100 < each.at_s < 1600 for each in found)
    assert busy > 5 * sum(100 < each.at_s < 600 for each in found)
    one, other, third = Text(1, 3000, 2), Text(2, 3000, 2), Text(3, 3000, 3)
    same = one.tokens() == other.tokens()
    assert same[:1024].all()
    assert not same[1024:].all()
    assert not (one.tokens()[:1024] == third.tokens()[:1024]).all()


def test_shares_and_jain():
    assert scenarios._max_min({"a": 10.0, "b": 1.0, "c": 3.0}, 9.0) == {"b": 1.0, "c": 3.0, "a": 5.0}
    asked = [arrival(0.0, 100, 1, Text(0, 1)) for _ in range(4)]
    asked = [replace(each, tenant=name) for each, name in zip(asked, "aaab")]

    class Ended:
        def __init__(self, each):
            self.arrival, self.first_s = each, 1.0

    class Outcome:
        def __init__(self, each):
            self.ended = list(map(Ended, each))

    assert scenarios.jain(asked, Outcome([asked[0], asked[3]]), 2.0) == pytest.approx(1.0)
    assert scenarios.jain(asked, Outcome(asked[:2]), 2.0) == pytest.approx(0.5)


def test_the_command_writes_records_that_tables_and_the_picture_show(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "PAIRS", study.PAIRS[:2])
    monkeypatch.setattr(scenarios, "PRECISION", 2.0)
    out = tmp_path / "records.jsonl"
    argv = ["simulate", "--machine", "h200-8", "--day-hours", "0.01", "--minutes", "0.3", "--out", str(out)]
    assert main(argv) == 0
    assert capsys.readouterr().out.count("h200-8") == 6
    records = evidence.read(out)
    assert {r.what.workload.split(", ", 1)[1] for r in records} == {
        "capacity, mixed", "capacity, long", "greedy tenant", "day of 0.01 hours",
    }  # fmt: skip
    assert "kascade, fcfs" in documents.render("served", records)
    assert "Jain" in documents.render("served-days", records)
    assert served.day(records).svg.startswith("<svg")
    assert json.loads(out.read_text().splitlines()[-1])["facts"]["lost"] == 0


def test_bad_values_are_refused():
    for changes, words in (
        ({"machine": "v9"}, "v9"),
        ({"day_hours": 25.0}, "day_hours=25"),
        ({"minutes": 0.0}, "minutes"),
    ):
        with pytest.raises(ValueError, match=words):
            next(study.run(**{"machine": "v6e-8", "day_hours": 0.0, "minutes": 1.0} | changes))


@pytest.mark.parametrize("flag", ["--day-hours -1", "--day-hours nan", "--minutes inf", "--minutes 1e-09"])
def test_wrong_times_are_named(flag, capsys):
    assert main(["simulate", *flag.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} must be from 0")


def test_percentiles_of_counted_gaps():
    from lab.simulate.cluster import _weighted

    assert _weighted([{3: 98, 40: 1}, {40: 1}]) == {"p50": 4.0, "p90": 4.0, "p99": 41.0}
    assert np.isclose(sum({3: 98}.values()), 98)
