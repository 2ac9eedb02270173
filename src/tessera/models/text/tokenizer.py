"""Turn text into tokens and back, and conversations into text: tokenizers and chat templates.

`tokenizer_files` reads tokenizers from Hugging Face folders and `gguf_tokenizer` from GGUF files; the demo model has a
byte tokenizer.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from tessera.core.escapes import quoted
from tessera.core.files import replace_folder, write_text
from tessera.models.text.chat_template import Renderer
from tessera.models.text.template_traits import Traits, traits_of
from tessera.models.text.tokenizer_fields import LibraryErrors

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
FILES = frozenset(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json".split()
    + [TEMPLATE_FILE, TEMPLATE_FOLDER]
)
"""What `load_tokenizer` reads. Saving removes all of it, so that a tokenizer never gets another one's chat template."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template for chats and of the one for chats with tools, where a model has several."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""Name of a token that is one byte, in vocabularies with byte fallback."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MARK = "\ufdd0"
"""A Unicode noncharacter. `_mark` inserts it into the names of special tokens in chat messages, so that the tokenizer
does not recognise the names. It is removed before the text is tokenised."""
CUT = "\ufdd1"
"""Another noncharacter: where to cut a rendered conversation whose last message is to go on."""

BYTE_SPECIALS = tuple("<|bos|> <|eos|> <|pad|> <|user|> <|assistant|> <|end|> <|reserved0|> <|reserved1|>".split())
"""Special tokens of the byte tokenizer, ids 256 to 263; the last two only round the vocabulary up to 264."""

