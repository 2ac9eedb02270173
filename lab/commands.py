"""The commands `python -m lab NAME`: one frozen dataclass per command, whose fields are its flags.

Heavy modules are imported only when a command runs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from lab.simulate.command import Simulate
from lab.studies.commands import STUDIES, Study
from lab.training.command import Train
from tessera.cli import command_line
from tessera.cli.flags import MODEL, Omittable
from tessera.core.files import check_writable

DESCRIPTION = """Measure this repository: its speed against other libraries, its answers, its kernels' predicted times.

Run the commands in the repository's root, where they append records to evidence/."""
RECORDS = Path("evidence/records.jsonl")
"""Path for checking that evidence/ is writable: without --out, a command appends to a file there."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure Tessera and other libraries on a suite of cases and append records."""

    suite: Literal["cpu", "demo", "smollm2", "smoke"] = "cpu"
    """"cpu" measures speed, "demo" measures the shipped model's answers, "smollm2" compares Tessera with llama.cpp and
    transformers on a real model (hours), "smoke" checks in seconds that everything runs."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Case to run; may be repeated; all cases if not given."""
    resume: bool = False
    """Skip cases that already have a record from this commit."""
    out: Omittable[Path] = None
    """File to append to; evidence/<device>.jsonl if not given."""
    peer_python: Path = Path(".venv-peers/bin/python")
    """Interpreter of the environment with torch and transformers, which `make peers` creates."""
    gate: bool = False
    """Store no records; compare the results with the suite's stored records for this device. Exit code 1 if a result
    is worse by more than noise; 3 if none is, but some could not be judged (noise, few samples, not measured again)."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Run the cases; return 1 if one failed or, with --gate, got worse, and 3 if that is uncertain."""
        from lab import bench

        options = {"peer_python": self.peer_python, "only": self.only}
        if self.gate:
            if self.resume or self.out is not None:
                raise ValueError("--gate stores no records: drop --resume and --out")
            return bench.gate(self.suite, **options)
        check_writable(self.out or RECORDS)
        return bench.run(self.suite, out=self.out, resume=self.resume, **options)


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure what an int8 cache or fewer bits of weights cost. `tessera eval` measures what a plan costs."""

    model: Annotated[Omittable[str], MODEL] = None
    """Hugging Face folder, GGUF file, hub id or "smollm2" (see tessera fetch). If not given, the shipped demo model;
    for "real-weights", SmolLM2, which is fetched."""
    plan: Omittable[Path] = None
    """Kascade plan; the one that comes with the weights if not given."""
    suite: Literal["cache", "real-weights"] = "cache"
    """"cache" compares an int8 cache with a float one. "real-weights" compares the formats of `tessera generate
    --weights` with float weights, both with dense attention and with the plan."""
    text: Omittable[Path] = None
    """Text file, or folder of text files, to measure on; if not given, texts of Python's standard library."""
    out: Omittable[Path] = None
    """File to append to; evidence/eval-<device>.jsonl ("real-weights": weights-<device>.jsonl) if not given."""
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
        command = f"python -m lab eval --suite {self.suite}" + "".join(words)
        if self.suite == "cache":
            return self.run_cache(text, command)
        return self.run_weights(text=text, out=self.out, resume=self.resume, command=command)

    def run_weights(self, **asked) -> int:
        """Run the suite that compares the number formats of weights on a real model."""
        from lab.eval import weights
        from tessera.generate import load, locate_plan
        from tessera.models.files.fetch import fetch

        model = load(fetch("smollm2") if self.model is None else self.model)
        path = self.plan or locate_plan(model.source)
        plan = None if path is None else model.with_attention("kascade", path).plan
        return weights.run(model, plan, **asked)

    def run_cache(self, text: str | None, command: str) -> int:
        """Run the suite that judges the int8 cache."""
        from lab.eval import cached
        from tessera.core.files import DEMO_MODEL
        from tessera.generate import load, locate_plan

        if self.resume:
            raise ValueError("--resume cannot be used with --suite cache, which is short: drop --resume")
        shipped = self.model is None
        model = load(DEMO_MODEL if shipped else self.model)
        path = self.plan or locate_plan(model.source)
        plan = None if path is None else model.with_attention("kascade", path).plan
        label = "the shipped model" if shipped else Path(model.source).name.removesuffix(".gguf")
        if self.model == "smollm2":  # a name, not a path of this machine
            command = command.replace("FOLDER", self.model)
        return cached.run(model, plan, label=label, shipped=shipped, text=text, out=self.out, command=command)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Render the stored records as the tables of README.md and docs/, and the pictures in docs/."""

    evidence: Path = Path("evidence")
    """Folder of records."""
    check: bool = False
    """Write nothing, only list the tables that differ from the records."""
    show: Omittable[str] = None
    """Write nothing, only print the table of this name with the records of all machines; a page shows one machine."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Write the tables and pictures. With --check, return 1 if a table is stale."""
        from tessera.core.extras import require

        require("matplotlib", "report")
        from lab.report import documents
        from tessera.measure.evidence import collect

        if self.show is not None:
            print(documents.render(self.show, collect(self.evidence), every_machine=True))
            return 0
        if self.check:
            stale = documents.all_stale(self.evidence)
            for name in stale:
                print(f"stale: {name}; run `make readme` to render it again", file=sys.stderr)
            return 1 if stale else 0
        documents.write(self.evidence)
        return 0


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Ask a real model (offline: the shipped model) about a long document, and compare dense attention with Kascade."""

    out: Path = Path("build/demo")
    """Folder for record.json and index.html."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Run the demo.

        Return 1 if the model gives no more of dense's answers under Kascade than under the control, which is Kascade
        without the tiles that it selects by score.
        """
        from tessera.core.extras import require

        require("matplotlib", "report")
        check_writable(self.out, folder=True)
        from lab.demo.run import run

        return run(self.out)


COMMANDS = MappingProxyType(
    {
        "bench": Bench,
        "eval": Eval,
        "report": Report,
        "study": Study,
        "simulate": Simulate,
        "demo": Demo,
        "train": Train,
    }
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code, as `tessera.cli.main.main` does."""
    argv = sys.argv[1:] if argv is None else argv
    command_line.compile_without_chip()
    command = parse(argv)
    return command_line.run(command, computes=not isinstance(command, Report))


def parse(argv: list[str]):
    """Parse the arguments into a command with its flags.

    Raises:
        SystemExit: with code 0 after help, with code 2 if the arguments are wrong.
    """
    return command_line.parse(argv, "python -m lab", DESCRIPTION, COMMANDS, {"study": STUDIES})
