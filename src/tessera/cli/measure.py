"""The commands that measure: bench, verify, tune and eval. Heavy modules are imported only when a command runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tessera.cli.flags import MODEL, Command, Omittable, Several, Weights
from tessera.core.files import check_writable

RECORDS = Path("evidence/records.jsonl")
"""Path for checking that evidence/ is writable: without --out, a command appends to a file there."""


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Time a model's prefill at several lengths, dense and with its plan, or compare two files of records."""

    model: Annotated[Omittable[str], MODEL] = None
    """Folder, hub id or GGUF file of the model."""
    plan: Omittable[Path] = None
    """With --model: the model's plan; the one that comes with the weights if not given."""
    weights: Omittable[Weights] = None
    """With --model: number format of the weight matrices, as for generate."""
    out: Omittable[Path] = None
    """With --model: file to append the records to; evidence/model-<device>.jsonl if not given."""
    compare: Omittable[tuple[Path, Path]] = None
    """Measure nothing; compare the second of two files of records with the first. Exit code 1 if a result is worse by
    more than noise; 3 if none is, but some could not be judged (noise, few samples, not measured again)."""

    def run(self) -> int:
        """Time the model, or return the exit code of the comparison."""
        if self.compare is not None:
            if given := [f"--{name}" for name in ("model", "plan", "weights", "out") if getattr(self, name)]:
                said = "it" if len(given) == 1 else "them"
                raise ValueError(f"{', '.join(given)} cannot be used with --compare, which ignores {said}: drop {said}")
            from tessera.measure import compare

            return compare.compare_files(*self.compare)
        if self.model is None:
            for name in ("plan", "weights"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"--{name} {value} needs --model: add it, or drop --{name}")
            raise ValueError(
                "bench needs --model, a model to time, or --compare, two files of records. The suites against other "
                "libraries run in a checkout of the repository: python -m lab bench"
            )
        from tessera.measure import own_model

        check_writable(self.out or RECORDS)
        plan = "" if self.plan is None else f" --plan {self.plan.name}"
        weights = "" if self.weights is None else f" --weights {self.weights}"
        command = f"tessera bench --model {Path(self.model).name}{plan}{weights}"
        return own_model.run(self.model, self.plan, out=self.out, command=command, weights=self.weights)


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
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

    def run(self) -> int:
        """Print the distribution of errors; return 1 if a kernel failed."""
        from tessera.measure import verify

        if self.random < 0:
            raise ValueError(f"--random {self.random} must be at least 0")
        if self.out is not None:
            check_writable(self.out)
        asked = {"kernel": self.kernel, "simulate": self.simulate, "configs": self.configs, "seed": self.seed}
        return verify.run(**asked, random_shapes=self.random, out=self.out)


@dataclass(frozen=True, kw_only=True)
class Tune(Command):
    """Search for a kernel's best block sizes on this device; a restart after Ctrl-C resumes."""

    workload: str
    """Name of a call in the catalogue, such as prefill_8k, prefill_16k_gqa or decode_4k_gqa."""
    role: Literal["dense", "score", "sparse"] = "dense"
    """Role of the kernel to tune."""
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

    def run(self) -> int:
        """Search, confirm the winner, and write its record and its row in the table."""
        from tessera.measure.tune import Budget, ship

        check_writable(self.out or RECORDS)
        names = ("candidates", "quick", "finalists", "rounds", "limit_s", "memory_gib", "seed")
        budget = Budget(**{name: getattr(self, name) for name in names})
        return ship.run(self.workload, self.role, budget, out=self.out, table=self.table)


@dataclass(frozen=True, kw_only=True)
class Eval(Command):
    """Judge a model's plan by closeness to dense attention and by questions about long texts, against rivals that read
    as many keys."""

    model: Annotated[Omittable[str], MODEL] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see fetch). If not given, SmolLM2, which is fetched."""
    plan: Omittable[Path] = None
    """Kascade plan; the one that comes with the weights if not given. Without any plan, only the rivals run."""
    rival: Several[Path] = ()
    """More plans for the model, which are compared with --plan."""
    weights: Omittable[Weights] = None
    """Number format of the weight matrices, as for generate."""
    suite: Literal["real", "real-full"] = "real"
    """"real" takes a quarter of an hour; "real-full" takes hours and covers every length, kind of question and
    rival."""
    text: Omittable[Path] = None
    """Text file, or folder of text files, in which tasks are hidden and on which fidelity is measured; if not given,
    held-out sources of Python's standard library."""
    out: Omittable[Path] = None
    """File to append to; evidence/real-<device>.jsonl if not given."""
    resume: bool = False
    """Skip cases that already have a record from this commit."""

    def run(self) -> int:
        """Run the suite and append its records."""
        from tessera.generate import load, locate_plan, plan_path
        from tessera.measure.judge import real
        from tessera.models.files.fetch import fetch
        from tessera.runtime.corpus import read_text

        check_writable(self.out or RECORDS)
        asked = {"text": None if self.text is None else read_text(self.text), "out": self.out, "resume": self.resume}
        asked |= {"suite": self.suite, "command": self.command()}
        model = load(fetch("smollm2") if self.model is None else self.model, weights=self.weights)
        path = self.plan or locate_plan(model.source)
        if path is None and self.rival:
            raise ValueError("--rival needs a plan to compare with: pass --plan too")
        if path is None:
            name = plan_path(model.source).name
            print(f"found no plan {name}: rivals read a quarter of the keys, and no plan is judged", file=sys.stderr)
            return real.run(model, None, **asked)
        plan, *others = (model.with_attention("kascade", one).plan for one in (path, *self.rival))
        names = [one.name.removesuffix(".json").removesuffix(".plan") for one in self.rival]
        return real.run(model, plan, others=dict(zip(names, others, strict=True)), **asked)

    def command(self) -> str:
        """Return the command line that repeats the run; records must not hold paths of this machine."""
        given = {"model": "FOLDER", "plan": "FILE", "text": "FILE"}
        words = [f" --{name} {value}" for name, value in given.items() if getattr(self, name) is not None]
        words += [f" --weights {self.weights}"] if self.weights else []
        words += [f" --rival {' '.join(path.name for path in self.rival)}"] if self.rival else []
        return f"tessera eval --suite {self.suite}" + "".join(words)
