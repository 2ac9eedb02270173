"""Examine this installation: versions, devices, which kernel would run and why others would not, caches, memory."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import explain
from tessera.core.files import SHIPPED
from tessera.core.memory import available_bytes, format_bytes
from tessera.models.config import ModelConfig
from tessera.runtime.compilation import cache_folder
from tessera.sparse.plan import Plan
from tessera.sparse.promise import promise_line, promise_note, summary

PACKAGES = (
    "tessera-attention jax jaxlib jaxtyping numpy scipy safetensors tokenizers jinja2 huggingface_hub gguf tyro rich "
    "optax"
).split()

CALLS = (
    ("dense", "prefill", AttentionSpec(), 1024, None),
    ("score", "prefill", AttentionSpec(mass=True), 1024, None),
    ("sparse", "prefill", AttentionSpec(), 1024, 13),
    ("dense", "decode", AttentionSpec(), 1, None),
    ("score", "decode", AttentionSpec(mass=True), 1, None),
    ("sparse", "decode", AttentionSpec(), 1, 13),
)
"""Attention calls of a model at 16,384 keys: role, phase, spec, number of query rows, number of selected tiles (None if
the call reads all keys)."""


def examine(plan: Path | None = None, config: ModelConfig | None = None) -> dict[str, Any]:
    """Return the report as plain data. Its `problems` are sentences, one per fault found. `plan` is a further plan file
    to report, and `config` the config that it must fit."""
    problems: list[str] = []
    asked = {} if plan is None else {"plan": _plan(plan, config, problems)}
    shipped = _plans(problems)
    return asked | {
        "versions": _versions(problems),
        "devices": _devices(problems),
        "kernels": _kernels(problems),
        "plans": {name: promise_line(plan) for name, plan in shipped.items()},
        "plan_notes": {name: _note(plan) for name, plan in shipped.items()},
        "caches": _caches(problems),
        "pip_check": _pip_check(problems),
        "problems": problems,
    }


def print_summary(found: dict[str, Any]) -> None:
    """Print a summary of the report that fits one screen: 24 lines of 100 columns, plus a line for each problem."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for problem in found["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False, highlight=False)
    if not found["problems"]:
        console.print("No problems found.", style="green")
    versions = found["versions"]
    lines = Table.grid("what", "found", padding=(0, 2))
    lines.columns[0].no_wrap = True
    names = ("tessera-attention", "python", "jax", "jaxlib", "numpy")
    lines.add_row("versions", ", ".join(f"{name} {versions[name]}" for name in names))
    for kind, count in Counter(device["name"].partition(": ")[2] for device in found["devices"]).items():
        first = next(device for device in found["devices"] if device["name"].endswith(f": {kind}"))
        lines.add_row("device", f"{count} x {kind}, {_free(first)} free" + (" on the first" if count > 1 else ""))
    for name, note in found["plan_notes"].items():
        lines.add_row("plan", f"{name}: {note}")
    for cache in found["caches"]:
        path = Path(cache["path"])
        short = f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
        lines.add_row("cache", f"{cache['what']}, {_size(cache)} in {short}")
    console.print(lines, highlight=False)
    kernels = Table("role", "prefill", "decode", title="Kernels that run", title_justify="left")
    for role in dict.fromkeys(call["role"] for call in found["kernels"]):
        kernels.add_row(role, *(_runs(found["kernels"], role, phase) for phase in ("prefill", "decode")))
    console.print(kernels)
    if "plan" in found:
        console.print(found["plan"]["path"], found["plan"]["summary"], sep="\n", markup=False, highlight=False)
    console.print("--all shows every version, and why the other kernels do not run.", style="dim")


def _runs(kernels: list[dict[str, Any]], role: str, phase: str) -> str:
    """Name the kernel that runs this role and phase, or the kernel of each dtype if they differ."""
    runs = {k["dtype"]: k["kernel"] or "none" for k in kernels if (k["role"], k["phase"]) == (role, phase)}
    if len(set(runs.values())) == 1:
        return next(iter(runs.values()))
    return ", ".join(f"{kernel} ({dtype})" for dtype, kernel in runs.items())


def _free(device: dict[str, Any]) -> str:
    return "unknown" if device["free_bytes"] is None else format_bytes(device["free_bytes"])


def _size(cache: dict[str, Any]) -> str:
    return f"{cache['files']} files, {format_bytes(cache['bytes'])}"


