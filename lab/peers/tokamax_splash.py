"""Tokamax's attention kernel for TPUs, as a program to compile without one (run by tessera's compile worker).

Runs in the environment of `make peers-tpu`. The op refuses a CPU host, which is where it is only compiled; the
bodies of its `pl.when` get names, so that the schedule tells them apart.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from tokamax._src.ops.attention import pallas_mosaic_tpu
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel


class LabelledPallas:
    """The pallas module, but bodies of `when` run in a named scope: "init", "full", "masked", "end".

    Only where the condition is one at run time. Else the body is part of straight-line code, in which a scope's ends
    would keep the compiler from mixing it with its neighbours, as it does for the chip.
    """

    def __init__(self, names):
        self.names = names
        self.lines = []

    def __getattr__(self, name):
        return getattr(pallas, name)

    def when(self, condition):
        """pl.when with a name: the kernel's two anonymous bodies are the full block, then the masked one."""

        def decorate(body):
            line, name = body.__code__.co_firstlineno, body.__name__
            if name == "_":
                self.lines = sorted({*self.lines, line})
                name = "full" if self.lines.index(line) == 0 else "masked"

            def scoped():
                with jax.named_scope(name):
                    body()

            return pallas.when(condition)(scoped if name in self.names else body)

        return decorate


def forward(q, k, v, is_causal, return_residuals, config, soft_cap=None):
    """(function, abstract arguments) of one call; q, k, v are shapes [B,T,N,H], config the op's fields as JSON."""
    one_block = config["block_kv"] == k[1]
    names = ("init", "full", "masked", "end") if is_causal else () if one_block else ("init", "end")
    splash_attention_kernel.pl = LabelledPallas(names)
    settings = pallas_mosaic_tpu.Config(**config)
    op = pallas_mosaic_tpu.PallasMosaicTpuFlashAttention(config=settings)
    type(op).supported_on = lambda self, device: True

    def call(q, k, v):
        return op(q, k, v, is_causal=is_causal, return_residuals=return_residuals, logits_soft_cap=soft_cap)

    return call, tuple(jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16) for shape in (q, k, v))
