"""README's map and docs/architecture.md agree with the code: packages, line counts, functions that a walk names."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from lab.report import house

ROOT = house.ROOT
PACKAGES = {room.partition(".")[0] for floor in house.floors() for room in floor}


def test_the_map_names_every_package():
    """The README's map has a path per line, indented below its folder. Each exists, and no package is missing."""
    [block] = re.findall(r"## The map\n\n((?: {4}.*\n)+)", (ROOT / "README.md").read_text())
    assert len(block.splitlines()) <= 30
    found, folders = [], {}
    for line in block.splitlines():
        indent, name = re.match(r"( +)(\S+)", line).groups()
        if len(indent) > 12:  # a description that goes on
            continue
        folders = {depth: folder for depth, folder in folders.items() if depth < len(indent)} | {len(indent): name}
        found.append(Path(*(folders[depth] for depth in sorted(folders))))
    assert not [path for path in found if not (ROOT / path).exists()]
    package = Path("src", "tessera")
    assert {path.stem for path in found if path.parent == package} >= PACKAGES


def test_counts_of_lines_are_within_a_tenth():
    """Counts in the table and in the picture are close enough to the code's to be believed."""
    _, lines = house.counts()
    real = Counter()
    for room, number in lines.items():
        real[room.partition(".")[0]] += number
    rows = re.findall(r"^\| `(\w+)` \| [\d,]+ \| ([\d,]+) \|$", house.PAGE.read_text(), re.MULTILINE)
    assert {package for package, _ in rows} == PACKAGES
    drawn = re.findall(r">([\w.]+)</text><text[^>]*>([\d,]+) lines<", house.PICTURE.read_text())
    assert {room for room, _ in drawn} == {room for floor in house.floors() for room in floor}
    stated = [(real[name], number) for name, number in rows] + [(lines[name], number) for name, number in drawn]
    far = [(true, told) for true, told in stated if abs(int(told.replace(",", "")) - true) > max(100, true / 10)]
    assert not far, f"run `make readme`: lines and what is stated: {far}"


def test_every_function_that_a_walk_names_exists():
    """Steps name code as `file.py:function` or `file.py:Class.method`, below src/tessera/ or lab/."""
    walked = set(re.findall(r"`([\w/]+\.py):([\w.]+)`", house.PAGE.read_text()))
    assert len(walked) > 80
    assert not sorted(f"{file}:{name}" for file, name in walked if name not in names(file))


@cache
def names(file: str) -> set[str]:
    """List a module's functions, classes and their methods, and the names that it assigns."""
    path = ROOT / file if file.startswith("lab/") else house.SOURCE / file
    found = set()

    def walk(body, lead):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(lead + node.name)
                walk(node.body, f"{lead}{node.name}." if isinstance(node, ast.ClassDef) else lead)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(lead + target.id for target in targets if isinstance(target, ast.Name))

    if path.exists():
        walk(ast.parse(path.read_text()).body, "")
    return found
