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
    """One step's memory on one device, as planned and as compiled."""

    call: Mapping[str, Any]  # the step, as arguments of `inspect_step`
    planned: Footprint
    fits: bool  # by the planner
    found: StepInspection

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the step for lack of memory."""
        return not self.found.compiled and str(self.found.error).startswith("HBM")

    @property
    def error(self) -> float | None:
        """(planned - compiled) / compiled; None if the step did not compile."""
        held = self.found.hbm_bytes
        return (self.planned.total - held) / held if self.found.compiled else None

    def line(self) -> str:
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


def planned(config: ModelConfig, chip: str, devices: int, call: Mapping[str, Any]) -> Footprint:
    given = {name: call.get(name) or config.dtype for name in ("weights", "cache")}
    rows = 1 if call["phase"] == "decode" else call["queries"]
    load = Load(batch=call["batch"], num_keys=call["length"], rows=rows, stacked=True)
    found = footprint(config, load, types=Types(**given, dtype=config.dtype), division=divide(config, devices))
    if chip in LAID_OUT_AGAIN:
        found = replace(found, copies=found.copies + found.attention + found.mlp)
    return found


def check(q: Question, model: str, *, limit_s: float) -> tuple[Check, ...]:
    """Compile two steps and compare their memory with the plan: dense decode of a token, Kascade prefill of a chunk."""
    policy, length = q.policy, capacity_bucket(q.length)
    rows = min(q.chunk, round_up(q.length, policy.query_tile), length)
    call = {"batch": q.batch, "length": length, "queries": rows, "tile": policy.tile, "query_tile": policy.query_tile}
    call |= {"fraction": policy.fraction}
    checks = []
    for phase, attention in (("decode", "dense"), ("prefill", "kascade")):
        step = call | {"phase": phase, "attention": attention}
        mine = planned(q.config, q.chip, q.devices, step)
        found = model_inspection.inspect_step(q.chip, model, q.devices, config=q.config, limit_s=limit_s, **step)
        checks.append(Check(call=step, planned=mine, fits=fits(mine, USABLE_BYTES[q.chip]), found=found))
    return tuple(checks)
