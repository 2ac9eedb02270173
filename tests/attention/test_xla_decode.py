"""The portable decode kernel's two ways through a cache: all keys at once, and block by block where few are visible."""

import jax.numpy as jnp
import numpy as np
import pytest

import tessera
from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, Positions
from tessera.attention.workloads import Workload
from tessera.attention.xla import decode
from tessera.measure import trials

KERNEL = decode.KERNELS[0]
CONFIG = decode.Config(block_s=128)


def workload(name: str, num_keys: int, kv_len: tuple[int, ...], **options) -> Workload:
    sizes = {"num_queries": 1, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    return Workload(
        name=name, batch=len(kv_len), num_keys=num_keys, kv_len=kv_len, q_start=tuple(max(n - 1, 0) for n in kv_len),
        tags=("decode",), **sizes | options,
    )  # fmt: skip


WORKLOADS = {
    "ends in, at and after a block; one sequence sees nothing": (
        workload("ends", 1024, (1024, 513, 511, 0), q_len=(1, 1, 1, 0)),
        "float32",
    ),
    "16-bit values": (workload("digits", 1024, (1000, 513)), "bfloat16"),
    "a window that starts in and at a block, and within one": (
        workload("window", 640, (640, 512, 300), spec=AttentionSpec(window=256)),
        "float32",
    ),
    "a window within one block": (workload("within", 256, (200, 140), spec=AttentionSpec(window=50)), "float32"),
    "few of the keys": (workload("few", 1024, (400, 128)), "float32"),
    "softcap": (workload("softcap", 256, (256, 200), spec=AttentionSpec(softcap=5.0)), "float32"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_decode_equals_the_oracle_and_ignores_what_padding_holds(name):
    case, dtype = WORKLOADS[name]
    call = trials.make(case, "dense", dtype)
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, dtype)
    found = trials.run(KERNEL, call, dtype, CONFIG)
    assert np.abs(found.out - truth.out).max() <= allowed.out
    np.testing.assert_allclose(found.lse, truth.lse, rtol=0, atol=allowed.lse)
    zeros = call._replace(k=np.nan_to_num(call.k), v=np.nan_to_num(call.v))
    again = trials.run(KERNEL, zeros, dtype, CONFIG)
    np.testing.assert_array_equal(found.out, again.out)
    np.testing.assert_array_equal(found.lse, again.lse)


def test_probabilities_of_16_bit_values_keep_16_bits():
    """The float32 result before it is rounded to bfloat16; with 8-bit probabilities it is off by 2e-3."""
    call = trials.make(workload("float", 512, (512, 400)), "dense", "bfloat16")
    q, k, v = (jnp.asarray(np.nan_to_num(x)) for x in (call.q, call.k, call.v))
    rows, kv = decode.group_rows(q, 2), decode.KeyValues.of(k, v)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    found, _ = decode.attend_dense(rows, kv.k, kv.v, positions, AttentionSpec(), CONFIG)
    np.testing.assert_allclose(np.asarray(found).reshape(call.q.shape), oracle.attend(call).out, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("num_keys", "options", "size"),
    [(1536, {}, 512), (640, {}, 128), (8190, {}, 0), (1024, {"scaled": True}, 0), (1 << 19, {"num_heads": 32}, 0)],
)
def test_all_keys_run_at_once_where_blocks_divide_them_and_scores_fit(num_keys, options, size):
    shapes = workload("size", num_keys, (num_keys,), **options)
    q = np.zeros((1, 2, shapes.num_heads // 2, 16), np.float32)
    kv = decode.KeyValues(
        *(np.broadcast_to(np.int8(0), (1, 2, num_keys, 16)),) * 2, scales=np.zeros(1) if shapes.scaled else None
    )
    assert decode.at_once_size(q, kv) == size


@pytest.mark.parametrize("num_queries", [1, 16])
def test_a_row_that_sees_nan_keys_gets_nan(num_queries):
    """A finite output would be an answer from keys that nobody computed."""
    k = jnp.ones((1, 32, 1, 16)).at[0, 3].set(jnp.nan)
    out = tessera.attention(
        jnp.ones((1, num_queries, 2, 16)), k, k, tessera.AttentionSpec(tile=16, query_tile=16), q_start=jnp.array([16])
    )
    assert np.isnan(np.asarray(out.out)).all()
