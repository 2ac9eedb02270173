"""The GPU script's child process, which runs the requested pieces until time runs out.

    python -m lab.gpu.worker REQUEST

REQUEST is a JSON object with the keys "pieces" (names in PIECES, or "module:function" for other pieces), "out" (file of
records), "dry", "again", "since" (number of records in the file when the script began) and "limit_s". Without REQUEST,
the process only prints the slug of this GPU, which names its file of records.
"""

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from lab.gpu import correct, environment, timing, tuning
from lab.gpu.session import Session, on_gpu
from lab.gpu.supervisor import NO_GPU, UNWRITABLE, Unwritable
from tessera.core import hardware

PIECES = MappingProxyType({"env": environment.run, "correct": correct.run, "time": timing.run, "tune": tuning.run})
"""Pieces of the check script: name -> function that runs the piece in a session."""
PASSES = ((True, False), (False, False), (False, True))
"""(session.first, session.retry) of the three passes over the pieces: first a few items of each piece, then the other
items, then the items that failed."""


def piece_named(name: str) -> Callable[[Session], None]:
    """Return the function that runs a piece: PIECES[name], or the imported function if `name` is "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function) if function else PIECES[name]


def end_with_parent() -> None:
    """End this process when stdin closes, which means that the parent has died."""
    os.read(0, 1)  # not sys.stdin, whose lock would still be held when Python exits
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Run the requested pieces of the GPU check, once per pass in PASSES; return the exit code.

    The exit code is NO_GPU if there is no GPU. Without arguments, only print the GPU's slug.
    """
    request = json.loads(arguments[0]) if arguments else {"dry": False}
    if request["dry"]:
        hardware.prepare_simulator()
    if not request["dry"] and not on_gpu():
        return NO_GPU
    if not arguments:
        print(hardware.device_slug())
        return 0
    threading.Thread(target=end_with_parent, daemon=True).start()
    pieces, out = request.pop("pieces"), Path(request.pop("out"))
    session = Session(out, **request)
    for session.first, session.retry in PASSES:
        for session.piece in pieces:
            piece_named(session.piece)(session)
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except SystemExit as ended:
        status = ended.code
    except Unwritable as error:
        status = UNWRITABLE
        with contextlib.suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # skip Python's clean-up, which the driver may block after a fault
