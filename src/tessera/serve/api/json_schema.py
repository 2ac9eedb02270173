"""Prepare a JSON schema for llguidance: refuse what it would not follow, and rewrite what it would refuse needlessly.

An unknown format is an annotation, as JSON Schema says. So are keywords without the keyword that they refer to. Lists
of distinct values out of a few are listed, because llguidance does not know `uniqueItems`.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from tessera.serve.api.tools import subschemas

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
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
ARRANGEMENTS = 400
"""Maximum number of lists of distinct values: all lists of up to five out of five are 326."""
NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}
LISTED = {"type", "items", "prefixItems", "uniqueItems", "minItems", "maxItems"} | NOTES
"""Keywords that a list of distinct values may have."""
SOURCES = {"enum", "const", "anyOf", "oneOf", "$ref"}
"""Keywords that list such values; their schema has one of them, or a type of few values."""
ITEM = {"type"} | SOURCES | NOTES
"""Keywords that the schema of such a value may have."""
FEW = {"boolean": (False, True), "null": (None,)}
"""Type -> its values, where these are few."""
TYPES = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
    "array": (list,),
    "object": (dict,),
}


def prepared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, in the keywords that llguidance knows; raise ValueError if there is none."""
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
        for keyword in COUNTS:
            if isinstance(count := part.get(keyword), float) and count.is_integer():
                part[keyword] = int(count)
        if "if" in part and not part.keys() & {"then", "else"}:
            del part["if"]
        for keyword, values in NEUTRAL.items():
            if keyword in part and any(part[keyword] == value for value in values):
                del part[keyword]
    for part in parts:
        if part.get("uniqueItems") is True:
            _list_distinct(part, found)
    for part in parts:
        if "anyOf" not in part and (values := _choices({"oneOf": part.get("oneOf")}, found)):
            del part["oneOf"]
            part["anyOf"] = [{"enum": values}]
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
    least, most, types = part.get("minItems", 0), part.get("maxItems", sys.maxsize), part.get("type")
    if most in (0, 1) and most is not True:
        del part["uniqueItems"]
        return
    others = [each for each in types if each != "array"] if isinstance(types, list) and "array" in types else None
    lists = None
    counts = all(isinstance(value, int) and not isinstance(value, bool) for value in (least, most))
    if (types == "array" or others is not None) and not part.keys() - LISTED and counts:
        lists = _lists(part, schema, least, most)
    if lists is None:
        raise ValueError(
            "uniqueItems=true is supported only for arrays whose items are an enum or constants: list the values, or "
            "leave uniqueItems out"
        )
    part.clear()
    part["anyOf" if others else "enum"] = [{"enum": lists}, {"type": others}] if others else lists


def _lists(part: Mapping[str, Any], schema: Mapping[str, Any], least: int, most: int) -> list[list[Any]] | None:
    """Return all lists of distinct values that an array's schema allows; None if it does not list the values."""
    first, rest = part.get("prefixItems", ()), part.get("items")
    if not isinstance(first, list | tuple):
        return None
    places = [_choices(items, schema) for items in first]
    others = [] if rest is False else _choices(rest, schema)
    if None in places or (others is None and most > len(places)):
        return None
    found: list[list[Any]] = []
    lists: list[tuple[Any, ...]] = [()]  # of `count` values, which `keys` holds in the form that `_key` gives them
    keys: list[set[str]] = [set()]
    for count in range(most + 1):
        found += [list(one) for one in lists] if count >= least else []
        values = places[count] if count < len(places) else others or ()
        more = len(lists) * (len(values) - count) if count < most else 0
        if max(len(found), more) > ARRANGEMENTS:
            raise ValueError(
                f"uniqueItems=true allows over {ARRANGEMENTS} lists of the {len(values)} values: lower "
                "maxItems, or leave uniqueItems out"
            )
        known = [(value, _key(value)) for value in values]
        longer = [
            ((*one, value), own | {key}) for one, own in zip(lists, keys) for value, key in known if key not in own
        ]
        if not longer:
            break
        lists, keys = [one for one, _ in longer], [own for _, own in longer]
    return found


def _choices(items: Any, schema: Mapping[str, Any], depth: int = 8) -> list[Any] | None:
    """Return the values that a schema lists, each once; None if it lists none."""
    if not isinstance(items, dict) or not depth or items.keys() - ITEM or len(items.keys() & SOURCES) > 1:
        return None
    types = items.get("type", list(TYPES))
    types = types if isinstance(types, list) else [types]
    found: list[Any] | None = None
    if "$ref" in items:
        found = _choices(_referred(items["$ref"], schema), schema, depth - 1)
    elif "const" in items:
        found = [items["const"]]
    elif isinstance(items.get("enum"), list):
        found = items["enum"]
    elif not items.keys() & SOURCES and all(str(each) in FEW for each in types):
        found = [value for each in types for value in FEW[each]]
    elif isinstance(parts := items.get("anyOf", items.get("oneOf")), list):
        lists = [_choices(part, schema, depth - 1) for part in parts]
        found = None if None in lists else [value for values in lists for value in values]
        if found and "oneOf" in items:
            times = Counter(map(_key, found))  # a value that two schemas of a oneOf list is excluded
            found = [value for value in found if times[_key(value)] == 1]
    known = {kind for each in types for kind in TYPES.get(str(each), ())}
    if found is None or any(type(value) not in known for value in found):
        return None
    return list({_key(value): value for value in reversed(found)}.values())[::-1]


def _key(value: Any) -> str:
    """Return a text that is the same for equal JSON values: 1 and 1.0, or objects in another order."""
    whole = json.loads(json.dumps(value), parse_float=lambda text: int(n) if (n := float(text)).is_integer() else n)
    return json.dumps(whole, sort_keys=True)


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
    if isinstance(data, list | dict):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _values(part)
    else:
        yield data
