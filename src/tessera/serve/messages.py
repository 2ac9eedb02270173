"""The messages and tools of a chat request, and the form in which chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from tessera.serve.schema import Refusal, Schema

MAX_MESSAGES = 4096
MAX_TOOLS = 128


class TextPart(Schema):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Function(Schema):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    """A tool; the only kind is a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Schema):
    """The function that the answer must call."""

    name: str


class ToolChoice(Schema):
    """The tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Schema):
    """The function of a tool call in an earlier answer; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Schema):
    """A tool call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @property
    def texts(self) -> list[str]:
        """Content of the message, and the names and arguments of its tool calls."""
        content = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        calls = [call.function for call in self.tool_calls or ()]
        return content + [text for call in calls for text in (call.name, call.arguments)]

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read; OpenAI's role "developer" becomes "system"."""
        if self.content is None and not self.tool_calls:
            raise Refusal(400, f"a message of role {self.role} has no content: add some text", param="messages")
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": _json(call)}}
                for call in self.tool_calls
            ]
        return found


def _json(call: ToolCall) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        said = f"the arguments of the tool call {call.function.name:.80} are not JSON: send JSON text"
        raise Refusal(400, said, param="messages") from None
