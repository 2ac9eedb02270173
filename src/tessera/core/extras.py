"""Check for the optional packages, which only some commands need."""

from importlib.util import find_spec


def installed(package: str) -> bool:
    return find_spec(package) is not None


def require(package: str, extra: str) -> None:
    """Raise ValueError if a package is missing; the message names the extra of Tessera that installs it."""
    if not installed(package):
        raise ValueError(f"{package} is not installed: pip install 'tessera-attention[{extra}]'")
