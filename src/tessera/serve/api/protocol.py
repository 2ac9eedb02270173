"""Request bodies of the OpenAI API, with the fields that the server supports; `replies` builds the responses.

Source: the OpenAI API reference (completions, chat completions, models); fields that it lacks are vLLM's, and
`n_predict` is llama.cpp's. The server refuses a request with an unknown field and names the field, because a client
that sets a field expects it to have an effect; `fields` lists those that have none.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tessera.runtime.limits import RANKS
from tessera.runtime.sampling import KINDS
from tessera.serve.api.fields import IGNORED, NEUTRAL, refusal_of
from tessera.serve.api.forms import Form, FormFields, Text, json_form
from tessera.serve.api.messages import MAX_MESSAGES, MAX_TOOLS, Message, Tool, ToolChoice
from tessera.serve.api.schema import Refusal, Schema
from tessera.serve.api.tools import call_schema

MAX_CHOICES, MAX_PROMPTS = 8, 64
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_BIASES = 1024
CHARACTERS = 128
"""Characters of the longest token in common vocabularies, a run of spaces."""
COMPLETION_TOKENS = 16
"""Maximum new tokens of a completion that sets no `max_tokens`, as in OpenAI's API."""
MAX_VARIABLES = 64
RESERVED = {"self", "messages", "tools", "add_generation_prompt", "continue_final", "parse_special", "tokenizer"}
"""Names that `chat_template_kwargs` may not have."""

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]


def _with_id(parts: list[int | str]) -> list[int | str]:
    if not any(isinstance(part, int) for part in parts):
        raise ValueError("a prompt of several texts has token ids, too")
    return parts


