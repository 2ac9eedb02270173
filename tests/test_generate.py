"""Generation: a batch equals its prompts run alone, nothing recompiles, the cache is updated in place.

The reported figures (density, times) are right.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import CONFIG as TINY
from tiny import save_tiny

import tessera
from tessera.generate import Interrupted
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.runtime.answers import Answer, Generation
from tessera.runtime.compilation import capacity_bucket, capacity_buckets, chunk_sizes, forget_programs
from tessera.runtime.requests import Request
from tessera.runtime.row_pool import RowPool
from tessera.runtime.step import decode_token, needed, prefill_chunk

GOLDEN = Path(__file__).parent / "golden"
CONFIG = replace(TINY, num_layers=2)  # an anchor and a reuse layer; few layers compile fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def model(folder):
    return tessera.load(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((length, seed)).integers(0, 256, length).tolist()


# Under kascade the two short prompts run dense; the engine tests run two rows of kascade.
@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.exhaustive), "kascade"])
def test_a_batch_equals_its_prompts_alone(model, attention):
    model = model.with_attention(attention)
    prompts = [prompt(150), prompt(5), prompt(20)]
    how = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 50, "seed": [1, 2, 1]}
    together = model.generate(prompts, **how)
    for index, alone in enumerate(prompts):
        [expected] = model.generate([alone], **{**how, "seed": how["seed"][index]})
        assert together[index].tokens == expected.tokens
        assert together[index].density == pytest.approx(expected.density, abs=1e-6)
        np.testing.assert_allclose(together[index].logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    sparse = [result.density < 1 for result in together]
    assert sparse == [attention == "kascade", False, False]  # the short prompts run dense


@pytest.mark.parametrize(
    "family", ["mistral_window", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama31", "qwen3"))]
)
def test_greedy_tokens_are_those_of_transformers(family):
    """After a prefill, 64 decode steps choose the tokens that transformers chose."""
    [folder] = [path for path in GOLDEN.glob("*") if path.name == family]
    with np.load(folder / "expected.npz") as file:
        expected = file["tokens"].tolist()
    [found] = tessera.load(folder).generate([expected[:-64]], max_new_tokens=64)
    assert found.tokens == expected[-64:]


def test_decode_after_prefill_equals_one_longer_prefill(model):
    """An answer's logprobs equal those of one pass over prompt and answer."""
    tokens = prompt(131)
    [found] = model.generate([tokens], max_new_tokens=9)
    whole = tokens + found.tokens
    scores = np.asarray(jax.nn.log_softmax(model.logits([whole])[0]))
    rows = np.arange(len(tokens) - 1, len(whole) - 1)
    assert scores[rows].argmax(-1).tolist() == found.tokens
    np.testing.assert_allclose(scores[rows, found.tokens], found.logprobs, rtol=1e-4, atol=1e-5)


