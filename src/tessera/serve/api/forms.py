"""The fields that restrict an answer's text: to JSON, a regex, some choices or a grammar, by the names of each API.

OpenAI's and llama.cpp's `response_format`, vLLM's `structured_outputs` and the older `guided_*`, SGLang's `regex`,
`ebnf` and `json_schema`, llama.cpp's `grammar` and `json_schema`. All become a `Form`, and a request may have one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tessera.serve.api.schema import Refusal, Schema

FORM_CHARACTERS = 1 << 16
"""Maximum characters of a schema, regex or grammar. For some larger ones, llguidance takes seconds."""
MAX_CHOICES = 1024

JsonText = dict[str, Any] | Annotated[str, Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What an answer must follow.

    Attributes:
        text: the schema as JSON, the regex, or a grammar in Lark's or llama.cpp's notation. Choices become a grammar.
        field: name of the request's field that asks for it.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    field: str

    def __post_init__(self):
        if len(self.text) > FORM_CHARACTERS:
            said = f"the {self.noun} has {len(self.text):,} characters, but may have at most {FORM_CHARACTERS:,}"
            raise Refusal(400, f"{said}: shorten it", param=self.field)

    @property
    def noun(self) -> str:
        """What errors call the text."""
        return {"json": "schema", "choice": "list of choices"}.get(self.kind, self.kind)


def json_form(schema: Mapping[str, Any] | str, field: str) -> Form:
    """Return the form of JSON that follows a schema; raise Refusal if it is text, but not of a JSON object."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if isinstance(schema, str):
        try:
            found = json.loads(schema)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Refusal(400, f"{field} is not a JSON schema: send a JSON object, or the text of one", param=field)
    return Form(kind="json", text=text, field=field)


def choice_form(texts: Sequence[str], field: str) -> Form:
    """Return the form of one of several texts; raise Refusal if one holds half a character, which no answer can."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refusal(400, f"{field} holds half a character: send whole characters", param=field) from None
    return Form(kind="choice", text="start: " + " | ".join(map(json.dumps, texts)), field=field)


class JsonSchema(Schema):
    """The schema in `response_format`. Answers always follow it strictly, whatever the value of `strict`."""

    ignored = frozenset({"name", "description", "strict"})

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Schema):
    """The form that an answer must have: any text, JSON, or text that follows a regex or a grammar.

    `schema` is llama.cpp's field, `value` is that of Text Generation Inference, and `grammar` is that of Fireworks and
    MLC.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonText | None, Field(alias="schema")] = None
    value: JsonText | None = None
    regex: Text | None = None
    grammar: Text | None = None

    def form(self) -> Form | None:
        """Return what the answer must follow; None if any text is allowed."""
        given = {name: getattr(self, name) for name in ("json_schema", "schema_", "value", "regex", "grammar")}
        given = {name.rstrip("_"): value for name, value in given.items() if value is not None}
        fields = {
            "text": (),
            "json_object": ("schema",),
            "json_schema": ("json_schema", "schema"),
            "json": ("value", "schema"),
            "regex": ("value", "regex"),
            "grammar": ("value", "grammar"),
        }[self.type]
        needed = self.type not in ("text", "json_object")
        if len(given) > 1 or not set(given) <= {*fields} or (needed and not given):
            wanted = " or ".join(fields) or "no further field"
            raise Refusal(
                400,
                f"response_format.type={self.type} takes {wanted}, but response_format has "
                f"{', '.join(given) or 'none'}: change the type or the field",
                param="response_format",
            )
        if self.type == "text":
            return None
        value = next(iter(given.values()), {"type": "object"})
        if self.type in ("regex", "grammar"):
            if not isinstance(value, str):
                raise Refusal(400, f"response_format.value is no {self.type}: send text", param="response_format")
            return Form(kind=self.type, text=value, field="response_format")
        return json_form(value.schema_ if isinstance(value, JsonSchema) else value, "response_format")


class StructuredOutputs(Schema):
    """vLLM's way to restrict an answer: one of these fields."""

    ignored = frozenset({"disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto"})
    neutral = {"json_object": (False,), "disable_additional_properties": (False,)}

    json_: Annotated[JsonText | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def forms(self) -> list[Form]:
        given = {"json": self.json_, "json_object": self.json_object and {"type": "object"}}
        given |= {"regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        named = {f"structured_outputs.{name}": value for name, value in given.items()}
        return [_form(field, value) for field, value in named.items() if value]


class FormFields(Schema):
    """The fields of a request that restrict the text of its answers."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: JsonText | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None

    def form(self) -> Form | None:
        """Return what the answer must follow; None allows any text. Refuse two fields that ask for a form."""
        names = [name for name in FormFields.model_fields if name not in ("response_format", "structured_outputs")]
        found = [_form(name, value) for name in names if (value := getattr(self, name)) is not None]
        if self.structured_outputs is not None:
            found += self.structured_outputs.forms()
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            found.append(form)
        if len(found) > 1:
            said = f"{found[0].field} and {found[1].field} cannot be combined: drop one"
            raise Refusal(400, said, param=found[0].field)
        return found[0] if found else None


def _form(field: str, value: Any) -> Form:
    """Return the form that a field's value asks for; the field's name tells the kind."""
    kind = field.rpartition(".")[2].removeprefix("guided_")
    if kind.startswith("json"):
        return json_form(value, field)
    if kind == "choice":
        return choice_form(value, field)
    return Form(kind="regex" if kind == "regex" else "grammar", text=value, field=field)
