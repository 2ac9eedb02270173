"""Find block sizes by measuring, in three stages, and write them to the table that dispatch reads.

    tessera tune --workload prefill_16k_gqa --role sparse        # resumes where it stopped

1. *Search* (`search.py`): a genetic algorithm over the kernel's own search space. It starts with the default config and
   the configs that the cost model (`seeding.py`) ranks first. For XLA's kernels, which the model ranks badly, it starts
   with the default and random configs. Every candidate runs in a child process, which checks its results against
   float64 and times it briefly.
2. *Final*: the best few candidates and the default take turns for longer, on fresh inputs.
3. *Confirmation*: the winner and the default take turns once more, on other inputs and at lengths that the search
   never used. The reported gain (default's time / winner's time) and the gain's interval come from this stage.

The tuner saves every answer as it arrives (build/tune/), so Ctrl-C or a kill costs only the running candidate. A
finished search appends one record to evidence/ and writes one row to the table of `attention/tuned.py`. The row holds
the winning config, which may be the default, and points to the record. The tuner then deletes the saved answers, so the
next search measures everything again.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.attention import tuned
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import choose
from tessera.attention.kernel import Kernel
from tessera.attention.workloads import WORKLOADS, Workload
from tessera.core import files, hardware
from tessera.measure import timing
from tessera.measure.tune import search
from tessera.measure.tune.calls import held_out
from tessera.measure.tune.child import Child
from tessera.measure.tune.seeding import estimate

LEAST_GAIN = 1.02
"""Minimum gain (default's time / winner's time) for which the winner replaces the default. The gain's interval must
also lie above 1."""
WORST_ELSEWHERE = 0.95
"""The winner replaces the default only if its gain at every held-out length is at least this, so it may be slightly
slower there."""
MOST_S, MOST_GIB = 1e9, 1e9
"""Largest accepted limits, in seconds and GiB. Larger values would overflow a queue's timeout or a resource limit."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Amount of measurement in one tuning run.

    Attributes:
        candidates: number of configs that the search tries, including the default.
        quick: timed calls per candidate in the search.
        finalists: number of candidates in the final, not counting the default.
        rounds: turns per contender in the final and in the confirmation.
        limit_s: seconds that the child process may take per answer, compilation included.
        memory_gib: host memory that the child process may hold, in GiB. 0 means no limit, and None means nine tenths of
            the machine's memory.
        seed: seed of the search and of the random inputs.
    """

    candidates: int = 16
    quick: int = 3
    finalists: int = 3
    rounds: int = 7
    limit_s: float = 300.0
    memory_gib: float | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("candidates", "quick", "finalists", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if not 0 < self.limit_s <= MOST_S:
            raise ValueError(f"--limit-s {self.limit_s} must be positive and at most {MOST_S:g}")
        if self.memory_gib is not None and not 0 <= self.memory_gib <= MOST_GIB:
            raise ValueError(f"--memory-gib {self.memory_gib} must be from 0, which is no limit, to {MOST_GIB:g}")

    @property
    def memory_bytes(self) -> int:
        """Bytes that the child may hold on this machine; 0 is no limit."""
        if self.memory_gib is None:
            return int(0.9 * hardware.cpu().memory_bytes)
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kernel and the call to tune it on."""

    kernel: Kernel
    name: str
    spec: AttentionSpec
    shapes: Shapes
    named: str = ""
    """Import path "module:attribute" of the kernel; if empty, the worker looks up the kernel by its name."""

    def request(self, config: Mapping[str, Any], **how: Any) -> dict[str, Any]:
        """Build the request that asks the worker to run `config` on the task's call; `how` adds rounds and seed."""
        kernel = self.named or self.kernel.name
        return {"kernel": kernel, "spec": asdict(self.spec), "shapes": self.shapes._asdict(), "config": config, **how}


class Failed(ValueError):
    """The search cannot finish; the message gives the reason."""


