"""Predict the time of a layer's parts on absent TPUs. Each part has several forms, which XLA fuses differently.

    python -m lab study fusions             # compiles what is missing: minutes; --list prints what is left
    python -m lab study fusions --report    # a record per part, form and chip in evidence/

A part's time is predicted from the schedules of its operations and of its kernel, and from their bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lab import campaign
from tessera.core import files
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import fusions, predict
from tessera.measure import evidence

COMMAND = "python -m lab study fusions; python -m lab study fusions --report"
EVIDENCE = "evidence/tpu-fusions.jsonl"
OP = "part of a layer"
TPUS = tuple(tpu.TOPOLOGIES)


def _cases(part: str, forms: tuple[str, ...], chips: tuple[str, ...] = TPUS, **sizes: int) -> list[dict[str, Any]]:
    return [{"part": part, "form": form, "chip": chip, **sizes} for chip in chips for form in forms]


CASES = (
    *_cases("rotation", ("halves", "product", "none"), rows=2048),
    *(case for group, rows in ((32, 64), (128, 256)) for n in (rows, 1024)
      for case in _cases("groups", ("bfloat16", "xla", "kernel"), rows=n, group=group)),
    *_cases("inputs", ("three", "joined", "products"), rows=2048),
    *_cases("mlp", ("whole", "products"), rows=2048),
    *_cases("order", ("stored", "transposed"), rows=2048),
)  # fmt: skip
"""Parts to compile, with llama-3.1-8b's sizes. The other forms of a part are compared with its first form."""


def identity(line: Mapping[str, Any]) -> tuple:
    """Return a tuple that identifies a case: the case and its line in the file of results give the same tuple."""
    return tuple(line.get(name) for name in ("part", "form", "chip", "rows", "group"))


def compile_case(case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Compile a case and return it with cycles, bytes and predicted milliseconds."""
    settings = {name: value for name, value in case.items() if name not in ("part", "chip")}
    program = factory_program(f"tessera.deviceless.parts:{case['part']}", **settings)
    found = tpu.compile_for(case["chip"], program, limit_s=limit_s, with_fusions=True)
    if found.error is not None:
        return {**case, "error": str(found.error)}
    return {**case, "error": None, **figures(found)}


def figures(found: tpu.Compiled) -> dict[str, Any]:
    """Predict the time of a compiled part, whose operations run one after another, and then its Pallas kernels."""
    on = predict.device(found.chip)
    bandwidth = on.bytes_per_s * predict.CALIBRATED.bandwidth_share
    bytes_s, around_s = fusions.seconds(found.operations, found.fusions, on.clock_hz, bandwidth)
    kernels_ms = 0.0
    if found.schedules:
        own = replace(found, operations=())
        kernels_ms = predict.predict(own, found.executions or {}, predict.CALIBRATED).ms
    cycles = {name: fusion.cycles for name, fusion in found.fusions.items()}
    return {
        "ms": round(1e3 * around_s + kernels_ms, 6),
        "bytes_ms": round(1e3 * bytes_s, 6),
        "kernels_ms": round(kernels_ms, 6),
        "cycles": sum(cycles.values()),
        "operations": cycles,
        "temp_bytes": found.memory["temp"],
        "compile_s": round(found.compile_s, 1),
    }


def report(line: Mapping[str, Any]) -> evidence.Record:
    """Build the record of a case: the predicted milliseconds."""
    sizes = f"{line['rows']} rows" + (f" of groups of {line['group']}" if "group" in line else "")
    what = evidence.What(
        op=OP, kernel=line["form"], workload=f"{line['part']}, {sizes}, {line['chip']}", dtype="bfloat16"
    )
    facts = {name: value for name, value in line.items() if name not in ("error", "compile_s", *campaign.CODE)}
    how = evidence.How(compile_s=line["compile_s"], check="predicted from schedules; nothing runs")
    made = evidence.make(what, [line["ms"]], command=COMMAND, unit="ms", how=how, facts=facts)
    return campaign.of_its_code(made, line)


def study(options: Any) -> int:
    """Compile missing parts, or append the records; return 1 if a compilation failed."""
    if options.report:
        lines = {identity(line): line for line in campaign.lines_to_report(options.out)}
        lines = [lines[identity(case)] for case in CASES if identity(case) in lines]
        evidence.append(EVIDENCE, [report(line) for line in lines if line["error"] is None])
        return int(any(line["error"] for line in lines))
    found, code = files.read_lines(options.out), asdict(evidence.code())
    done = {identity(line) for line in found if not campaign.out_of_time(line)}
    todo = [case for case in CASES if identity(case) not in done]
    if options.list:
        print("\n".join(map(json.dumps, todo)))
        return 0
    failed = False
    for case in todo:
        line = compile_case(case, options.limit_s) | code
        files.append_line(options.out, line)
        failed |= line["error"] is not None
        said = line["error"] or f"{line['ms']:.4f} ms, {line['cycles']:,} cycles"
        print(f"{' '.join(map(str, case.values()))}: {said}"[:240], flush=True)
    return int(failed)
