"""Untrusted model files: names with control characters, numbers past int32, lists in place of values.

Each is refused in one printable sentence that names the file, the key and the value.
"""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from gguf_files import BPE, Q, bpe_metadata, tiny_model, write_gguf
from test_gguf import refusal
from test_gguf_hostile import entry, load_or_refuse, raw_file
from tiny import CONFIG, save_tiny

import tessera
from tessera.core.escapes import escaped
from tessera.models.files.families import parse_config, render_config
from tessera.models.files.source import open_source

CLEAR = "\x1b[2J"
SHOWN = r"\x1b[2J"
PAST = 2**31
LIMIT = 2**31 - 1


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model", plan=False)


def test_escaped():
    assert escaped("blk.0.é ▁") == "blk.0.é ▁"
    assert escaped("a\n\x1b[2J\u202eb\ud800") == r"a \x1b[2J\u202eb\ud800"
    assert len(escaped("\x1b" * 99)) == 80
    assert escaped("x" * 99, None) == "x" * 99


# Names


@pytest.mark.parametrize("key", [f"llama.rope.{CLEAR}", "llama.rope." + CLEAR * 5000])
def test_metadata_keys_are_escaped(tmp_path, key):
    metadata, tensors = tiny_model(64)
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata | {key: 5}, tensors))
    assert SHOWN in said
    assert said.isprintable()
    assert len(said) < 400


def test_tensor_names_are_escaped(tmp_path):
    metadata, tensors = tiny_model(64)
    tensors[f"{CLEAR}.weight"] = tensors["output_norm.weight"]
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors))
    assert f"{SHOWN}.weight" in said
    assert said.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {f"rope_{CLEAR}": 5},
        {"quantization_config": CLEAR},
        {"architectures": CLEAR},
        {"architectures": [CLEAR]},
        {"partial_rotary_factor": CLEAR},
        {"pretraining_tp": CLEAR},
        {"model_type": CLEAR},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, f"theta_{CLEAR}": 5}},
        {"rope_scaling": CLEAR},
        {"rope_theta": CLEAR},
        {"rms_norm_eps": CLEAR},
        {"vocab_size": CLEAR},
        {"dtype": CLEAR},
        {"layer_types": [CLEAR]},
    ],
)
def test_config_keys_and_values_are_escaped(folder, changes):
    edit_json(folder / "config.json", **changes)
    said = refusal(folder)
    assert SHOWN in said
    assert "config.json" in said
    assert said.isprintable()


def edit_header(path, edit):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def retype(header, **changes):
    header["model.norm.weight"] |= changes


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda h: h.update({CLEAR: h["model.norm.weight"]}), SHOWN),
        (lambda h: retype(h, dtype=CLEAR), SHOWN),
        (lambda h: retype(h, dtype=["F32"]), "broken safetensors header"),
        (lambda h: retype(h, shape="ab"), "broken safetensors header"),
        (lambda h: retype(h, shape=[CLEAR]), "broken safetensors header"),
        (lambda h: retype(h, data_offsets=[0.5, 1.5]), "broken safetensors header"),
        (lambda h: retype(h, data_offsets=[0, 10**400]), "must fit in 64 bits"),
        (lambda h: retype(h, data_offsets=[0, 10**30]), "must fit in 64 bits"),
        (lambda h: retype(h, data_offsets=[0, 2**62]), "broken safetensors header"),
    ],
)
def test_safetensors_headers(folder, edit, named):
    edit_header(folder / "model.safetensors", edit)
    said = refusal(folder)
    assert named in said
    assert "model" in said
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_nested_too_deep(folder, name):
    (folder / name).write_text("[" * 200_000)
    assert name in refusal(folder)


