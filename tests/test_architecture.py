"""The house rules that a machine can hold: import order, imports without side effects, budgets, names."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tessera"

# Each group may import earlier groups; inside one group only members of one package (WITHIN) import each other.
ORDER = [
    {"shapes", "hardware", "memory", "oracle", "files"},
    {"evidence", "attention.contract"},
    {
        "attention.online_softmax",
        "attention.selection",
        "attention.sparse_tiles",
        "attention.decode_blocks",
        "attention.parallel",
        "attention.work",
        "attention.config_space",
        "attention.matrix_unit",
        "attention.warpgroup",
    },
    {
        "attention.block_ranges",
        "attention.decode_copies",
        "attention.decode_gradient",
        "attention.decode_splits",
        "attention.exact_products",
        "attention.gpu_mass",
        "attention.listed_blocks",
        "attention.prefill_blocks",
        "attention.split_merge",
    },
    {
        "attention.decode_mass",
        "attention.dense_rows",
        "attention.gpu_backward",
        "attention.listed_rows",
        "attention.prefill_rows",
        "attention.tpu_backward",
    },
    {"attention.prefill_result"},
    {"attention.reference", "attention.xla_*", "attention.tpu_*", "attention.gpu_*"},
    {"attention.tuned", "report_markdown", "workloads"},
    {"report_tables"},
    {"attention.dispatch", "sparse.contract"},
    {"sparse.*", "models.*"},
    {"trials"},
    {"compilation", "sampling", "answers", "corpus", "facts", "losses"},
    {"engine", "data", "promise"},
    {"retrieval"},
    {"search", "crossover"},
    {"recipes"},
    {"generate", "calibrate", "train"},
    {"chat", "measure", "deviceless.*"},
    {"quality"},
    {"bench.*", "bench", "tune.*", "tune", "eval.*", "eval", "doctor", "verify"},
    {"report_real"},
    {"demo.*", "demo", "gpu_check.*", "report"},
    {"report_labels"},
    {"report_pictures"},
    {"report_real_pictures"},
    {"report_page"},
    {"workbench", "model_commands"},
    {"cli"},
]
WITHIN = {"sparse", "models", "bench", "demo", "deviceless", "gpu_check", "tune", "eval"}
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
MODULES = sorted(SOURCE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rank(module: str) -> int:
    for index, group in enumerate(ORDER):
        for pattern in group:
            if module == pattern or (pattern.endswith("*") and module.startswith(pattern[:-1])):
                return index
    raise AssertionError(f"{module} has no place in the import order: add it to ORDER and to the README's map")


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, lazily or not."""
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


def ranked_files() -> list[Path]:
    empty = {"", "attention", "sparse", "models", "deviceless", "gpu_check"}
    return [path for path in MODULES if dotted(path) not in empty and dotted(path) != "__main__"]


@pytest.mark.parametrize("path", ranked_files(), ids=dotted)
def test_imports_point_one_way(path):
    module = dotted(path)
    for target in imports(path):
        assert target, f"{module} imports the package root"
        package = module.split(".")[0]
        earlier = rank(target) < rank(module)
        within = rank(target) == rank(module) and package == target.split(".")[0] and package in WITHIN
        assert earlier or within, f"{module} must not import {target}"


def test_models_know_no_concrete_policy():
    for path in (SOURCE / "models").glob("*.py"):
        concrete = {m for m in imports(path) if m.startswith("sparse.") and m != "sparse.contract"}
        assert not concrete, f"{dotted(path)} imports {concrete}"


def test_reference_stands_alone():
    assert imports(SOURCE / "attention" / "reference.py") <= {"attention.contract", "shapes"}


