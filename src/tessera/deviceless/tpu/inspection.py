"""`tessera inspect`: one attention call compiled for a TPU that this machine lacks, and its predicted cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import KERNELS, choose
from tessera.attention.kernel import Kernel, role_of
from tessera.core.memory import format_bytes
from tessera.core.shapes import ceil_div
from tessera.deviceless import programs
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict

KEYS = (
    "chip kernel config refused compiled error vmem_bytes smem_bytes hbm_bytes steps bundles_per_step cycles_per_step "
    "slots spill_slots flops predicted_ms predicted_tflops percent_of_peak bound_by compile_s"
).split()

NOT_PREDICTED = "not predicted: no Pallas kernel in it"
"""`bound_by` of a call that only XLA computes: without a schedule, no time can be predicted."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One program on one chip; the fields in KEYS are the JSON object of `tessera inspect --json`.

    Attributes:
        hbm_bytes: main memory that the program holds while it runs.
        refused: the chip's own kernels for such a call, each with the reason it cannot take this one; empty if one can.
        steps, bundles_per_step, cycles_per_step: grid steps of the call, and the mean bundles and cycles of one.
        slots: per unit, slots used and slots available in a mean step.
        spill_slots: slots of a mean step that move spilled registers.
        flops: of the work, not of the kernel; masked and padded products do not count.
        predicted_ms, predicted_tflops: None without a Pallas kernel, whose schedule gives the time.
        percent_of_peak: of one jax device.
        moved_bytes: bytes to and from main memory in one call; a lower bound if nothing is predicted.
    """

    compiled: bool
    error: str | None = None
    vmem_bytes: int | None = None
    smem_bytes: int | None = None
    hbm_bytes: int | None = None
    steps: int | None = None
    bundles_per_step: float | None = None
    cycles_per_step: float | None = None
    slots: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    spill_slots: float | None = None
    flops: float | None = None
    predicted_ms: float | None = None
    predicted_tflops: float | None = None
    percent_of_peak: float | None = None
    bound_by: str | None = None
    compile_s: float | None = None
    chip: str = ""
    kernel: str = ""
    config: str = ""
    refused: Mapping[str, str] = MappingProxyType({})
    moved_bytes: float | None = None
    prediction: predict.Prediction | None = None
    found: tpu.Compiled | None = None

    def json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        body = {key: getattr(self, key) for key in KEYS}
        body["slots"] = {unit: dict(counts) for unit, counts in self.slots.items()}
        body["refused"] = dict(self.refused)
        return body


def call(
    *,
    role: str,
    phase: str,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    spec: AttentionSpec,
    fraction: float,
    queries: int | None = None,
) -> tuple[AttentionSpec, Shapes]:
    """Return (spec, shapes) of a plain call: prefill of the last `queries` of `length` tokens, or one decoded token."""
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    rows = 1 if phase == "decode" else queries or length
    spec = AttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)} | {"mass": role == "score"})
    capacity = max(1, ceil_div(round(fraction * length), spec.tile)) if role == "sparse" else None
    return spec, Shapes(batch, rows, length, heads, kv_heads, head_dim, capacity, dtype)


def inspect_call(
    chip: str,
    spec: AttentionSpec,
    shapes: Shapes,
    *,
    kernel: str | None = None,
    config: Mapping[str, Any] | None = None,
    limit_s: float = 300.0,
    paths: tuple[str, ...] = (),
) -> Inspection:
    """Compile one attention call and predict its time.

    Args:
        chip: "v5e", "v5p", "v6e" or "v7x".
        spec, shapes: the call.
        kernel: name of the kernel; the one that dispatch chooses on a TPU if not given.
        config: the kernel's block sizes; its default for this call if not given.
        limit_s: seconds for the compiler.
        paths: folders added to the compiling process's import path.

    Raises:
        ValueError: no kernel runs this call on a TPU, with the reasons; or `config` does not fit the kernel.
    """
    chosen = programs.kernel_named(kernel) if kernel else choose(spec, shapes, platform="tpu")
    programs.check(chosen, spec, shapes, config, "tpu")
    found = tpu.compile_for(
        chip, tpu.attention_program(chosen.name, spec, shapes, config), limit_s=limit_s, paths=paths
    )
    about = {"chip": chip, "kernel": chosen.name, "config": str(config or found.settings or "default"), "found": found}
    about["refused"] = refusals(spec, shapes, [k for k in KERNELS if k.platform == "tpu"])
    if found.error is not None:
        return Inspection(compiled=False, error=str(found.error), compile_s=found.compile_s, **about)
    return measure(chip, chosen, spec, shapes, found, about)


def refusals(spec: AttentionSpec, shapes: Shapes, kernels: Iterable[Kernel]) -> dict[str, str]:
    """Map each kernel of the call's role and phase to the reason it cannot take the call; empty if one can."""
    role, decodes = role_of(spec, shapes), shapes.num_queries == 1
    own = [k for k in kernels if k.role == role and (decodes or k.phase != "decode")]
    reasons = {kernel.name: kernel.refusal(spec, shapes) for kernel in own}
    return {} if None in reasons.values() else reasons


