"""Read a tokenizer, its settings and its chat templates from a Hugging Face folder.

Fine-tuning and converters often write new tokens, flags and the tokens around a text into other files than
tokenizer.json alone.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from tessera.core.escapes import escaped, quoted
from tessera.core.fields import check_fields, parse_json, read_json
from tessera.models.text import tokenizer_fields as rules
from tessera.models.text.tokenizer import DEFAULT, TEMPLATE_FILE, TEMPLATE_FOLDER, TOOL_USE, Tokenizer
from tessera.models.text.tokenizer_fields import FLAGS, LibraryErrors

logger = logging.getLogger(__name__)

ADDED_FILE = "added_tokens.json"
"""File that maps added tokens to ids, in folders whose tokenizer_config.json has no added_tokens_decoder."""
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of the settings that list special tokens without a role."""
SURROUNDING = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Tokenizer classes of transformers 4 that replace tokenizer.json's post-processor if the settings have add_bos_token
or add_eos_token. Other classes, and transformers 5, ignore both keys."""

Flags = dict[str, bool]


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """Read a Hugging Face folder's tokenizer, if it has one; `config` is the contents of config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()), None)
        if other is None:
            return None
        raise ValueError(
            f"{folder} holds its tokenizer as {other}, which is not supported: convert it once with transformers, "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which writes tokenizer.json"
        )
    backend = _read_backend(path)
    settings_path = folder / "tokenizer_config.json"
    settings, older = _read_settings(settings_path), _read_settings(folder / "special_tokens_map.json")
    decoder, template = settings.pop("added_tokens_decoder", None), settings.pop("chat_template", None)
    named = named_tokens(older, settings)
    listed = listed_tokens(folder, decoder, named)
    listing = folder / ADDED_FILE if decoder is None else settings_path
    backend = add_listed(backend, listed, listing, update=decoder is not None)
    add_named(backend, named, rows if isinstance(rows := config.get("vocab_size"), int) else None, folder)
    specials = {}
    for source in (older, settings):
        for role, token in source.items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if role.endswith("_token") and isinstance(content, str):
                specials[role] = content
    surround_as_set(backend, settings, specials, config)
    chat, tool = _read_templates(folder, template)
    settings = {key: value for key, value in settings.items() if key not in specials}
    return Tokenizer(backend=backend, specials=specials, chat_template=chat, tool_template=tool, settings=settings)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    problem = f"{path} is not a readable tokenizer"
    if (size := path.stat().st_size) > rules.MAX_BYTES:
        raise ValueError(f"{problem}: it has {size:,} bytes, more than the {rules.MAX_BYTES:,} allowed")
    data = path.read_bytes()
    raw = parse_json(data, path)
    try:
        rules.check_tokenizer(raw)
        with LibraryErrors("the tokenizers library refuses it"):
            backend = tokenizers.Tokenizer.from_str(data.decode())
            backend.no_truncation()
            backend.no_padding()
            backend.decode(backend.encode("Some text, to see that it works.").ids)
        rules.check_ids(backend, raw)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}: download it again") from error
    return backend


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    # transformers writes "no limit" as the integer 10 ** 30, rounded to a float
    settings = read_json(path, large=("model_max_length",))
    check_fields(settings, rules.SETTINGS, str(path))
    return settings


def _read_templates(folder: Path, inline: Any) -> tuple[str | None, str | None]:
    """Return the template for chats and the template for chats with tools.

    As in transformers, the files chat_template.jinja and additional_chat_templates/NAME.jinja replace `inline`, the
    value of chat_template in tokenizer_config.json.
    """
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path := folder / TEMPLATE_FILE).is_file():
        files = {DEFAULT: path, **files}
    if files:
        return choose_templates({name: _read_text(path) for name, path in files.items()})
    if isinstance(inline, list):
        inline = {entry["name"]: entry["template"] for entry in inline}
    return choose_templates(inline if isinstance(inline, Mapping) else {DEFAULT: inline or ""})


def choose_templates(named: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Choose the templates for chats and for chats with tools. Without a "default", chats use the first other one."""
    named = {name: template for name, template in named.items() if template}
    others = [template for name, template in named.items() if name != TOOL_USE]
    tool = named.get(TOOL_USE)
    chat = named.get(DEFAULT, others[0] if others else tool)
    return chat, None if tool == chat else tool


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it to UTF-8"
        ) from error


def named_tokens(*settings: Mapping[str, Any]) -> dict[str, Flags]:
    """Return the special tokens that the settings name, in transformers' order, with the flags of the last mention."""
    found: dict[str, Flags] = {}
    for token in _mentions(settings):
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str) and content:
            found[content] = {**(_flags(token) if isinstance(token, Mapping) else {}), "special": True}
    return found


