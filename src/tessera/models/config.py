"""Configuration of a decoder; `families` reads it from a Hugging Face folder, `gguf_model` from a GGUF file."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

MAX_SIZE = 2**31 - 1
"""Maximum of every size and position, because they are int32 on devices."""
ALWAYS_SHOWN = {
    "Rope": "kind theta factor low_freq_factor high_freq_factor original_max_positions beta_fast beta_slow "
    "attention_factor mscale mscale_all_dim truncate".split(),
    "ModelConfig": "family vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_positions rope norm_eps window tie_embeddings attention_bias output_bias mlp_bias qk_norm bos_id eos_ids "
    "dtype".split(),
}
"""Fields, by class, that `stable_repr` always shows. Never add one: existing plans would not match their models."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: `kind` is "default", "linear", "llama3" or "yarn"; the other fields are its parameters."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def extended_context(max_positions: int, factor: float, original: int, keys: str) -> int:
    """Return the context in tokens of a model whose rotary embedding reaches factor x original positions.

    The files' context may be that length, or still the original one, as in Qwen's instructions for YaRN.
    """
    if (reach := round(factor * original)) > MAX_SIZE:
        raise ValueError(f"{keys} extend the context to {reach} tokens: it must be at most {MAX_SIZE}")
    return max(max_positions, reach)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder. The config is hashable, so that it can be a static argument of jax.jit."""

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope = field(default_factory=Rope)
    norm_eps: float = 1e-6
    window: int | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and positive (rotary embedding pairs dimensions)")

    @property
    def groups(self) -> int:
        """Number of query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads


def stable_repr(config: Any) -> str:
    """Return repr(config) without fields that hold their default, unless they are in ALWAYS_SHOWN.

    A plan identifies its model by a hash of this text, so a new field must not change it for models without the field.
    """
    name = type(config).__name__
    shown = [f for f in fields(config) if f.name in ALWAYS_SHOWN[name] or getattr(config, f.name) != _default(f)]
    values = {f.name: getattr(config, f.name) for f in shown}
    texts = {key: stable_repr(value) if isinstance(value, Rope) else repr(value) for key, value in values.items()}
    return f"{name}({', '.join(f'{key}={text}' for key, text in texts.items())})"


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
