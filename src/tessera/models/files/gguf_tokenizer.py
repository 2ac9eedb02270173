"""Build a `tokenizers` tokenizer from a GGUF file: byte-level BPE ("gpt2") or SentencePiece ("llama").

Each pre-tokenizer splits text by the original tokenizer's regular expressions, of which llama.cpp's are translations.
Only the pre-tokenizer "default" has no original, so it uses llama.cpp's expressions.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tessera.core.escapes import escaped, quoted
from tessera.models.files.gguf_file import GgufFile
from tessera.models.text.tokenizer import DEFAULT, Tokenizer
from tessera.models.text.tokenizer_files import choose_templates, surround

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Values in `tokenizer.ggml.token_type`; 1 means an ordinary piece."""
KNOWN_TYPES = range(7)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words that end where upper case follows lower case; the blanks are for endings such as 's, and for digits."""
CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
ALPHABETIC = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^ՠ-ֈჇ-Ⴭა-ჿᲀ-ᲊⴀ-ⴭꞏ-ꟿꬰ-ꭨ"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2A}]]+"
)
"""Upper and lower case letters of DeepSeek LLM's own list, which lacks a few alphabets."""
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", GPT2),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "qwen2": (WORDS + r"\p{N}" + REST,),
    "llama-bpe": (WORDS + r"\p{N}{1,3}" + REST,),
    "seed-coder": (WORDS + r"\p{N}" + REST.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
    "tekken": (CASED % ("", "", ""),),
    "gpt-4o": (CASED % (CONTRACTED, CONTRACTED, "{1,3}"),),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-llm": (
        *(r"[\r\n]", rf"\s?{ALPHABETIC}", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$"),
        *("[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "bloom": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
}
"""Regular expressions by `tokenizer.ggml.pre`. Each expression splits every piece that the previous one produced,
whether the piece was a match or the text between two matches."""
SAME = {
    "gpt-2": "gpt2 phi-2 mpt olmo jais trillion gigachat a.x-4.0 mellum exaone4 granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx",
    "gpt-4o": "llama4 kanana2 talkie",
    "deepseek-v3": "hunyuan-dense joyai-llm",
    "bloom": "poro-chat gpt3-finnish",
}
"""Other names for the expressions of PATTERNS, as in llama.cpp."""
EXPRESSIONS = {**PATTERNS, **{name: PATTERNS[like] for like, names in SAME.items() for name in names.split()}}
COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Names of Qwen's own tokenizer, which first composes characters (NFC)."""
WHOLE = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()
"""Names of tokenizers that take a piece that is a token without merging it, and begin a text with bos by default."""

MAX_SPLIT_WORK = 1 << 32
"""Maximum number of characters copied to find SentencePiece's merges, which is the sum of the squared piece lengths.
Llama's 32,000 pieces need 2 million; a vocabulary of long texts would take hours."""

ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Role of a special token: GGUF's name -> transformers' name."""
TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template; with a dot and a name, key of another template."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""


def gguf_tokenizer(file: GgufFile) -> Tokenizer | None:
    """Build the tokenizer and chat template of a GGUF file; return None if the file has no tokenizer."""
    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
        return None
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path} has tokenizer.ggml.model={quoted(kind)}, which is not supported: it must be gpt2 (byte-level "
            f"BPE) or llama (SentencePiece)"
        )
    try:
        vocab = _Vocabulary(meta)
        backend = _byte_level(vocab) if kind == "gpt2" else _sentencepiece(vocab)
        specials = _finish(backend, vocab, add_bos=kind == "llama" or vocab.pre in WHOLE)
        chat, tool = _templates(vocab)
    except ValueError as error:
        raise ValueError(f"{file.path} has a tokenizer that cannot be used: {error}") from error
    settings = {"clean_up_tokenization_spaces": False}
    return Tokenizer(backend=backend, specials=specials, chat_template=chat, tool_template=tool, settings=settings)


class _Vocabulary:
    """The lists under `tokenizer.ggml` in a GGUF file, checked for consistency."""

    def __init__(self, meta: Mapping[str, Any]):
        self.meta = meta
        self.tokens: list[str] = self.typed("tokenizer.ggml.tokens", list)
        count = len(self.tokens)
        if not count:
            raise ValueError("tokenizer.ggml.tokens is empty")
        if empty := [i for i, token in enumerate(self.tokens) if not token]:
            logger.warning("tokens %s of the file are empty: as in llama.cpp, their names are [EMPTY_ID]", empty[:9])
            self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.tokens)]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != count:
            again = [i for i, token in enumerate(self.tokens) if self.ids[token] != i]
            logger.warning("tokens %s of the file have the names of later tokens, which are used instead", again[:9])
        self.types = self.numbers("tokenizer.ggml.token_type", count, np.integer)
        self.has_types = self.types is not None
        if self.types is None:
            self.types = np.ones(count, np.int32)
        if not np.isin(self.types, KNOWN_TYPES).all():
            wrong = self.types[~np.isin(self.types, KNOWN_TYPES)][0]
            raise ValueError(f"tokenizer.ggml.token_type holds the unknown type {wrong}")
        self.special_ids = {role: self.token_id(role) for role in ROLES}
        self.pre = self.typed("tokenizer.ggml.pre", str, "default")

    def typed(self, key: str, kind: type, *default: Any) -> Any:
        value = self.meta.get(key)
        if value is None and default:
            return default[0]
        if not isinstance(value, kind):
            raise ValueError(f"{key}={quoted(value)} must be of type {kind.__name__}")
        return value

    def numbers(self, key: str, count: int, kind: type) -> np.ndarray | None:
        values = self.typed(key, np.ndarray, None)
        if values is not None and (len(values) != count or not np.issubdtype(values.dtype, kind)):
            raise ValueError(f"{key} has {len(values)} values of {values.dtype} for {count} tokens")
        return values

    def token_id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        value = self.typed(key, int, None)
        return value if value is not None and 0 <= value < len(self.tokens) else None  # `Source.log_ignored` says so

    def used(self) -> dict[str, int]:
        """Map each piece in use to its id. Unused pieces only pad the vocabulary to the number of embeddings."""
        return {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED}


def _templates(vocab: _Vocabulary) -> tuple[str | None, str | None]:
    keys = [key for key in vocab.meta if key == TEMPLATE or key.startswith(TEMPLATE + ".")]
    return choose_templates({key.removeprefix(TEMPLATE).lstrip(".") or DEFAULT: vocab.typed(key, str) for key in keys})


def _byte_level(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer, which merges characters for bytes within the pre-tokenizer's pieces."""
    if vocab.pre not in EXPRESSIONS:
        raise ValueError(
            f"tokenizer.ggml.pre={quoted(vocab.pre)} is not supported: {len(EXPRESSIONS)} names are, such as "
            "llama-bpe, qwen2, tekken, deepseek-llm and gpt-2: convert the model again if its tokenizer is one of these"
        )
    if "tokenizer.ggml.pre" not in vocab.meta:
        logger.warning("the file does not name its pre-tokenizer (tokenizer.ggml.pre): using llama.cpp's default")
    merges = []
    for merge in vocab.typed("tokenizer.ggml.merges", list):
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ValueError(f"tokenizer.ggml.merges holds {quoted(merge)}, which is not two pieces")
        merges.append((left, right))
    backend = _build(vocab.used(), merges, ignore_merges=vocab.pre in WHOLE)
    if vocab.pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in EXPRESSIONS[vocab.pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    """Build SentencePiece's BPE: of all adjacent pairs, the pair whose merged piece has the best score merges first.

    Unknown characters become their bytes if the vocabulary has all byte pieces.
    """
    if vocab.meta.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise ValueError("tokenizer.ggml.precompiled_charsmap (a custom normalisation) is not supported")
    scores = vocab.numbers("tokenizer.ggml.scores", len(vocab.tokens), np.floating)
    if scores is None or not np.isfinite(scores).all():
        raise ValueError("tokenizer.ggml.scores must hold a finite score for each token")
    has_bytes = all(f"<0x{byte:02X}>" in vocab.ids for byte in range(256))
    unknown = vocab.special_ids["unknown"]
    backend = _build(
        vocab.used(),
        _merges(vocab, scores),
        unk_token=None if unknown is None else vocab.tokens[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    spaces, end = [normalizers.Replace(" ", SPACE)], []
    if vocab.typed("tokenizer.ggml.add_space_prefix", bool, True):
        spaces, end = [normalizers.Prepend(SPACE), *spaces], [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end],
    )
    return backend


def _merges(vocab: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    """List the pairs of pieces in merge order, as transformers does: by descending score of the merged piece."""
    pieces = {
        token: i for i, token in enumerate(vocab.tokens) if vocab.types[i] not in (UNKNOWN, CONTROL, UNUSED, BYTE)
    }
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SPLIT_WORK:
        raise ValueError(
            f"tokenizer.ggml.tokens holds pieces that are too long: the sum of their squared lengths must be at most "
            f"{MAX_SPLIT_WORK:,}"
        )
    found = []
    for piece, index in pieces.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        local = [(left, right) for left, right in halves if left in pieces and right in pieces]
        local.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found += [(scores[index], *pair) for pair in local]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _build(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    for left, right in merges:  # the library's own error would not be a readable sentence
        if not (left in ids and right in ids and left + right in ids):
            raise ValueError(
                f"the merge of {quoted(left)} and {quoted(right)} needs pieces that are not in the vocabulary"
            )
    options = {key: value for key, value in options.items() if value is not None}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=dict(ids), merges=list(merges), **options))
    except Exception as error:  # the library has no narrower class
        raise ValueError(f"the tokenizers library refused the vocabulary ({escaped(error, 300)})") from error


def _finish(backend: tokenizers.Tokenizer, vocab: _Vocabulary, *, add_bos: bool) -> dict[str, str]:
    """Add special and user-defined tokens to the backend, and bos and eos around texts if the file says so.

    Return the special tokens by role.
    """
    named = set(vocab.special_ids.values())
    added = []
    for index, (token, kind) in enumerate(zip(vocab.tokens, vocab.types)):
        # a token with a role may be an ordinary piece (a padding id of 0, for example); it then stays ordinary
        special = kind == CONTROL or (index in named and (kind == UNKNOWN or not vocab.has_types))
        if vocab.ids[token] == index and (special or kind == USER_DEFINED):
            added.append(AddedToken(token, normalized=False, special=special))
    backend.add_tokens(added)
    specials = {ROLES[role]: vocab.tokens[i] for role, i in vocab.special_ids.items() if i is not None}
    around = {"bos": add_bos, "eos": False}
    for role, default in around.items():
        wanted = vocab.typed(f"tokenizer.ggml.add_{role}_token", bool, default)
        around[role] = [specials[ROLES[role]]] if wanted and ROLES[role] in specials else []
    if any(around.values()):
        backend.post_processor = surround(backend, around["bos"], around["eos"])
    return specials
