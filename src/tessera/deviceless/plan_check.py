"""Compare the memory that the planner expects with the memory that the compiler reports, for an absent mesh.

The compiled steps run their layers under a scan, because unrolled layers take many minutes to compile. A scan copies
one layer's keys and values. On v7x, it also copies the matrices of all layers, because the compiler changes their
layout before the loop. The unrolled layers of a model from `tessera.load` make neither copy (LOG.md). `planned` counts
both copies, so that the plan describes the program that is compiled.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tessera.core.hardware import USABLE_BYTES
from tessera.core.memory import format_bytes
from tessera.core.shapes import round_up
from tessera.deviceless import model_inspection
from tessera.deviceless.model_inspection import MESHES, StepInspection
from tessera.models.config import ModelConfig
from tessera.models.footprint import Footprint, Load, Types, divide, footprint
from tessera.runtime.compilation import capacity_bucket
from tessera.runtime.planner import fits
from tessera.runtime.roofline import Question

LAID_OUT_AGAIN = frozenset({"v7x"})
"""Chips on which the compiler, before the loop over layers, copies stacked matrices to a layout of 16-row tiles."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Planned bytes of one step on one device, and the compiler's result."""

    call: Mapping[str, Any]  # the step, as arguments of `inspect_step`
    planned: Footprint  # planned bytes, by part
    fits: bool  # whether the step fits in the device's memory, according to the planner
    found: StepInspection  # the compiler's result

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the step for lack of memory."""
        return not self.found.compiled and str(self.found.error).startswith("HBM")

    @property
    def error(self) -> float | None:
        """Relative error (planned - compiled) / compiled; None if the step did not compile."""
        held = self.found.hbm_bytes
        return (self.planned.total - held) / held if self.found.compiled else None

    def line(self) -> str:
        """Return one line with the planned memory and the compiled memory, or the compiler's error."""
        what = f"{self.call['attention']} {self.call['phase']}: planned {format_bytes(self.planned.total)}"
        if not self.found.compiled:
            return f"{what}; the compiler: {self.found.error}"
        return f"{what}, compiled {format_bytes(self.found.hbm_bytes)} ({100 * self.error:+.2f} %)"

    def json(self) -> dict[str, Any]:
        found = self.found.json()
        return {
            "call": dict(self.call),
            "planned": {**asdict(self.planned), "total": self.planned.total},
            "fits": self.fits,
            "compiled": found["hbm_bytes"],
            "memory": found["memory"],
            "error": found["error"],
        }


def require_compiler(q: Question) -> None:
    """Raise ValueError if --compile does not support the question's chip or number of devices."""
    if q.chip not in MESHES:
        raise ValueError(f"--compile supports the chips {', '.join(MESHES)}, not --chip {q.chip}: drop --compile")
    if q.devices not in MESHES[q.chip]:
        sizes = ", ".join(map(str, MESHES[q.chip]))
        raise ValueError(f"--compile takes --devices of {sizes} on {q.chip}, not {q.devices}: drop --compile")
    if q.division.context > 1:
        raise ValueError(
            f"--devices {q.devices} does not divide the model's {q.config.num_kv_heads} KV heads, so the mesh needs a "
            "context axis, which --compile does not support: drop --compile"
        )


def types_of(config: ModelConfig, call: Mapping[str, Any]) -> Types:
    given = {name: call.get(name) or config.dtype for name in ("weights", "cache")}
    return Types(**given, dtype=config.dtype)


def planned(config: ModelConfig, chip: str, devices: int, call: Mapping[str, Any]) -> Footprint:
    types = types_of(config, call)
    rows = 1 if call["phase"] == "decode" else call["queries"]
    load = Load(batch=call["batch"], num_keys=call["length"], rows=rows, stacked=True)
    found = footprint(config, load, types=types, division=divide(config, devices))
    if chip in LAID_OUT_AGAIN:
        found = replace(found, copies=found.copies + found.attention + found.mlp)
    return found


def check_step(config: ModelConfig, model: str, chip: str, devices: int, *, limit_s: float, **call: Any) -> Check:
    """Compile one step and compare its memory with the plan; `model` is as in `steps.find_model`."""
    mine = planned(config, chip, devices, call)
    found = model_inspection.inspect_step(chip, model, devices, config=config, limit_s=limit_s, **call)
    return Check(call=call, planned=mine, fits=fits(mine, USABLE_BYTES[chip]), found=found)


def check(q: Question, model: str, *, limit_s: float) -> tuple[Check, ...]:
    """Compile two steps and compare their memory with the plan: dense decode of a token, Kascade prefill of a chunk."""
    policy, length = q.policy, capacity_bucket(q.length)
    rows = min(q.chunk, round_up(q.length, policy.query_tile), length)
    call = {"batch": q.batch, "length": length, "queries": rows, "tile": policy.tile, "query_tile": policy.query_tile}
    call |= {"fraction": policy.fraction}
    steps = (("decode", "dense"), ("prefill", "kascade"))
    return tuple(
        check_step(q.config, model, q.chip, q.devices, limit_s=limit_s, phase=phase, attention=attention, **call)
        for phase, attention in steps
    )
