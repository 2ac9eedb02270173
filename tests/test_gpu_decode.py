"""What the Hopper decode kernels promise beyond the oracle: every key once, any G, any list, exact merging."""

import dataclasses

import calls
import jax.numpy as jnp
import numpy as np
import pytest

from tessera import oracle
from tessera.attention import decode_splits, gpu_decode
from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.split_merge import merge_splits
from tessera.workloads import Workload

KERNELS = {kernel.role: kernel for kernel in gpu_decode.KERNELS}
LENGTHS = (300, 0, 1, 63, 64, 65, 128)
RAGGED = Workload(
    name="every_border",
    batch=len(LENGTHS),
    num_queries=1,
    num_keys=300,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    spec=AttentionSpec(tile=16),
    fraction=0.6,
    q_start=tuple(max(n - 1, 0) for n in LENGTHS),
    kv_len=LENGTHS,
    q_len=(1, 1, 1, 1, 1, 0, 1),
    tags=("hopper", "decode"),
)
LONG = dataclasses.replace(RAGGED, batch=1, num_keys=460, q_start=(449,), kv_len=(450,), q_len=(1,))


def variant(workload=LONG, *, tile=16, window=None, softcap=None, causal=True, **sizes) -> Workload:
    spec = AttentionSpec(tile=tile, window=window, softcap=softcap, causal=causal)
    return dataclasses.replace(workload, spec=spec, **sizes)


# name -> workload, config beyond two blocks of 64 keys on their way and two splits, roles, dtype
VARIANTS = {
    "lengths at every border": (RAGGED, {}, ("dense", "score", "sparse"), "bfloat16"),
    "more blocks than stages, one split": (LONG, {"splits": 1}, ("dense", "score", "sparse"), "float16"),
    "more splits than blocks": (variant(tile=64), {"splits": 9}, ("score", "sparse"), "bfloat16"),
    "as a model does not store it": (variant(tile=32), {"head_major": False}, ("dense", "sparse"), "bfloat16"),
    "window and cap": (variant(tile=128, window=150, softcap=2.0), {}, ("dense", "score", "sparse"), "bfloat16"),
    "both ways, large blocks": (
        variant(tile=64, causal=False, head_dim=128),
        {"block_s": 128},
        ("score", "sparse"),
        "bfloat16",
    ),
    "more heads than a product": (variant(num_heads=71, num_kv_heads=1, num_keys=130), {}, ("score",), "bfloat16"),
    "heads not in eights": (variant(num_heads=12, num_kv_heads=1, num_keys=130), {}, ("dense",), "bfloat16"),
    "wide heads": (variant(tile=128, head_dim=256, num_heads=1, num_kv_heads=1), {}, ("dense", "sparse"), "bfloat16"),
}


def meets_oracle(role: str, call: oracle.Call, dtype: str, config: gpu_decode.Config) -> None:
    answer = oracle.attend(call)
    allowed = oracle.tolerance(call, answer, dtype)
    result = calls.run(KERNELS[role], call, dtype, config)
    empty = np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), empty)
    assert np.all(result.out[empty] == 0)
    assert np.abs(result.lse[~empty] - answer.lse[~empty]).max(initial=0) <= allowed.lse
    assert role != "score" or np.abs(result.mass - answer.mass).max() <= allowed.mass


def cases():
    for name, (*_, roles, _) in VARIANTS.items():
        for role in roles:
            yield pytest.param(name, role, id=f"{name}-{role}")


@pytest.mark.parametrize(("name", "role"), list(cases()))
def test_variants_meet_the_oracle(name, role):
    workload, sizes, _, dtype = VARIANTS[name]
    clip = {"q_start": (workload.num_keys - 11,), "kv_len": (workload.num_keys - 10,)} if workload.batch == 1 else {}
    call = calls.make(dataclasses.replace(workload, **clip), role, dtype)
    meets_oracle(role, call, dtype, gpu_decode.Config(**({"block_s": 64, "stages": 2, "splits": 2} | sizes)))


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("listed", ["none", "one", "all"])
def test_lists_of_none_one_and_all_tiles(tile, listed):
    """Entries past count point anywhere, also where there is no memory."""
    workload = variant(tile=tile, num_keys=320, num_heads=2, q_start=(319,), kv_len=(320,))
    call = calls.make(workload, "sparse", "bfloat16")
    number = workload.num_key_tiles
    count = {"none": 0, "one": 1, "all": number}[listed]
    tiles = np.full((1, 2, 1, number + 1), 2**30)
    tiles[..., :count] = np.arange(number)[-count:] if count else 0
    call = call._replace(tiles=tiles, count=np.full((1, 2, 1), count))
    meets_oracle("sparse", call, "bfloat16", gpu_decode.Config(block_s=64, stages=2, splits=2))


SPEC = AttentionSpec(tile=16, window=500)


