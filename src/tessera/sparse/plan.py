"""The plan: the result of calibrating one model, which can be saved, loaded and checked against a model."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.attention.contract import TILES, AttentionSpec
from tessera.attention.selection import check_budget
from tessera.core.escapes import quoted
from tessera.core.fields import OBJECT, SMALL_BYTES, TEXT, check_fields, integer, items, maybe, number, parse_json
from tessera.core.files import replace_text
from tessera.sparse.estimate import Estimate

SCHEMA = 2
HEADS = ("remap", "identity", "pooled")
FIRST_SCHEMA: Mapping[str, Any] = MappingProxyType(
    {"local": 0, "sinks": 0, "own": [], "budgets": [], "score_keys": 1, "score_rows": 1, "promise": {}}
)
"""Fields that plans of schema 1 lack, and the values that they imply: no local keys, no sinks, no layer in `own`."""

MAX_INT32 = 2**31 - 1
MAX_QUERY_TILE = 1024
"""Maximum number of query rows that share a selection. A prompt is cut into chunks of whole query tiles, so large query
tiles make large chunks."""
_RATIOS = items(number(0, 1), "numbers from 0 to 1")
_INDICES = items(integer(0, 1 << 16), "integers of at least 0")
FIELDS = MappingProxyType(
    {
        **dict.fromkeys(("model", "heads"), TEXT),
        **dict.fromkeys(("num_layers", "num_kv_heads"), integer(1, 1 << 16)),
        **dict.fromkeys(("tile", "query_tile", "score_rows"), integer(1, MAX_QUERY_TILE)),
        "score_keys": integer(1, max(TILES)),
        **dict.fromkeys(("minimum", "local", "sinks", "crossover_tokens"), integer(0, MAX_INT32)),
        "fraction": number(0, 1),
        **dict.fromkeys(("anchors", "own"), _INDICES),
        "head_map": items(_INDICES, "lists of heads, one per layer"),
        "budgets": items(_RATIOS, "lists of numbers from 0 to 1, one per layer"),
        "decode_crossover": maybe(integer(0, MAX_INT32)),
        **dict.fromkeys(("promise", "provenance", "metrics"), OBJECT),
    }
)
"""Rules for the values in plan.json."""

MEASURED = ("text_kl", "text_loss", "text_loss_dense", "text_kept", "probes_kl", "probes_kept", "density")
COUNTED = ("asked", "found_dense", "found", "tokens")
MAX_MEASURED = 1_000_000
"""Maximum magnitude of a measured value in a plan's promise. `calibration.search.Kept` documents the values that
MEASURED and COUNTED name."""


THROUGHOUT: Mapping[str, Any] = MappingProxyType({"crossover_tokens": 0, "decode_crossover": None})
"""Options with which a policy is sparse at every position, as on a device where dense is never faster."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which layers score keys, which reuse a selection, and how much each reads: what a plan and its policy share.

    Attributes:
        anchors: layers that read all keys, ascending; layer 0 is in `anchors` or in `own`.
        own: layers that choose their own tiles by cheap scores (`score_keys`, `score_rows`).
        head_map: [L][K]: for each KV head of a layer, the source's KV head whose choice the head uses. The source of a
            layer in neither `anchors` nor `own` is the last layer before it that is in one of these lists.
        heads: "remap" (use head_map), "identity" (each head uses the source's head of the same number), "pooled" (one
            selection for all heads).
        tile: key positions per tile.
        query_tile: query positions that share a selection.
        local, sinks: keys just before the query tile, and first keys of the sequence, that are always read.
        fraction: fraction of the visible keys that a layer reads in addition to the always-read keys.
        minimum: minimum number of keys that a layer reads in addition to the always-read keys (all keys, if fewer are
            visible).
        budgets: [L][K]: a fraction per layer and KV head instead of `fraction`. With 1, a head reads all keys; with 0,
            only the always-read keys. Empty to use `fraction`.
        score_keys, score_rows: layers in `own` score means of `score_keys` keys, for every `score_rows`-th query row.
        crossover_tokens: prompt tokens at positions below this number (rounded up, `baselines.STEP`) use dense
            attention, which is faster there.
        decode_crossover: a decode step at a position below this number uses dense attention. None, also in plans
            without this field: nobody measured decode, and `crossover_tokens` decides.
    """

    anchors: tuple[int, ...]
    head_map: tuple[tuple[int, ...], ...]
    heads: str = "remap"
    tile: int = 16
    query_tile: int = 32
    local: int = 0
    sinks: int = 0
    fraction: float = 0.1
    minimum: int = 128
    own: tuple[int, ...] = ()
    budgets: tuple[tuple[float, ...], ...] = ()
    score_keys: int = 4
    score_rows: int = 1
    crossover_tokens: int = 0
    decode_crossover: int | None = None

    def __post_init__(self):
        AttentionSpec(tile=self.tile, query_tile=self.query_tile)
        check_budget(self.fraction, self.minimum, self.local, self.sinks)
        Estimate(keys=self.score_keys, rows=self.score_rows).check(self.tile if self.own else self.score_keys)
        if self.heads not in HEADS:
            raise ValueError(f"heads={quoted(self.heads)} must be one of {HEADS}")
        check_head_map(self.head_map, len(self.head_map), len(self.head_map[0]) if self.head_map else 0)
        check_layers(self.anchors, self.own, self.head_map)
        check_budgets(self.budgets, len(self.head_map), len(self.head_map[0]))

    def choice(self) -> dict[str, Any]:
        """Return the fields of this record, without those of a subclass."""
        return {field.name: getattr(self, field.name) for field in fields(Choice)}


@dataclass(frozen=True, kw_only=True)
class Plan(Choice):
    """A choice made for one model, with what was promised and measured.

    Attributes:
        model: fingerprint of the weights that the plan was made for.
        num_layers, num_kv_heads: sizes of that model, so that a mismatch is reported before anything runs.
        promise: empty, or these fields: the target (`keep`, `max_kl`), the measured values (`measured`, with the names
            in MEASURED and COUNTED), the lengths of the windows that were measured (`judged_tokens`), whether the
            budgets were set on other windows (`fresh`), and whether the measured values meet the target (`held`).
        provenance: origin of the plan: corpus hash, date, tessera version, device.
        metrics: measurements during calibration: similarity, importance, recall, density, perplexity, cross-over times.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    promise: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "anchors", tuple(self.anchors))
        object.__setattr__(self, "own", tuple(self.own))
        for name in ("head_map", "budgets"):
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))
        check_head_map(self.head_map, self.num_layers, self.num_kv_heads)
        super().__post_init__()
        check_query_tile(self.query_tile)
        check_promise(self.promise)
        for name in ("crossover_tokens", "decode_crossover"):
            if not 0 <= (value := getattr(self, name) or 0) <= MAX_INT32:
                raise ValueError(f"{name}={value} must be from 0 to {MAX_INT32}")

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON; a reader sees the old file or the new one, never half of one."""
        text = json.dumps({"schema": SCHEMA, "kind": "tessera-plan", **asdict(self)})
        raw = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN: such a metric is null
        replace_text(Path(path), json.dumps(raw, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Read a plan; raise FileNotFoundError or ValueError with one sentence on what is wrong and what to do."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"plan {str(path)!r} does not exist: make one with `tessera calibrate`")
        remake = "make a new one with `tessera calibrate`"
        if (size := path.stat().st_size) > SMALL_BYTES:
            raise ValueError(f"plan {str(path)!r} has {size:,} bytes, more than {SMALL_BYTES:,}: {remake}")
        found = parse_json(path.read_bytes(), f"plan {str(path)!r}", remake)
        if found.pop("kind", None) != "tessera-plan":
            raise ValueError(f"{str(path)!r} is JSON but not a plan: {remake}")
        schema = found.pop("schema", None)
        if type(schema) is not int or schema < 1:
            raise ValueError(f"plan {str(path)!r} has schema {quoted(schema)}, which is not a version: {remake}")
        if schema > SCHEMA:
            raise ValueError(
                f"plan {str(path)!r} has schema {schema}, newer than {SCHEMA}, the newest this tessera reads: "
                f"upgrade tessera, or {remake}"
            )
        try:
            return cls(**_checked({"decode_crossover": None} | (found if schema > 1 else {**FIRST_SCHEMA, **found})))
        except ValueError as error:
            raise ValueError(f"plan {str(path)!r} is damaged: {error}; {remake}") from None

    def check(self, config: Any, fingerprint: str | None = None) -> None:
        """Raise ValueError unless the plan fits a model of this config and, if given, weights with this fingerprint."""
        remake = "make a plan for this model with `tessera calibrate`"
        for name in ("num_layers", "num_kv_heads"):
            mine, theirs = getattr(self, name), getattr(config, name)
            if mine != theirs:
                raise ValueError(
                    f"the plan is of another model: its {name} is {mine}, but this model's is {theirs}; {remake}"
                )
        if fingerprint is not None and self.model != fingerprint:
            raise ValueError(
                f"the plan is of another model: it was made for {quoted(self.model)}, "
                f"but this model is {fingerprint!r}; {remake}"
            )
        for name in ("tile", "query_tile"):
            size = getattr(self, name)
            if size > config.max_positions:
                raise ValueError(
                    f"the plan's {name}={size} does not fit this model's context of {config.max_positions}; {remake}"
                )


def check_anchors(anchors: tuple[int, ...], num_layers: int) -> None:
    ascending = all(a < b for a, b in zip(anchors, anchors[1:]))
    if not anchors or anchors[0] != 0 or not ascending or anchors[-1] >= num_layers:
        raise ValueError(f"anchors={quoted(list(anchors))} must ascend from 0 and stay below num_layers={num_layers}")


def check_layers(anchors: tuple[int, ...], own: tuple[int, ...], head_map: tuple[tuple[int, ...], ...]) -> None:
    num_layers = len(head_map)
    if list(own) != sorted(set(own)) or any(not 0 <= layer < num_layers for layer in own) or set(own) & set(anchors):
        raise ValueError(f"own={quoted(list(own))} must ascend, stay below num_layers={num_layers} and name no anchor")
    check_anchors(tuple(sorted({*anchors, 0})) if 0 in own else anchors, num_layers)  # layer 0 has no source before it
    for layer in own:
        if head_map[layer] != tuple(range(len(head_map[layer]))):
            raise ValueError(
                f"head_map[{layer}]={quoted(list(head_map[layer]))} must be [0, 1, ...], because the layer is in `own`"
            )


def check_budgets(budgets: tuple[tuple[float, ...], ...], num_layers: int, num_kv_heads: int) -> None:
    if not budgets:
        return
    if len(budgets) != num_layers or any(len(row) != num_kv_heads for row in budgets):
        shape = [len(budgets), len(budgets[0])]
        raise ValueError(f"budgets have shape {shape} instead of [{num_layers}, {num_kv_heads}]")
    for layer, row in enumerate(budgets):
        if any(not 0 <= value <= 1 for value in row):
            raise ValueError(f"budgets[{layer}]={quoted(list(row))} must be fractions from 0 to 1")


def check_query_tile(size: int) -> None:
    """Raise ValueError if a query tile of `size` rows would make the chunks of a prompt too large.

    The rows of a chunk are a multiple of the query tile and of 64; a tile of 7,919 rows, a prime, would make chunks of
    half a million.
    """
    if size > MAX_QUERY_TILE or (size > 8 and size % 8):
        raise ValueError(f"query_tile={size} must be a multiple of 8 and at most {MAX_QUERY_TILE}, or below 8")


def check_promise(promise: Mapping[str, Any]) -> None:
    if not promise:
        return
    _check_names("promise", promise, {"measured", "judged_tokens", "fresh", "held"}, {"keep", "max_kl"})
    if not promise.keys() & {"keep", "max_kl"}:
        raise ValueError("promise lacks keep or max_kl")
    measured, judged = promise["measured"], promise["judged_tokens"]
    if not isinstance(measured, Mapping):
        raise ValueError(f"measured={quoted(measured)} in the promise must be an object of measured values")
    _check_names("measured in the promise", measured, {*MEASURED, *COUNTED})
    for name, value in {**promise, **measured}.items():
        if name in ("keep", "density") and not number(0, 1).fits(value):
            raise ValueError(f"{name}={quoted(value)} in the promise must be a number from 0 to 1")
        if name in ("max_kl", *MEASURED) and not number(-MAX_MEASURED, MAX_MEASURED).fits(value):
            raise ValueError(
                f"{name}={quoted(value)} in the promise must be a number from -{MAX_MEASURED:,} to {MAX_MEASURED:,}"
            )
        if name in COUNTED and not integer(0, MAX_INT32).fits(value):
            raise ValueError(f"{name}={quoted(value)} in the promise must be an integer, at least 0")
        if name in ("fresh", "held") and not isinstance(value, bool):
            raise ValueError(f"{name}={quoted(value)} in the promise must be true or false")
    if not isinstance(judged, list | tuple) or not judged or any(not integer(1, MAX_INT32).fits(n) for n in judged):
        raise ValueError(f"judged_tokens={quoted(judged)} in the promise must be a list of window lengths")


def _check_names(what: str, found: Mapping[str, Any], needed: set[str], optional: set[str] = frozenset()) -> None:
    if missing := sorted(needed - found.keys()):
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - needed - optional):
        raise ValueError(f"{what} has unknown fields {quoted(unknown)}")


def check_head_map(head_map: tuple[tuple[int, ...], ...], num_layers: int, num_kv_heads: int) -> None:
    if len(head_map) != num_layers or any(len(row) != num_kv_heads for row in head_map):
        shape = [len(head_map), len(head_map[0]) if head_map else 0]
        raise ValueError(f"head_map has shape {shape} instead of [{num_layers}, {num_kv_heads}]")
    for layer, row in enumerate(head_map):
        if any(not 0 <= head < num_kv_heads for head in row):
            raise ValueError(f"head_map[{layer}]={quoted(list(row))} must name heads from 0 to {num_kv_heads - 1}")


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields; the error names the first wrong name or value."""
    if unknown := sorted(found.keys() - FIELDS.keys()):
        raise ValueError(f"unknown fields {quoted(unknown)}")
    for name in FIELDS:
        if name not in found:
            raise ValueError(f"{name} is missing")
    check_fields(found, FIELDS, "the plan")
    return found
