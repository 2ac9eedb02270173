"""Text that every machine has: the standard library of the running Python (PSF licence).

The hash of a file's name decides whether the file is held out; the documents of the demo always are.
"""

import hashlib
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from tessera.train.data import Split

HELD_OUT = frozenset(
    "http/__init__.py token.py stat.py socketserver.py ftplib.py smtplib.py imaplib.py tarfile.py".split()
)
SKIPPED = frozenset({"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "__pycache__"})
CALIBRATION = "tk"
"""Name that divides the held-out files. The files that sort after this name, about a twelfth, are for calibration,
except the demo's documents."""


def library_files() -> list[tuple[str, Path]]:
    """List the standard library's sources as (relative name, path), sorted, without tests and vendored packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    return [(name.as_posix(), root / name) for name in names if not SKIPPED.intersection(name.parts)]


def is_held_out(name: str, calibration: bool | None = None) -> bool:
    """Return whether a file is held out: one file in twenty, by the hash of its name, and each of the demo's documents.

    With `calibration` True, only the held-out files for calibration count; with False, only the other held-out files.
    """
    if name not in HELD_OUT and hashlib.sha256(name.encode()).digest()[0] >= 13:
        return False
    return calibration is None or calibration == (name not in HELD_OUT and name > CALIBRATION)


@lru_cache(maxsize=1)
def library_corpus() -> Split:
    """Read the standard library of the running Python, split by file. Leave out the files of `library_calibration`."""
    return Split(_library(lambda name: not is_held_out(name)), _library(lambda name: is_held_out(name, False)))


@lru_cache(maxsize=1)
def library_calibration() -> np.ndarray:
    """Read the held-out files that are reserved for calibrating plans; training and tests do not use them."""
    return _library(lambda name: is_held_out(name, True))


def _library(wanted: Callable[[str], bool]) -> np.ndarray:
    return np.frombuffer(b"\n\n".join(path.read_bytes() for name, path in library_files() if wanted(name)), np.uint8)
