"""Predict figures of the TPU kernels, ratios of times or bytes, and compare them with targets.

    python -m lab study tpu-figures --chip v6e --timings FOLDER     # compiles; resumes where it stopped
    python -m lab study tpu-figures --report                        # appends the records to evidence/

The peer is Tokamax's splash attention with the best block sizes of its shipped timings. Tokamax ships none for v5e, so
v5p's are used there. Our kernels and the peer's go through the same compiler and the same prediction.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab import campaign
from lab.studies import validation
from lab.studies.programs import ROOT
from tessera.attention import work
from tessera.attention.contract import AttentionSpec
from tessera.core import files
from tessera.core.shapes import ceil_div
from tessera.deviceless import hlo, inspection
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import inspection as tpu_inspection
from tessera.deviceless.tpu import predict
from tessera.measure import evidence

COMMAND = "python -m lab study tpu-figures --timings FOLDER; python -m lab study tpu-figures --report"
STORE = Path("evidence/tpu-figures.jsonl")
SHORT, LONG = 16384, 131072
LAYERS, ANCHORS = 32, 5
GQA = MappingProxyType({"heads": 32, "kv_heads": 8})
LISTED = tuple((tile, query_tile) for query_tile in (128, 32) for tile in (128, 32, 16))
"""(tile, query tile) of the sparse prefill calls."""
NARROW = (32, 16)
"""Tiles of further sparse decode calls; "decode sparse" itself has tile 128."""
CALLS = MappingProxyType(
    {
        "dense": {"role": "dense", "length": SHORT, "heads": 16, "kv_heads": 16},
        "dense, equal terms": {"role": "dense", "length": SHORT, "heads": 16, "kv_heads": 16},
        "dense gqa": {"role": "dense", "length": SHORT, **GQA},
        "score gqa": {"role": "score", "length": SHORT, **GQA},
        "dense long": {"role": "dense", "length": LONG, **GQA},
        "score long": {"role": "score", "length": LONG, "query_tile": 128, **GQA},
        "score long 32": {"role": "score", "length": LONG, **GQA},
        **{
            f"sparse {tile}/{rows}": {"role": "sparse", "length": LONG, "tile": tile, "query_tile": rows, **GQA}
            for tile, rows in LISTED
        },
        "sparse kascade": {"role": "sparse", "length": LONG, "query_tile": 128, "fraction": 0.05, **GQA},
        "sparse kascade 32": {"role": "sparse", "length": LONG, "fraction": 0.05, **GQA},
        "decode dense": {"role": "dense", "phase": "decode", "length": LONG, **GQA},
        "decode sparse": {"role": "sparse", "phase": "decode", "length": LONG, **GQA},
        **{
            f"decode sparse {tile}": {"role": "sparse", "phase": "decode", "length": LONG, "tile": tile, **GQA}
            for tile in NARROW
        },
        **{
            f"decode {role} int8": {"role": role, "phase": "decode", "length": LONG, "scaled": True, **GQA}
            for role in ("dense", "sparse")
        },
    }
)
"""Calls to compile: head dim 128, bfloat16; a sparse call lists a tenth of the key tiles.

"sparse kascade" lists half of a tenth: each query tile may list a tenth of its visible keys, and under the causal mask
it sees half of all keys on average. "score long 32" and "sparse kascade 32" have the default query tile,
32; the same names without the 32 have a query tile of 128.
"""

VARIANTS = MappingProxyType({"dense, equal terms": {"changes": {"half_exp": False}, "token_major": True}})
"""Call -> further arguments of `programs.attention_call`. On equal terms our call, like the peer's, computes
exponentials in float32 and transposes q itself."""

SELECTIONS = MappingProxyType(
    {
        name: {"length": LONG, "kv_heads": 8, "tile": 128, "query_tile": query_tile, "fraction": 0.1}
        for name, query_tile in (("selection", 128), ("selection 32", 32))
    }
)
"""Programs that choose the key tiles after "score long" and "score long 32". They contain no kernels."""

UNCOSTED = re.compile(r" (gather|scatter|sort|conditional|call|custom-call)\(%(?!.*ConcatBitcast)")
"""Pattern of operations that XLA compiles to scalar loops or to a separate computation, for which it estimates no
cycles. The pattern requires an operand ("(%"), which all such operations have."""

KASCADE = "kascade prefill against dense"
KASCADE_32 = f"{KASCADE}, query tile 32"
"""KASCADE at the default query tile; KASCADE itself has query tile 128."""
DENSE = "dense prefill against the peer"
EQUAL_TERMS = f"{DENSE}, equal terms"
KERNELS_ALONE = "dense prefill against the peer, kernels alone"
"""Figure that leaves out the XLA operations before and after both kernels, such as transposes. It has no target, but
shows how much of DENSE's gain comes from those operations."""

