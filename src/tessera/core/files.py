"""Write files and folders atomically: write under a temporary name, flush to disk, rename.

Also read JSON Lines files and append to them: a process that is killed loses at most the line it is writing.
"""

import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows: the caller must ensure one writer at a time
    fcntl = None

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[1] / "shipped"
"""Folder of files that are shipped with the package, such as the demo model and a plan for SmolLM2."""
DEMO_MODEL = SHIPPED / "model"
TEMPORARY = ".tessera-tmp"
LOCK_S = 0.5
"""Seconds to keep trying to take a lock: `finish_swap` may hold it for an instant, to see whether a save is running."""


def user_cache() -> Path:
    """Return Tessera's folder in $XDG_CACHE_HOME if that is set, else in the platform's usual cache folder."""
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
    """Write the text as UTF-8, with LF line endings on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def write_whole(path: Path, fill: Callable[[Path], None]) -> None:
    """Replace one file atomically; fill(temporary) writes the new content to a temporary path.

    A kill leaves the old file or the new one. It may also leave the temporary file, which the next call removes.
    """
    remove_left(path.parent, glob.escape(path.name))
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        fill(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        _name(error, path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _name(error: OSError, path: Path) -> None:
    """Add the path to a system error that names no file, such as the error of a write to an open file."""
    if error.errno is not None:  # our own errors have none: a file name would replace their sentence
        error.filename = error.filename or str(path)


def check_writable(path: str | os.PathLike, *, folder: bool = False, flag: str = "--out") -> None:
    """Raise an error if a file (or, with `folder`, a folder) cannot be written at this path.

    Call this before a long computation: it writes a temporary file to the nearest existing folder. Errors begin with
    `flag`, which tells the user where the path was given.
    """
    path = Path(path)
    if path.exists() and path.is_dir() != folder:
        said = "is a file: name a folder" if folder else "is a folder: name a file in it"
        raise ValueError(f"{flag} {path} {said}")
    place = path if path.is_dir() else path.parent
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
        if path.is_file():
            path.open("ab").close()
    except OSError as error:
        raise OSError(f"{flag} {path} cannot be written ({error.strerror or error}): name another path") from error


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the write lock of this file or folder while the block runs; raise OSError if another process holds it.

    The lock is taken on a hidden file in the same folder. The system releases the lock of a process that dies, so no
    lock is ever stale. On Windows, do nothing.
    """
    lock = _lock_path(path)
    handle = _take_lock(lock, path)
    try:
        yield
    finally:
        if handle is not None:
            lock.unlink(missing_ok=True)  # before releasing: a process that has opened the file notices, see _is_at
            os.close(handle)


def _lock_path(path: Path) -> Path:
    return path.parent / f".{path.name}.tessera-lock"


def _take_lock(lock: Path, path: Path) -> int | None:
    """Take the lock and return the file handle that holds it, or None on Windows."""
    if fcntl is None:
        return None
    until = time.monotonic() + LOCK_S
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(handle):
            if _is_at(handle, lock):
                os.truncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
        elif time.monotonic() > until:
            owner = os.pread(handle, 20, 0).decode("ascii", "replace") or "unknown"
            os.close(handle)
            raise OSError(f"process {owner} is writing {path}: wait until it has finished, or name another path")
        os.close(handle)
        time.sleep(0.01)


def _is_at(handle: int, path: Path) -> bool:
    """Return whether an open lock file is still at its path; the process that held its lock may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool:
    """Lock an open file; return False if another process holds the lock. If files cannot be locked, return True."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on this file; False if the file does not exist or cannot be opened."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def remove_left(folder: Path, name: str = "*") -> None:
    """Remove temporary files of `write_whole` that killed processes left in this folder; `name` is a glob pattern."""
    for left in folder.glob(f".{name}.*{TEMPORARY}"):
        pid = left.name.removesuffix(TEMPORARY).rpartition(".")[2]
        if pid.isdecimal() and not _is_alive(int(pid)):
            left.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # on Windows, os.kill ends a process, whatever the signal
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process is alive and belongs to another user
        return True
    return True


def replace_text(path: Path, text: str) -> None:
    """Write the text to a file, replacing any old content atomically; create the file's folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: write_text(temporary, text))


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a JSON Lines file. Skip a last line that a kill cut short."""
    lines = path.read_bytes().split(b"\n")
    if not _whole(lines[-1]):  # empty when the file ends in a newline
        lines.pop()
    return lines


def read_lines(path: Path) -> list[Any]:
    """Return the values in a JSON Lines file; [] if the file is missing. Skip a last line that a kill cut short."""
    found = []
    for number, line in enumerate(whole_lines(path) if path.exists() else (), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): delete that line") from error
    return found


def append_line(path: Path, value: Any) -> None:
    """Append a JSON object to a JSON Lines file, as `append_lines` does."""
    append_lines(path, json.dumps(value).encode() + b"\n")


