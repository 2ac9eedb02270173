"""Check where the kernel for single keys puts gathered rows in shared memory. No interpreter models that layout.

H is the head dim. A query tile lists `blocks` x 2 H keys. A key's index in this list is its slot. In 2 H consecutive
slots, K holds unit vectors: number j is e_((j + 8 tile) % H), negated if j >= H. All other keys are zero. The query
tile has 2 H rows: e_0, e_1, ... and their negatives. Each row therefore scores SCALE at exactly one slot, puts all its
weight on that slot, and must return the slot's V to the last bit. If it returns another slot's V, the kernel read the
row of K from the wrong place. If it returns the V of no slot, V's columns are misplaced. From one query tile to the
next, the unit vectors move by one 16-byte column. The tiles together thus probe every column of every slot, and every
stage of the ring of buffers.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lab.gpu import calls
from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.attention.kernel import Kernel
from tessera.measure.evidence import How

SCALE = 64.0
"""Softmax scale, and thus a row's score at the slot where q . k is 1. exp(-SCALE) is negligible in every dtype."""
TOKENS = 32
"""Tokens per query tile. A query tile has TOKENS x query heads rows."""
COLUMN = 8
"""16-bit numbers in a 16-byte column."""


def look(kernel: Kernel, head_dim: int, config: object, tiles: int, blocks: int) -> dict:
    """Probe every slot of `tiles` query tiles; return the fields of a record that counts 0 misplaced slots.

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
        said = f"wrong: {len(wrong)} of {tiles * rows} slots are misplaced; lse is off by {off:.3g}"
        raise ValueError("; ".join((said, *wrong[:6])))
    how = How(check="a unit vector at each slot in turn: out equals that slot's values to the last bit")
    facts = {"seed": seed, "slots": tiles * rows, "config": str(config)}
    return {"samples": [0.0], "unit": "misplaced slots", "how": how, "facts": facts}


def first_of(tile: int, blocks: int, rows: int) -> int:
    """Return the first of the `rows` consecutive slots that hold a query tile's unit vectors."""
    return tile % blocks * rows


def strangers(tile: int, out: np.ndarray, values: np.ndarray, blocks: int) -> list[str]:
    """Describe each misplaced row of a query tile's out, [rows, head dim].

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
