"""Help studies resume: a study appends one line per finished case to a file, and each line names its code's commit."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.core import files
from tessera.measure import evidence

CODE = ("commit", "dirty")
"""Names of the fields that identify the code that made a line."""


def out_of_time(line: Mapping[str, Any]) -> bool:
    """Return whether the line's compilation hit the time limit. The case is then undecided and runs again."""
    return (line.get("error") or "").startswith("time:")


def is_done(line: Mapping[str, Any], code: Mapping[str, Any]) -> bool:
    """Return whether the line settles its case: `code` made it, nothing was uncommitted, and no time limit was hit."""
    same = all(line.get(name) == value for name, value in code.items())
    return same and not line.get("dirty") and not out_of_time(line)


def of_last_code(found: Sequence[dict[str, Any]], identity: Callable[[dict], Hashable]) -> list[dict[str, Any]]:
    """Return the last line of each case. Only lines made by the code that made the last line of `found` count.

    `identity` returns the case of a line.
    """
    made = [[line.get(name) for name in CODE] for line in found]
    return list({identity(line): line for line, code in zip(found, made) if code == made[-1]}.values())


def of_its_code(record: evidence.Record, line: Mapping[str, Any]) -> evidence.Record:
    """Return the record with the commit at which the line was made: the report itself may run at a later commit."""
    made = {name: line[name] for name in CODE if name in line}
    return replace(record, code=evidence.Code(**made)) if made else record


def lines_to_report(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the study file `out`.

    Raises:
        ValueError: the file has no lines.
    """
    found = files.read_lines(out)
    if not found:
        raise ValueError(f"{out} has no lines: run the study first, without --report")
    return found


def check_names(flag: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError if a given name is unknown."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{flag} {unknown[0]} must be one of {', '.join(known)}")
