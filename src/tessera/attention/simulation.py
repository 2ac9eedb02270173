"""Whether a kernel is being traced for Pallas' interpreter. The only module here that reads jax's private state."""

import jax


def simulated_by(interpreter: type) -> bool:
    """Whether the kernel being traced will run in this interpreter, which lacks a few operations.

    Args:
        interpreter: the class of the interpreter's parameters, `pltpu.InterpretParams` or `plgpu.InterpretGPUParams`.
    """
    return isinstance(jax._src.config.pallas_tpu_interpret_mode_context_manager.value, interpreter)
