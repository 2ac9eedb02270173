"""Check answers to calls of any length: the reference kernel recomputes some query tiles in float32 on the same device.

Tolerances are in units in the last place of the dtype (UNIT). For out, |error| / |row| may be 2 units, since weights
and output are each rounded by half a unit. For lse, |error| may be 1 unit, since a kernel may sum rounded weights. For
the mass, |error| / |mass| may be 8 units, since a kernel may keep its logarithms in half precision.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tessera.attention import reference
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection
from tessera.core.shapes import ceil_div

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ALLOWED = {"out": 2.0, "lse": 1.0, "mass": 8.0}
"""Tolerance of each part of an answer, in units in the last place of the dtype (UNIT)."""


@partial(jax.jit, static_argnames="spec")
def errors(spec: AttentionSpec, q, k, v, positions: Positions, selection: Selection | None, found: AttentionOut):
    """Return each part's error: out's worst |error| / |row|, lse's worst |error|, and |error| / |mass| for the mass.

    A part that holds NaN has error NaN. A part that `found` lacks is left out.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    expected = reference.attend(q, KeyValues.of(k, v), spec, positions, selection, None)
    size = jnp.linalg.norm(expected.out, axis=-1)
    off = jnp.linalg.norm(found.out.astype(jnp.float32) - expected.out, axis=-1)
    parts = {"out": jnp.max(jnp.where(off == 0, 0.0, off / size))}
    if found.lse is not None:
        same = found.lse == expected.lse  # -inf where no key is visible
        parts["lse"] = jnp.max(jnp.where(same, 0.0, jnp.abs(found.lse - expected.lse)))
    if found.mass is not None:
        parts["mass"] = jnp.linalg.norm((found.mass - expected.mass).ravel()) / jnp.linalg.norm(expected.mass.ravel())
    return parts


def fault(
    spec: AttentionSpec, inputs: tuple, positions: Positions, selection: Selection | None, found: AttentionOut
) -> str | None:
    """Return a description of the first error found in an answer; None if all checks pass.

    Checks the first, the middle and the last query tile of the first and the last sequence.

    Args:
        spec, inputs, positions, selection: the call; inputs are q [B,T,N,H], k and v [B,S,K,H].
        found: the call's answer. lse and mass may be None, as in other libraries' answers.
    """
    q, k, v = inputs
    tiles = ceil_div(q.shape[1], spec.query_tile)
    unit = UNIT[str(q.dtype)]
    for b in sorted({0, q.shape[0] - 1}):
        one = slice(b, b + 1)
        for i in sorted({0, tiles // 2, tiles - 1}):
            rows = slice(i * spec.query_tile, (i + 1) * spec.query_tile)
            here = Positions(*(x[one] for x in positions))
            here = here._replace(q_start=here.q_start + rows.start, q_len=here.q_len - rows.start)
            chosen = None if selection is None else Selection(*(x[one, :, i : i + 1] for x in selection))
            part = AttentionOut(
                found.out[one, rows],
                None if found.lse is None else found.lse[one, rows],
                None if found.mass is None else found.mass[one, :, i : i + 1],
            )
            for name, error in errors(spec, q[one, rows], k[one], v[one], here, chosen, part).items():
                over = float(error) / unit / ALLOWED[name]
                if not over <= 1:
                    return f"wrong: {name} in sequence {b}, query tile {i} has {over:.3g} times the allowed error"
    return None
