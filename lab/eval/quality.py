"""Measure pass-key accuracy, and build the demo model's plans by Kascade's own recipe for `eval --suite study`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.training.data import Task, passkey_task
from tessera.calibration.calibrate import calibrate
from tessera.generate import Model
from tessera.measure.judge.library import library_calibration
from tessera.runtime.sampling import GREEDY
from tessera.sparse.plan import Plan
from tessera.train.data import Split


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Pass-key accuracy.

    Attributes:
        num_tasks: number of prompts.
        num_right: number of prompts whose greedy answer is exactly the hidden key.
        layer_density: keys read / keys visible of each layer over prefill and decode, averaged over prompts.
    """

    num_tasks: int
    num_right: int
    layer_density: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of tasks answered right, 0 to 1."""
        return self.num_right / self.num_tasks


def passkey_tasks(num_tasks: int, length: int, seed: int = 0) -> list[Task]:
    """Draw prompts from held-out library text, with pass keys hidden at evenly spaced depths."""
    depths = (np.arange(num_tasks) + 0.5) / num_tasks
    return [passkey_task(np.random.default_rng((seed, length, i)), length, depth=d) for i, d in enumerate(depths)]


def passkey_accuracy(model: Model, tasks: Sequence[Task], *, batch: int = 4) -> Accuracy:
    """Answer the tasks greedily with `generate`, `batch` prompts at a time, and count the right answers."""
    num_right, layers = 0, []
    for first in range(0, len(tasks), batch):
        asked = tasks[first : first + batch]
        answers = model.generate(
            [task.prompt.tolist() for task in asked], max_new_tokens=max(len(task.answer) for task in asked), **GREEDY
        )
        for task, answer in zip(asked, answers, strict=True):
            num_right += list(answer.tokens[: len(task.answer)]) == task.answer.tolist()
            layers.append(answer.layer_density)
    mean = tuple(np.mean(layers, axis=0).tolist())
    return Accuracy(num_tasks=len(tasks), num_right=num_right, layer_density=mean)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Options of a study plan that is built by Kascade's own recipe."""

    tile: int = 64
    query_tile: int = 64
    heads: str = "remap"
    anchors: int | None = None
    fraction: float = 0.1
    minimum: int = 256


CHOSEN = Variant()
"""Options of the study's unchanged plan. The study's other plans differ from it in some options (docs/answers.md)."""


def calibration_texts(length: int, num_texts: int = 12) -> list[list[int]]:
    """Return token lists for calibration: library text that no test uses; every second list hides a pass key."""
    return with_pass_keys(library_calibration(), length, num_texts, seed=99)


def with_pass_keys(text: np.ndarray, length: int, num_texts: int, seed: int) -> list[list[int]]:
    """Cut random windows from a text; every second window hides a pass key and ends with the answer."""
    rng, rows = np.random.default_rng(seed), []
    for index in range(num_texts):
        start = int(rng.integers(0, len(text) - length))
        task = passkey_task(rng, length, source=Split(text, text))
        row = np.concatenate([task.prompt, task.answer]) if index % 2 else text[start : start + length]
        rows.append(row.astype(np.int32).tolist())
    return rows


def make_plan(model: Model, variant: Variant = CHOSEN, **options: Any) -> Plan:
    """Calibrate the demo model on `calibration_texts` by Kascade's own recipe, for the study."""
    rows = calibration_texts(model.config.max_positions)
    return calibrate(model, rows, max_tokens=sum(map(len, rows)), **asdict(variant), **options)
