"""Compare the predicted times of a TPU kernel with times that others measured on real chips.

Tokamax ships median times of its TPU attention kernel, measured on v5p, v6e and v7x, with the block sizes of each. This
study compiles the same kernel with the same blocks, predicts its time and compares the two times. It needs the
environment that `make peers-tpu` builds, and Tokamax's timings. The wheel in that environment holds only the timings of
v7x; the Tokamax repository's folder tokamax/data/autotuning holds those of all chips. A point is a measured call with
its block sizes. Compiling every point takes hours on two cores, so the study resumes where it stopped.

    make peers-tpu TIMINGS=FOLDER                                   # all chips, and the report
    python -m lab study tpu-validation --chip v6e --timings FOLDER        # one chip
    python -m lab study tpu-validation --report --timings FOLDER
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.optimize

from lab import campaign
from tessera.core import files
from tessera.deviceless import hlo
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict, schedule
from tessera.measure import evidence

PEER_PYTHON = Path(".venv-tokamax/bin/python")
FILE = "pallas_mosaic_tpu_flash_attention.json"
COMMAND = "make peers-tpu TIMINGS=FOLDER"
WHERE = "the Tokamax repository's folder tokamax/data/autotuning"
CALIBRATION = ("v5p", "v6e")
"""Chips to whose times the prediction's constants are fitted. v7x is only compared."""
FITTED = " and ".join(CALIBRATION)
MEDIAN_GOAL, P90_GOAL, RANK_GOAL = 0.05, 0.12, 0.99
"""Goals: maximum of the median and of the 90th percentile of |predicted / measured - 1|, and minimum of the rank
correlation."""
BIG_BLOCK = 4 << 20
"""Scores per block above which the compiler takes minutes."""
FOLDERS = MappingProxyType({"v5p": "tpu_v5", "v6e": "tpu_v6_lite", "v7x": "tpu7x"})


def points(timings: Path, chip: str) -> Iterator[dict[str, Any]]:
    """Yield the measured calls of one chip: shapes, flags, block sizes, median milliseconds."""
    table = json.loads((timings / FOLDERS[chip] / FILE).read_text())
    for key, measured in table.items():
        call = json.loads(key)
        for config, result in measured.items():
            yield {
                "chip": chip,
                **{name: _sizes(call[name]) for name in ("q", "k", "v")},
                "is_causal": call["mask"]["is_causal"],
                "return_residuals": call["return_residuals"],
                "config": json.loads(config),
                "measured_ms": statistics.median(result["evaluation_times_ms"]),
            }


def _sizes(text: str) -> list[int]:
    """Parse the sizes in "bf16[1,16384,16,128]"."""
    return [int(size) for size in text[text.index("[") + 1 : -1].split(",")]


