"""Hide pass keys in text: tasks for the shipped model, and texts to calibrate its plan on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.training.data import Task, passkey_task
from tessera.generate import Model
from tessera.measure.judge.library import library_calibration
from tessera.runtime.sampling import GREEDY
from tessera.train.data import Split


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How many of the prompts are answered with exactly the hidden key."""

    num_tasks: int
    num_right: int
    layer_density: tuple[float, ...]  # keys read / keys visible over prefill and decode, averaged over prompts

    @property
    def share(self) -> float:
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
