"""Choose a kernel for every attention call, explain the choice, and refuse calls that no kernel can run."""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention import context, parallel, reference, tuned
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import cudnn as gpu_cudnn
from tessera.attention.gpu import decode as gpu_decode
from tessera.attention.gpu import keys as gpu_keys
from tessera.attention.gpu import prefill as gpu_prefill
from tessera.attention.gpu import sparse as gpu_sparse
from tessera.attention.kernel import Kernel, role_of
from tessera.attention.tpu import decode as tpu_decode
from tessera.attention.tpu import prefill as tpu_prefill
from tessera.attention.tpu import sparse as tpu_sparse
from tessera.attention.xla import decode as xla_decode
from tessera.attention.xla import prefill as xla_prefill
from tessera.attention.xla import sparse as xla_sparse
from tessera.core import hardware
from tessera.core.shapes import ceil_div

KERNELS: tuple[Kernel, ...] = (
    *tpu_decode.KERNELS,
    *tpu_prefill.KERNELS,
    *tpu_sparse.KERNELS,
    *gpu_cudnn.KERNELS,  # proven elsewhere: stays before our own dense prefill until both have been timed on a GPU
    *gpu_decode.KERNELS,
    *gpu_sparse.KERNELS,
    *gpu_keys.KERNELS,
    *gpu_prefill.KERNELS,
    *xla_decode.KERNELS,
    *xla_prefill.KERNELS,
    *xla_sparse.KERNELS,
    *reference.KERNELS,  # last: materialises the T x S scores
)
"""All kernels, best first. A call runs on the first kernel that supports it on the platform."""


DENSE = AttentionSpec()
"""Default options: causal, no window, no mass."""


class Choice(NamedTuple):
    """Verdict on one kernel for one call: whether it is chosen and, if not, the reason."""

    kernel: str
    platform: str
    chosen: bool
    reason: str | None


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    spec: AttentionSpec = DENSE,
    *,
    q_start: Int32[Array, "B"] | None = None,
    kv_len: Int32[Array, "B"] | None = None,
    q_len: Int32[Array, "B"] | None = None,
    selection: Selection | None = None,
    backend: str | None = None,
) -> AttentionOut:
    """Compute out = softmax(z) v and lse = ln(sum(exp(z))), z = softcap(scale * q.k), over the keys that each row sees.

    `contract` states which keys a row sees. The arguments decide the role: *sparse* with a selection, *score* with
    spec.mass, else *dense*. A row that sees no key gives out = 0, lse = -inf and zero gradient; keys at positions
    >= kv_len may hold anything. Only the dense role is differentiable: out and lse, with respect to q, k and v.

    Args:
        q_BTNH: queries; N must be a multiple of K.
        k_BSKH: keys, same dtype as q.
        v_BSKH: values, with the shape and dtype of the keys.
        spec: static options: mask, scale, softcap, tile sizes, and whether to return mass.
        q_start: absolute position of the first query row per sequence; zeros when None.
        kv_len: valid keys per sequence, clipped to [0, S]; S when None.
        q_len: valid query rows per sequence, clipped to [0, T]; T when None.
        selection: key tiles [B,K,I,C] that each query tile reads; None reads every visible key.
        backend: a kernel's full name ("reference_dense") or its name without the role ("reference"); None takes the
            first kernel that can run the call.

    Returns:
        AttentionOut(out [B,T,N,H] in q's dtype, lse [B,T,N] float32, mass [B,K,I,J] float32 with spec.mass).

    Raises:
        ValueError: shapes or dtypes disagree, or no kernel can run the call, or the named backend cannot; the message
            gives the reasons.
    """
    check(q_BTNH, k_BSKH, v_BSKH, "BSKH")
    where = {"q_start": q_start, "kv_len": kv_len, "q_len": q_len}
    return attend(q_BTNH, KeyValues.of(k_BSKH, v_BSKH), spec, **where, selection=selection, backend=backend)


