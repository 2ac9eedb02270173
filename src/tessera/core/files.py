"""Files and folders that are whole or absent: written beside their place, flushed to the disk, renamed.

And files of JSON lines, of which a kill costs the line that was being written.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

SHIPPED = Path(__file__).parents[1] / "demo"
"""What comes with the package: the demo model, and plans of fetched models."""
DEMO_MODEL = SHIPPED / "model"


def user_cache() -> Path:
    """This user's cache folder for Tessera: XDG_CACHE_HOME or the platform's place, read when called."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        base = Path(os.environ["LOCALAPPDATA"])
    else:
        base = Path.home() / ".cache"
    return base / "tessera"


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with plain line ends, on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Replace one file: fill(temporary) writes the content. A kill leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fill(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace one file by this text, whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: write_text(temporary, text))


def read_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, none where there is no file; a last line that a kill cut short is left out.

    Raises:
        ValueError: a line other than that is no JSON, by its number.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    if not _whole(lines[-1]):  # empty when the file ends in a line end
        lines.pop()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): delete it") from error
    return found


def append_line(path: Path, value: Any) -> None:
    """Add a JSON object to a file of such lines, on the disk at the return; its folder is made. One writer at a time.

    A line that a kill cut short before is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        data = json.dumps(value).encode() + b"\n"
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                data = _mend(file) + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Notebook:
    """What a long run has found so far, by name, in a file of JSON lines: a run that was stopped goes on from it.

    The first line says what the values are of; a file of something else is written afresh.
    """

    def __init__(self, path: Path | None = None, subject: Any = None):
        """path: None keeps nothing. subject: JSON; equal only for runs that find the same."""
        self.path, self.found = path, {}
        if path is None:
            return
        try:
            first, *rest = read_lines(path) or [None]
        except ValueError:  # not ours, or torn in its middle: what it held is found again
            first, rest = None, []
        if first == {"subject": subject}:
            self.found = {line["name"]: line["value"] for line in rest}
        else:
            replace_text(path, json.dumps({"subject": subject}) + "\n")

    def keep(self, name: str, find: Callable[[], Any]) -> Any:
        """The value of this name, found now unless it was before. JSON: floats come back exactly."""
        if self.path is None:
            return find()
        if name not in self.found:
            self.found[name] = find()
            append_line(self.path, {"name": name, "value": self.found[name]})
        return self.found[name]


def _mend(file: BinaryIO) -> bytes:
    """Cut the last line off, unless it is whole: then what is missing is its line end, which is returned."""
    file.seek(0)
    text = file.read()
    start = text.rfind(b"\n") + 1
    if _whole(text[start:]):
        return b"\n"
    file.truncate(start)
    return b""


def _whole(line: bytes) -> bool:
    """Whether a line is complete JSON; a proper prefix of a JSON object never is."""
    try:
        json.loads(line)
    except ValueError:  # JSON and UTF-8 errors both
        return False
    return True


@contextmanager
def replace_folder(folder: Path, outdated: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Replace a folder: yields an empty one beside it, to be filled, which takes its place at the end of the block.

    Everything else in the old folder (notes, a plan, subfolders) comes along, except names that the block wrote anew
    and names at its top that outdated(name) is true of. An error leaves the old folder as it was. A kill leaves the
    old folder or the new one; or, between the two renames, both of them whole under the hidden names beside it, and
    `finish_swap` (every load and save of a model calls it) puts the new one in place. One writer at a time.

    Raises:
        ValueError: the folder is a file, a mount point, or holds the working folder, and cannot be renamed.
    """
    folder = folder.resolve()
    _check_renamable(folder)
    finish_swap(folder)
    new, old = _siblings(folder)
    _remove(new, old)
    new.mkdir(parents=True)
    try:
        yield new
        for path in new.iterdir():
            sync(path)
        if folder.exists():
            _carry_over(folder, new, outdated)
        sync(new)
        sync(new.parent)  # from here on, whoever finds both siblings may trust the new one
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        sync(folder.parent)  # the old one goes only when the new one is there to stay
    finally:
        finish_swap(folder)
        _remove(new, old)


def finish_swap(folder: Path) -> None:
    """Put the new folder in place where a kill fell between the two renames of `replace_folder`."""
    folder = folder.resolve()
    new, old = _siblings(folder)
    if old.is_dir() and not folder.exists():
        os.rename(new if new.is_dir() else old, folder)


def sync(path: Path) -> None:
    """Flush a file's content or a folder's names to the disk; Windows cannot open a folder, and does without."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_renamable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder")
    if os.path.ismount(folder) or Path.cwd().is_relative_to(folder):
        raise ValueError(f"{folder} is a mount point or holds the working folder: name another, such as one inside it")


def _siblings(folder: Path) -> tuple[Path, Path]:
    """Where the new folder is made, and where the old one waits until the new one is in place."""
    return folder.parent / f".{folder.name}.tessera-new", folder.parent / f".{folder.name}.tessera-old"


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _carry_over(old: Path, new: Path, outdated: Callable[[str], bool]) -> None:
    """Hard links cost no space and leave the old folder whole, should it have to stay."""

    def left_out(place: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(place) == old and (outdated(n) or (new / n).exists())]

    shutil.copytree(old, new, symlinks=True, ignore=left_out, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def sources(package: Path = Path(__file__).parents[1]) -> str:
    """A hash of the code and tables that run. A commit says less: trees that differ from it have it too."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".jsonl", ".txtpb")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]
