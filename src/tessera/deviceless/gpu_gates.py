"""The gates of the Hopper kernels that need no GPU: lowered for CUDA, compiled to machine code, and the report read.

    python -m tessera.deviceless.gpu_gates           # every kernel and configuration; goes on where it stopped
    python -m tessera.deviceless.gpu_gates --list    # what is to do
    python -m tessera.deviceless.gpu_gates --report  # a record per kernel and configuration into evidence/

A call passes if it compiles, its kernels spill nothing, touch no local memory and fit the shared memory of a block, and
one of them multiplies on the tensor cores (HGMMA) and loads by the copy engine (UTMALDG) or 16 bytes a thread
(LDGSTS.128).
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from tessera import evidence, files, hardware
from tessera.attention import gpu_cudnn
from tessera.attention.contract import TILES, AttentionSpec, Kernel, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.deviceless import gpu, inspection, sass, sweep, tpu

COMMAND = "python -m tessera.deviceless.gpu_gates; python -m tessera.deviceless.gpu_gates --report"
CHIP = "h200"
SHARED_BYTES = hardware.chip(CHIP).on_chip_bytes
HEAD_DIMS = (64, 128, 256)
MASKS = MappingProxyType(
    {"causal": {}, "both ways": {"causal": False}, "window": {"window": 1000}, "softcap": {"softcap": 30.0}}
)
PLAIN = "causal"
GROUPS = (4, 1, 7, 16)
"""Query heads per KV head; others than the first only with the default blocks, causal, in the first dtype."""
LENGTHS = MappingProxyType({"prefill": 8192, "decode": 131072})
ODD = MappingProxyType({"query_tile": 12, "length": 8191})
"""Sizes that divide nothing, for the default blocks of prefill."""
KV_HEADS = 2

WATCHED = (
    "HGMMA UTMALDG UTMASTG LDGSTS LDGSTS.128 LDL STL LDG STG LDS STS LDSM STSM BAR SYNCS MUFU FFMA FMUL FADD FMNMX "
    "SHFL WARPGROUP"
).split()
"""Instructions that a stored report counts."""


def broken(report: sass.Report) -> list[str]:
    """What the kernel's report breaks, each with the line that says so; empty if it passes."""
    found = []
    if any(report.spill_bytes) or report.stack_bytes:
        found.append(f"registers are spilled: {report.line('bytes stack frame')!r}")
    if report.local:
        found.append(f"local memory is touched, {len(report.local)} times: {report.local[0]!r} is the first")
    if report.shared_bytes > SHARED_BYTES:
        found.append(f"{report.shared_bytes} bytes of shared memory, a block has {SHARED_BYTES}")
    if "Performance Loss" in report.report:
        found.append(f"products wait for each other: {report.line('Performance Loss')!r}")
    return found


def broken_program(kernels: tuple[sass.Report, ...]) -> list[str]:
    """What the kernels of one attention call break: each its own, and what one of them must have."""
    found = [f"{report.kernel}: {text}" for report in kernels for text in broken(report)]

    def has(*names: str) -> bool:
        return any(report.instructions.get(name) for report in kernels for name in names)

    if not has("HGMMA"):
        found.append("no kernel multiplies on the tensor cores: HGMMA is missing from the disassembly")
    if not has("UTMALDG", "LDGSTS.128"):
        found.append("no kernel loads by the copy engine or 16 bytes a thread: UTMALDG and LDGSTS.128 are missing")
    return found


def gpu_kernels() -> tuple[Kernel, ...]:
    """The kernels of the table that are written in Mosaic for NVIDIA GPUs; cuDNN's is compiled on a GPU alone."""
    return tuple(kernel for kernel in KERNELS if kernel.platform == "gpu" and kernel not in gpu_cudnn.KERNELS)


def call(case: Mapping[str, Any]) -> tuple[AttentionSpec, Shapes]:
    """(spec, shapes) of a case."""
    kernel = kernel_of(case)
    return inspection.call(
        role=kernel.role,
        phase=kernel.phase,
        batch=1,
        length=case.get("length", LENGTHS[kernel.phase]),
        heads=case["group"] * KV_HEADS,
        kv_heads=KV_HEADS,
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        spec=AttentionSpec(tile=case["tile"], query_tile=case["query_tile"], **MASKS[case["mask"]]),
        fraction=0.1,
    )


