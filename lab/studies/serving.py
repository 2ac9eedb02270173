"""`python -m lab study serving`: measure the real server against its goals.

Each case starts `tessera serve` as a child process and drives it over HTTP, once per seed. Results are stored by
case and seed; `--resume` measures only those that are missing. A figure of speed divides two measurements of one run.
"""

import gc
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from lab import campaign
from lab.served import abuse, faults, peer, simulated, speed
from lab.served.stand import MODELS, Stand
from tessera.core import files, hardware
from tessera.measure import evidence

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
    """A case: the function that measures it, its title, and a goal for each of its figures.

    Attributes:
        goals: figure -> goal; the key "figure model" gives a goal for one model alone.
        models: names of the models that it runs on.
        once: whether one run is enough, because the case counts faults and measures no times.
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
            "speedup demo": Goal("tokens/s of 16 clients / tokens/s of one client", ">=", 3.0),
            "speedup smollm2": Goal("tokens/s of 16 clients / tokens/s of one client", ">=", 2.0),
        },
    ),
    "document": Case(
        measure=speed.document,
        title="8 questions to one document",
        goals={
            "later_of_first": Goal("time to first text, questions 2 to 8 / question 1", "<=", 0.15),
            "control": Goal("the same ratio for prompts that share no tokens", ">=", 0.7),
            "differing": Goal("answers that differ from those with an empty cache", "<=", 0),
        },
    ),
    "load": Case(
        measure=speed.load,
        title="at 70 % of the throughput",
        goals={
            "first_p99_of_unloaded": Goal("time to first text, p99 under load / median without load", "<=", 5.0),
            "gap_p99_of_p50": Goal("time between texts, p99 / median", "<=", 2.0),
            "gap_of_chunk": Goal(
                "longest time between texts beside a long prompt / (its last chunk alone + the usual)", "<=", 1.0
            ),
        },
    ),
    "fairness": Case(
        measure=speed.fairness,
        title="one tenant at ten times the load of three others",
        goals={
            "jain": Goal("Jain's index of the tokens served", ">=", 0.95),
            "others_p99_ratio": Goal("other tenants' p99 time to first text, with / without the greedy one", "<=", 1.5),
        },
    ),
    "leaks": Case(
        measure=faults.leaks,
        title="10,000 requests, 30 % dropped, 10 % read slowly",
        goals={
            "pages": Goal("share of the pages in use at the end", "<=", 0),
            "handles": Goal("file handles left open", "<=", 0),
            "memory_growth": Goal("growth of the memory after the first tenth of the requests", "<=", 0.01),
            "recompiles": Goal("programs compiled while requests ran", "<=", 0),
            "unfinished": Goal("requests still open, or ended without a reason", "<=", 0),
        },
        models=("demo",),
        once=True,
    ),
    "exact": Case(
        measure=faults.exact,
        title="`--exact`",
        goals={
            "slower": Goal("tokens/s of 16 clients, default / `--exact`, minus 1", "<=", 0.15),
            "differing": Goal("of 1,000 answers, those that 15 other requests changed", "<=", 0),
            "control": Goal("share of the answers that differ with other seeds", ">=", 0.9),
        },
        models=("demo",),
    ),
    "shutdown": Case(
        measure=faults.shutdown,
        title="SIGTERM with a full queue",
        goals={
            "full_queue": Goal("a full queue answers 429 with Retry-After", ">=", 1),
            "new_refused": Goal("after SIGTERM, new requests get 503 with Retry-After", ">=", 1),
            "unfinished": Goal("open requests that failed", "<=", 0),
            "seconds": Goal("seconds from SIGTERM until the last open request ended", "<=", 30),
            "exit_code": Goal("exit code", "<=", 0),
        },
        models=("demo",),
    ),
    "kills": Case(
        measure=faults.kills,
        title="kill -9 at 100 random points, with a disk cache",
        goals={
            "damaged": Goal("damaged files", "<=", 0),
            "differing": Goal("answers that differ from those without a disk cache", "<=", 0),
            "failed_starts": Goal("starts that failed", "<=", 0),
        },
        models=("demo",),
        once=True,
    ),
    "peer": Case(
        measure=peer.llama_cpp,
        title="16 clients, against llama.cpp's server",
        goals={"of_llama_cpp": Goal("tokens/s / tokens/s of llama.cpp, on the same file", ">=", 1.0)},
        models=("smollm2",),
    ),
    "simulator": Case(
        measure=simulated.simulator,
        title="the simulator",
        goals={
            "error": Goal("relative error of the simulated median time to first text", "<=", 0.15),
            "control": Goal("the same error if simulated steps take half as long", ">=", 0.3),
        },
    ),
    "loss": Case(
        measure=faults.loss,
        title="kill -9 of one of two replicas under 50 streams",
        goals={
            "hung": Goal("streams that hang", "<=", 0),
            "lost_unstarted": Goal("streams without text that no other replica answered", "<=", 0),
            "late_s": Goal("seconds until both replicas were ready again, minus those of the first start", "<=", 5),
        },
        models=("demo",),
        once=True,
    ),
    "abuse": Case(
        measure=abuse.abuse,
        title=f"{abuse.SLOW} slow connections, and hostile bodies and schemas one after the other",
        goals={
            "others_p99_ratio": Goal("other tenants' p99 time to first text, with / without the attacker", "<=", 1.5),
            "refused_s": Goal("seconds to the refusal of a hostile body, median of the slowest kind", "<=", 0.1),
            "cut_s": Goal("longest seconds until a costly request is answered or a slow connection closed", "<=", 10.0),
            "wrong": Goal("attacks that ended with a 5xx, hung, or got an answer instead of a refusal", "<=", 0),
        },
        models=("demo",),
    ),
}


def study(flags: Any) -> int:
    """Measure what is missing, or append the records; return 1 if a case has failed."""
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
    gc.collect()
    gc.freeze()  # a collection in this process, the client, would delay all requests that it times
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
    """Return the case, model, seed and share of requests, which together identify a run."""
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
    """Group lines by case and model; if a seed has several lines, keep the last."""
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
    command = f"python -m lab study serving --model {model} --case {name}; python -m lab study serving --report"
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
    """Return a figure's values, their median, and whether the median meets the goal."""
    median = statistics.median(values)
    return {
        "about": goal.about,
        "goal": f"{goal.sign} {goal.bound:g}",
        "values": list(values),
        "median": median,
        "met": goal.met(median),
    }