def append_lines(path: Path, data: bytes) -> None:
    """Append whole lines to a JSON Lines file and flush the file to disk; create its folder if needed.

    A last line that a kill cut short is removed first. Processes that append to the same file take turns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if fcntl is not None:
            with suppress(OSError):  # this file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                data = _mend(file) + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Notebook:
    """Named results of a long run, stored in a JSON Lines file, so that a stopped run can resume.

    The first line of the file holds the run's subject, a JSON value that says what was computed. A file with a
    different subject is overwritten: runs with equal subjects must have equal results. Without a path, nothing is
    stored.
    """

    def __init__(self, path: Path | None = None, subject: Any = None):
        self.path, self.found = path, {}
        if path is None:
            return
        try:
            first, *rest = read_lines(path) or [None]
        except ValueError:  # not a notebook, or damaged in the middle: find all values again
            first, rest = None, []
        if first == {"subject": subject}:
            self.found = {line["name"]: line["value"] for line in rest}
        else:
            replace_text(path, json.dumps({"subject": subject}) + "\n")

    def keep(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the JSON value stored under this name; if there is none, call find() and store its result."""
        if self.path is None:
            return find()
        if name not in self.found:
            self.found[name] = find()
            append_line(self.path, {"name": name, "value": self.found[name]})
        return self.found[name]


def _mend(file: BinaryIO) -> bytes:
    """Remove an incomplete last line and return b""; if the last line lacks only its newline, return that newline."""
    file.seek(0)
    text = file.read()
    start = text.rfind(b"\n") + 1
    if _whole(text[start:]):
        return b"\n"
    file.truncate(start)
    return b""


def _whole(line: bytes) -> bool:
    """Return whether a line is complete JSON; a proper prefix of a JSON object never is."""
    try:
        json.loads(line)
    except ValueError:  # also the parent of UnicodeDecodeError
        return False
    return True


@contextmanager
def replace_folder(folder: Path, outdated: Callable[[str], bool] = lambda name: False) -> Iterator[Path]:
    """Replace a folder: yield an empty folder to fill, which replaces the old folder at the end of the block.

    The new folder also gets the old folder's other files (notes, a plan, subfolders), except top-level names for which
    outdated(name) is true. An error leaves the old folder unchanged. A kill leaves the old folder or the new one. A
    kill between the two final renames leaves both complete under hidden names; `finish_swap`, which every load and save
    of a model calls, then puts the new folder in place.
    """
    folder = folder.resolve()
    _check_renamable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(folder):
        yield from _replace_folder(folder, outdated)


def _replace_folder(folder: Path, outdated: Callable[[str], bool]) -> Iterator[Path]:
    _finish_swap(folder)
    new, old = _siblings(folder)
    _remove(new, old)
    new.mkdir()
    try:
        yield new
        for path in new.iterdir():
            sync(path)
        if folder.exists():
            _carry_over(folder, new, outdated)
        sync(new)
        sync(new.parent)  # from here on, the new folder is complete if both siblings exist
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        sync(folder.parent)  # delete the old folder only after the rename is on disk
    except OSError as error:
        _name(error, folder)
        raise
    finally:
        _finish_swap(folder)
        _remove(new, old)


def finish_swap(folder: Path) -> None:
    """Put the new folder in place if a kill came between the two renames of `replace_folder`.

    If a killed save left a copy, log a warning with its path and size; the next save removes the copy.
    """
    folder = folder.resolve()
    new, old = _siblings(folder)
    if not (new.is_dir() or old.is_dir()):
        return
    until = time.monotonic() + LOCK_S
    while _is_locked(_lock_path(folder)):  # a save is running and puts its own folder in place
        if folder.exists() or time.monotonic() > until:
            return
        time.sleep(0.01)
    _finish_swap(folder)
    for left in (new, old):
        if left.is_dir():
            size = sum(file.lstat().st_size for file in left.rglob("*"))
            logger.warning(
                "a save of %s was killed and left a copy of %s bytes: the next save removes it, or delete %s",
                folder.name,
                f"{size:,}",
                left,
            )


def _finish_swap(folder: Path) -> None:
    new, old = _siblings(folder)
    if old.is_dir() and not folder.exists():
        os.rename(new if new.is_dir() else old, folder)


def sync(path: Path) -> None:
    """Flush a file's content or a folder's entries to disk. Skip folders on Windows: they cannot be opened there."""
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
        raise ValueError(f"{folder} is a mount point or holds the working folder: name another folder, or one in it")


def _siblings(folder: Path) -> tuple[Path, Path]:
    """Return two paths: where the new folder is built, and where the old one stays until the new one is in place."""
    return folder.parent / f".{folder.name}.tessera-new", folder.parent / f".{folder.name}.tessera-old"


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _carry_over(old: Path, new: Path, outdated: Callable[[str], bool]) -> None:
    """Hard-link into `new` each file of `old` that `new` lacks, except outdated files; `old` stays complete."""

    def left_out(place: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(place) == old and (outdated(n) or (new / n).exists())]

    shutil.copytree(old, new, symlinks=True, ignore=left_out, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def sources(package: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of the package's code and tables. A commit id would miss changes that are not committed."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".jsonl", ".txtpb")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]
