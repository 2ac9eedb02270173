"""Measure how well Kascade keeps dense attention's answers, and what each setting of a plan costs.

    python -m lab eval                              compare policies on all tasks with the shipped model; takes minutes
    python -m lab eval --suite study                change one setting of the plan at a time
    python -m lab eval --model FOLDER --text FILE   evaluate another model with its own plan and text

Each policy's result on each question becomes a record; `--resume` skips what this commit has already recorded.
"""

import bisect
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from lab.eval import tasks
from lab.eval.fidelity import fidelity, recall
from tessera.core import hardware
from tessera.core.shapes import ceil_div
from tessera.generate import Model
from tessera.measure import evidence
from tessera.measure.evidence import How, Record, What
from tessera.measure.judge.contenders import CONTROL, plan_policy, whole_heads, with_budget, without_choice
from tessera.measure.judge.library import library_corpus
from tessera.measure.judge.paired import wilson
from tessera.runtime.sampling import GREEDY
from tessera.runtime.score import run_whole
from tessera.sparse.baselines import Dense, Window
from tessera.sparse.plan import Plan

LEVEL_TAIL, DRAWS = 0.025, 4000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work in a suite.

    Attributes:
        kinds: kinds of tasks; the first runs at every length, the others only at the longest.
        lengths: numbers of tokens in prompt plus answer, ascending.
        samples: tasks per kind and length, at evenly spaced depths.
        windows: number of held-out text windows on which closeness to dense (fidelity) is measured.
        window_tokens: tokens per window.
        recall_windows: maximum number of these windows on which recall, the share of attention mass that the policy
            keeps, is measured; 0 skips recall.
    """

    kinds: tuple[str, ...] = tuple(tasks.KINDS)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    samples: int = 10
    windows: int = 8
    window_tokens: int = 4096
    recall_windows: int = 4

    def tasks(self) -> Iterator[tuple[str, int]]:
        """Yield (kind, length) of every group of tasks that a contender answers."""
        for kind in self.kinds:
            yield from ((kind, length) for length in (self.lengths if kind == self.kinds[0] else self.lengths[-1:]))


SUITES: Final[Mapping[str, Sizes]] = MappingProxyType(
    {
        "demo": Sizes(),
        "study": Sizes(kinds=("single",), lengths=(4096,), samples=10, windows=12, recall_windows=0),
        "smoke": Sizes(lengths=(512,), samples=1, windows=1, window_tokens=512),
    }
)
"""Sizes by suite name. The study skips recall, because recall needs a dense pass over all keys of each window, in
addition to the policy's own pass."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The model under one policy, with the name, title and settings that its records hold."""

    name: str
    title: str
    model: Model
    config: Mapping[str, Any]


def side_by_side(model: Model, plan: Plan, length: int) -> Iterator[Contender]:
    """Yield dense; the plan at half, full and twice its budget; and its rivals: control, window and oracle.

    The control is the plan without its choice of keys. The window reads as many keys as the plan. In the oracle, every
    layer selects by its own scores.
    """
    plan = dataclasses.replace(plan, crossover_tokens=0)
    yield Contender(name="dense", title="dense", model=model.with_attention("dense"), config={})
    for scale, words in ((0.5, "half the plan's budget"), (1.0, "the plan"), (2.0, "twice the plan's budget")):
        yield kascade(model, with_budget(plan, scale), words)
    control = dataclasses.replace(model, policy=plan_policy(model, without_choice(plan)))
    yield Contender(name="control", title=CONTROL, model=control, config=settings(plan))
    size = window_of(plan, length)
    window = Window(window=size, sinks=plan.tile, tile=plan.tile, query_tile=plan.query_tile)
    windowed = dataclasses.replace(model, policy=window)
    yield Contender(name="window", title=f"window {window.window} + sinks", model=windowed, config=asdict(window))
    oracle = model.with_attention("oracle", plan)
    yield Contender(name="oracle", title="every layer selects", model=oracle, config=settings(plan))


def window_of(plan: Plan, length: int) -> int:
    """Return the size of the sliding window that reads as many keys as the plan's heads do on average.

    Reads are counted over a prompt of `length` tokens. The window also reads one tile of sinks. A head of the plan
    reads its budget plus the keys that are always read: the query tile's own keys, local keys and sinks.
    """
    seen = np.arange(1, length + 1)
    always = plan.query_tile + plan.local + plan.sinks
    budgets = np.array(plan.budgets or [[plan.fraction] * plan.num_kv_heads] * plan.num_layers)
    budgets[np.array(whole_heads(plan))] = 1.0
    read = [np.minimum(seen, np.maximum(budget * seen, plan.minimum) + always).sum() for budget in budgets.flat]
    sizes = range(1, length)
    return bisect.bisect_left(sizes, np.mean(read), key=lambda size: np.minimum(seen, size + plan.tile).sum()) + 1


