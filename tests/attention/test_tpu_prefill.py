"""TPU prefill kernels with the shipped block sizes, at thousands of keys: long lists, bfloat16 exponentials."""

import dataclasses
import functools

import calls
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from chips import on_chip

from tessera.attention import oracle, tuned
from tessera.attention.contract import AttentionSpec, Selection, Shapes
from tessera.attention.tpu import prefill as tpu_prefill
from tessera.attention.tpu import prefill_blocks, prefill_rows, sparse_tiles
from tessera.attention.tpu import sparse as tpu_sparse
from tessera.attention.workloads import Workload

KERNELS = {kernel.role: kernel for kernel in (*tpu_prefill.KERNELS, *tpu_sparse.KERNELS)}
SPARSE = KERNELS["sparse"]
ROWS = Workload(  # all rows see its first key block in full; the diagonal crosses the next
    name="tpu_rows",
    num_queries=544,
    num_keys=4640,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    spec=AttentionSpec(query_tile=16),
    q_start=(4096,),
    kv_len=(4630,),
    q_len=(530,),
    tags=("test", "prefill"),
)
WINDOW = dataclasses.replace(
    ROWS,
    batch=2,
    num_queries=40,
    num_keys=4500,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    spec=AttentionSpec(tile=16, query_tile=16, window=2500),
    q_start=(4455, 2040),
    kv_len=(4490, 2075),
    q_len=None,
)
CORNERS = dataclasses.replace(  # starts at key 0; at a multiple of 512; with keys missing; at no multiple of 512
    ROWS,
    batch=4,
    num_queries=512,
    num_keys=5376,
    num_heads=3,
    q_start=(0, 512, 4608, 4700),
    kv_len=(512, 1024, 5000, 5212),
    q_len=(512, 500, 512, 512),
)
LISTS = dataclasses.replace(
    ROWS, num_queries=160, num_heads=4, spec=AttentionSpec(), fraction=0.7, q_start=(4480,), kv_len=None, q_len=(150,)
)
EDGES = (slice(0, 16), slice(256, 288), slice(528, 544))
"""Slices of 544 rows to compare: the first rows, the border of the two token blocks, and the last rows with padding."""
CORNER_EDGES = (slice(256, 272),)
"""Slice of 512 rows to compare: the first of the second token block; test_tpu_corner.py compares all rows."""
LARGE = {
    "dense": ("v5e", "dense", ROWS, "bfloat16", EDGES),
    "dense, half exponentials": ("v6e", "dense", ROWS, "bfloat16", EDGES),
    "dense, state in VMEM": ("v7x", "dense", ROWS, "bfloat16", EDGES),
    "dense, corner": ("v5e", "dense", CORNERS, "bfloat16", CORNER_EDGES),
    "dense, corner, state in VMEM": ("v7x", "dense", CORNERS, "bfloat16", CORNER_EDGES),
    "score, corner": ("v6e", "score", CORNERS, "bfloat16", CORNER_EDGES),
    "score, corner, tiles put": ("v5e", "score", CORNERS, "bfloat16", CORNER_EDGES),
    "score, state in VMEM": (
        "v7x",
        "score",
        dataclasses.replace(ROWS, spec=AttentionSpec(tile=16, query_tile=16)),
        "bfloat16",
        EDGES,
    ),
    "score, tiles put": ("v5e", "score", ROWS, "bfloat16", EDGES),
    "score, banks": (
        "v6e",
        "score",
        dataclasses.replace(ROWS, spec=AttentionSpec(tile=16, query_tile=16)),
        "bfloat16",
        EDGES,
    ),
    "score, banks of a window": ("v5e", "score", WINDOW, "float32", (slice(0, 40),)),
    "sparse, four lists": ("v5e", "sparse", LISTS, "bfloat16", tuple(slice(i, i + 8) for i in (0, 32, 64, 96, 144))),
    "sparse, a list in parts": (
        "v6e",
        "sparse",
        dataclasses.replace(
            LISTS, num_queries=128, num_heads=8, head_dim=64, spec=AttentionSpec(tile=32, query_tile=128), q_len=(120,)
        ),
        "bfloat16",
        (slice(0, 8), slice(60, 68), slice(112, 128)),
    ),
}
REACHED = {
    "dense": {"corner": False, "sub_t": 272, "chunk": 256, "extra": 0, "half_exp": False},
    "dense, half exponentials": {"sub_t": 272, "chunk": 512, "extra": 128, "half_exp": True},
    "dense, state in VMEM": {"sub_t": 272, "chunk": 256, "half_exp": True, "state_in_vmem": True},
    "dense, corner": {"corner": True, "sub_t": 256, "turn_t": 512, "block_t": 512, "chunk": 256},
    "dense, corner, state in VMEM": {"corner": True, "sub_t": 256, "state_in_vmem": True},
    "score, corner": {"corner": True, "sub_t": 256, "one_hot": True},
    "score, corner, tiles put": {"corner": True, "sub_t": 256, "one_hot": False},
    "score, state in VMEM": {"banks": 3, "one_hot": True, "state_in_vmem": True},
    "score, tiles put": {"sub_t": 272, "banks": 1, "one_hot": False},
    "score, banks": {"sub_t": 272, "banks": 3, "one_hot": True, "block_s": 2048, "half_exp": True},
    "score, banks of a window": {"banks": 3, "block_s": 1024, "bank_keys": 2048},
    "sparse, four lists": {"items": 4, "num_blocks": 5, "block_tiles": 16, "ones": 0, "half_exp": False},
    "sparse, a list in parts": {"parts": 2, "block_tiles": 64, "ones": 64, "half_exp": True},
}
"""Call of LARGE -> fields of its cut that the call must reach."""


