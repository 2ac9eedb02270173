"""A peer's worker: PyTorch and Hugging Face transformers, timed inside their own process.

Runs in an environment of its own (any Python from 3.9, torch, transformers, numpy); reads one JSON request a line from
standard input and writes one JSON answer a line to standard output. Requests: hello, sdpa, load, prefill, decode.
Inputs are drawn from the request's seed by numpy's default generator, so that the other side draws the same.
"""

import json
import os
import sys
import time

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw(seed, shape):
    """Standard normal float32 numbers that any process draws alike."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class Worker:
    """Answers requests; holds the loaded model and its cache between prefill and decode."""

    def __init__(self, threads):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = None
        self.past = None
        self.last = None

    def hello(self):
        """Versions and threads."""
        try:
            import transformers

            version = transformers.__version__
        except ImportError:
            version = None
        return {
            "torch": torch.__version__,
            "transformers": version,
            "python": sys.version.split()[0],
            "threads": torch.get_num_threads(),
        }

    def sdpa(self, batch, length, heads, kv_heads, head_dim, dtype, seed, rows):
        """Seconds of causal scaled_dot_product_attention in torch's own layout [B,N,T,H], and some output rows."""
        q, k, v = (
            torch.from_numpy(draw([seed, i], (batch, length, n, head_dim)))
            .to(DTYPES[dtype])
            .transpose(1, 2)
            .contiguous()
            for i, n in enumerate((heads, kv_heads, kv_heads))
        )
        grouped = {"enable_gqa": True} if heads != kv_heads else {}
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "rows": out[0, :, rows].float().tolist()}

    def load(self, folder, dtype):
        """Load a Hugging Face folder; seconds it took."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        start = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
        return {"seconds": time.perf_counter() - start}

    def prefill(self, tokens):
        """Seconds from a token list to the first greedy token; that token, and the first few of the last logits."""
        ids = torch.tensor([tokens])
        self.past = None
        start = time.perf_counter()
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        self.last = out.logits[:, -1:].argmax(-1)
        first = int(self.last)
        seconds = time.perf_counter() - start
        self.past = out.past_key_values
        return {"seconds": seconds, "token": first, "logits": out.logits[0, -1, :16].float().tolist()}

    def decode(self, steps):
        """Seconds of greedy single-token steps on the cache of the last prefill, and the tokens."""
        tokens = []
        start = time.perf_counter()
        for _ in range(steps):
            out = self.model(input_ids=self.last, past_key_values=self.past, use_cache=True)
            self.past = out.past_key_values
            self.last = out.logits[:, -1:].argmax(-1)
            tokens.append(int(self.last))
        return {"seconds": time.perf_counter() - start, "tokens": tokens}


def main():
    """Serve until standard input closes; a failed request is an answer with its error."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr and cannot break the protocol
    worker = Worker(threads)
    calls = {name: getattr(worker, name) for name in ("hello", "sdpa", "load", "prefill", "decode")}
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("call")
        try:
            answer = calls[name](**request)
        except (RuntimeError, ValueError, TypeError, KeyError, OSError, ImportError, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
