"""The record of a training run: the loss log, a plot of the log, and the progress line."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tessera.core.files import write_text, write_whole

LOG_NAME = "loss.jsonl"
PLAIN_EVERY_S = 30.0


def read_losses(path: Path) -> list[dict[str, Any]]:
    """Read a loss log up to the first line that is out of order or incomplete, as after a kill."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict) or line.get("step") != len(lines) + 1:
            break
        lines.append(line)
    return lines


def open_log(path: Path, step: int):
    """Open a loss log for appending after `step`; drop lines of later steps and incomplete lines of a killed run."""
    lines = read_losses(path)
    if len(lines) < step:
        raise ValueError(
            f"{path} ends at step {len(lines)}, but the checkpoint is at step {step}: restore the log, or use a new "
            "folder"
        )
    kept = "".join(json.dumps(line) + "\n" for line in lines[:step])
    write_whole(path, lambda temporary: write_text(temporary, kept))
    return open(path, "a", encoding="utf-8", buffering=1)


class Line:
    """One line of progress: loss, share of right answer tokens ("answers"), tokens/s, MFU and time left.

    A terminal redraws the line after every step; other outputs get a new line at most every 30 s. MFU is the model's
    FLOP/s over the peak FLOP/s that a large matrix product reaches on this machine.
    """

    def __init__(self, console: Console, steps: int, peak_flops: float):
        self.console, self.peak = console, peak_flops
        columns = (TextColumn("train"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console, transient=False, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=steps)
        self.rates: list[tuple[float, float, float]] = []
        self.printed = -math.inf

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *exception):
        self.progress.stop()

    def show(self, line: dict[str, Any], flops: float, flops_left: float) -> None:
        """Show a finished step; rates are means over the last 20 steps."""
        self.rates = [*self.rates[-19:], (line["tokens"], flops, line["seconds"])]
        tokens, done, seconds = (sum(column) for column in zip(*self.rates))
        left = flops_left / (done / seconds)
        text = (
            f"loss {line['loss']:.3f}  answers {line['answers']:.3f}  {tokens / seconds:,.0f} tokens/s  "
            f"MFU {done / seconds / self.peak:.0%}  {clock(left)} left  ({line['length']} tokens long)"
        )
        self.progress.update(self.task, completed=line["step"], description=text)
        if not self.console.is_terminal and time.monotonic() - self.printed > PLAIN_EVERY_S:
            self.console.print(f"step {line['step']}  {text}", highlight=False, soft_wrap=True)
            self.printed = time.monotonic()


def clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def draw_losses(lines: list[dict[str, Any]], path: str | os.PathLike, title: str = "") -> None:
    """Plot the loss and the share of right answer tokens over the tokens seen; mark changes of the sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens = np.cumsum([line["tokens"] for line in lines]) / 1e6
    lengths = np.array([line["length"] for line in lines])
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, layout="constrained")
    for axis, name, label in ((top, "loss", "loss (nats, weighted)"), (bottom, "answers", "answer tokens right")):
        values = np.array([line[name] for line in lines])
        axis.plot(tokens, values, color="#9ecae1", linewidth=0.6)
        axis.plot(tokens, smooth(values), color="#08519c", linewidth=1.6)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    bottom.set_ylim(0, 1.02)
    bottom.set_xlabel("million tokens seen")
    for begin in np.flatnonzero(np.diff(lengths, prepend=0)):
        where = tokens[begin] - lines[begin]["tokens"] / 1e6
        for axis in (top, bottom):
            axis.axvline(where, color="#bbbbbb", linewidth=0.8, linestyle=":")
        top.annotate(
            f"{lengths[begin]}", (where, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 3),
            textcoords="offset points", fontsize=8, color="#555555",
        )  # fmt: skip
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def smooth(values: np.ndarray) -> np.ndarray:
    """Compute the centred running mean of 15 values; the window shrinks at both ends."""
    kernel = np.ones(min(15, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
