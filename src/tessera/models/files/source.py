"""A model's files as one object, opened once: a Hugging Face folder or a GGUF file.

A `Source` reads each small file, or a GGUF file's header, the first time that something needs it, and never again. Only
this module asks whether a path is a folder or a GGUF file.
"""

import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import read_json
from tessera.core.files import finish_swap
from tessera.models import catalogue
from tessera.models.config import ModelConfig
from tessera.models.files import families, gguf_model
from tessera.models.files.ends import End, folder_ends, gguf_ends
from tessera.models.files.fetch import SOURCES, fetched
from tessera.models.files.generation_config import FILE as GENERATION
from tessera.models.files.generation_config import GenerationConfig, parse_generation_config
from tessera.models.files.gguf_file import KINDS, GgufFile, GgufTensor, read_gguf, read_gguf_rows
from tessera.models.files.gguf_tokenizer import gguf_tokenizer
from tessera.models.files.hub import download
from tessera.models.files.parts import Reader
from tessera.models.files.tensor_file import INDEX, Stored, check_stored, read_index, read_rows
from tessera.models.files.unread import ignoring
from tessera.models.text.tokenizer import Tokenizer
from tessera.models.text.tokenizer_files import load_tokenizer
from tessera.models.weights import EMBED, HEAD, expected_shapes

logger = logging.getLogger(__name__)

CONFIG = "config.json"
HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
"""Pattern of a hub id. A name that does not match, or that ends in .gguf, is taken as a path, so that a mistyped path
is not looked up on the hub."""