def _mentions(settings: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for role in rules.ORDER:
        yield next((values[role] for values in reversed(settings) if values.get(role) is not None), None)
    for values in settings:
        for key in LISTS:
            listed = values.get(key) or ()
            yield from listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ()


def listed_tokens(folder: Path, decoder: Mapping[str, Any] | None, named: Mapping[str, Flags]) -> dict[int, Any]:
    """Return the tokens by id of `decoder`, the value of added_tokens_decoder, or else of added_tokens.json."""
    path = folder / ADDED_FILE
    if decoder is not None or not path.is_file():
        return {int(key): token for key, token in (decoder or {}).items()}
    raw = read_json(path)
    if not rules.ADDED_TOKENS.fits(raw):
        raise ValueError(f"{path} must hold {rules.ADDED_TOKENS.allowed}: download it again")
    return {
        index: {"content": content, "special": content in named, "normalized": content not in named}
        for content, index in raw.items()
    }


def add_listed(
    backend: tokenizers.Tokenizer, tokens: Mapping[int, Mapping[str, Any]], path: Path, *, update: bool
) -> tokenizers.Tokenizer:
    """Add the tokens that tokenizer.json lacks, and return the tokenizer; with `update`, change the others' flags."""
    known, demoted = backend.get_added_tokens_decoder(), False
    for number, token in sorted(tokens.items(), key=lambda item: item[0]):
        content, found = token["content"], backend.token_to_id(token["content"])
        if found == number and number in known:
            if update:
                _set_flags(backend, known[number], _flags(token))
                demoted |= known[number].special and token.get("special") is False
            continue
        held = backend.id_to_token(number)
        if found not in (None, number) or (found is None and held is not None):
            other = (
                f"{quoted(content)} has id {found}" if held is None or found is not None else f"it is {quoted(held)}"
            )
            raise ValueError(
                f"{path} gives token {quoted(content)} the id {number} in added_tokens_decoder, but in tokenizer.json "
                f"{other}: correct either file, or download both again"
            )
        with LibraryErrors(f"{path}: the tokenizers library refuses the token {quoted(content)}"):
            backend.add_tokens([AddedToken(content, **_flags(token))])
        if (given := backend.token_to_id(content)) != number:
            raise ValueError(
                f"{path} gives token {quoted(content)} the id {number} in added_tokens_decoder, but the next free id "
                f"of tokenizer.json is {given}: list the tokens between them, too"
            )
    # the library decodes a token as special, which it once was, until it is built again
    return tokenizers.Tokenizer.from_str(backend.to_str()) if demoted else backend


def add_named(backend: tokenizers.Tokenizer, named: Mapping[str, Flags], rows: int | None, folder: Path) -> None:
    """Make the named tokens special, and add those that the vocabulary lacks while the embeddings' `rows` have room.

    One character, such as a padding token "!", stays an ordinary piece.
    """
    without = []
    for content, flags in named.items():
        index = backend.token_to_id(content)
        if index is None and rows is not None and backend.get_vocab_size(with_added_tokens=True) >= rows:
            without.append(content)
            continue
        known = backend.get_added_tokens_decoder().get(index) if index is not None else None
        if known is not None:
            _set_flags(backend, known, {"special": True})
        elif index is None or len(content) > 1:
            with LibraryErrors(f"{folder}: the tokenizers library refuses the token {quoted(content)}"):
                backend.add_tokens([AddedToken(content, **{"normalized": False, **flags})])
    if without:
        logger.warning(
            "%s: ignoring the special tokens %s, which the vocabulary lacks and the model's %d embeddings have no room "
            "for: if one of them ends an answer, correct its name in tokenizer_config.json",
            *(folder, escaped(", ".join(without), 200), rows),
        )


def _flags(token: Mapping[str, Any]) -> Flags:
    return {flag: token[flag] for flag in FLAGS if isinstance(token.get(flag), bool)}


def _set_flags(backend: tokenizers.Tokenizer, token: AddedToken, flags: Flags) -> None:
    before = {flag: getattr(token, flag) for flag in FLAGS}
    if before | flags != before:
        backend.add_tokens([AddedToken(token.content, **(before | flags))])


def surround_as_set(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], specials: Mapping[str, str], config: Mapping[str, Any]
) -> None:
    """Put bos and eos around each text as add_bos_token and add_eos_token say, if the tokenizer's class obeys them."""
    given = {role: wanted for role in ("bos", "eos") if (wanted := settings.get(f"add_{role}_token")) is not None}
    llama = "LlamaTokenizer" if config.get("model_type") in ("llama", "mistral") else ""
    name = settings.get("tokenizer_class") or config.get("tokenizer_class") or llama
    if not given or str(name).removesuffix("Fast").removesuffix("Tokenizer") not in SURROUNDING:
        return
    around = {"bos": [], "eos": []}
    for role, wanted in ({"bos": True, "eos": False} | given).items():
        token = specials.get(f"{role}_token", "")
        if wanted and backend.token_to_id(token) is not None:
            around[role] = [token]
    backend.post_processor = surround(backend, around["bos"], around["eos"])


def surround(
    backend: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]
) -> processors.TemplateProcessing:
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    around = dict.fromkeys([*before, *after])
    with LibraryErrors(f"the tokenizers library refused the special tokens {escaped(list(around))}"):
        return processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second],
            special_tokens=[(token, backend.token_to_id(token)) for token in around],
        )
