"""Float64 numpy oracles for attention and its gradient, written from the contract; they share no code with kernels.

`tolerance` derives the error that a kernel may make in a dtype. It is twice the error of a naive path in that dtype
(inputs and softmax weights rounded to the dtype, sums in float32), plus a rounding floor. The floor has two parts: a
float32 score z has a rounding error of |z| * 2^-23, which the exponential turns into a relative error of the weight,
and the output is rounded to the dtype once. Some kernels multiply q by the scale and round the product to the dtype
before a matrix unit uses it; for these kernels, the naive path for lse and mass does the same. These kernels also sum
the rounded weights, which adds a relative error of at most half an epsilon of the dtype to the sum.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


class Call(NamedTuple):
    """One attention call in numpy: q [B,T,N,H], k and v [B,S,K,H], positions [B], and the fields of the spec.

    `tiles` [B,K,I,C] and `count` [B,K,I] are the selection; None without one. With `scales` [B,K,2,S], the key is
    k * scales[:, :, 0] and the value v * scales[:, :, 1].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_start: np.ndarray
    kv_len: np.ndarray
    q_len: np.ndarray
    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None
    tile: int
    query_tile: int
    tiles: np.ndarray | None = None
    count: np.ndarray | None = None
    scales: np.ndarray | None = None


class Answer(NamedTuple):
    """Results (or their tolerances): out [B,T,N,H], lse [B,T,N], mass [B,K,I,J]; top is the largest visible |z|."""

    out: np.ndarray
    lse: np.ndarray
    mass: np.ndarray
    top: float