def measure(
    chip: str, kernel: Kernel, spec: AttentionSpec, shapes: Shapes, found: tpu.Compiled, about: Mapping[str, Any]
) -> Inspection:
    """Compute the figures of a compiled attention call."""
    work = kernel.cost(spec, shapes)
    counts = dict(found.executions or {predict.BYTES: work["bytes"]})
    prediction = predict.predict(found, counts, predict.CALIBRATED)
    if found.schedules:
        rate, bound_by, moved = work["flops"] / prediction.ms * 1e3, prediction.bound_by, prediction.moved_bytes
        times = {"predicted_ms": round(prediction.ms, 6), "predicted_tflops": round(rate / 1e12, 3)}
        times["percent_of_peak"] = round(100 * rate / predict.device(chip).flops_per_s, 2)
    else:
        times, bound_by, moved = {}, NOT_PREDICTED, work["bytes"]
    return Inspection(
        compiled=True,
        vmem_bytes=max((s.vmem_bytes for s in found.schedules), default=0),
        smem_bytes=max((s.smem_bytes for s in found.schedules), default=0),
        hbm_bytes=found.hbm_bytes,
        steps=prediction.steps,
        bundles_per_step=round(prediction.bundles_per_step, 1),
        cycles_per_step=round(prediction.cycles_per_step, 1),
        slots={u: {k: round(v, 1) for k, v in s.items()} for u, s in prediction.slots.items()},
        spill_slots=round(prediction.spill_slots, 1),
        flops=work["flops"],
        bound_by=bound_by,
        compile_s=round(found.compile_s, 2),
        moved_bytes=moved,
        prediction=prediction,
        **times,
        **about,
    )


def roofline(result: Inspection) -> tuple[float, float, float]:
    """Return (flops per byte moved, flops per byte at the ridge, least milliseconds) of a compiled call."""
    on = predict.device(result.chip)
    ms = 1e3 * max(result.flops / on.flops_per_s, result.moved_bytes / on.bytes_per_s)
    intensity = result.flops / result.moved_bytes if result.moved_bytes else 1.0
    return intensity, on.flops_per_s / on.bytes_per_s, ms


def print_table(result: Inspection) -> None:
    """Print the result for people: a table, the units as bars, the regions of each kernel."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not result.compiled:
        console.print(f"[bold]{result.kernel} on {result.chip}[/bold] does not compile")
        for name, text in result.found.error._asdict().items():
            console.print(f"  {name.replace('_', ' ')}: {text}", markup=False)
        return
    p, predicted = result.prediction, result.predicted_ms is not None
    intensity, ridge, least_ms = roofline(result)
    reached = f"{result.percent_of_peak:.1f} % of peak" if predicted else f"at least {least_ms:.3g} ms"
    table = Table(title=f"{result.kernel} on {result.chip}, {result.config}", title_justify="left", show_header=False)
    rows = {
        "predicted": f"{result.predicted_ms:.3f} ms: kernels {p.compute_ms:.3f} (their bytes {p.dma_ms:.3f}), "
        f"around them {p.around_ms:.3f}",
        "rate": f"{result.predicted_tflops:.1f} TFLOP/s",
        "bound by": result.bound_by,
        "steps": f"{result.steps:,} of {result.bundles_per_step:,.0f} bundles, {result.cycles_per_step:,.0f} cycles",
        "spilled registers": f"{result.spill_slots:,.0f} slots a step",
    } if predicted else {"predicted": result.bound_by, **result.refused}  # fmt: skip
    rows |= {
        "roofline": f"{reached}; {intensity:,.0f} flops per byte, the peak bounds from {ridge:,.0f}",
        "main memory": f"{format_bytes(result.hbm_bytes)} held, {format_bytes(result.moved_bytes)} moved"
        + ("" if predicted else " at least"),
        "VMEM, SMEM": f"{format_bytes(result.vmem_bytes)}, {format_bytes(result.smem_bytes)}",
        "compiled in": f"{result.compile_s:.1f} s",
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    console.print(table)
    for unit, counts in result.slots.items():
        share = counts["used"] / counts["capacity"] if counts["capacity"] else 0.0
        console.print(f"  {unit:<13} {'#' * round(40 * share):<40} {share:6.1%}", markup=False, highlight=False)
    total = sum(count * bundles for count, bundles in p.scopes.values())
    for name, (count, bundles) in p.scopes.items():
        share = count * bundles / total if total else 0.0
        console.print(f"  {share:6.1%} {name}: {count:,.0f} x {bundles:,} cycles", markup=False, highlight=False)
    if p.assumed:
        console.print(
            f"  counted once per step, because their real count is unknown: {', '.join(p.assumed)}", markup=False
        )


def picture(result: Inspection, path: Path) -> None:
    """Draw the call on its roofline, and the slots of a mean step by unit, as SVG (or the format of the suffix)."""
    from matplotlib.figure import Figure

    on = predict.device(result.chip)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    roof, bars = figure.subplots(1, 2)
    intensity, ridge, least_ms = roofline(result)
    low, high = min(intensity, ridge) / 10, max(intensity, ridge) * 10
    roof.plot([low, ridge, high], [low * on.bytes_per_s / 1e12, on.flops_per_s / 1e12, on.flops_per_s / 1e12], "k-")
    said = f"at least {least_ms:.3g} ms"
    if result.predicted_ms is None:
        roof.axvline(intensity, color="tab:red", linestyle=":")
    else:
        said = f"{result.predicted_ms:.3g} ms"
        roof.plot([intensity], [result.predicted_tflops], "o", color="tab:red")
        roof.annotate(f"{result.percent_of_peak:.0f} % of peak", (intensity, result.predicted_tflops), (6, -12),
                      textcoords="offset points")  # fmt: skip
    roof.set(xscale="log", yscale="log", xlabel="flops per byte of main memory", ylabel="TFLOP/s")
    roof.set_title(f"{result.kernel} on {result.chip}: {said}", fontsize=10)
    units = list(result.slots)
    shares = [100 * s["used"] / s["capacity"] if s["capacity"] else 0 for s in result.slots.values()]
    bars.barh(units, shares, color=["tab:red" if ":" in unit else "tab:blue" for unit in units])
    bars.invert_yaxis()
    bars.set(xlim=(0, 100), xlabel="slots used, %")
    bars.set_title(f"bound by {result.bound_by}" if units else result.bound_by, fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