@pytest.mark.parametrize("role", KERNELS)
@pytest.mark.parametrize("spec", [AttentionSpec(tile=16), SPEC, AttentionSpec(tile=128)], ids=["all", "window", "wide"])
@pytest.mark.parametrize("splits", [1, 3, 33])
def test_runs_cover_every_block_once(role, spec, splits):
    """Over the splits: disjoint, in order, every block that holds a visible key or a listed tile, nothing else."""
    cut = decode_splits.Cut(role, spec, Shapes(1, 1, 4000, 8, 2, 128, 40, "bfloat16"), 64, splits)
    for kv_len in (0, 1, 63, 64, 65, 3999, 4000, 5000):
        positions = Positions(*(jnp.int32(n) for n in (kv_len - 1, kv_len, 1)))
        runs = [decode_splits.find_run(cut, jnp.int32(n), positions, 7) for n in range(splits)]
        blocks = [int(run.first) + i for run in runs for i in range(int(run.count))]
        stop = min(kv_len, 4000)
        start = 0 if spec.window is None else max(kv_len - spec.window, 0)
        first, last = start // 64, -(-stop // 64)
        if role == "sparse":
            first, last = 0, -(-7 * spec.tile // 64) if kv_len else 0
        assert blocks == list(range(first, last) if stop > start else ())
        assert len({int(run.count) for run in runs} - {0}) <= 2  # as even as whole blocks allow


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("block_s", [64, 128])
def test_only_listed_entries_are_read(tile, block_s):
    """No entry past count is looked at; what is copied is the listed keys, and what is seen of them."""
    cut = decode_splits.Cut(
        "sparse", AttentionSpec(tile=tile), Shapes(1, 1, 4096, 8, 2, 128, 40, "bfloat16"), block_s, 1
    )
    ids, kv_len = np.array([0, 3, 4, 9, 11, 4000 // tile]), 4001
    positions, entries, seen = Positions(*(jnp.int32(n) for n in (kv_len - 1, kv_len, 1))), set(), []
    run = decode_splits.find_run(cut, jnp.int32(0), positions, len(ids))

    def tile_at(entry):
        entries.add(int(entry))
        return jnp.int32(ids[int(entry)])

    copied = 0
    for block in range(int(run.count)):
        starts = decode_splits.unit_starts(cut, run, jnp.int32(block), tile_at)
        lo, hi = decode_splits.visible_columns(cut, run, jnp.int32(block), starts)
        keys = np.concatenate([np.arange(int(start), int(start) + cut.unit) for start in starts])
        seen += keys[int(lo) : int(hi)].tolist()
        copied += len(keys)
    assert entries == set(range(len(ids)))
    assert seen == [key for i in ids for key in range(i * tile, (i + 1) * tile) if key < kv_len]
    assert copied < len(ids) * tile + block_s


@pytest.mark.parametrize("splits", [1, 2, 16, 35])
def test_merging_is_exact_to_rounding(splits):
    """Against float64, empty splits and rows that no split saw included; sizes that fill no block of threads."""
    rng = np.random.default_rng(0)
    out = rng.standard_normal((splits, 3, 40)).astype(np.float32)
    lse = np.repeat(30 * rng.standard_normal((splits, 3, 1)), 40, -1).astype(np.float32)
    empty = rng.random((splits, 3)) < 0.3
    empty[:, 2] = True
    lse[empty], out[empty] = -np.inf, 0
    with calls.machine(KERNELS["dense"]):
        got = merge_splits(jnp.asarray(out), jnp.asarray(lse), "float32")
        merged, total = (np.asarray(x) for x in got)
    weight = np.exp2(lse.astype(np.float64))
    exact = (weight * out).sum(0) / np.where(weight.sum(0) > 0, weight.sum(0), 1)
    assert np.abs(merged - exact).max() < 1e-5
    assert np.array_equal(np.isneginf(total), weight.sum(0) == 0)
    some = weight.sum(0) > 0
    assert np.abs(total[some] - np.log2(weight.sum(0)[some])).max() < 1e-4


LLAMA = Shapes(1, 1, 131072, 32, 8, 128, None, "bfloat16")


@pytest.mark.parametrize("role", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch", [1, 16])
def test_the_default_fills_the_chip(role, head_dim, batch):
    """One sequence is one wave of equal splits; enough bytes are on their way; every config fits."""
    spec = AttentionSpec(tile=64, mass=role == "score")
    shapes = LLAMA._replace(batch=batch, head_dim=head_dim, capacity=205 if role == "sparse" else None)
    config = gpu_decode.default_config(role, spec, shapes)
    cut = gpu_decode.cut_call(role, spec, shapes, config)
    resident = gpu_decode.resident(cut, config)
    assert resident * config.stages * 4 * 64 * head_dim >= 64 * 1024 * gpu_decode.MULTIPROCESSORS
    if batch == 1:
        assert config.splits * 8 <= resident
        assert role == "sparse" or config.splits * 8 >= 0.9 * resident
    space = list(gpu_decode.search_space(role, spec, shapes))
    assert config in space
    assert len(set(space)) == len(space)
    sizes = [gpu_decode.shared_bytes(gpu_decode.cut_call(role, spec, shapes, c), c) for c in space]
    assert max(sizes) <= gpu_decode.SHARED_BYTES


@pytest.mark.parametrize(
    ("role", "change", "reason"),
    [
        ("dense", {"head_dim": 96}, "head_dim=96"),
        ("dense", {"num_queries": 2}, "one query row"),
        ("dense", {"dtype": "float32"}, "float32"),
        ("score", {"tile": 1}, "tile=1"),
        ("sparse", {"tile": 1}, "tile=1"),
    ],
)
def test_refusals(role, change, reason):
    change = dict(change)
    spec = AttentionSpec(tile=change.pop("tile", 64), mass=role == "score")
    assert reason in KERNELS[role].supports(spec, LLAMA._replace(**change))


@pytest.mark.parametrize("change", [{"block_s": 96}, {"stages": 0}, {"splits": 0}])
def test_configs_are_checked(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        gpu_decode.Config(**({"block_s": 64, "stages": 2, "splits": 2} | change))
