"""Compare planned memory and times of whole steps with the compiler's, in about an hour on two cores.

    python -m lab study planner             # resumes where it stopped; --list prints what is left
    python -m lab study planner --report    # a record per step in evidence/

Memory is judged by the compiler's figure. The compiler's times are predictions from schedules, not measurements, so the
error of a planned time says how far the roofline is from the schedule.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lab import campaign
from tessera.core import files
from tessera.core.hardware import USABLE_BYTES
from tessera.deviceless import model_inspection, plan_check
from tessera.measure import evidence
from tessera.models.catalogue import MODELS
from tessera.models.footprint import divide, weight_bytes
from tessera.runtime import roofline
from tessera.runtime.planner import fits

COMMAND = "python -m lab study planner; python -m lab study planner --report"
EVIDENCE = "evidence/tpu-planner.jsonl"
OP = "planned step"
GOAL = 0.02
"""Maximum error of planned memory, relative to the compiler's."""


SIZES = ("chip", "devices", "model", "phase", "attention", "batch", "length")
TYPES = ("weights", "cache")
"""Arguments of `load` that set number formats. A case holds only the ones that it sets; the others are None."""


def _case(*sizes: Any, **types: str) -> dict[str, Any]:
    return dict(zip(SIZES, sizes, strict=True)) | types


CASES = (
    _case("v6e", 8, "llama-3.1-8b", "decode", "dense", 4, 131072),
    _case("v6e", 8, "llama-3.1-8b", "decode", "kascade", 4, 131072),
    _case("v5e", 4, "llama-3.1-8b", "decode", "dense", 8, 8192),
    _case("v5p", 1, "llama-3.1-8b", "decode", "kascade", 8, 32768),
    _case("v7x", 2, "llama-3.1-8b", "decode", "dense", 4, 131072),
    _case("v6e", 1, "llama-3.2-1b", "decode", "kascade", 4, 32768),
    _case("v6e", 1, "llama-3.2-1b", "decode", "dense", 4, 32768),
    _case("v5e", 2, "llama-3.2-3b", "decode", "kascade", 2, 32768),
    _case("v5p", 4, "qwen3-8b", "decode", "kascade", 16, 32768),
    _case("v5e", 1, "llama-3.1-8b", "decode", "kascade", 1, 8192),
    _case("v6e", 1, "llama-3.1-8b", "decode", "dense", 1, 122880),
    _case("v5e", 8, "llama-3.1-70b", "decode", "kascade", 1, 8192),
    _case("v6e", 4, "mistral-7b", "decode", "dense", 8, 32768),
    _case("v7x", 1, "llama-3.2-3b", "decode", "kascade", 4, 131072),
    _case("v6e", 1, "llama-3.2-3b", "prefill", "dense", 1, 8192),
    _case("v6e", 8, "llama-3.1-8b", "prefill", "kascade", 1, 131072),
    _case("v5e", 8, "llama-3.1-8b", "prefill", "dense", 4, 32768),
    _case("v5p", 2, "llama-3.1-8b", "prefill", "kascade", 4, 32768),
    _case("v7x", 2, "llama-3.1-8b", "prefill", "dense", 1, 131072),
    _case("v6e", 8, "llama-3.1-8b", "decode", "dense", 1, 8192),
    _case("v6e", 8, "llama-3.1-8b", "decode", "dense", 1, 8192, weights="int8"),
    _case("v6e", 8, "llama-3.1-70b", "decode", "kascade", 4, 131072, weights="int8", cache="int8"),
)
"""Steps to compile. The compiler refuses two for lack of memory: 8B on one v5e, and 70B on eight v5e."""


def call_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `inspect_step` for a case, with the engine's chunk size and a tenth of the keys."""
    fixed = {"queries": roofline.CHUNK, "tile": 128, "query_tile": 32, "fraction": 0.1}
    return fixed | {name: case[name] for name in ("phase", "attention", "batch", "length", *TYPES) if name in case}


def identity(line: Mapping[str, Any]) -> tuple:
    """Return a tuple that identifies a case: the case and its line in the file of results give the same tuple."""
    return tuple(line.get(name) for name in (*SIZES, *TYPES))


def words(case: Mapping[str, Any]) -> str:
    """Return the name of a step in its record."""
    types = "".join(f", {case[name]} {name}" for name in TYPES if name in case)
    sizes = f"B {case['batch']} S {case['length']}, {case['devices']} x {case['chip']}"
    return f"{case['model']} {case['phase']} {sizes}{types}"


