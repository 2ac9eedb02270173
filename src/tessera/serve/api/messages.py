"""The messages and tools of a chat request, and the form in which chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from tessera.serve.api.history import parsed
from tessera.serve.api.schema import Refusal, Schema

MAX_MESSAGES = 4096
MAX_TOOLS = 128


class TextPart(Schema):
    """A part of a message's content; only text is supported. `input_text` and `output_text` are names of Responses."""

    ignored = frozenset({"cache_control", "annotations", "logprobs"})

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Schema):
    """A part of an earlier answer in which the model refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(Schema):
    """A part of an earlier answer that is its reasoning, in Anthropic's and Mistral's form."""

    ignored = frozenset({"cache_control", "closed", "signature"})

    type: Literal["thinking"]
    thinking: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


Part = str | TextPart | RefusalPart | ThinkingPart


class Function(Schema):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    ignored = frozenset({"return", "returns"})  # of results, which no supported template reads

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    """A tool; the only kind is a function."""

    ignored = frozenset({"cache_control", "strict"})  # arguments of a forced call always follow the schema

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
    """The function of a tool call in an earlier answer; `arguments` is JSON text, an object, or empty."""

    ignored = frozenset({"parsed_arguments"})  # which OpenAI's client adds

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Schema):
    """A tool call in an earlier answer."""

    # streams number the calls, and LiteLLM and Gemini's clients add what only their servers read
    ignored = frozenset({"index", "cache_control", "provider_specific_fields", "extra_content", "thought_signature"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Schema):
    """One message of a conversation. Whatever the server answers is accepted when it comes back."""

    ignored = frozenset(
        "annotations cache_control parsed provider_specific_fields thinking_blocks reasoning_details id type status "
        "is_error tool_name timestamp created_at metadata".split()
    )
    neutral = {"prefix": (False,), "partial": (False,), "images": ([],), "attachments": ([],), "logprobs": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_MESSAGES)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @property
    def texts(self) -> list[str]:
        """Content of the message, its reasoning, and the names and arguments of its tool calls."""
        parts = self.content if isinstance(self.content, list) else [self.content or ""]
        content = [part if isinstance(part, str) else part.text for part in parts]
        content += [self.refusal or "", self.reasoning_content or self.reasoning or ""]
        for call in self.tool_calls or ():
            name, given = call.function.name, call.function.arguments
            content += [name, given if isinstance(given, str) else json.dumps(given or {})]
        return content

    def plain(self) -> dict[str, Any]:
        """Return the message as `tools.conversation` takes it; OpenAI's role "developer" becomes "system"."""
        text, thought = self.content, self.reasoning_content or self.reasoning
        if isinstance(self.content, list):
            parts = [part for part in self.content if not isinstance(part, ThinkingPart)]
            thought = thought or "\n".join(part.text for part in self.content if isinstance(part, ThinkingPart))
            text = "\n".join(part if isinstance(part, str) else part.text for part in parts)
        text = self.refusal if text is None else text
        if text is None and self.role in ("system", "developer", "user"):
            raise Refusal(400, f"a message of role {self.role} has no content: add some text", param="messages")
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        found |= {"name": self.name, "reasoning_content": thought}
        found |= {"tool_call_id": self.tool_call_id, "tool_calls": [_plain(call) for call in self.tool_calls or ()]}
        return {key: value for key, value in found.items() if key == "content" or value}


def _plain(call: ToolCall) -> dict[str, Any]:
    try:
        parsed(call.function.arguments)
    except (ValueError, RecursionError):
        said = f"the arguments of the tool call {call.function.name:.80} are not JSON: send JSON text"
        raise Refusal(400, said, param="messages") from None
    return call.model_dump()
