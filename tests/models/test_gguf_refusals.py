"""What a GGUF file may say: values, tensors and types that are refused by name, ignored or accepted."""

import gguf
import numpy as np
import pytest
from gguf_files import Q, tiny_model, write_gguf
from test_gguf import encode, refusal

from tessera.models.files.forms import check_forms
from tessera.models.files.source import open_source


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.key_length": 20}, "attention.value_length"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor"),
        ({"llama.rope.scaling.type": 3}, "rope.scaling.type=3"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor=0.5"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama.attention.scale": 0.5}, "attention.scale=0.5"),
        ({"llama.logit_scale": 2.0}, "logit_scale=2.0"),
        ({"llama.attention.causal": False}, "attention.causal=False"),
        ({"llama.attention.causal": [True, True]}, "attention.causal"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv"),
        ({"llama.attention.head_count_kv": 0}, "head_count_kv=0"),
        ({"llama.attention.head_count": "2"}, "head_count='2'"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon=nan"),
        ({"llama.attention.layer_norm_rms_epsilon": True}, "epsilon=True"),
        ({"llama.block_count": 2**32 - 1}, "block_count=4294967295"),
        ({"llama.block_count": None}, "block_count=None"),
        ({"llama.block_count": 2}, "model.layers.1"),
        ({"llama.context_length": 2**32 - 1}, "context_length"),
        ({"llama.embedding_length": 2**30}, "metadata calls for"),
        ({"tokenizer.ggml.eos_token_id": "64"}, "eos_token_id='64'"),
        ({"split.count": 3}, "split.count"),
        ({"general.alignment": 33}, "general.alignment=33"),
    ],
)
def test_metadata_refusals(tmp_path, changes, named):
    metadata, tensors = tiny_model(64)
    if "general.alignment" in changes:  # the writer would align the file to 33
        path = write_gguf(tmp_path / "x.gguf", metadata | {"general.alignment": 32}, tensors)
        data = path.read_bytes()
        path.write_bytes(data.replace(b"general.alignment\x04\0\0\0 ", b"general.alignment\x04\0\0\0!"))
    else:
        metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
        path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    said = refusal(path)
    assert named in said
    assert "x.gguf" in said


def test_values_that_contradict_the_embeddings_are_ignored_and_said(tmp_path, caplog):
    metadata, tensors = tiny_model(64)
    metadata |= {
        "llama.vocab_size": 65,
        "tokenizer.ggml.bos_token_id": 64,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
    }
    source = open_source(write_gguf(tmp_path / "x.gguf", metadata, tensors))
    assert (source.config.vocab_size, source.config.bos_id) == (64, None)
    source.log_ignored()
    said = "ignoring llama.vocab_size=65, tokenizer.ggml.bos_token_id=64, because the model has 64 tokens"
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_uniform_lists_and_switched_off_keys_are_accepted(tmp_path):
    metadata, tensors = tiny_model(64)
    metadata |= {"llama.attention.head_count_kv": [1], "llama.expert_count": 0, "llama.rope.scaling.type": "none"}
    metadata |= {"llama.attention.causal": True, "llama.rope.scaling.finetuned": False}
    assert open_source(write_gguf(tmp_path / "x.gguf", metadata, tensors)).config.num_kv_heads == 1


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 512}, 2048),  # Qwen's recipe: not extended
        ({"type": "yarn", "factor": 2.0, "original_context_length": 128}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0, "original_context_length": 256}, 1024),
        ({"type": "none", "original_context_length": 256}, 512),
    ],
)
def test_contexts_that_rope_scaling_extends(tmp_path, scaling, context):
    metadata, tensors = tiny_model(64)
    metadata |= {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    assert open_source(write_gguf(tmp_path / "x.gguf", metadata, tensors)).config.max_positions == context


def test_unknown_keys_that_change_nothing_are_noted(tmp_path, caplog):
    metadata, tensors = tiny_model(64)
    metadata |= {"llama.pooling_type": 1, "llama.training.dataset": "x", "llama.logit_scale": 1.0}
    caplog.set_level("INFO")
    open_source(write_gguf(tmp_path / "x.gguf", metadata, tensors)).log_ignored()
    assert "ignoring llama.logit_scale, llama.pooling_type, llama.training.dataset" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("blk.0.attn_q.weight"), "self_attn.q_proj.weight"),
        (lambda t: t.pop("token_embd.weight"), "token_embd.weight"),
        (lambda t: t.update({"../../etc/passwd": t["output_norm.weight"]}), "../../etc/passwd"),
        (lambda t: t.update({"blk.1.attn_q.weight": t["blk.0.attn_q.weight"]}), "blk.1.attn_q.weight"),
        (lambda t: t.update({"output_norm.weight": (np.ones(31, np.float32), Q.F32)}), "shape (31,)"),
        (lambda t: t.update({"output_norm.weight": (np.full(32, np.inf, np.float32), Q.F32)}), "not finite"),
        (lambda t: t.update({"output_norm.weight": (np.ones(32), Q.F64)}), "F64"),
        (lambda t: t.update({"blk.0.attn_norm.weight": (np.ones((2, 32), np.float32), Q.F32)}), "shape (2, 32)"),
    ],
)
def test_tensor_refusals(tmp_path, change, named):
    metadata, tensors = tiny_model(64)
    change(tensors)
    assert named in refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors))


@pytest.mark.parametrize("name", ["F64", "Q8_1", "Q8_K", "I32", "Q1_0"])
def test_types_that_cannot_be_dequantised_are_named(tmp_path, name):
    metadata, tensors = tiny_model(64, hidden=256)
    values, num_bytes = gguf.GGML_QUANT_SIZES[Q[name]]
    tensors["blk.0.attn_q.weight"] = np.zeros((256, 256 // values * num_bytes), np.uint8), Q[name]
    said = refusal(write_gguf(tmp_path / "x.gguf", metadata, tensors))
    assert f"has the type {name}, which the gguf package cannot dequantise: take a file of another type" in said


def test_weights_as_stored_name_the_types_that_they_keep(tmp_path):
    metadata, tensors = tiny_model(64, hidden=256)
    tensors["blk.0.attn_q.weight"] = encode("IQ4_NL", tensors["blk.0.attn_q.weight"][0])
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors)
    said = "weights='gguf' supports Q4_0, Q4_1, Q8_0 and floats, but .* is IQ4_NL: pass weights='int8', or None"
    with pytest.raises(ValueError, match=said):
        check_forms(open_source(path), "gguf")
