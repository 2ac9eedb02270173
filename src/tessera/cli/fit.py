"""The `tessera fit` command: does a model fit on a chip, and how fast will it run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tessera.cli.flags import Command, Omittable, Several, Weights
from tessera.core import interrupt


@dataclass(frozen=True, kw_only=True)
class Fit(Command):
    """Predict whether a model fits on a chip, and how fast it runs.

    Exit code: 0 if some pair of weight and cache types fits; 1 if none does, or if the compiler refuses a step of
    --compile for lack of memory; 2 after an error.
    """

    model: Annotated[str, tyro.conf.Positional]
    """Hugging Face folder, GGUF file, name of a fetched model, hub id (only its config is downloaded), or a name such
    as llama-3.1-8b."""
    chip: Literal["v4", "v5e", "v5p", "v6e", "v7x", "h100", "h200"] = "v6e"
    """Chip; each of the two cores of a v7x counts as a device."""
    devices: int = 1
    """Number of devices that share every layer."""
    batch: int = 1
    """Number of sequences computed together."""
    length: int = 8192
    """Tokens per sequence, prompt and answer."""
    chunk: Omittable[int] = None
    """Prompt tokens per sequence in one prefill call; the engine's default if not given."""
    plan: Omittable[Path] = None
    """Kascade plan file. If not given, the paper's recipe: one in six or seven layers is an anchor, and the other
    layers read a tenth of the keys."""
    weights: Several[Literal["bfloat16", Weights]] = ()
    """Types of the weight matrices to compare; if not given, all types that the model supports."""
    compile: bool = False
    """Also compile a decode step and a prefill chunk in the model's own dtype, and compare the memory predicted for
    each with the memory that the compiler reports. Takes minutes."""
    limit_s: float = 900.0
    """With --compile: time limit of the compiler for each step, in seconds."""
    picture: Omittable[Path] = None
    """File for a picture that compares the chip's memory with what each pair of weight and cache types takes."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        with interrupt.at_once():  # nothing is written yet
            answer, checks = self.answer()
        if self.json:
            print(json.dumps(answer.json() | ({"compiled": [c.json() for c in checks]} if self.compile else {})))
        else:
            from tessera.cli import fit_tables

            fit_tables.print_answer(answer, self.model, checks)
        if self.picture is not None:
            from tessera.cli.fit_picture import draw

            interrupt.check()
            draw(answer, self.model, self.picture)
        return 1 if answer.first is None or any(check.refused for check in checks) else 0

    def answer(self):
        """Return the planner's answer, and its comparisons with the compiler (empty without --compile)."""
        for name in ("devices", "batch", "length", "chunk"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"--{name} {value} must be at least 1 and below {2**31:,}")
        from tessera.cli.inspect import check_limit, check_picture

        check_limit(self.limit_s)
        if self.picture is not None:
            check_picture(self.picture)
        from tessera.models.files.source import find_config
        from tessera.runtime import planner
        from tessera.runtime.roofline import Question
        from tessera.runtime.step import CHUNK

        config, source = find_config(self.model)
        flags = {name: getattr(self, name) for name in ("chip", "devices", "batch", "length")}
        question = Question(config=config, policy=self.policy(config), chunk=self.chunk or CHUNK, **flags)
        checks = ()
        if self.compile:
            from tessera.deviceless import plan_check

            plan_check.require_compiler(question)
            checks = plan_check.check(question, str(source or self.model), limit_s=self.limit_s)
        return planner.plan(question, weights=self.weights, source=source), checks

    def policy(self, config):
        """Return the Kascade policy of --plan, or that of the paper's recipe if --plan is not given."""
        from tessera.runtime.roofline import recipe
        from tessera.sparse import plan as plans
        from tessera.sparse.kascade import Kascade

        if self.plan is None:
            return recipe(config, self.model)
        found = plans.Plan.load(self.plan)
        found.check(config)
        return Kascade.from_plan(found)
