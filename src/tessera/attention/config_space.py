"""The configs a tuner may try: every combination of values that changes what a kernel does with a call."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any


def distinct(default: Any, axes: Mapping[str, Sequence], cut: Callable[[Any], Hashable]) -> Iterator[Any]:
    """Configs of the axes' values and the default's own; of those that cut the call alike, the nearest to the default.

    So an axis that the call does not feel (a block longer than all keys) stays at the default, and a search that moves
    one field at a time finds every way to cut.

    Args:
        default: a config (a dataclass).
        axes: field -> values.
        cut: config -> what the kernel makes of it for the call.
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
