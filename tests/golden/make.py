"""Make the golden checkpoints: tiny random models of every family, saved by transformers, with its logits and tokens.

Run in the peers' environment (torch and transformers, see lab/peers/requirements.txt):

    .venv-peers/bin/python tests/golden/make.py [folder]

Each case becomes a Hugging Face checkpoint folder with expected.npz: `tokens` [P + 64] (a random prompt, then 64 greedy
tokens) and `logits` float32 [P + 64, V] of one forward pass. Weights are large enough that every feature of the case
changes the logits. The script tries seeds until no greedy choice is a near tie.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

PROMPT, GREEDY, VOCAB = 40, 64, 64
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA = transformers.LlamaConfig
QWEN2 = transformers.Qwen2Config
QWEN3 = transformers.Qwen3Config
CASES = {
    "llama2": (LLAMA, {"num_key_value_heads": 4}),
    "llama3": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama31": (LLAMA, {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama32_tied": (
        LLAMA,
        {"num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE | {"factor": 4.0}, "tie_word_embeddings": True},
    ),
    "llama_biases": (LLAMA, {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "rope_linear": (
        LLAMA,
        {
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    ),
    "rope_yarn": (LLAMA, {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN}),
    "rope_yarn_mscale": (
        LLAMA,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        },
    ),
    "mistral_window": (transformers.MistralConfig, {"num_key_value_heads": 2, "sliding_window": 12}),
    "qwen2_biases": (QWEN2, {"num_key_value_heads": 2}),
    "qwen25_tied": (QWEN2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": (QWEN3, {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_window": (
        QWEN3,
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
        },
    ),
    "sharded": (LLAMA, {"num_key_value_heads": 2, "num_hidden_layers": 3}),
}
DTYPES = {"llama2": torch.float32, "sharded": torch.bfloat16}
"""Case -> dtype of the stored weights; all other cases use float16, at half the bytes. Models run in float32."""


def build_model(make_config, fields: dict, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """Build a random model, with random biases and norms, whose values `dtype` represents exactly."""
    torch.manual_seed(seed)
    config = make_config(**(TINY | fields), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
            weight.copy_(weight.to(dtype).to(torch.float32))
    return model


@torch.no_grad()
def run(model: torch.nn.Module, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return tokens, logits, and the smallest gap of a greedy step's two best logits, over the largest logit."""
    prompt = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (1, PROMPT)))
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0
    )
    logits = model(tokens).logits[0]
    assert tokens.shape == (1, PROMPT + GREEDY)
    best = logits[PROMPT - 1 : -1].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min() / logits.abs().max())
    return tokens[0].numpy().astype(np.int32), logits.numpy(), gap


def make_case(folder: Path, name: str) -> None:
    """Write one case's folder, with the first seed that has no near tie."""
    make_config, fields = CASES[name]
    dtype = DTYPES.get(name, torch.float16)
    for seed in range(100):
        model = build_model(make_config, fields, dtype, seed)
        tokens, logits, gap = run(model, seed)
        if gap > 1e-3:
            break
    else:
        raise RuntimeError(f"{name}: every seed has a near tie")
    shards = {"max_shard_size": "25KB"} if name == "sharded" else {}
    model.to(dtype).save_pretrained(folder / name, **shards)
    np.savez_compressed(folder / name / "expected.npz", tokens=tokens, logits=logits)
    print(f"{name}: seed {seed}, gap {gap:.4f}, {len(set(tokens[PROMPT:].tolist()))} different greedy tokens")


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads only slow down matrices this small
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for case in CASES:
        make_case(target, case)
