"""llama.cpp's worker (xllamacpp): reads one JSON request a line from standard input, writes one JSON answer a line.

Requests: hello, load (a GGUF file), generate (greedy, from token ids), address (of its HTTP server). llama.cpp times
prompt and answer itself. With a file as its only argument, it answers one token from it once, prints its peak memory
and ends: a cold start.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import xllamacpp


class Worker:
    """Answers requests; holds the loaded model."""

    def __init__(self):
        self.server = None

    def hello(self):
        """Version of the package."""
        return {"xllamacpp": metadata.version("xllamacpp")}

    def load(self, path, context, threads, parallel=1):
        """Load a file with room for `context` tokens of `parallel` requests; no prompt is ever taken from a cache."""
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.cache_ram_mib = path, context, parallel, 0
        params.port = 0  # a free one
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        return {}

    def address(self):
        """Address of the HTTP server, which runs from `load` on."""
        return {"url": self.server.listening_address}

    def generate(self, tokens, steps):
        """Seconds of the prompt and of `steps` more tokens after the first, and the first token."""
        request = {"prompt": tokens, "n_predict": steps + 1, "temperature": 0, "n_probs": 1}
        answer = self.server.handle_completions({**request, "cache_prompt": False, "ignore_eos": True})
        if "timings" not in answer:
            raise ValueError(f"llama.cpp gave no answer to {len(tokens)} tokens: {answer}")
        timings = answer["timings"]
        if timings["prompt_n"] != len(tokens) or timings["predicted_n"] != steps + 1:
            raise ValueError(f"{timings} must count {len(tokens)} and {steps + 1} tokens")
        first = answer["choices"][0]["logprobs"]["content"][0]["id"]
        decode_s = timings["predicted_ms"] / 1000 * steps / (steps + 1)
        return {"prefill_s": timings["prompt_ms"] / 1000, "decode_s": decode_s, "token": first}


def peak_bytes():
    """Peak resident memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def main():
    """Serve until standard input closes, or answer once; a failed request is an answer with its error."""
    worker = Worker()
    if len(sys.argv) > 1 and sys.argv[1] == "once":
        _, _, path, threads, *tokens = sys.argv
        worker.load(path, len(tokens) + 64, int(threads))
        worker.generate([int(token) for token in tokens], 0)
        print(peak_bytes())
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = {name: getattr(worker, name) for name in ("hello", "load", "generate", "address")}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = calls[request.pop("call")](**request)
        except (RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
