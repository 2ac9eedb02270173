"""Open damaged models for `fuzz`, in a process that may crash: one JSON request and one reply per line."""

import hashlib
import json
import math
import resource
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tessera

LIMIT_BYTES = 2 << 30
"""Bytes of address space that this process, once ready, may add to open a model."""
TEXT = "Hello <|end|> w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld, 12345"


def main() -> int:
    """Open the models named on the command line, so that their programs are compiled. Then answer requests until the
    input ends."""
    for path in sys.argv[1:]:
        inspect(Path(path))
    limit_memory()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime + request["limit_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        print(json.dumps(answer(Path(request["path"]))), flush=True)
    return 0


def limit_memory() -> None:
    """Limit this process to its current address space plus LIMIT_BYTES."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def answer(path: Path) -> dict[str, Any]:
    """Open one model; return the result of `inspect`, or a description of the error."""
    with Caught() as caught:
        return {"outcome": "loaded", **inspect(path)}
    return described(caught.error)


class Caught:
    """Context manager that catches and stores any error of its block, even a Rust panic, which is not an Exception."""

    error: BaseException | None = None

    def __enter__(self) -> "Caught":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


def described(error: BaseException) -> dict[str, Any]:
    """Describe an error: its type, its text, and whether this library raised it."""
    last, library = Path(traceback.extract_tb(error.__traceback__)[-1].filename), Path(tessera.__file__).parent
    own = last.is_relative_to(library) and "studies" not in last.relative_to(library).parts
    return {"outcome": "refused", "type": type(error).__name__, "said": str(error)[:5000], "own": own}


def inspect(path: Path) -> dict[str, Any]:
    """Load a model, run it on three tokens, and run its tokenizer.

    A model without a plan runs uncompiled, since each damaged value would cost another compilation. A model with a plan
    runs compiled, since Kascade does not run otherwise.
    """
    folder = path if path.is_dir() else path.parent
    has_plan = (folder / "plan.json").exists()
    with jax.disable_jit(not has_plan):
        model = tessera.load(path, attention="kascade" if has_plan else "dense")
        length = min(3, model.config.max_positions)
        logits = np.asarray(model.logits([[65, 66, 67][:length]]))
        ids, text = [], ""
        if model.tokenizer is not None:
            ids = model.tokenizer.encode(TEXT)
            text = model.tokenizer.decode(ids)
            model.tokenizer.write(folder.parent)
        return {
            "finite": bool(np.isfinite(logits).all()),
            "logits": hashlib.sha256(logits.tobytes()).hexdigest()[:16],
            "ids": ids,
            "text": text,
            "config": asdict(model.config),
        }


if __name__ == "__main__":
    sys.exit(main())