def variants(model: Model, plan: Plan, make_plan: Callable[..., Plan]) -> Iterator[Contender]:
    """Yield dense, then the plan with one setting changed at a time: tiles, fraction, minimum keys, heads, anchors.

    `make_plan` calibrates plans with other heads or anchors. If `plan` has per-head budgets, it is first replaced by a
    plan that `make_plan` calibrates without them.
    """
    plan = dataclasses.replace(make_plan() if plan.budgets else plan, crossover_tokens=0)
    yield Contender(name="dense", title="dense", model=model.with_attention("dense"), config={})
    for tile in (1, 16, 32, 64, 128):
        for query_tile in (16, 32, 64, 128):
            changed = dataclasses.replace(plan, tile=tile, query_tile=query_tile)
            yield kascade(model, changed, f"tile {tile}, query tile {query_tile}")
    for fraction in (0.05, 0.2):
        yield kascade(model, dataclasses.replace(plan, fraction=fraction), f"fraction {fraction:g}")
    for minimum in (64, 128, 256, 512):
        yield kascade(model, dataclasses.replace(plan, minimum=minimum), f"at least {minimum} keys")
    for heads in ("remap", "identity", "pooled"):
        changed = dataclasses.replace(make_plan(heads=heads), crossover_tokens=0)
        yield kascade(model, changed, f"heads {heads}")
    for anchors in (2, 3, 4, 5, 6):
        if anchors < model.config.num_layers:
            changed = dataclasses.replace(make_plan(anchors=anchors), crossover_tokens=0)
            yield kascade(model, changed, f"{anchors} anchors")


def kascade(model: Model, plan: Plan, title: str) -> Contender:
    """Build the contender that runs the model under a Kascade plan."""
    return Contender(name="kascade", title=title, model=model.with_attention("kascade", plan), config=settings(plan))


def settings(plan: Plan) -> dict[str, Any]:
    """Return a plan's settings, for the records of its contender."""
    names = ("model", "heads", "tile", "query_tile", "local", "sinks", "fraction", "minimum")
    lists = {name: [*getattr(plan, name)] for name in ("anchors", "own", "budgets")}
    return {name: getattr(plan, name) for name in names} | lists


def hay_of(model: Model, text: str | None) -> tasks.Hay:
    """Build the filler text of the tasks from `text`, or from held-out library text if it is None.

    Raises:
        ValueError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, but the tasks are text: pass a model with a tokenizer")
    text = bytes(library_corpus().held_out.astype(np.uint8)).decode("utf-8", "replace") if text is None else text
    return tasks.Hay(text=text, count=lambda piece: len(model.tokenizer.encode(piece)))


def ask(contender: Contender, kind: str, length: int, sizes: Sizes, hay: tasks.Hay, command: str) -> Record:
    """Record the contender's mean score on the tasks of one kind and length, each decoded greedily."""
    scores, depths, density = [], [], []
    for index in range(sizes.samples):
        depth = (index + 0.5) / sizes.samples
        sample = tasks.make(kind, hay, length, seed=(length, index), depth=depth)
        [answer] = contender.model.generate([sample.prompt], max_new_tokens=sample.answer_tokens, **GREEDY)
        scores.append(sample.score(answer.text))
        depths.append(depth)
        density.append(answer.layer_density)
    low, high = mean_interval(scores)
    what = What(
        op="eval task",
        kernel=contender.name,
        workload=f"{kind} at {length}: {contender.title}",
        dtype=contender.model.precision,
        config=dict(contender.config),
        title=f"{kind.replace('_', ' ')}, {length:,} tokens",
    )
    return evidence.make(
        what,
        [float(np.mean(scores))],
        command=command,
        unit="fraction",
        how=How(iterations=len(scores), check="share of the expected strings in the greedy answer"),
        density=tuple(np.mean(density, axis=0).tolist()),
        facts={"scores": scores, "depths": depths, "low": low, "high": high, "length": length, "kind": kind}
        | {"policy": contender.title},
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean: Wilson's if all values are 0 or 1, else a bootstrap."""
    values = np.asarray(values, float)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson(int(values.sum()), len(values))
    pick = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[pick].mean(1), [LEVEL_TAIL, 1 - LEVEL_TAIL])
    return float(low), float(high)


def measure_fidelity(
    contender: Contender, windows: Sequence[np.ndarray], dense: Sequence[np.ndarray], command: str
) -> Record:
    """Record closeness to dense: KL divergence per token, perplexity under each, and share of equal top-1 tokens."""
    found = fidelity(contender.model, contender.model.policy, windows, dense)
    facts = {"perplexity": found.perplexity, "perplexity_dense": found.perplexity_dense, "agreement": found.agreement}
    how = How(iterations=len(found.kl), check="KL(dense || policy), mean over the tokens of each window")
    return evidence.make(
        on_text("eval fidelity", "held-out text", contender),
        found.kl,
        command=command,
        unit="nats",
        how=how,
        facts=facts | over_windows(found.kl, found.num_tokens, contender),
    )


