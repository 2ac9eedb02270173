"""Prepare dense attention calls of other libraries: cuDNN through jax, PyTorch's back ends, FlashAttention."""

import importlib.util
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

from lab.gpu.calls import Setting
from lab.gpu.session import on_gpu


def cudnn(setting: Setting, q, k, v) -> Callable[[], Any]:
    """Compile jax.nn.dot_product_attention(implementation="cudnn")."""
    causal = setting.causal and setting.queries > 1

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    compiled = jax.jit(attend).lower(q, k, v).compile()
    return lambda: jax.block_until_ready(compiled(q, k, v))


def torch_sdpa(backend: str) -> Callable[..., Callable[[], Any]]:
    """Return a function that prepares torch's scaled_dot_product_attention with only one back end allowed."""

    def ready(setting: Setting, q, k, v) -> Callable[[], Any]:
        import torch
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v))
        causal = setting.causal and setting.queries > 1

        def call():
            with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=setting.heads != setting.kv_heads
                )
            torch.cuda.synchronize()
            return out.transpose(1, 2)

        return call

    return ready


def flash_attn(setting: Setting, q, k, v) -> Callable[[], Any]:
    """Prepare a call of FlashAttention's own package: version 3 if it is installed, else version 2."""
    import torch

    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        from flash_attn import flash_attn_func
    q, k, v = (torch.from_dlpack(x) for x in (q, k, v))

    def call():
        with torch.no_grad():
            out = flash_attn_func(q, k, v, causal=setting.causal and setting.queries > 1)
        torch.cuda.synchronize()
        return out[0] if isinstance(out, tuple) else out

    return call


PEERS = MappingProxyType(
    {
        "cudnn by jax": cudnn,
        "torch sdpa flash": torch_sdpa("FLASH_ATTENTION"),
        "torch sdpa cudnn": torch_sdpa("CUDNN_ATTENTION"),
        "flash_attn": flash_attn,
    }
)
"""Name -> function of (setting, q, k, v) that prepares a call. It returns a function without arguments that computes
out [B,T,N,H], waits for it and returns it."""


MODULES = MappingProxyType({"torch": ("torch",), "flash_attn": ("flash_attn_interface", "flash_attn")})
"""Python modules by the first word of a peer's name. A peer needs one of its modules; cuDNN through jax needs none."""


def installed(name: str) -> bool:
    """Return whether the peer can run here: its library is installed, and jax runs on a GPU."""
    library = name.split()[0]
    if library == "cudnn":
        return on_gpu() and has_cudnn()
    modules = MODULES.get(library)
    return modules is None or on_gpu() and any(importlib.util.find_spec(module) is not None for module in modules)


def has_cudnn() -> bool:
    """Return whether jax finds cuDNN."""
    try:
        check_cudnn_version()
    except RuntimeError:
        return False
    return True


def as_jax(out: Any) -> jax.Array:
    """Convert a peer's result to a jax array."""
    return out if isinstance(out, jax.Array) else jnp.from_dlpack(out.contiguous())
