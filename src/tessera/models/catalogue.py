"""Configs of well-known models by name, for commands that need a model's sizes but none of its files.

The sizes come from each publisher's config.json. `tests/models/test_footprint.py` compares the parameter counts with
the published ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from tessera.models.config import ModelConfig, Rope

_LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
    rope=Rope(kind="llama3", theta=500000.0, factor=8.0),
    norm_eps=1e-5,
    dtype="bfloat16",
)
_LLAMA_SMALL = replace(
    _LLAMA_8B, rope=Rope(kind="llama3", theta=500000.0, factor=32.0), intermediate_size=8192, tie_embeddings=True
)

MODELS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "llama-3.1-8b": _LLAMA_8B,
        "llama-3.1-70b": replace(_LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
        "llama-3.2-1b": replace(_LLAMA_SMALL, hidden_size=2048, num_layers=16, head_dim=64),
        "llama-3.2-3b": replace(_LLAMA_SMALL, hidden_size=3072, num_layers=28, num_heads=24),
        # Version 0.3, which has no sliding window.
        "mistral-7b": replace(_LLAMA_8B, family="mistral", vocab_size=32768, rope=Rope(theta=1e6), max_positions=32768),
        "qwen3-8b": replace(
            _LLAMA_8B,
            family="qwen3",
            vocab_size=151936,
            intermediate_size=12288,
            num_layers=36,
            rope=Rope(theta=1e6),
            max_positions=40960,
            norm_eps=1e-6,
            qk_norm=True,
        ),
    }
)

ANCHORS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType({"llama-3.1-8b": (0, 2, 8, 13, 14)})
"""Model -> its anchor layers in the Kascade paper. The cost of a step depends only on how many there are."""
