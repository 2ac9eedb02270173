"""The commands `python -m lab study NAME` and their flags.

Studies need no chip. The long ones resume where they stopped; `serving` does so only with --resume.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro

from tessera.cli.flags import Omittable, Several

Chips = Several[Literal["v5e", "v5p", "v6e", "v7x"]]


@dataclass(frozen=True, kw_only=True)
class Compiles:
    """Compile every configuration of a platform's kernels: for each TPU (an hour on two cores), or for Hopper, with
    checks of the machine code's resources and instructions (hours)."""

    platform: Literal["tpu", "gpu"]
    """The kernels to compile."""
    only: Several[str] = ()
    """Run only cases whose line contains each of these texts, such as v6e, gpu_decode, "int8 keys" or pages."""
    out: Omittable[Path] = None
    """File that stores finished cases, for resuming; build/tpu-sweep.jsonl or build/gpu-gates.jsonl if not given."""
    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    most: Omittable[int] = None
    """Stop after this many cases."""
    list: bool = False
    """Print the cases that are left and exit."""
    report: bool = False
    """Append records to evidence/ with the results of the newest commit in --out."""
    also: Several[str] = ()
    """Earlier commits whose results also count, because no compiled code has changed since then."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile the cases that have no result from this commit yet; return 1 if one fails."""
        return study_module("compiles").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuFigures:
    """Predict the times of the TPU kernels, for comparison with the performance targets, and the times of Tokamax's
    kernel at its best block sizes."""

    chip: Chips = ()
    """Chips to compile for; all if not given."""
    case: Several[str] = ()
    """Cases to run; all if not given."""
    timings: Omittable[Path] = None
    """Tokamax's folder tokamax/data/autotuning; if not given, the installed wheel's, which covers only v7x."""
    out: Path = Path("build/tpu-figures.json")
    """File that stores finished cases, for resuming."""
    limit_s: float = 600.0
    """Seconds after which a compile is killed."""
    report: bool = False
    """Append the records to evidence/."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile the cases that are missing, or, with --report, append the records."""
        return study_module("figures").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Search for the block sizes that give the TPU kernels the shortest predicted times."""

    chip: Chips = ()
    """Chips to compile for; all if not given."""
    case: Several[str] = ()
    """Cases to run; all if not given."""
    out: Path = Path("build/tpu-blocks.jsonl")
    """File that stores tried candidates, for resuming."""
    limit_s: float = 180.0
    """Seconds after which a compile is killed."""
    budget: int = 10
    """Maximum number of candidates per case; half as many for a case that starts from another case's winner."""
    first: Several[str] = ()
    """Changes to the default block sizes to try first, as JSON: '{"step": 1024}'."""
    field: Several[str] = ()
    """Vary only these block sizes, in this order."""
    report: bool = False
    """Append records to evidence/ and write the shipped tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Search the cases that are missing, or, with --report, append the records and write the tables."""
        return study_module("blocks").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuValidation:
    """Predict the times of Tokamax's TPU kernel at its shipped block sizes, and compare them with Tokamax's measured
    times."""

    chip: Literal["v5p", "v6e", "v7x"] = "v6e"
    """The chip to compile for."""
    timings: Omittable[Path] = None
    """Tokamax's folder tokamax/data/autotuning; if not given, the installed wheel's, which covers only v7x."""
    out: Path = Path("build/tpu-validation.jsonl")
    """File that stores the compiled schedules, one per line."""
    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    most: Omittable[int] = None
    """Compile at most this many cases."""
    source: str = "the wheel that lab/peers/requirements-tpu.txt names"
    """Where the timings come from, in words; the records quote this text."""
    evidence: Path = Path("evidence/tpu-prediction.jsonl")
    """File to append the records to."""
    picture: Path = Path("docs/tpu-prediction.svg")
    """File for the picture of predicted against measured times."""
    report: bool = False
    """Compare predicted with measured times and append the records."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile and store schedules, or, with --report, compare the times; return 1 if the chip has no timings."""
        return study_module("validation").study(self)


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Compute the roofline bound of every call for which the Hopper kernels have a performance target, on an H200."""

    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    evidence: Path = Path("evidence/gpu-figures.jsonl")
    """File to append the records to."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile the calls and append a record per performance target."""
        return study_module("gpu_figures").study(self)


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """Damage a tiny model's files and open each damaged file, which must load with valid values or fail with a
    one-sentence error."""

    mutations: int = 10_000
    """Number of damaged files."""
    seed: int = 0
    """Seed of the damage: the same seed gives the same files."""
    file: Several[str] = ()
    """Names of the files to damage, such as config.json, plan.json or model.gguf; all if not given."""
    case: Omittable[int] = None
    """Open only the damaged file with this number; print the damage and the result."""
    out: Path = Path("build/fuzz.jsonl")
    """File that stores finished blocks of cases, for resuming."""
    limit_s: float = 5.0
    """Seconds of processor time after which opening a file counts as a hang."""
    niceness: int = 0
    """Number to add to the niceness of the worker process."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Open the files that this version of the code has not opened yet; return 1 if one shows a defect."""
        return study_module("fuzz").study(self)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Measure the real server against its goals: many clients, shared documents, fairness, leaks, kills (an hour)."""

    model: Literal["demo", "smollm2"] = "demo"
    """The model to serve: the shipped one, or SmolLM2, whose server needs 5 GiB and minutes to start."""
    case: Several[str] = ()
    """Cases to run; all if not given."""
    seeds: int = 3
    """Number of runs of each case that measures times."""
    share: float = 1.0
    """Share of the requests to send. A share below 1 is for a quick look: the figures differ from a full run's."""
    out: Path = Path("build/serving.jsonl")
    """File that stores finished runs, for resuming."""
    resume: bool = False
    """Keep the runs that are in --out already, and measure only the others."""
    report: bool = False
    """Append a record per case to evidence/."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Measure, or, with --report, append the records; return 1 if a case has failed."""
        return study_module("serving").study(self)


STUDIES = {
    "compiles": Compiles,
    "tpu-figures": TpuFigures,
    "tpu-blocks": TpuBlocks,
    "tpu-validation": TpuValidation,
    "gpu-figures": GpuFigures,
    "fuzz": Fuzz,
    "serving": Serving,
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run a study, which needs no chip. The long ones resume where they stopped. `--report` stores the records."""

    name: Union[*(Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in STUDIES.items())]


def study_module(name: str):
    """Import the study's module and return it. The import waits for the run, because it imports jax, which is slow."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # studies only compile, and libtpu without a chip prints warnings
    return import_module(f"lab.studies.{name}")
