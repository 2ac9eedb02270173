"""Format quantities for people: scaled, with their units, or rounded."""

from collections.abc import Iterable
from typing import Any


def quantity(value: float, unit: str) -> str:
    """Format a value with a scaled unit, and with decimals as in `three`: 0.0123 s is 12.3 ms.

    A fraction is shown as a percentage with one decimal, and a size below 1 KiB in whole bytes.
    """
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
            if abs(value) * factor >= 1:
                return f"{three(value * factor)} {name}"
        return f"{three(value * 1e6)} us"
    if unit == "bytes":
        for factor, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if abs(value) >= factor:
                return f"{three(value / factor)} {name}"
        return f"{value:.0f} bytes"
    if unit == "fraction":
        return f"{100 * value:.1f} %"
    return f"{three(value)} {unit}".strip()


def three(value: float) -> str:
    """Format a number, without an exponent, to three significant digits or as an integer: 0.0123, 1.23, 12,346."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(f"{abs(value):e}".split("e")[1]))
    return f"{value:,.{digits}f}"


def rounded(value: Any) -> Any:
    """Round a number, or an array to nested lists, to four significant digits, so that plan files stay readable."""
    if isinstance(value, Iterable):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}")
