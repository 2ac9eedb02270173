"""Chat: reusing the cache changes no answer, the context limit holds, conversations are saved and loaded."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tiny import CONFIG, load_stacked, optimized, save_tiny

import tessera
from tessera.chat import Chat
from tessera.core.files import SHIPPED
from tessera.generate import Interrupted
from tessera.measure.judge.library import library_corpus
from tessera.runtime.sampling import Sampling

GREEDY = Sampling()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tessera.load(save_tiny(tmp_path_factory.mktemp("chat")))


def say(length: int, letter: str = "a") -> str:
    return (letter * 9 + " ") * (length // 10)


def test_a_second_turn_reuses_the_cache_and_answers_the_same(model):
    chat = Chat(model, GREEDY, max_new_tokens=8)
    first = chat.ask(say(150))
    assert (first.reused_tokens, first.dropped_turns) == (0, 0)
    before = list(chat.messages)
    second = chat.ask(say(40, "b"))
    assert second.reused_tokens == 128  # two whole chunks of 64: the prompts share 153 tokens
    fresh = Chat(model, GREEDY, max_new_tokens=8)
    fresh.messages = before
    expected = fresh.ask(say(40, "b"))
    assert expected.reused_tokens == 0
    assert second.generation.tokens == expected.generation.tokens
    assert second.generation.logprobs == pytest.approx(expected.generation.logprobs, rel=1e-4)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    chat.clear()
    assert chat.messages == []
    assert chat.ask(say(150)).generation.tokens == first.generation.tokens


def keys_and_values(chat: Chat, num_keys: int) -> list[np.ndarray]:
    """Return keys and values of the cache's first `num_keys` positions, layer by layer."""
    cache = chat._engine.lane.pool.cache
    return [np.asarray(array)[0, :, :num_keys] for array in (*cache.k, *cache.v)]


def test_under_kascade_later_turns_equal_cold_runs():
    """Only prefilled keys may be reused: decode and a prompt's last query tile write other keys than a cold run."""
    model = load_stacked(SHIPPED / "model", attention="kascade").with_attention("kascade", crossover_tokens=0)
    page = bytes(library_corpus().held_out[:600].astype(np.uint8)).decode("latin-1")
    chat = Chat(model, GREEDY, max_new_tokens=100)
    reused = []
    with optimized():
        for message in (page + "\nThe pass key is 48213. Remember it.\n", *["What is the pass key?"] * 2):
            before = list(chat.messages)
            warm = chat.ask(message)
            cold_chat = Chat(model, GREEDY, max_new_tokens=100)
            cold_chat.messages = before
            cold = cold_chat.ask(message)
            assert cold.reused_tokens == 0
            assert cold.generation.density < 0.8  # every layer reads only its choice and the newest keys
            assert warm.generation.tokens == cold.generation.tokens
            written = cold.generation.prompt_tokens + len(cold.generation.tokens) - 1
            for ours, theirs in zip(keys_and_values(chat, written), keys_and_values(cold_chat, written)):
                # Allow rounding between programs of different chunk sizes. Another selection changes a key by 1e-3.
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
            reused.append((warm.reused_tokens, cold.generation.prompt_tokens, written))
    assert "48213" in chat.messages[-1]["content"]
    for (_, prompt, written), (start, _, _) in pairwise(reused):
        assert 0 < start < prompt  # some keys that prefill wrote are reused
        assert start < written // 64 * 64  # none of the answer's keys are, which would be more


@pytest.fixture(scope="module")
def systems(model):
    """Return the tiny model under Kascade, with a template that accepts a system message."""
    template = model.tokenizer.chat_template.replace("role == 'user'", "role in ('user', 'system')")
    return replace(model, tokenizer=replace(model.tokenizer, chat_template=template)).with_attention("kascade")


def cold(chat: Chat, messages: list[dict[str, str]], seed: int):
    """Answer the last message in a new conversation, whose cache is empty."""
    fresh = Chat(chat.model, chat.sampling, max_new_tokens=chat.max_new_tokens, seed=seed)
    fresh.messages = messages[:-1]
    reply = fresh.ask(messages[-1]["content"])
    assert reply.reused_tokens == 0
    return reply.generation


