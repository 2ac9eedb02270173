"""Faults put into an engine with pages on purpose: the state machine of test_engine_machine finds each."""

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_engine_machine import PAGE, UNIT, Serving

from tessera.models.pages import OutOfPages
from tessera.runtime.lane import Lane
from tessera.runtime.sequence import Sequence


def each_sequence(lane: Lane, change) -> None:
    """Change every sequence when it joins the lane."""
    add = lane.add

    def added(sequence):
        add(sequence)
        change(sequence)

    lane.add = added


def early_free(lane: Lane) -> None:
    """A prompt's last page is free while its answer is decoded."""
    begin = lane._begin

    def begun(row, last):
        begin(row, last)
        lane.prefix.pages.release(row.pages[-1:])

    lane._begin = begun


def double_free(lane: Lane) -> None:
    """The end of a request takes two references of a shared page."""
    pages = lane.prefix.pages
    release = pages.release

    def twice(found):
        found = list(found)
        release(found)
        release([page for page in found if pages.references(page)])

    pages.release = twice


def whole_prompt_hit(lane: Lane) -> None:
    """A prompt of whole units is reused to its last token, which leaves no row to predict the next."""

    def change(row: Sequence):
        row.matchable = lambda block, unit: row.hashes[: row.prompt_tokens // unit * unit // block]

    each_sequence(lane, change)


def hit_of_one_page_more(lane: Lane) -> None:
    """A hit's last page is another than the hash says."""
    match = lane.prefix.match

    def matched(hashes):
        run = match(hashes)
        return [*run[:-1], run[0]] if len(run) > 2 else run

    lane.prefix.match = matched


def decode_written_pages_published(lane: Lane) -> None:
    """An answer's pages enter the cache beside its prompt's, when it ends."""
    release = lane._release

    def released():
        for row in lane._known.values():
            answer = row.answer
            if answer.done and row.pages and row.saved is None:
                tokens = [*row.request.prompt, *answer.tokens[:-1]]
                row.hashes = lane.prefix.hashes(tokens, row.request.tenant)
                for index in range(len(tokens) // UNIT * UNIT // PAGE):
                    lane._publish(row, index)
        release()

    lane._release = released


def part_of_a_unit_published(lane: Lane) -> None:
    """Full pages of a unit that the prompt does not fill are shared."""
    begin = lane._begin

    def begun(row, last):
        for index in range(len(row.hashes)):
            lane._publish(row, index)
        begin(row, last)

    lane._begin = begun


def salt_without_tenant(lane: Lane) -> None:
    hashes = lane.prefix.hashes
    lane.prefix.hashes = lambda tokens, tenant="": hashes(tokens)


def reference_kept_on_cancel(lane: Lane) -> None:
    release = lane._release

    def released():
        for id in [id for id, row in lane._known.items() if row.dropped]:
            if lane._known[id] not in lane._running:
                continue
            lane.slots[lane._known[id].slot] = None
            del lane._known[id]
        release()

    lane._release = released


def swap_forgets_a_page(lane: Lane) -> None:
    """The last page that a request takes to the host is empty."""
    save = lane.pool.save

    def saved(pages):
        found = save(pages)
        return [*found[:-1], *(part._replace(k=np.zeros_like(part.k)) for part in found[-1:])]

    lane.pool.save = saved


def swap_in_wrong_order(lane: Lane) -> None:
    restore = lane.pool.restore
    lane.pool.restore = lambda pages, saved: restore(pages, [*saved[1:], *saved[:1]])


def wrong_table_after_return(lane: Lane) -> None:
    """A request that returns has its first two pages in the wrong order."""
    come_back = lane._return

    def returned(row):
        come_back(row)
        row.pages[:2] = row.pages[1::-1]

    lane._return = returned


def wrong_token_after_return(lane: Lane) -> None:
    """A request that returns feeds the token before its last."""
    come_back = lane._return

    def returned(row):
        tokens = row.answer.tokens
        come_back(row)
        if len(tokens) > 1 and lane._runs(row):
            lane._last.place(row.slot, np.array(tokens[-2:-1], np.int32), None)

    lane._return = returned


def preempted_request_lost(lane: Lane) -> None:
    give_way = lane._give_way

    def gone(row):
        give_way(row)
        if row in lane.waiting:
            lane.waiting.remove(row)

    lane._give_way = gone


def bad_pages_stay(lane: Lane) -> None:
    """Pages that hold NaN stay in the cache."""
    lane.prefix.forget = lambda pages: []


def pin_ignored(lane: Lane) -> None:
    lane.prefix.pin = lambda hashes: lane.prefix._pins.update(hashes)


def cached_page_evicted_with_children(lane: Lane) -> None:
    """Pages go in the order of release, whatever continues them."""
    lane.prefix._victims = lambda count: list(lane.prefix.pages.cached)[:count]


def full_pool_never_preempts(lane: Lane) -> None:
    """A request that finds no page fails instead of taking another's."""

    def give_way(row):
        raise OutOfPages("nothing gives way")

    lane._give_way = give_way


DEFAULT = (early_free, swap_forgets_a_page)
OTHERS = (
    salt_without_tenant,
    double_free,
    whole_prompt_hit,
    hit_of_one_page_more,
    decode_written_pages_published,
    part_of_a_unit_published,
    reference_kept_on_cancel,
    swap_in_wrong_order,
    wrong_table_after_return,
    wrong_token_after_return,
    preempted_request_lost,
    bad_pages_stay,
    pin_ignored,
    cached_page_evicted_with_children,
    full_pool_never_preempts,
)


@pytest.mark.parametrize(
    "fault",
    [*DEFAULT, *(pytest.param(fault, marks=pytest.mark.exhaustive) for fault in OTHERS)],
    ids=lambda fault: fault.__name__,
)
def test_the_machine_finds(fault):
    broken = type("Broken", (Serving,), {"fault": staticmethod(fault)})
    fast = settings(Serving.TestCase.settings, max_examples=200, phases=[Phase.generate], print_blob=False)
    with pytest.raises((AssertionError, ValueError, KeyError, OutOfPages)):
        run_state_machine_as_test(broken, settings=fast)
