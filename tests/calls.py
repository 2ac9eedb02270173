"""Attention calls for the attention tests: names of `tessera.measure.trials`, and helpers that only tests need."""

import dataclasses

from tessera.attention.kernel import Kernel
from tessera.measure.trials import (
    catalogue,
    compiled,
    dtype_of,
    jit_for,
    kernels,
    machine,
    make,
    roundings,
    run,
    small_config,
    spec_of,
    taken,
)

__all__ = [
    "catalogue",
    "compiled",
    "dtype_of",
    "jit_for",
    "kernels",
    "machine",
    "make",
    "roundings",
    "run",
    "small_config",
    "spec_of",
    "taken",
    "other_config",
]


def other_config(kernel: Kernel) -> object:
    """Return `small_config` with every size multiplied by four and every switch inverted."""
    small = small_config(kernel)
    values = {field.name: getattr(small, field.name) for field in dataclasses.fields(small)}
    return kernel.Config(**{n: not v if isinstance(v, bool) else 4 * v for n, v in values.items()})
