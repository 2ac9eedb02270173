"""`tessera study serving`: measure the real server against its goals.

Each case starts `tessera serve` as a child process and drives it over HTTP, once per seed. Finished pairs of case and
seed are stored; `--resume` goes on from them. Figures of speed are ratios of times of one run.
"""

import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from tessera.core import files, hardware
from tessera.workbench import campaign, evidence
from tessera.workbench.served import faults, peer, simulated, speed
from tessera.workbench.served.stand import MODELS, Stand

OP = "serving figure"


class Goal(NamedTuple):
    """A goal for a figure: its name in words, "<=" or ">=", and the bound."""

    about: str
    sign: str
    bound: float

    def met(self, value: float) -> bool:
        """Return whether a value reaches the goal."""
        return value <= self.bound if self.sign == "<=" else value >= self.bound


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: the function that measures it, its title, and its goals by the name of the figure.

    Attributes:
        models: names of the models that it runs on.
        once: whether one run suffices, because the case counts and does not time.
    """

    measure: Callable[[Stand, int], speed.Found]
    title: str
    goals: Mapping[str, Goal]
    models: tuple[str, ...] = tuple(MODELS)
    once: bool = False

    def goal(self, figure: str, model: str) -> Goal:
        """Return the goal of a figure on a model."""
        return self.goals.get(f"{figure} {model}") or self.goals[figure]


CASES: Mapping[str, Case] = {
    "crowd": Case(
        measure=speed.crowd,
        title="16 clients against one",
        goals={
            "speedup demo": Goal("tokens/s of 16 clients over those of one", ">=", 3.0),
            "speedup smollm2": Goal("tokens/s of 16 clients over those of one", ">=", 2.0),
        },
    ),
    "document": Case(
        measure=speed.document,
        title="8 questions to one document",
        goals={
            "later_of_first": Goal("time to first text of the 2nd to 8th over the first's", "<=", 0.15),
            "control": Goal("the same, prompts that share nothing", ">=", 0.7),
            "differing": Goal("answers that differ from cold ones", "<=", 0),
        },
    ),
    "load": Case(
        measure=speed.load,
        title="at 70 % of the throughput",
        goals={
            "first_p99_of_unloaded": Goal("p99 of the time to first text over the unloaded median", "<=", 5.0),
            "gap_p99_of_p50": Goal("p99 of the time between texts over its median", "<=", 2.0),
            "gap_of_chunk": Goal("longest gap of 8 streams beside a long prompt over one chunk and a gap", "<=", 1.0),
        },
    ),
    "fairness": Case(
        measure=speed.fairness,
        title="one tenant at ten times the load of three others",
        goals={
            "jain": Goal("Jain's index of the tokens served", ">=", 0.95),
            "others_p99_ratio": Goal("the others' p99 to the first text, with it over without it", "<=", 1.5),
        },
    ),
    "leaks": Case(
        measure=faults.leaks,
        title="10,000 requests, 30 % dropped, 10 % read slowly",
        goals={
            "pages": Goal("share of the pages in use afterwards", "<=", 0),
            "handles": Goal("file handles more than before", "<=", 0),
            "memory_growth": Goal("growth of the memory after the first tenth", "<=", 0.01),
            "recompiles": Goal("programs compiled", "<=", 0),
            "unfinished": Goal("requests still open, or without a named end", "<=", 0),
        },
        models=("demo",),
        once=True,
    ),
    "exact": Case(
        measure=faults.exact,
        title="`--exact`",
        goals={
            "slower": Goal("tokens/s of a crowd: default over exact, less one", "<=", 0.15),
            "differing": Goal("of 1,000 sampled answers, those that differ alone and in a crowd", "<=", 0),
            "control": Goal("share that differs with other seeds", ">=", 0.9),
        },
        models=("demo",),
    ),
    "shutdown": Case(
        measure=faults.shutdown,
        title="SIGTERM with a full queue",
        goals={
            "full_queue": Goal("a full queue answers 429 with Retry-After", ">=", 1),
            "new_refused": Goal("after SIGTERM, new requests get 503 with Retry-After", ">=", 1),
            "unfinished": Goal("open requests that did not end well", "<=", 0),
            "seconds": Goal("seconds until the last had ended", "<=", 30),
            "exit_code": Goal("exit code", "<=", 0),
        },
        models=("demo",),
    ),
    "kills": Case(
        measure=faults.kills,
        title="kill -9 at 20 random points, with a disk cache",
        goals={
            "damaged": Goal("damaged files", "<=", 0),
            "differing": Goal("answers that differ from a fresh server's", "<=", 0),
            "failed_starts": Goal("starts that failed", "<=", 0),
        },
        models=("demo",),
        once=True,
    ),
    "peer": Case(
        measure=peer.llama_cpp,
        title="16 clients, against llama.cpp's server",
        goals={"of_llama_cpp": Goal("tokens/s over those of llama.cpp, same file", ">=", 1.0)},
        models=("smollm2",),
    ),
    "simulator": Case(
        measure=simulated.simulator,
        title="the simulator",
        goals={
            "error": Goal("simulated median time to first text against the real one, less one", "<=", 0.15),
            "control": Goal("the same, steps that take half as long", ">=", 0.3),
        },
    ),
}


def study(flags: Any) -> int:
    """Run `tessera study serving`: measure what is missing, or append the records; return 1 if a case has failed."""
    campaign.check_names("--case", flags.case, tuple(CASES))
    chosen = [name for name in flags.case or CASES if flags.model in CASES[name].models]
    if flags.report:
        kept = [line for line in campaign.lines_to_report(flags.out) if line["share"] == 1.0 or flags.share < 1.0]
        made = [record(*group) for group in grouped(kept)]
        evidence.append(Path("evidence") / f"serving-{hardware.device_slug()}.jsonl", made)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unlike the default, this also ends the server
    if not flags.resume:
        flags.out.unlink(missing_ok=True)
    return int(not run(chosen, flags))


def run(chosen: Sequence[str], flags: Any) -> bool:
    """Measure the cases that the file of results lacks; return whether all succeeded."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    done = {
        identity(line) for line in (files.read_lines(flags.out) if flags.out.exists() else ()) if "error" not in line
    }
    code = {name: getattr(evidence.code(), name) for name in campaign.CODE}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    todo = [(name, seed) for name in chosen for seed in range(1 if CASES[name].once else flags.seeds)]
    good = True
    with Stand(sizes=MODELS[flags.model], share=flags.share) as stand, Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(todo))
        for name, seed in todo:
            bar.update(task, description=f"{flags.model}: {name}")
            line = {"case": name, "model": flags.model, "seed": seed, "share": flags.share}
            if identity(line) not in done:
                line |= measured(stand, name, seed) | code
                files.append_line(flags.out, line)
                good &= "error" not in line
                console.print(
                    f"{flags.model}, {name}, seed {seed}: {line.get('figures') or line.get('error')}", markup=False
                )
            bar.advance(task)
    return good


