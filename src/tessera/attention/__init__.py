"""Attention kernels behind one contract. The package itself is callable: `tessera.attention(q, k, v)` runs
`dispatch.attention`.
"""

import sys
from types import ModuleType
from typing import Any


class _Attention(ModuleType):
    # Importing any submodule binds the name `tessera.attention` to this package, so the package must be callable.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from tessera.attention.dispatch import attention

        return attention(*args, **kwargs)


sys.modules[__name__].__class__ = _Attention
