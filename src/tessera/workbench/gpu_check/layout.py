"""How gathered rows of single keys lie in shared memory, which no interpreter models: every slot asked by its name.

A query tile lists `blocks` times 2 H keys. Of these, 2 H in a row are unit vectors, slot j's is +-e_((j + 8 tile) % H),
the rest are zero; the tile's rows are the unit vectors +-e_r. A row's score is SCALE at one slot, which holds all of
its weight, so out must be that key's values to the last bit: another slot's values name the place where K's row was
found instead, values of no slot mean that V's columns stand elsewhere. From tile to tile the unit vectors move by one
16-byte column: the tiles together ask for every column of every slot, and for every stage of the ring.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention.contract import AttentionSpec, Kernel, Positions, Selection, Shapes
from tessera.workbench.evidence import How
from tessera.workbench.gpu_check import calls

SCALE = 64.0
"""exp(-SCALE) vanishes beside 1 in every dtype."""
TOKENS = 32
"""Of a query tile; 2 H rows are that many times the heads."""
COLUMN = 8
"""Numbers of 16 bits in a 16-byte column."""


def look(kernel: Kernel, head_dim: int, config: object, tiles: int, blocks: int) -> dict:
    """Fields of a record: how many of the tiles' slots answer with other values than their own.

    Raises:
        ValueError: any does; it names the first few.
    """
    seed, key = calls.fresh_key()
    rows, length = 2 * head_dim, 2 * head_dim * blocks
    heads, num_keys, num_queries = rows // TOKENS, length * tiles, TOKENS * tiles
    listed = np.sort(np.random.default_rng(seed).permutation(num_keys).reshape(tiles, length), axis=-1)
    k = np.zeros((num_keys, head_dim), np.float32)
    slots = np.arange(rows)
    units = np.where(slots < head_dim, 1.0, -1.0)[:, None] * np.eye(head_dim)[slots % head_dim]  # [row, H]
    for tile in range(tiles):
        k[listed[tile, first_of(tile, blocks, rows) + slots]] = np.roll(units, COLUMN * tile, axis=1)
    v = np.asarray(jax.random.normal(key, (num_keys, head_dim), jnp.bfloat16), np.float32)
    q = np.tile(units.reshape(heads, TOKENS, head_dim).swapaxes(0, 1), (tiles, 1, 1))[None]
    spec = AttentionSpec(tile=1, query_tile=TOKENS, causal=False, scale=SCALE)
    selection = Selection(jnp.asarray(listed[None, None], jnp.int32), jnp.full((1, 1, tiles), length, jnp.int32))
    positions = Positions(*(jnp.full((1,), n, jnp.int32) for n in (0, num_keys, num_queries)))
    q, k_cache, v_cache = (jnp.asarray(x, jnp.bfloat16) for x in (q, k[None, None], v[None, None]))
    shapes = Shapes(1, num_queries, num_keys, heads, 1, head_dim, length, "bfloat16")
    with calls.machine(kernel):
        found = jax.block_until_ready(
            calls.ready(kernel, spec, shapes, config)(q, k_cache, v_cache, positions, selection)
        )
    out = np.asarray(found.out[0].astype(jnp.float32)).reshape(tiles, TOKENS, heads, head_dim)
    out = out.swapaxes(1, 2).reshape(tiles, rows, head_dim)
    wrong = [said for tile in range(tiles) for said in strangers(tile, out[tile], v[listed[tile]], blocks)]
    off = np.abs(np.asarray(found.lse) - SCALE).max()
    if wrong or not off < 1e-3 * SCALE:
        raise ValueError(f"wrong: {len(wrong)} of {tiles * rows} slots, {'; '.join(wrong[:6])}; lse off by {off:.3g}")
    how = How(check="unit vectors, every slot of a list asked by its name: out is its values to the last bit")
    facts = {"seed": seed, "slots": tiles * rows, "config": str(config)}
    return {"samples": [0.0], "unit": "misplaced slots", "how": how, "facts": facts}


def first_of(tile: int, blocks: int, rows: int) -> int:
    """The first slot of a tile's unit vectors."""
    return tile % blocks * rows


def strangers(tile: int, out: np.ndarray, values: np.ndarray, blocks: int) -> list[str]:
    """The rows of a query tile [2 H, H] that did not get their slot's values, of those [length, H] that are listed."""
    rows, head_dim = out.shape
    said = []
    for row in range(rows):
        # The row's unit vector is that of the slot which, moved by the tile's columns, is the same one.
        sign, column = divmod(row, head_dim)
        slot = first_of(tile, blocks, rows) + sign * head_dim + (column - COLUMN * tile) % head_dim
        if not np.array_equal(out[row], values[slot]):
            same = np.flatnonzero((values == out[row]).all(-1))
            got = f"slot {same[0]}'s values" if same.size else "values of no slot"
            said.append(f"tile {tile} slot {slot} gives {got}")
    return said
