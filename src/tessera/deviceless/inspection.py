"""Compile one attention call for a chip that this machine lacks, and place it on the roofline (`tessera inspect`).

`tpu.inspection` and `gpu.inspection` compile the call and add the figures that only the platform's compiler gives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import KERNELS, choose
from tessera.attention.kernel import Kernel, role_of
from tessera.core import hardware
from tessera.core.shapes import ceil_div
from tessera.deviceless import programs
from tessera.deviceless.compiler import Compiled


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One call on one chip; KEYS names the fields that `tessera inspect --json` prints.

    A platform's subclass adds its figures, its KEYS, the chip's `peak` (`flops_per_s` and `bytes_per_s`), the table's
    `rows`, the `lines` below the table with their styles, and two parts of the picture: `mark` draws the call on the
    roofline and returns the call's time in words, and `fill` draws the bars of the second panel.

    """

    KEYS: ClassVar[Sequence[str]]
    panels: ClassVar[int] = 2

    compiled: bool
    error: str | None = None
    chip: str = ""
    kernel: str = ""
    config: str = ""
    refused: Mapping[str, str] = MappingProxyType({})  # of `refusals`
    hbm_bytes: int | None = None  # held while the program runs
    steps: int | None = None
    flops: float | None = None  # without products of masked or padded elements
    moved_bytes: float | None = None  # a lower bound if nothing is predicted
    percent_of_peak: float | None = None
    bound_by: str | None = None
    compile_s: float | None = None
    found: Compiled | None = None

    def json(self) -> dict[str, Any]:
        body = {key: getattr(self, key) for key in self.KEYS}
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in body.items()}

    def intensities(self) -> tuple[float, float]:
        """Return the call's flops per byte, and the flops per byte beyond which memory no longer limits a call."""
        return self.flops / self.moved_bytes if self.moved_bytes else 1.0, self.peak.flops_per_s / self.peak.bytes_per_s

    def print_table(self) -> None:
        """Print the result as a table, then the platform's `lines`; or print the compiler's error."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        if not self.compiled:
            verdict = "was not compiled in time" if self.found.timed_out else "does not compile"
            console.print(f"[bold]{self.kernel} on {self.chip}[/bold] {verdict}")
            for name, text in self.found.error._asdict().items():
                if text:
                    console.print(f"  {name.replace('_', ' ')}: {text}", markup=False)
            return
        table = Table(title=f"{self.kernel} on {self.chip}, {self.config}", title_justify="left", show_header=False)
        for name, text in self.rows().items():
            table.add_row(name, escape(text))
        console.print(table)
        for text, style in self.lines():
            console.print(f"  {text}", style=style, markup=False, highlight=False)

    def picture(self, path: Path) -> None:
        """Draw the call on the roofline, and the platform's bars; the suffix of `path` sets the format."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.5 * self.panels, 3.6), layout="constrained")
        roof, *rest = figure.subplots(1, self.panels, squeeze=False)[0]
        intensity, ridge = self.intensities()
        low, high = min(intensity, ridge) / 10, max(intensity, ridge) * 10
        top = self.peak.flops_per_s / 1e12
        roof.plot([low, ridge, high], [low * self.peak.bytes_per_s / 1e12, top, top], "k-")
        time = self.mark(roof, intensity)
        roof.set(xscale="log", yscale="log", xlabel="flops per byte of main memory", ylabel="TFLOP/s")
        roof.set_title(f"{self.kernel} on {self.chip}: {time}", fontsize=10)
        for bars in rest:
            self.fill(bars)
            bars.invert_yaxis()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


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
    """Return (spec, shapes) of a call: prefill of the last `queries` of `length` tokens, or one decoded token."""
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    rows = 1 if phase == "decode" else queries or length
    spec = AttentionSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)} | {"mass": role == "score"})
    capacity = max(1, ceil_div(round(fraction * length), spec.tile)) if role == "sparse" else None
    return spec, Shapes(batch, rows, length, heads, kv_heads, head_dim, capacity, dtype)


def kernel_for(
    platform: str, chip: str, spec: AttentionSpec, shapes: Shapes, name: str | None, config: Mapping[str, Any] | None
) -> Kernel:
    """Return the named kernel; without a name, dispatch's first choice among kernels that compile without the chip."""
    where = {"platform": platform, "capability": hardware.chip(chip).capability}
    if name:
        kernel = programs.kernel_named(name)
    else:
        takes = (k for k in KERNELS if k.simulable and not k.refusal(spec, shapes, **where, automatic=True))
        kernel = next(takes, None) or choose(spec, shapes, **where)
    programs.check(kernel, spec, shapes, config, **where)
    return kernel


def facts(
    platform: str,
    kernel: Kernel,
    spec: AttentionSpec,
    shapes: Shapes,
    config: Mapping[str, Any] | None,
    found: Compiled,
) -> dict[str, Any]:
    """Return the fields of an `Inspection` that every platform has, whether the call compiled or not."""
    return {
        "compiled": found.error is None,
        "error": None if found.error is None else str(found.error),
        "chip": found.chip,
        "kernel": kernel.name,
        "config": str(config or found.settings or "default"),
        "refused": refusals(platform, found.chip, spec, shapes),
        "compile_s": found.compile_s if found.error else round(found.compile_s, 2),
        "found": found,
    }


def refusals(platform: str, chip: str, spec: AttentionSpec, shapes: Shapes) -> dict[str, str]:
    """Return {kernel: why it refuses the call} for our kernels of the call's role and phase; {} if one accepts it."""
    role, decodes = role_of(spec, shapes), shapes.num_queries == 1
    ours = [k for k in KERNELS if k.platform == platform and k.simulable and k.role == role]
    capability = hardware.chip(chip).capability
    reasons = {k.name: k.refusal(spec, shapes, capability=capability) for k in ours if decodes or k.phase != "decode"}
    return {} if None in reasons.values() else reasons
