"""XLA's flags that compile fast, for the tests' process and for a child process that must compute the same bits."""

import os


def fast_flags() -> str:
    """Return the value of XLA_FLAGS with the emitters of fusions through MLIR turned off."""
    off = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    return f"{os.environ.get('XLA_FLAGS', '')} {off}".strip()
