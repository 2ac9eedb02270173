"""What a policy costs in answers: pass keys found and perplexity, dense against sparse, on the same text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.calibrate import perplexity
from tessera.data import Task, passkey_task
from tessera.generate import Model


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Pass keys found.

    Attributes:
        num_tasks: prompts asked.
        num_right: answered with exactly the hidden key, greedily.
        density: keys read / keys visible, prefill and decode, mean over prompts.
    """

    num_tasks: int
    num_right: int
    density: float

    @property
    def share(self) -> float:
        """Right answers per task, 0 to 1."""
        return self.num_right / self.num_tasks


def passkey_tasks(num_tasks: int, length: int, seed: int = 0) -> list[Task]:
    """Pass keys in held-out library text at evenly spread depths; the same ones for the same arguments."""
    depths = (np.arange(num_tasks) + 0.5) / num_tasks
    return [passkey_task(np.random.default_rng((seed, length, i)), length, depth=d) for i, d in enumerate(depths)]


def passkey_accuracy(model: Model, tasks: Sequence[Task], *, batch: int = 4) -> Accuracy:
    """Ask every task greedily, as `generate` does it: chunked prefill, then token by token."""
    num_right, density = 0, []
    for first in range(0, len(tasks), batch):
        asked = tasks[first : first + batch]
        answers = model.generate(
            [task.prompt.tolist() for task in asked], max_new_tokens=max(len(task.answer) for task in asked)
        )
        for task, answer in zip(asked, answers, strict=True):
            num_right += list(answer.tokens[: len(task.answer)]) == task.answer.tolist()
            density.append(answer.density)
    return Accuracy(num_tasks=len(tasks), num_right=num_right, density=float(np.mean(density)))


def text_perplexity(model: Model, windows: Sequence[np.ndarray]) -> float:
    """exp of the mean -ln p of the windows' tokens under the model's own policy, cross-over left aside."""
    return perplexity(model, windows, model.policy)
