"""Error handling of all commands: turn exceptions into sentences, and check the address space limit (`ulimit -v`)."""

import errno
from contextlib import suppress

LEAST_ADDRESS_SPACE = 3 << 29
"""Minimum bytes of address space: 1.5 GiB. With two cores and the demo model, JAX runs out of memory at 1 GiB and works
at 2 GiB."""


def explained(error: Exception) -> str:
    """Return an error's message as one sentence, with advice if the disk or the memory is full; for an error of the
    operating system, "x: No such file or directory" instead of Python's "[Errno 2] No such file or directory: 'x'"."""
    if isinstance(error, MemoryError) and ": " not in str(error):  # not ours: ours give advice after a colon
        return f"this process ran out of memory ({error}): raise its limit (ulimit -v), or use a smaller model"
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error)
    said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return f"{said}: free some space, or name another place" if error.errno == errno.ENOSPC else said


def check_address_space() -> None:
    """Raise MemoryError if the address space limit (ulimit -v) is so low that JAX aborts or cannot be imported."""
    with suppress(ImportError):  # Windows has no such limit
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
            raise MemoryError(
                f"this process may use {limit / 2**30:.2g} GiB of address space, but JAX alone needs at least "
                f"{LEAST_ADDRESS_SPACE / 2**30:g} GiB: raise the limit (ulimit -v)"
            )
