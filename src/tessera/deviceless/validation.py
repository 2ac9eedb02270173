"""Holds the prediction against times that others measured on real chips.

Tokamax ships, for its TPU attention kernel, medians measured on v5p, v6e and v7x with the block sizes used. The same
kernel with the same blocks is compiled here, its time predicted, and the two compared. Needs the environment of
`make peers-tpu`. Compiling all of it takes hours on two cores, so it goes on where it stopped.

    python -m tessera.deviceless.validation collect --chip v6e --timings FOLDER
    python -m tessera.deviceless.validation report
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.deviceless import tpu

PEER_PYTHON = Path(".venv-tokamax/bin/python")
FILE = "pallas_mosaic_tpu_flash_attention.json"
FOLDERS = MappingProxyType({"v5p": "tpu_v5", "v6e": "tpu_v6_lite", "v7x": "tpu7x"})


def points(timings: Path, chip: str) -> Iterator[dict[str, Any]]:
    """The measured calls of one chip: shapes, flags, block sizes, median milliseconds."""
    table = json.loads((timings / FOLDERS[chip] / FILE).read_text())
    for key, measured in table.items():
        call = json.loads(key)
        for config, result in measured.items():
            yield {
                "chip": chip,
                **{name: _sizes(call[name]) for name in ("q", "k", "v")},
                "is_causal": call["mask"]["is_causal"],
                "return_residuals": call["return_residuals"],
                "config": json.loads(config),
                "measured_ms": statistics.median(result["evaluation_times_ms"]),
            }


def _sizes(text: str) -> list[int]:
    """The sizes in "bf16[1,16384,16,128]"."""
    return [int(size) for size in text[text.index("[") + 1 : -1].split(",")]


def spread(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points in an order whose every beginning is spread over head dims, masks, lengths and residuals; big blocks,
    which compile for minutes, last."""

    def late(point):
        return point["config"]["block_q"] * point["config"]["block_kv"] > 4 << 20

    def scatter(index):  # bit reversal: halves, quarters, ...
        return int(f"{index:010b}"[::-1], 2)

    order = sorted(range(len(found)), key=lambda i: (late(found[i]), scatter(i)))
    return [found[i] for i in order]


def identity(point: dict[str, Any]) -> str:
    """What tells two points apart."""
    return json.dumps([point[n] for n in ("chip", "q", "k", "v", "is_causal", "return_residuals", "config")])


def collect(chip: str, timings: Path, out: Path, limit_s: float, most: int | None) -> None:
    """Compile what is not in `out` yet and append what the schedule says, one JSON object a line."""
    done = {identity(point) for point in read(out)}
    todo = [p for p in spread(list(points(timings, chip))) if identity(p) not in done]
    for number, point in enumerate(todo[:most], start=1):
        names = ("q", "k", "v", "is_causal", "return_residuals", "config")
        program = tpu.factory_program("tokamax_splash:forward", **{name: point[name] for name in names})
        compiled = tpu.compile_for(
            chip, program, python=str(PEER_PYTHON), paths=[str(Path("peers").resolve())], limit_s=limit_s, niceness=15
        )
        line = {**point, "compile_s": round(compiled.compile_s, 1), "error": str(compiled.error or "") or None}
        for found in compiled.schedules:
            line["regions"] = {r.name: {"bundles": r.bundles, "slots": dict(r.slots)} for r in found.regions}
            line["vmem_bytes"] = found.vmem_bytes
        line["operations"] = [[o.name, o.opcode, o.bytes, o.cycles] for o in compiled.operations]
        line["memory"], line["entry"] = dict(compiled.memory), compiled.entry
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{chip} {number}/{len(todo)} {point['q']} {compiled.compile_s:.0f} s {compiled.error or ''}"[:200],
            flush=True,
        )


def read(path: Path) -> list[dict[str, Any]]:
    """The lines collected so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: list[str] | None = None) -> int:
    """Collect schedules, or report the comparison."""
    parser = argparse.ArgumentParser(prog="python -m tessera.deviceless.validation", description=main.__doc__)
    parser.add_argument("action", choices=("collect", "report"))
    parser.add_argument("--chip", choices=tuple(FOLDERS), default="v6e")
    parser.add_argument("--timings", type=Path, help="folder with Tokamax's autotuning data")
    parser.add_argument("--out", type=Path, default=Path("build/tpu-validation.jsonl"))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--most", type=int)
    options = parser.parse_args(argv)
    if options.action == "collect":
        options.out.parent.mkdir(parents=True, exist_ok=True)
        collect(options.chip, options.timings, options.out, options.limit_s, options.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())
