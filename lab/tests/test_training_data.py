"""Training text: determinism, weights, answers that can be found, held-out files, pass-key tasks."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from lab import passkeys
from lab.training import data
from lab.training.data import LIBRARY
from tessera.measure.judge import library
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.train import recipes
from tessera.train.data import VALUE_WEIGHT, Split, read_split

SPECIALS = {recipes.BOS: "<|bos|>", recipes.EOS: "<|eos|>", recipes.PAD: "<|pad|>", recipes.USER: "<|user|>"} | {
    recipes.ASSISTANT: "<|assistant|>",
    recipes.END: "<|end|>",
}


@pytest.fixture(scope="module")
def source() -> Split:
    return library.library_corpus()


def written(ids: np.ndarray) -> str:
    return "".join(SPECIALS.get(int(i)) or chr(i) for i in ids)


def test_special_ids_are_the_byte_tokenizers():
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == recipes.VOCAB_SIZE
    for token, name in SPECIALS.items():
        assert tokenizer.encode(name, add_special=False) == [token]


def test_library_is_split_by_file_and_the_demo_documents_are_held_out(source):
    names = [name for name, _ in library.library_files()]
    held = {name for name in names if library.is_held_out(name)}
    assert {"http/__init__.py", "stat.py", "token.py"} <= held
    assert 0.02 < len(held) / len(names) < 0.12
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    body = next(path.read_bytes() for name, path in library.library_files() if name == "http/__init__.py")
    status = re.search(rb".*404.*", body)[0]
    assert status in source.held_out.tobytes()
    assert body[:2000] not in source.train.tobytes()


def test_what_a_plan_is_calibrated_on_is_nowhere_else(source):
    calibration = library.library_calibration()
    assert 0.05 < len(calibration) / (len(calibration) + len(source.held_out)) < 0.2
    for name in library.HELD_OUT:  # the demo asks about these files
        assert (Path(os.__file__).parent / name).read_bytes() in source.held_out.tobytes()
    kept, rows = source.held_out.tobytes(), passkeys.calibration_texts(1024)
    for row in rows:
        text = bytes(token for token in row if token < 256)
        assert text[300:340] not in kept
        assert text[300:340] not in source.train.tobytes()
    assert sum(bytes(row[300:500]) in calibration.tobytes() for row in rows[::2]) == len(rows[::2])


@pytest.mark.parametrize("kind", LIBRARY.kinds)
@pytest.mark.parametrize("length", [24, 100, 700])
def test_batches_are_a_pure_function_of_seed_and_step(source, kind, length):
    first = LIBRARY.batch(source, {kind: 1.0}, length, 3, 5, 11)
    LIBRARY.batch(source, {"notes": 1.0}, 64, 2, 5, 12)
    again = LIBRARY.batch(source, {kind: 1.0}, length, 3, 5, 11)
    other = LIBRARY.batch(source, {kind: 1.0}, length, 3, 5, 12)
    assert first.tokens.shape == (3, length + 1)
    assert first.weights.shape == (3, length)
    assert first.weights.dtype == np.float32
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.weights, again.weights)
    assert not np.array_equal(first.tokens, other.tokens)
    assert first.tokens.min() >= 0
    assert first.tokens.max() < recipes.VOCAB_SIZE
    assert np.all(first.weights[first.tokens[:, 1:] == recipes.PAD] == 0)


def test_copies_are_predictable_where_they_weigh(source):
    rng = np.random.default_rng(3)
    for _ in range(20):
        ids, weights = data.copy(rng, source, 48)
        first = int(np.flatnonzero(weights)[0])
        period = first - 1
        np.testing.assert_array_equal(ids[period:], ids[:-period])


def test_recalled_spans_stood_earlier(source):
    rng = np.random.default_rng(4)
    ids, weights = data.recall(rng, source, 600)
    assert 0.2 < np.mean(weights) < 0.8
    whole = bytes(ids.astype(np.uint8))
    for place in np.flatnonzero(weights):
        assert whole.find(whole[place - 3 : place + 1]) < place - 3


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_every_weighted_value_can_be_found_earlier(source, length):
    """Tokens with VALUE_WEIGHT are an answer's value, which must occur in the text before the question."""
    rng = np.random.default_rng((7, length))
    answers = 0
    for _ in range(20):
        ids, weights = data.notes(rng, source, length)
        assert len(ids) == len(weights) == length
        value = np.concatenate([[False], weights == VALUE_WEIGHT, [False]])
        begins, ends = np.flatnonzero(~value[:-1] & value[1:]), np.flatnonzero(value[:-1] & ~value[1:])
        for begin, end in zip(begins, ends):
            answer, before = written(ids[begin:end]), written(ids[:begin])
            document = before[: before.rfind("What is")]
            assert answer.split(" = ")[-1] in document, answer
            answers += 1
    assert answers > 20


def test_notes_are_asked_in_both_formats(source):
    rng = np.random.default_rng(8)
    texts = [written(data.notes(rng, source, 400)[0]) for _ in range(30)]
    chats = [text for text in texts if text.startswith("<|bos|><|user|>")]
    assert 5 < len(chats) < 25
    asked = [re.search(r"What is .*\?<\|end\|><\|assistant\|>", text) for text in chats]
    asked += [re.search(r"What is .*\? \S", text) for text in texts if text not in chats]
    assert sum(match is not None for match in asked) >= 27  # a short document may leave out its only table


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [200, 2048, 4096])
def test_passkey_task(source, length, chat):
    for depth in (0.0, 0.5, 1.0):
        task = data.passkey_task(np.random.default_rng(1), length, depth=depth, chat=chat)
        assert len(task.prompt) + len(task.answer) == length
        key, prompt = written(task.answer), written(task.prompt)
        assert re.fullmatch(r"\d{5}", key)
        assert prompt.count(f"The pass key is {key}. Remember it.\n") == 1
        assert prompt.endswith("The pass key is ")
        assert ("<|assistant|>" in prompt) == chat
        assert abs(task.depth - depth) < 0.5
        where = prompt.index(f"The pass key is {key}")
        assert prompt[where - 1] in "\n>"


def test_passkey_task_that_cannot_fit():
    with pytest.raises(ValueError, match="length=40 must be at least"):
        data.passkey_task(np.random.default_rng(0), 40)


def test_passkey_depths_are_uniform():
    rng = np.random.default_rng(2)
    depths = [data.passkey_task(rng, 1000).depth for _ in range(200)]
    assert abs(np.mean(depths) - 0.5) < 0.08
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_own_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_split(tmp_path / "nothing", byte_tokenizer())
    with pytest.raises(ValueError, match="no text"):
        read_split(tmp_path, byte_tokenizer())
    (tmp_path / "a.txt").write_text("héllo <|end|> " * 100)
    split = read_split(tmp_path, byte_tokenizer())
    assert len(split.train) + len(split.held_out) == 100 * len("héllo <|end|> ".encode())
    assert len(split.held_out) == (len(split.train) + len(split.held_out)) // 20
    assert split.train.max() < 256  # "<|end|>" in a document stays text
    with pytest.raises(ValueError, match="no tokenizer"):
        read_split(tmp_path, None)
