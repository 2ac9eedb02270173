"""Keep pages of the prefix cache on disk when memory runs out, and across restarts.

    folder/<digest of the salt>/<hash of the page>

One file holds one page: checksum | length of the header | header | arrays. The checksum is keyed with the salt and
covers the file's name, so it detects a file that was cut short, damaged, renamed or moved from another model's folder.
A page is written to a temporary file and renamed: a killed process leaves the whole page or none, and at most a
temporary file, which the next start removes.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401 (gives NumPy the names bfloat16 and fp8)
import numpy as np

from tessera.core.files import TEMPORARY, remove_left, write_whole
from tessera.core.shapes import round_up
from tessera.runtime.prefix import HASH_BYTES

logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 32
LENGTH_BYTES = 8
ALIGNMENT = 16
"""Each array starts at a multiple of this number of bytes, so that NumPy can read the array without a copy."""
SLACK = 16
"""A full folder shrinks to 1 - 1/SLACK of its limit, so that one scan of all files makes room for several pages."""
NAME = re.compile(r"[0-9a-f]{64}")


class Spill:
    """The pages on disk that belong to one salt, by hash.

    The limit holds for the pages of all salts together: the files least recently saved or loaded are removed first.
    Several processes may use one folder. Each of them notices the files of the others only after it has itself written
    1/16 of the limit, so each may exceed the limit by 1/16. Apart from the constructor, no method raises OSError.

    Save a page when it is evicted from memory, after the pages that continue it (`Prefix` calls `on_evict` in this
    order). The page is then newer than those pages, which need it, and is removed from disk after them.

    Args:
        folder: made if missing. Files in it that are not pages are left alone.
        limit_bytes: maximum number of bytes of all pages together.
    """

    def __init__(self, folder: str | os.PathLike, salt: bytes, limit_bytes: int):
        if not salt or limit_bytes < 1:
            raise ValueError(f"{salt=} must not be empty and {limit_bytes=} must be at least 1")
        self.limit_bytes = limit_bytes
        self._root, self._key = Path(folder), hashlib.blake2b(salt, digest_size=32).digest()
        self._folder = self._root / self._key.hex()
        self._root.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if os.name != "nt" and self._folder.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user, who could change keys: use another folder")
        self._folder.chmod(0o700)  # keys tell what users wrote
        for place in self._places():
            remove_left(place)
            for left in place.glob(f".*.{os.getpid()}{TEMPORARY}"):  # in a container, each start has the same number
                left.unlink(missing_ok=True)
        self._used, self._written = limit_bytes + 1, 0  # unknown: look
        self._make_room(0)

    def has(self, hash: bytes) -> bool:
        """Return whether a file holds the page; `load` may still find it damaged."""
        return self._path(hash).is_file()

    def save(self, hash: bytes, arrays: Sequence[np.ndarray]) -> bool:
        """Write a page unless it is on disk already; return whether it is on disk now. If writing fails, log why."""
        path = self._path(hash)
        if self.touch(hash):
            return True
        body = _encode(arrays)
        size = CHECKSUM_BYTES + len(body)
        if size > self.limit_bytes:
            logger.warning("a page of %s bytes is larger than the spill's limit of %s bytes", size, self.limit_bytes)
            return False
        try:
            self._make_room(size)
            write_whole(path, lambda temporary: temporary.write_bytes(checksum(self._key, hash, body) + body))
        except OSError as error:
            logger.warning("cannot spill a page: %s", error)
            return False
        self._used += size
        self._written += size
        return self.touch(hash)

    def load(self, hash: bytes) -> list[np.ndarray] | None:
        """Return the arrays of a page (read-only), or None if it is not on disk. Remove a file that is damaged."""
        path = self._path(hash)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cannot read a spilled page: %s", error)
            return None
        body = memoryview(data)[CHECKSUM_BYTES:]
        if checksum(self._key, hash, body) != data[:CHECKSUM_BYTES]:
            logger.warning("%s is cut short, damaged or from another model: removed", path)
            self.remove(hash)
            return None
        self.touch(hash)
        return _decode(body)

    def remove(self, hash: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(hash).unlink(missing_ok=True)

    def _path(self, hash: bytes) -> Path:
        if len(hash) != HASH_BYTES:
            raise ValueError(f"{hash=} must have {HASH_BYTES} bytes: take it from Prefix.hashes")
        return self._folder / hash.hex()

    def touch(self, hash: bytes) -> bool:
        """Make the page's file the newest, by a clock finer than the file system's; return whether there is one."""
        path = self._path(hash)
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))
        return path.is_file()

    def _make_room(self, size: int) -> None:
        """Remove the oldest files if `size` more bytes would exceed the limit.

        `_used` is the bytes at the last scan plus those that this process has written since (`_written`). It misses
        what other processes have written since the scan.
        """
        if self._used + size <= self.limit_bytes and self._written < self.limit_bytes // SLACK:
            return
        files = sorted(self._files())
        self._used, self._written = sum(num_bytes for _, num_bytes, _ in files), 0
        if self._used + size <= self.limit_bytes:
            return
        for _, num_bytes, path in files:
            if self._used + size <= self.limit_bytes - self.limit_bytes // SLACK:
                break
            Path(path).unlink(missing_ok=True)
            self._used -= num_bytes

    def _places(self) -> list[Path]:
        return [path for path in self._root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield (time in ns, number of bytes, path) of every page on disk."""
        for place in self._places():
            entries: list[os.DirEntry] = []
            with contextlib.suppress(PermissionError):  # another user's
                entries = list(os.scandir(place))
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    if NAME.fullmatch(entry.name):
                        yield entry.stat().st_mtime_ns, entry.stat().st_size, entry.path


def checksum(key: bytes, hash: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(hash, key=key, digest_size=CHECKSUM_BYTES)
    digest.update(body)
    return digest.digest()


def _encode(arrays: Sequence[np.ndarray]) -> bytes:
    """Encode arrays: the length of the header, the header [[dtype, shape], ...] as JSON, and the bytes in C order."""
    for array in arrays:
        if array.dtype.hasobject or not array.dtype.isbuiltin:
            raise ValueError(
                f"cannot spill an array of {array.dtype}: convert it to numbers in this machine's byte order"
            )
    head = json.dumps([[array.dtype.name, array.shape] for array in arrays]).encode()
    parts = [len(head).to_bytes(LENGTH_BYTES, "little") + head, *(array.tobytes() for array in arrays)]
    return b"".join(part.ljust(round_up(len(part), ALIGNMENT), b"\0") for part in parts)


def _decode(body: memoryview) -> list[np.ndarray]:
    end = LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")
    found, start = [], round_up(end, ALIGNMENT)
    for name, shape in json.loads(bytes(body[LENGTH_BYTES:end])):
        count, dtype = math.prod(shape), np.dtype(name)
        found.append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += round_up(count * dtype.itemsize, ALIGNMENT)
    return found