def kernel_of(case: Mapping[str, Any]) -> Kernel:
    """The kernel of a case."""
    return next(kernel for kernel in KERNELS if kernel.name == case["kernel"])


def cases() -> Iterator[dict[str, Any]]:
    """Every case: kernel, head dim, dtype, tile, mask and configuration (None is the default), and other groups.

    Default blocks meet every dtype, tile and mask. Every other configuration meets every head dim and tile causally in
    the first dtype, and every mask at one of the tiles and in one of the dtypes, in turn: a dtype changes the names of
    instructions, not their registers. What a kernel refuses is left out.
    """
    for kernel, head_dim in product(gpu_kernels(), HEAD_DIMS):
        tiles = TILES if kernel.role != "dense" else (128,)
        for (number, mask), (at, tile) in product(enumerate(MASKS), enumerate(tiles)):
            case = {"kernel": kernel.name, "head_dim": head_dim, "dtype": kernel.dtypes[0], "tile": tile}
            case |= {"query_tile": 32, "mask": mask, "group": GROUPS[0], "config": None}
            spec, shapes = call(case)
            if kernel.supports(spec, shapes) is not None:
                continue
            yield from ({**case, "dtype": dtype} for dtype in kernel.dtypes)
            if mask == PLAIN:
                if kernel.phase == "prefill":
                    yield {**case, **ODD}
                others = ({**case, "group": group} for group in GROUPS[1:])
                yield from (other for other in others if kernel.supports(*call(other)) is None)
            default = kernel.default_config(spec, shapes)
            for turn, config in enumerate(c for c in kernel.search_space(spec, shapes) if c != default):
                if mask == PLAIN:
                    yield {**case, "config": asdict(config)}
                elif (turn + number) % len(tiles) == at:
                    dtype = kernel.dtypes[(turn + number) % len(kernel.dtypes)]
                    yield {**case, "dtype": dtype, "config": asdict(config)}


def first_cases() -> Iterator[dict[str, Any]]:
    """The fast subset: each kernel's default blocks on one head dim, dtype, tile and mask."""
    for kernel in gpu_kernels():
        case = {"kernel": kernel.name, "head_dim": 128, "dtype": kernel.dtypes[0], "query_tile": 32}
        case |= {"mask": "causal", "group": GROUPS[0], "config": None}
        tiles = ({**case, "tile": tile} for tile in reversed(TILES))
        yield next(c for c in tiles if kernel.supports(*call(c)) is None)


