"""Text for calibration and evaluation: token windows sampled evenly from a file, a folder or a list."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.models.config import ModelConfig
from tessera.sparse.recording import NUM_KEYS

MAX_WINDOW = 8192
"""Maximum tokens of a window, unless the model's context is shorter."""

MIN_WINDOW = 2 * NUM_KEYS
"""Minimum tokens of a window. Calibration compares the NUM_KEYS keys that layers choose per query tile, so some query
tiles must see more than NUM_KEYS keys."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token windows for calibration: those that make a plan, those on which it is judged, and the text's name."""

    windows: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    source: str

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for window in (*self.windows, *self.held_out):
            digest.update(len(window).to_bytes(8, "little") + window.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in (*self.windows, *self.held_out))


def read_corpus(model: Any, texts: str | os.PathLike | Sequence[str | Sequence[int]], max_tokens: int) -> Corpus:
    """Take evenly spread windows from texts and hold out the last quarter of them.

    Args:
        model: model with `config` and `tokenizer`.
        texts: a file or folder, which counts as one long text (files sorted by name, binary files skipped), or a list
            of separate texts or token lists.
        max_tokens: maximum number of tokens in all windows together. At least two windows are taken, even if they have
            more tokens.
    """
    longest = min(model.config.max_positions, MAX_WINDOW)
    if isinstance(texts, str | os.PathLike):
        source = str(Path(texts).name)
        windows = _windows_of_text(model, read_text(Path(texts)), longest, max_tokens)
    else:
        source = f"{len(texts)} texts"
        rows = [_encode(model, text) for text in texts]
        windows = [row[i : i + longest] for row in rows for i in range(0, len(row), longest)]
        windows = _evenly(windows, max(2, max_tokens // longest))
    longest = max((len(window) for window in windows), default=0)
    windows = _long_enough(windows)
    if len(windows) == 1:
        middle = len(windows[0]) // 2
        windows = _long_enough([windows[0][:middle], windows[0][middle:]])
    if not windows:
        raise ValueError(
            f"the longest text has {longest} tokens, too few to calibrate and to evaluate: pass one text of at least "
            f"{2 * MIN_WINDOW} tokens, or two texts of at least {MIN_WINDOW} each"
        )
    held = max(1, len(windows) // 4)
    return Corpus(windows=tuple(windows[:-held]), held_out=tuple(windows[-held:]), source=source)


def read_text(path: Path) -> str:
    """Read a file, or all text files under a folder in order of name; bytes that are not UTF-8 are replaced."""
    if not path.exists():
        raise FileNotFoundError(f"text {str(path)!r} does not exist: name a file or a folder of text files")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    visible = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    parts = []
    for file in visible:
        body = file.read_bytes()
        if b"\0" not in body[:4096]:
            parts.append(body.decode("utf-8", errors="replace"))
    if not any(part.strip() for part in parts):
        raise ValueError(f"{str(path)!r} holds no text: name a file or a folder of text files")
    return "\n\n".join(parts)


def _windows_of_text(model: Any, text: str, longest: int, max_tokens: int) -> list[np.ndarray]:
    """Cut windows at evenly spaced starts. To save time, tokenise only 8 characters of text per token of a window."""
    count = max(2, max_tokens // longest)
    span = 8 * longest
    if len(text) <= count * longest:  # too short to choose from
        row = _encode(model, text)
        return _evenly([row[i : i + longest] for i in range(0, len(row), longest)], count)
    starts = np.linspace(0, max(len(text) - span, len(text) // 2), count).astype(int)
    return [_encode(model, text[start : start + span])[:longest] for start in starts]


def _encode(model: Any, text: str | Sequence[int]) -> np.ndarray:
    if not isinstance(text, str):
        row = np.asarray(text)
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer) or row.size and not _within(row, model.config):
            raise ValueError(
                f"a token list must hold integers from 0 to {model.config.vocab_size - 1}, got {text!r:.80}"
            )
        return row.astype(np.int32)
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: add its tokenizer.json, or pass token lists instead of texts")
    return np.asarray(model.tokenizer.encode(text), np.int32)


def _within(row: np.ndarray, config: ModelConfig) -> bool:
    return 0 <= row.min() and row.max() < config.vocab_size


def _long_enough(windows: list[np.ndarray]) -> list[np.ndarray]:
    """Drop windows of fewer than MIN_WINDOW tokens: the short rest of a text gives too few predictions to evaluate."""
    return [window for window in windows if len(window) >= MIN_WINDOW]


def _evenly(windows: list[np.ndarray], count: int) -> list[np.ndarray]:
    if len(windows) <= count:
        return windows
    return [windows[i] for i in np.linspace(0, len(windows) - 1, count).astype(int)]
