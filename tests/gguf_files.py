"""Write GGUF files for tests with the gguf package: models of the golden folders, tokenizers, single tensors.

Names, keys and the order of q's and k's rows follow llama.cpp's converter, restated here without using Tessera's code.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

Q = gguf.GGMLQuantizationType
TOKENIZERS = Path(__file__).parent / "golden" / "tokenizers.json"
BPE = json.loads(TOKENIZERS.read_text(encoding="utf-8"))["bpe"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
) -> Path:
    """Write a GGUF file. A value's Python type selects its metadata type; arrays of bytes are already quantised."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder Hugging Face's q or k for llama.cpp: row (head, half, pair) becomes row (head, pair, half)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rename(name: str) -> str:
    """Translate a Hugging Face tensor name to llama.cpp's."""
    stem, leaf = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{leaf}"
    _, _, index, place = stem.split(".", 3)
    return f"blk.{index}.{NAMES[place]}.{leaf}"


def folder_tensors(folder: Path, raw: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Load a golden folder's weights in float32, under llama.cpp's names and in its row order."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in load_file(file).items():
            array = np.asarray(array, np.float32)
            if raw["model_type"] in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
                array = interleave(array, raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
            found[rename(name)] = array
    return found


def folder_metadata(raw: Mapping[str, Any], architecture: str | None = None) -> dict[str, Any]:
    """Convert a Hugging Face config to a GGUF's metadata."""
    arch = architecture or {"mistral": "llama"}.get(raw["model_type"], raw["model_type"])
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)}
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    values = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": raw["vocab_size"],
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        values["attention.sliding_window"] = raw["sliding_window"]
    found = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}
    if raw.get("bos_token_id") is not None:
        found["tokenizer.ggml.bos_token_id"] = raw["bos_token_id"]
    return found


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Compute rope_freqs.weight as llama.cpp's converter does, in a loop over pairs."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    found = []
    for pair in range(head_dim // 2):
        freq = 1.0 / rope["rope_theta"] ** (2 * pair / head_dim)
        wavelength = 2 * math.pi / freq
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context / low:
            found.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def from_folder(
    folder: Path,
    path: Path,
    *,
    architecture: str | None = None,
    quantise: Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]] = lambda _, a: (a, Q.F32),
    **changes: Any,
) -> Path:
    """Write a golden folder as a GGUF file; `changes` replaces metadata (None removes it), with __ for each dot."""
    raw = json.loads((folder / "config.json").read_text())
    metadata = folder_metadata(raw, architecture)
    for key, value in changes.items():
        metadata.pop(key.replace("__", "."), None)
        if value is not None:
            metadata[key.replace("__", ".")] = value
    tensors = {name: quantise(name, array) for name, array in folder_tensors(folder, raw).items()}
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        head_dim = metadata[f"{metadata['general.architecture']}.attention.key_length"]
        tensors["rope_freqs.weight"] = llama3_factors(rope, head_dim), Q.F32
    return write_gguf(path, metadata, tensors)


def bpe_metadata(vocab: Mapping[str, Any], pre: str | None, **changes: Any) -> dict[str, Any]:
    """Build a byte-level BPE's metadata; `vocab` holds tokens, types and merges."""
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": vocab["tokens"],
        "tokenizer.ggml.token_type": vocab["types"],
        "tokenizer.ggml.merges": vocab["merges"],
    }
    return found | ({"tokenizer.ggml.pre": pre} if pre else {}) | {f"tokenizer.{k}": v for k, v in changes.items()}


def spm_metadata(vocab: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Build a SentencePiece model's metadata; `vocab` holds tokens, types and scores."""
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocab["tokens"],
        "tokenizer.ggml.token_type": vocab["types"],
        "tokenizer.ggml.scores": vocab["scores"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.{key}": value for key, value in changes.items()}


def tiny_model(num_tokens: int, hidden: int = 32, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build metadata and float32 tensors of a random llama with one layer, for files that test the tokenizer."""
    rng = np.random.default_rng(seed)
    raw = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": num_tokens,
    }
    half = hidden // 2
    shapes = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (half, hidden)}
    shapes |= {"attn_v": (half, hidden), "attn_output": (hidden, hidden), "ffn_gate": (hidden, hidden)}
    shapes |= {"ffn_up": (hidden, hidden), "ffn_down": (hidden, hidden)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"token_embd": (num_tokens, hidden), "output_norm": (hidden,)}
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return folder_metadata(raw), {name: (array, Q.F32) for name, array in tensors.items()}


def small_file(tmp_path: Path) -> bytes:
    metadata, tensors = tiny_model(64)
    tokens = BPE["tokens"][:60]
    merges = [merge for merge in BPE["merges"] if set(merge.split()) <= set(tokens)][:4]
    vocab = {"tokens": tokens + [merge.replace(" ", "") for merge in merges], "types": [1] * 64, "merges": merges}
    metadata |= bpe_metadata(vocab, "smollm", chat_template="{{ messages }}") | {"tokenizer.ggml.eos_token_id": 0}
    return write_gguf(tmp_path / "whole.gguf", metadata, tensors).read_bytes()