def compile_case(case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Compile a case and return it with the compiler's results."""
    found = model_inspection.inspect_step(
        case["chip"], case["model"], case["devices"], limit_s=limit_s, **call_of(case)
    )
    names = ("compiled", "error", "hbm_bytes", "memory", "predicted_ms", "parts_ms", "compile_s")
    said = found.json()
    return {**case, **{name: said[name] for name in names}, "kernels": said["attention"]}


def speed(case: Mapping[str, Any], length: int) -> roofline.Speed:
    """Predict the speed of a case's model at `length` tokens, with unrolled layers, as `load` runs them."""
    config = MODELS[case["model"]]
    policy = roofline.recipe(config, case["model"])
    sizes = {name: case[name] for name in ("chip", "devices", "batch")}
    question = roofline.Question(config=config, policy=policy, length=length, **sizes)
    types = plan_check.types_of(config, case)
    return roofline.speed(question, types, policy if case["attention"] == "kascade" else None)


def planned_ms(case: Mapping[str, Any]) -> float:
    """Predict a compiled step's milliseconds: the roofline time, plus the time of the copies that its scan makes.

    A prefill step is the prompt's last chunk. Its roofline time is the whole prompt's minus the earlier chunks'.
    """
    config, chip = MODELS[case["model"]], roofline.chip(case["chip"])
    step = plan_check.planned(config, case["chip"], case["devices"], call_of(case))
    moved = step.cache
    if case["chip"] in plan_check.LAID_OUT_AGAIN:
        types = plan_check.types_of(config, case)
        kinds = weight_bytes(config, types=types, division=divide(config, case["devices"]))
        moved += kinds["attention"] + kinds["mlp"]
    copies_ms = 2e3 * moved / (chip.bytes_per_s / chip.devices * roofline.BANDWIDTH_SHARE)
    length = case["length"]
    if case["phase"] == "decode":
        return speed(case, length).decode_ms + copies_ms
    before = speed(case, length - roofline.CHUNK).prefill_s if length > roofline.CHUNK else 0.0
    return 1e3 * (speed(case, length).prefill_s - before) + copies_ms


def report(line: Mapping[str, Any]) -> evidence.Record:
    """Build a case's record: planned memory / the compiler's. If the compiler refused the step, planned memory / the
    chip's usable memory."""
    config = MODELS[line["model"]]
    mine = plan_check.planned(config, line["chip"], line["devices"], call_of(line))
    verdict = fits(mine, USABLE_BYTES[line["chip"]])
    facts = {"planned_bytes": mine.total, "planned": asdict(mine), "fits": verdict, "refused": line["error"]}
    facts |= {name: line[name] for name in ("hbm_bytes", "memory", "predicted_ms", "parts_ms", "kernels")}
    if line["predicted_ms"]:
        facts["planned_ms"] = round(planned_ms(line), 4)
    if line["phase"] == "decode" and line["predicted_ms"]:
        facts["decode_ms"] = round(speed(line, line["length"]).decode_ms, 4)
        facts |= {name: line.get(name) for name in TYPES}
    what = evidence.What(op=OP, kernel=line["attention"], workload=words(line), dtype=config.dtype)
    ratio = mine.total / (line["hbm_bytes"] or USABLE_BYTES[line["chip"]])
    how = evidence.How(compile_s=line["compile_s"], check="the compiler's memory; its refusal is of the usable bytes")
    made = evidence.make(what, [ratio], command=COMMAND, unit="ratio", how=how, facts=facts)
    return campaign.of_its_code(made, line)


def good(line: Mapping[str, Any]) -> bool:
    """Return whether planned memory was right: within GOAL, or "does not fit" where the compiler refused the step."""
    record = report(line)
    if line["hbm_bytes"] is None:
        return not record.facts["fits"]
    return abs(record.median - 1) <= GOAL


def study(options: Any) -> int:
    """Compile missing cases, or append records and return 1 if the planner was wrong."""
    if options.report:
        lines = {identity(line): line for line in campaign.lines_to_report(options.out)}
        lines = [lines[identity(case)] for case in CASES if identity(case) in lines]
        evidence.append(EVIDENCE, [report(line) for line in lines])
        return 0 if all(map(good, lines)) else 1
    found, code = files.read_lines(options.out), asdict(evidence.code())
    done = {identity(line) for line in found if not campaign.out_of_time(line)}
    todo = [case for case in CASES if identity(case) not in done]
    if options.list:
        print("\n".join(map(json.dumps, todo)))
        return 0
    for case in todo:
        line = compile_case(case, options.limit_s) | code
        files.append_line(options.out, line)
        held = line["error"] or f"{report(line).median:.4f} of the compiler's memory"
        print(f"{' '.join(map(str, case.values()))}: {held}"[:240], flush=True)
    return 0