def attend(
    q_BTNH: Float[Array, "B T N H"],
    kv: KeyValues,
    spec: AttentionSpec = DENSE,
    *,
    q_start: Int32[Array, "B"] | None = None,
    kv_len: Int32[Array, "B"] | None = None,
    q_len: Int32[Array, "B"] | None = None,
    selection: Selection | None = None,
    backend: str | None = None,
) -> AttentionOut:
    """Run `attention` on keys and values that are already a head-major `KeyValues`, as a KV cache stores them."""
    if kv.pages is not None:
        check_pages(q_BTNH, kv, spec, has_selection=selection is not None)
    check(q_BTNH, kv.k, kv.v, "BKSH" if kv.pages is None else "PKSH", scales=kv.scales)
    shapes = kv.shapes(q_BTNH, selection)
    batch, num_queries, num_keys = shapes[:3]
    if selection is not None:
        check_selection(selection, spec, (batch, shapes.num_kv_heads, ceil_div(num_queries, spec.query_tile)))
    lengths = (
        jnp.clip(per_sequence(name, value, size, batch), 0, size)
        for name, value, size in (("kv_len", kv_len, num_keys), ("q_len", q_len, num_queries))
    )
    positions = Positions(per_sequence("q_start", q_start, 0, batch), *lengths)
    parallel.local_shapes(shapes)  # raises unless the devices can share the KV heads equally

    platform = parallel.platform()  # of the mesh, which a call on one device's share no longer knows

    def run(q, kv, spec, positions, selection):
        local = kv.shapes(q, selection)
        kernel = choose(spec, local, backend=backend, platform=platform)
        return kernel.launch(q, kv, spec, positions, selection, tuned.config(kernel, spec, local))

    if spec.stripe is not None and context.traced_stripes() > 1:
        return context.attend(run, q_BTNH, kv, spec, positions, selection)
    spec = replace(spec, stripe=None)

    def launch(q, kv, positions, selection):
        return run(q, kv, spec, positions, selection)

    return parallel.split(launch, spec.mass)(q_BTNH, kv, positions, selection)


def explain(
    spec: AttentionSpec,
    shapes: Shapes,
    *,
    platform: str | None = None,
    capability: str | None = None,
    backend: str | None = None,
) -> list[Choice]:
    """List all kernels in the order in which they are tried, each with its verdict: chosen, or why not.

    Args:
        spec: options of the call.
        shapes: sizes of the call; `call_shapes(q, k, selection)` builds them.
        platform: "cpu", "gpu" or "tpu"; None means the platform of the mesh in use, else JAX's default backend.
        capability: compute capability of the GPU, such as "9.0"; None means that of the local GPU. Without a local GPU,
            capability is not checked.
        backend: backend that the call names; None if it names none.
    """
    platform = parallel.platform() if platform is None else platform
    if capability is None and platform == "gpu":
        capability = hardware.gpu_capability()
    choices, found = [], None
    for kernel in KERNELS:
        if backend is not None and not kernel.is_named(backend):
            reason = f"the call names {backend=}"
        else:
            reason = kernel.refusal(spec, shapes, platform=platform, capability=capability, automatic=backend is None)
        if reason is None and found is not None:
            reason = f"{found} comes first"
        elif reason is None:
            found = kernel.name
        choices.append(Choice(kernel.name, kernel.platform, reason is None, reason))
    return choices


def choose(spec: AttentionSpec, shapes: Shapes, *, backend: str | None = None, **where: str | None) -> Kernel:
    """Return the kernel that `explain` marks as chosen; `where` are its arguments `platform` and `capability`.

    Raises:
        ValueError: no kernel can run the call, or the named backend cannot; the message gives the reasons.
    """
    choices = explain(spec, shapes, **where, backend=backend)
    tried = list(zip(KERNELS, choices, strict=True))
    for kernel, choice in tried:
        if choice.chosen:
            return kernel
    role = role_of(spec, shapes)
    named = [(k, c) for k, c in tried if backend is None or k.is_named(backend)]
    if not named:
        names = ", ".join(kernel.name for kernel in KERNELS)
        raise ValueError(
            f"{backend=} must be one of {names}; or one of these names without its role; or None for the first kernel "
            "that can run the call"
        )
    # A family ("reference") also has kernels of other roles; report only the refusal of the call's own role.
    same_role = [(k, c) for k, c in named if k.role == role] or named
    reasons = "; ".join(f"{c.kernel}: {c.reason}" for _, c in same_role)
    if backend is None:
        raise ValueError(f"no kernel can run this call ({reasons})")
    raise ValueError(f"{backend=} cannot run this call: {reasons}")


