"""Checkpoint folders, loaded and saved: old and new configs, refusals by name, shards, broken files, memory."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, field, make_dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from tiny import random_params, save_tiny

import tessera
from tessera.models.config import ModelConfig, Rope, stable_repr
from tessera.models.files import tensor_file
from tessera.models.files.checkpoint import fingerprint, load_params, save_folder
from tessera.models.files.families import FAMILIES, parse_config, render_config
from tessera.models.files.source import open_source, resolve
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.models.weights import expected_shapes

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def folder(tmp_path):
    """Return a copy of a small golden checkpoint that a test may break."""
    return Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "model"))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def same_weights(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# Configs


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
                "max_position_embeddings": 512,
            },
        ),
        ({"num_key_value_heads": None, "head_dim": None}, {"num_key_value_heads": 4, "head_dim": 8}),
        ({"eos_token_id": 2}, {"eos_token_id": [2]}),
    ],
)
def test_old_and_new_keys_read_the_same(old, new):
    assert parse_config(LLAMA | old) == parse_config(LLAMA | new)


def test_config_defaults_are_those_of_transformers():
    llama, mistral = parse_config(LLAMA), parse_config(MISTRAL)
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions, llama.rope.theta) == (4, 8, 2048, 10000.0)
    assert (llama.norm_eps, llama.tie_embeddings, llama.window, llama.eos_ids) == (1e-6, False, None, ())
    assert (mistral.window, mistral.max_positions) == (4096, 131072)
    assert parse_config(QWEN3).head_dim == 128
    assert parse_config(QWEN3).qk_norm
    qwen2 = parse_config(QWEN2)
    assert qwen2.attention_bias
    assert not qwen2.output_bias


def test_both_configs_name_ends():
    raw = LLAMA | {"eos_token_id": 2}
    assert parse_config(raw, {"eos_token_id": [7, 8]}).eos_ids == (7, 8, 2)
    assert parse_config(raw, {"bos_token_id": 1}).eos_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 16}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2}, 16),
        ({"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 2}, None),
        ({"layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_qwen_windows(fields, window):
    assert parse_config(QWEN2 | fields).window == window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes, named):
    with pytest.raises(ValueError) as error:
        parse_config(LLAMA | changes)
    assert named in str(error.value)


def test_mixed_qwen_windows_are_refused():
    with pytest.raises(ValueError, match="max_window_layers=1"):
        parse_config(QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1})


def test_a_config_is_refused_before_a_weight_is_read(folder):
    edit_json(folder / "config.json", hidden_act="gelu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"config\.json: hidden_act='gelu'"):
        _ = open_source(folder).config


@pytest.mark.parametrize("name", CASES)
def test_rendered_configs_read_back(name):
    config = open_source(GOLDEN / name).config
    again = parse_config(render_config(config, "bfloat16"))
    assert again == replace(config, dtype="bfloat16")


def test_a_config_no_family_can_say_is_not_written():
    config = replace(parse_config(LLAMA), qk_norm=True)
    with pytest.raises(ValueError, match="qk_norm=True"):
        render_config(config, "float32")


# Weights


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("float32", name) for name in CASES),
        *(
            pytest.param("bfloat16", name, marks=() if name in ("qwen2_biases", "sharded") else pytest.mark.exhaustive)
            for name in CASES
        ),
    ],
)
def test_both_layouts_hold_the_values_of_the_file(name, dtype):
    config = open_source(GOLDEN / name).config
    loose = load_params(open_source(GOLDEN / name), dtype=dtype, stacked=False)
    stacked = load_params(open_source(GOLDEN / name), dtype=dtype, stacked=True)
    assert same_weights(stacked.layers, jax.tree.map(lambda *rows: np.stack(rows), *loose.layers))
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves((loose, stacked)))
    files = {}
    for path in (GOLDEN / name).glob("*.safetensors"):
        files |= load_file(path)
    q = files["model.layers.1.self_attn.q_proj.weight"].astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(np.asarray(loose.layers[1].q), q)
    assert fingerprint(loose, config) == fingerprint(stacked, config)


def test_fingerprint_tells_weights_apart_but_not_dtypes():
    config = open_source(GOLDEN / "sharded").config  # its values fit in bfloat16
    params = load_params(open_source(GOLDEN / "sharded"), dtype="float32", stacked=True)
    half = load_params(open_source(GOLDEN / "sharded"), dtype="bfloat16", stacked=False)
    assert fingerprint(params, config) == fingerprint(half, config)
    other = replace(params, layers=replace(params.layers, v=params.layers.v.at[1].mul(1.5)))
    assert fingerprint(other, config) != fingerprint(params, config)
    assert fingerprint(params, replace(config, window=8)) != fingerprint(params, config)


def test_a_new_config_field_keeps_the_plans_of_models_that_do_not_use_it():
    frozen, later = {"frozen": True, "kw_only": True}, [("later", int, field(default=0))]
    newer = {kind: make_dataclass(kind.__name__, later, bases=(kind,), **frozen) for kind in (Rope, ModelConfig)}
    config = open_source(GOLDEN / "rope_yarn").config
    options = asdict(config) | {"rope": newer[Rope](**asdict(config.rope))}
    same = newer[ModelConfig](**options)
    params = load_params(open_source(GOLDEN / "rope_yarn"), stacked=True)
    assert stable_repr(same) == stable_repr(config) == repr(config)
    ids = [fingerprint(params, config), fingerprint(params, same), fingerprint(params, replace(same, later=1))]
    ids.append(fingerprint(params, replace(same, rope=replace(same.rope, later=2))))
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_tied_heads_may_be_stored_but_must_be_equal(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "llama32_tied", tmp_path / "tied"))
    assert load_params(open_source(folder)).head is None
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert load_params(open_source(folder)).head is None
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head"):
        load_params(open_source(folder))


def test_a_load_reads_each_config_once(tmp_path, monkeypatch):
    folder, read = save_tiny(tmp_path / "model"), []
    monkeypatch.setattr(Path, "read_bytes", lambda path, whole=Path.read_bytes: read.append(path.name) or whole(path))
    tessera.load(folder)
    names = ["config.json", "generation_config.json", "tokenizer_config.json"]
    assert sorted(name for name in read if "config" in name) == names


def test_old_rotary_buffers_are_accepted(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    load_params(open_source(folder))


def _swap_heads(tensors):
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"].T)


def _poison(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(1)}), r"holds model\.layers\.2\.mlp"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(1)}), r"q_proj\.bias.*does not call for"),
        (_swap_heads, r"lm_head\.weight.*\(32, 64\).*\(64, 32\)"),
        (_poison, r"layers\.1\.mlp\.up_proj\.weight.*not finite"),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}), r"model\.norm\.weight.*I8"),
    ],
)
def test_wrong_tensors_are_refused_by_name(folder, change, named):
    edit_tensors(folder, change)
    with pytest.raises(ValueError, match=named):
        load_params(open_source(folder))


def test_fp8_is_refused_by_name(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*F8_E4M3"):
        load_params(open_source(folder))


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_truncated_files_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cut short"):
        load_params(open_source(folder))


def test_missing_weights_and_shards_are_refused(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load_params(open_source(folder))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\.bin or \.pth files"):
        load_params(open_source(folder))
    shards = Path(shutil.copytree(GOLDEN / "sharded", tmp_path / "sharded"))
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors is missing"):
        load_params(open_source(shards))


def test_headers_are_checked_before_any_weight_is_read(folder, monkeypatch):
    edit_tensors(folder, _swap_heads)
    read = []
    monkeypatch.setattr(tensor_file, "map_blocks", lambda tensor: read.append(tensor) or iter(()))
    with pytest.raises(ValueError, match="lm_head"):
        load_params(open_source(folder))
    assert read == []


@pytest.mark.parametrize(
    ("text", "named"), [("{", "not valid JSON"), ("[1]", "must hold a JSON object"), (None, "has no config.json")]
)
def test_broken_config_files_are_refused(folder, text, named):
    path = folder / "config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=named):
        _ = open_source(folder).config


def test_unknown_models_are_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "nowhere"), "nowhere", "no such/model"):
        with pytest.raises(ValueError, match="does not exist") as error:
            resolve(name)
        assert name in str(error.value)
    with pytest.raises(ValueError, match="'owner/absent-model' is neither a local folder nor reachable") as error:
        resolve("owner/absent-model")
    assert "\n" not in str(error.value)
    assert resolve(tmp_path).path == tmp_path


# Saving


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stacked", [False, True], ids=["tuple", "stacked"])
def test_saved_folders_load_to_the_same_weights(name, stacked, tmp_path):
    config = replace(open_source(GOLDEN / name).config, dtype="float32")
    params = load_params(open_source(GOLDEN / name), dtype="float32", stacked=stacked)
    save_folder(tmp_path / "out", params, config, byte_tokenizer())
    assert open_source(tmp_path / "out").config == config
    again = load_params(open_source(tmp_path / "out"), stacked=stacked)
    assert same_weights(params, again)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == expected_shapes(config).keys()


def test_shards_and_single_files_replace_each_other(tmp_path):
    config = parse_config(LLAMA | {"eos_token_id": [2, 3], "dtype": "bfloat16"})
    params = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), random_params(config))
    for shard_bytes in (10_000, 20_000, 1 << 30, 10_000):
        save_folder(tmp_path, params, config, shard_bytes=shard_bytes)
        single = (tmp_path / "model.safetensors").is_file()
        assert single == (shard_bytes == 1 << 30)
        assert single != (tmp_path / "model.safetensors.index.json").is_file()
        again = load_params(open_source(tmp_path), stacked=True)
        assert same_weights(params, again)
    sizes = [len(load_file(path)) for path in tmp_path.glob("model-*.safetensors")]
    assert sum(sizes) == len(expected_shapes(config))
    assert load_file(next(tmp_path.glob("model-00001*")))["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16


MEMORY = """
import sys, threading, time
import psutil, jax
import jax.numpy as jnp
from pathlib import Path
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
folder, dtype, stacked = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "stacked"
source = open_source(folder)
source.config
jax.block_until_ready(jnp.zeros(8) + 1)
process = psutil.Process()
before, peak, stop = process.memory_info().rss, [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], process.memory_info().rss)
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
params = load_params(source, dtype=dtype, stacked=stacked)
jax.block_until_ready(params)
stop.set(); thread.join()
print(peak[0] - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "tuple"), ("bfloat16", "stacked")])
def test_peak_memory_of_loading_is_the_model_plus_one_tensor(tmp_path, dtype, layout):
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}
    config = parse_config(LLAMA | sizes)
    specs = {name: (np.dtype(np.float32), shape) for name, shape in expected_shapes(config).items()}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | sizes))
    tensor_file.write_file(
        tmp_path / "model.safetensors", specs, (np.full(shape, 0.5, np.float32) for _, shape in specs.values())
    )
    largest = max(int(np.prod(shape)) for _, shape in specs.values()) * 4
    command = [sys.executable, "-c", MEMORY, str(tmp_path), dtype, layout]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, model = (int(word) for word in done.stdout.split())
    slack = 24 << 20  # the block being checked and converted, and the allocator's reserve
    assert model > largest + slack + (50 << 20), "the model is too small to tell a second copy from slack"
    assert 0.9 * model < peak < model + largest + slack


def test_families_table_is_what_the_golden_cases_cover():
    assert set(FAMILIES) == {json.loads((GOLDEN / name / "config.json").read_text())["model_type"] for name in CASES}


def test_rope_records_compare_by_kind():
    assert parse_config(LLAMA).rope == Rope()
    assert isinstance(parse_config(LLAMA), ModelConfig)
