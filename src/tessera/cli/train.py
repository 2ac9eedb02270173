"""The `tessera train` command and its flags: text, a mesh of devices, several processes."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.cli.flags import Command, Omittable
from tessera.cli.processes import ProcessFlags, together
from tessera.core.files import check_writable

if TYPE_CHECKING:
    from tessera.models.files.source import Source
    from tessera.train.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class TrainFlags(ProcessFlags, Command):
    """Flags of every run: its folder, its devices, its checkpoints."""

    out: Path
    """Folder for checkpoints, the loss curve and the model. Several processes must share it."""
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

    source = None
    """The files of the recipe's base; None for fresh weights."""

    def run_recipe(self, make: Callable[[], "Recipe"], facts: Callable[["Recipe"], dict[str, object]]) -> int:
        """Train with the recipe that `make` returns, once the flags are checked, until it ends or --until is reached.

        `facts` returns what must be the same in all processes, besides the flags and the versions.
        """
        from tessera.train.loop import train
        from tessera.train.mesh import parse

        place = self.check_processes()
        if self.mesh is not None:
            parse(self.mesh)
        check_writable(self.out, folder=True)
        recipe = make()
        if self.accumulate is not None:
            recipe = replace(recipe, stages=tuple(replace(s, accumulate=self.accumulate) for s in recipe.stages))

        def run() -> int:
            train(recipe, self.out, base=self.source, mesh=self.mesh, save_every_s=self.save_every_s, until=self.until)
            return 0

        return run() if place is None else together(place, self.digests(facts(recipe)), self.wait_s, run)

    def digests(self, facts: dict[str, object]) -> dict[str, str]:
        """Return digests of everything that must be the same in all processes; paths may differ between machines."""
        from importlib.metadata import version

        own = {"process", "wait_s", "debug", "out", "text", "base"}
        found = facts | {
            "version of JAX or Tessera": (version("jax"), version("tessera-attention")),
            "set of flags": {name: value for name, value in asdict(self).items() if name not in own},
        }
        return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


@dataclass(frozen=True, kw_only=True)
class Train(TrainFlags):
    """Train or fine-tune a model on your text; a restart resumes from the newest checkpoint."""

    text: Path
    """File or folder of text to train on."""
    base: Omittable[str] = None
    """Folder, GGUF file or hub id to start from; fresh weights of a small model that reads bytes if not given."""
    steps: int = 1000
    """Number of updates, over which the learning rate falls to a tenth."""
    length: int = 512
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per step."""
    rate: float = 1e-3
    """Initial learning rate."""

    def run(self) -> int:
        return self.run_recipe(self.recipe, self.facts)

    @cached_property
    def source(self) -> "Source | None":
        from tessera.models.files.source import resolve

        return None if self.base is None else resolve(self.base)

    def recipe(self) -> "Recipe":
        from tessera.train.recipes import SMALL_CONFIG, text_recipe

        config = SMALL_CONFIG if self.source is None else self.source.config
        flags = {name: getattr(self, name) for name in ("steps", "length", "batch", "rate")}
        return text_recipe(self.text, config=config, base=None if self.source is None else self.source.path, **flags)

    def facts(self, recipe: "Recipe") -> dict[str, object]:
        """Return the text and the base's digest."""
        from tessera.models.files.checkpoint import files_digest
        from tessera.runtime.corpus import read_text

        return {
            "text": read_text(self.text),
            "base": None if self.source is None else files_digest(self.source),
        }
