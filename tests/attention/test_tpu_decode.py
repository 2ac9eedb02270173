"""TPU decode kernels beyond the oracle: each byte is copied once, ragged batches, long lists, both layouts of keys."""

import dataclasses
import functools

import calls
import jax
import numpy as np
import pytest
from chips import on_chip

from tessera.attention import oracle, tuned
from tessera.attention.contract import AttentionSpec, Positions, Selection, Shapes
from tessera.attention.tpu import decode as tpu_decode
from tessera.attention.tpu import decode_blocks
from tessera.attention.workloads import Workload
from tessera.measure.trials import UNOPTIMISED

KERNELS = {kernel.role: kernel for kernel in tpu_decode.KERNELS}
RAGGED = Workload(
    name="decode_lanes",  # keys lie along rows at H 128, along lanes at H 64
    batch=4,
    num_queries=1,
    num_keys=768,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    spec=AttentionSpec(tile=128),
    fraction=0.6,
    q_start=(700, 300, 30, 767),
    kv_len=(768, 130, 390, 0),
    tags=("test", "decode"),
)
VARIANTS = {
    "keys in lanes": (RAGGED, {"splits": 2}),
    "keys in rows": (dataclasses.replace(RAGGED, head_dim=128, num_heads=4), {"splits": 2}),
    "several tiles to a copy": (
        dataclasses.replace(RAGGED, spec=AttentionSpec(tile=16, window=500, softcap=3.0), fraction=0.4),
        {"splits": 1},
    ),
    "groups of more than 8": (dataclasses.replace(RAGGED, num_heads=24, num_kv_heads=2, head_dim=48), {"splits": 1}),
}


def meets_oracle(role: str, workload: Workload, dtype: str, config: object) -> None:
    call = calls.make(workload, role, dtype)
    answer = oracle.attend(call)
    allowed = oracle.tolerance(call, answer, dtype)
    result = calls.run(KERNELS[role], call, dtype, config)
    empty = np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), empty)
    assert np.abs(result.lse[~empty] - answer.lse[~empty]).max(initial=0) <= allowed.lse
    if role == "score":
        assert np.abs(result.mass - answer.mass).max() <= allowed.mass


def variants():
    """Yield every (variant, role); the default pairs cover both layouts, wide groups, masses and lists."""
    default = {
        "keys in lanes": ("dense", "sparse"),
        "keys in rows": ("score", "sparse"),
        "several tiles to a copy": ("sparse",),
        "groups of more than 8": ("score",),
    }
    for name in VARIANTS:
        for role in KERNELS:
            marks = () if role in default[name] else pytest.mark.exhaustive
            yield pytest.param(name, role, id=f"{name}-{role}", marks=marks)


@pytest.mark.parametrize(("name", "role"), list(variants()))
def test_ragged_batches_in_both_layouts(role, name):
    workload, sizes = VARIANTS[name]
    config = tpu_decode.Config(block_s=256, block_heads=2, **sizes)
    meets_oracle(role, workload, "bfloat16", config)


