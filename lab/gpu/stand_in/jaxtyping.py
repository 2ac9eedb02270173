"""Stub of jaxtyping for machines where nothing can be installed: any name can be subscripted and means `Any`."""

from typing import Any


class _Anything:
    def __class_getitem__(cls, item: Any) -> Any:
        return Any


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything
