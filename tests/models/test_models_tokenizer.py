"""Tokenizers: exact round trips, streaming that never splits a character, chat templates, folders, refusals."""

import json
import random
from dataclasses import replace

import pytest
import tokenizers

from tessera.models.files.source import open_source
from tessera.models.text.tokenizer import BYTE_SPECIALS, Tokenizer, byte_tokenizer

TEXTS = [
    "",
    "plain",
    "  leading and trailing  \n",
    "é€😀\u200d\x00\x7f",
    "<|user|> is text here<|eos|>",
    "\ufffd kept \ufffd\ufffd",
    "".join(chr(c) for c in range(1, 0x800)),
]


@pytest.fixture
def plain():
    return byte_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(plain, text):
    ids = plain.encode(text, add_special=False, parse_special=False)
    assert ids == list(text.encode())
    assert plain.decode(ids) == text


def test_special_tokens(plain):
    assert plain.vocab_size == 264
    assert [plain.backend.token_to_id(token) for token in BYTE_SPECIALS] == list(range(256, 264))
    assert (plain.bos_id, plain.eos_id, plain.pad_id) == (256, 257, 258)
    assert plain.special_id("unk_token") is None
    assert plain.encode("a<|user|>") == [256, 97, 259]
    assert plain.encode("<|user|>", parse_special=False) == [256, *b"<|user|>"]
    assert plain.decode([256, 97, 257]) == "a"
    assert plain.decode([256, 97, 257], skip_special=False) == "<|bos|>a<|eos|>"


@pytest.mark.parametrize("text", TEXTS)
def test_streams_join_to_the_text_and_hold_back_half_characters(plain, text):
    stream, pieces = plain.stream(), []
    for count, token in enumerate(text.encode(), 1):
        pieces.append(stream.push(token))
        assert text.startswith("".join(pieces)), f"after {count} bytes"
    pieces.append(stream.finish())
    assert "".join(pieces) == text


def test_streams_of_bytes_that_are_not_text(plain):
    generator = random.Random(0)
    for _ in range(50):
        ids = [generator.choice([65, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 256, 261]) for _ in range(40)]
        stream = plain.stream()
        assert "".join(stream.push(token) for token in ids) + stream.finish() == plain.decode(ids)


def test_streams_show_the_names_of_wanted_special_tokens(plain):
    """A mark of a tool call may be a special token, whose name would otherwise be lost."""
    stream = plain.stream(shown=frozenset({259}))
    assert [stream.push(token) for token in (*b"a", 0xC3, 259, 260, *b" b", 259)] == [
        *("a", "", "\ufffd<|user|>", "", " ", "b", "<|user|>")
    ]
    assert stream.finish() == ""


def test_streams_with_byte_fallback_and_word_marks():
    """In a Llama 2 style tokenizer, words carry a mark for their space, and unknown characters fall back to bytes."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(backend=backend)
    ids = [2, 3, 2, *(4 + byte for byte in "é😀€".encode()), 2, 3, 3, 2]
    assert tokenizer.decode(ids) == "ab aé😀€ abb a"
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == "ab aé😀€ abb a"
    assert "\ufffd" not in "".join(pieces)


def test_chat_template_of_the_byte_tokenizer(plain):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert plain.render_chat(chat, add_generation_prompt=False) == "<|bos|><|user|>Hi<|end|><|assistant|>Ho<|end|>"
    assert plain.encode_chat(chat[:1]) == [256, 259, 72, 105, 261, 260]
    with pytest.raises(ValueError, match="role system must be user or assistant"):
        plain.render_chat([{"role": "system", "content": "x"}])


def with_template(source: str) -> Tokenizer:
    return Tokenizer(backend=byte_tokenizer().backend, specials={"bos_token": "<s>"}, chat_template=source)


def test_templates_are_rendered_as_transformers_does():
    source = """{{ bos_token }}
    {% for m in messages %}
        {% if loop.index > 2 %}{% break %}{% endif %}
        {% generation %}{{ m | tojson }}{% endgeneration %}

    {% endfor %}
    {% if add_generation_prompt %}>{{ extra }}{% endif %}
    """
    out = with_template(source).render_chat([{"role": "u", "content": "<é>"}] * 3, extra=1)
    line = '{"role": "u", "content": "<é>"}'
    assert out == f"<s>\n{line}\n{line}\n>1    "  # as transformers 5.23 renders it
    assert len(with_template("{{ strftime_now('%Y') }}").render_chat([])) == 4


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one():
    tokenizer = with_template("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.missing.more }}",
        "{% for %}",
    ],
)
def test_templates_run_in_a_sandbox(source):
    with pytest.raises(ValueError, match="chat template cannot render"):
        with_template(source).render_chat([{"role": "user", "content": "x"}])


def test_chat_without_template_or_with_objects_is_refused(plain):
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(backend=plain.backend).render_chat([])
    with pytest.raises(ValueError, match="plain JSON"):
        plain.render_chat([{"role": "user", "content": object()}])


def test_folders(plain, tmp_path):
    assert open_source(tmp_path).tokenizer is None
    plain.save(tmp_path)
    again = open_source(tmp_path).tokenizer
    assert again.encode("<|user|>é ") == plain.encode("<|user|>é ")
    assert (again.specials, again.chat_template, again.settings["clean_up_tokenization_spaces"]) == (
        plain.specials,
        plain.chat_template,
        False,
    )
    assert "bos_token" in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_templates_and_special_tokens_in_older_places(plain, tmp_path):
    plain.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {
        "chat_template": templates,
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "added_tokens_decoder": {},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    again = open_source(tmp_path).tokenizer
    assert again.chat_template == "D"
    assert (again.bos_id, again.eos_id) == (256, 261)
    config["chat_template"] = "inline"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert open_source(tmp_path).tokenizer.chat_template == "inline"


@pytest.mark.parametrize(
    ("named", "chat", "tools"),
    [
        ({"tool_use": "T", "default": "D", "rag": "R"}, "D", "T"),
        ({"tool_use": "T", "rag": "R", "other": "O"}, "R", "T"),
        ({"rag": "R"}, "R", "R"),
        ({"tool_use": "T"}, "T", "T"),
        ({}, None, None),
    ],
)
@pytest.mark.parametrize("place", ["list", "files"])
def test_named_templates(plain, tmp_path, named, chat, tools, place):
    """Chats with tools use the template tool_use, as in transformers; a list without a default is a template, too."""
    replace(plain, chat_template="old", tool_template="old, too").save(tmp_path)
    if place == "list":
        config = {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    else:
        config = {"chat_template": "replaced by the files"} if named else {}
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in named.items():
            at = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (tmp_path / at).write_text(text)
        if "other" in named:  # files are read in the order of their names
            chat = "O"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_source(tmp_path).tokenizer
    found.save(tmp_path)
    for tokenizer in (found, open_source(tmp_path).tokenizer):
        assert (tokenizer.chat_template, tokenizer.tool_template or tokenizer.chat_template) == (chat, tools)
        if chat is not None:
            rendered = [tokenizer.render_chat([], tools=offered) for offered in (None, [], [{"type": "function"}])]
            assert rendered == [chat, chat, tools]


def with_added(plain, folder, tokens: dict[int, str], **flags) -> Tokenizer:
    """Save the byte tokenizer with these tokens in tokenizer_config.json alone, and load it."""
    plain.save(folder)
    listed = {str(index): {"content": content, "special": True, **flags} for index, content in tokens.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    return open_source(folder).tokenizer


def test_tokens_that_only_the_settings_list_are_added(plain, tmp_path):
    tokens = {265: "<|b|>", 264: "<|a|>", 257: "<|eos|>", 65: "A"}  # in any order; one is there, and one is a piece
    tokenizer = with_added(plain, tmp_path, tokens)
    assert tokenizer.encode("x<|a|><|b|>A<|eos|>", add_special=False) == [120, 264, 265, 65, 257]
    assert tokenizer.decode([120, 264, 65]) == "x"  # they are special, as the settings say
    tokenizer.save(tmp_path / "again")
    assert open_source(tmp_path / "again").tokenizer.encode("<|b|>", add_special=False) == [265]
    shown = with_added(plain, tmp_path / "shown", {264: "<|a|>"}, special=False)
    assert shown.decode([264]) == "<|a|>"


def edited(plain, folder, backend: dict | None = None, **files) -> Tokenizer:
    """Save the byte tokenizer, change tokenizer.json's fields and write other JSON files, and load the folder."""
    plain.save(folder)
    files["tokenizer"] = json.loads((folder / "tokenizer.json").read_text()) | (backend or {})
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return open_source(folder).tokenizer


LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
OTHER = LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast"}
UNNAMED = {"bos_token": "<|bos|>", "add_bos_token": False}


@pytest.mark.parametrize(
    ("settings", "has_bos", "ids"),
    [
        (LLAMA | {"add_bos_token": True}, False, [256, 97]),  # DeepSeek-R1-Distill-Qwen's files
        (LLAMA | {"add_bos_token": False}, True, [97]),
        (LLAMA | {"add_eos_token": True}, False, [256, 97, 257]),
        (LLAMA | {"add_bos_token": False, "add_eos_token": True}, True, [97, 257]),
        (LLAMA | {"add_bos_token": None, "add_eos_token": None}, True, [256, 97]),
        (LLAMA, False, [97]),
        (LLAMA | {"add_bos_token": True, "bos_token": None}, True, [97]),
        (LLAMA | {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, False, [256, 97]),
        (OTHER | {"add_bos_token": True}, False, [97]),  # transformers reads neither key for this class
        (OTHER | {"add_bos_token": False}, True, [256, 97]),
        (UNNAMED, True, [97]),  # the class follows from config.json
    ],
)
def test_settings_for_the_tokens_around_a_text(plain, tmp_path, settings, has_bos, ids):
    backend = {} if has_bos else {"post_processor": None}
    tokenizer = edited(plain, tmp_path, backend, tokenizer_config=settings, config={"model_type": "llama"})
    tokenizer.save(tmp_path / "again")
    for found in (tokenizer, open_source(tmp_path / "again").tokenizer):
        assert (found.encode("a"), found.encode("a", add_special=False)) == (ids, [97])


END = "<|im_end|>"


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"added_tokens": {END: 264, "<|a|>": 265}, "tokenizer_config": {"eos_token": END}}, [END, "<|a|>"]),
        ({"tokenizer_config": {"eos_token": END}}, [END]),
        ({"special_tokens_map": {"eos_token": {"content": END, "lstrip": False}}, "tokenizer_config": {}}, [END]),
        (
            {"tokenizer_config": {"additional_special_tokens": ["<|a|>"], "pad_token": "<|b|>", "eos_token": END}},
            [END, "<|b|>", "<|a|>"],
        ),
        ({"tokenizer_config": {"extra_special_tokens": {"image_token": END}}}, [END]),
        ({"tokenizer_config": {"added_tokens_decoder": {}, "eos_token": END}, "added_tokens": {"<|a|>": 264}}, [END]),
    ],
)
def test_tokens_that_only_other_files_name_are_added(plain, tmp_path, files, tokens):
    tokenizer = edited(plain, tmp_path, **files)
    ids = list(range(264, 264 + len(tokens)))
    tokenizer.save(tmp_path)  # which removes added_tokens.json
    for found in (tokenizer, open_source(tmp_path).tokenizer):
        assert found.encode("".join(tokens), add_special=False) == ids
        assert found.decode([97, found.backend.token_to_id(END)]) == "a"
        assert found.vocab_size == 264 + len(tokens)


