"""An engine with pages: every answer is the one that the request gets alone, from an engine that has cached nothing."""

from collections import abc
from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch import Batch
from tiny import CONFIG as TINY
from tiny import PLAN, random_params

from tessera.generate import Model
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.runtime.answers import Generation
from tessera.runtime.engine import Engine
from tessera.runtime.pool import PagePool, Paging
from tessera.runtime.requests import End, Event, Failure, Request, Token
from tessera.runtime.sampling import Sampling
from tessera.runtime.sequence import Sequence
from tessera.runtime.step import prefill_chunk, read_head
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

CONFIG = replace(TINY, tie_embeddings=False, max_positions=512, eos_ids=())
OWN = replace(PLAN, anchors=(), own=(0, 1, 2), head_map=((0, 1),) * 3, heads="identity", minimum=32)
POLICIES = {"dense": Dense(), "kascade": Kascade.from_plan(PLAN), "own": Kascade.from_plan(OWN)}
PAGING = Paging(num_pages=33, page=32, unit=64, sizes=(128, 64), batches=(1, 2))


@pytest.fixture(scope="module")
def model():
    return Model(
        config=CONFIG,
        params=jax.tree.map(jnp.asarray, random_params(CONFIG)),
        tokenizer=byte_tokenizer(),
        policy=Dense(),
    )


