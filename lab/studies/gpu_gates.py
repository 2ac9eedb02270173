"""The cases of `compiles` for Hopper: every configuration, to machine code, whose report must pass the gates.

A gate is a property that a kernel's machine code must have (`deviceless/gpu/gates.py`).
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import cycle, product
from types import MappingProxyType
from typing import Any

from lab import campaign
from lab.studies.programs import ROOT, kernels_of
from tessera.attention.contract import TILES, AttentionSpec, Shapes
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gpu import prefill as gpu_prefill
from tessera.attention.kernel import Kernel
from tessera.deviceless import inspection, programs
from tessera.deviceless.compiler import attention_program, factory_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import sass
from tessera.deviceless.gpu.gates import WATCHED, broken_program
from tessera.measure import evidence

EVIDENCE = "evidence/gpu-gates.jsonl"
CHIP = "h200"
HEAD_DIMS = (64, 128, 256)
MASKS = MappingProxyType(
    {"causal": {}, "both ways": {"causal": False}, "window": {"window": 1000}, "softcap": {"softcap": 30.0}}
)
PLAIN = "causal"
GROUPS = (4, 1, 7, 16)
"""Query heads per KV head. All values but the first are compiled only with default blocks, the causal mask and the
first dtype."""
MANY = 8
"""Query heads per KV head in a model with 64 query heads and 8 KV heads. The sparse kernels' default blocks are also
compiled with this number, at every tile."""
OTHERS = MappingProxyType(
    {
        ("sparse", "prefill"): ({"group": MANY}, {"query_tile": 64}, {"query_tile": 128}),
        ("score", "prefill"): ({"group": MANY}, {"query_tile": 64}, {"query_tile": 128}),
        ("sparse", "decode"): ({"group": MANY},),
    }
)
"""(role, phase) -> sizes of further calls. In these calls more rows share one list of tiles (or, for scores, one sum of
masses) than in the other cases, so their search spaces hold blocks that no other case has."""
BATCH = 2
"""Default number of sequences in a case. With only one, the compiler removes indices that otherwise take registers."""
LENGTHS = MappingProxyType({"prefill": 8192, "decode": 131072})
ODD = MappingProxyType({"query_tile": 12, "length": 8191})
"""Sizes of an extra case for prefill's default blocks: no block size divides them."""
KV_HEADS = 2
PAGE = 64
"""Positions per page in the cases on paged keys: half of dense prefill's default block."""
BATCHES = tuple(
    {"batch": batch, "kv_heads": 8, "length": length, "group": group}
    for group, batch, length in product((4, 8), (1, 4, 16, 64), (8192, 32768, 131072))
)
"""Decode calls of typical models (32 or 64 query heads, 8 KV heads), for the default blocks at head dim 128. The
number of splits depends on all of these sizes."""
DENSE = gpu_prefill.KERNELS[0]
GRADIENT = "gpu_backward"
"""Case name of dense prefill's gradient. The kernel table has no line for the gradient, since the prefill kernel's
`launch` includes it (custom_vjp). `gradient_cases` lists its calls."""


def call(case: Mapping[str, Any]) -> tuple[AttentionSpec, Shapes]:
    """Return (spec, shapes) of a case."""
    kernel = kernel_of(case)
    spec, shapes = inspection.call(
        role=kernel.role,
        phase=kernel.phase,
        batch=case.get("batch", BATCH),
        length=case.get("length", LENGTHS[kernel.phase]),
        heads=case["group"] * case.get("kv_heads", KV_HEADS),
        kv_heads=case.get("kv_heads", KV_HEADS),
        head_dim=case["head_dim"],
        dtype=case["dtype"],
        spec=AttentionSpec(tile=case["tile"], query_tile=case["query_tile"], **MASKS[case["mask"]]),
        fraction=0.1,
    )
    return spec, shapes._replace(scaled=case.get("scaled", False), page=case.get("page"))


def kernel_of(case: Mapping[str, Any]) -> Kernel:
    """Return a case's kernel; for the gradient, dense prefill's kernel."""
    return DENSE if case["kernel"] == GRADIENT else programs.kernel_named(case["kernel"])


