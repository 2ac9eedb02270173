"""Tokenizers of GGUF files against llama.cpp, transformers and sentencepiece, and refusals.

tokenizers.json holds the ids of those implementations: see golden/make_tokenizers.py.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from gguf_files import bpe_metadata, spm_metadata, tiny_model, write_gguf

from tessera.models.files.gguf_file import read_gguf
from tessera.models.files.gguf_tokenizer import EXPRESSIONS, PATTERNS, gguf_tokenizer
from tessera.models.files.source import open_source

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text(encoding="utf-8"))
BPE, SPM, TEXTS, CUTS = GOLDEN["bpe"], GOLDEN["spm"], GOLDEN["texts"], GOLDEN["cuts"]
IDS = [f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "unknown")]
PLAIN = [text for text in TEXTS if "<s>" not in text]


def read(path, metadata):
    """Return the tokenizer of a GGUF file that holds only this metadata."""
    return gguf_tokenizer(read_gguf(write_gguf(path / "t.gguf", {"general.architecture": "llama"} | metadata, {})))


@pytest.mark.parametrize("pre", [pre for pre in GOLDEN["llama_cpp"] if pre != "sentencepiece"])
def test_byte_level_ids_are_llama_cpps(tmp_path, pre):
    tokenizer = read(tmp_path, bpe_metadata(BPE, pre))
    assert [tokenizer.encode(text, add_special=False) for text in TEXTS] == GOLDEN["llama_cpp"][pre]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_byte_level_ids_are_those_of_transformers_own_classes(tmp_path, pre):
    tokenizer = read(tmp_path, bpe_metadata(BPE, pre))
    texts = [*TEXTS, GOLDEN["decomposed"]]  # qwen2 composes its characters; llama.cpp would not
    own = GOLDEN["own"][pre]
    assert [tokenizer.encode(text, add_special=False) for text in texts[: len(own)]] == own


@pytest.mark.parametrize("pre", CUTS["ids"])
def test_cuts_are_llama_cpps(tmp_path, pre):
    tokenizer = read(tmp_path, bpe_metadata(CUTS["vocabulary"], pre))
    assert [tokenizer.encode(text, add_special=False) for text in CUTS["texts"]] == CUTS["ids"][pre]


def test_every_pre_tokenizer_cuts_in_its_own_way():
    assert len({json.dumps(CUTS["ids"][pre]) for pre in PATTERNS}) == len(PATTERNS)


def test_names_of_other_models_tokenizers(tmp_path):
    """A vocabulary whose only merge is of a whole piece shows which names take such a piece without merging it."""
    assert {
        "tekken",
        "deepseek-r1-qwen",
        "pixtral",
        "llama3",
        "stablelm2",
        "minerva-7b",
        "mellum",
    } <= EXPRESSIONS.keys()
    vocab = {"tokens": ["a", "b", "c", "ab", "abc"], "types": [1] * 5, "merges": ["a b"]}
    whole = [pre for pre in EXPRESSIONS if read(tmp_path, bpe_metadata(vocab, pre)).encode("abc") == [4]]
    assert whole == "llama-bpe tekken llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2".split()


def test_sentencepiece_ids_are_those_of_sentencepiece_and_llama_cpp(tmp_path):
    tokenizer = read(tmp_path, spm_metadata(SPM))
    assert [tokenizer.encode(text, add_special=False) for text in PLAIN] == GOLDEN["own"]["sentencepiece"]
    assert [tokenizer.encode(text, add_special=False) for text in TEXTS] == GOLDEN["llama_cpp"]["sentencepiece"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(tmp_path, text):
    for pre in PATTERNS:
        tokenizer = read(tmp_path, bpe_metadata(BPE, pre))
        again = tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False), skip_special=False)
        assert again == text
    tokenizer = read(tmp_path, spm_metadata(SPM))
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == text


def test_tokens_around_a_text(tmp_path):
    spm = read(tmp_path, spm_metadata(SPM))  # SentencePiece adds a bos by default
    assert spm.encode("a")[0] == 1
    assert spm.encode("a", add_special=False)[0] != 1
    both = read(tmp_path, spm_metadata(SPM) | {"tokenizer.ggml.add_eos_token": True})
    assert (both.encode("a")[0], both.encode("a")[-1]) == (1, 2)
    none = read(tmp_path, spm_metadata(SPM) | {"tokenizer.ggml.add_bos_token": False})
    assert none.encode("a") == none.encode("a", add_special=False)
    named = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for pre in PATTERNS:  # by default only these two add a bos
        ids = read(tmp_path, bpe_metadata(BPE, pre) | named).encode("a")
        assert (ids[0] == 1) == (pre in ("llama-bpe", "tekken"))
    wanted = read(tmp_path, bpe_metadata(BPE, "qwen2") | named | {"tokenizer.ggml.add_bos_token": True})
    assert wanted.encode("a")[0] == 1


def test_space_prefix_can_be_switched_off(tmp_path):
    tokenizer = read(tmp_path, spm_metadata(SPM) | {"tokenizer.ggml.add_space_prefix": False})
    with_prefix = read(tmp_path, spm_metadata(SPM))
    assert tokenizer.encode(" the") == with_prefix.encode("the")
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_roles_template_and_saving(tmp_path):
    named = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = read(tmp_path, bpe_metadata(BPE, "smollm", chat_template=template) | named)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[0] == 1
    tokenizer.save(tmp_path / "saved")
    again = open_source(tmp_path / "saved").tokenizer
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert (again.specials, again.chat_template) == (tokenizer.specials, template)


def test_named_templates(tmp_path):
    named = {"chat_template": "D", "chat_template.tool_use": "T", "chat_template.rag": "R", "chat_templates": ["rag"]}
    tokenizer = read(tmp_path, bpe_metadata(BPE, "smollm", **named))
    assert [tokenizer.render_chat([], tools=tools) for tools in (None, [{}])] == ["D", "T"]
    del named["chat_template"]
    assert read(tmp_path, bpe_metadata(BPE, "smollm", **named)).render_chat([]) == "R"


def test_a_named_token_that_is_an_ordinary_piece_stays_one(tmp_path):
    """Converters write id 0 for a missing padding token; here that is "!", which must stay an ordinary piece."""
    piece = BPE["tokens"].index("!")
    plain = read(tmp_path, bpe_metadata(BPE, "qwen2"))
    padded = read(tmp_path, bpe_metadata(BPE, "qwen2") | {"tokenizer.ggml.padding_token_id": piece})
    assert padded.decode(padded.encode("wow!!")) == "wow!!"
    assert padded.encode("wow!!") == plain.encode("wow!!")


def test_user_defined_and_unused_tokens(tmp_path):
    vocab = {**BPE, "tokens": [*BPE["tokens"], "<tool>", "[PAD901]"], "types": [*BPE["types"], 4, 5]}
    tokenizer = read(tmp_path, bpe_metadata(vocab, "qwen2"))
    count = len(BPE["tokens"])
    assert count in tokenizer.encode("a<tool>b")
    assert "<tool>" in tokenizer.decode([count])  # a user-defined token is text, not markup
    assert count + 1 not in tokenizer.encode("[PAD901]")
    assert tokenizer.decode([count + 1]) == ""


@pytest.mark.parametrize("kind", [4, 3, 1])
def test_empty_and_repeated_tokens(tmp_path, caplog, kind):
    """As in llama.cpp: an empty token gets a name, and of two tokens of one name the later one is used."""
    count = len(BPE["tokens"])
    vocab = {**BPE, "tokens": [*BPE["tokens"], "", "", "<x>", "<x>"], "types": [*BPE["types"], 1, 1, kind, kind]}
    tokenizer = read(tmp_path, bpe_metadata(vocab, "qwen2"))
    assert tokenizer.decode([count, count + 1]) == f"[EMPTY_{count}][EMPTY_{count + 1}]"
    assert tokenizer.encode("Hello world") == read(tmp_path, bpe_metadata(BPE, "qwen2")).encode("Hello world")
    assert (count + 3 in tokenizer.encode("a<x>b")) == (kind != 1)
    assert f"tokens [{count}, {count + 1}] of the file are empty" in caplog.text
    assert f"tokens [{count + 2}] of the file have the names of later tokens" in caplog.text


def test_ids_without_a_token_are_no_roles(tmp_path):
    ids = {f"tokenizer.ggml.{role}_token_id": 2**32 - 1 for role in ("bos", "eos", "padding", "unknown")}
    for metadata in (bpe_metadata(BPE, "llama-bpe"), spm_metadata(SPM)):
        tokenizer = read(tmp_path, metadata | ids)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)
        assert tokenizer.encode("a") == tokenizer.encode("a", add_special=False)


def test_files_without_types_or_without_a_tokenizer(tmp_path):
    metadata = bpe_metadata(BPE, "gpt-2") | {"tokenizer.ggml.eos_token_id": 0}
    del metadata["tokenizer.ggml.token_type"]
    assert read(tmp_path, metadata).encode("a<|endoftext|>")[-1] == 0
    assert read(tmp_path, {}) is None
    assert read(tmp_path, {"tokenizer.ggml.model": "none"}) is None


def test_an_unnamed_cut_is_llama_cpps_default_and_said(tmp_path, caplog):
    tokenizer = read(tmp_path, bpe_metadata(BPE, None))
    assert [tokenizer.encode(text) for text in TEXTS] == GOLDEN["llama_cpp"]["default"]
    assert "tokenizer.ggml.pre" in caplog.text


def test_sentencepiece_without_byte_pieces_has_unknown_characters(tmp_path):
    keep = [i for i, kind in enumerate(SPM["types"]) if kind != 6]
    vocab = {key: [SPM[key][i] for i in keep] for key in ("tokens", "types", "scores")}
    assert 0 in read(tmp_path, spm_metadata(vocab)).encode("日本")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": 7}, "tokenizer.ggml.model=7"),
        ({"tokenizer.ggml.pre": "chameleon"}, "chameleon"),
        ({"tokenizer.ggml.pre": 3}, "tokenizer.ggml.pre=3"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 values"),
        ({"tokenizer.ggml.token_type": [9] * len(BPE["tokens"])}, "unknown type 9"),
        ({"tokenizer.ggml.token_type": ["x"] * len(BPE["tokens"])}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not two pieces"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "not in the vocabulary"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "bos_token_id"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token"),
        ({"tokenizer.chat_template": 5}, "chat_template=5"),
    ],
)
def test_byte_level_refusals(tmp_path, changes, named):
    metadata = {key: value for key, value in (bpe_metadata(BPE, "qwen2") | changes).items() if value is not None}
    with pytest.raises(ValueError, match=named) as refusal:
        read(tmp_path, metadata)
    assert "\n" not in str(refusal.value)
    assert "t.gguf" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "1 values"),
        ({"tokenizer.ggml.scores": [float("nan")] * len(SPM["tokens"])}, "finite score"),
        ({"tokenizer.ggml.scores": None}, "finite score"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap"),
        ({"tokenizer.ggml.add_space_prefix": 1.5}, "add_space_prefix"),
    ],
)
def test_sentencepiece_refusals(tmp_path, changes, named):
    metadata = {key: value for key, value in (spm_metadata(SPM) | changes).items() if value is not None}
    with pytest.raises(ValueError, match=named):
        read(tmp_path, metadata)


def test_a_vocabulary_of_long_texts_is_refused_before_it_is_cut(tmp_path):
    vocab = {"tokens": ["a" * 70_000], "types": [1], "scores": [0.0]}
    with pytest.raises(ValueError, match="too long"):
        read(
            tmp_path, spm_metadata(vocab) | {f"tokenizer.ggml.{role}_token_id": 0 for role in ("bos", "eos", "unknown")}
        )


def test_the_real_models_tokenizer(smollm2):
    tokenizer = open_source(smollm2).tokenizer
    assert tokenizer.vocab_size == 49152
    assert isinstance(tokenizer.backend, tokenizers.Tokenizer)
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[:3] == [1, 9690, 198]
    assert tokenizer.encode("1234") == [33, 34, 35, 36]  # one token per digit


def test_model_and_tokenizer_in_one_file(tmp_path):
    metadata, tensors = tiny_model(len(BPE["tokens"]))
    path = write_gguf(tmp_path / "x.gguf", metadata | bpe_metadata(BPE, "smollm"), tensors)
    assert open_source(path).tokenizer.encode("Hello world") == GOLDEN["llama_cpp"]["smollm"][0]
