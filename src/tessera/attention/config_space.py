"""The configs a tuner may try: every combination of values that changes how a kernel cuts a call."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any


def distinct(default: Any, axes: Mapping[str, Sequence], cut: Callable[[Any], Hashable]) -> Iterator[Any]:
    """Yield configs of the axes' values and the default's own; of configs that cut alike, the nearest to the default.

    An axis that does not affect the call (a block longer than all keys) therefore stays at the default, and a search
    that changes one field at a time still finds every way to cut.

    Args:
        default: a config (a dataclass).
        axes: field -> values.
        cut: config -> how the kernel cuts the call with it.
    """

    def nearest_first(name: str) -> list:
        own = getattr(default, name)
        return sorted({own, *axes[name]}, key=lambda value: abs(value - own))

    seen = set()
    for values in product(*map(nearest_first, axes)):
        config = replace(default, **dict(zip(axes, values, strict=True)))
        made = cut(config)
        if made not in seen:
            seen.add(made)
            yield config
