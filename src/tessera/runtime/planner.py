"""Predict whether a model fits on a chip and how fast it runs, by arithmetic alone: without a compiler or a device.

`models/footprint.py` computes the memory and `roofline.py` the times. This module compares pairs of weight and cache
types, and finds the longest context and the largest batch that fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tessera.core.hardware import USABLE_BYTES
from tessera.core.memory import format_bytes
from tessera.core.mesh import MeshShape
from tessera.core.quant import STORED
from tessera.core.shapes import round_up
from tessera.models.config import MAX_SIZE
from tessera.models.files.forms import check_forms, check_split
from tessera.models.files.source import Source
from tessera.models.footprint import FLOATS, Footprint, Load, Types, footprint
from tessera.models.weights import num_parameters
from tessera.runtime.compilation import capacity_bucket
from tessera.runtime.roofline import HEAD_DIM, Question, Speed, layer_parameters, speed
from tessera.runtime.spread import Sharing

WEIGHTS = ("bfloat16", "gguf", "int8", "w8a8", "fp8", "int4-g32", "int4-g64", "int4-g128", "int4")
"""Weight types in order of preference, the most accurate first; "gguf" keeps the types of a GGUF file."""
CACHES = ("bfloat16", "int8")

SLACK = 0.01
"""Safety margin, as a fraction of the planned bytes. No step measured in docs/runtime.md took more than planned."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Memory and times of one pair of weight and cache types.

    Attributes:
        parts: bytes on one device during a prefill chunk or a decode step, whichever takes more.
        refused: why the devices cannot share the model in these types, whatever the memory; empty if they can.
        why_not: why the pair does not fit: `refused`, or what takes too much memory; empty if it fits.
        longest, largest: longest context in tokens that fits at the question's batch, and largest batch that fits at
            its length; 0 if none does.
    """

    weights: str
    cache: str
    parts: Footprint
    usable_bytes: float
    fits: bool
    refused: str
    why_not: str
    longest: int
    largest: int
    dense: Speed
    kascade: Speed


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of `plan`: every pair of types in order of preference, and the index of the first that fits.

    `sharing` decides how devices share a prefill chunk; None if the heads are not split over devices.
    """

    question: Question
    division: MeshShape
    pairs: tuple[Pair, ...]
    first: int | None
    sharing: Sharing | None

    @property
    def choice(self) -> Pair | None:
        return None if self.first is None else self.pairs[self.first]

    def json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        q, choice, exchange = self.question, self.choice, None
        if self.sharing is not None:
            sent = self.sharing.sent(min(q.chunk, q.length))
            exchange = {**sent._asdict(), "break_even": self.sharing.break_even}
        pairs = [{**asdict(pair), "total_bytes": pair.parts.total} for pair in self.pairs]
        return {
            **{name: getattr(q, name) for name in ("chip", "devices", "batch", "length", "chunk")},
            "mesh": self.division._asdict(),
            "parameters": num_parameters(q.config),
            "head_dim": q.config.head_dim,
            "shares_head_dim": HEAD_DIM,
            "first_choice": None if choice is None else {"weights": choice.weights, "cache": choice.cache},
            "pairs": pairs,
            "exchange": exchange,
        }


def plan(question: Question, *, weights: Sequence[str] = (), source: Source | None = None) -> Answer:
    """Predict memory and times for every pair of weight and cache types.

    Args:
        weights: names from WEIGHTS to compare; if empty, all of them, but "gguf" only for a GGUF file.
        source: the model's files, or None. Those of a GGUF file say which types weights="gguf" keeps.
    """
    if unknown := [name for name in weights if name not in WEIGHTS]:
        raise ValueError(f"weights={unknown[0]!r} must be one of {', '.join(WEIGHTS)}")
    config, division = question.config, question.division
    kinds = None if source is None else source.kinds
    if STORED in weights and kinds is None:
        raise ValueError("weights='gguf' keeps the blocks of a GGUF file: name such a file as the model")
    names = weights or tuple(name for name in WEIGHTS if name != STORED or kinds)
    pairs = []
    for name in sorted(names, key=WEIGHTS.index):
        refused = ""
        try:
            if name == STORED:
                check_forms(source, name, division.heads)
            elif name not in FLOATS:
                check_split(config, name, division.heads)
        except ValueError as error:
            refused = str(error)
        for cache in CACHES:
            types = Types(weights=name, cache=cache, kinds=kinds if name == STORED else {})
            pairs.append(_pair(question, types, refused))
    first = next((index for index, pair in enumerate(pairs) if pair.fits), None)
    sharing = None
    if division.heads > 1:
        layer_bytes = 2 * layer_parameters(config) // config.num_layers
        sharing = Sharing(config=config, devices=division.heads, itemsize=2, layer_bytes=layer_bytes)
    return Answer(question=question, division=division, pairs=tuple(pairs), first=first, sharing=sharing)


def peak(question: Question, types: Types, **changes: int) -> Footprint:
    """Return the larger footprint of a prefill chunk and of a decode step; `changes` replace fields of `question`."""
    q = replace(question, **changes)
    keys, rows = capacity_bucket(q.length), min(round_up(q.length, q.policy.query_tile), q.chunk)
    loads = (Load(batch=q.batch, num_keys=keys, rows=rows), Load(batch=q.batch, num_keys=keys))
    return max((footprint(q.config, load, types=types, division=q.division) for load in loads), key=lambda f: f.total)


def fits(found: Footprint, usable_bytes: float) -> bool:
    return found.total * (1 + SLACK) <= usable_bytes


def _pair(q: Question, types: Types, refused: str) -> Pair:
    """Predict for one pair of types; `refused` says why the devices cannot share the model in them, if they cannot."""
    usable = USABLE_BYTES[q.chip]
    found = peak(q, types)
    if types.cache == "int8" and q.division.context > 1:
        refused = "an int8 cache cannot be split over devices that share each head's keys: take a bfloat16 cache"
    good = not refused and fits(found, usable)
    return Pair(
        weights=types.weights,
        cache=types.cache,
        parts=found,
        usable_bytes=usable,
        fits=good,
        refused=refused,
        why_not="" if good else refused or _why_not(found, usable),
        longest=0 if refused else _most(lambda size: fits(peak(q, types, length=size), usable)),
        largest=0 if refused else _most(lambda size: fits(peak(q, types, batch=size), usable)),
        dense=speed(q, types, None),
        kascade=speed(q, types, q.policy),
    )


def _why_not(found: Footprint, usable: float) -> str:
    sizes = f"{format_bytes(found.total)} of {format_bytes(usable)} usable per device"
    if found.weights * (1 + SLACK) > usable:
        return f"{sizes}: the weights alone need {format_bytes(found.weights)}; take narrower weights or more devices"
    return f"{sizes}: weights {format_bytes(found.weights)}, cache {format_bytes(found.cache)}"


def _most(good: Callable[[int], bool]) -> int:
    """Return the largest size up to MAX_SIZE for which `good` is true; it must then be true for all smaller ones."""
    low, high = 0, MAX_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