def engine_of(model: Model, attention: str = "kascade", **options) -> Engine:
    paging = replace(PAGING, **{name: options.pop(name) for name in ("num_pages", "sizes") if name in options})
    options = {"slots": 2, "num_keys": 512, "paging": paging} | options
    return replace(model, policy=POLICIES[attention]).engine(**options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(0, 256, length).tolist()


def run(engine: Engine, *requests: Request, every: int = 0) -> list[Generation]:
    """Submit requests, each `every` steps after the one before; return their answers in this order."""
    events: list[Event] = []
    for request in requests:
        engine.submit(request)
        for _ in range(every):
            events += engine.step()
    while engine.busy:
        events += engine.step()
    ends = [event for event in events if isinstance(event, End)]
    assert len(ends) == len(requests), events[-1]
    return [end.generation for end in sorted(ends, key=lambda end: end.id)]


def alone(model: Model, request: Request, attention: str = "kascade") -> Generation:
    return run(engine_of(model, attention), request)[0]


def contiguous(model: Model, attention: str, tokens: abc.Sequence[int], count: int) -> list[int]:
    """Answer greedily from contiguous keys, one sequence, one unit at a time: the oracle."""
    policy, unit = POLICIES[attention], PAGING.unit
    batch = Batch(model.params, model.config, policy, rows=1, num_keys=512, size=unit)
    for start in range(0, len(tokens), unit):
        batch.policy = policy.at_position(start, unit)
        hidden, _ = batch.chunk([tokens[start : start + unit]], start)
    scores, found = read_head(model.params, hidden.last), []
    for position in range(len(tokens), len(tokens) + count):
        token = jnp.argmax(scores, -1).astype(jnp.int32)
        found.append(int(token[0]))
        batch.policy = policy.decode_at(position, unit)
        scores, _ = batch.decode(token, np.array([position], np.int32), np.array([True]))
    return found


MIXTURE = (
    Request(prompt=prompt(150), max_new_tokens=12),
    Request(prompt=prompt(130), max_new_tokens=4, sampling=Sampling(temperature=0.9, top_k=40), seed=3),
    Request(prompt=prompt(20), max_new_tokens=9, sampling=Sampling(temperature=1.0), seed=4),
    Request(prompt=prompt(300), max_new_tokens=40),
    Request(prompt=prompt(140), max_new_tokens=3, sampling=Sampling(repetition_penalty=1.7)),
    Request(prompt=prompt(9), max_new_tokens=150, sampling=Sampling(temperature=0.7, frequency_penalty=1.3), seed=5),
)


@pytest.mark.parametrize("attention", POLICIES)
def test_pages_give_the_tokens_that_contiguous_keys_give(model, attention):
    for request in (MIXTURE[0], MIXTURE[3], replace(MIXTURE[0], prompt=prompt(100), max_new_tokens=70)):
        expected = contiguous(model, attention, request.prompt, request.max_new_tokens)
        assert alone(model, request, attention).tokens == expected


def test_a_crowd_gets_the_answers_that_each_gets_alone(model):
    found = run(engine_of(model, slots=3), *MIXTURE, every=2)
    for answer, request in zip(found, MIXTURE, strict=True):
        expected = alone(model, request)
        assert (answer.tokens, answer.density) == (expected.tokens, pytest.approx(expected.density))


def poison(engine: Engine) -> None:
    """Fill every free page with NaN, or with 99 where keys are int8."""
    lane = engine.lane
    free = lane.prefix.pages.free
    bad = [
        jax.tree.map(lambda x: np.full_like(x, 99 if x.dtype == np.int8 else np.nan), part)
        for part in lane.pool.save(free)
    ]
    lane.pool.restore(free, bad)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_free_pages_and_the_null_page_are_never_read(model, cache):
    expected = run(
        replace(model, kv_dtype=cache, policy=POLICIES["own"]).engine(slots=2, num_keys=512, paging=PAGING),
        *MIXTURE[:3],
    )
    engine = replace(model, kv_dtype=cache, policy=POLICIES["own"]).engine(slots=2, num_keys=512, paging=PAGING)
    ids = [engine.submit(request) for request in MIXTURE[:3]]
    events = []
    while engine.busy:
        events += engine.step()
        poison(engine)
    found = {event.id: event.generation.tokens for event in events if isinstance(event, End)}
    assert [found[id] for id in ids] == [answer.tokens for answer in expected]


def test_a_prefix_hit_of_any_length_gives_the_tokens_of_a_cold_run(model):
    engine, tokens = engine_of(model), prompt(300)
    run(engine, Request(prompt=tokens, max_new_tokens=2))
    for shared, hit in ((300, 256), (257, 256), (256, 256), (255, 192), (200, 192), (64, 64), (63, 0), (1, 0)):
        request = Request(prompt=tokens[:shared] + prompt(20, seed=shared), max_new_tokens=6)
        engine.submit(request)
        events = [event for _ in range(60) if engine.busy for event in engine.step()]
        [end] = [event for event in events if isinstance(event, End)]
        assert end.reused_tokens == hit
        assert end.generation.tokens == alone(model, request).tokens


def test_a_conversation_gives_the_tokens_of_a_cold_run_of_all_of_it(model):
    """The keys that decode wrote for an answer are not those that a prefill of the answer writes."""
    engine, tokens = engine_of(model, "own"), prompt(150)
    for turn in range(3):
        request = Request(prompt=list(tokens), max_new_tokens=70)
        [answer] = run(engine, request)
        assert answer.tokens == alone(model, request, "own").tokens
        tokens += [*answer.tokens, *prompt(5, seed=turn)]


def test_a_page_whose_query_tile_goes_on_in_the_next_page_is_not_shared(model):
    """Rows 192 to 223 fill a page; under Kascade their keys also depend on rows 224 to 255, which differ here."""
    policy = Kascade.from_plan(replace(OWN, query_tile=64))
    one, two = (Request(prompt=prompt(224) + prompt(31, seed=seed), max_new_tokens=8) for seed in (1, 2))
    warm, cold = (replace(model, policy=policy).engine(slots=1, num_keys=512, paging=PAGING) for _ in range(2))
    assert run(warm, one, two)[1].tokens == run(cold, two)[0].tokens


def test_requests_of_other_tenants_share_no_page(model):
    engine, one = engine_of(model), Request(prompt=prompt(200), max_new_tokens=2, tenant="a")
    reused = []
    for request in (one, replace(one, tenant="b"), one):
        engine.submit(request)
        events = [event for _ in range(60) if engine.busy for event in engine.step()]
        reused += [event.reused_tokens for event in events if isinstance(event, End)]
    assert reused == [0, 0, 192]


@pytest.mark.parametrize("lag", [0, 2])
def test_requests_that_give_way_get_the_answers_that_they_get_alone(model, lag):
    """Three requests of up to 11 pages each in a pool of 14."""
    requests = [
        Request(prompt=prompt(150, seed=n), max_new_tokens=150 + n, seed=n, sampling=s)
        for n, s in enumerate((Sampling(), Sampling(temperature=1.0), Sampling(frequency_penalty=0.5)))
    ]
    engine = engine_of(model, "own", slots=3, num_pages=15, lag=lag, sizes=(64,))
    found = run(engine, *requests)
    lane = engine.lane
    assert lane.preempted >= 2
    for answer, request in zip(found, requests, strict=True):
        expected = alone(model, request, "own")
        assert (answer.tokens, answer.density) == (expected.tokens, pytest.approx(expected.density))


def test_no_page_is_lost_when_requests_are_cancelled_at_any_step(model):
    engine, rng = engine_of(model, num_pages=20, slots=3), np.random.default_rng(0)
    running: list[int] = []
    for n in range(60):
        tokens = prompt(int(rng.integers(1, 260)), seed=n % 3)
        running.append(engine.submit(Request(prompt=tokens, max_new_tokens=20)))
        for _ in range(int(rng.integers(0, 5))):
            gone = {event.id for event in engine.step() if not isinstance(event, Token)}
            running = [id for id in running if id not in gone]
        if running and rng.random() < 0.5:
            engine.cancel(running.pop(int(rng.integers(len(running)))))
    while engine.busy:
        engine.step()
    engine.step()
    lane = engine.lane
    pages = lane.prefix.pages
    assert engine.pool_state.usage == 0
    assert len(pages.free) + len(pages.cached) == pages.size - 1


def test_a_request_larger_than_the_pool_fails_by_name(model):
    engine = engine_of(model, num_pages=6)
    engine.submit(Request(prompt=prompt(300), max_new_tokens=2))
    fine = engine.submit(Request(prompt=prompt(100), max_new_tokens=2))
    events = [event for _ in range(30) if engine.busy for event in engine.step()]
    assert isinstance(events[0], Failure)
    assert "need 301 keys, but a request may have 160" in str(events[0].error)
    assert [event.id for event in events if isinstance(event, End)] == [fine]


# --- probabilities of a prompt's tokens


def scored(engine: Engine, tokens: abc.Sequence[int], ranks: int = 3) -> tuple[Token, ...]:
    """Submit a prompt twice, so that the second could reuse keys; return the second one's tokens."""
    for _ in range(2):
        engine.submit(Request(prompt=tokens, max_new_tokens=1, prompt_logprobs=ranks))
        [end] = engine.drain()
    assert end.reused_tokens == 0
    assert [token.token for token in end.prompt] == list(tokens)
    assert (end.prompt[0].logprob, end.prompt[0].top) == (None, ())
    return end.prompt


def test_every_token_of_a_prompt_has_the_probability_that_one_call_gives_it(model):
    tokens = prompt(300)
    logp = np.asarray(jax.nn.log_softmax(replace(model, policy=Dense()).logits([tokens])[0]))
    found = scored(engine_of(model, "dense", num_pages=14, sizes=(64,)), tokens)[1:]
    for row, token in enumerate(found):
        assert token.logprob == pytest.approx(logp[row, token.token], abs=1e-4)
        best, values = zip(*token.top)
        assert values == pytest.approx(np.sort(logp[row])[:-4:-1], abs=1e-4)
        assert logp[row, list(best)] == pytest.approx(values, abs=1e-4)


def test_a_prompt_of_whole_tiles_predicts_what_comes_after_them(model):
    """Under Kascade, row t of a longer prompt says of the next token what a prompt that ends with row t says of it."""
    tokens, engine = prompt(300), engine_of(model, "kascade")
    found = scored(engine, tokens)
    for length in (64, 128, 256):  # before the cross-over and after it
        engine.submit(Request(prompt=tokens[:length], max_new_tokens=1, top_logprobs=3))
        first = next(event for event in iter(engine.step, None) for event in event if isinstance(event, Token))
        assert [id for id, _ in found[length].top] == [id for id, _ in first.top]
        assert [p for _, p in found[length].top] == pytest.approx([p for _, p in first.top], abs=1e-5)


def test_a_prompt_that_gives_way_is_scored_as_if_alone(model):
    engine = engine_of(model, "dense", slots=2, num_pages=14, sizes=(64,))
    engine.submit(Request(prompt=prompt(150, seed=1), max_new_tokens=200))
    engine.submit(Request(prompt=prompt(250), max_new_tokens=9, prompt_logprobs=0))
    ends = {end.id: end for end in engine.drain()}
    lane = engine.lane
    assert lane.preempted
    expected = scored(engine_of(model, "dense", num_pages=14, sizes=(64,)), prompt(250), 0)
    assert [token.logprob for token in ends[1].prompt[1:]] == pytest.approx([t.logprob for t in expected[1:]], abs=1e-5)


@pytest.mark.parametrize("rows", [64, 128])
def test_a_prefill_never_copies_the_pool(model, rows):
    """XLA once copied the pool for every layer where a prefill writes one run of rows."""
    layers = tuple(jax.tree.map(itemgetter(i), model.params.layers) for i in range(CONFIG.num_layers))
    params = replace(model.params, layers=layers)  # as a checkpoint is loaded
    pool = PagePool(params, CONFIG, Dense(), context=512, paging=replace(PAGING, page=64, num_pages=513))
    one = np.zeros(1, np.int32)
    cache = pool.cache._replace(pages=np.zeros((1, pool.width), np.int32))
    tokens = np.zeros((1, rows), np.int32)
    lowered = prefill_chunk.lower(params, cache, tokens, one, one, config=CONFIG, policy=Dense())
    assert (
        lowered.compile().memory_analysis().temp_size_in_bytes < sum(x.nbytes for x in jax.tree.leaves(pool.cache)) / 4
    )


def test_a_pinned_prefix_outlives_a_flood_of_other_prompts(model):
    engine, document = engine_of(model, num_pages=20), prompt(200)
    assert engine.pin(document) == 192
    for seed in range(4):
        run(engine, Request(prompt=prompt(300, seed=seed), max_new_tokens=2))
    request = Request(prompt=document + prompt(20), max_new_tokens=6)
    engine.submit(request)
    [end] = engine.drain()
    assert end.reused_tokens == 192
    assert end.generation.tokens == alone(model, request).tokens


def test_pages_on_disk_survive_eviction_and_restart(model, tmp_path):
    paging = replace(PAGING, num_pages=13, spill=tmp_path)
    wanted = [Request(prompt=prompt(250, seed=seed) + [1], max_new_tokens=6) for seed in range(3)]
    expected = [alone(model, request, "own").tokens for request in wanted]
    for start in range(2):
        engine = replace(model, policy=POLICIES["own"]).engine(slots=2, num_keys=512, paging=paging)
        for again in range(2):  # the others have evicted each prompt's pages by the time it comes again
            for request, tokens in zip(wanted, expected, strict=True):
                engine.submit(request)
                [end] = engine.drain()
                assert (end.reused_tokens, end.generation.tokens) == (192 if start or again else 0, tokens)
        engine.close()


def test_a_folder_that_is_full_keeps_the_pages_that_a_prompt_begins_with(model, tmp_path):
    request, sizes = Request(prompt=prompt(250) + [1], max_new_tokens=6), []

    def serve(folder, limit):
        engine = engine_of(model, paging=replace(PAGING, spill=folder, spill_bytes=limit))
        engine.submit(request)
        [end] = engine.drain()
        engine.close()
        sizes[:] = [path.stat().st_size for path in folder.glob("*/*")]
        return end.reused_tokens

    assert (serve(tmp_path / "all", 1 << 30), serve(tmp_path / "all", 1 << 30)) == (0, 192)
    limit = int(sum(sizes) * 0.8)
    assert serve(tmp_path / "some", limit) == 0
    assert 0 < serve(tmp_path / "some", limit) < 192


def test_no_page_is_in_use_once_the_last_request_has_ended_or_gone(model):
    engine = engine_of(model)
    run(engine, Request(prompt=prompt(100), max_new_tokens=4))
    assert engine.pool_state.usage == 0
    number = engine.submit(Request(prompt=prompt(200), max_new_tokens=4))
    engine.step()
    assert engine.pool_state.usage > 0
    engine.cancel(number)
    assert engine.pool_state.usage == 0


def test_a_tenant_with_many_requests_does_not_keep_another_waiting(model):
    """The greedy tenant may be ahead by the tokens of one longest request; it sends three times as many."""
    engine = engine_of(model, num_keys=128)
    greedy = [Request(prompt=prompt(60, seed), max_new_tokens=4, tenant="greedy") for seed in range(24)]
    modest = [Request(prompt=prompt(60, 100 + seed), max_new_tokens=4, tenant="modest") for seed in range(4)]
    for request in (*greedy, *modest):
        engine.submit(request)
    ends = [end.id for end in engine.drain()]
    assert max(ends.index(number) for number in range(24, 28)) < 16


@pytest.mark.parametrize("num_pages", [33, 9])
def test_a_tenant_ahead_of_its_share_gives_its_row_or_pages_to_another_and_answers_the_same(model, num_pages):
    """The greedy tenant's two requests hold both rows; in the small pool, they also hold nearly all pages."""
    engine = engine_of(model, "own", num_keys=224, num_pages=num_pages)
    greedy = [Request(prompt=prompt(100, seed), max_new_tokens=110 - 40 * seed, tenant="greedy") for seed in range(2)]
    modest = Request(prompt=prompt(60), max_new_tokens=3, tenant="modest")
    for request in greedy:
        engine.submit(request)
    events = [event for _ in range(20) for event in engine.step()]
    lane = engine.lane
    engine.submit(modest)
    events += engine.step()
    lane.scheduler.served(lane._known[0], 10_000)
    events += engine.drain()
    ends = {event.id: event.generation for event in events if isinstance(event, End)}
    assert lane.preempted >= 1
    assert list(ends)[0] == 2
    for id, request in enumerate((*greedy, modest)):
        assert ends[id].tokens == alone(model, request, "own").tokens


def first_step(model: Model, request: Request) -> Sequence:
    """Run the first step of a request whose prompt takes several, and return its record."""
    engine = engine_of(model)
    number = engine.submit(request)
    engine.step()
    lane = engine.lane
    return lane._known[number]


def test_a_prompt_token_is_never_counted_as_reused_twice(model):
    """A request takes over another's pages, gives way, finds its pages evicted and takes over pages once more."""
    row = first_step(model, Request(prompt=prompt(300), max_new_tokens=2))
    row.leave()
    row.enter([], 0)
    row.take_over([3, 4], 64)
    assert (row.reused, row.shared, row.position) == (64, 2, 64)
    row.leave()
    row.enter([], 0)
    assert row.reused == 0
    row.take_over([5, 6], 64)
    assert row.reused == 64
    row.position = 192  # it computes 128 tokens itself, and finds them in the cache when it comes back
    row.leave()
    row.enter([5, 6, 7, 8, 9, 10], 192)
    assert row.reused == 64


def test_a_request_that_returns_asks_for_the_pages_of_its_answer_too(model):
    row = first_step(model, Request(prompt=prompt(300), max_new_tokens=100))
    assert row.need(page=32) == 11
    row.generated = 80
    assert row.need(page=32) == 13


def test_a_page_that_is_not_finite_never_reaches_the_disk(model, tmp_path):
    paging, request = replace(PAGING, spill=tmp_path), Request(prompt=prompt(250), max_new_tokens=4)
    engine = replace(model, policy=POLICIES["own"]).engine(slots=2, num_keys=512, paging=paging)
    expected = run(engine, request)[0].tokens
    lane = engine.lane
    _, second = lane.prefix.held()[1]
    [part] = lane.pool.save([second])
    lane.pool.restore([second], [jax.tree.map(lambda x: np.full_like(x, np.nan), part)])
    engine.close()
    again = replace(model, policy=POLICIES["own"]).engine(slots=2, num_keys=512, paging=paging)
    again.submit(request)
    [end] = again.drain()
    assert (end.reused_tokens, end.generation.tokens) == (0, expected)  # the first unit has two pages
