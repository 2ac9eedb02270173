"""Picture of `tessera fit`: one bar of memory per pair of weight and cache types, stacked by what takes the memory,
and a line at the chip's usable memory."""

from pathlib import Path

from matplotlib.figure import Figure

from tessera.runtime.planner import Answer

GIB = 1 << 30
PARTS = {
    "attention": ("attention weights", "#4269d0"),
    "mlp": ("MLP weights", "#8fa8e8"),
    "vocabulary": ("vocabulary", "#c3d0f3"),
    "cache": ("keys and values", "#efb118"),
    "activations": ("activations", "#3ca951"),
    "rest": ("copies, logits, norms, program", "#9c9c9c"),
}
"""Part of the memory -> label and colour; "rest" is the total minus the other parts."""


def draw(answer: Answer, model: str, path: Path) -> None:
    pairs, q = answer.pairs, answer.question
    figure = Figure(figsize=(8.0, 0.5 + 0.45 * len(pairs) + 1.3), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(pairs)
    labels = [f"{pair.weights}, {pair.cache}" for pair in pairs]
    for part, (label, colour) in PARTS.items():
        named = [sum(getattr(pair.parts, name) for name in PARTS if name != "rest") for pair in pairs]
        sizes = [
            (pair.parts.total - shown if part == "rest" else getattr(pair.parts, part)) / GIB
            for pair, shown in zip(pairs, named)
        ]
        axes.barh(labels, sizes, left=left, color=colour, label=label, height=0.62)
        left = [a + b for a, b in zip(left, sizes)]
    usable = pairs[0].usable_bytes / GIB
    axes.axvline(usable, color="#b3001b", linewidth=1.5)
    width = max(*left, usable) * 1.3  # room for "does not fit"
    axes.text(usable, -0.75, f" {usable:.1f} usable", color="#b3001b", va="center", ha="left", fontsize=9)
    for row, (pair, end) in enumerate(zip(pairs, left)):
        text = f" {end:.1f}" if pair.fits else f" {end:.1f}, does not fit"
        axes.text(end, row, text, va="center", fontsize=9, color="#222222" if pair.fits else "#b3001b")
    axes.set_xlim(0, width)
    axes.set_ylim(len(pairs) - 0.5, -1.2)
    axes.set_xlabel("GiB per device")
    axes.set_title(f"{model} on {q.devices} x {q.chip}, {q.batch} x {q.length:,} tokens: weights, cache", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path)
