"""TPUs that are absent, as the tests name them: a context in which jax says that the device is one of them."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

KINDS = {"v5e": ("TPU v5 lite", 1), "v5p": ("TPU v5", 2), "v6e": ("TPU v6 lite", 1), "v7x": ("TPU7x", 1)}
"""Chip -> (device kind, cores) of one jax device, as jax reports them."""


def on_chip(chip: str):
    """Return a context in which a kernel that asks jax for its device gets this chip."""
    kind, cores = KINDS[chip]
    device = AbstractDevice(kind, cores, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=device))
