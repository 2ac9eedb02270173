"""Make untrusted text safe for the terminal: one line, no control characters."""


def escaped(text: object, limit: int | None = 80) -> str:
    r"""Return str(text) on one line of at most `limit` characters, with non-printable characters escaped.

    An unescaped "\x1b[2J" in a file name would clear the terminal that shows the error message.
    """
    line = " ".join(str(text).split())[:limit]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)[:limit]


def quoted(value: object, limit: int = 80) -> str:
    """Return repr(value), escaped for the terminal and cut to `limit` characters."""
    return escaped(repr(value), limit)