def program_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program to compile for a case."""
    spec, shapes = call(case)
    if case["kernel"] == GRADIENT:
        return factory_program("lab.studies.programs:gpu_gradient_call", spec=asdict(spec), shapes=shapes._asdict())
    return attention_program(case["kernel"], spec, shapes, case["config"])


def cases() -> Iterator[dict[str, Any]]:
    """Yield every case: a kernel, head dim, dtype, tile, mask, group size and configuration (None is the default).

    Default blocks get every dtype, tile and mask, and further calls under the causal mask (`plain_cases`). Every other
    configuration gets every head dim and tile with the causal mask and the first dtype. Under each other mask it gets
    only one of its tiles and one of the dtypes, in turn. One dtype is enough, because a dtype changes the names of
    instructions, not their registers. Each configuration in the search spaces of the calls in OTHERS gets one tile and
    two masks. `scaled_cases` describes the calls on int8 keys, and `paged_cases` those on paged keys. Calls that a
    kernel refuses are left out. The gradient of dense prefill comes last.
    """
    found = itertools.chain(*itertools.starmap(kernel_cases, product(kernels_of("gpu"), HEAD_DIMS)), gradient_cases())
    yield from {identity(case): case for case in found}.values()


def kernel_cases(kernel: Kernel, head_dim: int) -> Iterator[dict[str, Any]]:
    """Yield the cases of a kernel at a head dim; some cases come twice."""
    tiles = TILES if kernel.role != "dense" else (128,)
    blank = {"kernel": kernel.name, "head_dim": head_dim, "query_tile": 32, "group": GROUPS[0], "config": None}
    for number, mask in enumerate(MASKS):
        had: dict[str, list[dict[str, Any]]] = {}  # configuration -> its cases, one per tile that has it
        for tile in tiles:
            case = {**blank, "dtype": kernel.dtypes[0], "tile": tile, "mask": mask}
            if not taken(case):
                continue
            yield from ({**case, "dtype": dtype} for dtype in kernel.dtypes)
            if mask == PLAIN:
                yield from plain_cases(kernel, case)
            for config in undefault(case):
                had.setdefault(json.dumps(config), []).append({**case, "config": config})
        for turn, members in enumerate(had.values(), start=number):
            if mask == PLAIN:
                yield from members
            else:
                yield {**members[turn % len(members)], "dtype": kernel.dtypes[turn % len(kernel.dtypes)]}
    for sizes in OTHERS.get((kernel.role, kernel.phase), ()):
        yield from other_cases(kernel, {**blank, **sizes})
    yield from scaled_cases(kernel, blank)
    yield from paged_cases(kernel, blank)


def scaled_cases(kernel: Kernel, blank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cases on int8 keys.

    Default blocks get every tile and mask and, under the causal mask, also the other group sizes and, in prefill, odd
    sizes. Every other configuration gets one tile, under the causal mask.
    """
    met, blank = set(), {**blank, "dtype": kernel.dtypes[0], "scaled": True}
    for tile, mask in product(TILES if kernel.role != "dense" else (128,), MASKS if kernel.scaled else ()):
        case = {**blank, "tile": tile, "mask": mask}
        if not taken(case):
            continue
        yield case
        if mask != PLAIN:
            continue
        yield from ({**case, "group": group} for group in GROUPS[1:])
        if kernel.phase == "prefill":
            yield {**case, **ODD}
        for config in undefault(case):
            if json.dumps(config) not in met:
                met.add(json.dumps(config))
                yield {**case, "config": config}


