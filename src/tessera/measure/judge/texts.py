"""Three domains of held-out text that every Python installation has: source code, reference prose and help texts.

`code` holds the standard library files that `library` holds out, except files reserved for calibration.
`reference` holds the language reference that Python's help() shows. `help` holds long docstrings of files that are not
held out. No text is in two domains, and no text is in the library text that a plan may be calibrated on.
"""

import ast
import hashlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

import numpy as np

from tessera.measure.judge.library import is_held_out, library_corpus, library_files

LONG = 600
"""Minimum length, in characters, of a docstring that `help` includes."""


@cache
def code() -> str:
    return bytes(library_corpus().held_out.astype(np.uint8)).decode("utf-8", "replace")


@cache
def reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@cache
def help() -> str:
    """Return the long docstrings of about a quarter of the standard library's files, none of them held out."""
    found = []
    for name, path in library_files():
        if not is_held_out(name) and hashlib.sha256(name.encode()).digest()[1] < 64:
            with warnings.catch_warnings(action="ignore"):  # newer Pythons warn about some escapes
                tree = ast.parse(path.read_bytes())
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
            found += [text for text in texts if text and len(text) >= LONG]
    return "\n\n\n".join(found)


DOMAINS: Final[Mapping[str, Callable[[], str]]] = MappingProxyType({"code": code, "reference": reference, "help": help})
"""Functions that return a domain's text, by the domain's name."""


def windows_of(ids: np.ndarray, count: int, size: int) -> list[np.ndarray]:
    """Cut `count` evenly spaced windows of `size` tokens from a text's token ids. The windows do not overlap."""
    if len(ids) < count * size:
        raise ValueError(
            f"the text has {len(ids)} tokens, but {count} windows of {size} need {count * size}: pass longer text"
        )
    starts = np.linspace(0, len(ids) - size, count).astype(int)
    return [ids[start : start + size] for start in starts]