def test_logits_are_float32_and_padding_does_not_show(model):
    out = model.logits([prompt(7), prompt(7, seed=1)])
    assert out.shape == (2, 7, 264)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[:1, :4], model.logits([prompt(7)[:4]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["dense", "kascade"])
def test_nothing_compiles_after_warm_up(model, attention, nothing_compiles):
    """Prompts of many lengths, below and above the cross-over, compile nothing, whatever the sampling values."""
    model = model.with_attention(attention)
    model.warmup(max_tokens=256, temperature=1.0, top_k=3)
    with nothing_compiles():
        for length in (1, 63, 64, 65, 99, 127, 128, 129, 191, 250):
            model.generate([prompt(length)], max_new_tokens=3, temperature=0.5 + length, top_p=0.9, seed=length)


# test_models_programs.py checks dense attention.
@pytest.mark.parametrize("attention", [pytest.param("dense", marks=pytest.mark.exhaustive), "kascade"])
def test_the_cache_is_updated_in_place(model, attention):
    """The compiled programs alias every key and value array: input and output share a buffer."""
    policy = model.with_attention(attention).policy
    pool = RowPool(model.params, CONFIG, policy, rows=2, num_keys=128)
    zeros = np.zeros(2, np.int32)
    static = {"config": CONFIG, "policy": policy}
    decode = decode_token.lower(model.params, pool.cache, zeros, zeros, zeros.astype(bool), **static)
    chunk = np.zeros((2, 64), np.int32)
    prefill = prefill_chunk.lower(model.params, pool.cache, chunk, zeros, zeros, **static)
    leaves = len(jax.tree.leaves(pool.cache))
    assert leaves == 2 * CONFIG.num_layers
    for program in (decode, prefill):
        compiled = program.compile()
        [aliases] = re.findall(r"input_output_alias=\{(.*?)\}, entry", compiled.as_text().splitlines()[0])
        assert aliases.count("-alias)") == leaves
        assert (
            compiled.memory_analysis().alias_size_in_bytes
            >= needed(CONFIG, dtype="float32", batch=2, num_keys=128, num_tokens=1).cache
        )


def test_the_old_cache_is_gone_after_a_step(model):
    pool = RowPool(model.params, CONFIG, model.policy, rows=1, num_keys=128)
    before = jax.tree.leaves(pool.cache)
    pool.fill(prompt(5))
    assert all(array.is_deleted() for array in before)


def test_below_the_cross_over_kascade_is_dense_and_says_so(model, caplog):
    kascade = model.with_attention("kascade")
    caplog.clear()  # taking a plan logs its promise
    with caplog.at_level("INFO", logger="tessera"):
        [short] = kascade.generate([prompt(20)], max_new_tokens=4)
    said = "requests of up to 23 tokens are below the cross-over: attention is dense, not kascade"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert short.density == 1.0
    assert short.tokens == model.generate([prompt(20)], max_new_tokens=4)[0].tokens


def test_density_is_what_a_count_gives(model):
    """Layer 0 reads all keys, layer 1 its own tile and a far budget; a loop over query tiles counts both."""
    length, tile, layers = 160, 16, 2
    [found] = model.with_attention("kascade", crossover_tokens=0).generate([prompt(length)], max_new_tokens=1)
    read = visible = 0
    for first in range(0, length, tile):
        keys = max(0.2 * (first + tile), 16)
        far = min(-(-int(np.ceil(keys - 1e-6)) // tile), first // tile)
        visible += sum(range(first + 1, first + tile + 1))
        read += far * tile * tile + sum(range(1, tile + 1))
    expected = (visible + (layers - 1) * read) / (layers * visible)
    assert found.density == pytest.approx(expected, rel=1e-6)
    assert found.layer_density == pytest.approx((1.0, read / visible), rel=1e-6)


def test_eos_ends_an_answer_and_its_text(model):
    [free] = model.generate([prompt(40)], max_new_tokens=8)
    assert free.finish_reason == "length"
    stopping = replace(model, config=replace(CONFIG, eos_ids=(free.tokens[3],)))
    [found] = stopping.generate([prompt(40)], max_new_tokens=8)
    cut = free.tokens.index(free.tokens[3]) + 1
    assert found.finish_reason == "stop"
    assert found.tokens == free.tokens[:cut]
    assert found.text == byte_tokenizer().decode(free.tokens[: cut - 1])


@pytest.mark.parametrize("lag", [1, 3])
def test_running_ahead_of_the_host_changes_nothing(model, lag):
    """As on an accelerator, steps are in flight when an answer ends by eos or length; they must leave no trace."""
    prompts, limits = [prompt(40), prompt(30), prompt(20)], [8, 3, 8]
    free = [model.generate([tokens], max_new_tokens=8)[0].tokens for tokens in prompts]
    eos = (free[2][2],)  # ends the third answer early, and perhaps others

    def run(lag: int) -> list[Generation]:
        engine = replace(model, config=replace(CONFIG, eos_ids=eos)).engine(lag=lag)
        for tokens, limit in zip(prompts, limits):
            engine.submit(Request(prompt=tokens, max_new_tokens=limit))
        ends = sorted(engine.drain())
        return [replace(end.generation, ttft_s=0.0, decode_tokens_per_s=0.0) for end in ends]

    assert run(lag) == run(0)
    assert run(0)[2].finish_reason == "stop"


def test_bfloat16_stays_near_float32(folder, model):
    """A bfloat16 model's logprobs lie within 0.15 of the float32 model's; bfloat16 steps are 2**-8 near 1."""
    half = tessera.load(folder, dtype="bfloat16")
    assert half.params.embed.dtype == "bfloat16"
    [found] = half.generate([prompt(40)], max_new_tokens=4)
    whole = prompt(40) + found.tokens
    scores = np.asarray(jax.nn.log_softmax(model.logits([whole])[0]))
    expected = scores[np.arange(39, 43), found.tokens]
    np.testing.assert_allclose(found.logprobs, expected, atol=0.15)


def test_max_new_tokens_ends_at_the_context(model):
    """A prompt of 510 tokens leaves 2 of 512 positions, so 3 tokens fit: the last one needs no position."""
    [found] = model.generate([prompt(510)], max_new_tokens=50)
    assert (len(found.tokens), found.finish_reason, found.prompt_tokens) == (3, "length", 510)


def test_the_stream_is_the_text(model):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    found = model.generate(
        ["first prompt", "another"],
        max_new_tokens=24,
        temperature=1.0,
        seed=[3, 4],
        stream=lambda index, piece: pieces[index].append(piece),
    )
    assert ["".join(pieces[i]) for i in (0, 1)] == [result.text for result in found]
    assert len(pieces[0]) > 4


def test_ctrl_c_hands_over_what_there_is(model):
    count = 0

    def stream(index: int, piece: str) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        model.generate(["some words"], max_new_tokens=50, temperature=1.0, stream=stream)
    [partial] = caught.value.generations
    assert partial.finish_reason == "interrupted"
    assert 5 <= len(partial.tokens) < 50
    assert isinstance(caught.value, KeyboardInterrupt)


def test_figures_of_time_are_there(model):
    [found] = model.generate([prompt(20)], max_new_tokens=4)
    assert found.ttft_s > 0
    assert found.decode_tokens_per_s > 0


def test_a_saved_model_loads_the_same(model, tmp_path):
    tessera.save(model.with_attention("kascade"), tmp_path / "copy")
    again = tessera.load(tmp_path / "copy", attention="kascade")
    assert again.plan == model.with_attention("kascade").plan
    np.testing.assert_array_equal(again.logits([prompt(6)]), model.with_attention("kascade").logits([prompt(6)]))


def test_programs_are_kept_across_processes(folder, tmp_path):
    """The second process loads prefill and decode from the user's cache folder, and gives the same answer."""
    program = (
        "import sys, jax, tessera\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith('cache_hits')))\n"
        f"[answer] = tessera.load({str(folder)!r}).generate([[1, 2, 3]], max_new_tokens=4)\n"
        "print(sum(hits), *answer.tokens)\n"
    )

    def run() -> list[int]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return [int(word) for word in done.stdout.split()]

    cold, warm = run(), run()
    assert cold[0] == 0
    assert warm[0] >= 2
    assert cold[1:] == warm[1:]
    assert any((tmp_path / "tessera" / "compiled").iterdir())


# ----- answers: text, stop strings, streaming; these need no model


def spell(text: bytes | str, *, stop=(), limit: int = 100) -> tuple[Answer, list[str]]:
    """Feed an answer one byte per token, as the byte tokenizer would; return it and the pieces streamed."""
    answer = Answer(1, limit, (257,), stop, byte_tokenizer())
    pieces = []
    for byte in text.encode() if isinstance(text, str) else text:
        if not answer.done:
            pieces.append(answer.push(byte, -1.0, 0.0))
    return answer, pieces


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab tail", ("aab",), "a"),  # the stop's beginning repeats
        ("ababac", ("abac",), "ab"),
        ("no stop here", ("xyz",), "no stop here"),
        ("eins \N{EURO SIGN} zwei", ("\N{EURO SIGN} z",), "eins "),  # a stop string with a multi-byte character
        ("\nUser: hi", ("\nUser:",), ""),
        ("ends with sto", ("stop",), "ends with sto"),
    ],
)
def test_stop_strings_are_found_across_tokens_and_trimmed(text, stop, expected):
    answer, pieces = spell(text, stop=stop, limit=len(text.encode()))
    assert answer.generation(0.0).text == expected
    assert "".join(pieces) == expected  # no part of a stop string was streamed
    assert answer.finish_reason == ("stop" if expected != text else "length")


def test_streamed_pieces_are_whole_characters():
    text = "a\N{EURO SIGN}\N{GRINNING FACE}\N{LATIN SMALL LETTER E WITH ACUTE}z"
    answer, pieces = spell(text, limit=len(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)
    assert answer.generation(0.0).text == text


def test_an_unfinished_character_comes_out_at_the_end():
    answer, pieces = spell(b"ab\xe2\x82", limit=4)
    assert answer.generation(0.0).text == "ab\N{REPLACEMENT CHARACTER}"
    assert "".join(pieces) == "ab\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stop", "least", "expected"),
    [
        ("abcabcabc", ("c",), 3, "abcab"),
        ("abcabcabc", ("c",), 2, "ab"),
        ("aaaa", ("aa",), 2, "a"),  # the stop begins in the tokens that must come, and ends after them
        ("abab", ("ab",), 4, "abab"),
    ],
)
def test_stop_strings_end_no_answer_before_its_minimum_length(text, stop, least, expected):
    answer = Answer(1, len(text), (257,), stop, byte_tokenizer(), min_tokens=least)
    pieces = [answer.push(byte, -1.0, 0.0) for byte in text.encode() if not answer.done]
    assert "".join(pieces) == answer.generation(0.0).text == expected
    assert answer.finish_reason == ("stop" if expected != text else "length")


