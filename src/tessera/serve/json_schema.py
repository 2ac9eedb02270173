"""Prepare a JSON schema for llguidance: refuse what it would not follow, and rewrite what it would refuse needlessly.

An unknown format is an annotation, as JSON Schema says. So are keywords without the keyword that they refer to. Lists
of distinct values out of a few are listed, because llguidance does not know `uniqueItems`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import permutations
from typing import Any

from tessera.serve.tools import subschemas

INT64 = 1 << 63
"""Integers from this number on do not fit in 64 bits."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats of strings that llguidance follows."""
PARTNERS = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
    "$dynamicAnchor": "$dynamicRef",
    "$recursiveAnchor": "$recursiveRef",
}
"""Keyword -> keyword without which it has no effect. References may be anywhere in the schema, others in its part."""
NEUTRAL = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Keyword that llguidance refuses -> its values that have no effect."""
ARRANGEMENTS = 400
"""Maximum number of lists of distinct values: all lists of up to five out of five are 326."""
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}
LISTED = {"type", "items", "uniqueItems", "minItems", "maxItems"} | NOTES
"""Keywords that a list of distinct values may have."""
ITEM = {"type", "enum", "const", "anyOf", "oneOf", "$ref"} | NOTES
"""Keywords that the schema of such a value may have."""
TYPES = {"string": str, "boolean": bool, "null": type(None), "number": float, "integer": int}


def prepared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, in the keywords that llguidance knows.

    Raises:
        ValueError: llguidance would not follow the schema to the letter; or the values of a list of distinct values are
            not listed, or too many.
    """
    check(schema)
    found = deepcopy(dict(schema))
    parts = list(subschemas(found))
    referred = {keyword for part in parts for keyword in part if keyword.endswith("Ref")}
    for part in parts:
        if isinstance(form := part.get("format"), str) and form not in FORMATS:
            del part["format"]
        for keyword, partner in PARTNERS.items():
            if keyword in part and partner not in part and partner not in referred:
                del part[keyword]
        if "if" in part and not part.keys() & {"then", "else"}:
            del part["if"]
        for keyword, values in NEUTRAL.items():
            if keyword in part and any(part[keyword] == value for value in values):
                del part[keyword]
    for part in parts:
        if part.get("uniqueItems") is True:
            _list_distinct(part, found)
    return found


def check(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if llguidance would not follow the schema to the letter, but would not refuse it either."""
    for part in subschemas(schema):
        if "x-guidance" in part:  # options of llguidance, which would replace the server's own
            raise ValueError("x-guidance in a schema is not supported: leave it out")
        for name in BOUNDS:
            # the largest integer of 64 bits is rounded up, and then down again
            if not _kept(part.get(name)) and (name, part[name]) != ("maximum", INT64 - 1):
                raise ValueError(f"{name}={part[name]!r:.80} is not kept exactly: use a bound within 2^53 of 0")
        for value in _values([part.get("const"), part.get("enum")]):
            if isinstance(value, int) and not _kept(value):
                raise ValueError(f"the constant {value!r:.80} is not kept exactly: use a string, or at most 2^53")


def _list_distinct(part: dict[str, Any], schema: Mapping[str, Any]) -> None:
    """Replace a list of distinct values by all such lists."""
    least, most = part.get("minItems", 0), part.get("maxItems")
    if most in (0, 1) and most is not True:
        del part["uniqueItems"]
        return
    values = _choices(part.get("items"), schema)
    if values is None or part.get("type") != "array" or part.keys() - LISTED or not isinstance(least, int):
        raise ValueError(
            "uniqueItems=true is supported only for arrays whose items are an enum or constants: list the values, or "
            "leave uniqueItems out"
        )
    most = min(most, len(values)) if isinstance(most, int) else len(values)
    number, lists = 0, 1  # in all, and of `count` values
    for count in range(most + 1):
        number, lists = number + lists * (count >= least), lists * (len(values) - count)
        if lists > ARRANGEMENTS and count < most:
            number = lists
            break
    if number > ARRANGEMENTS:
        raise ValueError(
            f"uniqueItems=true allows over {ARRANGEMENTS} lists of the {len(values)} values: lower maxItems, or leave "
            "uniqueItems out"
        )
    part.clear()
    part["enum"] = [list(one) for count in range(least, most + 1) for one in permutations(values, count)]


def _choices(items: Any, schema: Mapping[str, Any], depth: int = 8) -> Sequence[Any] | None:
    """Return the values that a schema lists, each once; None if it lists none."""
    if not isinstance(items, dict) or not depth or items.keys() - ITEM:
        return None
    if "$ref" in items:
        return _choices(_referred(items["$ref"], schema), schema, depth - 1)
    found: list[Any] | None = None
    if "const" in items:
        found = [items["const"]]
    elif isinstance(items.get("enum"), list):
        found = items["enum"]
    elif items.get("type") in ("boolean", "null"):
        found = [False, True] if items["type"] == "boolean" else [None]
    elif isinstance(parts := items.get("anyOf", items.get("oneOf")), list):
        lists = [_choices(part, schema, depth - 1) for part in parts]
        found = None if None in lists else [value for values in lists for value in values]
    if found is None or ("type" in items and any(type(value) is not TYPES.get(str(items["type"])) for value in found)):
        return None
    return list({json.dumps(value): value for value in found}.values())


def _referred(reference: Any, schema: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference names, such as #/$defs/Colour; None if there is none."""
    found: Any = schema
    for name in str(reference).removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _kept(number: Any) -> bool:
    """Return whether llguidance keeps a number: it converts numbers to floats, and bounds of integers to 64 bits."""
    return not isinstance(number, int | float) or (abs(number) < INT64 and float(number) == number)


def _values(data: Any) -> Iterator[Any]:
    """Yield all values of JSON data that are neither arrays nor objects."""
    if isinstance(data, list | dict):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _values(part)
    else:
        yield data
