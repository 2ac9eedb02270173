"""Read the API keys in a file, for a server and for its clients."""

from pathlib import Path


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file that holds one per line; a line that begins with # is a comment."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8, one key per line") from error
    lines = map(str.strip, text.splitlines())
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise ValueError(f"{path} holds no key: write one per line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError(
            f"{path} holds a key with a character outside printable ASCII, which clients cannot send in a header: use "
            "another key"
        )
    return keys
