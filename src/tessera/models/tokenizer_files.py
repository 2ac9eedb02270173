"""Read a tokenizer, its settings and its chat templates from a Hugging Face folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tessera.core.escapes import quoted
from tessera.core.fields import check_fields, parse_json, read_json
from tessera.models.tokenizer import DEFAULT, TEMPLATE_FILE, TEMPLATE_FOLDER, TOOL_USE, Tokenizer
from tessera.models.tokenizer_fields import FLAGS, MAX_BYTES, SETTINGS, LibraryErrors, check_ids, check_tokenizer


def load_tokenizer(folder: str | os.PathLike) -> Tokenizer | None:
    """Read a Hugging Face folder's tokenizer; return None if the folder has none.

    Without a tokenizer, prompts must be lists of token ids.

    Raises:
        ValueError: the tokenizer is broken or of an unsupported kind.
    """
    folder = Path(folder)
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
    settings = _read_settings(folder / "tokenizer_config.json")
    _add_tokens(backend, settings.pop("added_tokens_decoder", None) or {}, folder / "tokenizer_config.json")
    chat, tool = _read_templates(folder, settings.pop("chat_template", None))
    specials = {}
    for source in (_read_settings(folder / "special_tokens_map.json"), settings):
        for role, token in source.items():
            content = token.get("content") if isinstance(token, Mapping) else token
            if role.endswith("_token") and isinstance(content, str):
                specials[role] = content
    settings = {key: value for key, value in settings.items() if key not in specials}
    return Tokenizer(backend=backend, specials=specials, chat_template=chat, tool_template=tool, settings=settings)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    problem = f"{path} is not a readable tokenizer"
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{problem}: it has {size:,} bytes, more than the {MAX_BYTES:,} allowed")
    data = path.read_bytes()
    raw = parse_json(data, path)
    try:
        check_tokenizer(raw)
        with LibraryErrors("the tokenizers library refuses it"):
            backend = tokenizers.Tokenizer.from_str(data.decode())
            backend.no_truncation()
            backend.no_padding()
            backend.decode(backend.encode("Some text, to see that it works.").ids)
        check_ids(backend, raw)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}: download it again") from error
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Mapping[str, Any], path: Path) -> None:
    """Add the tokens of tokenizer_config.json's added_tokens_decoder that tokenizer.json lacks.

    Raises:
        ValueError: the files give a token different ids, an id different tokens, or an id is not the next free one.
    """
    known = backend.get_added_tokens_decoder()
    for number, token in sorted(((int(key), token) for key, token in tokens.items()), key=lambda item: item[0]):
        content, found = token["content"], backend.token_to_id(token["content"])
        if found == number and number in known:
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
        flags = {flag: token[flag] for flag in FLAGS if token.get(flag) is not None}
        with LibraryErrors(f"{path}: the tokenizers library refuses the token {quoted(content)}"):
            backend.add_tokens([AddedToken(content, **flags)])
        if (given := backend.token_to_id(content)) != number:
            raise ValueError(
                f"{path} gives token {quoted(content)} the id {number} in added_tokens_decoder, but the next free id "
                f"of tokenizer.json is {given}: list the tokens between them, too"
            )


def _read_settings(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json or special_tokens_map.json; return {} if the file does not exist."""
    if not path.is_file():
        return {}
    # transformers writes "no limit" as the integer 10 ** 30, rounded to a float
    settings = read_json(path, large=("model_max_length",))
    check_fields(settings, SETTINGS, str(path))
    return settings


def _read_templates(folder: Path, inline: Any) -> tuple[str | None, str | None]:
    """Return the template for chats and the template for chats with tools, each None if there is none.

    As in transformers, the files chat_template.jinja and additional_chat_templates/NAME.jinja replace `inline`, which
    is the value of chat_template in tokenizer_config.json: a template, a list of named templates, or None.
    """
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (path := folder / TEMPLATE_FILE).is_file():
        files = {DEFAULT: path, **files}
    if files:
        return choose_templates({name: _read_text(path) for name, path in files.items()})
    if isinstance(inline, list):
        return choose_templates({entry["name"]: entry["template"] for entry in inline})
    return inline, None


def choose_templates(named: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Choose the template for chats and the template for chats with tools from a model's named templates.

    Without a template called "default", chats use the first one that is not for tools, or the only one.
    """
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