def test_an_index_that_lists_a_control_sequence(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {CLEAR: "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert SHOWN in refusal(folder)


def test_tokenizer_folders(folder):
    """The tokenizers library's own error would quote the file's control characters."""
    path = folder / "tokenizer.json"
    original = path.read_text()
    path.write_text(json.dumps(json.loads(original) | {"model": {"type": CLEAR}, CLEAR: 1}))
    said = refusal(folder)
    assert "tokenizer.json" in said
    assert said.isprintable()
    path.write_text(original)
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=5)
    assert "chat_template" in refusal(folder)
    (folder / "tokenizer_config.json").write_text("[1]")
    assert "must hold a JSON object" in refusal(folder)


# Numbers


@pytest.mark.parametrize(
    "key",
    [
        "attention.sliding_window",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "context_length",
        "rope.dimension_count",
        "vocab_size",
    ],
)
@pytest.mark.parametrize("value", [PAST, 2**32 - 1])
def test_metadata_past_int32(tmp_path, key, value):
    metadata, tensors = tiny_model(64)
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata | {f"llama.{key}": value}, tensors))
    assert f"x.gguf has llama.{key}={value}: it must be a positive integer of at most {LIMIT}" in said


def test_yarns_original_context_past_int32(tmp_path):
    metadata, tensors = tiny_model(64)
    metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    metadata["llama.rope.scaling.original_context_length"] = PAST
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors))
    assert f"original_context_length={PAST}" in said


CONFIG_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]


@pytest.mark.parametrize("value", [PAST, 10**400, 1.5, "8", [8], True, -1, 0])
@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_config_sizes(folder, key, value):
    edit_json(folder / "config.json", **{key: value})
    said = refusal(folder)
    assert f"config.json: {key}={repr(value)[:80]} must" in said
    assert ("must fit in 64 bits" if value == 10**400 else "positive integer of at most") in said
    assert len(said) < 400


def test_config_windows_ids_and_numbers():
    raw = render_config(CONFIG, "float32")
    qwen = raw | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    mistral = raw | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    qwen, mistral = ({k: v for k, v in r.items() if not k.endswith("_bias")} for r in (qwen, mistral))
    assert parse_config(mistral | {"sliding_window": LIMIT}).window == LIMIT
    assert parse_config(mistral | {"sliding_window": None}).window is None
    cases = [
        (mistral, "sliding_window", [PAST, 0, "4096", True]),
        (qwen | {"max_window_layers": 0}, "sliding_window", [PAST, 0, "4096"]),
        (qwen | {"sliding_window": 8}, "num_hidden_layers", [PAST, 1 << 20, "3", None]),
        (qwen | {"sliding_window": 8}, "max_window_layers", ["1", [1]]),
        (raw, "eos_token_id", [PAST, "2", [PAST], [[2]], 1.5]),
        (raw, "bos_token_id", [PAST, "2", [PAST], 1.5]),
        (raw, "rms_norm_eps", ["1e-5", [1], 0, -1.0, 10**400, float("nan"), float("inf")]),
        (raw, "rope_theta", ["1e4", 0, -1.0, 10**400, float("nan"), float("inf")]),
    ]
    for base, key, values in cases:
        for value in values:
            with pytest.raises(ValueError, match=key) as caught:
                parse_config(base | {key: value})
            assert escaped(repr(value), 40) in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear", "factor": "2"}, "factor='2'"),
        ({"rope_type": "linear", "factor": 0}, "factor=0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": PAST}, f"={PAST}"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "8"}, "='8'"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate='no'"),
        ({"rope_type": ["yarn"]}, "rope_type"),
        ([1], "rope_scaling"),
    ],
)
def test_config_rope_values(folder, scaling, named):
    edit_json(folder / "config.json", rope_scaling=scaling)
    said = refusal(folder)
    assert "config.json: " in said
    assert named in said


@pytest.mark.parametrize("changes", [{"model_type": ["llama"]}, {"layer_types": [["a"], 1]}, {"layer_types": 5}])
def test_config_values_of_another_type(folder, changes):
    edit_json(folder / "config.json", **changes)
    [key] = changes
    said = refusal(folder)
    assert "config.json: " in said
    assert key in said


