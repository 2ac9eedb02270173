"""Pass keys found under a policy, and the plans that the package ships.

`python -m tessera.workbench.quality [demo | smollm2]` makes the plans; `tessera eval --suite study` varies Kascade's
own recipe on the demo model.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.calibration.calibrate import calibrate
from tessera.core.files import DEMO_MODEL, SHIPPED
from tessera.generate import Model, load
from tessera.models.fetch import fetch
from tessera.sparse.plan import Plan
from tessera.sparse.promise import summary
from tessera.train.data import Split, Task, library_calibration, passkey_task


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Pass keys found.

    Attributes:
        num_tasks: prompts.
        num_right: prompts answered with exactly the hidden key, greedily.
        layer_density: keys read / keys visible per layer, prefill and decode, mean over prompts.
    """

    num_tasks: int
    num_right: int
    layer_density: tuple[float, ...]

    @property
    def share(self) -> float:
        """Right answers per task, 0 to 1."""
        return self.num_right / self.num_tasks


def passkey_tasks(num_tasks: int, length: int, seed: int = 0) -> list[Task]:
    """Hide pass keys in held-out library text at evenly spread depths; deterministic in the arguments."""
    depths = (np.arange(num_tasks) + 0.5) / num_tasks
    return [passkey_task(np.random.default_rng((seed, length, i)), length, depth=d) for i, d in enumerate(depths)]


def passkey_accuracy(model: Model, tasks: Sequence[Task], *, batch: int = 4) -> Accuracy:
    """Answer every task greedily, as `generate` does: chunked prefill, then token by token."""
    num_right, layers = 0, []
    for first in range(0, len(tasks), batch):
        asked = tasks[first : first + batch]
        answers = model.generate(
            [task.prompt.tolist() for task in asked], max_new_tokens=max(len(task.answer) for task in asked)
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
"""The plan that the study varies; docs/answers.md shows it."""

DEMO_TARGET = MappingProxyType({"max_kl": 0.05})
"""Divergence that gives every head of layer 1 a budget below 1. Without that layer's choice, no pass key is found."""


def calibration_texts(length: int, num_texts: int = 12) -> list[list[int]]:
    """Return token lists for calibration: library text that no test uses, every second one hiding a pass key."""
    text, rng = library_calibration(), np.random.default_rng(99)
    rows = []
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


def make_demo_plan(model: Model, **options: Any) -> Plan:
    """Build the plan that the demo model ships with: budgets searched on `calibration_texts`."""
    rows = calibration_texts(model.config.max_positions)
    return calibrate(model, rows, max_tokens=sum(map(len, rows)), **DEMO_TARGET, **options)


REAL_PLAN = SHIPPED / "smollm2.plan.json"
REAL_TARGET = MappingProxyType({"max_kl": 0.02, "minimum": 224})
"""Divergence below that of a window of as many keys, on every domain (docs/answers.md). At 2,048 tokens a small share
gives a head too few keys: LOG.md says what a minimum changed there."""


def make_real_plan(model: Model, **options: Any) -> Plan:
    """Calibrate SmolLM2 on library text that no test and no evaluation uses."""
    text = bytes(library_calibration().astype(np.uint8)).decode("utf-8", "replace")
    return calibrate(model, [text], **REAL_TARGET, **options)


def main(argv: Sequence[str]) -> int:
    """Write a shipped plan, "demo" (default) or "smollm2". It measures cross-overs, so nothing else should run."""
    if list(argv) == ["smollm2"]:
        path, plan = REAL_PLAN, make_real_plan(load(fetch("smollm2")))
    else:
        path, plan = DEMO_MODEL / "plan.json", make_demo_plan(load(DEMO_MODEL))
    plan.save(path)
    print(path.name, *summary(plan), sep="\n")
    return 0


def without_choice(plan: Plan) -> Plan:
    """Return the plan with no choice: heads read all, or only own tiles, local tiles and sinks, which are always
    read."""
    budgets = tuple(tuple(float(budget >= 1) for budget in row) for row in plan.budgets)
    return replace(plan, fraction=0.0, minimum=0, budgets=budgets, promise={})


def wilson(right: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    share, square = right / trials, z * z / trials
    middle, half = share + square / 2, z * math.sqrt(share * (1 - share) / trials + square / (4 * trials))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