def spread(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order the points so that any prefix of them covers head dims, masks, lengths and residuals evenly.

    Points with big blocks, which take minutes to compile, come last.
    """

    def scatter(index):  # bit reversal: halves, quarters, ...
        return int(f"{index:010b}"[::-1], 2)

    order = sorted(range(len(found)), key=lambda i: (is_big(found[i]), scatter(i)))
    return [found[i] for i in order]


def is_big(point: Mapping[str, Any]) -> bool:
    """Return whether a step of the kernel has more scores than BIG_BLOCK."""
    return point["config"]["block_q"] * point["config"]["block_kv"] > BIG_BLOCK


def identity(point: dict[str, Any]) -> str:
    """Return a text that identifies a point: the point and its line in the file of results give the same text."""
    return json.dumps([point[n] for n in ("chip", "q", "k", "v", "is_causal", "return_residuals", "config")])


def collect(chip: str, timings: Path, out: Path, limit_s: float, most: int | None) -> None:
    """Compile the points that `out` lacks and append each with its schedule, one JSON object per line."""
    done, code = {identity(point) for point in files.read_lines(out)}, asdict(evidence.code())
    todo = [p for p in spread(list(points(timings, chip))) if identity(p) not in done]
    for number, point in enumerate(todo[:most], start=1):
        line = compile_point(point, limit_s) | code
        files.append_line(out, line)
        print(
            f"{chip} {number}/{len(todo)} {point['q']} {line['compile_s']:.0f} s {line['error'] or ''}"[:200],
            flush=True,
        )


def compile_point(point: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Compile a point and return it with its schedule, operations and memory."""
    names = ("q", "k", "v", "is_causal", "return_residuals", "config")
    program = factory_program("tokamax_splash:forward", **{name: point[name] for name in names})
    paths = [str(Path(__file__).parents[1] / "peers")]
    compiled = tpu.compile_for(point["chip"], program, python=str(PEER_PYTHON), paths=paths, limit_s=limit_s)
    line = {**point, "compile_s": round(compiled.compile_s, 1), "error": str(compiled.error or "") or None}
    for found in compiled.schedules:
        line["regions"] = {r.name: vars(r) | {"slots": dict(r.slots)} for r in found.regions}
        line["vmem_bytes"] = found.vmem_bytes
    line["operations"] = [[o.name, o.opcode, o.bytes, o.cycles] for o in compiled.operations]
    line["memory"] = dict(compiled.memory)
    return line


def executions(point: Mapping[str, Any]) -> dict[str, float]:
    """Return how often each part of the kernel runs. The grid has one step per block with a visible key."""
    (batch, rows, heads, _), keys, config = point["q"], point["k"][1], point["config"]
    block_q, block_kv = config["block_q"], config["block_kv"]
    visible = [
        (i, j)
        for i in range(rows // block_q)
        for j in range(keys // block_kv)
        if not point["is_causal"] or j * block_kv < (i + 1) * block_q
    ]
    full = sum((j + 1) * block_kv - 1 <= i * block_q for i, j in visible) if point["is_causal"] else 0
    calls, row_blocks = batch * heads, rows // block_q
    steps = calls * len(visible)
    return {
        "step": steps,
        "full": calls * full,
        "masked": steps - calls * full,
        "init": calls * row_blocks,
        "end": calls * row_blocks,
        predict.BYTES: float(moved_bytes(point, steps)),
    }


def moved_bytes(point: Mapping[str, Any], steps: int) -> int:
    """Return the bytes moved: q, out and statistics once, and K and V once per step.

    If one block holds all keys, K and V move only once per query head.
    """
    (batch, rows, heads, dim), config, value_dim = point["q"], point["config"], point["v"][3]
    query, out, key, value = (
        size if layout == 2 else -(-size // 128) * 128  # layout 2 has the sequence in the lanes: the dim is not padded
        for size, layout in (
            (dim, config["q_layout"]),
            (value_dim, 1),
            (dim, config["k_layout"]),
            (value_dim, config["v_layout"]),
        )
    )
    row_bytes = 2 * (query + out) + 4 * 128 * (2 * point["return_residuals"] + point["is_causal"])
    loads = batch * heads if point["k"][1] == config["block_kv"] else steps
    return batch * heads * rows * row_bytes + 2 * loads * config["block_kv"] * (key + value)


def predicted_ms(point: Mapping[str, Any], overheads: predict.Overheads) -> float:
    """Return the milliseconds that `prediction` finds."""
    return prediction(point, overheads).ms


def prediction(point: Mapping[str, Any], overheads: predict.Overheads) -> predict.Prediction:
    """Predict a point's time from its collected schedule."""
    regions = tuple(schedule.Region(**region) for region in point["regions"].values())
    units = dict.fromkeys(regions[0].slots, 1)
    kernel = schedule.Schedule(kernel="splash", capacity=units, regions=regions, vmem_bytes=0, smem_bytes=0)
    names = ("name", "opcode", "bytes", "cycles")
    operations = tuple(hlo.Operation(**dict(zip(names, values))) for values in point["operations"])
    compiled = tpu.Compiled(
        chip=point["chip"], error=None, compile_s=0, memory={}, schedules=(kernel,), operations=operations
    )
    return predict.predict(compiled, executions(point), overheads)


def summary(found: list[dict[str, Any]], overheads: predict.Overheads) -> dict[str, Any]:
    """Summarise predicted / measured: its median, the median and p90 of |ratio - 1|, and the rank correlation."""
    ratios = [predicted_ms(p, overheads) / p["measured_ms"] for p in found]
    errors = [abs(r - 1) for r in ratios]
    return {
        "points": len(found),
        "median_ratio": round(statistics.median(ratios), 4),
        "median_absolute_error": round(statistics.median(errors), 4),
        "p90_absolute_error": round(float(np.quantile(errors, 0.9)), 4),
        "spearman": round(spearman([r * p["measured_ms"] for r, p in zip(ratios, found)], found), 5),
    }


def spearman(predictions: list[float], found: list[dict[str, Any]]) -> float:
    """Return the rank correlation of predicted and measured times."""
    a, b = (np.argsort(np.argsort(x)) for x in (predictions, [p["measured_ms"] for p in found]))
    return float(np.corrcoef(a, b)[0, 1]) if len(found) > 1 else 1.0


def records(
    found: list[dict[str, Any]], command: str, planned: Mapping[str, list[dict[str, Any]]] = MappingProxyType({})
) -> list[evidence.Record]:
    """Build one record per chip, one for the chips in CALIBRATION, and one for all chips.

    The record for CALIBRATION also fits the constants again.

    Each record holds predicted / measured of its points and a summary of their errors. A record is left out if one of
    its chips has no points. `planned` maps each chip whose timings are available to all of its points. The facts count
    planned and compiled points, first all of them and then those with big blocks.
    """
    made = []
    for name, chips in (*((chip, (chip,)) for chip in FOLDERS), (FITTED, CALIBRATION), ("all", tuple(FOLDERS))):
        own = [p for p in found if p["chip"] in chips and not p["error"]]
        if {p["chip"] for p in own} != set(chips):
            continue
        dims = sorted({p["q"][3] for p in own})
        facts = {
            **summary(own, predict.CALIBRATED),
            "by_head_dim": {str(d): summary([p for p in own if p["q"][3] == d], predict.CALIBRATED) for d in dims},
            "no_fitted_constant": summary(own, predict.NOMINAL),
            "constants": vars(predict.CALIBRATED),
            "clock_hz": {chip: predict.device(chip).clock_hz for chip in chips},
            "not_compiled": sum(p["chip"] in chips and bool(p["error"]) for p in found),
        }
        if all(chip in planned for chip in chips):
            wanted = [p for chip in chips for p in planned[chip]]
            facts["planned"] = len(wanted)
            facts["big_blocks"] = {"compiled": sum(map(is_big, own)), "planned": sum(map(is_big, wanted))}
        if name == FITTED:
            facts["fitted_again"] = vars(fit([parts(p) for p in own]))
        if name in FOLDERS:
            facts["each"] = [describe(p) for p in own]
        what = evidence.What(
            op="prediction",
            kernel="tokamax splash attention",
            workload=f"shipped timings, {name}",
            dtype="bfloat16",
            title=f"predicted / measured time, {name}",
        )
        ratios = [predicted_ms(p, predict.CALIBRATED) / p["measured_ms"] for p in own]
        how = evidence.How(iterations=len(own), check="constants fitted on v5p and v6e only, v7x untouched")
        made.append(evidence.make(what, ratios, command=command, how=how, unit="fraction", facts=facts))
    return made


def describe(point: Mapping[str, Any]) -> list[Any]:
    """Return a point as a list for a record: shape of q, KV heads, causal, residuals, blocks, predicted ms, predicted /
    measured, and the point's `parts`, from which the constants can be fitted again."""
    ms = predicted_ms(point, predict.CALIBRATED)
    blocks = [point["config"][name] for name in ("block_q", "block_kv", "block_kv_compute")]
    flags = [point["is_causal"], point["return_residuals"]]
    said = [point["q"], point["k"][2], *flags, blocks, round(ms, 4), round(ms / point["measured_ms"], 4)]
    return [*said, [float(f"{part:.6g}") for part in parts(point)]]


def parts(point: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    """Return the five numbers that a fit needs.

    They are the milliseconds of computing at nominal constants, the grid steps per core, the milliseconds to move the
    kernel's bytes and those to move the other operations' bytes, both at nominal bandwidth, and the measured
    milliseconds.
    """
    plain = prediction(point, predict.NOMINAL)
    a_ms_a_step = prediction(point, replace(predict.NOMINAL, step_s=1e-3))
    steps = a_ms_a_step.compute_ms - plain.compute_ms
    return plain.compute_ms, steps, plain.dma_ms, plain.around_ms, point["measured_ms"]


def fit(found: Sequence[Sequence[float]]) -> predict.Overheads:
    """Fit the constants that minimize the mean of |log(predicted / measured)| over points given by their `parts`."""
    cores, steps, moved, around, measured = np.asarray(found, float).T

    def error(constants: np.ndarray) -> float:
        stall, step_us, share = constants
        predicted = np.maximum(stall * cores + 1e-3 * step_us * steps, moved / share) + around / share
        return float(np.mean(np.abs(np.log(predicted / measured))))

    limits = ((0.5, 2.0), (0.0, 5.0), (0.3, 1.0))
    best = scipy.optimize.differential_evolution(error, limits, rng=0, tol=1e-8, maxiter=300, polish=False).x
    return predict.Overheads(stall=float(best[0]), step_s=1e-6 * float(best[1]), bandwidth_share=float(best[2]))


def picture(found: list[dict[str, Any]], path: Path) -> None:
    """Plot predicted against measured times, and their ratio, by chip and head dim."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    scatter, ratio = figure.subplots(1, 2)
    colors = {"v5p": "tab:green", "v6e": "tab:blue", "v7x": "tab:red"}
    marks = {64: "o", 128: "s", 192: "D", 256: "^"}
    for chip, color in colors.items():
        for dim, mark in marks.items():
            own = [p for p in found if p["chip"] == chip and p["q"][3] == dim and not p["error"]]
            if not own:
                continue
            x = [p["measured_ms"] for p in own]
            y = [predicted_ms(p, predict.CALIBRATED) for p in own]
            look = {"color": color, "marker": mark, "s": 18, "alpha": 0.7, "linewidths": 0}
            scatter.scatter(x, y, label=f"{chip}, H {dim}", **look)
            ratio.scatter(x, [b / a for a, b in zip(x, y)], **look)
    ends = scatter.get_xlim()
    scatter.plot([0.3, 30], [0.3, 30], "k-", linewidth=0.7)
    scatter.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", title="Tokamax's kernel")
    scatter.set_xlim(min(0.3, ends[0]) if ends[0] > 0 else 0.3, 30)
    scatter.legend(fontsize=7, frameon=False)
    ratio.axhspan(0.95, 1.05, color="0.9", linewidth=0, zorder=0)
    ratio.axhline(1.0, color="k", linewidth=0.7)
    ratio.set(xscale="log", xlabel="measured, ms", ylim=(0.7, 1.3), title="predicted / measured (band: 5 %)")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def study(options: Any) -> int:
    """Collect schedules or compare times; return 1 if the chip has no timings."""
    timings = options.timings or installed()
    if options.report:
        found = campaign.lines_to_report(options.out)
        planned = {chip: list(points(timings, chip)) for chip in FOLDERS if (timings / FOLDERS[chip] / FILE).is_file()}
        made = [replace(r, facts={**r.facts, "timings": options.source}) for r in records(found, COMMAND, planned)]
        evidence.append(options.evidence, made)
        if {p["chip"] for p in found} == set(FOLDERS):
            picture(found, options.picture)
        else:
            print(f"{options.picture} is not redrawn: {options.out} must hold points of every chip", file=sys.stderr)
        for record in made:
            print(record.what.workload, {k: v for k, v in record.facts.items() if k not in ("each", "by_head_dim")})
        return 0
    reason = missing(timings, options.chip)
    if reason is not None and not (PEER_PYTHON.is_file() and timings.is_dir()):
        raise ValueError(reason)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    collect(options.chip, timings, options.out, options.limit_s, options.most)
    return 0


def installed() -> Path:
    """Return the folder of timings in the peer's installed wheel; if there is none, PEER_PYTHON, so that `missing`
    reports it.
    """
    return next(PEER_PYTHON.parents[1].glob("lib/python3*/site-packages/tokamax/data/autotuning"), PEER_PYTHON)


def missing(timings: Path, chip: str) -> str | None:
    """Return a sentence that says which part of the peer is missing; None if a point of this chip can be compiled."""
    if not PEER_PYTHON.is_file():
        return f"the peer's environment ({PEER_PYTHON}) is missing: `make peers-tpu` installs it"
    if not timings.is_dir():
        return f"no timings in {timings}: pass --timings with a folder that has them, such as {WHERE}"
    if not (timings / FOLDERS[chip] / FILE).is_file():
        return f"no timings of {chip} in {timings}: pass --timings with the path of {WHERE}"
    return None
