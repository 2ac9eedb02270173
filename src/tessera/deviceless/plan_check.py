"""Compare planned memory with the compiler's: the step of a model, compiled for a mesh that this machine lacks.

The compiled steps run their layers under a scan, since unrolled ones compile for many minutes. A scan copies one
layer's keys and values, and on v7x all layers' matrices, which the compiler lays out again before the loop; unrolled
layers, which `load` runs, copy neither (LOG.md). `planned` counts both, so that like is compared with like.
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
"""Chips for which the compiler copies stacked matrices into tiles of 16 rows before the loop over layers."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One step: planned bytes on one device, and the compiler's, or its refusal.

    Attributes:
        call: the step, as `inspect_step` takes it.
        fits: whether the planner says that the step fits.
        found: what the compiler said.
    """

    call: Mapping[str, Any]
    planned: Footprint
    fits: bool
    found: StepInspection

    @property
    def refused(self) -> bool:
        """Whether the compiler refused the step for lack of memory."""
        return not self.found.compiled and str(self.found.error).startswith("HBM")

    @property
    def error(self) -> float | None:
        """(planned - compiled) / compiled; None if it did not compile."""
        held = self.found.hbm_bytes
        return (self.planned.total - held) / held if self.found.compiled else None

    def line(self) -> str:
        """Say in one line what was planned and what the compiler holds."""
        what = f"{self.call['attention']} {self.call['phase']}: planned {format_bytes(self.planned.total)}"
        if not self.found.compiled:
            return f"{what}; the compiler: {self.found.error}"
        return f"{what}, compiled {format_bytes(self.found.hbm_bytes)} ({100 * self.error:+.2f} %)"

    def json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
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
    """Raise ValueError unless the compiler can be asked about this question."""
    if q.chip not in MESHES:
        raise ValueError(f"--compile knows {', '.join(MESHES)}, not --chip {q.chip}: drop --compile")
    if q.devices not in MESHES[q.chip]:
        sizes = ", ".join(map(str, MESHES[q.chip]))
        raise ValueError(f"--compile takes --devices of {sizes} on {q.chip}, not {q.devices}: drop --compile")
    if q.division.context > 1:
        raise ValueError(
            f"--compile compiles meshes without a context axis, and --devices {q.devices} do not divide the model's "
            f"{q.config.num_kv_heads} KV heads: drop --compile"
        )


def types_of(config: ModelConfig, call: Mapping[str, Any]) -> Types:
    """Return the number types of a step: the model's own where the call names none."""
    given = {name: call.get(name) or config.dtype for name in ("weights", "cache")}
    return Types(**given, dtype=config.dtype)


def planned(config: ModelConfig, chip: str, devices: int, call: Mapping[str, Any]) -> Footprint:
    """Plan the bytes of the step that `inspect_step` compiles."""
    types = types_of(config, call)
    rows = 1 if call["phase"] == "decode" else call["queries"]
    load = Load(batch=call["batch"], num_keys=call["length"], rows=rows, stacked=True)
    found = footprint(config, load, types=types, division=divide(config, devices))
    if chip in LAID_OUT_AGAIN:
        found = replace(found, copies=found.copies + found.attention + found.mlp)
    return found


def check_step(config: ModelConfig, model: str, chip: str, devices: int, *, limit_s: float, **call: Any) -> Check:
    """Compile one step and compare; `model` is what `steps.config_of` takes."""
    mine = planned(config, chip, devices, call)
    found = model_inspection.inspect_step(chip, model, devices, limit_s=limit_s, **call)
    return Check(call=call, planned=mine, fits=fits(mine, USABLE_BYTES[chip]), found=found)


def check(q: Question, model: str, *, limit_s: float) -> tuple[Check, ...]:
    """Compile a dense decode step and a Kascade prefill chunk of this question."""
    policy, length = q.policy, capacity_bucket(q.length)
    rows = min(q.chunk, round_up(q.length, policy.query_tile), length)
    call = {"batch": q.batch, "length": length, "queries": rows, "tile": policy.tile, "query_tile": policy.query_tile}
    call |= {"fraction": policy.fraction}
    steps = (("decode", "dense"), ("prefill", "kascade"))
    return tuple(
        check_step(q.config, model, q.chip, q.devices, limit_s=limit_s, phase=phase, attention=attention, **call)
        for phase, attention in steps
    )
