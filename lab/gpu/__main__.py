"""Run the named pieces of the GPU check, by default all, until time runs out."""

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.gpu.supervisor import STOPS, device, supervise
from tessera.core.memory import format_bytes
from tessera.measure import evidence

PIECES = ("env", "correct", "time", "tune")
"""Names of the pieces, in the order they run."""


def main(argv: list[str] | None = None) -> int:
    """Run the pieces. The exit code is 1 if a measurement failed (its record says why) or the child process ended
    between two measurements, 2 if there is no GPU or a file cannot be written, and 130 if the run was stopped. The next
    run resumes."""
    parser = argparse.ArgumentParser(prog="python -m lab.gpu", description=main.__doc__)
    parser.add_argument("pieces", nargs="*", metavar="|".join(PIECES), help="pieces to run; all if none is named")
    parser.add_argument("--out", type=Path, help="file of records; evidence/gpu-<device>.jsonl if not given")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds after which no new measurement starts")
    parser.add_argument("--again", action="store_true", help="repeat measurements that the file already records")
    parser.add_argument(
        "--dry", action="store_true", help="run tiny shapes in the interpreter; never write to evidence/"
    )
    options = parser.parse_args(argv)
    unknown = sorted(set(options.pieces) - set(PIECES))
    if unknown:
        parser.error(f"pieces {unknown} must be among {', '.join(PIECES)}")
    if options.dry and options.out is not None and "evidence" in options.out.parts:
        parser.error("--dry measures nothing: give --out a file outside of evidence/")
    try:
        with stops_as_ctrl_c():
            return run(options)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes where it stopped", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: {error}; {room(options.out)}; the same command resumes where it stopped", file=sys.stderr)
        return 2


@contextlib.contextmanager
def stops_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on every stop signal, except those that the process was told to ignore (nohup)."""
    heard = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def room(out: Path | None) -> str:
    """Describe the free space on the disk that holds the records."""
    place = next(p for p in (out or Path("evidence", "x")).absolute().parents if p.exists())
    return f"{format_bytes(shutil.disk_usage(place).free)} are free in {place}"


def run(options: argparse.Namespace) -> int:
    """Run the pieces and return the exit code.

    Raises:
        KeyboardInterrupt: the run was stopped.
        OSError: a file could not be written.
    """
    if options.dry and options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="tessera-gpu-check-")) / "dry.jsonl"
    found = None if options.dry else device()
    if not options.dry and found is None:
        print("error: jax finds no NVIDIA GPU here; --dry runs everything in the interpreter", file=sys.stderr)
        return 2
    out = options.out or Path("evidence") / f"gpu-{found}.jsonl"
    since = len(evidence.read(out)) if out.exists() else 0
    pieces = [name for name in PIECES if not options.pieces or name in options.pieces]
    request = {"pieces": pieces, "out": str(out), "dry": options.dry, "again": options.again, "since": since}
    whole = supervise(request, options.limit_s)
    latest = {record.key: record.error or "" for record in (evidence.read(out)[since:] if out.exists() else [])}
    failed = sum(error != "" and not error.startswith("not installed") for error in latest.values())
    print(f"items that failed: {failed}; records are in {out}")
    return 0 if whole and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
