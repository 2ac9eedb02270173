"""The scheduler: sizes, deadlines, starvation, tenants, and costs that follow measured steps."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.runtime.costs import LinearCosts
from tessera.runtime.scheduler import HORIZON, LONE_S, MOST, RECENT, Scheduler, Work

COSTS = LinearCosts(base=1e-3, row=1e-5, pair=1e-9, answer=1e-5, key=1e-8)
UNIT, SIZES = 64, (1, 4, 16)


def scheduler(**changes) -> Scheduler:
    return Scheduler(COSTS, **{"unit": UNIT, "sizes": SIZES, "step_s": 0.02} | changes)


def work(id: int, tokens: int, *, due: float | None = 1e9, at: float = 0.0, tenant: str = "", **more) -> Work:
    return Work(id=id, tenant=tenant, arrived_s=at, deadline_s=due, prompt_tokens=tokens, **more)


works = st.lists(
    st.builds(
        work,
        st.just(0),
        st.integers(1, 9000),
        due=st.floats(0, 20),
        at=st.floats(0, 5),
        tenant=st.sampled_from("abc"),
    ),
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(works, works, st.sampled_from(["edf", "fcfs"]))
def test_a_step_has_a_compiled_size_and_fits_the_time(prefill, decode, order):
    for id, each in enumerate((*prefill, *decode)):
        each.id = id
    found = scheduler(order=order).chunk(5.0, prefill, decode)
    total, left = sum(count for _, count in found), sum(-(-each.prompt_tokens // UNIT) for each in prefill)
    assert len({each.id for each, _ in found}) == len(found)
    assert all(1 <= count <= -(-each.prompt_tokens // UNIT) for each, count in found)
    assert total in (*SIZES, 0) or total == left < SIZES[-1]
    assert total == min(left, SIZES[-1]) or order == "edf"
    if total > 1 and order == "edf":
        rows = [(each.position, count * UNIT) for each, count in found]
        most_s = LONE_S if len(prefill) == 1 and not decode else 0.02
        assert COSTS.step_s(rows, [each.prompt_tokens + each.generated for each in decode]) <= most_s


def test_the_largest_size_that_fits_the_time_is_taken():
    long = work(1, 20000, position=10048)  # 64 rows: 1.6 ms and 1 ms; 256: 6.2 ms; 1024: 21.8 ms
    assert scheduler().chunk(0.0, [long], [work(2, 10)]) == [(long, 4)]
    assert scheduler(step_s=0.03).chunk(0.0, [long], [work(2, 10)]) == [(long, 16)]


def test_a_prompt_beside_slow_answers_waits_a_bounded_number_of_steps():
    each, slow = scheduler(patience=3), [work(2, 10_000_000)]
    counts = [sum(count for _, count in each.chunk(0.0, [work(1, 640)], slow)) for _ in range(9)]
    assert counts == [0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_the_most_requests_are_in_time():
    """By deadline alone, the long prompt would go first and all three would be late."""
    long, first, second = work(1, 50_000, due=1.0), work(2, 2000, due=1.1), work(3, 2000, due=1.2)
    wide = {"sizes": (1, 4, 256)}  # all are near their turn
    assert scheduler(**wide).admit(0.0, [long, second, first]) == [first, second, long]
    before, after = work(1, 50_000, due=1.8), work(2, 10_000, due=1.85)  # 1.75 s and 0.15 s
    assert scheduler(**wide).admit(0.0, [before, after]) == [after, before]
    easy = work(1, 50_000, due=9.0)
    assert scheduler(**wide).admit(0.0, [work(4, 64, due=10.0), easy])[0] is easy


def test_first_come_first_served_ignores_deadlines():
    waiting = [work(1, 64, at=2.0, due=3.0), work(2, 64, at=1.0, due=9.0)]
    assert [each.id for each in scheduler(order="fcfs").admit(2.0, waiting)] == [2, 1]


def test_requests_get_rows_only_when_their_turn_is_near():
    running = work(1, HORIZON * SIZES[-1] * UNIT, due=50.0)
    urgent, patient = work(2, 64, due=10.0), work(3, 64, due=90.0)
    assert scheduler().admit(0.0, [patient, urgent], [running]) == [urgent]
    assert scheduler().admit(0.0, [patient, urgent]) == [urgent, patient]
    assert scheduler().admit(0.0, [patient, running]) == [running]


@settings(max_examples=40, deadline=None)
@given(works.filter(bool))
def test_the_latest_deadline_gives_way_but_never_the_oldest(running):
    for id, each in enumerate(running):
        each.id = id
    victim = scheduler().victim(running)
    oldest = min(running, key=lambda each: (each.arrived_s, each.id))
    assert victim is not oldest or len(running) == 1
    assert all(each.deadline_s <= victim.deadline_s for each in running if each is not oldest)


@dataclass
class Run:
    """Computed tokens per tenant, and when each request's prompt was done."""

    tokens: dict[str, int]
    done: dict[int, float]