class Source(ABC):
    """The files of one model. Each part is read and checked once, when it is first needed.

    Any part may raise ValueError: a file is missing, broken or cut short, or a key, value or tensor is missing or not
    supported; the message names it.
    """

    path: Path  # the folder or the GGUF file
    described: Path  # the file that holds the config
    config: ModelConfig  # `eos_ids` holds the ids that the config files name
    tokenizer: Tokenizer | None  # without one, prompts must be lists of token ids
    ends: tuple[End, ...]  # the tokens that end an answer
    generation: GenerationConfig  # the authors' sampling defaults; empty for a GGUF file
    tensors: Mapping[str, Stored | GgufTensor]  # by Hugging Face's name; all names and shapes match the config
    kinds: Mapping[str, str] | None  # `Quantised.kind` of each matrix that the form "gguf" keeps in blocks, by name
    read_rows: Reader
    _check_shape: Callable[[str, Any, tuple[int, ...]], None]
    _config_name: str  # what errors call the place of the config
    _retry: str
    _before: Mapping[Path, tuple[int, int, int]]  # identities of the files when their headers were read

    def __str__(self) -> str:
        return str(self.path)

    @abstractmethod
    def companion(self, name: str) -> Path:
        """Return the path of a file `name` that belongs to the model: in its folder, or x.`name` next to x.gguf."""

    @abstractmethod
    def log_ignored(self) -> None:
        """Log the unknown keys, and the values that contradict the tensors, which are ignored."""

    def check_unchanged(self) -> None:
        """Raise ValueError if a file that holds weights was replaced after its header was read."""
        if changed := [path for path, was in self._identities().items() if self._before.get(path) != was]:
            raise ValueError(f"{changed[0]} was replaced while it was being read: load the model again")

    def _identities(self) -> dict[Path, tuple[int, int, int]]:
        """Return size, modification time (ns) and inode of each file that may hold weights."""
        stats = {path: path.stat() for path in self._weight_files()}
        return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats.items()}

    @abstractmethod
    def _weight_files(self) -> list[Path]: ...

    def _checked(self, stored: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
        """Return the tensors; raise ValueError if their names or shapes do not match the config."""
        named, retry = self._config_name, self._retry
        if config.num_layers > len(stored):  # before lists are made for as many layers as it claims
            raise ValueError(
                f"{self} holds {len(stored)} tensors, but its {named} calls for {config.num_layers} layers: {retry}"
            )
        expected = expected_shapes(config)
        if missing := sorted(expected.keys() - stored.keys()):
            raise ValueError(f"{self} lacks {_some(missing)}, which its {named} calls for: {retry}")
        if config.tie_embeddings and HEAD.stored in stored:
            expected[HEAD.stored] = expected[EMBED.stored]
        # old checkpoints store the rope frequencies, which follow from the config
        extra = sorted(name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq"))
        if extra:
            raise ValueError(f"{self} holds {_some(extra)}, which its {named} does not call for: {retry}")
        for name, shape in expected.items():
            self._check_shape(name, stored[name], shape)
        return stored


class Folder(Source):
    """A Hugging Face folder."""

    _config_name, _retry = CONFIG, "correct config.json, or download the model again"
    kinds = None
    read_rows, _check_shape = staticmethod(read_rows), staticmethod(check_stored)

    def __init__(self, path: Path):
        self.path, self.described = path, path / CONFIG

    @cached_property
    def _raw(self) -> dict[str, dict[str, Any]]:
        """Contents of config.json and generation_config.json, by name, without those that do not exist."""
        return {name: read_json(path) for name in (CONFIG, GENERATION) if (path := self.path / name).is_file()}

    @cached_property
    def config(self) -> ModelConfig:
        if CONFIG not in self._raw:
            raise ValueError(f"{self} is not a model folder (it has no config.json): pass a Hugging Face folder")
        try:
            return families.parse_config(self._raw[CONFIG], self._raw.get(GENERATION, {}))
        except ValueError as error:
            raise ValueError(f"{self.described}: {error}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.path, self._raw.get(CONFIG, {}))

    @cached_property
    def ends(self) -> tuple[End, ...]:
        return folder_ends(self._raw, self.tokenizer)

    @cached_property
    def generation(self) -> GenerationConfig:
        try:
            return parse_generation_config(self._raw.get(GENERATION, {}))
        except ValueError as error:
            raise ValueError(f"{self.path / GENERATION}: {error}") from error

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        config, self._before = self.config, self._identities()
        return self._checked(read_index(self.path), config)

    def _weight_files(self) -> list[Path]:
        return sorted((*self.path.glob("*.safetensors"), *self.path.glob(INDEX)))

    def companion(self, name: str) -> Path:
        return self.path / name

    def log_ignored(self) -> None:
        if keys := families.unread_keys(self._raw[CONFIG]):
            logger.info("%s: %s", self.described, ignoring(keys))


class Gguf(Source):
    """A GGUF file. `read_gguf` checks the header's sizes and types, so only names and shapes remain to be checked."""

    _config_name, _retry = "metadata", "download the model again"
    generation = GenerationConfig()
    read_rows = staticmethod(read_gguf_rows)

    def __init__(self, path: Path):
        self.path = self.described = path

    @cached_property
    def header(self) -> GgufFile:
        self._before = self._identities()
        return read_gguf(self.path)

    @cached_property
    def _metadata(self) -> gguf_model.Metadata:
        return gguf_model.Metadata(self.header)

    @cached_property
    def _model(self) -> tuple[ModelConfig, Mapping[str, GgufTensor]]:
        """Config and tensors, which are checked together: before a size that the metadata claims is allocated."""
        config = gguf_model.gguf_config(self._metadata)
        config = replace(config, eos_ids=tuple(end.id for end in self.ends))
        return config, self._checked(gguf_model.gguf_tensors(self._metadata, config), config)

    @property
    def config(self) -> ModelConfig:
        return self._model[0]

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        return self._model[1]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return gguf_tokenizer(self.header)

    @cached_property
    def ends(self) -> tuple[End, ...]:
        return gguf_ends(self.header)

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        kept = {name: tensor.layout.name for name, tensor in self.tensors.items() if len(tensor.shape) == 2}
        return {name: KINDS[kind] for name, kind in kept.items() if kind in KINDS}

    def _weight_files(self) -> list[Path]:
        return [self.path]

    def companion(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name.removesuffix('.gguf')}.{name}")

    def log_ignored(self) -> None:
        if keys := gguf_model.unread_keys(self._metadata):
            logger.info("%s: %s", self, ignoring(keys))
        if values := gguf_model.ignored_values(self._metadata):
            said = "%s: ignoring %s, because the model has %d tokens"
            logger.warning(said, self, ", ".join(values), self.config.vocab_size)

    def _check_shape(self, name: str, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ValueError(
                f"{name} in {self} has shape {tensor.shape}, but its metadata calls for {shape}: {self._retry}"
            )


def open_source(path: str | os.PathLike) -> Source:
    path = Path(path)
    return Gguf(path) if path.is_file() else Folder(path)


def resolve(name: str | os.PathLike | Source, *, config_only: bool = False) -> Source:
    """Find a model: a local folder or GGUF file, a key of `fetch.SOURCES`, a hub id, or a `Source`, which is returned.

    The model of a Hugging Face hub id ("owner/name") is downloaded into the hub's cache: first the JSON files, then, if
    the config is supported, the weights. With `config_only`, only the config files are downloaded.
    """
    if isinstance(name, Source):
        return name
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"model {quoted(str(name))} begins with an unknown home folder: pass the full path") from error
    finish_swap(path)
    if path.is_dir() or path.is_file():
        return open_source(path)
    name = str(name)
    if name in SOURCES:
        return Gguf(fetched(name))
    if path.exists() or name.lower().endswith(".gguf") or not re.fullmatch(HUB_ID, name):
        problem = "is neither a folder nor a file" if path.exists() else "does not exist"
        raise ValueError(
            f"model {name!r} {problem}: pass a Hugging Face folder, a GGUF file, a hub id like 'owner/name', or "
            f"{' or '.join(map(repr, SOURCES))}"
        )
    return Folder(download(name, config_only=config_only, check=lambda folder: Folder(folder).config))


def find_config(name: str | os.PathLike) -> tuple[ModelConfig, Source | None]:
    """Return a model's config and its files, without downloading weights; a key of `catalogue.MODELS` has no files."""
    if str(name) in catalogue.MODELS and not Path(name).exists():
        return catalogue.MODELS[str(name)], None
    try:
        source = resolve(name, config_only=True)
    except ValueError as error:
        if "pass a Hugging Face folder" not in str(error):
            raise
        raise ValueError(f"{error}, or one of {', '.join(catalogue.MODELS)}") from None
    return source.config, source


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(escaped(name) for name in names[:3]) + more