BYTES = tuple(f"decode, {role}: bytes moved / needed" for role in ("dense", "sparse"))
INT8 = tuple(f"decode, {role}: int8 keys against bfloat16" for role in ("dense", "sparse"))
INT8_BYTES = tuple(f"decode, {role}: bytes moved, int8 keys / bfloat16" for role in ("dense", "sparse"))
TERMS = MappingProxyType(
    {
        DENSE: "q head-major for free; exponentials bfloat16 on v6e and v7x, the peer's float32",
        EQUAL_TERMS: "q's transpose counted; float32 exponentials",
        KERNELS_ALONE: "exponentials bfloat16 on v6e and v7x, the peer's float32",
        KASCADE: "query tile 128",
        KASCADE_32: "query tile 32, the default",
        **dict.fromkeys(BYTES, "bytes counted, no schedule"),
    }
)
"""Figure -> conditions that a reader must know."""

TARGETS = MappingProxyType(
    {
        **dict.fromkeys((DENSE, EQUAL_TERMS), {"v5e": 1.05, "v5p": 1.05, "v6e": 1.3, "v7x": 1.5}),
        "score / dense": {"v5e": 1.10, "v5p": 1.10, "v6e": 1.05, "v7x": 1.05},
        "sparse per score, tile 128, 512 rows": dict.fromkeys(tpu.TOPOLOGIES, 1.25),
        "sparse per score, tile 32, 512 rows": dict.fromkeys(tpu.TOPOLOGIES, 1.6),
        "sparse per score, tile 128, 128 rows": dict.fromkeys(tpu.TOPOLOGIES, 2.0),
        "sparse per score, tile 32, 128 rows": dict.fromkeys(tpu.TOPOLOGIES, 2.4),
        **dict.fromkeys((KASCADE, KASCADE_32), {"v5e": 3.2, "v5p": 3.2, "v6e": 3.5, "v7x": 3.5}),
        BYTES[0]: dict.fromkeys(tpu.TOPOLOGIES, 1.05),
        BYTES[1]: dict.fromkeys(tpu.TOPOLOGIES, 1.15),
        INT8[1]: dict.fromkeys(tpu.TOPOLOGIES, 1.8),
        **dict.fromkeys(INT8_BYTES, dict.fromkeys(tpu.TOPOLOGIES, 0.52)),
    }
)
"""Figure -> chip -> target: a lower bound if the figure's name has "against", an upper bound otherwise.

v5e misses the target for tile 128 with 128 rows; v6e misses both targets with 128 rows. There, a sparse kernel fetches
each listed key for only 128 rows (128 flops per byte); a dense kernel fetches each key for thousands of rows. Main
memory is the limit, so only more rows per list help, not other tiles or block sizes.
"""


def inspect_one(chip: str, name: str, limit_s: float) -> dict[str, Any]:
    """Compile one of our calls for a chip and predict its time."""
    call = {"phase": "prefill", "tile": 128, "query_tile": 32, "fraction": 0.1, "scaled": False, **CALLS[name]}
    scaled = call.pop("scaled")
    spec = AttentionSpec(tile=call.pop("tile"), query_tile=call.pop("query_tile"))
    spec, shapes = inspection.call(batch=1, head_dim=128, dtype="bfloat16", spec=spec, **call)
    shapes, variant = shapes._replace(scaled=scaled), VARIANTS.get(name, {})
    result = tpu_inspection.inspect_call(chip, spec, shapes, limit_s=limit_s, variant=variant)
    if result.predicted_ms is None:
        return {"error": result.error or result.bound_by}
    keys = LONG if shapes.capacity is None else shapes.capacity * spec.tile
    needed = 2 * work.head_bytes(shapes) * keys * shapes.num_kv_heads + 2 * 2 * shapes.num_heads * 128
    return {
        "ms": result.predicted_ms,
        "around_ms": result.prediction.around_ms,
        "flops": result.flops,
        "kernel_bytes": (result.found.executions or {}).get(predict.BYTES),
        "needed_bytes": needed if shapes.num_queries == 1 else None,
        "bound_by": result.bound_by,
        "busy": {unit: round(s["used"] / (s["capacity"] or 1), 3) for unit, s in result.prediction.slots.items()},
        "kernel": result.kernel,
        "config": result.config,
        "compile_s": result.compile_s,
    }