def run(each: Scheduler, arrivals: list[Work], until: float) -> Run:
    """Serve prompts, without answers, on a machine that takes exactly the predicted times."""
    now, found, open_, left = 0.0, Run({}, {}), [], sorted(arrivals, key=lambda work: work.arrived_s)
    while now < until and (left or open_):
        while left and left[0].arrived_s <= now:
            open_.append(left.pop(0))
        if not open_:
            now = left[0].arrived_s
            continue
        shares = each.chunk(now, open_, [])
        now += COSTS.step_s([(one.position, count * UNIT) for one, count in shares], [])
        for one, count in shares:
            tokens = min(count * UNIT, one.prompt_tokens - one.position)
            one.position += tokens
            each.served(one, tokens)
            found.tokens[one.tenant] = found.tokens.get(one.tenant, 0) + tokens
            if one.position == one.prompt_tokens:
                found.done[one.id] = now
                open_.remove(one)
    return found


def test_nobody_starves_under_endless_urgent_requests():
    """Short requests arrive faster than they can be computed; the long one, late from the start, still ends."""
    crowd = [work(id, 640, at=0.005 * id, due=0.005 * id + 0.5) for id in range(1, 1600)]
    assert 0 in run(scheduler(), [work(0, 15_000, due=0.01), *crowd], until=8.0).done
    assert 0 not in run(scheduler(ageing=10**9), [work(0, 15_000, due=0.01), *clone(crowd)], until=8.0).done


def clone(found: list[Work]) -> list[Work]:
    return [
        work(each.id, each.prompt_tokens, due=each.deadline_s, at=each.arrived_s, tenant=each.tenant) for each in found
    ]


def crowd(seed: int, loads: dict[str, float], until: float) -> list[Work]:
    """Requests of a few hundred tokens; a load of 1 is about a tenth of what the machine can do."""
    rng, found = random.Random(seed), []
    for tenant, load in loads.items():
        at = 0.0
        while (at := at + rng.expovariate(12 * load)) < until:
            found.append(work(len(found), rng.randint(64, 1500), at=at, due=at + 0.5, tenant=tenant))
    return found


def test_a_greedy_tenant_takes_nothing_from_others():
    even = dict.fromkeys("abcde", 1.0)
    asked = crowd(3, even | {"a": 16.0}, 4.0)
    others = [each for each in asked if each.tenant != "a"]
    fair, unfair = (run(scheduler(burst=burst), clone(asked), until=4.0) for burst in (4096, 1 << 60))
    late = [sum(found.done.get(each.id, 9e9) > each.deadline_s for each in others) for found in (fair, unfair)]
    assert late[0] < 0.03 * len(others)
    assert late[1] > 3 * late[0] + 5
    assert fair.tokens["a"] > 0.3 * sum(fair.tokens.values())  # what the others leave is its own


def test_tenants_that_all_ask_too_much_get_equal_shares():
    found = run(scheduler(burst=4096), crowd(5, {"a": 30.0, "b": 10.0, "c": 8.0}, 2.0), until=2.0)
    assert max(found.tokens.values()) - min(found.tokens.values()) < 0.1 * sum(found.tokens.values())


def test_a_tenant_that_was_idle_saved_nothing():
    each = scheduler(burst=1)
    busy, new = work(1, 64_000, tenant="a"), work(2, 64_000, tenant="b", at=1.0)
    each.chunk(0.0, [busy], [])
    each.served(busy, 50_000)
    each.chunk(1.0, [busy, new], [])
    each.served(new, 64)
    assert each.chunk(2.0, [busy, new], [])[0][0] is busy


def test_a_tenant_ahead_of_its_share_goes_last_and_has_repaid_when_the_share_reaches_it():
    """A third tenant keeps a request open all the time, and never holds the share back."""
    each = scheduler(burst=1000)
    ahead, new, idle = (work(id, 64_000, tenant=tenant) for id, tenant in enumerate("abc"))
    each.chunk(0.0, [ahead, new, idle], [])
    each.served(ahead, 2400)  # 1,600 more than the share
    assert each.chunk(1.0, [ahead, new, idle], [])[0][0] is not ahead
    for work_ in (new, idle):
        each.served(work_, 1200)
    assert each.chunk(2.0, [ahead, new, idle], [])[0][0] is ahead


def test_a_tenant_that_had_the_machine_alone_is_ahead_by_a_bounded_amount():
    each = scheduler(burst=1000)
    busy, new = work(0, 64_000, tenant="a"), work(1, 64_000, tenant="b")
    each.chunk(0.0, [busy, new], [])
    each.served(busy, 1_000_000)
    each.served(new, 2 * MOST * 1000)
    assert each.chunk(1.0, [busy, new], [])[0][0] is busy