LONG = dataclasses.replace(
    RAGGED,
    batch=2,
    num_keys=4608,
    num_heads=4,
    num_kv_heads=2,
    spec=AttentionSpec(tile=16),
    q_start=(4505, 2200),
    kv_len=(4510, 3000),
)
LISTED = dataclasses.replace(LONG, num_keys=8192, fraction=0.7, q_start=(8191, 6000), kv_len=(8190, 8000))
LARGE = {
    "score, banks, keys in rows": ("v6e", "score", dataclasses.replace(LONG, num_keys=4512, head_dim=128), 2048, 3),
    "score, banks of a window, keys in lanes": (
        "v5e",
        "score",
        dataclasses.replace(LONG, spec=AttentionSpec(tile=16, window=2500)),
        2048,
        3,
    ),
    "dense": (
        "v5e",
        "dense",
        dataclasses.replace(LONG, num_keys=8704, head_dim=128, q_start=(8505, 2200), kv_len=(8510, 3000)),
        2048,
        None,
    ),
    "sparse, several tiles to a copy": (
        "v5e",
        "sparse",
        dataclasses.replace(LISTED, spec=AttentionSpec(tile=32)),
        4096,
        None,
    ),
    "sparse, tiles one by one": (
        "v6e",
        "sparse",
        dataclasses.replace(LISTED, head_dim=128, spec=AttentionSpec()),
        4096,
        None,
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_shipped_block_sizes_meet_the_oracle(name):
    """The call has more keys than a block of the chip's own size, and more tiles than the 128 of a bank."""
    chip, role, workload, block_s, banks = LARGE[name]
    spec, shapes = workload.role_spec(role), workload.shapes(role, "bfloat16")
    with on_chip(chip):
        config = tuned.config(KERNELS[role], spec, shapes)
    cut = decode_blocks.cut_call(spec, shapes, config.block_s, config.block_heads, config.splits)
    assert cut.block_s == block_s
    assert banks in (None, cut.banks)
    meets_oracle(role, workload, "bfloat16", config)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMISED)
def streamed(cut, selection: Selection):
    found = decode_blocks.list_units(cut, selection)
    return found, decode_blocks.stream_lists(cut, found)


@pytest.mark.parametrize(
    ("tiles", "units", "held"),
    [
        ([3, 9, 10, 31], [0, 1, 3], [{3}, {1, 2}, {7}]),
        ([3, 3, 9, 31], [0, 1, 3], [{3}, {1}, {7}]),
        ([3, 31, 31, 31], [0, 3], [{3}, {7}]),
        ([5, 31, 40, 99], [0, 3], [{5}, {7}]),  # an id past the last tile counts as the last
    ],
)
def test_repeated_ids_name_no_other_tile(tiles, units, held):
    """A unit of 128 keys has one bit per tile, eight in all; a repeated id must not carry into another bit or unit."""
    spec = AttentionSpec(tile=16)
    cut = decode_blocks.cut_call(spec, Shapes(1, 1, 512, 2, 1, 64, 4, "bfloat16"), 256, 1, 1)
    assert cut.tiles_per_unit == 8
    found, stream = streamed(cut, Selection(np.array([[[tiles]]], np.int32), np.full((1, 1, 1), 4, np.int32)))
    entries = np.asarray(stream).ravel()[: len(units)]
    assert int(found.count[0, 0]) == len(units)
    assert (entries >> 8).tolist() == units
    assert [{bit for bit in range(8) if entry >> bit & 1} for entry in entries] == held


def test_lists_longer_than_a_piece(monkeypatch):
    """A list streams through SMEM in pieces; state and buffers carry over from one piece to the next."""
    monkeypatch.setattr(decode_blocks, "PIECE_IDS", 8)
    workload = dataclasses.replace(
        RAGGED,
        batch=2,
        spec=AttentionSpec(tile=16),
        head_dim=128,
        num_keys=320,
        fraction=0.6,
        q_start=(319, 300),
        kv_len=(320, 200),
    )
    shapes = workload.shapes("sparse")
    cut = decode_blocks.cut_call(workload.spec, shapes, 32, 2, 1)
    assert cut.pieces == 3
    calls.compiled.cache_clear()
    meets_oracle("sparse", workload, "float32", tpu_decode.Config(block_s=32, block_heads=2, splits=2))
    calls.compiled.cache_clear()


def plain(batch: int, num_keys: int, kv_len: int) -> Positions:
    return Positions(*(np.full((batch,), x, np.int32) for x in (kv_len - 1, kv_len, 1)))


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNOPTIMISED)
def ranges_and_bytes(cut, positions: Positions, selection: Selection | None):
    """Return each row's key ranges and the bytes copied for them, as `launch` computes both."""
    lists = None if selection is None else decode_blocks.list_units(cut, selection)
    ranges = decode_blocks.find_ranges(cut, positions, lists)
    units = (ranges.hi + cut.unit - 1) // cut.unit - ranges.lo // cut.unit  # copied once each
    return ranges, units.sum() * (2 * cut.unit * cut.head_dim * 2)


def long_call(role: str, head_dim: int, tile: int) -> tuple[AttentionSpec, Shapes]:
    spec = AttentionSpec(tile=tile, mass=role == "score")
    capacity = round(0.1 * 131072 / tile) if role == "sparse" else None
    return spec, Shapes(1, 1, 131072, 32, 8, head_dim, capacity, "bfloat16")