def measure_recall(contender: Contender, windows: Sequence[np.ndarray], command: str) -> Record:
    """Record the share of attention mass that the contender keeps: means per window and means per layer and KV head."""
    found = recall(contender.model, contender.model.policy, windows)
    facts = {"per_head": found.per_head.mean(0).round(6).tolist(), "sparse_layers": list(found.sparse_layers)}
    how = How(iterations=len(windows), check="dense attention's mass on the keys read, mean of sparse layers and heads")
    return evidence.make(
        on_text("eval recall", "attention mass", contender),
        found.per_window,
        command=command,
        unit="fraction",
        how=how,
        facts=facts | over_windows(found.per_window, sum(map(len, windows)), contender),
    )


def on_text(op: str, question: str, contender: Contender) -> What:
    """Return the `what` field for a record of the contender's measurement on plain text."""
    return What(
        op=op,
        kernel=contender.name,
        workload=f"{question}: {contender.title}",
        dtype=contender.model.precision,
        config=dict(contender.config),
        title=contender.title,
    )


def over_windows(values: Sequence[float], tokens: int, contender: Contender) -> dict[str, Any]:
    """Return the facts of a record with one value per window: mean, 95 % interval, number of tokens, policy."""
    low, high = mean_interval(values)
    mean = float(np.mean(values))
    return {"mean": mean, "low": low, "high": high, "tokens": tokens, "policy": contender.title}


def windows_of(model: Model, hay: tasks.Hay, sizes: Sizes) -> list[np.ndarray]:
    """Cut evenly spaced windows of token ids from the filler text. They overlap if the text is short.

    Raises:
        ValueError: the text is shorter than one window.
    """
    ids = np.asarray(model.tokenizer.encode(hay.text[: 40 * sizes.windows * sizes.window_tokens]), np.int32)
    if len(ids) < sizes.window_tokens:
        raise ValueError(f"the text has {len(ids)} tokens, but a window needs {sizes.window_tokens}: pass longer text")
    starts = np.linspace(0, len(ids) - sizes.window_tokens, sizes.windows).astype(int)
    return [ids[start : start + sizes.window_tokens] for start in starts]


def done_before(path: Path, command: str) -> set[tuple[str, str, str]]:
    """Return (op, kernel, workload) of every record in the file that this command made without error at this commit."""
    code = evidence.code()
    if code.dirty or code.commit is None or not path.exists():
        return set()
    return {
        (r.what.op, r.what.kernel, r.what.workload)
        for r in evidence.read(path)
        if (r.code, r.command, r.error) == (code, command, None)
    }


def run(
    model: Model,
    plan: Plan,
    *,
    suite: str = "demo",
    make_plan: Callable[..., Plan] | None = None,
    text: str | None = None,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    command: str = "python -m lab eval",
) -> int:
    """Run a suite on a model and append each record as soon as it is made.

    Args:
        model, plan: model and plan to evaluate; the plan's cross-over is ignored.
        suite: "demo" (compare policies), "study" (change the plan's settings one by one) or "smoke".
        make_plan: function (heads=..., anchors=...) -> Plan that calibrates plans; only the study needs it.
        text: text that fills the prompts of the tasks, and on which fidelity and recall are measured; held-out library
            text if None.
        out: file of records; evidence/eval-<device>.jsonl if None.
        resume: skip what this commit has already recorded in the file.

    Raises:
        ValueError: the suite is unknown, the model has no tokenizer, or its context is shorter than the tasks.
    """
    from rich.console import Console

    if suite not in SUITES:
        raise ValueError(f"{suite=} must be one of {', '.join(SUITES)}")
    sizes = SUITES[suite]
    longest = max(*sizes.lengths, sizes.window_tokens)
    if model.config.max_positions < longest:
        context = model.config.max_positions
        raise ValueError(f"the model's context of {context} tokens is too short: {longest} are needed")
    out = Path("evidence") / f"eval-{hardware.device_slug()}.jsonl" if out is None else Path(out)
    hay, console = hay_of(model, text), Console(stderr=True, highlight=False)
    windows, done = windows_of(model, hay, sizes), done_before(out, command) if resume else set()
    entries = variants(model, plan, make_plan) if suite == "study" else side_by_side(model, plan, max(sizes.lengths))
    dense = [run_whole(model, window, Dense())[0] for window in windows]
    fewer = windows[:: ceil_div(len(windows), sizes.recall_windows)] if sizes.recall_windows else []
    for contender in entries:
        jobs: list[tuple[tuple[str, str, str], Callable[[], Record]]] = []
        if contender.name != "dense":
            name = ("eval fidelity", contender.name, f"held-out text: {contender.title}")
            jobs.append((name, lambda c=contender: measure_fidelity(c, windows, dense, command)))
            if fewer:
                name = ("eval recall", contender.name, f"attention mass: {contender.title}")
                jobs.append((name, lambda c=contender: measure_recall(c, fewer, command)))
        for kind, length in sizes.tasks():
            name = ("eval task", contender.name, f"{kind} at {length}: {contender.title}")
            jobs.append((name, lambda c=contender, k=kind, n=length: ask(c, k, n, sizes, hay, command)))
        for name, job in jobs:
            if name not in done:
                record = job()
                evidence.append(out, record)
                low, high = record.facts["low"], record.facts["high"]
                console.print(f"{name[2]}: {np.mean(record.samples):.4g} {record.unit} ({low:.3g} to {high:.3g})")
    return 0