def test_only_a_tenant_of_a_higher_level_is_displaced_prompts_first():
    each = scheduler(burst=1000)
    answer = work(0, 640, tenant="a", at=2.0, position=640)
    early, late = (work(id, 640, tenant="a", at=float(id), position=64) for id in (1, 2))
    other, new = work(3, 640, tenant="b", at=9.0), work(4, 640, tenant="c", at=10.0)
    running = [answer, early, late, other]
    each.chunk(0.0, [*running, new], [])
    assert each.displaced(new, running) is None
    each.served(answer, 3000)
    assert each.displaced(new, running) is late
    assert each.displaced(new, [answer, early, other]) is early
    assert each.displaced(new, [answer, other]) is answer
    assert each.displaced(new, [other]) is None
    assert each.displaced(answer, running) is None


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000))
def test_equal_calls_give_equal_results(seed):
    asked = crowd(seed, {"a": 3.0, "b": 20.0}, 1.0)
    assert run(scheduler(), clone(asked), 5.0) == run(scheduler(), clone(asked), 5.0)


def test_deadlines_and_steps_follow_the_pace():
    """A machine that has become 50 times slower: no request is late and no step too long for that reason alone."""
    each = scheduler(step_s=0.01)
    document, chat = work(1, 20_000, due=None), work(2, 32, due=None, at=15.0)
    due_s = each.due_s(document)
    for _ in range(RECENT):
        each.observe([(0, 256)], [], 50 * COSTS.step_s([(0, 256)], []))
    assert each.pace == pytest.approx(50)
    assert each.due_s(document) - 1 == pytest.approx(50 * (due_s - 1))
    document.position = 9984
    assert each._timely(15.0, [document, chat])[:2] == ([chat, document], [])
    found = each.chunk(15.0, [document, chat], [])
    assert found[0] == (chat, 1)
    assert each.step_s == 0.01
    assert sum(count for _, count in found) == 4  # 256 positions take 9 ms by the costs, 1,024 more


def test_one_stall_or_an_upper_bound_does_not_change_the_pace():
    each, step = scheduler(), ([(0, 256)], [100] * 3)
    seconds = COSTS.step_s(*step)
    for factor in (1, 1, 1, 80, 1, 1, 1, 0.01, 1, 1):
        each.observe(*step, factor * seconds)
        assert each.pace == 1
    for _ in range(RECENT):
        each.observe(*step, 80 * seconds, at_most=True)
    assert each.pace == 1
    for _ in range(RECENT):
        each.observe(*step, seconds / 80, at_most=True)
    assert each.pace < 0.02


def test_a_brief_request_waits_for_at_most_one_step_of_a_longer_one():
    """Even a late one, beside a long request that is in time and has no time to lose; both go on."""
    each = scheduler(step_s=1e-3)  # one segment per step
    long, late = work(1, 20_000, due=0.45), [work(id, 32, due=0.0) for id in (2, 3)]
    first = [each.chunk(0.0, [long, *late], [])[0][0] for _ in range(6)]
    assert first == [long, late[0]] * 3
    assert each.admit(0.0, late, [long]) == []
    assert each.admit(0.0, late, [long]) == late


def test_costs_are_recovered_from_steps_and_follow_the_machine():
    rng = np.random.default_rng(0)
    steps = [
        (
            [(int(rng.integers(0, 9000)), int(rng.integers(1, 2000)))],
            rng.integers(1, 9000, rng.integers(0, 20)).tolist(),
        )
        for _ in range(60)
    ]
    found = LinearCosts.fit((*step, COSTS.step_s(*step)) for step in steps)
    for name in ("base", "row", "pair", "answer", "key"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)
    noisy = LinearCosts.fit((*step, COSTS.step_s(*step) * rng.uniform(0.8, 1.2)) for step in steps)
    assert min(noisy.base, noisy.row, noisy.pair, noisy.answer, noisy.key) >= 0
    for _ in range(100):
        for step in steps:
            found = found.observed(*step, 3 * COSTS.step_s(*step))
    for step in steps:
        assert found.step_s(*step) == pytest.approx(3 * COSTS.step_s(*step), rel=0.15)
    answering, prompt = ([], [5000] * 8), ([(4000, 1000)], [])
    before_s = found.step_s(*prompt)
    for _ in range(200):
        found = found.observed(*answering, COSTS.step_s(*answering))
    assert found.step_s(*answering) == pytest.approx(COSTS.step_s(*answering), rel=0.15)
    assert found.step_s(*prompt) > 0.8 * before_s  # steps without prefill say nothing about it, but for the base
    stalled = COSTS.observed(*steps[0], 1e6)
    assert stalled.step_s(*steps[0]) < 1.1 * COSTS.step_s(*steps[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": (4, 1)}, "ascending"),
        ({"unit": 0}, "unit=0"),
        ({"step_s": 0.0}, "step_s"),
        ({"order": "lifo"}, "lifo"),
        ({"ageing": 1}, "ageing=1"),
    ],
)
def test_a_bad_parameter_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        scheduler(**changes)


def test_nothing_to_fit_or_to_stop_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        LinearCosts.fit([])
    with pytest.raises(ValueError, match="no request that could give way"):
        scheduler().victim([])
