"""Draw docs/floors.svg and fill the table of docs/architecture.md from FLOORS in tests/test_architecture.py.

`make readme` runs this module.
"""

import ast
import re
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tessera"
PICTURE = ROOT / "docs" / "floors.svg"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- house -->\n).*?(<!-- end -->)", re.DOTALL)

WIDTH, ROW, GAP, MARGIN = 880, 40, 6, 14
"""Pixels: the picture's width, a floor's height, the space between boxes, the space at the edges."""
STYLE = "text{font:14px system-ui,sans-serif;fill:#1f2937}.n{font-size:11px;fill:#6b7280}.s{font-size:12px}"


def floors() -> list[list[str]]:
    """Read FLOORS, lowest floor first, without importing the tests."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    [value] = [n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "FLOORS"]
    return [sorted(rooms) for rooms in ast.literal_eval(value)]


def room_of(path: Path, rooms: set[str]) -> str:
    """Return the most specific room of FLOORS that contains a file; "" for the package's two files at the root."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in rooms), "")


def counts() -> tuple[Counter[str], Counter[str]]:
    """Count the files and the lines of every room."""
    rooms = {room for floor in floors() for room in floor}
    files, lines = Counter(), Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        room = room_of(path, rooms)
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
    return files, lines


def table() -> str:
    """List every package, highest floor first, with its files and lines (rounded to tens)."""
    files, lines = counts()
    order = dict.fromkeys(room.partition(".")[0] for rooms in reversed(floors()) for room in rooms)
    rows = ["| package | files | lines |", "| --- | --- | --- |"]
    for package in order:
        own = [room for room in lines if room.partition(".")[0] == package]
        held = sum(files[room] for room in own), round(sum(lines[room] for room in own), -1)
        rows.append(f"| `{package}` | {held[0]} | {held[1]:,} |")
    rows.append(f"| all | {sum(files.values())} | {round(sum(lines.values()), -1):,} |")
    return "\n".join(rows) + "\n"


def picture() -> str:
    """Draw a row per floor, highest first, with a box per room. The laboratory, above them, is not in the wheel."""
    _, lines = counts()
    rows = list(reversed(floors()))
    height = 2 * MARGIN + (len(rows) + 1) * (ROW + GAP) + 24
    drawn = [box(MARGIN, MARGIN, WIDTH - 2 * MARGIN, "lab", "not in the wheel: measures this repository", dashed=True)]
    for index, rooms in enumerate(rows, 1):
        wide = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        for place, room in enumerate(rooms):
            left, top = MARGIN + place * (wide + GAP), MARGIN + index * (ROW + GAP)
            drawn.append(box(left, top, wide, room, f"{round(lines[room], -1):,} lines"))
    drawn.append(
        f'<text class="s" x="{WIDTH / 2}" y="{height - MARGIN}" text-anchor="middle">'
        "A package imports only packages on floors below it; packages on one floor do not import each other.</text>"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    page = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", page, *drawn, "</svg>\n"])


def box(left: float, top: float, wide: float, name: str, note: str, dashed: bool = False) -> str:
    """Draw a rectangle with a name and, below it, a note."""
    look = 'fill="#ffffff" stroke-dasharray="5 4"' if dashed else 'fill="#eef2ff"'
    middle = left + wide / 2
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{ROW}" rx="5" stroke="#818cf8" {look}/>'
        f'<text x="{middle:.1f}" y="{top + 17}" text-anchor="middle">{escape(name)}</text>'
        f'<text class="n" x="{middle:.1f}" y="{top + 32}" text-anchor="middle">{escape(note)}</text>'
    )


def main() -> None:
    """Write the picture and the page's table."""
    PICTURE.write_text(picture())
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + "\n" + table() + "\n" + found[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
