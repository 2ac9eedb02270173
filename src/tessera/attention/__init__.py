"""Attention kernels behind one contract. Callable: `tessera.attention(q, k, v)` is `dispatch.attention`."""

import sys
from types import ModuleType
from typing import Any


class _Attention(ModuleType):
    # Importing a submodule binds the package to the name `tessera.attention`, where users expect the function.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tessera.attention.dispatch import attention

        return attention(*args, **kwargs)


sys.modules[__name__].__class__ = _Attention
