"""Files that are whole or absent: written beside their place, flushed to the disk, renamed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Write = Callable[[Path, Callable[[Path], None]], None]


@contextmanager
def write_together() -> Iterator[Write]:
    """Write several files and put them in place together at the end of the block, or none of them.

    Yields `write(path, fill)`: fill(temporary) writes the content. A kill while writing leaves the old files whole.
    """
    staged: list[tuple[Path, Path]] = []

    def write(path: Path, fill: Callable[[Path], None]) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        staged.append((temporary, path))
        fill(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())

    try:
        yield write
        for temporary, path in staged:
            os.replace(temporary, path)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def text_writer(text: str) -> Callable[[Path], None]:
    """A `fill` that writes UTF-8 text."""
    return lambda path: path.write_text(text, encoding="utf-8", newline="\n")
