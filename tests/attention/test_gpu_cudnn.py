"""The cuDNN kernel: Tessera's code around cuDNN, the calls that are refused, and when the kernel is chosen.

cuDNN itself runs only on a GPU, where `lab/gpu/check.sh correct` compares it with float32. Here `definition`, in
plain JAX, replaces it, so that lengths, padding, empty rows and positions are still tested.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import dispatch, oracle, reference
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.dispatch import explain
from tessera.attention.gpu import backward as gpu_backward
from tessera.attention.gpu import cudnn as gpu_cudnn
from tessera.attention.workloads import Workload
from tessera.measure import trials, verify

KERNEL = gpu_cudnn.KERNELS[0]
SQUARE = Workload(
    name="square",
    batch=3,
    num_queries=70,
    num_keys=70,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    kv_len=(70, 33, 0),
    q_len=(70, 70, 20),
    tags=("prefill",),
)
SHAPES = Shapes(1, 1024, 1024, 8, 2, 128, None, "bfloat16")


def definition(q, k, v, kv_len, scale, causal):
    """Compute what cuDNN documents: a causal diagonal from the first key on, and keys from kv_len on masked."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (k, v))
    z = jnp.einsum("BTNH,BSNH->BNTS", q.astype(jnp.float32), k, precision="highest") * scale
    mask = (jnp.arange(k.shape[1]) < kv_len[:, None])[:, None, None]
    if causal:
        mask &= jnp.tril(jnp.ones(z.shape[2:], bool))
    z = jnp.where(mask, z, -1e30)
    out = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(z, axis=-1), v, precision="highest")
    return out.astype(q.dtype), jax.nn.logsumexp(z, axis=-1)


@pytest.mark.parametrize("q_start", [None, (0, 0, 0), (5, -9, 3), (-80, 60, 0)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_all_around_it_meets_the_oracle(monkeypatch, causal, q_start):
    monkeypatch.setattr(gpu_cudnn, "cudnn", definition)
    workload = replace(SQUARE, q_start=q_start, spec=AttentionSpec(causal=causal, scale=0.2))
    call = trials.make(workload, "dense", "bfloat16")
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, "bfloat16")
    q, k, v = (jnp.asarray(x) for x in (call.q, call.k, call.v))
    positions = gpu_cudnn.Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    config = KERNEL.Config()
    found = jax.jit(KERNEL.launch, static_argnums=(2, 5))(q, KeyValues.of(k, v), workload.spec, positions, None, config)
    assert found.lse.dtype == jnp.float32
    found = AttentionOut(*(None if x is None else np.asarray(x.astype(jnp.float32)) for x in found))
    errors, wrong = verify.compare(found, truth, allowed, "dense")
    assert not wrong
    assert errors.max() <= 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def opaque(q, k, v, kv_len, scale, causal):
    """Mimic cuDNN's custom gradient: save inputs and outputs, and drop the cotangent of lse."""
    return definition(q, k, v, kv_len, scale, causal)


def opaque_forward(*call):
    return (found := definition(*call)), (*call[:3], *found)


def opaque_backward(scale, causal, saved, cotangents):
    return *(0 * x for x in saved[:3]), None


opaque.defvjp(opaque_forward, opaque_backward)


@pytest.mark.parametrize(
    ("causal", "q_start", "capability"),
    [(True, (0, 0, 0), None), (True, (5, -9, 3), "9.0"), (True, (5, -9, 3), "8.0"), (False, (0, 0, 0), "10.0")],
)
def test_its_gradient_is_that_of_out_and_lse(monkeypatch, causal, q_start, capability):
    """On Hopper the gradient comes from our kernels (test_attention.py checks them), elsewhere from plain JAX."""
    ran, plain = [], gpu_backward.by_rows
    monkeypatch.setattr(gpu_cudnn, "cudnn", opaque)
    monkeypatch.setattr(gpu_backward, "by_rows", lambda *x: ran.append("plain") or plain(*x))
    monkeypatch.setattr(gpu_backward, "by_kernels", lambda *x: ran.append("kernels") or plain(*x))
    if capability:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])
    spec = AttentionSpec(causal=causal, scale=0.2)
    call = trials.make(replace(SQUARE, q_start=q_start, spec=spec), "dense", "bfloat16")
    q, k, v = (jnp.asarray(x) for x in (call.q, call.k, call.v))
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    unseen = np.isneginf(oracle.attend(call).lse)
    rng = np.random.default_rng(5)
    d_out, d_lse = (rng.standard_normal(n).astype(np.float32) for n in (q.shape, q.shape[:3]))
    sent = np.where(unseen[..., None], np.nan, d_out), np.where(unseen, np.nan, d_lse)

    def gradients(kernel, dtype):
        q, k, v, d_out = (jnp.asarray(x, dtype) for x in (call.q, call.k, call.v, sent[0]))

        def attend(q, k, v):
            return kernel.launch(q, KeyValues.of(k, v), spec, positions, None, None)._replace(mass=None)

        pull = jax.vjp(attend, q, k, v)[1]
        return pull(AttentionOut(d_out, jnp.asarray(sent[1])))

    found = gradients(KERNEL, jnp.bfloat16)
    assert ran == ["kernels" if capability in (None, "9.0") else "plain"]
    for mine, truth in zip(found, gradients(reference.KERNELS[0], jnp.float32), strict=True):
        assert np.abs(mine.astype(jnp.float32) - truth).max() <= 2**-5 * max(1.0, np.abs(truth).max())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_its_gradient_keeps_nothing_of_the_size_of_the_scores(monkeypatch, causal):
    """q_start is known only at run time, and a `cond` on it must not save the residuals of both branches."""
    monkeypatch.setattr(gpu_cudnn, "cudnn", opaque)
    spec, length = AttentionSpec(causal=causal), 4096
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16) for heads in (4, 2))
    positions = Positions(*(jax.ShapeDtypeStruct((1,), jnp.int32) for _ in range(3)))

    def forward(q, k, v, positions):
        def attend(q, k, v):
            return KERNEL.launch(q, KeyValues.of(k, v), spec, positions, None, KERNEL.Config())

        return jax.vjp(attend, q, k, v)

    kept = [x.size for x in jax.tree.leaves(jax.eval_shape(forward, q, k, k, positions)[1])]
    assert max(kept) == q.size
    assert sum(kept) <= 2 * q.size + 2 * k.size + length * 4 + 3  # q, out, k, v, lse, positions


