"""Stop a command at a random time, by Ctrl-C or a kill, and check how it ends and what it leaves behind.

    PYTHONPATH=tests python tests/interrupted.py                       # 40 Ctrl-C, over all commands
    PYTHONPATH=tests python tests/interrupted.py --kill --tries 40
    PYTHONPATH=tests python tests/interrupted.py generate eval --seed 7

After Ctrl-C a command ends within --limit-s seconds with exit code 130 and one line about it on standard error. Each
file that it was writing is absent or whole. On a machine busy with other work, raise --limit-s and --latest-s.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tessera.core.files import read_lines
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
from tessera.sparse.plan import Plan
from tessera.train.losses import LOG_NAME, read_losses

COMMANDS = {
    "generate": "generate some_words --max-new-tokens 3000 --temperature 1",
    "calibrate": "calibrate --text TEXT --out plan.json --max-tokens 4096 --anchors 2 --crossover 0",
    "train": "train --text TEXT --length 32 --batch 4 --steps 20 --out train --save-every-s 0",
    "tune": "tune --workload decode_4k_gqa --candidates 3 --out tune.jsonl --table table.jsonl",
    "bench": "bench --model MODEL --out bench.jsonl",
    "eval": "eval --model MODEL --out eval.jsonl",
    "convert": "convert MODEL converted",
}
"""Name -> arguments of a command on the shipped model; TEXT and MODEL are replaced by paths."""
MODEL = Path(__file__).parents[1] / "src/tessera/shipped/model"
TEXT = Path(__file__).parents[1] / "README.md"


class End(NamedTuple):
    """How a command ended. `took_s` is the seconds from the signal, sent at `at_s`, to the end."""

    command: str
    at_s: float
    status: int
    took_s: float
    stderr: str


def stop(name: str, folder: Path, at_s: float, number: int = signal.SIGINT) -> End:
    """Run a command in a folder and send it a signal `at_s` seconds after it begins to listen for Ctrl-C."""
    words = [str({"TEXT": TEXT, "MODEL": MODEL}.get(word, word)) for word in COMMANDS[name].split()]
    command, pipe = [sys.executable, "-m", "tessera", *words], subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        while process.poll() is None and len(list(tasks.iterdir())) < 2:  # the second thread watches for Ctrl-C
            time.sleep(0.005)
        try:
            process.wait(timeout=at_s)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        began = time.monotonic()
        _, errors = process.communicate()
    return End(name, at_s, process.returncode, time.monotonic() - began, errors)


def faults(end: End, folder: Path, limit_s: float, number: int = signal.SIGINT) -> list[str]:
    """List the faults of a command's end and of the files that it wrote."""
    found = []
    said = [line for line in end.stderr.splitlines() if "interrupted" in line]
    stopped = end.status == (130 if number == signal.SIGINT else -number)
    if not stopped and end.status != 0:  # the command may have finished before the signal
        found.append(f"exit code {end.status}")
    if number == signal.SIGINT and stopped and len(said) != 1:
        found.append(f"{len(said)} sentences")
    if number == signal.SIGINT and end.took_s > limit_s:
        found.append(f"ended after {end.took_s:.1f} s")
    if "Traceback" in end.stderr or "Exception ignored" in end.stderr:
        found.append("a traceback")
    return found + list(damage(folder))


def damage(folder: Path):
    """Yield a line for each damaged file that a stopped command left."""
    for path in folder.rglob("*"):
        try:
            if path.name == "plan.json":
                Plan.load(path)
            elif path.suffix == ".jsonl" and path.name != LOG_NAME:
                read_lines(path)
            elif path.name == "config.json" and not any(part.startswith(".") for part in path.parts):
                load_params(open_source(path.parent))
            elif path.name.startswith("checkpoint-"):
                steps = len(read_losses(path.parent / LOG_NAME))
                if steps < int(path.stem.removeprefix("checkpoint-")):
                    yield f"{path.name} is ahead of a log of {steps} steps"
                check_tensors(path)
        except (ValueError, OSError, RuntimeError) as error:
            yield f"{path.name}: {error}"


def check_tensors(path: Path) -> None:
    """Read every tensor of a safetensors file."""
    from safetensors.numpy import load_file

    load_file(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Stop commands at random times; return 1 if one ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="*", choices=[[], *COMMANDS], help="all if not given")
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--kill", action="store_true", help="SIGKILL instead of Ctrl-C")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=3.0)
    parser.add_argument("--latest-s", type=float, default=8.0, help="stop a command at most this late")
    asked = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    names, draw, bad = asked.command or list(COMMANDS), random.Random(asked.seed), 0
    number = signal.SIGKILL if asked.kill else signal.SIGINT
    for index in range(asked.tries):
        with tempfile.TemporaryDirectory(prefix="tessera-interrupted-") as name:
            end = stop(names[index % len(names)], Path(name), draw.uniform(0, asked.latest_s), number)
            wrong = faults(end, Path(name), asked.limit_s, number)
        bad += bool(wrong)
        last = end.stderr.strip().splitlines()[-1:]
        print(
            f"{end.command} at {end.at_s:.2f} s: {end.status} after {end.took_s:.2f} s {last} {wrong or ''}", flush=True
        )
        if wrong:
            print(end.stderr, flush=True)
    print(f"{bad} of {asked.tries} ended badly")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
