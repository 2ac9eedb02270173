"""Describe an error as records store it: on one line, without names from this machine."""

import os
import platform
import tempfile


def plain(error: BaseException | str, *, whole: bool = False) -> str:
    """Return an error's type and the first line of its message, cut to 400 characters; with `whole`, all lines, joined
    and cut to 600. A string has no type."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = " ".join((said if whole else (said.splitlines() or [""])[0]).split())
    return without_names(text)[: 600 if whole else 400]


def without_names(text: str) -> str:
    """Replace this machine's host name and its working, home and temporary folders with "..."."""
    for name in (os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir(), platform.node()):
        text = text.replace(name, "...") if len(name) > 3 else text
    return text
