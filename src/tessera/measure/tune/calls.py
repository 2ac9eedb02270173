"""Draw random inputs for the calls that time candidates, and check the candidates' results."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, Shapes
from tessera.core.shapes import ceil_div

CHECKED_ROWS = 6
"""Number of query rows of a timed call to recompute in float64, including the first and the last."""


class Call(NamedTuple):
    """Arguments of one launch."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: Positions
    selection: Selection | None

    @property
    def arguments(self) -> tuple[jax.Array, KeyValues, Positions, Selection | None]:
        """Array arguments of a kernel's launch; spec and config are static."""
        return self.q, KeyValues.of(self.k, self.v), self.positions, self.selection


def draw(spec: AttentionSpec, shapes: Shapes, seed: int) -> Call:
    """Draw a call's inputs. The queries are at the end of the keys. A sparse call also gets lists of tiles."""
    s, rng = shapes, np.random.default_rng(seed)

    def numbers(*size):
        return jnp.asarray(rng.standard_normal(size, dtype=np.float32)).astype(s.dtype)

    q = numbers(s.batch, s.num_queries, s.num_heads, s.head_dim)
    k, v = (numbers(s.batch, s.num_keys, s.num_kv_heads, s.head_dim) for _ in range(2))
    whole = lambda n: jnp.full((s.batch,), n, jnp.int32)  # noqa: E731
    positions = Positions(whole(s.num_keys - s.num_queries), whole(s.num_keys), whole(s.num_queries))
    return Call(q, k, v, positions, None if s.capacity is None else lists(spec, s, rng))


def lists(spec: AttentionSpec, shapes: Shapes, rng: np.random.Generator) -> Selection:
    """Draw a list per query tile: the last visible key tile, and as many other random visible key tiles as fit."""
    s = shapes
    rows = ceil_div(s.num_queries, spec.query_tile)
    tiles = np.zeros((s.batch, s.num_kv_heads, rows, s.capacity), np.int32)
    count = np.zeros(tiles.shape[:3], np.int32)
    for b, head, i in np.ndindex(count.shape):
        last = min((i + 1) * spec.query_tile, s.num_queries) + s.num_keys - s.num_queries - 1
        num = ceil_div(last + 1 if spec.causal else s.num_keys, spec.tile)
        chosen = rng.permutation(num - 1)[: min(s.capacity, num) - 1]
        count[b, head, i] = len(chosen) + 1
        tiles[b, head, i, : count[b, head, i]] = np.sort(np.append(chosen, num - 1))
    return Selection(jnp.asarray(tiles), jnp.asarray(count))


def fault(spec: AttentionSpec, call: Call, out: AttentionOut, role: str) -> str | None:
    """Compare a few rows of a kernel's result with float64; return a description of the first fault, or None.

    For the role "score", check the masses too.
    """
    num_queries = call.q.shape[1]
    picked = sorted({round(x) for x in np.linspace(0, num_queries - 1, min(CHECKED_ROWS, num_queries))})
    for row in picked:
        one = row_call(spec, call, row)
        truth = oracle.attend(one)
        # A kernel may fold the scale into q and then round q to the dtype.
        allowed = oracle.tolerance(one, truth, str(call.q.dtype), folded=True)
        for name, got, want, limit in (
            ("out", out.out[:, row : row + 1], truth.out, allowed.out),
            ("lse", out.lse[:, row : row + 1], truth.lse, allowed.lse),
        ):
            error = np.abs(np.asarray(got, np.float64) - want).max()
            if not error <= limit:
                return f"{name} of row {row} is off by {error:.3g}; allowed: {limit:.3g}"
    if role == "score":
        return _mass_fault(spec, call, np.asarray(out.mass, np.float64))
    return None


def row_call(spec: AttentionSpec, call: Call, row: int) -> oracle.Call:
    """Return one query row of the call as a separate call."""
    q, k, v = (np.asarray(x) for x in (call.q[:, row : row + 1], call.k, call.v))
    tiles = count = None
    if call.selection is not None:
        i = row // spec.query_tile
        tiles, count = (np.asarray(x[:, :, i : i + 1]) for x in call.selection)
    start, kv_len = np.asarray(call.positions.q_start) + row, np.asarray(call.positions.kv_len)
    names = ("causal", "window", "scale", "softcap", "tile", "query_tile")
    fields = {name: getattr(spec, name) for name in names}
    return oracle.Call(
        q=q, k=k, v=v, q_start=start, kv_len=kv_len, q_len=np.ones_like(start), tiles=tiles, count=count, **fields
    )


def _mass_fault(spec: AttentionSpec, call: Call, mass: np.ndarray) -> str | None:
    """Return a description of the first fault of the masses, or None.

    Every row adds probability 1 to its query tile, so a query tile's masses sum to its number of rows. The last query
    tile is also compared with the oracle, key tile by key tile.
    """
    num_queries, heads, kv_heads = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    sizes = np.diff([*range(0, num_queries, spec.query_tile), num_queries]) * (heads // kv_heads)
    error = np.abs(mass.sum(-1) - sizes).max()
    limit = 2e-2 * sizes.max()
    if not error <= limit:
        return f"the sum of a query tile's masses differs from its number of rows by {error:.3g}; allowed: {limit:.3g}"
    first = (len(sizes) - 1) * spec.query_tile
    rows = [oracle.attend(row_call(spec, call, row)).mass[:, :, 0] for row in range(first, num_queries)]
    error = np.abs(mass[:, :, -1] - sum(rows)).max()
    return None if error <= limit else f"a mass of the last query tile is off by {error:.3g}; allowed: {limit:.3g}"


def held_out(shapes: Shapes, factors: Sequence[float] = (0.5, 1.5)) -> list[Shapes]:
    """Return the call's shapes at other lengths, at which the winner is also compared with the default."""
    found = []
    for factor in factors:
        keys = max(round(shapes.num_keys * factor), 2)
        queries = 1 if shapes.num_queries == 1 else max(round(shapes.num_queries * factor), 2)
        capacity = None if shapes.capacity is None else max(round(shapes.capacity * factor), 1)
        found.append(shapes._replace(num_keys=keys, num_queries=min(queries, keys), capacity=capacity))
    return found