def paged_cases(kernel: Kernel, blank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cases on paged keys: default blocks, with the causal mask and with a window.

    Each mask gets two tiles (one if the kernel is dense), and each of these gets keys in the first dtype and in int8.
    """
    tiles, keys = ((16, PAGE) if kernel.role != "dense" else (128,)), ({}, {"scaled": True})
    for tile, mask, kind in product(tiles, (PLAIN, "window"), keys if kernel.paged else ()):
        case = {**blank, "dtype": kernel.dtypes[0], "tile": tile, "mask": mask, "page": PAGE, **kind}
        yield from filter(taken, (case,))


def taken(case: Mapping[str, Any]) -> bool:
    """Return whether the case's kernel accepts the call."""
    return kernel_of(case).refusal(*call(case)) is None


def undefault(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations in the search space of the case's call, except the default one."""
    kernel, asked = kernel_of(case), call(case)
    default = kernel.default_config(*asked)
    return [asdict(config) for config in kernel.search_space(*asked) if config != default]


def plain_cases(kernel: Kernel, case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cases that are compiled only with the causal mask.

    They have default blocks, and either a single sequence, another group size or, in prefill, the sizes ODD. Decode
    also gets the calls in BATCHES, each with the default blocks and with every other number of splits in the search
    space.
    """
    yield {**case, "batch": 1}
    groups = (*GROUPS[1:], MANY) if kernel.role == "sparse" else GROUPS[1:]
    yield from filter(taken, ({**case, "group": group} for group in groups))
    if kernel.phase == "prefill":
        yield {**case, **ODD}
    elif case["head_dim"] == 128 and case["tile"] in (16, 128):
        for batch in ({**case, **sizes} for sizes in BATCHES):
            default = asdict(kernel.default_config(*call(batch)))
            cut = (c for c in undefault(batch) if {**c, "splits": default["splits"]} == default)
            yield from ({**batch, "config": config} for config in (None, *cut))


def other_cases(kernel: Kernel, blank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cases of one call in OTHERS: each configuration in its search space, at the first tile that has it.

    Each configuration comes once with the causal mask, and once in the last dtype with one of the other masks, in turn.
    """
    masks, met = [mask for mask in MASKS if mask != PLAIN], set()
    for tile in TILES:
        case = {**blank, "dtype": kernel.dtypes[0], "mask": PLAIN, "tile": tile}
        for config in (None, *undefault(case)) if taken(case) else ():
            if json.dumps(config) not in met:
                met.add(json.dumps(config))
                yield {**case, "config": config}
                turn = len(met) % len(masks)
                masked = ({**case, "mask": mask} for mask in (*masks[turn:], *masks[:turn]))
                mine = next((c for c in masked if taken(c) and (config is None or config in undefault(c))), None)
                if mine is not None:
                    yield {**mine, "dtype": kernel.dtypes[-1], "config": config}


def gradient_cases() -> Iterator[dict[str, Any]]:
    """Yield the cases of dense prefill's gradient: head dims, dtypes, masks, other group sizes, odd sizes."""
    for head_dim in gpu_backward.HEAD_DIMS:
        case = {"kernel": GRADIENT, "head_dim": head_dim, "tile": 128, "query_tile": 32, "config": None}
        case |= {"mask": PLAIN, "group": GROUPS[0], "dtype": DENSE.dtypes[0]}
        yield {**case, "batch": 1}
        yield from ({**case, "dtype": d, "mask": m} for d, m in product(DENSE.dtypes, MASKS))
        yield from ({**case, "group": group} for group in GROUPS[1:])
        yield {**case, **ODD}


def first_cases() -> Iterator[dict[str, Any]]:
    """Yield the fast subset: each kernel's default blocks at one head dim, dtype, tile and mask."""
    for kernel in kernels_of("gpu"):
        case = {"kernel": kernel.name, "head_dim": 128, "dtype": kernel.dtypes[0], "query_tile": 32}
        case |= {"mask": "causal", "group": GROUPS[0], "config": None}
        tiles = ({**case, "tile": tile} for tile in reversed(TILES))
        yield next(c for c in tiles if kernel.refusal(*call(c)) is None)


def spread_cases(first: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a few cases of the kernel of `first` that together cover its head dims, dtypes, tiles and masks."""
    dtypes, tiles, masks = cycle(kernel_of(first).dtypes), cycle(reversed(TILES)), cycle(MASKS)
    for head_dim, _ in product(HEAD_DIMS, range(2)):
        case = {**first, "head_dim": head_dim, "dtype": next(dtypes), "mask": next(masks)}
        wanted = ({**case, "tile": next(tiles)} for _ in TILES)
        case = next((c for c in wanted if kernel_of(c).refusal(*call(c)) is None), None)
        if case is not None:
            yield case


def urgency(case: Mapping[str, Any]) -> int:
    """Rank a case: default blocks, then other configurations with the causal mask and first dtype, then the rest."""
    plain = case["mask"] == PLAIN and case["dtype"] == kernel_of(case).dtypes[0]
    return 0 if case["config"] is None else 1 if plain else 2


def compiler() -> gpu.Compiler:
    return gpu.Compiler(CHIP, paths=[ROOT])


def words(case: Mapping[str, Any]) -> str:
    return f"{identity(case)}{kind_of(case)}"


def fault(line: Mapping[str, Any]) -> str:
    return "; ".join(line["broken"])


def run(case: Mapping[str, Any], compiler: gpu.Compiler, limit_s: float = 300.0) -> dict[str, Any]:
    """Compile a case and return it with `broken` (a sentence per failed gate) and a report per kernel."""
    found = compiler.compile(program_of(case), limit_s=limit_s)
    alone = case["kernel"] == GRADIENT  # each kernel of a gradient must multiply and load, so each is judged alone
    judged = [(report,) for report in found.kernels] if alone else [found.kernels]
    failed = [str(found.error)] if found.error else [text for kernels in judged for text in broken_program(kernels)]
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
    """Return a report in the form that a record stores."""
    names = ("kernel", "registers", "spill_bytes", "shared_bytes", "barriers", "blocks", "threads")
    counts = {name: report.instructions.get(name, 0) for name in WATCHED}
    return {name: getattr(report, name) for name in names} | {"instructions": counts}


def identity(case: Mapping[str, Any]) -> str:
    """Return a text that identifies a case: the case and its line in the file of results give the same text."""
    names = "kernel head_dim dtype tile query_tile mask group config length batch kv_heads scaled page".split()
    return json.dumps([case.get(name) for name in names])


def records(found: list[dict[str, Any]], command: str) -> list[evidence.Record]:
    """Build one record per kernel and configuration: the share of its cases that pass, the failed gates, the reports.

    Calls on int8 keys and calls on paged keys have separate records. In the facts, `planned` and `tried` count the
    kernel's cases with such keys over all configurations. `commits` counts the cases that each commit compiled; the
    record itself names the last commit.
    """
    planned, tried = (Counter((case["kernel"], kind_of(case)) for case in some) for some in (cases(), found))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for case in found:
        own = case["kernel"], kind_of(case), case["settings"] or json.dumps(case["config"])
        groups.setdefault(own, []).append(case)
    made = []
    for (kernel, kind, settings), members in groups.items():
        names = "head_dim dtype tile query_tile mask group batch kv_heads length scaled page".split()
        passed = [not member["broken"] for member in members]
        facts = {
            "cases": len(members),
            "planned": planned[kernel, kind],
            "tried": tried[kernel, kind],
            "ended_by_time": sum(map(campaign.out_of_time, members)),
            "commits": dict(Counter(member.get("commit") for member in members)),
            "broken": sorted({text for member in members for text in member["broken"]})[:20],
            "reports": [[*(member.get(name) for name in names), member["kernels"]] for member in members],
        }
        what = evidence.What(op="gpu gates", kernel=kernel, workload=f"{settings}, {CHIP}{kind}")
        how = evidence.How(iterations=len(members), check="compiled without a GPU, the report read")
        share = sum(passed) / len(passed)
        record = evidence.make(what, [share], command=command, unit="fraction", how=how, facts=facts)
        made.append(campaign.of_its_code(record, members[-1]))
    return made


def kind_of(case: Mapping[str, Any]) -> str:
    """Return how the case's keys are stored, in words that follow the chip's name."""
    kinds = (["int8 keys"] if case.get("scaled") else []) + (["pages"] if case.get("page") else [])
    return " with " + " in ".join(kinds) if kinds else ""