def check(q: Array, k: Array, v: Array, layout: str, scales: Array | None = None) -> None:
    """Raise ValueError unless q, k and v fit together.

    `layout` names the axes of k and v: "BSKH", "BKSH", or "PKSH" for pages of S positions.
    """
    for name, array, letters in (("q", q, "BTNH"), ("k", k, layout), ("v", v, layout)):
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"{name}.shape={tuple(array.shape)} must have four sizes [{','.join(letters)}], none zero")
    if v.shape != k.shape:
        raise ValueError(f"v.shape={tuple(v.shape)} must equal k.shape={tuple(k.shape)}")
    if scales is not None:
        check_scales(k, v, scales, "P,K,2,page" if layout[0] == "P" else "B,K,2,S")
    elif not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes of q, k and v must be equal, got {q.dtype}, {k.dtype}, {v.dtype}")
    if (layout[0] == "B" and q.shape[0] != k.shape[0]) or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q.shape={tuple(q.shape)} and k.shape={tuple(k.shape)} must have the same H and, unless k is paged, the "
            "same B"
        )
    num_kv_heads = k.shape[layout.index("K")]
    if q.shape[2] % num_kv_heads:
        raise ValueError(f"num_heads={q.shape[2]} must be a multiple of {num_kv_heads=}")


def check_pages(q: Array, kv: KeyValues, spec: AttentionSpec, *, has_selection: bool) -> None:
    """Raise ValueError unless the page table is int32 [B,J] and, if the call uses tiles, the tile divides the page."""
    pages, page = kv.pages, kv.k.shape[-2] if kv.k.ndim == 4 else 0  # `check` refuses another number of axes
    if pages.ndim != 2 or pages.shape[0] != q.shape[0] or 0 in pages.shape or pages.dtype != jnp.int32:
        raise ValueError(
            f"pages must be int32 [B,J] with B={q.shape[0]} and J >= 1, got {pages.dtype} {tuple(pages.shape)}"
        )
    if (spec.mass or has_selection) and page % spec.tile:
        raise ValueError(f"page size {page} must be a multiple of tile={spec.tile}")


def check_scales(k: Array, v: Array, scales: Array, axes: str) -> None:
    """Raise ValueError unless k and v are int8 and their scales, whose axes are `axes`, are bfloat16 and fit."""
    if not k.dtype == v.dtype == jnp.int8:
        raise ValueError(f"scales need int8 keys and values, got {k.dtype} and {v.dtype}")
    shape = (*k.shape[:2], 2, k.shape[2])
    if scales.shape != shape or scales.dtype != jnp.bfloat16:
        raise ValueError(f"scales must be bfloat16 [{axes}] = {shape}, got {scales.dtype} {tuple(scales.shape)}")


def check_selection(selection: Selection, spec: AttentionSpec, lead: tuple[int, int, int]) -> None:
    """Raise ValueError if spec.mass is set or the selection is not int32 [B,K,I,C] and [B,K,I]; `lead` is (B, K, I)."""
    tiles, count = selection
    if spec.mass:
        raise ValueError("spec.mass=True needs selection=None: masses are measured over all visible keys")
    if tiles.ndim != 4 or tiles.shape[:3] != lead or tiles.shape[3] < 1:
        raise ValueError(
            f"selection.tiles.shape={tuple(tiles.shape)} must be [B,K,I,C] = {lead} and C >= 1, "
            f"where I = ceil(T / query_tile={spec.query_tile})"
        )
    if count.shape != lead:
        raise ValueError(f"selection.count.shape={tuple(count.shape)} must be [B,K,I] = {lead}")
    if tiles.dtype != jnp.int32 or count.dtype != jnp.int32:
        raise ValueError(f"selection dtypes must be int32, got {tiles.dtype} and {count.dtype}")


def per_sequence(name: str, value: Array | None, default: int, batch: int) -> Int32[Array, "B"]:
    """Return `value`, checked to be int32 [B]; if it is None, an array [B] filled with `default`."""
    if value is None:
        return jnp.full((batch,), default, jnp.int32)
    value = jnp.asarray(value)
    if value.shape != (batch,) or value.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32 of shape [B] = ({batch},), got {value.dtype} {tuple(value.shape)}")
    return value
