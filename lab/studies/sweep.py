"""The cases of `compiles` for TPUs: every kernel for every chip, head dim, dtype and tile that it claims to support.

A call that its kernel refuses counts as not compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

from lab import campaign
from lab.studies.programs import ROOT, kernels_of
from tessera.attention.contract import AttentionSpec
from tessera.deviceless import inspection, programs
from tessera.deviceless.compiler import attention_program, factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.measure import evidence

HEAD_DIMS = (64, 128, 256)
TILES = (16, 32, 64, 128)
LENGTHS = MappingProxyType({"prefill": 8192, "decode": 131072})
EVIDENCE = "evidence/tpu-compile.jsonl"
LONG = 1 << 20
"""Tokens of the longest calls. Index lists are streamed, so even these compile."""
WHOLE = 131072
GRADIENT = "tpu_backward"
"""Case name of dense prefill's gradient. The kernel table has no line for the gradient: it is part of that kernel."""


def cases(chips: Sequence[str] = tuple(tpu.TOPOLOGIES)) -> Iterator[dict[str, Any]]:
    """Yield every case: chip, kernel, head dim, dtype, tile, length; dense kernels have a single tile.

    Each kernel gets every head dim, dtype and tile at one length, and the longest calls once: 1,048,576 keys (the last
    2,048 queries of a prefill), and a whole prefill of 131,072 tokens. Dense and scoring prefill also get one query
    head per KV head, which makes the corner of the causal mask (`prefill.corner`) longest. The gradient of dense
    prefill comes last.
    """
    names = ("chip", "kernel", "head_dim", "dtype", "tile", "length")
    for chip, kernel in product(chips, kernels_of("tpu")):
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


def compiler() -> tpu.Compiler:
    return tpu.Compiler(paths=[ROOT])


def run(case: Mapping[str, Any], compiler: tpu.Compiler, limit_s: float) -> dict[str, Any]:
    """Compile a case and return it with the outcome."""
    try:
        program = program_of(case)
    except ValueError as error:
        return {**case, "compiled": False, "error": f"refused: {error}"}
    found = compiler.compile(case["chip"], program, limit_s=limit_s)
    error = None if found.error is None else str(found.error)
    return {**case, "compiled": error is None, "error": error, "compile_s": round(found.compile_s, 1)}


def fault(line: Mapping[str, Any]) -> str | None:
    return line["error"]


def urgency(case: Mapping[str, Any]) -> int:
    return 0


def words(case: Mapping[str, Any]) -> str:
    return " ".join(map(str, case.values()))


def program_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's program: batch 1, 8 or 2 query heads, 2 KV heads; sparse calls list a tenth of the tiles.

    Raises:
        ValueError: the kernel refuses the call.
    """
    if case["kernel"] == GRADIENT:
        sizes = {name: case[name] for name in ("length", "head_dim", "dtype")}
        return factory_program("lab.studies.programs:tpu_gradient_call", **sizes)
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
    reason = kernel.refusal(spec, shapes)
    if reason is not None:
        raise ValueError(reason)
    return attention_program(kernel.name, spec, shapes)


def identity(case: Mapping[str, Any]) -> tuple:
    """Return a tuple that identifies a case: the case and its line in the file of results give the same tuple."""
    return tuple(case.get(name) for name in ("chip", "kernel", "head_dim", "dtype", "tile", "length", "heads"))


def records(found: list[dict[str, Any]], command: str) -> list[evidence.Record]:
    """Build one record of a sweep: share of the cases that compiled, per kernel and chip, and every failure.

    In the facts, `cases` counts the lines of `found` and `planned` the cases of a whole sweep of the same kernels.
    """
    kernels, every = {case["kernel"] for case in found}, list(cases())
    swept = "every kernel" if kernels == {case["kernel"] for case in every} else " and ".join(sorted(kernels))
    groups: dict[str, list[bool]] = {}
    for case in found:
        groups.setdefault(f"{case['kernel']} on {case['chip']}", []).append(case["compiled"])
    facts = {
        "cases": len(found),
        "planned": sum(case["kernel"] in kernels for case in every),
        "ended_by_time": sum(map(campaign.out_of_time, found)),
        "by_kernel": {name: [sum(ok), len(ok)] for name, ok in groups.items()},
        "failures": [{k: v for k, v in case.items() if k != "compiled"} for case in found if not case["compiled"]],
    }
    what = evidence.What(op="tpu sweep", kernel="tpu", workload=f"{swept}, chip, head dim, dtype, tile")
    share = sum(case["compiled"] for case in found) / len(found)
    made = evidence.make(what, [share], command=command, unit="fraction", facts=facts)
    return [campaign.of_its_code(made, found[-1])]
