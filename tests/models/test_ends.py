"""What ends an answer: every id that a model's files name, and the ends of turns and texts by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
from gguf_files import bpe_metadata, tiny_model, write_gguf
from tiny import CONFIG, save_tiny
from tokenizers import AddedToken

import tessera
from tessera.cli import main as cli
from tessera.models.files.ends import describe
from tessera.models.files.source import open_source

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def gguf_ends(tmp_path, tokens: dict[str, int], **ids) -> dict[str, tuple[str, ...]]:
    """Write a GGUF file with these tokens and types, and return what ends its answers: names with their places."""
    metadata, tensors = tiny_model(len(tokens))
    vocab = {"tokens": list(tokens), "types": list(tokens.values()), "merges": []}
    named = {f"tokenizer.ggml.{key}": value for key, value in ids.items()}
    path = write_gguf(tmp_path / "x.gguf", metadata | bpe_metadata(vocab, "gpt-2") | named, tensors)
    ends = open_source(path).ends
    assert open_source(path).config.eos_ids == tuple(end.id for end in ends)
    return {end.name: end.places for end in ends}


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ({"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3}, "<|im_end|> <|endoftext|>"),
        ({"<|end_of_text|>": 3, "<|eot_id|>": 3, "<|eom_id|>": 3}, "<|end_of_text|> <|eot_id|> <|eom_id|>"),
        ({"<s>": 3, "</s>": 3, "<end_of_turn>": 3, "<unk>": 2}, "</s> <end_of_turn>"),
        ({"</s>": NORMAL, "<EOT>": NORMAL, "<|endoftext|>": 3}, "<|endoftext|>"),  # text in Qwen's vocabulary
        ({"<|im_end|>": NORMAL, "</s>": USER_DEFINED}, "<|im_end|> </s>"),
        ({"<｜end▁of▁sentence｜>": 3, "<｜User｜>": 3}, "<｜end▁of▁sentence｜>"),
        ({"<|fim_pad|>": 3, "<|fim_middle|>": 3, "<|file_sep|>": 3}, "<|fim_pad|> <|file_sep|>"),
        ({"<|repo_name|>": 3, "<reponame>": 3}, "<|repo_name|>"),
        ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, "<|return|> <|call|>"),
        ({"<|end|>": 3, "<|flush|>": 3, "<|calls|>": 3}, "<|flush|> <|calls|>"),
        ({"<|end|>": 3, "<|user|>": 3}, "<|end|>"),
        ({"</s>": 3, "<turn|>": 3, "<|tool_response>": 3}, "<turn|> <|tool_response>"),
    ],
)  # fmt: skip
def test_ends_of_a_gguf_file_by_name(tmp_path, tokens, found):
    assert set(gguf_ends(tmp_path, {"a": NORMAL, **tokens})) == set(found.split())


def test_ends_of_a_gguf_file_by_key(tmp_path):
    tokens = {name: NORMAL for name in "abcdefgh"} | {"<|im_end|>": CONTROL, "<|fim_pad|>": CONTROL}
    named = {"eos_token_id": 8, "eot_token_id": 0, "eom_token_id": 1, "fim_sep_token_id": 2, "fim_pad_token_id": 3}
    found = gguf_ends(tmp_path, tokens, **named, eos_token_ids=np.array([4, 8], np.int32).tolist())
    assert found == {
        "<|im_end|>": ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eos_token_ids", "its name"),
        "a": ("tokenizer.ggml.eot_token_id",),
        "b": ("tokenizer.ggml.eom_token_id",),
        "c": ("its name",),
        "d": ("its name",),
        "e": ("tokenizer.ggml.eos_token_ids",),
    }
    assert gguf_ends(tmp_path, tokens, eos_token_id=2**32 - 1, eom_token_id=10, eos_token_ids=[-1, 8, 10]) == {
        "<|im_end|>": ("tokenizer.ggml.eos_token_ids", "its name"),
        "<|fim_pad|>": ("its name",),
    }
    with pytest.raises(ValueError, match="eom_token_id='x', which is not the id of a token: it must be an integer"):
        gguf_ends(tmp_path, tokens, eom_token_id="x")


TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>")
"""Added to the byte tokenizer's 264 tokens as 264 to 266; its eos is 257, and its template ends a turn with 261."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("ends"), replace(CONFIG, vocab_size=267), plan=False)
    tokenizer = open_source(folder).tokenizer
    tokenizer.backend.add_tokens([AddedToken(token, special=token != "<|im_end|>") for token in TOKENS])
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "eos", "template", "ids"),
    [
        (257, 257, "<|eos|>", "", (257,)),
        ([258, 257], 259, "<|eos|>", "", (258, 257, 259)),  # a union, in this order
        (257, None, "<|im_end|>", "", (257, 265)),  # fine-tuning changed the tokenizer alone
        (None, 257, None, "", (257,)),
        (None, None, "<|im_end|>", "", (265,)),
        (257, 257, "<|eos|>", "{{ '<|im_end|>' }}", (257, 265)),  # the template of a chat, which no id names
        (None, 99, "<|eos|>", "", (257,)),  # 99 is text: a default of the config's class
        (None, 99, None, "", (99,)),
        (None, None, None, "", (261, 265, 266)),  # by name
        (None, None, "missing", "{{ '<|eot_id|>' }}", (266,)),
    ],
)
def test_ends_of_a_folder(base, tmp_path, generation, config, eos, template, ids):
    folder = tmp_path / "model"
    tokenizer = open_source(base).tokenizer
    specials = {} if eos is None else {"eos_token": eos}
    tessera.save(
        replace(tessera.load(base), tokenizer=replace(tokenizer, specials=specials, chat_template=template)), folder
    )
    for file, value in (("generation_config.json", generation), ("config.json", config)):
        raw = json.loads((folder / file).read_text()) | {"eos_token_id": value}
        (folder / file).write_text(json.dumps(raw))
    model = tessera.load(folder)
    assert model.config.eos_ids == ids
    tessera.save(model, tmp_path / "again")
    assert tessera.load(tmp_path / "again").config.eos_ids == ids


