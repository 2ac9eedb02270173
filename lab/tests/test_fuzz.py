"""A seeded sample of `python -m lab study fuzz`: each of 500 damaged files is sound or refused in one sentence."""

import random

import pytest

from lab.studies import fuzz
from lab.studies.domains import nonsense
from lab.studies.mutations import mutate_json

MUTATIONS = 500


@pytest.fixture(scope="module")
def bench():
    with fuzz.Bench(limit_s=5) as found:
        yield found


def test_damaged_files_are_sound_or_refused(bench):
    found = fuzz.run_cases(bench, 0, range(MUTATIONS), tuple(fuzz.TARGETS))
    assert found["defects"] == []
    assert sum(found["counts"].values()) == MUTATIONS
    refused = {name for name in fuzz.TARGETS if found["counts"][f"{name} refused"]}
    assert refused == set(fuzz.TARGETS)
    assert sum(count for name, count in found["counts"].items() if name.endswith("loaded")) > 30


def test_a_worker_that_died_starts_again_before_the_next_file_is_damaged(bench):
    """A new worker first opens the sound models: started after the damage, it would fail, and so every later case."""
    bench.worker.close()
    assert bench.judge(fuzz.Case(0, "config.json", b"{}"))[0] == "clean"


def test_cases_are_the_same_for_the_same_seed(bench):
    names = tuple(fuzz.TARGETS)
    assert [bench.draw(3, n, names) for n in range(20)] == [bench.draw(3, n, names) for n in range(20)]
    assert bench.draw(3, 0, names) != bench.draw(4, 0, names)


def test_the_oracle_finds_nonsense_that_would_be_accepted(bench):
    """The fuzzer's oracle must report these nonsense values itself, and not trust that a file that loads is sound."""
    path = bench.place("config.json")
    for wrong in ('"rope_theta": -1', '"tie_word_embeddings": "no"', '"eos_token_id": 5000', '"rms_norm_eps": NaN'):
        path.write_bytes(bench.sound["config.json"].rstrip()[:-1] + b"," + wrong.encode() + b"}")
        assert nonsense("config.json", path.parent), wrong
    path.write_bytes(bench.sound["config.json"])
    assert not nonsense("config.json", path.parent)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ({"type": "ValueError", "own": True, "said": "config.json: x=1 must be 2"}, "clean"),
        ({"type": "TypeError", "own": True, "said": "config.json"}, "unclean"),
        ({"type": "ValueError", "own": False, "said": "config.json"}, "unclean"),
        ({"type": "ValueError", "own": True, "said": "what file?"}, "unclean"),
        ({"type": "ValueError", "own": True, "said": "config.json " * 50}, "unclean"),
        ({"type": "ValueError", "own": True, "said": "config.json\n"}, "unclean"),
    ],
)
def test_refusals_are_one_readable_sentence(reply, verdict):
    assert fuzz.judge_refusal("config.json", reply)[0] == verdict


def test_a_mutation_changes_something():
    rng = random.Random(0)
    sound = b'{"a": 1, "b": [1, 2, {"c": "x"}]}'
    assert sum(mutate_json(rng, sound) != sound for _ in range(200)) > 180