def test_the_largest_window_reads_everything(tmp_path):
    """A window of 2**31 - 1 gives the tokens of a model without a window, in prefill and decode."""
    small = replace(CONFIG, num_layers=1)
    folder = save_tiny(tmp_path / "windowed", small, plan=False)
    edit_json(folder / "config.json", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=LIMIT)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if not k.endswith("_bias")}))
    windowed = tessera.load(folder)
    plain = tessera.load(save_tiny(tmp_path / "plain", small, plan=False))
    prompt = [list(range(1, 100))]
    [a], [b] = (model.generate(prompt, max_new_tokens=4) for model in (windowed, plain))
    assert a.tokens == b.tokens
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-6)


# Lists, and rules of the config class


def numbers(*values: int) -> bytes:
    return struct.pack(f"<IQ{len(values)}i", 5, len(values), *values)


@pytest.mark.parametrize("values", [(1, 2), (), tuple(range(2000))])
def test_a_list_of_parts(tmp_path, values):
    said = refusal(raw_file(tmp_path / "x.gguf", entries=[entry("split.count", 9, numbers(*values))]))
    assert "x.gguf" in said
    assert "split.count" in said
    assert said.isprintable()


@pytest.mark.parametrize("value", [[1, 2], ["none", "linear"], [7] * 2000])
def test_a_list_for_a_rope_type(tmp_path, value):
    metadata, tensors = tiny_model(64)
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata | {"llama.rope.scaling.type": value}, tensors))
    assert "x.gguf has llama.rope.scaling.type=" in said
    assert said.isprintable()


@pytest.mark.parametrize("value", [[1, 2], ["gpt2"], 5, CLEAR])
def test_a_list_for_a_tokenizer_model(tmp_path, value):
    metadata, tensors = tiny_model(64)
    vocab = {"tokens": BPE["tokens"][:64], "types": [1] * 64, "merges": ["a b"]}
    metadata |= bpe_metadata(vocab, "smollm") | {"tokenizer.ggml.model": value}
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    with pytest.raises(ValueError, match=r"x\.gguf has tokenizer\.ggml\.model=") as caught:
        _ = open_source(path).tokenizer
    assert str(caught.value).isprintable()


def test_every_key_as_a_list_of_numbers(tmp_path):
    """A list is accepted only if its entries agree for all layers; otherwise the refusal names the key."""
    metadata, tensors = tiny_model(64)
    tokens = BPE["tokens"][:60]
    merges = [merge for merge in BPE["merges"] if set(merge.split()) <= set(tokens)][:4]
    vocab = {"tokens": tokens + [merge.replace(" ", "") for merge in merges], "types": [1] * 64, "merges": merges}
    metadata |= bpe_metadata(vocab, "smollm", chat_template="x") | {"tokenizer.ggml.eos_token_id": 3}
    metadata |= {"llama.rope.scaling.type": "none", "tokenizer.ggml.add_bos_token": True, "general.name": "x"}
    metadata |= {"split.count": 1, "general.file_type": 0}
    for key in metadata:
        for value in ([1, 2], [1.5, 2.5], ["a", "b"]):
            if key == "general.architecture":
                continue
            path = write_gguf(tmp_path / "x.gguf", metadata | {key: value}, tensors)
            said = load_or_refuse(path)
            assert said == "loaded" or ("x.gguf" in said and said.isprintable()), key
            assert said == "loaded" or key in said or key == "tokenizer.ggml.tokens"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.attention.head_count": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        (dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 15), "head_dim=15"),
    ],
)
def test_the_configs_own_rules_name_the_file(tmp_path, changes, named):
    metadata, tensors = tiny_model(64)
    changes = {"llama." + key.removeprefix("llama."): value for key, value in changes.items()}
    metadata |= {"llama.attention.head_count_kv": 2} | changes
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors))
    assert "x.gguf" in said
    assert named in said


def test_an_unknown_tensor_type_is_no_traceback(tmp_path):
    metadata, tensors = tiny_model(64)
    tensors[CLEAR] = np.ones(32), Q.F64
    assert refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors)).isprintable()
