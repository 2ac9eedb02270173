"""Compiles every TPU kernel for every chip, head dim, dtype and tile it claims: one command, an hour on two cores.

python -m tessera.workbench.studies.sweep --chip v6e            # goes on where it stopped; --list says what is to do
python -m tessera.workbench.studies.sweep --report              # one record: what compiled, what did not and why
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from tessera.attention.contract import AttentionSpec, Kernel
from tessera.attention.dispatch import KERNELS
from tessera.core import files
from tessera.deviceless import programs
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import inspection
from tessera.workbench import evidence

HEAD_DIMS = (64, 128, 256)
TILES = (16, 32, 64, 128)
LENGTHS = MappingProxyType({"prefill": 8192, "decode": 131072})
COMMAND = "python -m tessera.workbench.studies.sweep; python -m tessera.workbench.studies.sweep --report"
CODE = ("commit", "dirty")
"""What a line says of the code that made it."""
LONG = 1 << 20
"""Index lists are streamed, so that this many tokens compile too."""
WHOLE = 131072
GRADIENT = "tpu_backward"
"""How the gradient of dense prefill is called here: no kernel of the table, dense prefill's own part."""


def cases(chips: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every case: chip, kernel, head dim, dtype, tile, length; tiles only where the role has them.

    Each kernel meets every head dim, dtype and tile at one length, and the longest calls once: 1,048,576 keys (the last
    2,048 queries of a prefill), and prefill of 131,072 tokens whole. Dense and scoring prefill also meet one query head
    a KV head, where the corner of the causal mask is longest. The gradient of dense prefill comes last.
    """
    names = ("chip", "kernel", "head_dim", "dtype", "tile", "length")
    for chip, kernel in product(chips, tpu_kernels()):
        for head_dim, dtype in product(HEAD_DIMS, kernel.dtypes):
            for tile in TILES if kernel.role != "dense" else (128,):
                yield dict(zip(names, (chip, kernel.name, head_dim, dtype, tile, LENGTHS[kernel.phase])))
        if kernel.phase == "prefill" and kernel.role != "sparse":
            for head_dim, dtype in product(HEAD_DIMS, kernel.dtypes):
                case = dict(zip(names, (chip, kernel.name, head_dim, dtype, 128, LENGTHS["prefill"])))
                yield case | {"heads": 2}
        for length in (LONG, *((WHOLE,) if kernel.phase == "prefill" else ())):
            yield dict(zip(names, (chip, kernel.name, 128, "bfloat16", 128, length)))
    for chip, head_dim, dtype in product(chips, HEAD_DIMS, ("bfloat16", "float32")):
        yield dict(zip(names, (chip, GRADIENT, head_dim, dtype, 128, LENGTHS["prefill"])))


def tpu_kernels() -> tuple[Kernel, ...]:
    """The kernels of the table that are written for TPUs."""
    return tuple(kernel for kernel in KERNELS if kernel.platform == "tpu")


def compile_case(case: Mapping[str, Any], compiler: tpu.Compiler, limit_s: float) -> dict[str, Any]:
    """The case with what became of it."""
    try:
        program = program_of(case)
    except ValueError as error:
        return {**case, "compiled": False, "error": f"refused: {error}"}
    found = compiler.compile(case["chip"], program, limit_s=limit_s)
    error = None if found.error is None else str(found.error)
    return {**case, "compiled": error is None, "error": error, "compile_s": round(found.compile_s, 1)}


def program_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The program of a case: batch 1, 8 query heads on 2 KV heads, a tenth of the tiles where sparse.

    Raises:
        ValueError: the kernel refuses the call.
    """
    if case["kernel"] == GRADIENT:
        sizes = {name: case[name] for name in ("length", "head_dim", "dtype")}
        return tpu.factory_program("tessera.deviceless.programs:tpu_gradient_call", **sizes)
    kernel = programs.kernel_named(case["kernel"])
    spec, shapes = inspection.call(
        role=kernel.role,
        phase=kernel.phase,
        batch=1,
        length=case["length"],
        heads=case.get("heads", 8),
        kv_heads=2,
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        spec=AttentionSpec(tile=case["tile"]),
        fraction=0.1,
        queries=2048 if case["length"] == LONG else None,
    )
    reason = kernel.supports(spec, shapes)
    if reason is not None:
        raise ValueError(reason)
    return tpu.attention_program(kernel.name, spec, shapes)


def identity(case: Mapping[str, Any]) -> tuple:
    """What tells two cases apart."""
    return tuple(case.get(name) for name in ("chip", "kernel", "head_dim", "dtype", "tile", "length", "heads"))


def out_of_time(line: Mapping[str, Any]) -> bool:
    """Whether the time limit ended the compiler: that says nothing of the case, and it is tried again."""
    return (line.get("error") or "").startswith("time:")


def is_done(line: Mapping[str, Any], code: Mapping[str, Any]) -> bool:
    """Whether a line is of this code: what another commit compiled, or changes nobody committed, says nothing of it."""
    same = all(line.get(name) == value for name, value in code.items())
    return same and not line.get("dirty") and not out_of_time(line)


def of_last_code(found: Sequence[dict[str, Any]], identity: Callable[[dict], Hashable]) -> list[dict[str, Any]]:
    """The last line of each case, of those that the code of the very last line made."""
    made = [[line.get(name) for name in CODE] for line in found]
    return list({identity(line): line for line, code in zip(found, made) if code == made[-1]}.values())


def of_its_code(record: evidence.Record, line: Mapping[str, Any]) -> evidence.Record:
    """The record under the code that the lines were made by, not the one checked out when they are reported."""
    made = {name: line[name] for name in CODE if name in line}
    return replace(record, code=evidence.Code(**made)) if made else record


def report(found: list[dict[str, Any]], command: str) -> evidence.Record:
    """One record of a sweep: share of the cases that compiled, per kernel and chip, and every failure.

    Args:
        found: lines of one code, one a case; `cases` in the facts counts them, `planned` those that a whole sweep
            has of these kernels.
        command: what repeats it.
    """
    kernels, every = {case["kernel"] for case in found}, list(cases(tuple(tpu.TOPOLOGIES)))
    swept = "every kernel" if kernels == {case["kernel"] for case in every} else " and ".join(sorted(kernels))
    groups: dict[str, list[bool]] = {}
    for case in found:
        groups.setdefault(f"{case['kernel']} on {case['chip']}", []).append(case["compiled"])
    facts = {
        "cases": len(found),
        "planned": sum(case["kernel"] in kernels for case in every),
        "ended_by_time": sum(map(out_of_time, found)),
        "by_kernel": {name: [sum(ok), len(ok)] for name, ok in groups.items()},
        "failures": [{k: v for k, v in case.items() if k != "compiled"} for case in found if not case["compiled"]],
    }
    what = evidence.What(op="tpu sweep", kernel="tpu", workload=f"{swept}, chip, head dim, dtype, tile")
    share = sum(case["compiled"] for case in found) / len(found)
    return of_its_code(evidence.make(what, [share], command=command, unit="fraction", facts=facts), found[-1])


def main(argv: list[str] | None = None) -> int:
    """Compile what this commit has not yet, and again what the time limit ended; 1 if anything did not compile."""
    parser = argparse.ArgumentParser(prog="python -m tessera.workbench.studies.sweep", description=main.__doc__)
    parser.add_argument("--chip", action="append", choices=tuple(tpu.TOPOLOGIES))
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("build/tpu-sweep.jsonl"))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="say what is to do, and stop")
    parser.add_argument("--report", action="store_true", help="append one record of the file's last commit to evidence")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs here, and libtpu without a chip is loud
    found = files.read_lines(options.out)
    if options.report:
        if not found:
            parser.error(f"{options.out} has no lines: compile first, without --report")
        evidence.append("evidence/tpu-compile.jsonl", report(of_last_code(found, identity), COMMAND))
        return 0
    code = asdict(evidence.code())
    done = {identity(line) for line in found if is_done(line, code)}
    wanted = [case for case in cases(options.chip or tuple(tpu.TOPOLOGIES)) if options.kernel in case["kernel"]]
    todo = [case for case in wanted if identity(case) not in done]
    random.Random(0).shuffle(todo)  # a sweep that is cut short has seen something of everything
    if options.list:
        print("\n".join(json.dumps(case) for case in todo))
        return 0
    with tpu.Compiler(niceness=options.niceness) as compiler:
        for number, case in enumerate(todo, start=1):
            result = compile_case(case, compiler, options.limit_s) | code
            found.append(result)
            files.append_line(options.out, result)
            said = " ".join(map(str, case.values()))
            print(f"{number}/{len(todo)} {said}: {result['error'] or 'ok'}"[:240], flush=True)
    return 0 if all(case["compiled"] for case in of_last_code(found, identity)) else 1


if __name__ == "__main__":
    sys.exit(main())
