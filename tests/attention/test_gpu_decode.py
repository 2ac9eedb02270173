"""Hopper decode kernels beyond the oracle: each key is read once, for any G and any list, and merging is exact."""

import dataclasses
import re
from pathlib import Path

import calls
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, Positions, Shapes
from tessera.attention.gpu import decode as gpu_decode
from tessera.attention.gpu import decode_splits
from tessera.attention.gpu.decode_splits import merge_splits
from tessera.attention.visibility import decode_range
from tessera.attention.workloads import Workload
from tessera.deviceless import programs
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.gpu import compiler as gpu

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
UNEVEN = dataclasses.replace(
    RAGGED,
    batch=3,
    num_keys=1100,
    num_heads=7,
    num_kv_heads=1,
    q_start=(1099, 0, 40),
    kv_len=(1100, 0, 41),
    q_len=(1, 1, 1),
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
    "window and cap": (variant(tile=128, window=150, softcap=2.0), {}, ("dense", "score", "sparse"), "bfloat16"),
    "both ways, large blocks": (
        variant(tile=64, causal=False, head_dim=128),
        {"block_s": 128},
        ("score", "sparse"),
        "bfloat16",
    ),
    "more tiles than a load": (UNEVEN, {"splits": 3}, ("score",), "bfloat16"),
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


REPEATED = {
    ("lengths at every border", "dense"),
    ("more blocks than stages, one split", "score"),
    ("more splits than blocks", "score"),
    ("window and cap", "sparse"),
    ("wide heads", "dense"),
}
"""(variant, role) pairs whose features other pairs cover too; these run in the exhaustive suite only."""


def cases():
    for name, (*_, roles, _) in VARIANTS.items():
        for role in roles:
            marks = [pytest.mark.exhaustive] if (name, role) in REPEATED else []
            yield pytest.param(name, role, id=f"{name}-{role}", marks=marks)


@pytest.mark.parametrize(("name", "role"), list(cases()))
def test_variants_meet_the_oracle(name, role):
    workload, sizes, _, dtype = VARIANTS[name]
    clip = {"q_start": (workload.num_keys - 11,), "kv_len": (workload.num_keys - 10,)} if workload.batch == 1 else {}
    call = calls.make(dataclasses.replace(workload, **clip), role, dtype)
    meets_oracle(role, call, dtype, gpu_decode.Config(**({"block_s": 64, "stages": 2, "splits": 2} | sizes)))


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize("listed", ["none", "one", "all"])
def test_lists_of_none_one_and_all_tiles(tile, listed):
    """Entries past count hold ids outside the cache, which must not be read."""
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
    """Together the splits visit each block with a visible key or listed tile once, in order, and no other."""
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
        assert len({int(run.count) for run in runs} - {0}) <= 2  # whole blocks cannot be split more evenly


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("block_s", [64, 128])
def test_only_listed_entries_are_read(tile, block_s):
    """No entry past count is read; the kernel copies the listed keys and sees the visible ones among them."""
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


@pytest.mark.parametrize("splits", [1, 35, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 16))])
def test_merging_is_exact_to_rounding(splits):
    """Compare with float64, with empty splits, rows empty in every split, and sizes that do not fill a thread block."""
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


# sequences' keys, query heads of each of 2 KV heads, tile, keys of a block, window
PIECES = {
    "fewer tiles than a load": ((600, 599, 0, 1), 4, 16, 64, None),
    "a last load that ends with the tiles": ((4500, 0, 63, 1030), 7, 16, 64, None),
    "units of a tile, an odd last one": ((12_900,), 1, 128, 64, None),
    "as many rows as are stored": ((4500, 1024), 16, 32, 128, 700),
    "two products": ((9000,), 71, 64, 128, 100),
    "a window over one load": ((2200, 300), 4, 16, 64, 1000),
}


