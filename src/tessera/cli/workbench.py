"""The commands that measure, verify, tune, evaluate and report, with their flags. Heavy modules are imported only when
a command runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tessera.cli.flags import MODEL, Omittable, Several, Weights
from tessera.core.files import check_writable

RECORDS = Path("evidence/records.jsonl")
"""Path for checking that evidence/ is writable: without --out, a command appends to a file there."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure Tessera and other libraries on a suite of cases and append records, or compare two files of records."""

    suite: Omittable[Literal["cpu", "demo", "smollm2", "smoke"]] = None
    """"cpu" (the default) measures speed, "demo" measures the shipped model's answers, "smollm2" compares Tessera with
    llama.cpp and transformers on a real model (hours), "smoke" checks in seconds that everything runs."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Case to run; may be repeated; all cases if not given."""
    resume: bool = False
    """Skip cases that already have a record from this commit."""
    out: Omittable[Path] = None
    """File to append to; evidence/<device>.jsonl if not given."""
    peer_python: Omittable[Path] = None
    """Interpreter of the environment with torch and transformers; .venv-peers/bin/python, which `make peers` creates,
    if not given."""
    model: Annotated[Omittable[str], MODEL] = None
    """Folder, hub id or GGUF file of a model. Instead of a suite, time its prefill at several lengths, dense and with
    its plan."""
    plan: Omittable[Path] = None
    """With --model: the model's plan; the one that comes with the weights if not given."""
    weights: Omittable[Weights] = None
    """With --model: number format of the weight matrices, as for generate."""
    gate: bool = False
    """Store no records; compare the results with the suite's stored records for this device. Exit code 1 if a result
    is worse by more than noise; 3 if none is, but some could not be judged (noise, few samples, not measured again)."""
    compare: Omittable[tuple[Path, Path]] = None
    """Measure nothing; compare the second of two files of records with the first. Exit codes as for --gate."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Run the cases; return 1 if one failed.

        With --gate or --compare, return 1 if a result got worse, and 3 if that is uncertain.
        """
        from tessera.workbench import bench

        if not self.gate and self.compare is None:
            check_writable(self.out or RECORDS)
        if self.model is not None:
            self.refuse_with("model", "suite", "only", "resume", "peer_python", "gate", "compare")
            from tessera.workbench.bench import own_model

            plan = "" if self.plan is None else f" --plan {self.plan.name}"
            weights = "" if self.weights is None else f" --weights {self.weights}"
            command = f"tessera bench --model {Path(self.model).name}{plan}{weights}"
            return own_model.run(self.model, self.plan, out=self.out, command=command, weights=self.weights)
        if self.weights is not None:
            raise ValueError(f"--weights {self.weights} needs --model: add it, or drop --weights")
        if self.plan is not None:
            raise ValueError(f"--plan {self.plan} needs --model, the model that the plan was made for")
        if self.compare is not None:
            self.refuse_with("compare", "suite", "only", "resume", "out", "peer_python", "gate")
            return bench.compare_files(*self.compare)
        suite, peers = self.suite or "cpu", self.peer_python or Path(".venv-peers/bin/python")
        options = {"peer_python": peers, "only": self.only}
        if self.gate:
            if self.resume or self.out is not None:
                raise ValueError("--gate stores no records: drop --resume and --out")
            return bench.gate(suite, **options)
        return bench.run(suite, out=self.out, resume=self.resume, **options)

    def refuse_with(self, flag: str, *names: str) -> None:
        """Raise ValueError if any of the flags `names` was given, because `flag` ignores them."""
        if given := [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]:
            said = "it" if len(given) == 1 else "them"
            raise ValueError(f"{', '.join(given)} cannot be used with --{flag}, which ignores {said}: drop {said}")


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare every kernel of this device with a float64 oracle, on a catalogue of calls, random shapes and adversarial
    numbers."""

    kernel: str = ""
    """Run only kernels whose name contains this text."""
    simulate: bool = False
    """Also verify kernels of absent chips, in simulation with race detection (an hour for all)."""
    configs: Literal["small", "default", "all"] = "small"
    """Block sizes to verify: "small" verifies the smallest ones in all calls, "default" the default ones in long calls
    only, "all" every one of the search space, also in long calls only."""
    random: int = 5
    """Number of random shapes per kernel and dtype; they use the smallest blocks."""
    seed: Omittable[int] = None
    """Seed of numbers and shapes; if not given, a random seed, which is printed."""
    out: Omittable[Path] = None
    """File to which one record per kernel and dtype is appended."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Print the distribution of errors; return 1 if a kernel failed."""
        from tessera.workbench import verify

        if self.random < 0:
            raise ValueError(f"--random {self.random} must be at least 0")
        if self.out is not None:
            check_writable(self.out)
        asked = {"kernel": self.kernel, "simulate": self.simulate, "configs": self.configs, "seed": self.seed}
        return verify.run(**asked, random_shapes=self.random, out=self.out)


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Search for a kernel's best block sizes on this device; a restart after Ctrl-C resumes."""

    workload: str
    """Name of a call in the catalogue, such as prefill_8k, prefill_16k_gqa or decode_4k_gqa."""
    role: Literal["dense", "score", "sparse"] = "dense"
    """Role of the kernel to tune."""
    method: Literal["genetic", "tpe"] = "genetic"
    """"genetic" is Tessera's own search, "tpe" is Optuna's TPE sampler (pip install 'tessera-attention[tune]')."""
    candidates: int = 16
    """Number of configurations to try."""
    quick: int = 3
    """Number of timed calls per configuration in the search."""
    finalists: int = 3
    """Candidates in the final comparison, besides the default configuration."""
    rounds: int = 7
    """Number of timed calls of each candidate in the final comparison and the confirmation; candidates take turns."""
    limit_s: float = 300.0
    """Maximum seconds for one reply of a candidate's process, compilation included."""
    memory_gib: Omittable[float] = None
    """Maximum GiB of host memory per candidate; 0 for no limit; nine tenths of this machine's memory if not given."""
    seed: int = 0
    """Seed of the search and of the inputs."""
    out: Omittable[Path] = None
    """File to append the record to; evidence/tune-<device>.jsonl if not given."""
    table: Omittable[Path] = None
    """Table of block sizes to write to; if not given, the installed table of this device, which dispatch reads."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Search, confirm the winner, and write its record and its row in the table."""
        from tessera.workbench.tune import Budget, ship

        check_writable(self.out or RECORDS)
        names = ("candidates", "quick", "finalists", "rounds", "limit_s", "memory_gib", "seed", "method")
        budget = Budget(**{name: getattr(self, name) for name in names})
        return ship.run(self.workload, self.role, budget, out=self.out, table=self.table)


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Compare attention policies on long-context tasks and on fidelity to dense attention."""

    model: Annotated[Omittable[str], MODEL] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see fetch). If not given, the shipped demo model; for the
    real suites, SmolLM2, which is fetched."""
    plan: Omittable[Path] = None
    """Kascade plan; the one that comes with the weights if not given. The real suites also run without one."""
    rival: Several[Path] = ()
    """More plans for the model; the suites real and real-full compare them with --plan."""
    weights: Omittable[Weights] = None
    """Number format of the weight matrices, as for generate; "real-weights" compares all formats instead."""
    suite: Literal["demo", "study", "smoke", "cache", "real", "real-full", "real-weights"] = "demo"
    """"demo" compares policies, "study" compares choices in a plan, "smoke" checks in a minute that everything runs.
    "cache" compares an int8 cache with a float one.
    "real" takes a quarter of an hour and compares a plan with rivals that read as many keys; "real-full" takes hours
    and does so at every length. "real-weights" compares the formats of --weights with float weights, both with dense
    attention and with the plan."""
    text: Omittable[Path] = None
    """Text file, or folder of text files, in which tasks are hidden and on which fidelity is measured; if not given,
    held-out sources of Python's standard library."""
    out: Omittable[Path] = None
    """File to append to; evidence/eval-<device>.jsonl (real suites: real-<device>.jsonl) if not given."""
    resume: bool = False
    """Skip cases that already have a record from this commit."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Run the suite and append its records."""
        from tessera.runtime.corpus import read_text

        check_writable(self.out or RECORDS)
        text = None if self.text is None else read_text(self.text)
        given = {"model": "FOLDER", "plan": "FILE", "text": "FILE"}  # records must not hold paths of this machine
        words = [f" --{name} {value}" for name, value in given.items() if getattr(self, name) is not None]
        asked = {"text": text, "out": self.out, "resume": self.resume, "suite": self.suite}
        words += [f" --weights {self.weights}"] if self.weights else []
        words += [f" --rival {' '.join(path.name for path in self.rival)}"] if self.rival else []
        asked["command"] = f"tessera eval --suite {self.suite}" + "".join(words)
        if self.rival and self.suite not in ("real", "real-full"):
            raise ValueError("--rival is for --suite real and real-full only: choose one of these, or drop --rival")
        if self.weights is not None and self.suite in ("study", "smoke", "real-weights"):
            raise ValueError(f"--weights {self.weights} cannot be used with --suite {self.suite}: drop --weights")
        if self.suite == "cache":
            return self.run_cache(**asked)
        return self.run_real(**asked) if self.suite.startswith("real") else self.run_shipped(**asked)

    def run_real(self, **asked) -> int:
        """Run a suite that judges a plan on a real model."""
        from tessera.generate import load, locate_plan, plan_path
        from tessera.models.files.fetch import fetch
        from tessera.workbench.eval import real, weights

        model = load(fetch("smollm2") if self.model is None else self.model, weights=self.weights)
        path = self.plan or locate_plan(model.source)
        if self.suite == "real-weights":
            plan = None if path is None else model.with_attention("kascade", path).plan
            return weights.run(model, plan, **{name: asked[name] for name in ("text", "out", "resume", "command")})
        if path is None and self.rival:
            raise ValueError("--rival needs a plan to compare with: pass --plan too")
        if path is None:
            name = plan_path(model.source).name
            print(f"found no plan {name}: rivals read a quarter of the keys, and no plan is judged", file=sys.stderr)
            return real.run(model, None, **asked)
        plan, *others = (model.with_attention("kascade", one).plan for one in (path, *self.rival))
        names = [one.name.removesuffix(".json").removesuffix(".plan") for one in self.rival]
        return real.run(model, plan, others=dict(zip(names, others, strict=True)), **asked)

    def run_cache(self, text: str | None, out: Path | None, command: str, **others) -> int:
        """Run the suite that judges the int8 cache."""
        from tessera.core.files import DEMO_MODEL
        from tessera.generate import load, locate_plan
        from tessera.workbench.eval import cached

        if self.resume:
            raise ValueError("--resume cannot be used with --suite cache, which is short: drop --resume")
        shipped = self.model is None
        model = load(DEMO_MODEL if shipped else self.model)
        path = self.plan or locate_plan(model.source)
        plan = None if path is None else model.with_attention("kascade", path).plan
        label = "the shipped model" if shipped else Path(model.source).name.removesuffix(".gguf")
        if self.model == "smollm2":  # a name, not a path of this machine
            command = command.replace("FOLDER", self.model)
        return cached.run(model, plan, label=label, shipped=shipped, text=text, out=out, command=command)

    def run_shipped(self, **asked) -> int:
        """Run a suite on the shipped model, or on the one that --model names."""
        from tessera.core.files import DEMO_MODEL
        from tessera.generate import find_plan, load
        from tessera.workbench import eval as evaluation
        from tessera.workbench.quality import make_plan

        shipped = self.model is None
        if self.suite == "study" and not shipped:
            raise ValueError("--suite study calibrates on the shipped model's own text: drop --model")
        model = load(DEMO_MODEL if shipped else self.model, weights=self.weights)
        plan = find_plan("kascade", self.plan, model.source)
        return evaluation.run(
            model, plan, make_plan=lambda **choice: make_study_plan(make_plan, model, choice), **asked
        )


def make_study_plan(make_plan, model, choice):
    """Make the shipped model's plan with one choice changed, without measuring its cross-over."""
    from dataclasses import replace

    from tessera.workbench.quality import CHOSEN

    return make_plan(model, replace(CHOSEN, **choice), crossover=0, progress=False)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Render the stored records as one self-contained HTML page, or as the tables of README.md and docs/."""

    evidence: Path = Path("evidence")
    """Folder of records."""
    out: Path = Path("build/report.html")
    """File to write the HTML page to."""
    tables: bool = False
    """Instead of the page, rewrite the tables of README.md and docs/ in the working folder."""
    check: bool = False
    """With --tables: write nothing, only report which tables are stale."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Write the page or the tables. With --check, return 1 if a table is stale."""
        if self.check and not self.tables:
            raise ValueError("--check checks tables: add --tables")
        if self.tables:
            from tessera.workbench.report import documents as report

            return report.main([*report.PAGES, "--evidence", str(self.evidence), *(["--check"] if self.check else [])])
        from tessera.core.extras import require

        require("matplotlib", "report")
        check_writable(self.out)
        from tessera.workbench.report import page as report_page

        count = report_page.write(self.evidence, self.out)
        print(f"{self.out}: {count} records")
        return 0