BYTE_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- raise_exception('role ' + message.role + ' must be user or assistant') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(kw_only=True)
class Tokenizer:
    """A `tokenizers` tokenizer with its named special tokens and chat template.

    Attributes:
        backend: the underlying tokenizer.
        specials: text of each special token by role, as in {"bos_token": "<s>", "eos_token": "</s>"}. In a chat
            template, each role is a variable that holds the text.
        chat_template: jinja source.
        tool_template: jinja source for chats with tools, unless `chat_template` serves these, too.
        settings: other keys of tokenizer_config.json, written back unchanged.
    """

    backend: tokenizers.Tokenizer
    specials: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    _renderer: Renderer = field(default_factory=Renderer, init=False, repr=False, compare=False)
    _traits: dict[bool, Traits] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return self.special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one. A model may stop at others, too: `ModelConfig.eos_ids`."""
        return self.special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self.special_id("pad_token")

    def special_id(self, role: str) -> int | None:
        token = self.specials.get(role)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Encode a text as token ids.

        With `add_special`, add the tokens that the model expects around a text (often a leading bos). With
        `parse_special`, names of special tokens in the text, such as "<|user|>", become these tokens, as in
        transformers; without it, every character is text.
        """
        self.backend.encode_special_tokens = not parse_special
        return _encode(self.backend, text, add_special)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode token ids to text. Bytes that are not UTF-8 become U+FFFD, and unknown ids are dropped."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text. They may be a part of a character, or a special name."""
        letter = self.backend.token_to_id("a")
        first = [] if letter is None else [letter]  # decoders drop the space before a first word
        text = self.decode([*first, token], skip_special=False).removeprefix(self.decode(first, skip_special=False))
        if REPLACEMENT not in text:
            return text.encode()
        name = self.backend.id_to_token(token) or ""
        if byte := BYTE_TOKEN.fullmatch(name):  # byte fallback
            return bytes.fromhex(byte[1])
        known = all(character in _BYTES for character in name)  # byte-level tokenizers
        return bytes(_BYTES[character] for character in name) if known else text.encode()

    def stream(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> "TextStream":
        """Return a decoder that takes one id at a time; names of the special tokens in `shown` stay in the text."""
        return TextStream(self, skip_special, shown)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation as the model expects it, with the checkpoint's template in a sandbox.

        Args:
            messages: the conversation's messages, {"role": ..., "content": ...}, as plain JSON data.
            add_generation_prompt: end with the start of the assistant's turn.
            continue_final: end inside the last message, whose whole text the template must write.
            variables: other variables of the template (documents, enable_thinking, ...). Non-empty `tools` select
                `tool_template`, if there is one.
        """
        if continue_final:
            messages, last = _cut_last(messages)
            text = self.render_chat(messages, add_generation_prompt=False, **variables)
            return _until_cut(text, last)
        if self.chat_template is None:
            raise ValueError("this checkpoint has no chat template: pass plain text, or add a chat_template.jinja file")
        data = {"messages": messages, "tools": None, "documents": None, **variables}
        size = _plain_size(data)
        data = {**self.specials, "add_generation_prompt": add_generation_prompt, **data}
        template = (variables.get("tools") and self.tool_template) or self.chat_template
        try:
            return self._renderer.render(template, data, size)
        except ValueError as error:
            # Hermes' template for tools iterates over them even if there are none
            if data["tools"] is not None or "'NoneType' object is not iterable" not in str(error):
                raise
            return self._renderer.render(template, data | {"tools": []}, size)

    def traits(self, *, offered: bool) -> Traits:
        """Return what the chat template does with calls, in conversations that offer tools or in those that do not."""
        if offered not in self._traits:
            self._traits[offered] = traits_of(self.render_chat, offered=offered)
        return self._traits[offered]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        parse_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Render a conversation and encode it as token ids. No bos is added, because the template writes it.

        Only the template can write special tokens. The name of a special token in a message or variable stays text, so
        that a message cannot end its own turn. With `parse_special`, the name becomes the token, as in transformers.
        """
        data = {**variables, "messages": messages}
        _plain_size(data)
        added = [token for token in self.backend.get_added_tokens_decoder().values() if token.special]
        names = [token.content for token in added if len(token.content) > 1]
        # a normaliser may turn other characters into a special token's name
        literal = not parse_special and (any(token.normalized for token in added) or _holds(data, names))
        text = self.render_chat(
            **(_mark(data, names) if literal else data),
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
        )
        return (
            _encode(self._literal_backend, text, add_special=False) if literal else self.encode(text, add_special=False)
        )

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """Copy of the backend that first searches a text for special tokens and then removes MARK from the text."""
        raw = json.loads(self.backend.to_str())
        for token in raw["added_tokens"]:
            token["normalized"] &= not token["special"]  # find special tokens before MARK is removed
        drop = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
        others = [] if raw["normalizer"] is None else [raw["normalizer"]]
        raw["normalizer"] = {"type": "Sequence", "normalizers": [drop, *others]}
        return tokenizers.Tokenizer.from_str(json.dumps(raw))

    def save(self, folder: str | os.PathLike) -> None:
        """Write the tokenizer's files to a folder, as transformers reads them: all or none. Other files stay."""
        with replace_folder(Path(folder), outdated=FILES.__contains__) as new:
            self.write(new)

    def write(self, folder: Path) -> None:
        """Write the files that `save` writes into a new folder, which the caller then moves into place."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings, **self.specials}
        if self.tool_template is not None:  # every version of transformers reads a list of templates
            named = {DEFAULT: self.chat_template, TOOL_USE: self.tool_template}
            settings["chat_template"] = [{"name": name, "template": template} for name, template in named.items()]
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        if self.chat_template is not None and self.tool_template is None:
            write_text(folder / TEMPLATE_FILE, self.chat_template)


class TextStream:
    """Decoder from single ids to pieces of text, which join to the text of all ids; none ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, shown: frozenset[int]):
        self._tokenizer, self._skip_special, self._shown = tokenizer, skip_special, shown
        self._ids: list[int] = []  # a window: context (tokens whose text was returned), then tokens held back
        self._context = 0  # how many of _ids are context
        self._given = ""  # the part of the window's text that was returned

    def push(self, token: int) -> str:
        """Take one id and return the text that has become final: "" while a character is incomplete."""
        if token in self._shown:
            piece = self.finish() + (self._tokenizer.backend.id_to_token(int(token)) or "")
            self._ids, self._context, self._given = [], 0, ""
            return piece
        self._ids.append(int(token))
        text = self._text()
        if not text.startswith(self._given):
            # Byte fallback turns a whole run of bytes into replacement characters while the run's last character is
            # unfinished. A character has at most four bytes, so after four ids they are decoded without context.
            if len(self._ids) - self._context < 4:
                return ""
            text = self._drop_context()
        # An unfinished character shows as up to three replacement characters at the end: one for all its bytes
        # (byte-level tokenizers) or one for each byte (byte fallback). More than three cannot be one character.
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), 3)
        piece = text[len(self._given) : len(text) - held]
        self._given += piece
        if not held:  # context keeps what decoders do only at the start (dropping a space) from happening again
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._given = self._text()
        return piece

    def finish(self) -> str:
        """Return the rest of the text, which `push` has held back. An unfinished character becomes U+FFFD."""
        text = self._text()
        if not text.startswith(self._given):
            text = self._drop_context()
        piece, self._given = text[len(self._given) :], text
        return piece

    def _drop_context(self) -> str:
        self._ids, self._context, self._given = self._ids[self._context :], 0, ""
        return self._text()

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=self._skip_special)