def test_named_tokens_without_an_embedding_are_left_out_and_said(plain, tmp_path, caplog):
    settings = {"eos_token": END, "pad_token": "<|b|>", "bos_token": "<|bos|>"}
    tokenizer = edited(plain, tmp_path, tokenizer_config=settings, config={"vocab_size": 264})
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (264, None, 256)
    assert f"ignoring the special tokens {END}, <|b|>, which the vocabulary lacks" in caplog.text
    caplog.clear()
    assert edited(plain, tmp_path, tokenizer_config=settings, config={"vocab_size": 266}).eos_id == 264
    assert not caplog.text


@pytest.mark.parametrize("raw", [{END: "264"}, {"": 264}, {END: -1}])
def test_added_tokens_without_ids_are_refused(plain, tmp_path, raw):
    with pytest.raises(ValueError, match=r"added_tokens\.json must hold an object that maps tokens to ids below"):
        edited(plain, tmp_path, tokenizer_config={}, added_tokens=raw)


def test_flags_of_the_settings_win(plain, tmp_path):
    """As in transformers: of two files that give a token different flags, tokenizer_config.json is right."""
    plain.backend.add_tokens([tokenizers.AddedToken(END, special=False)])
    tokenizer = with_added(plain, tmp_path, {264: END, 259: "<|user|>"}, lstrip=True)
    assert tokenizer.encode(f"a {END}", add_special=False) == [97, 264]
    assert tokenizer.decode([97, 264]) == "a"
    shown = with_added(plain, tmp_path, {264: END, 259: "<|user|>"}, special=False, normalized=True)
    assert shown.decode([97, 264, 259]) == f"a{END}<|user|>"
    assert not shown.backend.get_added_tokens_decoder()[259].special
    by_list = edited(plain, tmp_path, tokenizer_config={"additional_special_tokens": [END]})
    assert by_list.decode([97, 264]) == "a"


def test_a_padding_token_of_one_character_stays_text(plain, tmp_path):
    assert edited(plain, tmp_path, tokenizer_config={"pad_token": "!"}).decode([97, 33]) == "a!"


@pytest.mark.parametrize(
    ("value", "chat", "tools"),
    [({"default": "D", "tool_use": "T"}, "D", "T"), ({"rag": "R"}, "R", "R"), ("", None, None), ({}, None, None)],
)
def test_templates_as_an_object_and_empty_templates(plain, tmp_path, value, chat, tools):
    plain.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    found = open_source(tmp_path).tokenizer
    assert (found.chat_template, found.tool_template or found.chat_template) == (chat, tools)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            {300: "<|a|>"},
            "token '<|a|>' the id 300 in added_tokens_decoder, but the next free id of tokenizer.json is 264",
        ),
        ({259: "<|a|>"}, "token '<|a|>' the id 259 in added_tokens_decoder, but in tokenizer.json it is '<|user|>'"),
        ({264: "<|user|>"}, "token '<|user|>' the id 264 in added_tokens_decoder, but in tokenizer.json .* has id 259"),
        ({264: ""}, "added_tokens_decoder=.* must be an object that maps ids"),
        ({"x": "<|a|>"}, "added_tokens_decoder=.* must be an object that maps ids"),
        ({1 << 40: "<|a|>"}, "added_tokens_decoder=.* must be an object that maps ids"),
    ],
)
def test_tokens_that_contradict_each_other_are_refused(plain, tmp_path, tokens, said):
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        with_added(plain, tmp_path, tokens)


def test_tokenizers_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ValueError, match="tokenizer.model, which is not supported: convert it once"):
        _ = open_source(tmp_path).tokenizer
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid JSON"):
        _ = open_source(tmp_path).tokenizer
    byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        _ = open_source(tmp_path).tokenizer
