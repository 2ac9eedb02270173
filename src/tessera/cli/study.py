"""The flags of `tessera study NAME`: long measurements without a chip that resume where they stopped."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, Union

import tyro

from tessera.cli.flags import Omittable, Several

Chips = Several[Literal["v5e", "v5p", "v6e", "v7x"]]


@dataclass(frozen=True, kw_only=True)
class TpuSweep:
    """Compile every TPU kernel for every chip, head dim, dtype and tile that it claims (an hour on two cores)."""

    chip: Chips = ()
    """Only these chips; all if not given."""
    kernel: str = ""
    """Only kernels whose name contains this."""
    out: Path = Path("build/tpu-sweep.jsonl")
    """File of finished cases."""
    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    niceness: int = 0
    """Added to the niceness of the compiler's process."""
    list: bool = False
    """Print what is left and exit."""
    report: bool = False
    """Append one record to evidence/, of the cases that the newest commit in the file compiled."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile what this commit has not compiled; exit code 1 on any failure."""
        return _module("sweep").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuFigures:
    """Predict the figures that the TPU kernels must meet, against Tokamax's kernel at its best block sizes."""

    chip: Chips = ()
    """Only these chips; all if not given."""
    case: Several[str] = ()
    """Only these cases; all if not given."""
    timings: Omittable[Path] = None
    """Tokamax's tokamax/data/autotuning folder; the installed wheel's, of v7x only, if not given."""
    out: Path = Path("build/tpu-figures.json")
    """File of finished cases."""
    limit_s: float = 600.0
    """Seconds after which a compile is killed."""
    report: bool = False
    """Append the records to evidence/."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile what is missing, or report."""
        return _module("figures").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Search block sizes of the TPU kernels by predicted time."""

    chip: Chips = ()
    """Only these chips; all if not given."""
    case: Several[str] = ()
    """Only these cases; all if not given."""
    out: Path = Path("build/tpu-blocks.jsonl")
    """File of tried candidates."""
    limit_s: float = 180.0
    """Seconds after which a compile is killed."""
    budget: int = 10
    """Maximum candidates per case; half for a case that starts from another's winner."""
    first: Several[str] = ()
    """Changes of the default to try first, as JSON: '{"step": 1024}'."""
    field: Several[str] = ()
    """Move only these fields, in this order."""
    report: bool = False
    """Append records to evidence/ and write the shipped tables."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Search what is missing, or report."""
        return _module("blocks").study(self)


@dataclass(frozen=True, kw_only=True)
class TpuValidation:
    """Predict Tokamax's TPU kernel at its shipped block sizes and compare with its measured times."""

    chip: Literal["v5p", "v6e", "v7x"] = "v6e"
    """The chip to compile for."""
    timings: Omittable[Path] = None
    """Tokamax's tokamax/data/autotuning folder; the installed wheel's, of v7x only, if not given."""
    out: Path = Path("build/tpu-validation.jsonl")
    """File of schedules, one line each."""
    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    most: Omittable[int] = None
    """Compile at most this many."""
    source: str = "the wheel that peers/requirements-tpu.txt names"
    """Where the timings come from, for the record."""
    evidence: Path = Path("evidence/tpu-prediction.jsonl")
    """File of records."""
    picture: Path = Path("docs/tpu-prediction.svg")
    """Picture of predicted against measured times."""
    report: bool = False
    """Compare and append the records."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Collect schedules, or report; exit code 1 if the chip has no timings."""
        return _module("validation").study(self)


@dataclass(frozen=True, kw_only=True)
class GpuGates:
    """Compile every configuration of the Hopper kernels to machine code and check it against every gate (hours)."""

    kernel: str = ""
    """Only kernels whose name contains this."""
    out: Path = Path("build/gpu-gates.jsonl")
    """File of finished cases."""
    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    niceness: int = 0
    """Added to the niceness of the compiler's process."""
    most: Omittable[int] = None
    """Stop after this many cases."""
    list: bool = False
    """Print what is left and exit."""
    report: bool = False
    """Append a record per kernel and configuration to evidence/."""
    also: Several[str] = ()
    """Further commits whose lines count, because no compiled code has changed since."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile what this commit has not compiled; exit code 1 if a gate breaks."""
        return _module("gpu_gates").study(self)


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Compute the roofline of each figure that the Hopper kernels must meet on an H200."""

    limit_s: float = 300.0
    """Seconds after which a compile is killed."""
    evidence: Path = Path("evidence/gpu-figures.jsonl")
    """File of records."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile the calls and append a record per figure."""
        return _module("gpu_figures").study(self)


@dataclass(frozen=True, kw_only=True)
class Fuzz:
    """Damage a tiny model's files and open each: every one must load and make sense, or be refused in one sentence."""

    mutations: int = 10_000
    """Number of damaged files."""
    seed: int = 0
    """Same seed, same files."""
    file: Several[str] = ()
    """Damage only these: config.json, plan.json, model.gguf, ..."""
    case: Omittable[int] = None
    """Open only this case; print the damage and the answer."""
    out: Path = Path("build/fuzz.jsonl")
    """File of finished blocks of cases."""
    limit_s: float = 5.0
    """Seconds of processor time after which opening a file counts as a hang."""
    niceness: int = 0
    """Added to the worker's own."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Open what this code has not opened; exit code 1 if a file was neither sound nor refused."""
        return _module("fuzz").study(self)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Compare planned memory of whole steps with the compiler's."""

    out: Path = Path("build/planner.jsonl")
    """File of finished steps."""
    limit_s: float = 1800.0
    """Seconds after which a compile is killed."""
    list: bool = False
    """Print what is left and exit."""
    report: bool = False
    """Append a record per step to evidence/; exit code 1 if the planner was wrong."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Compile what is missing, or report."""
        return _module("planner").study(self)


STUDIES = {
    "tpu-sweep": TpuSweep,
    "tpu-figures": TpuFigures,
    "tpu-blocks": TpuBlocks,
    "tpu-validation": TpuValidation,
    "gpu-gates": GpuGates,
    "gpu-figures": GpuFigures,
    "fuzz": Fuzz,
    "planner": Planner,
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run a long study that needs no chip; it resumes where it stopped. `--report` stores its records."""

    name: Union[*(Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in STUDIES.items())]


def _module(name: str):
    """The study's module, imported when it runs: jax is slow to load."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing runs here, and libtpu without a chip is loud
    return import_module(f"tessera.workbench.studies.{name}")
