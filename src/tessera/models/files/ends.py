"""Find the tokens that end an answer, and say which place in a model's files names each.

Fine-tuning often changes the end of a turn in one file only, so every token that some file names counts.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tessera.core.escapes import escaped, quoted
from tessera.models.files.families import token_ids
from tessera.models.files.generation_config import FILE as GENERATION
from tessera.models.files.gguf_file import GgufFile
from tessera.models.text.tokenizer import Tokenizer

NAMES = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|end|> <|end_of_turn|> <end_of_turn> <end_of_utterance> <turn|> "
    "<|return|> <|call|> <|calls|> <|flush|> <|tool_response> <EOT> _<EOT> [EOT] [EOS] [e~[ <|endoftext|> "
    "<|end_of_text|> </s> <eos> <｜end▁of▁sentence｜>".split()
)
"""Names of special tokens that end a turn or a text, as in llama.cpp's list, and the names of Llama 4 and OpenChat."""
FILLS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Names, by role, of tokens after which a model that fills in the middle of a file goes on with another file. They end
an answer, as in llama.cpp; a GGUF file's metadata may give the roles to other tokens."""
BARRED = frozenset(name for name in NAMES if "|" in name or "｜" in name)
"""Names that no text needs: a token of such a name ends an answer even if the file does not call it special."""
CONTROL, USER_DEFINED = 3, 4
"""Values in `tokenizer.ggml.token_type` of tokens that are not pieces of text."""
ITS_NAME = "its name"
MORE = "tokenizer.ggml.eos_token_ids"
"""Key of a list of ids that Ollama's converter writes."""


class End(NamedTuple):
    """A token that ends an answer, with the files or keys that name it; `name` is "" if the model has no tokenizer."""

    id: int
    name: str
    places: tuple[str, ...]

    def __str__(self) -> str:
        name = f" {escaped(self.name)}" if self.name else ""
        return f"{self.id}{name} ({', '.join(self.places)})"


def describe(ends: Iterable[End]) -> str:
    listed = ", ".join(map(str, ends))
    if listed:
        return f"an answer ends at {listed}"
    return (
        f"no file of this model names a token that ends an answer: answers end at the maximum of new tokens or at a "
        f"stop text; set eos_token_id in {GENERATION} to end them earlier"
    )


def folder_ends(raw: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer | None) -> tuple[End, ...]:
    """List the tokens that end an answer of a Hugging Face folder's model, given the contents of its config files.

    These are each `eos_token_id`, the tokenizer's eos token, and the special tokens of NAMES that a chat template
    writes. Only if there are none of these, all special tokens of NAMES count.
    """
    named = {file: token_ids(raw[file], "eos_token_id") for file in (GENERATION, "config.json") if file in raw}
    if tokenizer is None:
        return _collected(named, {})
    backend, size = tokenizer.backend, raw["config.json"]["vocab_size"]
    added = backend.get_added_tokens_decoder()
    special = {token.content: index for index, token in added.items() if token.special}
    special |= {name: index for name in BARRED if (index := backend.token_to_id(name)) is not None}
    special = {name: index for name, index in special.items() if index < size}
    ours = {special[name] for name in by_name(special)}
    if (eos := tokenizer.eos_id) is not None and eos < size:
        named["the tokenizer's eos_token"] = (eos,)
    # config classes of transformers have a default id, which is a piece of text in another family's vocabulary
    others = {index for file, ids in named.items() if file != "config.json" for index in ids}
    if others:
        named["config.json"] = [i for i in named.get("config.json", ()) if i in added or i in others]
    templates = (tokenizer.chat_template or "") + (tokenizer.tool_template or "")
    named["the chat template"] = [index for name, index in special.items() if index in ours and name in templates]
    if not any(named.values()):
        named[ITS_NAME] = sorted(ours)
    return _collected(named, {index: backend.id_to_token(index) for ids in named.values() for index in ids})


def gguf_ends(file: GgufFile) -> tuple[End, ...]:
    """List the tokens that end an answer of a GGUF file's model: eos, eot and eom by their keys, other tokens by name.

    A token of NAMES or FILLS counts if its type says that it is not a piece of text. Names with a bar, which no text
    needs, count with every type, because some converters wrote the wrong one. llama.cpp takes all names with every
    type, and so it ends an answer of a Qwen model at the text "</s>".
    """
    meta, named = file.metadata, {}
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    for role in ("eos", "eot", "eom"):
        if (index := file_token(file, role)) is not None:
            named[token_key(role)] = (index,)
    more = meta.get(MORE)
    named[MORE] = [i for i in (more.tolist() if isinstance(more, np.ndarray) else ()) if _has_row(file, MORE, i)]
    special = {}
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        special = {tokens[index]: int(index) for index in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED)))}
        special |= {name: index for index, name in enumerate(tokens) if name in BARRED}
    rows = file.tensors["token_embd.weight"].shape[0]
    found = [special[name] for name in by_name(special)]
    for role, names in FILLS.items():
        given = file_token(file, role)
        found += [special[name] for name in names if name in special][:1] if given is None else [given]
    named[ITS_NAME] = sorted(index for index in found if index < rows)
    return _collected(named, dict(enumerate(tokens)) if isinstance(tokens, list) else {})


def by_name(special: Collection[str]) -> set[str]:
    """Return the names in NAMES that end an answer of a model with these special tokens.

    In a few vocabularies, a token of NAMES has another use, as in llama.cpp: <|end|> ends a part of an answer where
    <|call|> and <|return|>, or <|calls|> and <|flush|>, end the answer; </s> is text in Gemma 4.
    """
    found = NAMES.intersection(special)
    if "<|call|>" in found and "<|return|>" in found or found & {"<|call|>", "<|calls|>"} and "<|flush|>" in found:
        found -= {"<|end|>"}
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return set(found)


def token_key(role: str) -> str:
    return f"tokenizer.ggml.{role}_token_id"


def file_token(file: GgufFile, role: str) -> int | None:
    """Return the id of a GGUF file's special token with this role, if it has an embedding.

    Converters write -1, or 2 ** 32 - 1, for a token that a model lacks.
    """
    value = file.metadata.get(token_key(role))
    return None if value is None or not _has_row(file, token_key(role), value) else value


def ignored_ids(file: GgufFile) -> list[str]:
    """List, as key=value, the ids of special tokens of a GGUF file that have no embedding, except for padding."""
    given = {token_key(role): file.metadata.get(token_key(role)) for role in ("bos", "eos", "eot", "eom", "unknown")}
    return [f"{key}={value}" for key, value in given.items() if value is not None and not _has_row(file, key, value)]


def _has_row(file: GgufFile, key: str, value: Any) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"{file.path} has {key}={quoted(value)}, which is not the id of a token: it must be an integer"
        )
    return 0 <= value < file.tensors["token_embd.weight"].shape[0]


def _collected(named: Mapping[str, Iterable[int]], names: Mapping[int, str | None]) -> tuple[End, ...]:
    places: dict[int, list[str]] = {}
    for place, ids in named.items():
        for index in ids:
            places.setdefault(index, []).append(place)
    return tuple(End(index, names.get(index) or "", tuple(dict.fromkeys(at))) for index, at in places.items())
