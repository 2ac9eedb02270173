"""Run some of Tessera's commands and draw their output as docs/terminal-NAME.svg. Arguments name the pictures to draw;
without any, draw all."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = 100
COMMANDS = {
    "generate": "tessera generate -m smollm2 --chat -p 'What is the capital of France?'",
    "chat": "printf 'What is the capital of France?\\nAnd of Italy?\\n/undo\\n' | tessera chat -m smollm2",
    "doctor": "tessera doctor",
    "calibrate": "tessera calibrate -f LICENSE --anchors 2 --max-tokens 4096 --crossover 0 --out build/plan.json",
}


def main() -> None:
    """Draw the pictures that the arguments name; raise CalledProcessError if a command fails."""
    (DOCS.parent / "build").mkdir(exist_ok=True)
    for name in sys.argv[1:] or COMMANDS:
        draw(COMMANDS[name], DOCS / f"terminal-{name}.svg")


def draw(command: str, path: Path) -> None:
    """Run the command in the repository's root and draw its two streams as a terminal shows them."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))
    console.print(f"$ {command}", style="bold", markup=False, highlight=False)
    words = ["bash", "-c", f'tessera() {{ {shlex.quote(sys.executable)} -m tessera "$@"; }}; {command}']
    plain = {"COLUMNS": str(COLUMNS), "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0"}  # colours, and no animation
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": True}
    done = subprocess.run(words, **options, env=os.environ | plain, cwd=DOCS.parent)
    console.print(Text.from_ansi(done.stdout.rstrip()))
    path.write_text(console.export_svg(title="tessera"))
    print(path)


if __name__ == "__main__":
    main()
