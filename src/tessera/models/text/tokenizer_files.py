"""Read a tokenizer, its settings and its chat templates from a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tessera.core.fields import check_fields, parse_json, read_json
from tessera.models.text.special_tokens import (
    ADDED_FILE,
    add_listed,
    add_named,
    listed_tokens,
    named_tokens,
    surround_as_set,
)
from tessera.models.text.tokenizer import DEFAULT, TEMPLATE_FILE, TEMPLATE_FOLDER, TOOL_USE, Tokenizer
from tessera.models.text.tokenizer_fields import MAX_BYTES, SETTINGS, LibraryErrors, check_ids, check_tokenizer


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    """Read a Hugging Face folder's tokenizer; return None if the folder has none.

    Without a tokenizer, prompts must be lists of token ids. `config` is the contents of config.json.

    Raises:
        ValueError: the tokenizer is broken or of an unsupported kind.
    """
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
    is the value of chat_template in tokenizer_config.json: a template, a list or object of named templates, or None.
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
    """Choose the template for chats and the template for chats with tools from a model's named templates.

    Without a template called "default", chats use the first one that is not for tools, or the only one. An empty
    template is none.
    """
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