def mass_of(bank, lse, cut, positions):
    """Compute the mass that the merge must return: 2^(bank - lse), summed over G rows and each tile's units; 0 if
    unread.

    bank [B,K,parts,units,rows] is log2 of each unit's sum of exponentials; lse [B,K,G] is log2 of the sum over all
    keys.
    """
    start, stop = decode_range(cut.spec, positions, cut.shapes.num_keys)
    first = jnp.arange(cut.banked, dtype=jnp.int32) * cut.unit
    read = (first + cut.unit > start[:, None]) & (first < stop[:, None])
    bits = jnp.swapaxes(bank, -1, -2).reshape(*lse.shape[:2], -1, cut.banked)[:, :, : cut.groups]
    mass = jnp.where(read[:, None, None], jnp.exp2(bits - lse[..., None]), 0.0)
    tiles = -(-cut.shapes.num_keys // cut.spec.tile)
    per_tile = cut.spec.tile // cut.unit
    mass = jnp.pad(mass, [(0, 0)] * 3 + [(0, max(tiles * per_tile - cut.banked, 0))])[..., : tiles * per_tile]
    return mass.reshape(*mass.shape[:3], tiles, per_tile).sum((2, 4))[:, :, None]


REPEATED_PIECES = {"units of a tile, an odd last one", "a window over one load"}
"""Exhaustive only: "two products" also has units of a tile, an odd number of units, and a window over several loads."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] if n in REPEATED_PIECES else []) for n in PIECES]
)
def test_masses_are_those_of_the_bank(name):
    """Units that no row sees hold NaN in the bank; their mass must be 0."""
    lengths, groups, tile, block_s, window = PIECES[name]
    shapes = Shapes(len(lengths), 1, max(lengths), 2 * groups, 2, 64, None, "bfloat16")
    cut = decode_splits.Cut("score", AttentionSpec(tile=tile, window=window, mass=True), shapes, block_s, 18)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in ([n - 1 for n in lengths], lengths, [1] * len(lengths))))
    lead, rng = (len(lengths), 2, cut.parts), np.random.default_rng(0)
    bank = rng.standard_normal((*lead, decode_splits.stored_units(cut), cut.rows)).astype(np.float32)
    start, stop = (np.asarray(x)[:, None] for x in decode_range(cut.spec, positions, shapes.num_keys))
    first = np.arange(bank.shape[3]) * cut.unit
    hidden = (first + cut.unit <= start) | (first >= stop)
    np.moveaxis(bank, 3, 1)[hidden] = np.nan
    totals = rng.standard_normal((cut.splits, *lead, cut.rows)).astype(np.float32)
    totals[rng.random(totals.shape) < 0.3] = -np.inf
    out = jnp.zeros((cut.splits, *lead[:2], groups, 1))
    lse = np.log2(np.exp2(totals).sum(0)).reshape(*lead[:2], -1)[..., :groups]
    with calls.machine(KERNELS["score"]):
        found = decode_splits.merge_and_weigh(
            out, out, jnp.asarray(bank), jnp.asarray(totals), cut, positions, "float32"
        )
        mass = np.asarray(found[2])
    exact = np.asarray(mass_of(jnp.asarray(bank[:, :, :, : cut.banked]), jnp.asarray(lse), cut, positions))
    assert mass.shape == (*lead[:2], 1, cut.tiles)
    assert np.count_nonzero(exact) > 0
    np.testing.assert_allclose(mass, exact, rtol=1e-5)


LLAMA = Shapes(1, 1, 131072, 32, 8, 128, None, "bfloat16")


def layer(shapes: list, tile: int):
    """Build a scoring call for the compiler: head-major arrays in, only out and mass returned, as in a layer."""
    spec = AttentionSpec(tile=tile, mass=True)
    call, arguments, about = programs.attention_call(
        "gpu_decode_score", dataclasses.asdict(spec), Shapes(*shapes)._asdict()
    )

    def taken(*arguments):
        result = call(*arguments)
        return result.out, result.mass

    return taken, arguments, about


def launches(program: str) -> list[str]:
    """List what a compiled program launches on the GPU, in order: our kernels by name, other operations by kind."""
    found = re.findall(r"^ +(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([a-z-]+)\((.*)$", program[program.index("ENTRY") :], re.M)
    free = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
    ours = r'custom_call_target="mosaic_gpu.*op_name="[^"]*?/(\w+)/mpmd_map'
    names = [(kind, re.search(ours, rest)) for kind, rest in found if kind not in free]
    return [name[1] if name else kind for kind, name in names]


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        pytest.param({}, 128, marks=pytest.mark.exhaustive),
        pytest.param({"batch": 4}, 128, marks=pytest.mark.exhaustive),
        ({"batch": 4, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "num_keys": 1536}, 128),
    ],
    ids=["one sequence", "four", "four, seven heads a group, twelve tiles"],
)
def test_scoring_takes_two_launches(change, tile):
    """Scoring launches the kernel and the merge, which also writes the masses; XLA adds no launch."""
    shapes = LLAMA._replace(**change)
    program = factory_program(f"{__name__}:layer", shapes=list(shapes), tile=tile)
    found = gpu.compile_for("h200", program, paths=list(map(str, Path(__file__).parents[:2])))
    assert found.error is None
    assert launches(found.program) == ["gpu_decode_score", "gpu_merge_mass"]


@pytest.mark.parametrize("role", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch", [1, 16])
def test_the_default_fills_the_chip(role, head_dim, batch):
    """One sequence is one wave of equal splits, enough bytes are in flight, and every config fits shared memory."""
    spec = AttentionSpec(tile=64, mass=role == "score")
    shapes = LLAMA._replace(batch=batch, head_dim=head_dim, capacity=205 if role == "sparse" else None)
    config = gpu_decode.default_config(spec, shapes)
    cut = gpu_decode.cut_call(spec, shapes, config)
    resident = gpu_decode.resident(cut, config)
    assert resident * config.stages * 4 * 64 * head_dim >= 64 * 1024 * gpu_decode.MULTIPROCESSORS
    if batch == 1:
        assert config.splits * 8 <= resident
        assert role == "sparse" or config.splits * 8 >= 0.9 * resident
    space = list(gpu_decode.search_space(spec, shapes))
    assert config in space
    assert len(set(space)) == len(space)
    sizes = [gpu_decode.shared_bytes(gpu_decode.cut_call(spec, shapes, c), c) for c in space]
    assert max(sizes) <= gpu_decode.SHARED_BYTES


@pytest.mark.parametrize(
    ("role", "change", "reason"),
    [
        ("dense", {"head_dim": 96}, "head_dim=96"),
        ("dense", {"num_queries": 2}, "one query row"),
        ("dense", {"dtype": "float32"}, "float32"),
        ("score", {"tile": 1}, "tile=1"),
        ("sparse", {"tile": 1, "capacity": 205}, "tile=1"),
    ],
)
def test_refusals(role, change, reason):
    change = dict(change)
    spec = AttentionSpec(tile=change.pop("tile", 64), mass=role == "score")
    assert reason in KERNELS[role].refusal(spec, LLAMA._replace(**change))


@pytest.mark.parametrize("change", [{"block_s": 96}, {"stages": 0}, {"splits": 0}])
def test_configs_are_checked(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        gpu_decode.Config(**({"block_s": 64, "stages": 2, "splits": 2} | change))
