"""Letters that name array dimensions in annotations, einsums and suffixes of array names, everywhere in Tessera.

    B batch            T query positions     S key positions
    N query heads      K key/value heads     G = N / K
    H head dim         D model               F feed-forward
    V vocabulary       L layers
    I query tiles      J key tiles           C selected tiles per query tile

A *tile* is `tile` consecutive key positions; a *query tile* is `query_tile` consecutive query positions.
"""


def ceil_div(value: int, divisor: int) -> int:
    """Return ceil(value / divisor) for non-negative integers."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple
