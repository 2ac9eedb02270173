"""Rules for the contents of tokenizer.json and tokenizer_config.json.

The tokenizers library trusts tokenizer.json: a token id of 2 ** 31 aborts the process, and some values cause a Rust
panic, which is not a subclass of `Exception`.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import tokenizers

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import LIST, OBJECT, TEXT, TRUTH, Rule, check_fields, either, integer, items, maybe, record

MAX_BYTES = 64 << 20
"""Maximum size of tokenizer.json in bytes. The largest known file, with a quarter of a million tokens, has 33 MB."""
MAX_TOKENS = 1 << 22
"""Token ids must be below this, because the library's memory grows with the largest id."""

TOKEN = integer(0, MAX_TOKENS - 1)
WORD = Rule("a non-empty string", lambda value: isinstance(value, str) and value != "")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Names of an added token's settings."""
CONTENT = {"content": WORD, **dict.fromkeys(FLAGS, maybe(TRUTH))}
ADDED = record({"id": TOKEN, **CONTENT}, "objects with an id and a content")
BY_ID = Rule(
    f"an object that maps ids below {MAX_TOKENS} to tokens with a content",
    lambda value: (
        isinstance(value, Mapping)
        and all(re.fullmatch("0|[1-9][0-9]{0,9}", key) and TOKEN.fits(int(key)) for key in value)
        and all(map(record(CONTENT, "").fits, value.values()))
    ),
)
FIELDS = MappingProxyType(
    {
        "model": OBJECT,
        "added_tokens": maybe(items(ADDED, f"tokens with a content and an id below {MAX_TOKENS}")),
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"), maybe(OBJECT)),
    }
)
PIECE = Rule(
    "a piece and its score",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and WORD.fits(value[0]) and type(value[1]) in (int, float)
    ),
)
MODEL_FIELDS = MappingProxyType(
    {
        "vocab": either(
            Rule(
                f"an object that maps texts to ids below {MAX_TOKENS}, each once",
                lambda value: (
                    isinstance(value, Mapping)
                    and all(map(TOKEN.fits, value.values()))
                    and len(set(value.values())) == len(value) > 0
                ),
            ),
            Rule("a list of pieces with scores", lambda value: items(PIECE, "pieces").fits(value) and bool(value)),
        ),
        "merges": maybe(LIST),
        "dropout": Rule("null or 0 (dropout makes the tokens of a text random)", lambda value: value in (None, 0)),
        **dict.fromkeys(("type", "unk_token"), maybe(TEXT)),
        **dict.fromkeys(("byte_fallback", "fuse_unk", "ignore_merges"), maybe(TRUTH)),
    }
)

ADDED_TOKENS = Rule(
    f"an object that maps tokens to ids below {MAX_TOKENS}",
    lambda value: isinstance(value, Mapping) and "" not in value and all(map(TOKEN.fits, value.values())),
)
ORDER = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens, in the order in which transformers adds tokens that the vocabulary lacks."""
NAMED = Rule(
    "an object of templates",
    lambda value: isinstance(value, Mapping) and all(map(TEXT.fits, value.values())),
)
SETTINGS = MappingProxyType(
    {
        **dict.fromkeys(ORDER, maybe(either(TEXT, record({"content": TEXT}, "an object with a content")))),
        **dict.fromkeys(("add_bos_token", "add_eos_token"), maybe(TRUTH)),
        "added_tokens_decoder": maybe(BY_ID),
        "chat_template": maybe(
            either(TEXT, items(record({"name": TEXT, "template": TEXT}, ""), "templates with names"), NAMED)
        ),
    }
)
"""Rule for the value of each key of tokenizer_config.json and special_tokens_map.json that is checked."""


class LibraryErrors:
    """Context manager that turns errors of the tokenizers library, Rust panics included, into ValueError."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and (issubclass(kind, Exception) or kind.__name__ == "PanicException"):
            raise ValueError(f"{self.what} ({escaped(error, 300)})") from error


def check_tokenizer(raw: Mapping[str, Any]) -> None:
    check_fields(raw, FIELDS, "tokenizer.json")
    check_fields(raw["model"], MODEL_FIELDS, "the model of tokenizer.json")


def check_ids(backend: tokenizers.Tokenizer, raw: Mapping[str, Any]) -> None:
    """Raise ValueError if the id of an added token, or of one around texts, differs from the backend's."""
    claims = [(token["content"], token["id"]) for token in raw.get("added_tokens") or ()]
    for entry in _templates(raw.get("post_processor") or {}):
        claims += zip(entry.get("tokens") or (), entry.get("ids") or ())
    for content, claimed in claims:
        if (found := backend.token_to_id(content)) != claimed:
            raise ValueError(
                f"token {quoted(content)} has id {claimed} in tokenizer.json, but {found} in the file's vocabulary"
            )


def _templates(processor: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the special tokens of a post-processor, whose structure the tokenizers library has already checked."""
    if processor.get("type") == "Sequence":
        for inner in processor["processors"]:
            yield from _templates(inner)
    elif processor.get("type") == "TemplateProcessing":
        yield from processor["special_tokens"].values()
