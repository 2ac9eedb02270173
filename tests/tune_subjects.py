"""Planted kernels for the tuner's child process: each block size of `TRAPS` misbehaves in another way."""

import dataclasses
import os
import time

import jax
import jax.numpy as jnp

from tessera.attention.dispatch import KERNELS

PLAIN = next(k for k in KERNELS if k.name == "xla_prefill_dense")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`block_s` selects the behaviour of `launch`."""

    block_s: int


HANGS, DIES, WRONG, RAISES, SLOW, FAST = 1, 2, 3, 4, 5, 6


def launch(q, kv, spec, positions, selection, config):
    """Hang, die, return wrong values, raise, be slow, or be fast and right, as `config.block_s` says."""
    if config.block_s == HANGS:
        time.sleep(3600)
    print("what a kernel prints is no answer")
    if config.block_s == DIES:
        os._exit(9)
    if config.block_s == RAISES:
        raise NotImplementedError("no such layout")
    result = PLAIN.launch(q, kv, spec, positions, selection, PLAIN.Config(block_t=64, block_s=64))
    if config.block_s == WRONG:
        return result._replace(out=jnp.zeros_like(q), lse=jnp.zeros(q.shape[:3]))
    if config.block_s == FAST:
        return result

    def again(turn, result):  # the same answer, much later
        config = PLAIN.Config(block_t=16, block_s=16)
        slow = PLAIN.launch(q + turn, kv, spec, positions, selection, config)
        return result._replace(out=jnp.where(jnp.isnan(slow.out), slow.out, result.out))

    return jax.lax.fori_loop(0, 60, again, result)


TRAPS = dataclasses.replace(
    PLAIN,
    name="traps_dense",
    launch=launch,
    Config=Config,
    default_config=lambda spec, shapes: Config(block_s=SLOW),
    search_space=lambda spec, shapes: (Config(block_s=n) for n in (HANGS, DIES, WRONG, RAISES, SLOW, FAST)),
)
