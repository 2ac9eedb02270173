"""Names and shapes of a checkpoint's tensors, as Hugging Face stores them."""

from tessera.models.config import ModelConfig

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def layer_name(index: int, field: str) -> str:
    """Hugging Face's name of one layer's tensor."""
    return f"model.layers.{index}.{LAYER_NAMES[field]}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, the head left out when it is tied."""
    c = config
    d, f, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {"attn_norm": (d,), "q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "mlp_norm": (d,)}
    layer |= {"gate": (f, d), "up": (f, d), "down": (d, f)}
    if c.attention_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.output_bias:
        layer |= {"o_bias": (d,)}
    if c.mlp_bias:
        layer |= {"gate_bias": (f,), "up_bias": (f,), "down_bias": (d,)}
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    shapes = {EMBED: (c.vocab_size, d), FINAL_NORM: (d,)}
    if not c.tie_embeddings:
        shapes[HEAD] = (c.vocab_size, d)
    for i in range(c.num_layers):
        shapes |= {layer_name(i, field): shape for field, shape in layer.items()}
    return shapes
