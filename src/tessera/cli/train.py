"""The `tessera train` command and its flags: a recipe or the user's own text, a mesh of devices, several processes."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tessera.cli.flags import Omittable
from tessera.cli.processes import ProcessFlags, together
from tessera.core.files import check_writable

if TYPE_CHECKING:
    from tessera.train.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Train(ProcessFlags):
    """Train a model with a recipe; a restart resumes from the newest checkpoint."""

    out: Path
    """Folder for checkpoints, the loss curve and the model. Several processes must share it."""
    recipe: Literal["demo", "tiny"] = "demo"
    """Recipe: "demo" trains the shipped model, "tiny" checks in seconds that everything runs."""
    mesh: Omittable[str] = None
    """Devices that share the work: data=8 (each holds all weights), shard=8 (each holds an eighth of the weights,
    gradients and optimizer moments), or data=2,shard=4. If not given, data parallel on all devices."""
    accumulate: Omittable[int] = None
    """Number of slices into which each batch is cut; they run one after another to save memory. The recipe's own number
    if not given."""
    save_every_s: float = 120.0
    """Seconds between checkpoints."""
    until: Omittable[int] = None
    """Stop after this many steps in total; at the recipe's end if not given."""
    text: Omittable[Path] = None
    """Train on this file or folder of text instead of the recipe's data."""
    base: Omittable[str] = None
    """With --text: folder, GGUF file or hub id to start from; fresh weights of the demo's size if not given."""
    steps: int = 1000
    """With --text: number of updates, over which the learning rate falls to a tenth."""
    length: int = 512
    """With --text: tokens per sequence."""
    batch: int = 8
    """With --text: sequences per step."""
    rate: float = 1e-3
    """With --text: initial learning rate."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Train until the recipe ends or --until is reached."""
        from tessera.train.mesh import parse
        from tessera.train.recipes import RECIPES

        if self.text is None and self.base is not None:
            raise ValueError(f"--base {self.base} needs --text, the text to train on")
        place = self.check_processes()
        if self.mesh is not None:
            parse(self.mesh)
        check_writable(self.out, folder=True)
        recipe = RECIPES[self.recipe] if self.text is None else self.own_recipe()
        if self.accumulate is not None:
            recipe = replace(recipe, stages=tuple(replace(s, accumulate=self.accumulate) for s in recipe.stages))
        if place is None:
            return self.train(recipe)
        return together(place, self.facts(recipe), self.wait_s, lambda: self.train(recipe))

    def train(self, recipe: "Recipe") -> int:
        """Train on the devices of all processes."""
        from tessera.train.loop import train

        train(recipe, self.out, mesh=self.mesh, save_every_s=self.save_every_s, until=self.until)
        return 0

    def own_recipe(self) -> "Recipe":
        """Build the recipe that --text and its companion flags describe."""
        from tessera.models.files.source import resolve
        from tessera.train.recipes import DEMO_CONFIG, text_recipe

        base = None if self.base is None else resolve(self.base)
        config = DEMO_CONFIG if base is None else base.config
        flags = {name: getattr(self, name) for name in ("steps", "length", "batch", "rate")}
        return text_recipe(self.text, config=config, base=None if base is None else base.path, **flags)

    def facts(self, recipe: "Recipe") -> dict[str, str]:
        """Return digests of everything that must be the same in all processes; paths may differ between machines."""
        from importlib.metadata import version

        from tessera.models.files.checkpoint import files_digest
        from tessera.models.files.source import open_source
        from tessera.runtime.corpus import read_text
        from tessera.train.data import library_digest

        own = {"process", "wait_s", "debug", "out", "text", "base"}
        found = {
            "version of JAX or Tessera": (version("jax"), version("tessera-attention")),
            "text": library_digest() if recipe.text is None else read_text(Path(recipe.text)),
            "base": None if recipe.base is None else files_digest(open_source(recipe.base)),
            "set of flags": {name: value for name, value in asdict(self).items() if name not in own},
        }
        return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}
