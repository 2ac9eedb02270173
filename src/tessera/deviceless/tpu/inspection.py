"""Compile one attention call for a TPU that this machine lacks, and predict its time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Kernel
from tessera.core.memory import format_bytes
from tessera.deviceless import inspection
from tessera.deviceless.compiler import attention_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict

NOT_PREDICTED = "not predicted: the call has no Pallas kernel"
"""`bound_by` of a call that only XLA computes: without a schedule, no time can be predicted."""


@dataclass(frozen=True, kw_only=True)
class Inspection(inspection.Inspection):
    """One call on one TPU; `steps` counts grid steps, and `percent_of_peak` is of one jax device's nominal rate."""

    KEYS = (
        "chip kernel config refused compiled error vmem_bytes smem_bytes hbm_bytes steps bundles_per_step "
        "cycles_per_step slots spill_slots flops predicted_ms predicted_tflops percent_of_peak bound_by compile_s"
    ).split()

    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    bundles_per_step: float | None = None
    cycles_per_step: float | None = None
    slots: Mapping[str, Mapping[str, float]] = MappingProxyType({})  # unit -> mean slots used and available per step
    spill_slots: float | None = None  # mean slots per step that move spilled registers
    predicted_ms: float | None = None  # from the schedules of the Pallas kernels; None if the call has no such kernel
    predicted_tflops: float | None = None
    prediction: predict.Prediction | None = None

    @property
    def peak(self) -> predict.Device:
        return predict.device(self.chip)

    @property
    def least_ms(self) -> float:
        """Lower bound of the call's milliseconds, from the roofline."""
        return 1e3 * max(self.flops / self.peak.flops_per_s, self.moved_bytes / self.peak.bytes_per_s)

    def rows(self) -> dict[str, str]:
        p, predicted = self.prediction, self.predicted_ms is not None
        intensity, ridge = self.intensities()
        reached = f"{self.percent_of_peak:.1f} % of peak" if predicted else f"at least {self.least_ms:.3g} ms"
        rows = {
            "predicted": f"{self.predicted_ms:.3f} ms: kernels {p.compute_ms:.3f} (their bytes {p.dma_ms:.3f}), "
            f"around them {p.around_ms:.3f}",
            "rate": f"{self.predicted_tflops:.1f} TFLOP/s",
            "bound by": self.bound_by,
            "steps": f"{self.steps:,} of {self.bundles_per_step:,.0f} bundles, {self.cycles_per_step:,.0f} cycles",
            "spilled registers": f"{self.spill_slots:,.0f} slots a step",
        } if predicted else {"predicted": self.bound_by, **self.refused}  # fmt: skip
        return rows | {
            "roofline": f"{reached}; {intensity:,.0f} flops per byte; from {ridge:,.0f} on, the peak rate is the limit",
            "main memory": f"{format_bytes(self.hbm_bytes)} held, {format_bytes(self.moved_bytes)} moved"
            + ("" if predicted else " at least"),
            "VMEM, SMEM": f"{format_bytes(self.vmem_bytes)}, {format_bytes(self.smem_bytes)}",
            "compiled in": f"{self.compile_s:.1f} s",
        }

    def shares(self) -> dict[str, float]:
        """Return the mean share of each unit's slots in use."""
        return {unit: s["used"] / s["capacity"] if s["capacity"] else 0.0 for unit, s in self.slots.items()}

    def lines(self) -> Iterator[tuple[str, None]]:
        for unit, share in self.shares().items():
            yield f"{unit:<13} {'#' * round(40 * share):<40} {share:6.1%}", None
        scopes = self.prediction.scopes
        total = sum(count * bundles for count, bundles in scopes.values())
        for name, (count, bundles) in scopes.items():
            share = count * bundles / total if total else 0.0
            yield f"{share:6.1%} {name}: {count:,.0f} x {bundles:,} cycles", None
        if assumed := self.prediction.assumed:
            yield f"counted once per step, because their real count is unknown: {', '.join(assumed)}", None

    def mark(self, roof: Any, intensity: float) -> str:
        if self.predicted_ms is None:
            roof.axvline(intensity, color="tab:red", linestyle=":")
            return f"at least {self.least_ms:.3g} ms"
        roof.plot([intensity], [self.predicted_tflops], "o", color="tab:red")
        roof.annotate(f"{self.percent_of_peak:.0f} % of peak", (intensity, self.predicted_tflops), (6, -12),
                      textcoords="offset points")  # fmt: skip
        return f"{self.predicted_ms:.3g} ms"

    def fill(self, bars: Any) -> None:
        units, shares = list(self.slots), [100 * share for share in self.shares().values()]
        bars.barh(units, shares, color=["tab:red" if ":" in unit else "tab:blue" for unit in units])
        bars.set(xlim=(0, 100), xlabel="slots used, %")
        bars.set_title(f"bound by {self.bound_by}" if units else self.bound_by, fontsize=10)


def inspect_call(
    chip: str,
    spec: AttentionSpec,
    shapes: Shapes,
    *,
    kernel: str | None = None,
    config: Mapping[str, Any] | None = None,
    limit_s: float = 300.0,
    variant: Mapping[str, Any] = MappingProxyType({}),
) -> Inspection:
    """Compile one attention call and predict its time.

    `kernel` and `config` are as for `inspection.kernel_for`; without a config, the kernel uses its default. `variant`
    holds further arguments of `programs.attention_call`.
    """
    chosen = inspection.kernel_for("tpu", chip, spec, shapes, kernel, config)
    program = attention_program(chosen.name, spec, shapes, config, **variant)
    found = tpu.compile_for(chip, program, limit_s=limit_s)
    result = Inspection(**inspection.facts("tpu", chosen, spec, shapes, config, found))
    return replace(result, **figures(chosen, spec, shapes, found)) if result.compiled else result


def figures(kernel: Kernel, spec: AttentionSpec, shapes: Shapes, found: tpu.Compiled) -> dict[str, Any]:
    """Return the fields of `Inspection` that need a compiled call."""
    work = kernel.cost(spec, shapes)
    counts = dict(found.executions or {predict.BYTES: work["bytes"]})
    prediction = predict.predict(found, counts, predict.CALIBRATED)
    if found.schedules:
        rate, bound_by, moved = work["flops"] / prediction.ms * 1e3, prediction.bound_by, prediction.moved_bytes
        times = {"predicted_ms": round(prediction.ms, 6), "predicted_tflops": round(rate / 1e12, 3)}
        times["percent_of_peak"] = round(100 * rate / predict.device(found.chip).flops_per_s, 2)
    else:
        times, bound_by, moved = {}, NOT_PREDICTED, work["bytes"]
    return times | {
        "vmem_bytes": max((s.vmem_bytes for s in found.schedules), default=0),
        "smem_bytes": max((s.smem_bytes for s in found.schedules), default=0),
        "hbm_bytes": found.hbm_bytes,
        "steps": prediction.steps,
        "bundles_per_step": round(prediction.bundles_per_step, 1),
        "cycles_per_step": round(prediction.cycles_per_step, 1),
        "slots": {u: {k: round(v, 1) for k, v in s.items()} for u, s in prediction.slots.items()},
        "spill_slots": round(prediction.spill_slots, 1),
        "flops": work["flops"],
        "bound_by": bound_by,
        "moved_bytes": moved,
        "prediction": prediction,
    }