def test_a_barred_name_ends_an_answer_as_a_piece_of_the_vocabulary_too(base, tmp_path):
    tokenizer = open_source(base).tokenizer
    raw = json.loads(tokenizer.backend.to_str())
    raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] != "<|im_end|>"]
    folder = tmp_path / "model"
    tessera.save(replace(tessera.load(base), tokenizer=replace(tokenizer, chat_template="<|im_end|>")), folder)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert 265 in tessera.load(folder).config.eos_ids


def test_without_any_end_a_warning_says_so(base, tmp_path, caplog):
    model = tessera.load(base)
    tessera.save(replace(model, tokenizer=None, config=replace(model.config, eos_ids=())), tmp_path / "none")
    assert tessera.load(tmp_path / "none").config.eos_ids == ()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no file of this model names a token that ends an answer" in caplog.text


def test_the_commands_say_what_ends_an_answer(base, capsys, monkeypatch, caplog):
    from tessera.deviceless import model_inspection

    found = model_inspection.StepInspection(compiled=False, model="x", chip="v6e", mesh=1, phase="prefill", error="no")
    monkeypatch.setattr(model_inspection, "inspect_step", lambda *_, **__: found)
    line = describe(open_source(base).ends)
    assert line == (
        "an answer ends at 257 <|eos|> (generation_config.json, config.json, the tokenizer's eos_token), "
        "261 <|end|> (the chat template)"
    )
    cli.main(["inspect", "--model", str(base)])
    assert capsys.readouterr().out.startswith(line + "\n")
    cli.main(["inspect", "--model", str(base), "--json"])
    assert json.loads(capsys.readouterr().out)["ends"][1] == {
        "id": 261,
        "name": "<|end|>",
        "places": ["the chat template"],
    }
    cli.main(["generate", "--model", str(base), "--prompt", "a", "--max-new-tokens", "1", "--debug"])
    assert [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"] == [line]
    caplog.clear()
    cli.main(["generate", "--model", str(base), "--prompt", "a", "--max-new-tokens", "1"])
    assert not caplog.records