@pytest.mark.parametrize(("role", "limit"), [("dense", 1.05), ("score", 1.05), ("sparse", 1.15)])
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        *((64, 16), (64, 128), (128, 16), (128, 32), (256, 64)),
        *(
            pytest.param(*sizes, marks=pytest.mark.exhaustive)
            for sizes in ((64, 32), (64, 64), (128, 64), (128, 128), (256, 16), (256, 32), (256, 128))
        ),
    ],
)
def test_bytes_moved_are_bytes_needed(role, limit, head_dim, tile):
    """Check 131,072 keys and a length that is no multiple of a block; `executions` must count the bytes copied."""
    spec, shapes = long_call(role, head_dim, tile)
    config = KERNELS[role].default_config(spec, shapes)
    cut = decode_blocks.cut_call(spec, shapes, config.block_s, config.block_heads, config.splits)
    for kv_len in (131072, 130001):
        lists, needed = None, kv_len * 8
        if role == "sparse":
            ids = np.sort(np.random.default_rng(0).permutation(kv_len // tile)[: shapes.capacity - 1])
            ids = np.append(ids, (kv_len - 1) // tile)
            tiles = np.broadcast_to(ids, (1, 8, 1, len(ids))).astype(np.int32)
            lists = Selection(tiles, np.full((1, 8, 1), len(ids), np.int32))
            needed = 8 * int((np.minimum((ids + 1) * tile, kv_len) - ids * tile).sum())
        moved = int(ranges_and_bytes(cut, plain(1, 131072, kv_len), lists)[1]) / (2 * head_dim * 2)
        if head_dim == 64 and role == "sparse" and tile < 128:
            assert moved <= needed * 128 / tile  # keys lie along lanes: a copy is 128 keys wide
        else:
            assert 1 <= moved / needed <= limit
            if kv_len == 131072:
                counted = KERNELS[role].executions(spec, shapes, config)["hbm_bytes"]
                assert counted / KERNELS[role].cost(spec, shapes)["bytes"] <= limit


@pytest.mark.parametrize("role", KERNELS)
def test_every_visible_block_is_visited_once(role):
    """Over all chains and steps, a sequence's blocks are disjoint and cover exactly the keys that it sees."""
    spec, shapes = long_call(role, 128, 128)
    shapes = shapes._replace(batch=3)
    cut = decode_blocks.cut_call(spec, shapes, 512, 4, 3)
    positions = Positions(*(np.array(x, np.int32) for x in ([131071, 5000, 70], [131072, 60000, 0], [1, 1, 1])))
    lists = None
    if role == "sparse":
        tiles = np.broadcast_to(np.arange(shapes.capacity, dtype=np.int32), (3, 8, 1, shapes.capacity))
        count = np.broadcast_to(np.arange(8, dtype=np.int32)[None, :, None], (3, 8, 1)) * 10
        lists = Selection(tiles, count)
    ranges = jax.tree.map(np.asarray, ranges_and_bytes(cut, positions, lists)[0])
    lo, hi = (x.reshape(3, 2, 4) for x in (ranges.lo, ranges.hi))
    first, count = (x.reshape(2, cut.splits, 3) for x in (ranges.first, ranges.count))
    for group, sequence in np.ndindex(2, 3):
        blocks = np.concatenate(
            [np.arange(f, f + c) for f, c in zip(first[group, :, sequence], count[group, :, sequence], strict=True)]
        )
        assert len(set(blocks)) == len(blocks)
        for low, high in zip(lo[sequence, group], hi[sequence, group], strict=True):
            assert high <= low or set(range(low // 512, -(-high // 512))) <= set(blocks)
        assert len(blocks) == -(-hi[sequence, group].max() // 512)


@pytest.mark.parametrize(("change", "reason"), [({"head_dim": 320}, "256"), ({"num_queries": 2}, "one query row")])
def test_refusals(change, reason):
    spec, shapes = long_call("dense", 128, 128)
    assert reason in KERNELS["dense"].refusal(spec, shapes._replace(**change))


def test_single_keys_are_refused():
    for role in ("score", "sparse"):
        spec, shapes = long_call(role, 128, 1)
        assert "tile=1" in KERNELS[role].refusal(spec, shapes)
    assert KERNELS["dense"].refusal(*long_call("dense", 128, 1)) is None
