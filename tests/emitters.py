"""XLA's flags that compile fast, for the tests' process and for child processes."""

import os

import jax


def fast_flags() -> str:
    """Return the value of XLA_FLAGS with the emitters of fusions through MLIR turned off."""
    off = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    return f"{os.environ.get('XLA_FLAGS', '')} {off}".strip()


def fast_child(devices: int) -> dict[str, str]:
    """Return the environment of a child process on the CPU that has so many devices and compiles as this process does.

    Each device compiles each program again, so such a process spends most of its time in the compiler.
    """
    fast = jax.config.read("jax_disable_most_optimizations")
    flags = f"{fast_flags() if fast else ''} --xla_force_host_platform_device_count={devices}".strip()
    own = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1" if fast else "0", "XLA_FLAGS": flags}
    return os.environ | own