def _cut_last(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Return the messages with CUT at the end of the last one's text, and that text."""
    *earlier, last = messages
    content = last.get("content") or ""
    if isinstance(content, str):
        return [*earlier, {**last, "content": content + CUT}], content
    *parts, end = content
    if not isinstance(end, Mapping) or not isinstance(end.get("text"), str):
        raise ValueError("the last part of the last message is not a text part: only text can be continued")
    return [*earlier, {**last, "content": [*parts, {**end, "text": end["text"] + CUT}]}], end["text"]


def _until_cut(text: str, last: str) -> str:
    """Return a rendered conversation up to CUT. Templates trim messages, so white space before CUT may differ."""
    text, cut, _ = text.rpartition(CUT)
    if not cut:
        raise ValueError("the chat template does not write the last message: do not continue it")
    if not "".join(text.split()).endswith("".join(last.split())):
        raise ValueError(
            "the chat template leaves out a part of the last message, often reasoning such as <think>...</think>: "
            "leave that part out, or do not continue the message"
        )
    return text


def _encode(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not UTF-8: its character {error.start} is {quoted(text[error.start])}: convert it to UTF-8"
        ) from error
    with LibraryErrors("the tokenizer fails on the text"):
        return backend.encode(text, add_special_tokens=add_special).ids


def _plain_size(data: Any) -> int:
    """Return the length of `data` as JSON; raise ValueError unless it is plain JSON data in valid UTF-8.

    A chat template is untrusted code and must not get objects with methods.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
        return len(json.dumps(data))
    except UnicodeEncodeError as error:
        held = quoted(error.object[error.start])
        raise ValueError(f"the text is not UTF-8: it holds {held}: convert it to UTF-8") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat messages must be plain JSON data: {error}") from error


def _holds(data: Any, names: Sequence[str]) -> bool:
    if isinstance(data, str):
        return any(name in data for name in names)
    if isinstance(data, Mapping):
        return any(_holds(value, names) for value in (*data, *data.values()))
    return isinstance(data, list | tuple) and any(_holds(value, names) for value in data)


def _mark(data: Any, names: Sequence[str]) -> Any:
    if isinstance(data, str):
        data = data.replace(MARK, "")
        for name in names:
            while name in data:  # once is not enough where a name overlaps itself
                data = data.replace(name, name[0] + MARK + name[1:])
        return data
    if isinstance(data, Mapping):
        return {_mark(key, names): _mark(value, names) for key, value in data.items()}
    return [_mark(value, names) for value in data] if isinstance(data, list | tuple) else data


def byte_tokenizer() -> Tokenizer:
    """Build the demo model's tokenizer, with 264 ids: 0 to 255 are the bytes of UTF-8 text, the rest BYTE_SPECIALS."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in BYTE_SPECIALS])
    bos, eos, pad = BYTE_SPECIALS[:3]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return Tokenizer(
        backend=backend,
        specials={"bos_token": bos, "eos_token": eos, "pad_token": pad},
        chat_template=BYTE_TEMPLATE,
        settings={"clean_up_tokenization_spaces": False},
    )


def _byte_characters() -> list[str]:
    """List, for each byte, the printable character that byte-level tokenizers write for it (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(_byte_characters())}
