"""Hopper's sparse prefill kernels beyond the oracle over the catalogue: lists of every length, padding, lowering."""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_subjects import lowering_error

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.gpu import keys as gpu_keys
from tessera.attention.gpu import sparse as gpu_sparse
from tessera.attention.gpu import sparse_rows
from tessera.attention.gpu.sparse_rows import Config
from tessera.attention.gpu.warpgroup import SHARED_BYTES
from tessera.deviceless.compiler import attention_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import gates, sass

(SPARSE,), (KEYS,) = gpu_sparse.KERNELS, gpu_keys.KERNELS
TILE, QUERY_TILE, NUM_KEYS, KV_LEN = 16, 32, 400, 391
RUBBISH = 1 << 29


@functools.cache
def lists_of_every_length(tile: int = TILE) -> oracle.Call:
    """Build a call whose query tiles list one tile, all, none and half; entries past count or kv_len are garbage."""
    rng = np.random.default_rng(0)
    store, num_tiles = oracle.DTYPES["bfloat16"], -(-NUM_KEYS // tile)
    q = rng.standard_normal((1, 4 * QUERY_TILE, 4, 64)).astype(store)
    k, v = (rng.standard_normal((1, NUM_KEYS, 1, 64)).astype(store) for _ in range(2))
    k[:, KV_LEN:] = v[:, KV_LEN:] = np.nan
    listed = [[num_tiles // 2], range(num_tiles), [], range(0, num_tiles, 2)]
    tiles = np.full((1, 1, 4, num_tiles + 3), RUBBISH)
    for i, ids in enumerate(listed):
        tiles[0, 0, i, : len(ids)] = ids
    count = np.array([[[len(ids) for ids in listed]]])
    start, kv_len, q_len = np.array([NUM_KEYS - 4 * QUERY_TILE]), np.array([KV_LEN]), np.array([4 * QUERY_TILE])
    return oracle.Call(q, k, v, start, kv_len, q_len, True, None, None, None, tile, QUERY_TILE, tiles, count)


def meets_oracle(kernel, call: oracle.Call, config: Config) -> None:
    answer = oracle.attend(call)
    allowed = oracle.tolerance(call, answer, "bfloat16")
    result = calls.run(kernel, call, "bfloat16", config)
    empty = np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), empty)
    assert np.all(result.out[empty] == 0)
    assert np.abs(result.lse[~empty] - answer.lse[~empty]).max() <= 2 * allowed.lse  # the sums run in another order


@pytest.mark.parametrize("config", [Config(rows=64, block_s=64, stages=2), Config(rows=64, block_s=128, stages=3)])
def test_lists_longer_and_shorter_than_the_pipeline(config):
    """Seven blocks through two stages, a single tile, no tile, and a block that is only partly listed."""
    meets_oracle(SPARSE, lists_of_every_length(), config)


def test_two_row_blocks_of_a_warpgroup():
    """Seven heads x 24 tokens fill 168 of 256 rows, so the last 64 rows are empty; tiles are longer than a block."""
    call = lists_of_every_length(128)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 96, 7, 64)).astype(call.q.dtype)
    call = call._replace(q=q, query_tile=24, q_len=np.array([90]), softcap=3.0)
    meets_oracle(SPARSE, call, Config(rows=128, block_s=64, stages=2))


def test_single_keys_are_their_tiles():
    """Listing every key of the listed tiles gives the tiles' result."""
    call = lists_of_every_length()
    keys = np.full((1, 1, 4, NUM_KEYS + 5), RUBBISH)
    count = np.minimum(call.count * TILE, NUM_KEYS)
    for i in range(4):
        listed = (call.tiles[0, 0, i, : call.count[0, 0, i], None] * TILE + np.arange(TILE)).reshape(-1)
        keys[0, 0, i, : count[0, 0, i]] = listed[listed < NUM_KEYS]
    call = call._replace(tiles=keys, count=count, tile=1)
    rows = slice(2 * QUERY_TILE, None)  # half the rows: the simulation copies row by row, which takes seconds
    call = call._replace(
        q=call.q[:, rows],
        tiles=keys[:, :, 2:],
        count=count[:, :, 2:],
        q_start=call.q_start + 2 * QUERY_TILE,
        q_len=np.array([2 * QUERY_TILE]),
        window=150,
    )
    meets_oracle(KEYS, call, Config(rows=64, block_s=64, stages=3))