def shipped(chip: str, role: str, workload: Workload, dtype: str) -> tuple[object, object]:
    """Return the (config, cut) that dispatch chooses on the chip."""
    spec, shapes = workload.role_spec(role), workload.shapes(role, dtype)
    with on_chip(chip):
        config = tuned.config(KERNELS[role], spec, shapes)
    return config, (sparse_tiles if role == "sparse" else prefill_blocks).cut_call(spec, shapes, config)


def some_rows(call: oracle.Call, tokens: slice) -> oracle.Call:
    """Restrict the call to these query rows, which are whole query tiles or part of one."""
    lists = slice(tokens.start // call.query_tile, -(-tokens.stop // call.query_tile))
    call = call._replace(
        q=call.q[:, tokens],
        q_start=call.q_start + tokens.start,
        q_len=np.clip(call.q_len - tokens.start, 0, tokens.stop - tokens.start),
    )
    if call.tiles is None:
        return call
    return call._replace(tiles=call.tiles[:, :, lists], count=call.count[:, :, lists])


@functools.cache
def truth(workload: Workload, role: str, dtype: str, tokens: tuple[slice, ...]) -> list[tuple]:
    """Return the oracle's answer and tolerance for some rows; for all rows it would take minutes."""
    parts = [some_rows(calls.make(workload, role, dtype), rows) for rows in tokens]
    answers = [oracle.attend(part) for part in parts]
    return [(a, oracle.tolerance(part, a, dtype, folded=True)) for part, a in zip(parts, answers, strict=True)]


@pytest.mark.parametrize("name", LARGE)
def test_shipped_block_sizes_meet_the_oracle(name):
    chip, role, workload, dtype, tokens = LARGE[name]
    config, cut = shipped(chip, role, workload, dtype)
    assert {key: getattr(cut, key) for key in REACHED[name]} == REACHED[name]
    result = calls.run(KERNELS[role], calls.make(workload, role, dtype), dtype, config)
    same_rows = "score" if role == "dense" else role  # the roles share one answer
    for rows, (answer, allowed) in zip(tokens, truth(workload, same_rows, dtype, tokens), strict=True):
        seen = ~np.isneginf(answer.lse)
        assert np.abs(result.out[:, rows] - answer.out).max() <= allowed.out
        assert np.array_equal(np.isneginf(result.lse[:, rows]), ~seen)
        error = result.lse[:, rows][seen] - answer.lse[seen]
        assert np.abs(error).max() <= allowed.lse
        assert abs(error.mean()) <= allowed.lse / 4  # biased weights would show here first
        if role == "score":
            first = rows.start // workload.spec.query_tile
            mass = result.mass[:, :, first : first + answer.mass.shape[2]]
            assert np.abs(mass - answer.mass).max() <= allowed.mass


def test_half_exponentials_are_rounded_once_in_simulation():
    """The program computes exp2 in bfloat16; the simulation gives 2^x, rounded once and without bias."""
    jaxpr = jax.make_jaxpr(lambda x: prefill_rows.weigh(x, True))(jnp.zeros(8))
    assert [eqn.invars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "exp2"] == [jnp.bfloat16]
    bits = -np.linspace(0, 16, 4001).astype(ml_dtypes.bfloat16)
    with calls.machine(KERNELS["dense"]):
        weights = prefill_rows.weigh(jnp.asarray(bits), True)
    assert weights.dtype == jnp.bfloat16
    error = np.asarray(weights, np.float64) / np.exp2(bits.astype(np.float64)) - 1
    assert np.abs(error).max() <= 2**-8 * 1.01
    assert abs(error.mean()) < 2e-4


def prefill(num_keys: int, tile: int, fraction: float, query_tile: int = 32) -> tuple[AttentionSpec, Shapes]:
    capacity = round(fraction * num_keys / tile)
    return AttentionSpec(tile=tile, query_tile=query_tile), Shapes(1, 2048, num_keys, 32, 8, 128, capacity, "bfloat16")


@pytest.mark.parametrize("tile", [16, 32, 128])
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.6, 0.95])
def test_lists_of_a_million_tokens_fit_scalar_memory(tile, fraction):
    """Packed lists of this step and the next one, both double-buffered, must fit in 1 MiB of SMEM."""
    spec, shapes = prefill(1 << 20, tile, fraction)
    assert SPARSE.refusal(spec, shapes) is None
    tiles, count = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, 8, 64, shapes.capacity), (1, 8, 64)))
    for config in (SPARSE.default_config(spec, shapes), *SPARSE.search_space(spec, shapes)):
        cut = sparse_tiles.cut_call(spec, shapes, config)
        lists = jax.eval_shape(functools.partial(sparse_tiles.pack_lists, cut=cut), Selection(tiles, count))
        padded = -(-lists.shape[-1] // 128) * 128
        assert 2 * 2 * 4 * cut.items * padded <= 1 << 20
    if tile == 16 and fraction == 0.05:  # short lists still share a grid step
        assert sparse_tiles.cut_call(spec, shapes, SPARSE.default_config(spec, shapes)).items == 2


def test_a_list_that_cannot_fit_is_refused():
    assert "SMEM" in SPARSE.refusal(*prefill(1 << 20, 16, 1.0))
    assert SPARSE.refusal(*prefill(1 << 20, 32, 1.0)) is None
