"""Check the layout of gathered single-key rows in shared memory, which no interpreter models, by probing every slot.

A query tile lists `blocks` x 2 H keys, H the head dim; a key's index in the list is its slot. In one run of 2 H slots,
slot j holds the unit vector e_((j + 8 tile) % H), with a minus sign in the second half; all other keys are zero. The
query tile's 2 H rows are the unit vectors +-e_r. So a row scores SCALE at one slot, which gets all of its weight, and
out must equal that slot's values to the last bit. If out holds another slot's values, the kernel read K's row from the
wrong place; if it holds no slot's values, V's columns are misplaced. From tile to tile the unit vectors move by one
16-byte column, so the tiles together probe every column of every slot, and every stage of the ring of buffers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import Kernel
from tessera.workbench.evidence import How
from tessera.workbench.gpu_check import calls

SCALE = 64.0
"""Softmax scale, and a row's score at its slot, where q . k is 1. exp(-SCALE) is negligible in every dtype."""
TOKENS = 32
"""Tokens of a query tile. The tile's 2 H rows are TOKENS x heads."""
COLUMN = 8
"""16-bit numbers in a 16-byte column."""


def look(kernel: Kernel, head_dim: int, config: object, tiles: int, blocks: int) -> dict:
    """Probe every slot of `tiles` query tiles and return a record's fields, with 0 misplaced slots as sample.

    Raises:
        ValueError: a slot is misplaced (the message names the first few), or lse is wrong.
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
    q, *kv = (jnp.asarray(x, jnp.bfloat16) for x in (q, k[None, None], v[None, None]))
    kv = KeyValues(*kv)
    shapes = Shapes(1, num_queries, num_keys, heads, 1, head_dim, length, "bfloat16")
    with calls.machine(kernel):
        found = jax.block_until_ready(calls.ready(kernel, spec, shapes, config)(q, kv, positions, selection))
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
    """Return the first of the 2 H slots that hold a tile's unit vectors."""
    return tile % blocks * rows


def strangers(tile: int, out: np.ndarray, values: np.ndarray, blocks: int) -> list[str]:
    """Describe each misplaced row of out [2 H, H].

    A row attends only to the slot that holds its unit vector, so it must equal that slot's values.
    """
    rows, head_dim = out.shape
    said = []
    for row in range(rows):
        # Undo the tile's shift to find the slot that holds this row's unit vector.
        sign, column = divmod(row, head_dim)
        slot = first_of(tile, blocks, rows) + sign * head_dim + (column - COLUMN * tile) % head_dim
        if not np.array_equal(out[row], values[slot]):
            same = np.flatnonzero((values == out[row]).all(-1))
            got = f"slot {same[0]}'s values" if same.size else "values of no slot"
            said.append(f"tile {tile} slot {slot} gives {got}")
    return said
