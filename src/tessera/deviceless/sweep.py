"""Compiles every TPU kernel for every chip, head dim, dtype and tile it claims: one command, hours on two cores.

python -m tessera.deviceless.sweep --chip v6e            # goes on where it stopped; --list says what is to do
python -m tessera.deviceless.sweep --report              # one record: what compiled, what did not and why
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import jax

from tessera import evidence, files
from tessera.attention.contract import AttentionSpec, Kernel
from tessera.attention.dispatch import KERNELS
from tessera.deviceless import inspection, tpu

HEAD_DIMS = (64, 128, 256)
TILES = (16, 32, 64, 128)
LENGTHS = (("prefill", 8192), ("decode", 131072))
LONG = 1 << 20
"""Index lists are streamed, so that this many tokens compile too."""


def cases(chips: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every case: chip, kernel, head dim, dtype, tile, length; tiles only where the role has them."""
    for chip, kernel, head_dim in product(chips, tpu_kernels(), HEAD_DIMS):
        length = dict(LENGTHS)[kernel.phase]
        for dtype, tile in product(kernel.dtypes, TILES if kernel.role != "dense" else (128,)):
            yield {
                "chip": chip,
                "kernel": kernel.name,
                "head_dim": head_dim,
                "dtype": dtype,
                "tile": tile,
                "length": length,
            }
        if head_dim == 128:
            yield {
                "chip": chip,
                "kernel": kernel.name,
                "head_dim": 128,
                "dtype": "bfloat16",
                "tile": 128,
                "length": LONG,
            }


def tpu_kernels() -> tuple[Kernel, ...]:
    """The kernels of the table that are written for TPUs."""
    return tuple(kernel for kernel in KERNELS if kernel.platform == "tpu")


def compile_case(case: dict[str, Any], limit_s: float, niceness: int = 0) -> dict[str, Any]:
    """The case with what became of it; a chunk of 2,048 queries where the length is extreme."""
    kernel = next(k for k in KERNELS if k.name == case["kernel"])
    spec, shapes = inspection.call(
        role=kernel.role,
        phase=kernel.phase,
        batch=1,
        length=case["length"],
        heads=8,
        kv_heads=2,
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        spec=AttentionSpec(tile=case["tile"]),
        fraction=0.1,
        queries=2048 if case["length"] == LONG else None,
    )
    reason = kernel.supports(spec, shapes)
    if reason is not None:
        return {**case, "compiled": False, "error": f"refused: {reason}"}
    program = tpu.attention_program(kernel.name, spec, shapes)
    found = tpu.compile_for(case["chip"], program, limit_s=limit_s, niceness=niceness)
    error = None if found.error is None else str(found.error)
    return {**case, "compiled": error is None, "error": error, "compile_s": round(found.compile_s, 1)}


def report(found: list[dict[str, Any]], command: str) -> evidence.Record:
    """One record of a sweep: share of the cases that compiled, per kernel and chip, and every failure."""
    groups: dict[str, list[bool]] = {}
    for case in found:
        groups.setdefault(f"{case['kernel']} on {case['chip']}", []).append(case["compiled"])
    facts = {
        "cases": len(found),
        "planned": sum(1 for _ in cases(tuple(tpu.TOPOLOGIES))),
        "by_kernel": {name: [sum(ok), len(ok)] for name, ok in groups.items()},
        "failures": [{k: v for k, v in case.items() if k != "compiled"} for case in found if not case["compiled"]],
    }
    what = evidence.What(op="tpu sweep", kernel="tpu", workload="every kernel, chip, head dim, dtype, tile")
    share = sum(case["compiled"] for case in found) / len(found)
    return evidence.make(what, [share], command=command, unit="fraction", facts=facts)


def main(argv: list[str] | None = None) -> int:
    """Compile what is not in the file yet; 1 if anything did not compile."""
    parser = argparse.ArgumentParser(prog="python -m tessera.deviceless.sweep", description=main.__doc__)
    parser.add_argument("--chip", action="append", choices=tuple(tpu.TOPOLOGIES))
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("build/tpu-sweep.jsonl"))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="say what is to do, and stop")
    parser.add_argument("--report", action="store_true", help="append one record of the file to evidence")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs here, and libtpu without a chip is loud
    found = files.read_lines(options.out)
    if options.report:
        if not found:
            parser.error(f"{options.out} has no lines: compile first, without --report")
        evidence.append("evidence/tpu-compile.jsonl", report(found, "python -m tessera.deviceless.sweep"))
        return 0
    done = [{k: c[k] for k in ("chip", "kernel", "head_dim", "dtype", "tile", "length")} for c in found]
    wanted = [case for case in cases(tuple(options.chip or tpu.TOPOLOGIES)) if options.kernel in case["kernel"]]
    todo = [case for case in wanted if case not in done]
    random.Random(0).shuffle(todo)  # a sweep that is cut short has seen something of everything
    if options.list:
        print("\n".join(json.dumps(case) for case in todo))
        return 0
    code = asdict(evidence.code())
    for number, case in enumerate(todo, start=1):
        result = compile_case(case, options.limit_s, options.niceness) | code
        found.append(result)
        files.append_line(options.out, result)
        print(f"{number}/{len(todo)} {' '.join(map(str, case.values()))}: {result['error'] or 'ok'}"[:240], flush=True)
    return 0 if all(case["compiled"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
