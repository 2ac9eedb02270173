"""Packages that only some commands need."""

from importlib.util import find_spec


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported here."""
    return find_spec(package) is not None


def require(package: str, extra: str) -> None:
    """Raise ValueError, naming the extra to install, if a package is missing.

    Call it before any work whose result the package writes.
    """
    if not installed(package):
        raise ValueError(f"{package} is not installed: pip install 'tessera-attention[{extra}]'")
