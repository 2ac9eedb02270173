"""`python -m tessera.gpu_check`: runs the pieces that are named, all if none, until the time is up."""

import argparse
import sys
import tempfile
from pathlib import Path

from tessera import evidence
from tessera.gpu_check.supervisor import device, supervise

PIECES = ("env", "correct", "time", "tune")
"""In the order they run."""


def main(argv: list[str] | None = None) -> int:
    """Run the pieces; 1 if an item failed, whose record says why."""
    parser = argparse.ArgumentParser(prog="python -m tessera.gpu_check", description=main.__doc__)
    parser.add_argument("pieces", nargs="*", metavar="|".join(PIECES), help="all if none is named")
    parser.add_argument("--out", type=Path, help="file of records; evidence/gpu-<device>.jsonl if not given")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds after which nothing new begins")
    parser.add_argument("--again", action="store_true", help="also what the file holds already")
    parser.add_argument("--dry", action="store_true", help="the interpreter, tiny shapes; never into evidence/")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.pieces) - set(PIECES))
    if unknown:
        parser.error(f"pieces {unknown} must be among {', '.join(PIECES)}")
    if options.dry and options.out is None:
        options.out = Path(tempfile.mkdtemp(prefix="tessera-gpu-check-")) / "dry.jsonl"
    if options.dry and "evidence" in options.out.parts:
        parser.error("--dry measures nothing: name a file outside of evidence/")
    found = None if options.dry else device()
    if not options.dry and found is None:
        print(
            "error: no NVIDIA GPU that jax can use is here; --dry runs everything in the interpreter", file=sys.stderr
        )
        return 2
    out = options.out or Path("evidence") / f"gpu-{found}.jsonl"
    since = len(evidence.read(out)) if out.exists() else 0
    pieces = [name for name in PIECES if not options.pieces or name in options.pieces]
    request = {"pieces": pieces, "out": str(out), "dry": options.dry, "again": options.again, "since": since}
    whole = supervise(request, options.limit_s)
    found = evidence.read(out)[since:] if out.exists() else []
    failed = sum(record.error not in (None, "not installed") for record in found)
    print(f"{failed} failed; records are in {out}")
    return 0 if whole and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
