"""Record the machine: device, packages, tools, and how its GPU differs from the GPU that `deviceless` compiles for."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess

import jax

from lab.gpu.session import Session, on_gpu
from tessera.deviceless.gpu.compiler import TARGETS
from tessera.measure.evidence import What

PACKAGES = (
    "jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt numpy torch triton flash-attn nvidia-cudnn-cu13 jaxtyping".split()
)
TOOLS = "ptxas nvdisasm nvcc ncu nvidia-smi".split()


def run(session: Session) -> None:
    """Record the environment. On a GPU, also record how the shipped target configuration differs from this GPU's."""
    session.attempt(What(op="environment", kernel="", workload="gpu"), look)
    if on_gpu():
        session.attempt(What(op="target configuration", kernel="", workload="gpu"), compare_target)


def look() -> dict:
    """Return a record's fields: device, packages and tools as facts, and the number of devices as the sample."""
    device = jax.devices()[0]
    names = ("compute_capability", "core_count", "shared_memory_per_block_optin", "device_kind", "platform")
    return {
        "samples": [float(jax.device_count())],
        "unit": "devices",
        "facts": {
            "device": {name: str(getattr(device, name, None)) for name in names},
            "packages": {name: version(name) for name in PACKAGES},
            "tools": {name: tool(name) for name in TOOLS},
        },
    }


def compare_target() -> dict:
    """Return a record's fields: XLA's description of this GPU, and the shipped facts of an H200 that differ from it."""
    from jax._src.lib import xla_client

    text = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
    return {"unit": "differing facts", **differences(text, TARGETS["h200"].read_text())}


def differences(here: str, shipped: str) -> dict:
    """Return a record's samples and facts: the number of shipped facts that differ, and name -> [shipped, here].

    Raises:
        ValueError: no facts can be read from `here`, XLA's description of this GPU.
    """
    found = facts(here)
    if not found:
        raise ValueError(f"the target configuration of this GPU could not be read: {here[:200]!r}")
    differing = {name: [value, found.get(name)] for name, value in facts(shipped).items() if found.get(name) != value}
    return {
        "samples": [float(len(differing))],
        "facts": {"target_config": here[:4000], "differs_from_shipped": differing},
    }


def facts(text: str) -> dict[str, str]:
    """Return the numbers in a target configuration, by name, as text."""
    return dict(re.findall(r"^\s*(\w+): (\d[\d.]*)$", text, re.MULTILINE))


def version(name: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tool(name: str) -> str | None:
    """Return the last line of a tool's --version. If only the nvidia packages hold the tool, return its folder in them.

    Returns None if the tool is not installed.
    """
    path = shutil.which(name)
    if path is None:
        wheels = importlib.util.find_spec("nvidia")
        places = [] if wheels is None else list(wheels.submodule_search_locations)
        return "in nvidia/cu13/bin" if any(os.path.exists(f"{p}/cu13/bin/{name}") for p in places) else None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else "says nothing"