def inspect_peer(chip: str, timings: Path, limit_s: float) -> dict[str, Any]:
    """Compile the peer's dense causal call at its best shipped block sizes and predict its time."""
    measured_on = "v5p" if chip == "v5e" else chip
    reason = validation.missing(timings, measured_on)
    if reason is not None:
        return {"error": reason}
    wanted = [1, SHORT, 16, 128]
    [best] = [
        p
        for p in validation.points(timings, measured_on)
        if p["q"] == wanted and p["is_causal"] and not p["return_residuals"]
    ]
    line = validation.compile_point({**best, "chip": chip}, limit_s)
    if line["error"]:
        return {"error": line["error"]}
    found = validation.prediction(line, predict.CALIBRATED)
    return {"ms": found.ms, "around_ms": found.around_ms, "blocks": best["config"], "compile_s": line["compile_s"]}


def inspect_selection(chip: str, name: str, limit_s: float) -> dict[str, Any]:
    """Compile the program that chooses key tiles, and predict its time on a chip."""
    program = factory_program("lab.studies.programs:selection_call", **SELECTIONS[name])
    found = tpu.compile_for(chip, program, limit_s=limit_s, paths=[ROOT])
    if found.error is not None:
        return {"error": str(found.error)}
    return {"ms": xla_ms(found.program, chip), "bound_by": "XLA operations", "compile_s": found.compile_s}


def xla_ms(program: str, chip: str) -> float:
    """Return the predicted milliseconds of a program without kernels.

    An operation takes the longer of its memory time and XLA's cycle estimate. A loop's body counts once per iteration.

    Raises:
        ValueError: an operation has no estimate, or a loop's number of iterations is unknown; neither counts as 0 ms.
    """
    if strange := UNCOSTED.search(program):
        raise ValueError(
            f"the compiled program has a {strange[1]}, whose time XLA does not estimate: predict a program without it"
        )
    on = predict.device(chip)
    bandwidth = on.bytes_per_s * predict.CALIBRATED.bandwidth_share
    lines = hlo.computations(program)

    def seconds(name: str) -> float:
        operations = hlo.operations(program, name)
        total = sum(max(o.bytes / bandwidth, (o.cycles or 0) / on.clock_hz) for o in operations)
        for line in lines[name]:
            if " call-start(%" in line:  # a call-start without operands gets them from a call-update, which is counted
                raise ValueError(f"the compiled program must not start a computation of unknown time: {line.strip()}")
            if " while(" in line:
                total += turns(line) * seconds(re.search(r"body=%([\w.\-]+)", line)[1])
        return total

    def turns(loop: str) -> int:
        condition = "\n".join(lines[re.search(r"condition=%([\w.\-]+)", loop)[1]])
        ends = re.findall(r" constant\((\d+)\)", condition)
        if len(ends) != 1 or "direction=LT" not in condition:
            raise ValueError(
                "the loop's number of iterations cannot be read from its condition, which must have one constant and "
                f"direction=LT: {condition.strip()}"
            )
        return int(ends[0])  # JAX counts the iterations of a loop of known length from 0

    return 1e3 * seconds("ENTRY")


def comparisons(found: Mapping[str, Mapping[str, Any]], chip: str) -> Iterator[tuple[str, float, list[str]]]:
    """Yield (figure, ratio, cases that it compares) for every figure whose cases compiled."""

    def has(*names: str) -> bool:
        return all("ms" in found.get(name, {}) for name in names)

    if has("dense", "peer"):
        yield DENSE, found["peer"]["ms"] / found["dense"]["ms"], ["dense", "peer"]
        peer, ours = (found[name]["ms"] - found[name]["around_ms"] for name in ("peer", "dense"))
        yield KERNELS_ALONE, peer / ours, ["dense", "peer"]
    if has("dense, equal terms", "peer"):
        ratio = found["peer"]["ms"] / found["dense, equal terms"]["ms"]
        yield EQUAL_TERMS, ratio, ["dense, equal terms", "peer"]
    if has("dense gqa", "score gqa"):
        yield "score / dense", found["score gqa"]["ms"] / found["dense gqa"]["ms"], ["score gqa", "dense gqa"]
    for tile, query_tile in LISTED:
        name = f"sparse {tile}/{query_tile}"
        if has(name, "dense long"):
            sparse, dense = (found[n]["ms"] / found[n]["flops"] for n in (name, "dense long"))
            yield f"sparse per score, tile {tile}, {4 * query_tile} rows", sparse / dense, [name, "dense long"]
    for figure, query_tile, suffix in ((KASCADE, 128, ""), (KASCADE_32, 32, " 32")):
        cases = [*(f"{name}{suffix}" for name in ("score long", "selection", "sparse kascade")), "dense long"]
        if has(*cases):
            score, selection, sparse, dense = (found[name]["ms"] for name in cases)
            listed = tiles_listed(LONG, 128, query_tile, 0.1) / tiles_full(LONG, 128, query_tile, 0.05)
            ours = ANCHORS * (score + selection) + (LAYERS - ANCHORS) * sparse * listed
            yield figure, LAYERS * dense / ours, cases
    for role, figure in zip(("dense", "sparse"), BYTES):
        case = found.get(f"decode {role}", {})
        if case.get("kernel_bytes"):
            ratio = case["kernel_bytes"] / case["needed_bytes"]
            yield figure, ratio, [f"decode {role}"]
    for role, figure, moved in zip(("dense", "sparse"), INT8, INT8_BYTES):
        names = [f"decode {role} int8", f"decode {role}"]
        if has(*names):
            int8, plain = (found[name] for name in names)
            yield figure, plain["ms"] / int8["ms"], names
            yield moved, int8["kernel_bytes"] / plain["kernel_bytes"], names
    for tile in (128, *NARROW):
        name = f"decode sparse {tile}" if tile in NARROW else "decode sparse"
        if has(name, "decode dense"):
            sparse, dense = (found[n]["ms"] / found[n]["flops"] for n in (name, "decode dense"))
            yield f"decode, sparse, tile {tile}: time per key against dense", sparse / dense, [name, "decode dense"]


