"""Make golden next-token distributions: what transformers' logits processors make of random scores.

Run in the peers' environment: .venv-peers/bin/python tests/golden/make_sampling.py

sampling.npz holds `logits` [B,V], `prompts` [B,P], and per case `case<i>` float32 [B,V], the probabilities to draw
from, with its settings in `settings` (JSON, in order).
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.generation import logits_process as lp

CASES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 0.6},
    {"temperature": 1.5, "top_k": 1},
]


def main() -> None:
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=(6, 40)) * 2).astype(np.float32)
    prompts = rng.integers(0, 40, (6, 9))
    found = {}
    for index, case in enumerate(CASES):
        chain = []
        if "repetition_penalty" in case:
            chain.append(lp.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
        chain.append(lp.TemperatureLogitsWarper(case["temperature"]))
        if "top_k" in case:
            chain.append(lp.TopKLogitsWarper(case["top_k"]))
        if "top_p" in case:
            chain.append(lp.TopPLogitsWarper(case["top_p"]))
        if "min_p" in case:
            chain.append(lp.MinPLogitsWarper(case["min_p"]))
        scores = torch.tensor(logits)
        for step in chain:
            scores = step(torch.tensor(prompts), scores)
        found[f"case{index}"] = scores.softmax(-1).numpy()
    settings = json.dumps({"cases": CASES, "transformers": transformers.__version__})
    path = Path(__file__).parent / "sampling.npz"
    np.savez_compressed(path, logits=logits, prompts=prompts, settings=np.array(settings), **found)


if __name__ == "__main__":
    main()
