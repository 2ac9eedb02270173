"""Detect whether a kernel is being traced for a Pallas interpreter. Only this module of `attention` reads jax's private
state."""

import jax


def simulated_by(interpreter: type) -> bool:
    """Return whether the kernel being traced will run in the Pallas interpreter whose parameters have this class."""
    return isinstance(jax._src.config.pallas_tpu_interpret_mode_context_manager.value, interpreter)