@pytest.mark.parametrize(
    ("shown", "text"),
    [((), "a b"), ((259,), "a<|user|> b"), ((259, 257), "a<|user|> b<|eos|>")],
)
def test_names_of_wanted_special_tokens_stay_in_the_text(shown, text):
    """The mark of a tool call may be a special token, even one that ends the answer."""
    answer = Answer(1, 100, (257,), (), byte_tokenizer(), shown=frozenset(shown))
    pieces = [answer.push(token, -1.0, 0.0) for token in (*b"a", 259, 260, *b" b", 257)]
    assert "".join(pieces) == answer.generation(0.0).text == text
    assert answer.finish_reason == "stop"


# ----- shapes: buckets and chunks


@pytest.mark.parametrize("query_tile", [1, 16, 32, 48, 128, 512])
def test_chunks_hold_whole_query_tiles(query_tile):
    sizes = chunk_sizes(query_tile, 1024)
    assert all(size % query_tile == 0 for size in sizes)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_buckets_are_geometric_and_hold_what_they_must():
    buckets = list(capacity_buckets(40000))
    assert buckets[:7] == [128, 256, 512, 1024, 1536, 2048, 3072]
    assert all(b <= 2 * a for a, b in zip(buckets, buckets[1:]))
    for num_keys in (1, 128, 129, 1025, 4096, 4097, 33000):
        size = capacity_bucket(num_keys)
        assert size >= num_keys
        assert size % 128 == 0
        assert size == next(b for b in buckets if b >= num_keys)


def test_memory_is_linear_in_length():
    """Twice the keys take twice the cache."""
    short, long = (needed(CONFIG, dtype="float32", batch=1, num_keys=n, num_tokens=1).cache for n in (4096, 8192))
    assert long == 2 * short == 8192 * 2 * 2 * 2 * 16 * 4


def test_programs_are_forgotten_before_a_process_holds_too_many():
    """Linux limits a process to 65,530 memory maps, and XLA crashes when they run out."""

    def maps():
        return len(Path("/proc/self/maps").read_text().splitlines())

    doubled = jax.jit(lambda x: 2 * x + x.sum())
    for size in range(1, 6):
        doubled(np.ones(size))
    before = maps()
    assert not forget_programs(above=before + 1000)
    assert forget_programs(above=0)
    assert maps() < before
    assert doubled(np.ones(2)).tolist() == [4, 4]