def test_kernel_files_do_not_import_each_other():
    for path in (SOURCE / "attention").glob("*_*.py"):
        if path.stem.split("_")[0] in {"xla", "tpu", "gpu"}:
            allowed = {"attention.contract", "attention.online_softmax", "attention.sparse_tiles", "shapes"}
            allowed |= {"attention.decode_blocks", "attention.decode_copies", "attention.decode_gradient"}
            allowed |= {"attention.exact_products", "attention.matrix_unit", "attention.work"}
            allowed |= {"attention.warpgroup", "attention.decode_splits", "attention.split_merge"}
            allowed |= {"attention.decode_mass"}
            allowed |= {"attention.listed_blocks", "attention.listed_rows"}
            allowed |= {"attention.prefill_blocks", "attention.prefill_rows", "attention.prefill_result"}
            allowed |= {"attention.config_space"}
            allowed |= {"attention.block_ranges", "attention.dense_rows"}
            if path.stem == "tpu_prefill":  # its gradient
                allowed |= {"attention.tpu_backward"}
            if path.stem == "gpu_prefill":  # its gradient, and its second pass
                allowed |= {"attention.gpu_backward", "attention.gpu_mass"}
            if path.stem == "gpu_cudnn":  # its gradient
                allowed |= {"attention.gpu_backward"}
            assert imports(path) <= allowed, f"{dotted(path)} imports {imports(path) - allowed}"


def test_imports_have_no_side_effects():
    """Importing every module starts no JAX backend, changes no environment variable and writes nothing."""
    names = ["tessera." + dotted(p) if dotted(p) else "tessera" for p in MODULES if dotted(p) != "__main__"]
    program = (
        # JAX's own module writes where it found CUDA into the environment when it is imported.
        "import importlib, os, jax, jax.experimental.pallas.mosaic_gpu\n"
        "before = dict(os.environ)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a device was queried at import'\n"
        "assert dict(os.environ) == before, 'the environment was changed at import'\n"
        "assert jax.config.jax_compilation_cache_dir is None, 'the compilation cache was set at import'\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_test_that_never_ends_fails_by_name(tmp_path):
    """As a simulated kernel does whose threads wait for each other; the limit is the real one's, made short."""
    settings = SOURCE.parents[1] / "pyproject.toml"
    assert 225 < tomllib.loads(settings.read_text())["tool"]["pytest"]["ini_options"]["faulthandler_timeout"] < 1000
    (tmp_path / "test_hang.py").write_text(
        "import threading\n\ndef test_waits():\n    threading.Event().wait()\n\ndef test_other():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", settings, "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=1", "-n", "2", "--dist", "loadgroup", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "crashed while running 'test_hang.py::test_waits'" in done.stdout
    assert "in test_waits" in done.stderr  # where it hangs


def test_the_tests_of_a_file_run_in_one_process(request):
    """Under xdist, whose groups end a test's name: else each process makes a file's fixtures for itself."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@test_architecture")


def test_module_names_say_something():
    assert not BANNED_NAMES & {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: dotted(p) or "tessera")
def test_budgets(path):
    """A file fits in the head: 450 lines; a function 60 without docstring (kernels 120), few positional parameters."""
    text = path.read_text()
    assert len(text.splitlines()) <= 450, f"{dotted(path)} has {len(text.splitlines())} lines: split it by role"
    limit = 120 if dotted(path).startswith("attention.") else 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = node.body[0] if ast.get_docstring(node) else None
            length = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
            assert length <= limit, f"{dotted(path)}:{node.lineno} {node.name} has {length} lines (limit {limit})"
            count = len(node.args.args) + len(node.args.posonlyargs) - (node.args.args[:1] == ["self"])
            assert count <= 9, f"{dotted(path)}:{node.lineno} {node.name} takes {count} positional parameters"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: dotted(p) or "tessera")
def test_no_silent_errors(path):
    """No bare or broad except, unless all it does is raise a clearer error from the first."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"bare"}
            reworded = len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and node.body[0].cause
            broad = names & {"bare", "Exception", "BaseException"}
            assert reworded or not broad, f"{dotted(path)}:{node.lineno} catches {names}"