@pytest.mark.parametrize(
    ("spec", "shapes", "reason"),
    [
        (AttentionSpec(), SHAPES._replace(num_queries=1), "doubles the traffic"),
        (AttentionSpec(window=9), SHAPES, "does not support a window, but the call has window=9"),
        (AttentionSpec(softcap=9.0), SHAPES, "softcap=9.0"),
        (AttentionSpec(), SHAPES._replace(num_keys=4096), "but the call has 1024 queries and 4096 keys"),
        (AttentionSpec(), SHAPES._replace(head_dim=256), "head_dim=256"),
        (AttentionSpec(), SHAPES._replace(dtype="float32"), "dtype float32"),
    ],
)
def test_what_it_cannot_honour_is_refused_with_the_reason(spec, shapes, reason):
    assert reason in KERNEL.refusal(spec, shapes)


def chosen(spec, shapes) -> str:
    return next(c.kernel for c in explain(spec, shapes, platform="gpu") if c.chosen)


def test_cudnn_comes_before_our_own_kernel():
    assert chosen(AttentionSpec(), SHAPES) == "gpu_cudnn_dense"
    assert KERNEL.refusal(AttentionSpec(causal=False), SHAPES) is None


class Device:
    def __init__(self, capability):
        if capability is not None:  # not every vendor's device has this attribute
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "mosaic", "cudnn"),
    [("9.0", None, None), ("8.0", "needs compute capability 9.0", None), ("7.5", "9.0", "needs compute capability 8.0"),
     ("10.0", "needs compute capability 9.0 (Hopper), but this GPU has 10.0", None),
     ("gfx942", "9.0 (Hopper), but this GPU has gfx942", "8.0 (Ampere) or later, but this GPU has gfx942"),
     (None, "9.0 (Hopper), but this GPU has none", "8.0 (Ampere) or later, but this GPU has none")],
)  # fmt: skip
def test_older_and_newer_chips_get_the_portable_path_with_the_reason(monkeypatch, capability, mosaic, cudnn):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])
    for kernel, choice in zip(dispatch.KERNELS, explain(AttentionSpec(), SHAPES, platform="gpu"), strict=True):
        if kernel.platform == "gpu" and kernel.role == "dense" and kernel.phase == "prefill":
            wanted = cudnn if kernel is KERNEL else mosaic
            assert (choice.reason or "") and wanted in choice.reason if wanted else "capability" not in str(choice)
    if cudnn:
        assert chosen(AttentionSpec(), SHAPES) == "xla_prefill_dense"
