"""Request bodies of the OpenAI API, with the fields that the server supports; `replies` builds the responses.

Source: the OpenAI API reference (completions, chat completions, models). The server refuses a request with an unknown
field and names the field, because a client that sets a field expects it to have an effect. `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos` and `continuous_usage_stats` extend OpenAI's API, under the names that vLLM uses.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from tessera.runtime.limits import RANKS
from tessera.serve.messages import MAX_MESSAGES, MAX_TOOLS, Message, Tool, ToolChoice
from tessera.serve.schema import Refusal, Schema
from tessera.serve.tools import call_schema

MAX_CHOICES = 8
"""Maximum number of answers to one prompt."""
MAX_PROMPTS = 64
"""Maximum number of prompts in one completion request."""
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_BIASES = 1024
CHARACTERS = 128
"""Length in characters of the longest token in common vocabularies: a run of spaces."""
SCHEMA_CHARACTERS = 1 << 16
"""Maximum characters of a schema. For some larger schemas, llguidance takes seconds."""
CHAT_TOKENS = 512
"""Maximum new tokens of a chat completion if neither the request nor the model's generation_config.json sets a limit.
A low limit keeps short chats dense: a request runs sparse if its prompt and its maximum new tokens together exceed the
plan's cross-over."""
COMPLETION_TOKENS = 16
"""Maximum new tokens of a completion that sets no `max_tokens`, as in OpenAI's API."""

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Zero = Annotated[float, Field(ge=0, le=0)]
Ranks = Annotated[int, Field(ge=0, le=RANKS)]


class JsonSchema(Schema):
    """The schema in `response_format`. Answers always follow it strictly, whatever the value of `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Schema):
    """The form that an answer must have: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def wanted(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer must follow; None if any text is allowed."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise Refusal(
                400,
                f"response_format.type={self.type}: the type json_schema needs a field json_schema, and no other type "
                "allows one; change the type or the field",
                param="response_format",
            )
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class StreamOptions(Schema):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Schema):
    """Fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=MAX_BIASES)] | None
    ) = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False

    def check(self, context: int) -> None:
        """Raise Refusal if the schema that the answer must follow is too long, or an option could have no effect."""
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream=true: set it, or leave both out", param="stream_options")
        if self.stream_options and self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise Refusal(
                400, "continuous_usage_stats needs include_usage=true: set both, or neither", param="stream_options"
            )
        form = self.response_format and self.response_format.json_schema
        if form is not None and (size := len(json.dumps(form.schema_))) > SCHEMA_CHARACTERS:
            said = f"the schema has {size:,} characters, but may have at most {SCHEMA_CHARACTERS:,}: shorten it"
            raise Refusal(400, said, param="response_format")

    @property
    def bias(self) -> dict[int, float]:
        """Number to add to the logit of each token id."""
        return {int(token): value for token, value in (self.logit_bias or {}).items()}

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None if the request sets none."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer starts with the prompt."""
        return False

    @property
    def schema_field(self) -> str:
        """Name of the request's field from which `wanted` takes the schema."""
        return "response_format"

    def wanted(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer must follow; None if any text is allowed."""
        return None if self.response_format is None else self.response_format.wanted()

    def sampling(self) -> dict[str, float]:
        """Return the sampling parameters that the request sets."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class CompletionBody(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Text | Ids | Texts | IdLists
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    logprobs: Ranks | None = None

    @property
    def ranks(self) -> int | None:
        """Number of most probable tokens to report at each position; None reports no probabilities."""
        return self.logprobs

    @property
    def limit(self) -> int:
        """Maximum number of new tokens; with `echo`, it may be 0."""
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(400, "max_tokens=0 needs echo=true: set echo, or a larger max_tokens", param="max_tokens")
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether the answer starts with the prompt and, with `logprobs`, with the prompt's token probabilities."""
        if self.echo and self.stream:
            raise Refusal(400, "echo=true: a stream cannot repeat the prompt; set stream=false", param="echo")
        return bool(self.echo)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The request's prompts, all as text or all as token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt

    def check(self, context: int) -> None:
        """Raise Refusal if a prompt cannot fit in `context` tokens."""
        super().check(context)
        for prompt in self.prompts:
            _check_length(prompt, context, "prompt")


class ChatBody(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Ranks | None = None

    @property
    def ranks(self) -> int | None:
        """Number of most probable tokens to report at each position; None reports no probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, f"top_logprobs={self.top_logprobs} needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the answer may call."""
        found = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in found]

    @property
    def forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def check(self, context: int) -> None:
        """Raise Refusal if the conversation and the tools cannot fit in `context` tokens."""
        texts = [text for message in self.messages for text in message.texts]
        texts += [json.dumps(tool.model_dump(exclude_none=True)) for tool in self.tools or ()]
        super().check(context)
        _check_length("".join(texts), context, "messages")

    @property
    def schema_field(self) -> str:
        """Name of the request's field from which `wanted` takes the schema."""
        return "tools" if self.forced else super().schema_field

    def wanted(self) -> dict[str, Any] | None:
        """Return the JSON schema of a forced tool call, or else of `response_format`; None if any text is allowed."""
        if not self.forced:
            return super().wanted()
        if self.response_format is not None:
            raise Refusal(
                400, "response_format and a forced tool call cannot be combined: drop one", param="response_format"
            )
        name = None if self.tool_choice == "required" else self.tool_choice.function.name
        names = [tool["function"]["name"] for tool in self.offered]
        if not names or name not in (None, *names):
            raise Refusal(
                400, f"tool_choice={name or 'required':.80} needs a matching tool: add it to tools", param="tool_choice"
            )
        try:
            return call_schema(self.offered, name)
        except ValueError as error:
            raise Refusal(400, str(error), param="tools") from error

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens: `max_completion_tokens`, or the older `max_tokens`; None if neither is set."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeBody(Schema):
    """Body of POST /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True

    def check(self, context: int) -> None:
        """Raise Refusal if the text cannot fit in `context` tokens."""
        _check_length(self.prompt, context, "prompt")


class DetokenizeBody(Schema):
    """Body of POST /detokenize."""

    tokens: Ids
    model: str | None = None


def _check_length(prompt: str | list[int], context: int, param: str) -> None:
    unit, limit = ("characters", context * CHARACTERS) if isinstance(prompt, str) else ("tokens", context)
    if len(prompt) > limit:
        said = f"{param} has {len(prompt):,} {unit}, but may have at most {limit:,}: shorten it"
        raise Refusal(400, said, param=param)