def print_report(found: dict[str, Any]) -> None:
    """Print the whole report of `examine` as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        out = Table(title=title, title_justify="left")
        for column in columns:
            out.add_column(column, overflow="fold")
        for row in rows:
            out.add_row(*row)
        console.print(out)

    table("Versions", ("what", "version"), list(found["versions"].items()))
    devices = [(d["name"], d["platform"], _free(d)) for d in found["devices"]]
    table("Devices", ("device", "platform", "free memory"), devices)
    kernels = []
    for call in found["kernels"]:
        refused = [k for k in call["choices"] if not k["chosen"] and k["concerns"]]
        reasons = "\n".join(f"{k['kernel']}: {k['reason']}" for k in refused)
        kernels.append((call["role"], call["phase"], call["dtype"], call["kernel"] or "none", reasons))
    table("Kernels, best first", ("role", "phase", "dtype", "runs", "why not the others"), kernels)
    table("Shipped plans", ("plan", "promise and measured values"), list(found["plans"].items()))
    if "plan" in found:
        table("Plan", ("file", "promise and measured values"), [(found["plan"]["path"], found["plan"]["summary"])])
    caches = [(c["what"], c["path"], _size(c)) for c in found["caches"]]
    table("Caches", ("what", "folder", "size"), caches)
    console.print(f"pip check: {found['pip_check']}", markup=False, highlight=False)
    for problem in found["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False, highlight=False)
    if not found["problems"]:
        console.print("No problems found.", style="green")


def _versions(problems: list[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
            problems.append(f"{name} is not installed: pip install tessera-attention")
    return found


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        problems.append(f"JAX finds no device ({error}): check JAX_PLATFORMS and the driver")
        return []
    return [
        {"name": f"{d.id}: {d.device_kind}", "platform": d.platform, "free_bytes": available_bytes(d)} for d in devices
    ]


def _kernels(problems: list[str]) -> list[dict[str, Any]]:
    found = []
    for role, phase, spec, num_queries, capacity in CALLS:
        for dtype in ("float32", "bfloat16"):
            choices = explain(spec, Shapes(1, num_queries, 16384, 8, 2, 128, capacity, dtype))
            chosen = next((c.kernel for c in choices if c.chosen), None)
            if chosen is None:
                problems.append(f"no kernel runs {role} {phase} in {dtype} here: `tessera doctor --all` shows why")
            listed = [{**choice._asdict(), "concerns": choice.kernel.endswith(role)} for choice in choices]
            found.append({"role": role, "phase": phase, "dtype": dtype, "kernel": chosen, "choices": listed})
    return found


def _plans(problems: list[str]) -> dict[str, Plan]:
    """Return the shipped plans, keyed by their path in the folder SHIPPED; add a problem for each that is invalid."""
    found = {}
    for path in sorted(SHIPPED.rglob("*plan.json")):
        try:
            found[str(path.relative_to(SHIPPED))] = Plan.load(path)
        except ValueError as error:
            problems.append(str(error))
    return found


def _note(plan: Plan) -> str:
    """Describe in a few words how much quality a plan keeps and what share of the keys it reads."""
    if not plan.promise:
        return promise_line(plan)
    missed = "" if plan.promise["held"] else " (missed)"
    return f"{promise_note(plan).removeprefix('plan ')}{missed}, {plan.promise['measured']['density']:.0%} of keys read"


def _plan(path: Path, config: ModelConfig | None, problems: list[str]) -> dict[str, Any]:
    """Describe the promise and measured values of the plan in this file; add a problem if the file cannot be used."""
    try:
        plan = Plan.load(path)
        if config is not None:
            plan.check(config)
    except (ValueError, FileNotFoundError) as error:
        problems.append(str(error))
        return {"path": str(path), "summary": "see the problems", "promise": None}
    return {"path": str(path), "summary": "\n".join(summary(plan)), "promise": dict(plan.promise)}


def _caches(problems: list[str]) -> list[dict[str, Any]]:
    from huggingface_hub.constants import HF_HUB_CACHE

    chosen = jax.config.jax_compilation_cache_dir
    places = {"compiled programs": Path(chosen) if chosen else cache_folder(), "hub models": Path(HF_HUB_CACHE)}
    found = []
    for what, folder in places.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(existing, os.W_OK):
            problems.append(f"the folder for {what}, {folder}, is not writable: change its permissions")
        sizes = [entry.stat().st_size for entry in folder.rglob("*") if entry.is_file() and not entry.is_symlink()]
        found.append({"what": what, "path": str(folder), "files": len(sizes), "bytes": sum(sizes)})
    return found


def _pip_check(problems: list[str]) -> str:
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        return "not possible: this environment has no pip"
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        problems.append(f"pip check: {'; '.join(said.splitlines())}")
    return said
