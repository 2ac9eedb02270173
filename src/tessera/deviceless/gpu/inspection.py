"""Compile one attention call for an NVIDIA GPU that this machine lacks, and place it on the roofline.

Registers, spills, shared memory and instruction counts come from the compiler and its machine code. The time is a
roofline: a lower bound from the call's work and the chip's measured ceilings, not a prediction of this kernel's time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from tessera.attention import work
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import choose
from tessera.attention.kernel import Kernel
from tessera.core import hardware
from tessera.core.memory import format_bytes
from tessera.core.units import quantity
from tessera.deviceless import hlo, inspection
from tessera.deviceless.compiler import CompileError, attention_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import gates, sass


class Ceilings(NamedTuple):
    """Highest rates of a chip: flops and bytes measured, exponentials from the clock (16 per cycle and SM)."""

    flops_per_s: float
    bytes_per_s: float
    exponentials_per_s: float


CEILINGS = MappingProxyType({"h200": Ceilings(790e12, 4.3e12, 132 * 16 * 1.98e9)})
"""Measured on an H200: flops by a bfloat16 product of random [8192,8192] matrices, bytes by a copy within the
device."""

FLOAT32 = 0.5
"""Rate of float32 products, which XLA computes in TF32, divided by the rate of bfloat16 products."""


@dataclass(frozen=True, kw_only=True)
class Inspection(inspection.Inspection):
    """One call on one GPU; registers, spills and shared memory are the maximum over the call's kernels.

    `steps` counts the thread blocks of all launches; None if unknown.
    """

    KEYS = (
        "chip kernel config dispatched refused compiled error registers spill_bytes shared_bytes hbm_bytes temp_bytes "
        "steps instructions gates flops roofline_ms roofline_tflops percent_of_peak bound_by compile_s"
    ).split()

    dispatched: str = ""  # dispatch's choice on a GPU; may be cuDNN's, which compiles only there
    registers: int | None = None  # per thread at launch
    spill_bytes: int | None = None  # per thread, stores and loads together
    shared_bytes: int | None = None  # per thread block
    temp_bytes: int | None = None  # of global memory, for neither arguments nor results
    launches: Mapping[str, int] = MappingProxyType({})  # kernel -> launches per call, if they can be counted
    instructions: Mapping[str, int] = MappingProxyType({})  # -> occurrences, not executions, in all kernels
    gates: tuple[str, ...] | None = None  # those that the code breaks; None if the call has no kernel of ours
    roofline_ms: float | None = None
    roofline_tflops: float | None = None
    peak: Ceilings | None = None

    @property
    def panels(self) -> int:
        """Panels of the picture: XLA's own code is not read, so a call without our kernels has no second one."""
        return 2 if self.found.kernels else 1

    def rows(self) -> dict[str, str]:
        rows = {
            "roofline, not a prediction": f"{quantity(self.roofline_ms / 1e3, 's')}, bound by {self.bound_by}",
            "rate at the roofline": f"{self.roofline_tflops:.1f} TFLOP/s, {self.percent_of_peak:.1f} % of nominal peak",
            "main memory": f"{format_bytes(self.hbm_bytes)} held, {format_bytes(self.temp_bytes)} of it temporary, "
            f"at least {format_bytes(self.moved_bytes)} moved",
            "gates": verdict(self.gates),
            "compiled in": f"{self.compile_s:.1f} s",
        }
        if self.dispatched != self.kernel:
            rows["on a GPU"] = f"dispatch chooses {self.dispatched} for this call, not this kernel"
        return rows

    def lines(self) -> Iterator[tuple[str, str | None]]:
        if not self.found.kernels:
            yield "no kernel of ours runs: XLA's own code, which is not read, computes the call", None
            for name, reason in self.refused.items():
                yield f"{name} cannot take the call: {reason}", None
        for report in self.found.kernels:
            yield describe(report, self.launches.get(report.kernel)), None
        for text in self.gates or ():
            yield f"broken: {text}", "red"

    def mark(self, roof: Any, intensity: float) -> str:
        roof.plot([intensity], [self.roofline_tflops], "o", color="tab:red")
        return f"at least {self.roofline_ms:.3g} ms"

    def fill(self, bars: Any) -> None:
        bars.barh(list(self.instructions), list(self.instructions.values()), color="tab:blue")
        bars.set(xscale="log", xlabel="instructions in the code")
        bars.set_title(f"{self.registers} registers, {format_bytes(self.shared_bytes)} shared", fontsize=10)


def inspect_call(
    chip: str,
    spec: AttentionSpec,
    shapes: Shapes,
    *,
    kernel: str | None = None,
    config: Mapping[str, Any] | None = None,
    limit_s: float = 300.0,
) -> Inspection:
    """Compile one attention call and bound its time.

    `kernel` and `config` are as for `inspection.kernel_for`; without a config, the kernel uses its default.
    """
    chosen = inspection.kernel_for("gpu", chip, spec, shapes, kernel, config)
    if error := overfull(chip, least_bytes(shapes)):  # checked first, since compiling the call would take minutes
        found = gpu.Compiled(chip=chip, error=error, compile_s=0.0)
    else:
        program = attention_program(chosen.name, spec, shapes, config)
        found = gpu.compile_for(chip, program, limit_s=limit_s)
        found = replace(found, error=found.error or overfull(chip, found.hbm_bytes))
    about = inspection.facts("gpu", chosen, spec, shapes, config, found)
    result = Inspection(
        dispatched=choose(spec, shapes, platform="gpu", capability=hardware.chip(chip).capability).name, **about
    )
    return replace(result, **figures(chosen, spec, shapes, found)) if result.compiled else result


def least_bytes(shapes: Shapes) -> int:
    rows, keys = shapes.num_queries * shapes.num_heads, shapes.num_keys * shapes.num_kv_heads
    return 2 * shapes.batch * (rows + keys) * shapes.head_dim * jnp.dtype(shapes.dtype).itemsize


def overfull(chip: str, held: int) -> CompileError | None:
    """Return the error of a call whose `held` bytes exceed the chip's global memory; None if they fit.

    The compiler does not check this.
    """
    has = hardware.chip(chip).memory_bytes
    if held <= has:
        return None
    text = f"the call holds {format_bytes(held)}, but {chip} has {format_bytes(int(has))}"
    meaning = "the chip's global memory is full: arguments, outputs and temporaries"
    return CompileError("HBM", text, meaning, "use a shorter length or a smaller batch")


def figures(kernel: Kernel, spec: AttentionSpec, shapes: Shapes, found: gpu.Compiled) -> dict[str, Any]:
    """Return the fields of `Inspection` that need a compiled call."""
    reports, flops = found.kernels, kernel.cost(spec, shapes)["flops"]
    launches = hlo.kernel_launches(found.program)
    moved = moved_bytes(kernel, spec, shapes)
    on = ceilings(found.chip, shapes.dtype)
    seconds, bound_by = roofline(on, flops, moved, shapes.head_dim)
    counts = {name: sum(r.instructions.get(name, 0) for r in reports) for name in gates.WATCHED}
    peak = hardware.chip(found.chip).bf16_flops_per_s * (FLOAT32 if shapes.dtype == "float32" else 1)
    return {
        "registers": max((r.registers for r in reports), default=None),
        "spill_bytes": max((sum(r.spill_bytes) for r in reports), default=None),
        "shared_bytes": max((r.shared_bytes for r in reports), default=None),
        "hbm_bytes": found.hbm_bytes,
        "temp_bytes": found.memory["temp"],
        "steps": blocks_launched(reports, launches),
        "launches": launches,
        "instructions": {name: count for name, count in counts.items() if count},
        "gates": tuple(gates.broken_program(reports)) if kernel.platform == "gpu" else None,
        "flops": flops,
        "roofline_ms": float(f"{1e3 * seconds:.6g}"),
        "roofline_tflops": round(flops / seconds / 1e12, 3),
        "percent_of_peak": round(100 * flops / seconds / peak, 2),
        "bound_by": bound_by,
        "moved_bytes": moved,
        "peak": on,
    }


def blocks_launched(reports: Sequence[sass.Report], launches: Mapping[str, int]) -> int | None:
    known = reports and all(r.blocks is not None and r.kernel in launches for r in reports)
    return sum(launches[r.kernel] * r.blocks for r in reports) if known else None


def moved_bytes(kernel: Kernel, spec: AttentionSpec, shapes: Shapes) -> float:
    """Return the least bytes that a call moves through global memory.

    The lists of a sparse prefill overlap, and the L2 cache serves the keys that they share, so a sparse prefill moves
    no more than a dense one.
    """
    moved = kernel.cost(spec, shapes)["bytes"]
    if kernel.role == "sparse" and shapes.num_queries > 1:
        moved = min(moved, work.prefill(spec, shapes)["bytes"])
    return moved


def ceilings(chip: str, dtype: str) -> Ceilings:
    on = CEILINGS[chip]
    return on._replace(flops_per_s=FLOAT32 * on.flops_per_s) if dtype == "float32" else on


def roofline(on: Ceilings, flops: float, moved: float, head_dim: int) -> tuple[float, str]:
    """Return (least seconds, name of the limiting resource) of a call.

    Each score costs 4 x `head_dim` flops and one exponential.
    """
    bounds = {
        "tensor cores": flops / on.flops_per_s,
        "main memory": moved / on.bytes_per_s,
        "exponentials": flops / (4 * head_dim) / on.exponentials_per_s,
    }
    name = max(bounds, key=bounds.__getitem__)
    return bounds[name], name


def verdict(gates: tuple[str, ...] | None) -> str:
    if gates is None:
        return "none apply"
    return f"{len(gates)} broken" if gates else "passed"


def describe(report: sass.Report, launches: int | None) -> str:
    launch = "" if report.blocks is None else f"{report.blocks:,} blocks of {report.threads} threads, "
    launch = launch if launches == 1 else f"launched {launches or 'an unknown number of'} times: {launch}"
    counts = ", ".join(f"{n} {c}" for n in gates.WATCHED if (c := report.instructions.get(n)))
    return (
        f"{report.kernel}: {launch}{report.registers} registers, {sum(report.spill_bytes)} bytes spilled, "
        f"{format_bytes(report.shared_bytes)} shared, {report.barriers} barriers\n    in the code: {counts}"
    )
