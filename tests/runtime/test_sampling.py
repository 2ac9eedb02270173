"""Sampling against transformers' own logits processors (golden files), and what a seed determines."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tessera.runtime.sampling import Sampling, check_seeds, choose, distribution, fold_seed, later_seed, token_counts

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling.npz"
NUM_CASES = 8


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def settings(golden, case: int) -> Sampling:
    return Sampling(**json.loads(str(golden["settings"]))["cases"][case])


def counts_of(prompts) -> np.ndarray:
    return token_counts(prompts, [()] * len(prompts), 40)


def test_all_cases_are_tested(golden):
    assert len(json.loads(str(golden["settings"]))["cases"]) == NUM_CASES


@pytest.mark.parametrize("case", range(NUM_CASES))
def test_distribution_is_that_of_transformers(golden, case):
    sampling, logits = settings(golden, case), golden["logits"]
    counts = counts_of(golden["prompts"])
    z = np.asarray(distribution(logits, counts, sampling.values(logits.shape[1]), method=sampling.method))
    probability = np.exp(z - z.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    expected = golden[f"case{case}"]
    np.testing.assert_array_equal(probability > 0, expected > 0)
    np.testing.assert_allclose(probability, expected, rtol=1e-5, atol=1e-7)


def test_draws_follow_the_distribution(golden):
    """Draw one row 4,000 times: frequencies lie within 5 standard errors, and only kept tokens occur."""
    case, count = 6, 4000
    sampling = settings(golden, case)
    logits = np.repeat(golden["logits"][:1], count, axis=0)
    counts = np.repeat(counts_of(golden["prompts"][:1]), count, axis=0)
    values = sampling.values(logits.shape[1])
    out = choose(logits, counts, np.arange(count, dtype=np.uint32), np.int32(3), values, method=sampling.method)
    frequency = np.bincount(np.asarray(out.token), minlength=logits.shape[1]) / count
    p = golden[f"case{case}"][0].astype(np.float64)
    assert not frequency[p == 0].any()
    assert np.all(np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / count))


def test_a_draw_depends_on_seed_and_step_only(golden):
    logits = golden["logits"]
    sampling = Sampling(temperature=1.0, top_p=0.95)
    values, method = sampling.values(logits.shape[1]), sampling.method

    def draw(rows, seeds, step):
        return np.asarray(
            choose(logits[list(rows)], None, np.array(seeds, np.uint32), np.int32(step), values, method=method)[0]
        )

    together = draw([0, 1, 2, 3, 4, 5], [7] * 6, 4)
    for row in range(6):
        assert draw([row], [7], 4)[0] == together[row]
    assert draw([5, 0, 1, 1, 2, 4], [7] * 6, 4).tolist() == together[[5, 0, 1, 1, 2, 4]].tolist()
    steps = {tuple(draw(range(6), [7] * 6, step)) for step in range(8)}
    seeds = {tuple(draw(range(6), [seed] * 6, 4)) for seed in range(8)}
    assert len(steps) > 1
    assert len(seeds) > 1


def test_logprob_is_of_the_raw_distribution(golden):
    logits = golden["logits"]
    sampling = Sampling(temperature=0.5, top_k=3, repetition_penalty=1.5)
    counts = counts_of(golden["prompts"])
    seeds = np.arange(6, dtype=np.uint32)
    out = choose(logits, counts, seeds, np.int32(0), sampling.values(logits.shape[1]), method=sampling.method)
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(out.logprob, expected[np.arange(6), out.token], rtol=1e-5)
    assert np.all(np.asarray(out.counts)[np.arange(6), out.token] >= 2)


def test_greedy_takes_the_penalised_best(golden):
    logits, prompts = golden["logits"], golden["logits"].argmax(-1)[:, None]
    sampling = Sampling(repetition_penalty=100.0)
    counts, seeds = counts_of(prompts), np.zeros(6, np.uint32)
    out = choose(logits, counts, seeds, np.int32(0), sampling.values(logits.shape[1]), method=sampling.method)
    assert np.all(np.asarray(out.token) != prompts[:, 0])


PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -2.0, "presence_penalty": 2.0},
    {"frequency_penalty": 0.5, "presence_penalty": -0.3, "repetition_penalty": 1.3, "temperature": 0.7},
]


def penalised(logits, prompt, answer, *, frequency=0.0, presence=0.0, repetition=1.0, temperature=1.0):
    """Apply the penalties to one row of scores as OpenAI, vLLM and transformers define them, in float64."""
    scores = []
    for token, score in enumerate(logits.astype(np.float64)):
        count = answer.count(token)
        if token in prompt or count:
            score = score * repetition if score < 0 else score / repetition
        scores.append((score - frequency * count - presence * (count > 0)) / temperature)
    return np.array(scores)


@pytest.mark.parametrize("given", PENALTIES)
def test_penalties_are_those_of_the_oracle(golden, given):
    """A greedy answer of 12 tokens to fixed scores: every step counts the tokens that the steps before it chose."""
    logits, prompts = golden["logits"], golden["prompts"].tolist()
    sampling, answers = Sampling(**given), [[] for _ in prompts]
    assert sampling.method.penalised
    names, values = {name.removesuffix("_penalty"): value for name, value in given.items()}, sampling.values(40)
    counts, seeds = counts_of(prompts), np.zeros(6, np.uint32)
    for _ in range(12):
        found = np.asarray(distribution(logits, counts, values, method=sampling.method))
        rows = [penalised(*row, **names) for row in zip(logits, prompts, answers)]
        np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-5)
        choice = choose(logits, counts, seeds, np.int32(0), values._replace(temperature=0.0), method=sampling.method)
        counts = np.asarray(choice.counts)
        for answer, row, token in zip(answers, found, np.asarray(choice.token), strict=True):
            assert token == row.argmax()
            answer.append(int(token))
        np.testing.assert_array_equal(counts, token_counts(prompts, answers, 40))


def test_a_repetition_penalty_alone_is_the_same_bits_for_prompt_and_answer(golden):
    logits, prompts = golden["logits"], golden["prompts"].tolist()
    sampling = Sampling(repetition_penalty=1.7, temperature=0.9)
    halves = token_counts([row[:4] for row in prompts], [row[4:] for row in prompts], 40)
    found = [
        np.asarray(distribution(logits, counts, sampling.values(40), method=sampling.method))
        for counts in (halves, counts_of(prompts))
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": -0.5}, "min_p=-0.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"frequency_penalty": 2.1}, "frequency_penalty=2.1 must be between -2 and 2"),
        ({"presence_penalty": -2.1}, "presence_penalty=-2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
    ],
)
def test_bad_values_are_named(bad, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**bad)


def test_seeds_are_one_or_one_per_prompt():
    assert check_seeds(3, 2) == [3, 3]
    assert check_seeds([1, np.int32(2)], 2) == [1, 2]
    with pytest.raises(ValueError, match="3 values for 2 prompts"):
        check_seeds([1, 2, 3], 2)
    for seed in (-(2**63) - 1, 2**64, 1.5):
        with pytest.raises(ValueError, match=f"seed={seed} must be a whole number from"):
            check_seeds([seed], 1)


def test_seeds_of_64_bits_fold_to_32():
    low = (0, 1, 2**31, 2**32 - 1)
    assert [fold_seed(seed) for seed in low] == list(low)
    assert fold_seed(-1) == fold_seed(2**64 - 1)
    wide = [high << 32 | 7 for high in range(2000)]  # they differ in the high half alone
    assert len({fold_seed(seed) for seed in (*wide, -1, -(2**63), 2**63 - 1)}) == 2003
    assert fold_seed(1 << 32) == 0x514E28B7  # MurmurHash3's value for the key 1 after its mixing


def test_the_seeds_of_choices_follow_each_other():
    assert [later_seed(5, n) for n in range(3)] == [5, 6, 7]
    assert later_seed(2**63 - 1, 1) == -(2**63)
    assert fold_seed(later_seed(2**64 - 1, 1)) == 0
    assert later_seed(2**32 - 1, 1) == 2**32


def test_values_that_are_arrays_become_numbers():
    """A batch's arrays are cached by the requests' values, so these must be hashable."""
    given = Sampling(temperature=jnp.float32(0.5), top_k=np.array(3), repetition_penalty=np.float64(1.5))
    assert {given: 1} == {Sampling(temperature=0.5, top_k=3, repetition_penalty=1.5): 1}
