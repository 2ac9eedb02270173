"""Parse a request's body: its size is limited first; an error names the field, its value and what it must be."""

from reprlib import Repr

from pydantic import ValidationError

from tessera.serve.api.fields import refusal_of
from tessera.serve.api.schema import Refusal, Schema

MAX_VALUES, MAX_FIELDS = 300_000, 50_000
"""Maximum number of commas and of opening brackets in a body, also inside texts, and of fields of all its objects. A
long context allows more commas: twice its tokens. Parsing so many takes about 0.1 s."""
MAX_ERRORS = 1000
"""Maximum number of validation errors from which `parse` picks one to report. Reading a million takes seconds."""

SHORT = Repr(maxstring=80, maxother=80, maxlong=80)
"""Formatter that abbreviates wrong values in error messages. Formatting a large value in full would take seconds."""
NAME = 80
"""Maximum characters of a field's name in an error message."""


def parse[Body: Schema](schema: type[Body], raw: bytes, context: int | None = None) -> Body:
    """Parse a request's body, for requests of at most `context` tokens; None accepts prompts of any length."""
    if raw.count(b",") > (limit := max(MAX_VALUES, 2 * (context or 0))):
        raise Refusal(413, f"the body has over {limit:,} commas: send fewer prompts, or text instead of token ids")
    if raw.count(b"[") + raw.count(b"{") > MAX_VALUES or _most_fields(raw) > MAX_FIELDS:
        raise Refusal(413, f"the body has over {MAX_VALUES:,} opening brackets or {MAX_FIELDS:,} fields: send less")
    try:
        body = schema.model_validate_json(raw)
        if context is not None:
            body.check(context)
        return body
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            raise Refusal(
                400, f"the body has {error.error_count():,} wrong fields or values: see /docs for its schema"
            ) from None
        # A union reports one error per alternative: prefer those of the right JSON type, then the deepest.
        errors = error.errors(include_url=False, include_context=False)
        found = max(errors, key=lambda one: (not one["type"].endswith("_type"), len(one["loc"])))
    unknown = found["type"] == "extra_forbidden"  # then the location ends with a name that the client chose
    *outer, last = found["loc"] or ("",)
    names = [*(part for part in outer if not _is_type(part)), *([last] if unknown or not _is_type(last) else [])]
    field = ".".join(f"{name!s:.{NAME}}" for name in names) or ("''" if unknown else None)
    said = found["msg"][:1].lower() + found["msg"][1:]
    if unknown:
        raise Refusal(400, refusal_of(field), param=field)
    if found["type"] == "json_invalid" or field is None:
        raise Refusal(400, f"the body is not a JSON object of the right form: {said}")
    value = "" if found["type"] == "missing" else f"={SHORT.repr(found['input']):.80}"
    raise Refusal(400, f"{field}{value}: {said}", param=field)


def _most_fields(raw: bytes) -> int:
    """Return an upper bound of the number of fields in JSON text; it is exact unless texts contain escaped JSON."""
    dense = raw.translate(None, b" \t\r\n")
    # a quotation mark after a backslash is part of a text, unless the backslash itself is escaped
    return dense.count(b'":') - dense.count(b'\\":') + dense.count(b'\\\\":')


def _is_type(part: str | int) -> bool:
    """Return whether a part of an error's location names an alternative of a union rather than a field."""
    if not isinstance(part, str) or part.isdigit():
        return False
    return part in {"str", "int", "float"} or part[:1].isupper() or not part.isidentifier()
