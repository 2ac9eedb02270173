"""Compile dense causal attention of other libraries (the peers) for given arrays, and say why a peer is skipped.

PyTorch runs in a separate process, every other peer in this one. To add a peer, write one function that computes its
attention from q, k and v, and one that returns the reason to skip it. Then list both in PEERS.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from lab.bench.stand import compile_step
from tessera.attention.contract import Shapes, call_shapes
from tessera.measure.errors import plain

TORCH: Final = "torch sdpa"
"""PyTorch's scaled_dot_product_attention, which the worker `Stand.peer` runs in a separate environment."""

MOST_SCORE_BYTES = 4 << 30
"""Maximum bytes of scores with which JAX's own attention still runs: enough for 8,192 tokens and 8 heads."""

SPLASH_BLOCK: Final = 512
"""Query rows and keys per block of splash attention, as in MaxText. The library's default, 128, would handicap it."""


def xla(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> Float[Array, "B T N H"]:
    """Run JAX's own attention, which keeps all scores in memory at once."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def too_large(platform: str, shapes: Shapes) -> str:
    """Return the reason to skip JAX's own attention; "" if it can run.

    The compiled program holds two float32 scores for every head and every pair of tokens.
    """
    heads, length = shapes.num_heads, shapes.num_queries
    held = 8 * shapes.batch * heads * length**2
    said = f"two arrays of {heads} x {length:,} x {length:,} scores take {held / 2**30:.1f} GiB"
    return f"{said}, above the limit of {MOST_SCORE_BYTES / 2**30:.1f} GiB" if held > MOST_SCORE_BYTES else ""


def cudnn(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> Array:
    """Run cuDNN's fused attention through JAX."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def not_for_cudnn(platform: str, shapes: Shapes) -> str:
    """Return the reason to skip cuDNN; "" if it can run."""
    if platform != "gpu":
        return f"needs an NVIDIA GPU, but JAX runs on a {platform.upper()}"
    return "" if shapes.dtype in ("bfloat16", "float16") else f"takes 16-bit numbers, but the call has {shapes.dtype}"


def splash(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], *, interpret: bool = False
) -> Float[Array, "B T N H"]:
    """Run JAX's splash attention; its time includes the scaling and transposes that it requires of callers."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    _, length, heads, head_dim = q.shape
    block = math.gcd(length, SPLASH_BLOCK)
    kernel = library.make_splash_mha_single_device(  # also takes fewer KV heads than query heads
        library.MultiHeadMask([library.CausalMask((length, length))] * heads),
        block_sizes=library.BlockSizes(block_q=block, block_kv=block),
        interpret=interpret,
    )
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * head_dim**-0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)


def not_for_splash(platform: str, shapes: Shapes) -> str:
    """Return the reason to skip splash attention; "" if it can run."""
    if platform != "tpu":
        return f"needs a TPU, but JAX runs on a {platform.upper()}"
    return (
        f"needs a multiple of 128 tokens, but the call has {shapes.num_queries:,}" if shapes.num_queries % 128 else ""
    )


def tokamax(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"]) -> Array:
    """Run Tokamax's attention with the kernel that Tokamax chooses."""
    import tokamax as library

    return library.dot_product_attention(q, k, v, is_causal=True)


def not_for_tokamax(platform: str, shapes: Shapes) -> str:
    """Return the reason to skip Tokamax; "" if it can run."""
    if platform not in ("tpu", "gpu"):
        return f"needs a TPU or a GPU, but JAX runs on a {platform.upper()}"
    # Tokamax pins a typeguard version that keeps the command `tessera` from starting.
    missing = "not installed: `pip install tokamax` in a separate environment (docs/speed.md)"
    return "" if find_spec("tokamax") else missing


class Peer(NamedTuple):
    """A library whose attention runs in this process.

    Attributes:
        kernel: name in records.
        refusal: (platform, shapes) -> reason why the peer cannot run a call of these shapes; "" if it can.
        attend: (q [B,T,N,H], k and v [B,T,K,H]) -> out [B,T,N,H]; jit-able, causal, scaled by H**-0.5.
        package: distribution whose version the peer's records hold; empty for JAX, whose version every record holds.
    """

    kernel: str
    refusal: Callable[[str, Shapes], str]
    attend: Callable[..., Array]
    package: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """Library version, for the peer's records."""
        return {self.package: metadata.version(self.package)} if self.package else {}


PEERS = MappingProxyType(
    {
        "jax": Peer("jax dot_product_attention", too_large, xla),
        "splash": Peer("jax splash attention", not_for_splash, splash),
        "cudnn": Peer("jax cudnn attention", not_for_cudnn, cudnn),
        "tokamax": Peer("tokamax dot_product_attention", not_for_tokamax, tokamax, "tokamax"),
    }
)
"""Peers that run in this process, by name. The workload of a peer's records ends with the peer's name."""


class Ready(NamedTuple):
    """Peers to time and peers to skip.

    Attributes:
        steps: name in PEERS -> (compile seconds, compiled program).
        skipped: `Peer.kernel` -> reason.
    """

    steps: dict[str, tuple[float, jax.stages.Compiled]]
    skipped: dict[str, str]


def exact(dtype: str) -> AbstractContextManager:
    """Return a context in which float32 matrix products run at full precision.

    An accelerator's default precision would fail `check_output`. For other dtypes, the context changes nothing.
    """
    return jax.default_matmul_precision("highest" if dtype == "float32" else None)


def ready(inputs: Sequence[Any]) -> Ready:
    """Compile every peer that can run on arrays like `inputs` [q, k, v]; skip a peer whose library raises an error."""
    found, platform, shapes = Ready({}, {}), jax.default_backend(), call_shapes(*inputs[:2])
    for name, peer in PEERS.items():
        if reason := peer.refusal(platform, shapes):
            found.skipped[peer.kernel] = reason
            continue
        try:
            with exact(shapes.dtype):
                found.steps[name] = compile_step(peer.attend, inputs)
        except (RuntimeError, ValueError, TypeError, ImportError, SyntaxError, ExceptionGroup) as error:
            found.skipped[peer.kernel] = plain(error)
    return found