def test_what_is_taken_back_or_answered_again_equals_a_cold_run(systems, tmp_path):
    chat = Chat(systems, Sampling(temperature=1.0), max_new_tokens=8, system="be brief", seed=7)
    chat.ask(say(130))
    chat.ask(say(20, "b"))
    replies = {}
    assert chat.undo() == say(20, "b")
    replies["undo"] = chat.ask(say(20, "c")), 7
    for attempt in (1, 2):
        replies[f"regenerate {attempt}"] = chat.regenerate(), 7 + attempt
        assert replies[f"regenerate {attempt}"][0].reused_tokens >= 128
    chat.save(tmp_path / "chat.json")
    for name, (reply, seed) in replies.items():
        assert reply.reused_tokens > 0
        assert reply.generation.density < 1
        expected = cold(chat, chat.messages[:-1], seed)
        assert reply.generation.tokens == expected.tokens, name
        assert reply.generation.logprobs == pytest.approx(expected.logprobs, rel=1e-4), name
    assert len({tuple(reply.generation.tokens) for reply, _ in replies.values()}) == 3
    chat.set_system("be long")
    changed = chat.regenerate()
    assert changed.reused_tokens == 0
    assert changed.generation.tokens == cold(chat, chat.messages[:-1], 10).tokens
    other = Chat(systems, chat.sampling, max_new_tokens=8, seed=7)
    other.load(tmp_path / "chat.json")
    assert (other.system, len(other.turns)) == ("be brief", 4)
    assert other.regenerate().generation.tokens == replies["regenerate 1"][0].generation.tokens


def test_the_oldest_turns_go_when_the_context_is_full(model):
    chat = Chat(model, GREEDY, max_new_tokens=20)
    dropped = 0
    for letter in "abcdef":
        reply = chat.ask(say(140, letter))
        dropped += reply.dropped_turns
        assert reply.generation.prompt_tokens + 20 <= CONFIG.max_positions
        assert chat.messages[-2]["content"] == say(140, letter)
    assert dropped == 6 - len(chat.messages) // 2 > 0


def test_a_message_that_does_not_fit_leaves_the_conversation_as_it_was(model):
    chat = Chat(model, GREEDY, max_new_tokens=20)
    chat.ask("hello")
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"has 604 tokens, but the model's context of 512 leaves 492"):
        chat.ask(say(600))
    with pytest.raises(ValueError, match="message is empty"):
        chat.ask("  ")
    assert chat.messages == before


def test_an_interrupted_answer_stays_and_the_next_turn_works(model):
    chat = Chat(model, Sampling(temperature=1.0), max_new_tokens=20)

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        chat.ask("hello", stop)
    assert chat.messages[-1]["role"] == "assistant"
    reply = chat.ask("hello again")
    assert reply.reused_tokens == 0
    assert reply.generation.tokens


def test_what_a_chat_cannot_do_without_is_named(model):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Chat(replace(model, tokenizer=None), GREEDY, max_new_tokens=5)
    bare = replace(model, tokenizer=replace(model.tokenizer, chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        Chat(bare, GREEDY, max_new_tokens=5)
    with pytest.raises(ValueError, match="role system must be user or assistant"):
        Chat(model, GREEDY, max_new_tokens=5, system="be brief").ask("hello")


def test_a_conversation_without_turns_has_nothing_to_take_back(model):
    chat = Chat(model, GREEDY, max_new_tokens=5)
    with pytest.raises(ValueError, match="no turn to take back"):
        chat.undo()
    with pytest.raises(ValueError, match="no answer to replace"):
        chat.regenerate()
    with pytest.raises(ValueError, match="role system must be user or assistant"):
        chat.set_system("be brief")
    assert chat.messages == []


def test_only_a_saved_chat_is_overwritten(model, tmp_path):
    chat, path = Chat(model, GREEDY, max_new_tokens=5), tmp_path / "mine.txt"
    path.write_text("my thesis")
    with pytest.raises(ValueError, match=r"mine.txt exists and is not a saved chat"):
        chat.save(path)
    assert path.read_text() == "my thesis"
    with pytest.raises(ValueError, match="is a folder"):
        chat.save(tmp_path)
    chat.save(tmp_path / "chat.json")
    chat.messages = [{"role": "user", "content": "h\u00ef\n"}, {"role": "assistant", "content": ""}]
    chat.save(tmp_path / "chat.json")
    again = Chat(model, GREEDY, max_new_tokens=5)
    again.load(tmp_path / "chat.json")
    assert again.messages == chat.messages
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chat.json", "mine.txt"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON .*: name a file that /save wrote"),
        ('{"tessera_chat": 1, "messages": [', "is not valid JSON"),
        ("{}", "is not a saved chat"),
        ('{"tessera_chat": 2, "model": "x", "messages": []}', "tessera_chat=2 must be 1"),
        ('{"tessera_chat": 1, "model": "x"}', "messages=None must be a list"),
        ('{"tessera_chat": 1, "model": "x", "messages": [{"role": "user", "content": 5}]}', "messages=.* must be"),
        ('{"tessera_chat": 1, "model": "x", "messages": [{"role": "user", "content": "a"}]}', "must alternate"),
        ('{"tessera_chat": 1, "model": "x", "messages": [{"role": "system", "content": "a"}]}', "cannot render"),
    ],
)  # fmt: skip
def test_a_damaged_file_leaves_the_conversation_as_it_was(model, tmp_path, text, said):
    chat = Chat(model, GREEDY, max_new_tokens=5)
    chat.messages = before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chat.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        chat.load(tmp_path / "chat.json")
    assert chat.messages == before