class Journal:
    """File of all answers so far, one JSON object per line; a line that a kill cut short is dropped."""

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path, self.about = path, json.loads(json.dumps(about))
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line for line in map(_parsed, lines) if line is not None]
        if found and found[0] != self.about:
            other = sorted(name for name in {*found[0], *self.about} if found[0].get(name) != self.about.get(name))
            raise ValueError(f"{path} belongs to another search ({', '.join(other)} differs): delete it to start over")
        self.answers = {line["key"]: line["answer"] for line in found[1:]}
        self.replayed = len(self.answers)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(path, "".join(json.dumps(line) + "\n" for line in (found or [self.about])))

    def ask(self, child: Child, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved answer, or ask the child and save its answer."""
        key = json.dumps(request, sort_keys=True)
        if key not in self.answers:
            self.answers[key] = child.ask(request)
            files.append_line(self.path, {"key": key, "answer": self.answers[key]})
        return self.answers[key]


def _parsed(line: str) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def task_of(workload: str, role: str) -> Task:
    """Return the task of a catalogue workload, with the kernel that dispatch chooses on this device.

    Raises:
        ValueError: no workload has this name.
    """
    found: Workload | None = next((w for w in WORKLOADS if w.name == workload), None)
    if found is None:
        names = ", ".join(w.name for w in WORKLOADS if "bench" in w.tags)
        raise ValueError(f"--workload {workload} must be one of {names}")
    spec, shapes = found.role_spec(role), found.shapes(role)
    return Task(kernel=choose(spec, shapes), name=f"{workload}, {role}", spec=spec, shapes=shapes)


def tune(task: Task, budget: Budget, journal: Path, *, paths: Iterable[str] = (), on_step=None) -> dict[str, Any]:
    """Run search, final and confirmation.

    Args:
        task, budget: what to tune, and how much to measure.
        journal: file of the answers; if it holds a partial search, that search resumes.
        paths: folders added to the worker's import path.
        on_step: called with a line of text for every candidate and finalist.

    Returns:
        "default" and "winner" (configs), "gain" of the winner and its "interval", "elsewhere" (gains at held-out
        lengths), "candidates", "rank_correlation", and "replayed" (number of answers that the journal already held).

    Raises:
        Failed: the default does not run or gives wrong results, or the confirmation could not time default and winner.
        ValueError: the journal belongs to another search.
    """
    about = {"task": task.request({}), "budget": asdict(budget), "machine": hardware.device_slug()}
    about["code"] = files.sources(tuned.TABLES.parent)
    book, said = Journal(journal, about), on_step or (lambda text: None)
    with Child(limit_s=budget.limit_s, memory_bytes=budget.memory_bytes, paths=tuple(paths)) as child:
        tried = _search(task, budget, book, child, said)
        default = tried[0]
        good = sorted((t for t in tried if not t["error"]), key=lambda t: t["quick_s"])
        finalists = [t for t in good if t is not default][: budget.finalists]
        times = _take_turns(task, [default, *finalists], budget, book, child, first_seed=1000)
        for entry, samples in times:
            entry["final_s"] = float(np.median(samples))
            said(f"final: {entry['config']} {1e3 * entry['final_s']:.2f} ms")
        winner = min((entry for entry, _ in times), key=lambda t: t["final_s"])
        found = {
            "default": default["config"],
            "winner": winner["config"],
            "gain": 1.0,
            "interval": None,
            "elsewhere": {},
        }
        if winner is not default:
            found |= _confirm(task, default, winner, budget, book, child)
    found["candidates"] = tried
    found["rank_correlation"] = {
        "seed_model_with_quick": rank_correlation(tried, "estimate_s", "quick_s"),
        "seed_model_with_final": rank_correlation(tried, "estimate_s", "final_s"),
        "quick_with_final": rank_correlation(tried, "quick_s", "final_s"),
    }
    return found | {"replayed": book.replayed}


def _search(task: Task, budget: Budget, book: Journal, child: Child, said) -> list[dict[str, Any]]:
    """Return every candidate tried, the default first, each with its estimate, quick time or error, and parents.

    Raises:
        Failed: the default does not run or gives wrong results. Nothing else is tried then.
    """
    space = [asdict(c) for c in task.kernel.search_space(task.spec, task.shapes)]
    default = asdict(task.kernel.default_config(task.spec, task.shapes))
    if search.key(default) not in map(search.key, space):
        space.append(default)
    estimates = {search.key(g): estimate(task.kernel, task.spec, task.shapes, task.kernel.Config(**g)) for g in space}
    seeds = [search.Proposal(genome=default, origin="default"), *_first(task.kernel, space, estimates, budget)]
    tried: list[dict[str, Any]] = []

    def fitness(proposal: search.Proposal) -> float | None:
        config = dict(proposal.genome)
        answer = book.ask(child, task.request(config, rounds=budget.quick, seed=budget.seed))
        quick_s = float(np.median(answer["samples"])) if answer["samples"] else None
        entry = {"config": config, "origin": proposal.origin, "parents": list(proposal.parents)}
        entry |= {"estimate_s": estimates[search.key(config)], "quick_s": quick_s, "final_s": None}
        tried.append(entry | {"compile_s": answer["compile_s"], "error": answer["error"]})
        result = answer["error"] or f"{1e3 * quick_s:.2f} ms"
        said(f"{len(tried)}/{min(budget.candidates, len(space))} {proposal.origin}: {config}: {result}")
        if len(tried) == 1 and answer["error"]:
            raise Failed(f"the default config of {task.kernel.name} fails on {task.name}: {answer['error']}")
        return quick_s

    for _ in search.evolve(space, seeds, fitness, budget=budget.candidates, seed=budget.seed):
        pass
    return tried


def _first(
    kernel: Kernel, space: list[dict], estimates: Mapping[tuple, float], budget: Budget
) -> list[search.Proposal]:
    """Return the proposals to try after the default: the cost model's first choices, or random ones for XLA's kernels.

    The model ignores caches and threads, and on a CPU it ranks XLA's block sizes backwards (rank correlation -0.15 to
    -0.62 in evidence/tune-cpu-*).
    """
    count = min(max(budget.candidates // 2, 1), len(space))
    if kernel.platform not in ("gpu", "tpu"):
        drawn = random.Random(budget.seed).sample(space, count)
        return [search.Proposal(genome=genome, origin="random") for genome in drawn]
    ranked = sorted(space, key=lambda genome: estimates[search.key(genome)])
    return [search.Proposal(genome=genome, origin="seed") for genome in ranked[:count]]


def _take_turns(
    task: Task, entries: list[dict], budget: Budget, book: Journal, child: Child, first_seed: int
) -> list[tuple[dict, list[float]]]:
    """Time one call of every entry per round, on fresh inputs; return (entry, samples) for entries without errors."""
    taken: list[tuple[dict, list[float]]] = [(entry, []) for entry in entries]
    for number in range(budget.rounds):
        seed = budget.seed + first_seed + 10 * number
        for entry, samples in taken if number % 2 == 0 else reversed(taken):
            samples += book.ask(child, task.request(entry["config"], rounds=1, seed=seed))["samples"]
    return [(entry, samples) for entry, samples in taken if len(samples) == budget.rounds]


def _confirm(task: Task, default: dict, winner: dict, budget: Budget, book: Journal, child: Child) -> dict[str, Any]:
    """Time winner and default in turns; return the gain on fresh inputs, its interval, and gains at held-out lengths.

    If a gain or the interval is below its limit, the default wins: "winner" in the result is the default's config, and
    "refused" is the config of the argument `winner`.
    """
    pairs = {"": task.shapes} | {f"{s.num_queries} x {s.num_keys}": s for s in held_out(task.shapes)}
    gains: dict[str, float | None] = {}
    interval = None
    for name, shapes in pairs.items():
        there = Task(kernel=task.kernel, name=task.name, spec=task.spec, shapes=shapes, named=task.named)
        turns = _take_turns(there, [default, winner], budget, book, child, first_seed=5000)
        gains[name] = timing.ratio(turns[0][1], turns[1][1]) if len(turns) == 2 else None
        if not name and len(turns) == 2:
            interval = timing.ratio_interval(turns[0][1], turns[1][1])
    gain = gains.pop("")
    if gain is None:
        raise Failed(f"the default config or the winner of {task.name} failed when both were timed in turns")
    holds = (
        gain >= LEAST_GAIN and interval[0] > 1 and all(g is not None and g >= WORST_ELSEWHERE for g in gains.values())
    )
    found = {"gain": gain, "interval": interval, "elsewhere": gains, "confirmed": holds}
    return found if holds else found | {"winner": default["config"], "refused": winner["config"]}


def rank_correlation(tried: Iterable[Mapping[str, Any]], first: str, second: str) -> float | None:
    """Return Spearman's rank correlation of two values over the candidates that have both.

    Returns None if fewer than three candidates have both, or if either value is the same for all of them.
    """
    pairs = [(t[first], t[second]) for t in tried if t[first] is not None and t[second] is not None]
    if len(pairs) < 3:
        return None
    from scipy.stats import rankdata

    a, b = (rankdata(column) for column in zip(*pairs))
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else None