def sees(call: Call, b: int, t: int, head: int) -> np.ndarray:
    """Mark the keys that row t of query head `head` attends to: visible and, if the call has a selection, listed."""
    num_keys, group = call.k.shape[1], call.q.shape[2] // call.k.shape[2]
    s = np.arange(num_keys)
    p = int(call.q_start[b]) + t
    seen = s < call.kv_len[b]
    if call.causal:
        seen &= s <= p
    if call.window is not None:
        seen &= s > p - call.window
    if call.tiles is not None:
        i, kv = t // call.query_tile, head // group
        seen &= np.isin(s // call.tile, call.tiles[b, kv, i, : call.count[b, kv, i]])
    return seen & (t < call.q_len[b])


def real(call: Call, b: int, kv: int, which: int, work: type) -> np.ndarray:
    """Return the keys (which = 0) or values (1) [S,H] of one head, multiplied by their scales if they are int8."""
    x = (call.k, call.v)[which][b, :, kv].astype(work)
    return x if call.scales is None else x * call.scales[b, kv, which].astype(work)[:, None]


def scores(call: Call, b: int, t: int, head: int, work: type = np.float64) -> np.ndarray:
    """Compute z = softcap(scale * q.k) of one query row and all S keys, in the dtype `work`."""
    kv = head // (call.q.shape[2] // call.k.shape[2])
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    z = (real(call, b, kv, 0, work) @ call.q[b, t, head].astype(work)) * work(scale)
    return z if call.softcap is None else work(call.softcap) * np.tanh(z / work(call.softcap))


def attend(call: Call, dtype: str = "float64") -> Answer:
    """Compute attention row by row: for "float64" the exact answer, for another dtype the naive path in that dtype."""
    work = np.float64 if dtype == "float64" else np.float32
    store = DTYPES[dtype]
    batch, num_queries, num_heads, _ = call.q.shape
    num_keys, num_kv_heads = call.k.shape[1:3]
    out = np.zeros(call.q.shape, work)
    lse = np.full(call.q.shape[:3], -np.inf, work)
    mass = np.zeros((batch, num_kv_heads, -(-num_queries // call.query_tile), -(-num_keys // call.tile)), work)
    top = 0.0
    for b, t, head in np.ndindex(batch, num_queries, num_heads):
        seen = np.flatnonzero(sees(call, b, t, head))
        if seen.size == 0:
            continue
        kv = head // (num_heads // num_kv_heads)
        part = call._replace(
            k=call.k[:, seen],
            v=call.v[:, seen],
            scales=None if call.scales is None else call.scales[..., seen],
        )
        z = scores(part, b, t, head, work)
        weight = np.exp(z - z.max())
        lse[b, t, head] = z.max() + np.log(weight.sum())
        prob = weight / weight.sum()
        values = real(part, b, kv, 1, work)
        out[b, t, head] = (prob.astype(store).astype(work) @ values).astype(store).astype(work)
        np.add.at(mass[b, kv, t // call.query_tile], seen // call.tile, prob)
        top = max(top, float(np.abs(z).max()))
    return Answer(out, lse, mass, top)


def fold(call: Call, dtype: str) -> Call:
    """Return the call with q times scale * log2(e), rounded to the dtype, and scale = ln 2, which cancels the log2(e).

    With a softcap c, q is multiplied by scale / c instead, and the new scale is c.
    """
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    rest = np.log(2.0) if call.softcap is None else call.softcap
    return call._replace(q=(call.q.astype(np.float64) * (scale / rest)).astype(DTYPES[dtype]), scale=float(rest))


def dequantise(call: Call, dtype: str) -> Call:
    """Return the call with int8 keys and values times their scales, rounded to the dtype; unchanged without scales."""
    if call.scales is None:
        return call
    by_key = np.moveaxis(call.scales.astype(np.float32), 3, 1)[..., None]  # [B,S,K,2,1]
    k, v = ((x * by_key[..., which, :]).astype(DTYPES[dtype]) for which, x in enumerate((call.k, call.v)))
    return call._replace(k=k, v=v, scales=None)


def tolerance(call: Call, truth: Answer, dtype: str, folded: bool = False, dequantised: bool = False) -> Answer:
    """Return the largest absolute error allowed in out, lse and mass for a kernel in this dtype.

    `folded` means that the kernel multiplies q by the scale and rounds the product to the dtype. `dequantised` means
    that the kernel multiplies int8 keys and values by their scales and rounds the products to the dtype.
    """
    call = dequantise(call, dtype) if dequantised else call
    naive = attend(call, dtype)
    scored, summed = (fold(call, dtype), EPS[dtype] / 2) if folded else (call, 0.0)
    values = max(
        float(np.abs(real(call, b, kv, 1, np.float64)[: call.kv_len[b]]).max(initial=0))
        for b, kv in np.ndindex(len(call.v), call.v.shape[2])
    )
    finite = np.isfinite(truth.lse)
    score_error = (4 + truth.top) * EPS["float32"]
    rows = call.query_tile * (call.q.shape[2] // call.k.shape[2])
    out = 2 * np.abs(naive.out - truth.out).max() + values * (2 * score_error + EPS[dtype] / 2)
    naive_lse = attend(scored, dtype).lse if folded else naive.lse
    lse = 2 * np.abs(naive_lse[finite] - truth.lse[finite]).max(initial=0) + 2 * score_error + summed
    mass = 2 * np.abs(attend(scored, "float32").mass - truth.mass).max() + rows * (2 * score_error + summed)
    return Answer(out, lse, mass, truth.top)


def gradients(call: Call, d_out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradient of sum(d_out * out) with respect to q, k and v, row by row, in float64."""
    dq, dk, dv = (np.zeros(x.shape) for x in (call.q, call.k, call.v))
    group = call.q.shape[2] // call.k.shape[2]
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    for b, t, head in np.ndindex(*call.q.shape[:3]):
        seen = np.flatnonzero(sees(call, b, t, head))
        if seen.size == 0:
            continue
        kv = head // group
        keys, values = call.k[b, seen, kv].astype(np.float64), call.v[b, seen, kv].astype(np.float64)
        z = scores(call._replace(k=call.k[:, seen]), b, t, head)
        prob = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        d_prob = values @ d_out[b, t, head]
        d_z = prob * (d_prob - prob @ d_prob)
        if call.softcap is not None:
            d_z = d_z * (1 - (z / call.softcap) ** 2)
        dq[b, t, head] += scale * (d_z @ keys)
        dk[b, seen, kv] += scale * np.outer(d_z, call.q[b, t, head].astype(np.float64))
        dv[b, seen, kv] += np.outer(prob, d_out[b, t, head])
    return dq, dk, dv