def identity(line: Mapping[str, Any]) -> tuple:
    """Return what identifies a run of a case."""
    return tuple(line[name] for name in ("case", "model", "seed", "share"))


def measured(stand: Stand, name: str, seed: int) -> dict[str, Any]:
    """Measure one case with one seed; return its figures and facts, or its error."""
    number = list(CASES).index(name)
    try:
        figures, facts = CASES[name].measure(stand, 10_000 * (number + 1) + 1000 * seed)
    except (ValueError, OSError, httpx2.HTTPError, subprocess.TimeoutExpired) as error:
        stand.close()
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"figures": figures, "facts": facts}


def grouped(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[Mapping[str, Any]]]]:
    """Group lines by case and model; of the lines of one seed, keep the last."""
    groups: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["case"], line["model"]), {})[line["seed"]] = line
    return [(case, model, list(found.values())) for (case, model), found in groups.items()]


def record(name: str, model: str, lines: Sequence[Mapping[str, Any]]) -> evidence.Record:
    """Build the record of a case: every figure's values with its goal, and the facts of each seed."""
    case = CASES[name]
    what = evidence.What(
        op=OP,
        kernel=name,
        workload=f"{MODELS[model].name}, {case.title}",
        title=f"{MODELS[model].name}: {case.title}",
        config={"share": lines[0]["share"], "seeds": len(lines)},
    )
    command = f"tessera study serving --model {model} --case {name}; tessera study serving --report"
    errors = [line["error"] for line in lines if "error" in line]
    if errors:
        return evidence.make(what, (), command=command, error=errors[0])
    figures = {
        key: judged(case.goal(key, model), [line["figures"][key] for line in lines]) for key in lines[0]["figures"]
    }
    first = next(iter(figures.values()))["values"]
    facts = {"figures": figures, "runs": [line["facts"] for line in lines]}
    made = evidence.make(what, first, command=command, unit="ratio", facts=facts)
    return campaign.of_its_code(made, lines[-1])


def judged(goal: Goal, values: Sequence[float]) -> dict[str, Any]:
    """Return a figure's values with their median and whether it meets the goal."""
    median = statistics.median(values)
    return {
        "about": goal.about,
        "goal": f"{goal.sign} {goal.bound:g}",
        "values": list(values),
        "median": median,
        "met": goal.met(median),
    }
