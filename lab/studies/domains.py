"""Define which values are valid in a model's files: the fuzzer's oracle, which shares no code with the loaders.

`nonsense` reads a file that the library accepted and lists the values that the library should have refused.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Sane = Callable[[Any], bool]


def _int(low: int, high: int) -> Sane:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _real(low: float, high: float) -> Sane:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high


def _ids(vocab: int) -> Sane:
    return lambda v: all(map(_int(0, vocab - 1), v if isinstance(v, list) else [v]))


def _list(sane: Sane) -> Sane:
    return lambda v: isinstance(v, list) and all(map(sane, v))


_BOOL: Sane = lambda v: isinstance(v, bool)  # noqa: E731
_TEXT: Sane = lambda v: isinstance(v, str)  # noqa: E731
_DICT: Sane = lambda v: isinstance(v, dict)  # noqa: E731
_SIZE = _int(1, 2**31 - 1)
_ABOVE_0 = _real(math.ulp(0.0), 1e9)

CONFIG: Mapping[str, Sane] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _int(1, 100_000),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": lambda v: _SIZE(v) and v % 2 == 0,
    "max_position_embeddings": _SIZE,
    "rms_norm_eps": _real(math.ulp(0.0), 1),
    "rope_theta": _real(1, 1e30),
    "tie_word_embeddings": _BOOL,
    "attention_bias": _BOOL,
    "mlp_bias": _BOOL,
    "hidden_act": lambda v: v in ("silu", "swish"),
    "model_type": lambda v: v == "llama",
    "pretraining_tp": lambda v: v == 1 and v is not True,
    "partial_rotary_factor": lambda v: v == 1 and v is not True,
    "architectures": lambda v: v in ([], ["LlamaForCausalLM"]),
    "layer_types": lambda v: v in ([], ["full_attention"], ["full_attention"] * 2),
    "torch_dtype": lambda v: v in ("", "float32", "bfloat16", "float16", "torch.float32"),
    "quantization_config": lambda v: not v,
}
GENERATION: Mapping[str, Sane] = {
    "do_sample": _BOOL,
    "temperature": _real(0, 1e9),
    "top_k": _int(-1, 2**31 - 1),
    "top_p": _real(math.ulp(0.0), 1),
    "min_p": _real(0, 1),
    "repetition_penalty": _ABOVE_0,
    "max_new_tokens": _SIZE,
}
ROPE: Mapping[str, Sane] = {
    "rope_theta": _real(1, 1e30),
    "factor": _real(1, 1e9),
    "low_freq_factor": _ABOVE_0,
    "high_freq_factor": _ABOVE_0,
    "beta_fast": _ABOVE_0,
    "beta_slow": _ABOVE_0,
    "attention_factor": _ABOVE_0,
    "mscale": _real(0, 1e9),
    "mscale_all_dim": _real(0, 1e9),
    "original_max_position_embeddings": _SIZE,
    "truncate": _BOOL,
}
_COUNT = _int(0, 2**31 - 1)
PLAN: Mapping[str, Sane] = {
    "schema": lambda v: v in (1, 2) and v is not True,
    "kind": lambda v: v == "tessera-plan",
    "num_layers": lambda v: v == 2 and v is not True,
    "num_kv_heads": lambda v: v == 2 and v is not True,
    "anchors": _list(_int(0, 1)),
    "own": _list(_int(0, 1)),
    "head_map": lambda v: _list(_list(_int(0, 1)))(v) and [len(row) for row in v] == [2, 2],
    "heads": lambda v: v in ("remap", "identity", "pooled"),
    "tile": lambda v: v in (1, 16, 32, 64, 128) and v is not True,
    "query_tile": _int(1, 4096),
    "local": _COUNT,
    "sinks": _COUNT,
    "minimum": _COUNT,
    "crossover_tokens": _COUNT,
    "fraction": _real(0, 1),
    "budgets": _list(_list(_real(0, 1))),
    "score_keys": _int(1, 128),
    "score_rows": _int(1, 4096),
    "promise": _DICT,
    "provenance": _DICT,
    "metrics": _DICT,
}
_PIECE: Sane = lambda v: _TEXT(v) or (_DICT(v) and _TEXT(v.get("content")))  # noqa: E731
SETTINGS: Mapping[str, Sane] = {
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _PIECE),
    "chat_template": lambda v: _TEXT(v) or _list(lambda t: _DICT(t) and _TEXT(t.get("template")))(v),
}


def nonsense(name: str, folder: Path) -> list[str]:
    """Return one line for each invalid value in a file that the library accepted."""
    data = (folder / name).read_bytes()
    if name == "model.safetensors":
        return list(_safetensors(data))
    if name.endswith(".gguf"):
        return []
    try:
        raw = json.loads(data.decode(), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        return [f"the file is not JSON: {error}"[:200]]
    if not isinstance(raw, dict):
        return ["the file is not a JSON object"]
    vocab = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    found = [*_fields(raw, {"eos_token_id": _ids(vocab)})]
    if name == "config.json":
        found += _fields(raw, {**CONFIG, "bos_token_id": _ids(vocab)})
        found += _fields(raw.get("rope_scaling") or raw.get("rope_parameters") or {}, ROPE)
    elif name == "generation_config.json":
        found += _fields(raw, GENERATION)
    elif name == "plan.json":
        found += _fields(raw, PLAN)
    elif name in ("tokenizer_config.json", "special_tokens_map.json"):
        found = [*_fields(raw, SETTINGS)]
    elif name == "tokenizer.json":
        found = [*_tokenizer(raw)]
    elif name.endswith(".index.json"):
        found = [*_index(raw, folder)]
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if any(repr(found[key]) != repr(value) for key, value in pairs):
        raise ValueError("a key has two values")
    return found


def _fields(raw: Mapping[str, Any], table: Mapping[str, Sane]) -> Iterator[str]:
    for key, sane in table.items():
        if raw.get(key) is not None and not sane(raw[key]):
            yield f"{key}={raw[key]!r:.80}"


def _safetensors(data: bytes) -> Iterator[str]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_pairs)
    at = 0
    entries = [(entry["data_offsets"], entry, name) for name, entry in header.items() if name != "__metadata__"]
    for (start, end), entry, name in sorted(entries, key=lambda item: item[0]):
        size = {"F32": 4, "F16": 2, "BF16": 2}.get(entry["dtype"], 0)
        if start != at or end - start != math.prod(entry["shape"]) * size:
            yield f"tensor {name} has bytes {start} to {end}, which do not fit its shape or do not start at {at}"
        at = end
    if 8 + length + at != len(data):
        yield f"the tensors end at byte {at}, but the file has {len(data) - length - 8} bytes of tensors"


def _tokenizer(raw: Mapping[str, Any]) -> Iterator[str]:
    vocab = raw["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    if len(set(ids)) != len(ids) or not all(map(_int(0, 10**7), ids)):
        yield "token ids repeat or are out of range"
    if raw["model"].get("dropout"):
        yield "dropout is set"
    known = vocab if isinstance(vocab, dict) else {}
    taken = {index: text for text, index in known.items()}
    for token in raw.get("added_tokens") or ():
        if not _int(0, 10**7)(token["id"]) or taken.setdefault(token["id"], token["content"]) != token["content"]:
            yield f"invalid added token {token!r:.80}"


def _index(raw: Mapping[str, Any], folder: Path) -> Iterator[str]:
    for name, shard in raw["weight_map"].items():
        data = (folder / shard).read_bytes()
        if name not in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]):
            yield f"{shard} does not hold {name}"
