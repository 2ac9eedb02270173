"""Nominal peak rates, memory bandwidth and on-chip memory of accelerators, and a description of this host's CPU.

Sources: the vendors' specification pages (docs.cloud.google.com/tpu/docs, nvidia.com data sheets, dense rates without
structured sparsity); on-chip memory per TensorCore from jax's own `tpu_info`. A CPU has no trustworthy nominal peak
(clock and vector width vary), so its peak rates are measured: see `measure.timing.ceilings`.
"""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType


def prepare_simulator() -> None:
    """Configure JAX in this process, before it initialises its devices, to simulate chips.

    XLA gets eight threads, because simulated warpgroups wait for each other on XLA's threads and would deadlock on the
    two threads of a small machine. Programs run in the caller's thread: an asynchronous one would occupy an XLA thread
    while it waits for an array copy that may need that same thread (https://github.com/jax-ml/jax/issues/25861).
    """
    import jax

    os.environ.setdefault("NPROC", "8")
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def compiles_without_chip() -> bool:
    """Return whether a JAX plug-in for TPUs or NVIDIA GPUs is installed but this host has no accelerator.

    The caller should then choose the CPU: JAX would otherwise load the plug-ins, which print many warnings, and use the
    CPU anyway. An NVIDIA GPU appears as /dev/nvidia0, or as /dev/dxg under WSL.
    """
    patterns = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg")
    if any(file for pattern in patterns for file in Path("/dev").glob(pattern)) or find_spec("jax_rocm7_plugin"):
        return False
    return any(find_spec(name) for name in ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin"))


@dataclass(frozen=True)
class Chip:
    """One accelerator's nominal limits; rates and main memory are those of the whole chip.

    `clock_hz` is derived as peak flops per second / (cores x matrix units x side^2 x rows per cycle x 2). Chips up to
    v5p have 4 units of side 128 that take one row per cycle, later ones 2 units of side 256 that take two. The peak is
    Google's, except for v7x, where it is the compiler's (996 TFLOP/s per core in `cost_analysis` of a large product, so
    1.9 GHz; Google's peak would give 2.2 GHz). `lab/studies/validation.py` checks the clocks against measured times.
    """

    name: str
    device_kinds: tuple[str, ...]  # values of `jax.Device.device_kind`, in lower case
    bf16_flops_per_s: float  # dense matrix rate
    bytes_per_s: float  # main memory bandwidth
    memory_bytes: float
    cores: int  # TensorCores or streaming multiprocessors
    on_chip_bytes: int  # scratch memory of one core (VMEM or shared memory)
    capability: str | None = None  # compute capability of a GPU
    devices: int = 1  # JAX devices per chip
    clock_hz: float | None = None  # of a TensorCore


_MIB = 1 << 20
_GIB = 1 << 30

# fmt: off
CHIPS: tuple[Chip, ...] = (
    # name, device kinds, bfloat16 rate, memory bandwidth and size, cores, on-chip bytes of one core
    Chip("v4", ("tpu v4",), 275e12, 1228e9, 32 * _GIB, 2, 16 * _MIB, clock_hz=1.05e9),
    Chip("v5e", ("tpu v5 lite", "tpu v5e"), 197e12, 819e9, 16 * _GIB, 1, 128 * _MIB, clock_hz=1.5e9),
    Chip("v5p", ("tpu v5", "tpu v5p"), 459e12, 2765e9, 95 * _GIB, 2, 64 * _MIB, clock_hz=1.75e9),
    Chip("v6e", ("tpu v6 lite", "tpu v6e"), 918e12, 1638e9, 32 * _GIB, 1, 128 * _MIB, clock_hz=1.75e9),
    Chip("v7x", ("tpu7x", "tpu v7x", "tpu v7"), 2307e12, 7380e9, 192 * _GIB, 2, 64 * _MIB, devices=2, clock_hz=1.9e9),
    Chip("h100", ("nvidia h100 80gb hbm3", "nvidia h100"), 989e12, 3350e9, 80e9, 132, 227 * 1024, capability="9.0"),
    Chip("h200", ("nvidia h200",), 989e12, 4800e9, 141e9, 132, 227 * 1024, capability="9.0"),
)
# fmt: on

LINK_BYTES_PER_S: Mapping[str, float] = MappingProxyType(
    {"v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 448e9, "v7x": 600e9, "h100": 900e9, "h200": 900e9}
)
"""Nominal bytes per second over all links from a JAX device to other chips, both directions together."""

USABLE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        **{"v5e": 15.74 * _GIB, "v6e": 31.23 * _GIB, "v5p": 95.72 * _GIB, "v7x": 94.73 * _GIB},
        "v4": 30.5 * _GIB,
        **{"h100": 0.75 * 80e9, "h200": 0.75 * 141e9},
    }
)
"""Maximum bytes of a JAX device's memory that one program can use.

For a TPU, this is the available memory that the compiler reports when it refuses a program, minus 0.01 GiB. The
compiler does not support v4, so the value for v4 is a guess: 95 % of its memory, a smaller share than on other TPUs.
For a GPU, this is JAX's default pool, 75 % of the memory; XLA_PYTHON_CLIENT_MEM_FRACTION does not change the table.
"""


def chip(device_kind: str) -> Chip | None:
    """Look up a chip by its short name or `jax.Device.device_kind`; None if it is not in the table."""
    wanted = device_kind.lower()
    return next((entry for entry in CHIPS if wanted == entry.name or wanted in entry.device_kinds), None)


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """This host's processor: the model name it reports, cores this process may use, memory in bytes."""

    model: str
    cores: int
    memory_bytes: int


def cpu() -> Cpu:
    info = Path("/proc/cpuinfo")
    found = cpu_model(info.read_text(errors="replace")) if info.exists() else ""
    return Cpu(
        model=found or platform.processor() or platform.machine() or "unknown",
        cores=_usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def device_slug() -> str:
    """Return the name of JAX's first device, such as "tpu-v6-lite", or "cpu-MODEL-N-cores", for file names.

    Never call this while importing: it initialises JAX's devices.
    """
    import jax

    kind, host = jax.devices()[0].device_kind, cpu()
    name = f"cpu {host.model} {host.cores} cores" if kind == "cpu" else kind
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def gpu_capability() -> str | None:
    """Return the compute capability of JAX's first GPU, such as "9.0", or "none" if it has none; None without a GPU.

    Never call this while importing: it initialises JAX's devices.
    """
    import jax

    if jax.default_backend() != "gpu":
        return None
    return str(getattr(jax.devices()[0], "compute_capability", "none"))


def cpu_model(info: str) -> str:
    """Extract the processor's name from the text of /proc/cpuinfo; return "" if the text has none.

    If a virtual machine hides the model number ("AMD EPYC"), the CPU's family and model identify its generation.
    """
    pairs = (line.partition(":")[::2] for line in reversed(info.splitlines()))  # the first processor wins
    fields = {key.strip(): " ".join(value.split()) for key, value in pairs if value.strip()}
    name = next((fields[key] for key in ("model name", "Model", "cpu model") if key in fields), "")
    if not name or any(letter.isdigit() for letter in name) or not {"cpu family", "model"} <= fields.keys():
        return name
    return f"{name} family {fields['cpu family']} model {fields['model']}"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # honours taskset and containers; macOS lacks it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
