"""Configuration of a decoder, read from a Hugging Face config; unsupported keys are refused by name."""

from dataclasses import dataclass, field

MAX_SIZE = 2**31 - 1
"""Maximum of every size and position: on devices they are int32."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding: kind is "default", "linear", "llama3" or "yarn"; the other fields are its parameters."""

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder, static and hashable."""

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
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (rotary embedding pairs dimensions)")

    @property
    def groups(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads
