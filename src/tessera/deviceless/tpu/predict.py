"""Predict a time from a schedule: the cycles of the executed bundles, and the bytes divided by the bandwidth.

    kernel_s  = max(sum over scopes of executions x cycles / clock / cores, bytes moved by the kernel / bandwidth)
    around_s  = bytes of XLA's copies, transposes and fusions around the kernel / bandwidth
    cycles    = bundles of a scope, or the cycles of its products in the matrix units if those are more
    predicted = kernel_s + around_s, corrected by `Overheads` for costs that no schedule shows

The prediction leaves out waits for the latency of single DMAs (small blocks), contention between cores, and lower
clock rates under load. `lab/studies/validation.py` compares predictions with measured times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tessera.core import hardware
from tessera.deviceless.tpu.compiler import Compiled
from tessera.deviceless.tpu.schedule import LAUNCH, STEP, Schedule

BYTES = "hbm_bytes"
SPILLS = ("VLOAD:FILL", "VSTORE:SPILL")


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Costs that no schedule shows."""

    stall: float = 1.0  # cycles per bundle; above 1 where on-chip memory makes the core wait
    step_s: float = 0.0  # seconds that a grid step adds on its core (DMA set-up and waits)
    bandwidth_share: float = 1.0  # share of the nominal HBM bandwidth that copies reach


NOMINAL = Overheads()
"""Overheads of an ideal chip: no stalls, no cost per step, full bandwidth."""

CALIBRATED = Overheads(stall=1.02, step_s=0.17e-6, bandwidth_share=0.8)
"""Overheads fitted to measured times, on v5p and v6e only. evidence/tpu-prediction.jsonl has the errors on these
chips and on v7x."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted cost of a compiled program on one jax device of its chip."""

    ms: float  # time of the whole program
    compute_ms: float  # time of the kernels' bundles, and of their bytes; the longer one counts
    dma_ms: float
    around_ms: float  # time of the operations around the kernels
    steps: int  # grid steps of all kernels
    bundles_per_step: float  # mean bundles of one step on one core
    cycles_per_step: float  # mean cycles of one step on one core: the sum of `schedule.Region.cycles` over its scopes
    slots: Mapping[str, Mapping[str, float]]  # unit -> mean slots used and available per step
    spill_slots: float  # mean slots per step that move spilled registers
    moved_bytes: float  # bytes to and from HBM, by the kernels and the operations around them
    bound_by: str  # as `bound` says
    assumed: tuple[str, ...]  # scopes whose number of executions the kernel does not state; they count once per step
    scopes: Mapping[str, tuple[float, int]] = MappingProxyType({})  # "kernel/scope" -> (executions, cycles of one)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Resources of one jax device of a chip."""

    cores: int
    clock_hz: float
    flops_per_s: float
    bytes_per_s: float


def device(chip: str) -> Device:
    """Return one jax device of the chip: the whole chip, except on v7x, where each core is a device."""
    found = hardware.chip(chip)
    n = found.devices
    return Device(
        cores=found.cores // n,
        clock_hz=found.clock_hz,
        flops_per_s=found.bf16_flops_per_s / n,
        bytes_per_s=found.bytes_per_s / n,
    )


def predict(compiled: Compiled, executions: Mapping[str, float], overheads: Overheads = NOMINAL) -> Prediction:
    """Predict the time of a program that compiled.

    `executions` says how often each scope runs in the whole call, as `Kernel.executions` does; with several kernels the
    names are "kernel/scope". A scope without a count runs once per step (noted in `assumed`).
    """
    on = device(compiled.chip)
    bundles, cycles, steps, compute_s, assumed = 0.0, 0.0, 0.0, 0.0, []
    used: dict[str, float] = {}
    capacity: dict[str, float] = {}
    scopes: dict[str, tuple[float, int]] = {}
    for found in compiled.schedules:
        counts, missing = counts_of(found, executions)
        assumed += [f"{found.name}/{name}" for name in missing]
        steps += counts[STEP]
        own = sum(counts[region.name] * region.cycles for region in found.regions)
        cycles += own
        bundles += sum(counts[region.name] * region.bundles for region in found.regions)
        cores = cores_at_work(found, counts[STEP], on.cores)
        compute_s += (overheads.stall * own / on.clock_hz + counts[STEP] * overheads.step_s) / cores
        for region in found.regions:
            passes = counts[region.name]
            scopes[f"{found.name}/{region.name}"] = (passes, region.cycles)
            for unit, count in region.slots.items():
                used[unit] = used.get(unit, 0.0) + passes * count
                capacity[unit] = capacity.get(unit, 0.0) + passes * region.cycles * found.capacity[unit]
    moved = float(sum(count for name, count in executions.items() if name.rpartition("/")[2] == BYTES))
    around_bytes = float(sum(o.bytes for o in compiled.operations))
    bandwidth = on.bytes_per_s * overheads.bandwidth_share
    dma_s, around_s = moved / bandwidth, around_bytes / bandwidth
    per_step = max(steps, 1.0)
    slots = {unit: {"used": used[unit] / per_step, "capacity": capacity[unit] / per_step} for unit in used}
    return Prediction(
        ms=1e3 * (max(compute_s, dma_s) + around_s),
        compute_ms=1e3 * compute_s,
        dma_ms=1e3 * dma_s,
        around_ms=1e3 * around_s,
        steps=round(steps),
        bundles_per_step=bundles / per_step,
        cycles_per_step=cycles / per_step,
        slots=MappingProxyType(slots),
        spill_slots=sum(used.get(unit, 0.0) for unit in SPILLS) / per_step,
        moved_bytes=moved + around_bytes,
        bound_by=bound(slots, compute_s, dma_s, around_s),
        assumed=tuple(assumed),
        scopes=MappingProxyType(scopes),
    )


def cores_at_work(found: Schedule, steps: float, cores: int) -> int:
    """Return the number of cores that share the grid: with n cores, one core's loop has steps / n iterations.

    A pipelined loop has two more iterations, to copy the first block in and the last block out.
    """
    if cores == 1 or steps < 2:
        return 1
    if found.turns is None:
        return cores
    return max(1, min(cores, round(steps / max(found.turns - 2, 1))))


def counts_of(found: Schedule, executions: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the executions of each region of one kernel, and the scopes that `executions` does not name."""
    own = {name.partition("/")[2]: n for name, n in executions.items() if name.partition("/")[0] == found.name}
    own = {name: n for name, n in executions.items() if "/" not in name} | own
    steps = own.get(STEP, float(max((found.turns or 1) - 2, 1)))
    counts = {region.name: own.get(region.name, steps) for region in found.regions}
    counts[LAUNCH] = own.get(LAUNCH, 1.0)
    missing = [r.name for r in found.regions if r.name not in own and r.name not in (LAUNCH, STEP)]
    return counts | {STEP: steps}, missing


def bound(slots: Mapping[str, Mapping[str, float]], compute_s: float, dma_s: float, around_s: float) -> str:
    """Return the name of the longest part of the time; if this is computing, the name of the core's fullest unit.

    If no unit is half full, the name is "latency", with the fullest unit in brackets.
    """
    if around_s > max(compute_s, dma_s) or not slots:
        return "XLA operations"
    if dma_s > compute_s:
        return "HBM"
    shares = {unit: s["used"] / s["capacity"] for unit, s in slots.items() if s["capacity"] and ":" not in unit}
    unit = max(shares, key=shares.get)
    # If no unit is half full, the bundles wait for each other's results.
    return unit if shares[unit] >= 0.5 else f"latency ({unit} fullest)"