def spread_cases(first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A few cases of a kernel that hold each of its head dims, dtypes, tiles and masks at least once."""
    dtypes, tiles, masks = cycle(kernel_of(first).dtypes), cycle(reversed(TILES)), cycle(MASKS)
    for head_dim, _ in product(HEAD_DIMS, range(2)):
        case = {**first, "head_dim": head_dim, "dtype": next(dtypes), "mask": next(masks)}
        wanted = ({**case, "tile": next(tiles)} for _ in TILES)
        case = next((c for c in wanted if kernel_of(c).supports(*call(c)) is None), None)
        if case is not None:
            yield case


def urgency(case: Mapping[str, Any]) -> int:
    """Defaults first, then every configuration in the plainest call, then the rest."""
    plain = case["mask"] == PLAIN and case["dtype"] == kernel_of(case).dtypes[0]
    return 0 if case["config"] is None else 1 if plain else 2


def run(case: Mapping[str, Any], compiler: gpu.Compiler, limit_s: float = 300.0) -> dict[str, Any]:
    """The case with what became of it: broken (sentences, empty if it passes) and a report per kernel."""
    program = tpu.attention_program(case["kernel"], *call(case), case["config"])
    found = compiler.compile(program, limit_s=limit_s)
    failed = [str(found.error)] if found.error else broken_program(found.kernels)
    return {
        **case,
        "settings": found.settings,
        "error": str(found.error) if found.error else None,
        "broken": [f"{case['kernel']} {found.settings or case['config']}: {text}" for text in failed],
        "compile_s": round(found.compile_s, 1),
        "temp_bytes": found.memory.get("temp"),
        "kernels": [stored(report) for report in found.kernels],
    }


def stored(report: sass.Report) -> dict[str, Any]:
    """A report as a record holds it."""
    names = ("kernel", "registers", "spill_bytes", "shared_bytes", "barriers", "blocks", "threads")
    counts = {name: report.instructions.get(name, 0) for name in WATCHED}
    return {name: getattr(report, name) for name in names} | {"instructions": counts}


def identity(case: Mapping[str, Any]) -> str:
    """What tells two cases apart."""
    names = ("kernel", "head_dim", "dtype", "tile", "query_tile", "mask", "group", "config", "length")
    return json.dumps([case.get(name) for name in names])


def records(found: list[dict[str, Any]], command: str) -> list[evidence.Record]:
    """One record per kernel and configuration: the share of its cases that pass, what they break, their reports.

    `planned` and `tried` in the facts count the cases of the kernel, over all its configurations.
    """
    planned, tried = (Counter(case["kernel"] for case in some) for some in (cases(), found))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in found:
        groups.setdefault((case["kernel"], case["settings"] or json.dumps(case["config"])), []).append(case)
    made = []
    for (kernel, settings), members in groups.items():
        names = ("head_dim", "dtype", "tile", "mask", "group")
        passed = [not member["broken"] for member in members]
        facts = {
            "cases": len(members),
            "planned": planned[kernel],
            "tried": tried[kernel],
            "ended_by_time": sum(map(sweep.out_of_time, members)),
            "broken": sorted({text for member in members for text in member["broken"]})[:20],
            "reports": [[*(member[name] for name in names), member["kernels"]] for member in members],
        }
        what = evidence.What(op="gpu gates", kernel=kernel, workload=f"{settings}, {CHIP}")
        how = evidence.How(iterations=len(members), check="compiled without a GPU, the report read")
        share = sum(passed) / len(passed)
        record = evidence.make(what, [share], command=command, unit="fraction", how=how, facts=facts)
        made.append(sweep.of_its_code(record, members[-1]))
    return made


def main(argv: list[str] | None = None) -> int:
    """Compile what this commit has not yet, and again what the time limit ended; 1 if anything is broken."""
    parser = argparse.ArgumentParser(prog="python -m tessera.deviceless.gpu_gates", description=main.__doc__)
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-gates.jsonl"))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--most", type=int, help="stop after this many")
    parser.add_argument("--list", action="store_true", help="say what is to do, and stop")
    parser.add_argument("--report", action="store_true", help="append the records of the file to evidence")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs here
    found = files.read_lines(options.out)
    if options.report:
        if not found:
            parser.error(f"{options.out} has no lines: compile first, without --report")
        planned = set(map(identity, cases()))  # a search space may have lost what broke since
        made = records([x for x in sweep.of_last_code(found, identity) if identity(x) in planned], COMMAND)
        evidence.append("evidence/gpu-gates.jsonl", made)
        return 0
    code = asdict(evidence.code())
    done = {identity(case) for case in found if sweep.is_done(case, code)}
    todo = [case for case in cases() if options.kernel in case["kernel"] and identity(case) not in done]
    random.Random(0).shuffle(todo)  # a run that is cut short has seen something of everything
    todo.sort(key=urgency)
    if options.list:
        print("\n".join(json.dumps(case) for case in todo))
        return 0
    with gpu.Compiler(CHIP, niceness=options.niceness) as compiler:
        for number, case in enumerate(todo[: options.most], start=1):
            result = run(case, compiler, options.limit_s) | code
            found.append(result)
            files.append_line(options.out, result)
            said = "; ".join(result["broken"]) or "ok"
            print(f"{number}/{len(todo)} {identity(case)}: {said}"[:300], flush=True)
    return 1 if any(case["broken"] for case in sweep.of_last_code(found, identity)) else 0


if __name__ == "__main__":
    sys.exit(main())