def test_a_dropped_tile_is_seen():
    """A kernel that drops each list's last tile exceeds the tolerance more than 100 times."""
    call = lists_of_every_length()._replace(causal=False)
    short = call._replace(count=np.maximum(call.count - 1, 0))
    answer, allowed = oracle.attend(call), oracle.tolerance(call, oracle.attend(call), "bfloat16")
    result = calls.run(SPARSE, short, "bfloat16", Config(rows=64, block_s=64, stages=2))
    for i in (0, 1, 3):
        rows = slice(i * QUERY_TILE, (i + 1) * QUERY_TILE)
        wrong = np.abs(np.nan_to_num(result.lse, neginf=-99) - answer.lse)[:, rows]
        assert wrong.max() > 100 * allowed.lse


def test_padding_is_cleared(monkeypatch):
    """If the kernel does not zero values past kv_len, their NaN reach the output as 0 * NaN."""
    call = lists_of_every_length()
    whole = gpu_sparse.padding_of

    def none(refs, item, cut):
        padding = whole(refs, item, cut)
        return padding._replace(some=padding.some & (padding.stop < 0))

    monkeypatch.setattr(gpu_sparse, "padding_of", none)
    calls.compiled.cache_clear()
    result = calls.run(SPARSE, call, "bfloat16", Config(rows=64, block_s=64, stages=2))
    calls.compiled.cache_clear()
    assert np.isnan(result.out).any()


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 37)])
@pytest.mark.parametrize("tile", [1, 16, 128])
def test_bounds_are_what_the_rows_see(tile, causal, window):
    """Compare the range of visible units, and of units that all rows see in full, with every (row, key) pair."""
    rng = np.random.default_rng(3)
    spec = AttentionSpec(tile=tile, query_tile=24, causal=causal, window=window)
    shapes = Shapes(4, 60, 700, 4, 1, 64, 9, "bfloat16")
    cut = sparse_rows.cut_call(spec, shapes, Config(block_s=64))
    q_start, kv_len, q_len = np.array([640, -10, 300, 0]), np.array([700, 690, 333, 0]), np.array([60, 60, 30, 0])
    tiles = np.sort(rng.permuted(np.tile(np.arange(-(-700 // tile))[: 40 * 9], (4, 1, 3, 1)), axis=-1)[..., :9], -1)
    count = rng.integers(0, tiles.shape[-1] + 1, (4, 1, 3))
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (q_start, kv_len, q_len)))
    selection = Selection(jnp.asarray(tiles, jnp.int32), jnp.asarray(count, jnp.int32))
    bounds = np.asarray(sparse_rows.bounds_of(selection, positions, cut))
    for b, _, i in np.ndindex(4, 1, 3):
        found = sparse_rows.ListBounds(*bounds[b, 0, i])
        rows = np.arange(i * 24, min((i + 1) * 24, q_len[b])) + q_start[b]
        first_keys = [t * tile + u for t in tiles[b, 0, i, : count[b, 0, i]] for u in range(0, tile, cut.unit)]
        keys = np.add.outer(np.array(first_keys, int), np.arange(cut.unit))[:, :, None]
        sees = np.broadcast_to(keys < kv_len[b], (*keys.shape[:2], len(rows)))
        sees = sees & (keys <= rows) if causal else sees
        sees = sees & (keys > rows - window) if window else sees
        some, whole = sees.any((1, 2)), sees.all((1, 2)) & (len(rows) > 0)
        at = np.arange(len(some))
        assert not some[(at < found.begin) | (at >= found.end)].any()
        read = (at >= found.begin) & (at < found.end)
        assert np.array_equal(read & (at >= found.whole_from) & (at < found.whole_to), read & whole)


def test_swizzled_places():
    """TMA and wgmma XOR bits 4 to 6 of a byte offset with bits 7 to 9; no two elements share a place."""
    for columns in (8, 16):
        row, column = np.divmod(np.arange(64 * columns), columns)
        piece = (row // 8) * (columns // 8) + column // 8
        offset = 1024 * piece + 128 * (row % 8) + 16 * (column % 8)
        expected = offset ^ (((offset >> 7) & 7) << 4)
        assert np.array_equal(16 * gpu_keys.place_of(row, column, columns), expected)
        assert len(set(expected)) == len(row)


def covering(*chosen):
    """Yield both kernels with each value; by default tiles of 32 run the first half, single keys the second."""
    half = len(chosen) // 2
    for kernel, tile, name, by_default in ((SPARSE, 32, "tiles", chosen[:half]), (KEYS, 1, "keys", chosen[half:])):
        for value in chosen:
            marks = [] if value in by_default else [pytest.mark.exhaustive]
            yield pytest.param(kernel, tile, value, id=f"{name}-{value}", marks=marks)


@pytest.mark.parametrize(("kernel", "tile", "causal"), list(covering(True, False)))
def test_odd_lengths_lower_for_hopper(kernel, tile, causal):
    """Lower what the interpreter does not check: copies by single threads, and the lengths that TMA accepts."""
    spec = AttentionSpec(tile=tile, query_tile=32, causal=causal)
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16) for tokens, heads in ((50, 4), (203, 1)))
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    positions, lists = (
        Positions(whole((1,)), whole((1,)), whole((1,))),
        Selection(whole((1, 1, 2, 40)), whole((1, 1, 2))),
    )

    def call(q, k, v, positions, lists):
        return kernel.launch(q, KeyValues.of(k, v), spec, positions, lists, Config(rows=64, block_s=64, stages=3))

    lowered = jax.jit(call).trace(q, k, k, positions, lists).lower(lowering_platforms=("cuda",))
    assert kernel.name in lowered.as_text()


@pytest.mark.parametrize(("kernel", "tile", "query_tile"), list(covering(12, 100, 20, 1)))
def test_odd_query_tiles_lower_for_hopper(kernel, tile, query_tile):
    """Several query tiles, or one longer than the call; TMA needs each tile to begin at a multiple of 8 rows."""
    spec, shapes = AttentionSpec(tile=tile, query_tile=query_tile), Shapes(1, 50, 208, 4, 1, 128, 5, "bfloat16")
    assert lowering_error(attention_program(kernel.name, spec, shapes)) is None


def test_softcap_is_not_the_chips_own_tanh(monkeypatch):
    """MUFU.TANH is accurate to 11 bits; tanh from exp2 and a quotient is accurate to float32."""
    monkeypatch.setattr(sass, "WIDE", ("MUFU",))
    spec, shapes = AttentionSpec(tile=64, query_tile=32, softcap=30.0), Shapes(1, 1024, 1024, 4, 1, 128, 5, "bfloat16")
    found = gpu.compile_for("h200", attention_program(SPARSE.name, spec, shapes))
    assert found.error is None, found.error
    assert gates.broken_program(found.kernels) == []
    [report] = found.kernels
    assert {name for name in report.instructions if name.startswith("MUFU.")} == {"MUFU.EX2", "MUFU.RCP", "MUFU.LG2"}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("groups", [1, 4, 7, 16])
def test_search_spaces_fit_shared_memory(head_dim, groups):
    shapes = Shapes(1, 4096, 4096, groups, 1, head_dim, 26, "bfloat16")
    for tile, query_tile in ((16, 32), (64, 64), (128, 32)):
        spec = AttentionSpec(tile=tile, query_tile=query_tile)
        configs = list(gpu_sparse.search_space(spec, shapes))
        assert gpu_sparse.default_config(spec, shapes) in configs
        assert all(sparse_rows.cut_call(spec, shapes, c).smem_bytes <= SHARED_BYTES for c in configs)


@pytest.mark.parametrize(
    ("kernel", "changes", "said"),
    [
        (SPARSE, {"head_dim": 96}, "head_dim=96"),
        (SPARSE, {"dtype": "float32"}, "dtype float32"),
        (SPARSE, {"tile": 1}, "tile=1"),
        (SPARSE, {"head_dim": 256, "window": 64}, "registers"),
        (SPARSE, {"scale": -1.0}, "scale=-1.0"),
        (KEYS, {"tile": 16}, "tile=16"),
        (KEYS, {"head_dim": 256, "tile": 1}, "head_dim=256"),
    ],
)
def test_refusals_name_the_value(kernel, changes, said):
    shapes = Shapes(1, 64, 256, 4, 1, 128, 4, "bfloat16")
    shapes = shapes._replace(**{name: value for name, value in changes.items() if name in Shapes._fields})
    spec = AttentionSpec(**{"tile": 64} | {n: value for n, value in changes.items() if n not in Shapes._fields})
    assert said in kernel.refusal(spec, shapes)