Mixed = Annotated[list[Id | Text], Field(min_length=1, fail_fast=True), AfterValidator(_with_id)]
"""One prompt of token ids and texts, as llama.cpp takes it."""
Prompts = Annotated[list[str | Ids | Mixed], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Prompt = str | list[int] | list[int | str]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasMap = Annotated[dict[Stop, Bias | Literal[False]], Field(max_length=MAX_BIASES)]
"""Biases by token id, as text, or by text; False forbids the token."""
BiasPair = Annotated[tuple[Id | Stop, Bias | Literal[False]], Field(strict=False)]  # JSON has no tuples
BiasPairs = Annotated[list[BiasPair], Field(max_length=MAX_BIASES)]
"""Biases as llama.cpp takes them."""
NUMBER = re.compile("[+-]?[0-9]+")
"""Pattern of a token id in an object's keys; every other key is a text."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
Ranks = Annotated[int, Field(ge=0, le=RANKS)]


class StreamOptions(Schema):
    """Options of a streamed response."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(FormFields):
    """Fields that completions and chat completions share."""

    ignored = IGNORED
    neutral = NEUTRAL

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: BiasMap | BiasPairs | None = None
    allowed_token_ids: Ids | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Ranks | None = None

    def check(self, context: int) -> None:
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options needs stream=true: set it, or leave both out", param="stream_options")
        if self.stream_options and self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise Refusal(
                400, "continuous_usage_stats needs include_usage=true: set both, or neither", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            said = "prompt_logprobs cannot be streamed: set stream=false, or use echo and logprobs of /v1/completions"
            raise Refusal(400, said, param="prompt_logprobs")
        if self.best_of not in (None, self.n):
            raise Refusal(400, refusal_of("best_of"), param="best_of")
        self.form()
        super().check(context)

    @property
    def biases(self) -> list[tuple[int | str, float | Literal[False]]]:
        if not isinstance(self.logit_bias, dict):
            return self.logit_bias or []
        return [(int(key) if NUMBER.fullmatch(key) else key, value) for key, value in self.logit_bias.items()]

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        return _limit(self.max_tokens, self.n_predict)

    @property
    def first_seed(self) -> int | None:
        """Seed of the first choice; None, or -1 as in vLLM and llama.cpp, means a random one."""
        return None if self.seed == -1 else self.seed

    @property
    def echoes(self) -> bool:
        return False

    def sampling(self) -> dict[str, float]:
        given = {name: value for name in KINDS if (value := getattr(self, name)) is not None}
        if self.top_p == 0:  # only the best token
            given |= {"top_k": 1, "top_p": 1.0}
        return given | ({"top_k": 0} if given.get("top_k") == -1 else {})  # both keep all tokens


class CompletionBody(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: str | Ids | Prompts | Mixed
    echo: bool = False
    logprobs: Ranks | None = None
    add_special_tokens: bool = True

    @property
    def ranks(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens, which may be 0 with `echo`; None if -1 asks for what fits."""
        limit = COMPLETION_TOKENS if self.max_tokens is None and self.n_predict is None else super().limit
        if limit == 0 and not self.echo:
            raise Refusal(400, "max_tokens=0 needs echo=true: set echo, or a larger max_tokens", param="max_tokens")
        return limit

    @property
    def echoes(self) -> bool:
        """Whether the answer starts with the prompt and, with `logprobs`, with the prompt's token probabilities."""
        return self.echo

    @property
    def prompts(self) -> list[Prompt]:
        given = self.prompt
        whole = isinstance(given, str) or any(isinstance(part, int) for part in given)
        return [given] if whole else given

    def check(self, context: int) -> None:
        super().check(context)
        for prompt in self.prompts:
            _check_parts([prompt] if isinstance(prompt, str) else prompt, context, "prompt")


class Conversation(Schema):
    """Fields of a conversation and of how the chat template writes it."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self._tools

    @property
    def _tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def opens(self) -> bool:
        """Whether the template ends with the start of a new message of the assistant."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check(self, context: int) -> None:
        super().check(context)
        texts = [text for message in self.messages or () for text in message.texts]
        texts += map(json.dumps, self._tools)
        _check_length("".join(texts), context, "messages")
        if self.continue_final_message and self.opens:
            said = "continue_final_message and add_generation_prompt cannot both be true: the first goes on with the "
            raise Refusal(400, f"{said}last message, the second begins a new one", param="continue_final_message")
        if wrong := RESERVED & (self.chat_template_kwargs or {}).keys():
            said = f"chat_template_kwargs may not set {min(wrong)}: it has a field or is the server's; leave it out"
            raise Refusal(400, said, param="chat_template_kwargs")


class ChatBody(SamplingFields, Conversation):
    """Body of POST /v1/chat/completions."""

    neutral = NEUTRAL | {"echo": (False,), "add_special_tokens": (False,), "parse_tool_calls": (True,)}

    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool = False
    top_logprobs: Ranks | None = None

    @property
    def ranks(self) -> int | None:
        """Number of most probable tokens to report at each position; None reports no probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, f"top_logprobs={self.top_logprobs} needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def form(self) -> Form | None:
        """Return the JSON schema of a forced tool call, or else what another field asks for; None allows any text."""
        form = super().form()
        if not self.forced:
            return form
        if form is not None:
            said = f"{form.field} and a forced tool call cannot be combined: drop one"
            raise Refusal(400, said, param=form.field)
        name = None if self.tool_choice == "required" else self.tool_choice.function.name
        names = [tool["function"]["name"] for tool in self.offered]
        if not names or name not in (None, *names):
            raise Refusal(
                400, f"tool_choice={name or 'required':.80} needs a matching tool: add it to tools", param="tool_choice"
            )
        try:
            return json_form(call_schema(self.offered, name), "tools")
        except ValueError as error:
            raise Refusal(400, str(error), param="tools") from error

    @property
    def limit(self) -> int | None:
        limit = _limit(self.max_completion_tokens, self.max_tokens, self.n_predict)
        if limit == 0:
            raise Refusal(400, "max_tokens=0 leaves no room for an answer: send 1 or more", param="max_tokens")
        return limit


class TokenizeBody(Conversation):
    """Body of POST /tokenize: a text, as `prompt` (vLLM) or `content` (llama.cpp), or a conversation.

    It may be the whole body of a completion or chat completion; fields that change no prompt are ignored.
    """

    ignored = {*IGNORED, *CompletionBody.model_fields, *ChatBody.model_fields} - {
        *Conversation.model_fields,
        *("model", "prompt", "add_special_tokens"),
    }
    neutral = {name: values for name, values in ChatBody.neutral.items() if name != "add_special_tokens"}
    neutral |= {"parse_special": (True,)}

    model: str | None = None
    prompt: str | None = None
    content: str | Annotated[list[Id | str], Field(fail_fast=True)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False

    @property
    def parts(self) -> list[int | str] | None:
        """The text, or the token ids and texts; None if there is a conversation."""
        given = self.content if self.prompt is None else self.prompt
        return [given] if isinstance(given, str) else given

    @property
    def adds_special(self) -> bool:
        """Whether to add the tokens that the model expects around a text: by default, as the API of its field does."""
        given = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if given is None else given

    def check(self, context: int) -> None:
        if sum(given is not None for given in (self.prompt, self.content, self.messages)) != 1:
            raise Refusal(400, "send one of prompt, content and messages", param="prompt")
        if self.messages is not None and not self.parse_special:
            said = "parse_special=false: only the template's own marks are tokens in messages; leave it out"
            raise Refusal(400, said, param="parse_special")
        super().check(context)
        _check_parts(self.parts or (), context, "content" if self.prompt is None else "prompt")


class DetokenizeBody(Schema):
    """Body of POST /detokenize."""

    tokens: Annotated[list[Id], Field(fail_fast=True)]
    model: str | None = None


def _limit(*given: int | None) -> int | None:
    """Return the first number that is given; None if none is, or if it is -1, which llama.cpp takes for no limit."""
    found = next((number for number in given if number is not None), None)
    return None if found == -1 else found


def _check_parts(parts: Sequence[int | str], context: int, param: str) -> None:
    for part in parts:
        if isinstance(part, str):
            _check_length(part, context, param)
    _check_length(parts, context, param)


def _check_length(prompt: str | Sequence[int | str], context: int, param: str) -> None:
    unit, limit = ("characters", context * CHARACTERS) if isinstance(prompt, str) else ("tokens", context)
    if len(prompt) > limit:
        said = f"{param} has {len(prompt):,} {unit}, but may have at most {limit:,}: shorten it"
        raise Refusal(400, said, param=param)
