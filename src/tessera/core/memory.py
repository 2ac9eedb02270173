"""Check that arrays fit in a device's free memory, before anything is read or compiled."""

from collections.abc import Sequence
from pathlib import Path

import jax

PROGRAM_BYTES = 512 << 20
"""Bytes of address space that compiled programs, the compiler and JAX's threads need."""


def available_bytes(device: jax.Device) -> int | None:
    """Return the bytes that a program can still allocate on this device; None if the system does not report them."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    bounds = [b for b in (_host_free_bytes(), _container_free_bytes(), _process_free_bytes()) if b is not None]
    return min(bounds, default=None)


def require(num_bytes: int, devices: Sequence[jax.Device], what: str, way_out: str) -> None:
    """Raise MemoryError if a device of this process has less than `num_bytes` of free memory.

    CPU devices share the host's memory. The error says `what` needs the bytes, and ends in the advice `way_out`.
    """
    share = len(devices) if devices[0].platform == "cpu" else 1
    free = min((room for device in devices if (room := available_bytes(device)) is not None), default=None)
    if free is not None and share * num_bytes > free:
        each = f"{format_bytes(num_bytes)} on each of {len(devices)} devices" if len(devices) > 1 else ""
        raise MemoryError(
            f"{what} needs {each or format_bytes(num_bytes)} but {format_bytes(free)} are free on "
            f"{devices[0].platform}{' in total' if share > 1 else ''}: {way_out}"
        )


def require_programs(weight_bytes: int, what: str) -> None:
    """Raise MemoryError if a limit on the address space (ulimit -v) leaves too little for a model and its programs.

    XLA's compiler and threads abort the process if they cannot allocate memory. Measured: SmolLM2 (513 MiB of weights)
    aborts with 1.4 GiB left and works with 1.6 GiB; the shipped model (10 MB) works with 0.7 GiB.
    """
    free, needed = _process_free_bytes(), 2 * weight_bytes + PROGRAM_BYTES
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} and its programs need {format_bytes(needed)} of address space, but the limit leaves "
            f"{format_bytes(max(free, 0))} free: raise the limit (ulimit -v), or take a smaller model"
        )


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in binary units: 1536 -> "1.5 KiB"."""
    power = next((p for p in range(4) if num_bytes < 1024 ** (p + 1)), 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {unit}"


def _host_free_bytes() -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else ()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _process_free_bytes() -> int | None:
    """Return the bytes left under the limit on this process's address space (ulimit -v); None without a limit."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - int(statm.read_text().split()[0]) * resource.getpagesize()


def _container_free_bytes() -> int | None:
    """Return the bytes left under a container's memory limit, which /proc/meminfo does not show; None without a limit.

    This is a lower bound: the kernel counts the page cache as used, and only its inactive part is added back here.
    """
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text().strip()
    if text == "max":
        return None
    stat = Path("/sys/fs/cgroup/memory.stat")
    fields = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(text) - int(used.read_text()) + int(fields.get("inactive_file", 0))
