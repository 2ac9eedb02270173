"""Read untrusted JSON within limits, and check its fields against a table of rules."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tessera.core.escapes import escaped, quoted

SMALL_BYTES = 16 << 20
"""Maximum size in bytes of a config, a plan or a tensor index. The index of 100,000 tensors takes 10 MB."""
MAX_DEPTH = 64
"""Maximum nesting depth of a JSON file. Configs have 4 levels, tokenizers 8."""
LOWEST, HIGHEST = -(2**63), 2**64 - 1
"""Smallest and largest integers accepted: the smallest signed and the largest unsigned 64-bit integer."""


class Rule(NamedTuple):
    """Condition on the value of a field."""

    allowed: str  # the condition in words, as they follow "must be" in an error message
    fits: Callable[[Any], bool]  # function that returns whether a value meets the condition


def integer(low: int, high: int) -> Rule:
    words = "a positive integer of at most" if low == 1 else f"an integer from {low} to"
    return Rule(f"{words} {high}", lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float) -> Rule:
    return Rule(
        f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high
    )


def positive(high: float) -> Rule:
    return Rule(
        f"a positive number of at most {high:g}", lambda value: type(value) in (int, float) and 0 < value <= high
    )


def items(rule: Rule, what: str) -> Rule:
    """Return a rule that accepts a list whose items all fit `rule`; in errors, `what` names the items."""
    return Rule(f"a list of {what}", lambda value: isinstance(value, list) and all(map(rule.fits, value)))


def record(table: Mapping[str, Rule], allowed: str) -> Rule:
    """Return a rule that accepts an object whose fields fit the table; in errors, `allowed` describes the object."""
    return Rule(
        allowed,
        lambda value: isinstance(value, Mapping) and all(rule.fits(value.get(key)) for key, rule in table.items()),
    )


def either(*rules: Rule) -> Rule:
    return Rule(", or ".join(rule.allowed for rule in rules), lambda value: any(rule.fits(value) for rule in rules))


def maybe(rule: Rule) -> Rule:
    """Return a rule that accepts null, a missing field, and whatever `rule` accepts."""
    return Rule(f"{rule.allowed}, or null", lambda value: value is None or rule.fits(value))


TRUTH = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
OBJECT = Rule("an object", lambda value: isinstance(value, Mapping))
LIST = Rule("a list", lambda value: isinstance(value, list))


def check_fields(values: Mapping[str, Any], table: Mapping[str, Rule], place: str) -> None:
    """Raise ValueError if a field breaks its rule in the table. A missing field counts as null."""
    for key, rule in table.items():
        if not rule.fits(values.get(key)):
            raise ValueError(f"{key}={quoted(values.get(key))} must be {rule.allowed} in {place}")


def read_json(path: Path, large: Iterable[str] = (), retry: str = "download it again") -> dict[str, Any]:
    """Read a JSON object from a file of at most SMALL_BYTES, as `parse_json` does."""
    if (size := path.stat().st_size) > SMALL_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, more than the {SMALL_BYTES:,} allowed: {retry}")
    return parse_json(path.read_bytes(), path, retry, large)


def parse_json(
    data: bytes, source: object, retry: str = "download it again", large: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 text.

    Raise ValueError if the text is not UTF-8, not JSON or not an object; or if it is nested too deeply, gives a field
    two different values, or holds a number that is too large or not finite. The error begins with `source`, where the
    text comes from, and ends in the advice `retry`. Fields in `large` may hold integers of more than 64 bits.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not valid JSON (byte {error.start} is not UTF-8, {error.reason}): {retry}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON ({escaped(error, 200)}): {retry}") from error
    except RecursionError as error:
        raise _too_deep(source, retry) from error
    _check_values(value, source, retry, frozenset(large))
    if re.search(rb"\\u[dD][89a-fA-F]", data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{source} is not valid JSON (it holds a lone surrogate): {retry}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} must hold a JSON object, got {type(value).__name__}: {retry}")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for key, value in pairs:
            if repr(found[key]) != repr(value):  # 1 == True, but they are different values
                raise ValueError(f"it gives {quoted(key)} twice, with different values")
    return found


def _check_values(root: Any, source: object, retry: str, large: frozenset[str]) -> None:
    level = [("", root)]
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, dict):
                below += value.items()
            elif isinstance(value, list):
                below += [(name, item) for item in value if not isinstance(item, str)]
            elif isinstance(value, int) and not LOWEST <= value <= HIGHEST and name not in large:
                raise ValueError(f"{source}: {escaped(name)}={quoted(value)} must fit in 64 bits: {retry}")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{source}: {escaped(name)}={value} must be a finite number: {retry}")
        if not below:
            return
        level = below
    raise _too_deep(source, retry)


def _too_deep(source: object, retry: str) -> ValueError:
    return ValueError(f"{source} is not valid JSON (it is nested deeper than {MAX_DEPTH} levels): {retry}")