def tiles_listed(length: int, tile: int, query_tile: int, fraction: float) -> int:
    """Count the tiles that a causal prefill lists. A query tile's budget is `fraction` of its visible keys, but at
    least 128 keys."""
    visible = range(query_tile, length + 1, query_tile)
    return sum(ceil_div(round(min(max(fraction * seen, 128), seen)), tile) for seen in visible)


def tiles_full(length: int, tile: int, query_tile: int, fraction: float) -> int:
    """Count the tiles that a compiled call lists. Each list has room for `fraction` of all keys, but holds only visible
    tiles."""
    room = ceil_div(round(fraction * length), tile)
    return sum(min(ceil_div(seen, tile), room) for seen in range(query_tile, length + 1, query_tile))


def records(found: Mapping[str, Mapping[str, Mapping[str, Any]]], command: str) -> list[evidence.Record]:
    """Build one record per figure and chip, with its target if it has one."""
    made = []
    for chip, cases in found.items():
        for figure, ratio, names in comparisons(cases, chip):
            target = TARGETS[figure][chip] if figure in TARGETS else None
            against = target is not None and "against" in figure
            met = None if target is None else ratio >= target if against else ratio <= target
            goal = None if target is None else f"{'>=' if against else '<='} {target:g}"
            what = evidence.What(op="predicted figure", kernel="tpu", workload=f"{figure}, {chip}", dtype="bfloat16")
            record = evidence.make(
                what,
                [ratio],
                command=command,
                unit="ratio",
                how=evidence.How(check="predicted from the compiler's schedule, not measured"),
                comparison=evidence.Comparison(
                    against="tokamax splash" if "peer" in figure else "bfloat16 keys" if "int8" in figure else "dense",
                    ratio=ratio,
                    target=goal,
                    met=met,
                ),
                facts={name: dict(cases[name]) for name in names},
            )
            made.append(campaign.of_its_code(record, cases[names[0]]))
    return made


def stored(held: Iterable[evidence.Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return chip -> case name -> facts from earlier records, so that a study can add to them; later records win."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in held:
        found.setdefault(record.what.workload.rpartition(", ")[2], {}).update(record.facts)
    return found


def study(options: Any) -> int:
    """Compile missing cases, or, with --report, append the records."""
    names = ("peer", *SELECTIONS, *CALLS)
    campaign.check_names("--case", options.case, names)
    held = evidence.read(STORE) if STORE.exists() else []
    found = json.loads(options.out.read_text()) if options.out.exists() else stored(held)
    if options.report:
        known = {r.what.workload: (r.median, r.code.commit) for r in held}
        made = [r for r in records(found, COMMAND) if known.get(r.what.workload) != (r.median, r.code.commit)]
        evidence.append(STORE, made)
        for record in made:
            print(
                f"{record.what.workload}: {record.median:.3f} (target {record.comparison.target}, "
                f"met: {record.comparison.met})"
            )
        return 0
    code = asdict(evidence.code())
    for chip in options.chip or tpu.TOPOLOGIES:
        for name in options.case or names:
            cases = found.setdefault(chip, {})
            done = cases.get(name, {})
            if "ms" in done and done.get("commit", code["commit"]) == code["commit"]:
                continue
            if name == "peer":
                cases[name] = inspect_peer(chip, options.timings or validation.installed(), options.limit_s)
            elif name in SELECTIONS:
                cases[name] = inspect_selection(chip, name, options.limit_s)
            else:
                cases[name] = inspect_one(chip, name, options.limit_s)
            cases[name] |= code
            files.replace_text(options.out, json.dumps(found, indent=1))
            print(chip, name, {k: cases[name][k] for k in ("ms", "bound_by", "error") if k in cases[name]}, flush=True)
    return 0
