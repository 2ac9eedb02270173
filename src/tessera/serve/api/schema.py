"""What all request bodies share: JSON objects without unknown fields, and the error of a request that is refused."""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Schema(BaseModel):
    """A JSON object without unknown fields. Values are never converted: a number given as the string "1" is refused.
    But 1.0 is the integer 1, as JSON Schema says: some languages write all numbers so.

    A field that is null counts as left out, whether it is known or not: many clients write all their unset fields.

    Attributes:
        ignored: fields that change no answer. They count as left out, too.
        neutral: field -> values that have no effect; with one, the field counts as left out, too.
    """

    ignored: ClassVar[Container[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = MappingProxyType({})

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in given.items()
            if not (value is None or name in cls.ignored or _is_in(value, cls.neutral.get(name, ())))
        }

    def check(self, context: int) -> None:
        """Raise Refusal if a prompt cannot fit in `context` tokens. Encoding it would take seconds."""


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a JSON value is among others; true is not 1, as it is in Python."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


class Refusal(Exception):
    """Error for a request that the server refuses, because of its field `param`; `retry_s` becomes Retry-After."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_s: int | None = None):
        super().__init__(message)
        self.status, self.param, self.retry_s = status, param, retry_s

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}
