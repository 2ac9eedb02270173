"""The `python -m lab train` command and its flags. Heavy modules are imported only when the command runs."""

import hashlib
from dataclasses import dataclass
from typing import Literal

from tessera.cli.train import TrainFlags


@dataclass(frozen=True, kw_only=True)
class Train(TrainFlags):
    """Train with a recipe on the standard library's text; a restart resumes from the newest checkpoint."""

    recipe: Literal["demo", "tiny"] = "demo"
    """Recipe: "demo" trains the shipped model, "tiny" checks in seconds that everything runs."""

    def run(self) -> int:
        """Train until the recipe ends or --until is reached."""

        def make():
            from lab.training.recipes import RECIPES

            return RECIPES[self.recipe]

        def facts(recipe):
            from tessera.measure.judge.library import library_corpus

            return {"text": hashlib.sha256(library_corpus().train).hexdigest()}  # differs between versions of Python

        return self.run_recipe(make, facts)
