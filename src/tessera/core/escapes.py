"""Make untrusted text safe for the terminal: one line, no control characters."""


def escaped(text: object, limit: int | None = 80) -> str:
    r"""Return a text on one line, cut at `limit` characters, with escapes for what is not printable.

    A raw "\x1b[2J" in a name clears the terminal that the error message is printed on.
    """
    line = " ".join(str(text).split())[:limit]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)[:limit]


def quoted(value: object, limit: int = 80) -> str:
    """Return a value as Python writes it, escaped."""
    return escaped(repr(value), limit)
