"""What a policy costs in answers: pass keys found and perplexity, dense against sparse, on the same text.

`python -m tessera.quality` compares plans for the shipped model and appends the records to evidence/;
`python -m tessera.quality plan` makes the plan it ships with.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera import evidence
from tessera.calibrate import calibrate, perplexity
from tessera.corpus import read_corpus
from tessera.data import Task, library_corpus, passkey_task
from tessera.evidence import How, Record, What
from tessera.generate import Model, load
from tessera.sparse.baselines import Window
from tessera.sparse.plan import Plan


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


SHIPPED = Path(__file__).parent / "demo" / "model"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a plan of the study is free to choose."""

    tile: int = 64
    query_tile: int = 32
    heads: str = "remap"
    anchors: int | None = None
    fraction: float = 0.1
    minimum: int = 128


CHOSEN = Variant()
"""The shipped plan's; the study's records are the reason."""

STUDY = (
    CHOSEN,
    Variant(anchors=3),
    Variant(tile=16),
    Variant(heads="pooled"),
    Variant(tile=1),
    Variant(tile=32),
    Variant(query_tile=64),
    Variant(heads="identity"),
    Variant(fraction=0.05, minimum=64),
)
"""Each differs from CHOSEN in one thing; tile 1 is the paper's own granularity."""


def calibration_texts(length: int, num_texts: int = 12) -> list[list[int]]:
    """Token lists for the shipped model: held-out library text and hidden pass keys in turn, none of them in a test."""
    text, rng = library_corpus().held_out, np.random.default_rng(99)
    rows = []
    for index in range(num_texts):
        start = int(rng.integers(0, len(text) - length))
        task = passkey_task(rng, length)
        row = np.concatenate([task.prompt, task.answer]) if index % 2 else text[start : start + length]
        rows.append(row.astype(np.int32).tolist())
    return rows


def make_plan(model: Model, variant: Variant = CHOSEN, **options: Any) -> Plan:
    """Calibrate the shipped model on `calibration_texts`."""
    rows = calibration_texts(model.config.max_positions)
    return calibrate(model, rows, max_tokens=sum(map(len, rows)), **asdict(variant), **options)


def study(model: Model, variants: Sequence[Variant], lengths: Sequence[int], num_tasks: int) -> Iterator[Record]:
    """Pass keys found under each variant's plan, dense and under a window of the same size, on the same tasks."""
    tasks = {length: passkey_tasks(num_tasks, length) for length in lengths}
    held_out = read_corpus(model, calibration_texts(model.config.max_positions), 1 << 20).held_out
    contenders = [("dense", model.with_attention("dense"), {})]
    window = Window(window=model.config.max_positions // 10, sinks=64, tile=64)
    contenders.append(("window", replace(model, policy=window), asdict(window)))
    for variant in variants:
        plan = make_plan(model, variant, crossover=0, progress=False)
        found = {"anchors": list(plan.anchors), "recall": plan.metrics["recall"]}
        contenders.append(("kascade", model.with_attention("kascade", plan), asdict(variant) | found))
        if variant == CHOSEN:
            contenders.append(("oracle", model.with_attention("oracle", plan), asdict(variant)))
        yield from (_record(*contenders.pop(0), tasks, held_out) for _ in list(contenders))


def _record(name: str, model: Model, config: dict[str, Any], tasks: dict[int, list[Task]], held_out) -> Record:
    found = {length: passkey_accuracy(model, asked) for length, asked in tasks.items()}
    right, asked = (sum(getattr(f, field) for f in found.values()) for field in ("num_right", "num_tasks"))
    settings = "-".join(f"{key}{value}" for key, value in config.items() if key not in ("recall", "sinks"))
    return evidence.make(
        What(op="plan study", kernel=name, workload=settings or "all keys", dtype="float32", config=config,
             title="pass keys found, shipped model"),
        [right / asked],
        command="python -m tessera.quality",
        how=How(iterations=asked, check="all digits equal, greedy"),
        unit="fraction",
        density=tuple(f.density for f in found.values()),
        facts={f"right_of_{f.num_tasks}_at_{length}_tokens": f.num_right for length, f in found.items()}
        | {"perplexity": text_perplexity(model, held_out)},
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """`plan` writes the shipped model's plan; nothing runs the study and appends its records."""
    model = load(SHIPPED)
    if list(arguments) == ["plan"]:
        plan = make_plan(model)
        plan.save(SHIPPED / "plan.json")
        print(f"plan.json: anchors {list(plan.anchors)}, cross-over {plan.crossover_tokens} tokens")
        return 0
    out = Path("evidence") / f"{evidence.device_slug()}.jsonl"
    for record in study(model, STUDY, (2048, 4096), 20):
        evidence.append(out, record)
        print(record.what.kernel, record.what.workload, record.facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
