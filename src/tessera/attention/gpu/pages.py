"""Keys in pages on Hopper: where in a pool the copy engine finds a run of keys.

A pool [P,K,page,H] has as many axes as contiguous keys [B,K,S,H], so a copy from a page differs from a copy of
contiguous keys only in its first index, which is the page instead of the sequence, and in its start, which is an offset
in the page. Nothing is moved before the launch: the thread that starts a copy reads the page from the page table.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tessera.attention.contract import Shapes

LEAST_KEYS = 16
"""Minimum keys per copy. Page sizes must be multiples of it."""


def piece_of(size: int, page: int | None) -> int:
    """Return the keys per copy for a run of `size` keys from a multiple of `size` on: as many as lie in one page."""
    return size if page is None else math.gcd(size, page)


def places(table: Any, sequence: Any, start: Any, size: int, page: int | None) -> list[tuple[Any, Any]]:
    """Return the place (first index of the pool, key in the page) of each copy of `piece_of(size, page)` keys.

    `start` is a multiple of that size. If `page` is None, the only place is (sequence, start). Positions past the
    table's last page are read from that page; callers must mask them, like all keys at or past kv_len.
    """
    if page is None:
        return [(sequence, start)]
    last = table.shape[1] - 1
    keys = [start + n for n in range(0, size, piece_of(size, page))]
    entries = [jnp.minimum(jax.lax.div(key, jnp.int32(page)), last) for key in keys]
    return [(table[sequence, at], jax.lax.rem(key, jnp.int32(page))) for at, key in zip(entries, keys, strict=True)]


def page_refusal(shapes: Shapes, least: int = LEAST_KEYS) -> str | None:
    """Return why copies of `least` keys or more cannot read pages of this size; None if they can."""
    if shapes.page is None or shapes.page % least == 0:
        return None
    return f"page size {shapes.page} must be a multiple of {least}: a copy moves that many keys or more"
