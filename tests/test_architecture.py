"""House rules that a machine can check: import order, imports without side effects, budgets, names."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tessera"
LAB = ROOT / "lab"
LINES = 42_000
"""Maximum lines of Python in the package."""

# A floor imports only floors listed before it; within a floor, a room (package or module) imports only itself.
FLOORS = [
    {"core"},
    {"attention"},
    {"attention.xla", "attention.tpu", "attention.gpu"},
    {"attention.tuned"},
    {"attention.dispatch"},
    {"sparse"},
    {"models", "models.text"},
    {"models.files"},
    {"runtime"},
    {"train", "deviceless"},
    {"calibration", "generate", "doctor"},
    {"serve.api"},
    {"serve.edge"},
    {"chat", "serve", "measure"},
    {"serve.replicas"},
    {"cli"},
]
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
MODULES = sorted(SOURCE.rglob("*.py"))
LAB_MODULES = sorted(path for path in LAB.rglob("*.py") if not {"tests", "peers"} & set(path.relative_to(LAB).parts))


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room_of(module: str) -> str:
    """Return the room that contains a module: the most specific name in FLOORS."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    found = next((name for name in names if name in ROOMS), None)
    assert found, f"{module} is in no room: add its room to FLOORS and to the README's map"
    return found


def imports(path: Path) -> set[str]:
    """List the modules of this package that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tessera":
            base = node.module.removeprefix("tessera").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                is_module = (SOURCE / (name.replace(".", "/") + ".py")).exists() or (
                    SOURCE / name.replace(".", "/") / "__init__.py"
                ).exists()
                found.add(name if is_module else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("tessera").lstrip(".") for a in node.names if a.name.startswith("tessera.")}
    return found


def graph() -> dict[str, set[str]]:
    """Map every module to its imports, leaving out the package's root and `__main__`."""
    return {dotted(path): imports(path) for path in MODULES if dotted(path) not in {"", "__main__"}}


def test_imports_point_one_way():
    wrong = []
    for path in MODULES:
        module = dotted(path)
        if module in {"", "__main__", "attention"}:  # the callable package imports dispatch, on a higher floor
            continue
        for target in imports(path):
            here, there = room_of(module), room_of(target) if target else "the package root"
            if here != there and not (target and ROOMS[there] < ROOMS[here]):
                wrong.append(f"{module} must not import {target or there}")
    assert not wrong, "\n".join(wrong)


def test_the_package_and_its_tests_never_import_the_laboratory():
    """`lab/` is not in the wheel: it imports the package, never the reverse. Its tests lie in `lab/tests`."""
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]:
        found = [line for line in path.read_text().splitlines() if re.match(r"\s*(from|import) lab\b", line)]
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_no_circle():
    """Imports inside functions count too: a circle that works only because an import is late is still a circle."""
    left = graph()
    while free := [module for module, targets in left.items() if not targets & left.keys() - {module}]:
        for module in free:
            del left[module]
    assert not left, f"these modules import each other in a circle: {sorted(left)}"


def test_the_wheel_holds_the_packages_files_and_nothing_else():
    """setuptools takes modules from src/ alone, and every other file of the package by a pattern of package-data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["where"] == ["src"]
    found = {path for pattern in settings["package-data"]["tessera"] for path in SOURCE.glob(pattern)}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc", ".so"}}
    assert files == {path for path in found if path.is_file()}


def test_models_know_no_concrete_policy():
    for path in (SOURCE / "models").rglob("*.py"):
        concrete = {m for m in imports(path) if m.startswith("sparse.") and m != "sparse.contract"}
        assert not concrete, f"{dotted(path)} imports {concrete}"


def test_only_a_source_knows_that_a_file_is_a_gguf():
    for path in MODULES:
        known = {m for m in imports(path) if "gguf" in m}
        assert not known or path.parent == SOURCE / "models" / "files", f"{dotted(path)} imports {known}"


def test_reference_stands_alone():
    assert imports(SOURCE / "attention" / "reference.py") <= {"attention.contract", "attention.kernel", "core.shapes"}


def test_imports_have_no_side_effects():
    """Importing every module starts no JAX backend, changes no environment variable and writes nothing.

    Loading a model writes nothing either, though compilers for absent chips are installed.
    """
    names = ["tessera." + dotted(p) if dotted(p) else "tessera" for p in MODULES if dotted(p) != "__main__"]
    program = (
        # On import, JAX's own module writes CUDA's location to the environment.
        "import importlib, os, jax, jax.experimental.pallas.mosaic_gpu\n"
        "before = dict(os.environ)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a device was queried at import'\n"
        "assert dict(os.environ) == before, 'the environment was changed at import'\n"
        "assert jax.config.jax_compilation_cache_dir is None, 'the compilation cache was set at import'\n"
        "import tessera.core.files; tessera.load(tessera.core.files.DEMO_MODEL)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr[-2000:]) == (0, "", "")


def test_a_test_that_never_ends_fails_by_name(tmp_path):
    """A simulated kernel hangs when its threads wait for each other. The test shortens pytest's limit to 1 s."""
    settings = SOURCE.parents[1] / "pyproject.toml"
    assert 225 < tomllib.loads(settings.read_text())["tool"]["pytest"]["ini_options"]["faulthandler_timeout"] < 1000
    (tmp_path / "test_hang.py").write_text(
        "import threading\n\ndef test_waits():\n    threading.Event().wait()\n\ndef test_other():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", settings, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=1", "-n", "1", "--dist", "loadgroup", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "crashed while running 'test_hang.py::test_waits'" in done.stdout
    assert "in test_waits" in done.stderr  # names the place of the hang


def test_the_tests_of_a_file_run_in_one_process(request):
    """xdist appends the group to a test's id. Without groups, each process would build a file's fixtures again."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@test_architecture")


def test_module_names_say_something():
    assert not BANNED_NAMES & {path.stem for path in (*MODULES, *LAB.rglob("*.py"))}


def test_the_package_stays_small():
    """What grows must replace something, or move to the laboratory."""
    count = sum(len(path.read_text().splitlines()) for path in MODULES)
    assert count <= LINES, f"the package has {count} lines: cut something, or move what only measures it into lab/"


def test_budgets():
    """A kernel's file has at most 650 lines, any other 450; a function 60 without docstring (in attention 120) and 9
    positional parameters."""
    wrong = []
    for path in (*MODULES, *LAB_MODULES):
        text, name = path.read_text(), path.relative_to(ROOT)
        kernels = path.is_relative_to(SOURCE / "attention")
        if (count := len(text.splitlines())) > (most := 650 if kernels else 450):
            wrong.append(f"{name} has {count} lines (limit {most}): split it by role")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = node.body[0] if ast.get_docstring(node) else None
                length = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
                if length > (most := 120 if kernels else 60):
                    wrong.append(f"{name}:{node.lineno} {node.name} has {length} lines (limit {most})")
                count = len(node.args.args) + len(node.args.posonlyargs) - (node.args.args[:1] == ["self"])
                if count > 9:
                    wrong.append(f"{name}:{node.lineno} {node.name} takes {count} positional parameters")
    assert not wrong, "\n".join(wrong)


def test_no_silent_errors():
    """Refuse `except` without a class or with a broad one, unless it only raises a clearer error from the first."""
    wrong = []
    for path in (*MODULES, *LAB_MODULES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"bare"}
                reworded = len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and node.body[0].cause
                if names & {"bare", "Exception", "BaseException"} and not reworded:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} catches {names}")
    assert not wrong, "\n".join(wrong)
