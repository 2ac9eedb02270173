"""Clients of OpenAI's API against one server: agent loops, structured output, and what each client keeps of an answer.

Runs in an environment of its own (`make clients`); reads one JSON request a line from standard input and writes one
JSON answer a line to standard output. Requests: hello, cases, run. A case is a client, what it does, and how: whole or
streamed. Its answer is {"kept": ...}, {"model": ...} if the model wrote something else than it was asked for, or
{"fault": ...}: the server refused a request, or the client could not read the response.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path

os.environ |= {
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm fetches a list of prices
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}

import agents
import instructor
import litellm
import openai
from agents.exceptions import AgentsException, MaxTurnsExceeded
from instructor.core import IncompleteOutputException, InstructorError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import (
    Agent,
    AgentRunError,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
    UsageLimits,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PACKAGES = ("openai", "langchain-openai", "litellm", "pydantic-ai-slim", "llm", "instructor", "openai-agents")
SYSTEM = "You are a helpful assistant."
ASK = "What is the weather in Paris?"
FORCED = "Look up the weather in Paris with the tool."
RECORD = "Make a record of the city of Paris, the capital of France."
RESULT = "It is 18 degrees and sunny in Paris. Now answer the user in plain English, without JSON."
"""Result of the tool. Without its second sentence, a model of half a billion parameters repeats its call instead."""
LIMIT = 60
"""Maximum new tokens of an answer."""
LIMIT_S = 300
"""Maximum seconds of a request."""
LIMITS = UsageLimits(request_limit=4)
"""Bound on pydantic-ai's own loop: a model that must call may call again and again."""


FAULTS = (
    *(AgentRunError, AgentsException, InstructorError, openai.OpenAIError, subprocess.SubprocessError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
)
"""What a client raises if a request is refused, or the response is not what it expects."""
CUT = (openai.LengthFinishReasonError, IncompleteOutputException, MaxTurnsExceeded, UsageLimitExceeded)
"""What a client raises if the model writes on until LIMIT, or calls again and again."""


class City(BaseModel):
    """A city."""

    name: str
    country: str


class Wrong(Exception):
    """Error: the model wrote something else than it was asked for."""


def weather(city: str) -> str:
    """Return the weather in a city."""
    return RESULT


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Setting:
    """The server that the clients talk to."""

    url = key = model = ""

    @property
    def options(self):
        """Options of every request through OpenAI's client, and through those with the same arguments."""
        return {"model": self.model, "temperature": 0, "max_tokens": LIMIT}


AT = Setting()


# --- what an answer must be


def called(name, arguments):
    """Check the call of an answer."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name != "weather" or "paris" not in str(given.get("city", "")).lower():
        raise Wrong(f"called {name}({given})")


def one_call(calls, text):
    """Return the only call of an answer."""
    if len(calls or ()) != 1:
        raise Wrong(f"made {len(calls or ())} calls and wrote {text!r:.200}")
    return calls[0]


def answered(text, calls=None):
    """Check the final answer, and return its text."""
    if "18" not in (text or "") or calls:
        raise Wrong(f"made {len(calls or ())} more calls and answered {text!r:.200}")
    return text


def described(city):
    """Check a structured answer, and return its values."""
    if city is None:
        raise Wrong("gave no value")
    if isinstance(city, dict):
        city = City.model_validate(city)
    if (city.name.lower(), city.country.lower()) != ("paris", "france"):
        raise Wrong(f"described {city!r:.200}")
    return city.model_dump()


def last(stream):
    """Return the last value of a stream; None if it yields none."""
    return ([None] + [getattr(value, "model_dump", lambda value=value: value)() for value in stream])[-1]


def expect(what, holds):
    """Raise ValueError unless a property of the response holds."""
    if not holds:
        raise ValueError(f"expected {what}")


def question(choice):
    """Return the messages that ask for a call."""
    asked = ASK if choice == "auto" else FORCED
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


# --- openai


def openai_client():
    """Return OpenAI's own client."""
    return openai.OpenAI(base_url=f"{AT.url}/v1", api_key=AT.key, max_retries=0, timeout=LIMIT_S)


def openai_deltas(client, messages, options):
    """Return (message, finish reason, usage) put together from a stream's deltas."""
    message, finish, usage, ids = {"role": "assistant", "content": ""}, None, None, set()
    given = {**AT.options, **options, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(messages=messages, **given):
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta, finish = choice.delta.model_dump(exclude_none=True), choice.finish_reason or finish
            message["content"] += delta.pop("content", "")
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls", []))
    expect("one id in all chunks", len(ids) == 1)
    return message, finish, usage


def openai_final(client, messages, options):
    """Return (message, finish reason, usage) that the client's helper collects from a stream."""
    given = {**AT.options, **options, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(messages=messages, **given) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion()
    return found.choices[0].message.to_dict(), found.choices[0].finish_reason, found.usage


def openai_whole(client, messages, options):
    """Return (message, finish reason, usage) of a whole response."""
    found = client.chat.completions.create(messages=messages, **AT.options, **options)
    return found.choices[0].message.model_dump(), found.choices[0].finish_reason, found.usage


def openai_loop(choice, collect):
    """Run the loop, sending back the message as the client gives it."""
    client, messages = openai_client(), question(choice)
    message, finish, usage = collect(client, messages, {"tools": [TOOL], "tool_choice": choice})
    call = one_call(message.get("tool_calls"), message.get("content"))
    called(**{key: call["function"][key] for key in ("name", "arguments")})
    expect("finish_reason tool_calls", finish == "tool_calls")
    expect("usage", usage.completion_tokens > 0 and usage.prompt_tokens > 0)
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    final, finish, usage = collect(client, messages, {"tools": [TOOL]})
    text = answered(final.get("content"), final.get("tool_calls"))
    expect("finish_reason stop", finish == "stop")
    return {"finish": ["tool_calls", finish], "id": call["id"], "usage": usage.total_tokens, "text": text}


def openai_parsed(how):
    """Ask for a pydantic model with the client's `parse`."""
    client, messages = openai_client(), [{"role": "user", "content": RECORD}]
    if how == "whole":
        found = client.chat.completions.parse(messages=messages, response_format=City, **AT.options)
    else:
        with client.chat.completions.stream(messages=messages, response_format=City, **AT.options) as stream:
            for _ in stream:
                pass
            found = stream.get_final_completion()
    return {"finish": [found.choices[0].finish_reason], "parsed": described(found.choices[0].message.parsed)}


# --- LangChain


def langchain_model():
    """Return LangChain's chat model."""
    named = {"model": AT.model, "base_url": f"{AT.url}/v1", "api_key": AT.key, "timeout": LIMIT_S}
    return ChatOpenAI(**named, temperature=0, max_tokens=LIMIT, max_retries=0, stream_usage=True)


def langchain_said(model, messages, how):
    """Return the message, whole or as the sum of a stream's chunks."""
    if how == "whole":
        return model.invoke(messages)
    chunks = list(model.stream(messages))
    return sum(chunks[1:], chunks[0])


def langchain_loop(choice, how):
    """Run the loop with `bind_tools`."""
    tool = langchain_tool(weather)
    model, messages = langchain_model(), question(choice)
    messages = [SystemMessage(messages[0]["content"]), HumanMessage(messages[1]["content"])]
    first = langchain_said(model.bind_tools([tool], tool_choice=choice), messages, how)
    call = one_call(first.tool_calls, first.content)
    called(call["name"], call["args"])
    expect("no invalid calls", not first.invalid_tool_calls)
    expect("finish_reason tool_calls", first.response_metadata["finish_reason"] == "tool_calls")
    expect("usage", first.usage_metadata["output_tokens"] > 0)
    result = tool.invoke(call)
    expect("a tool message", isinstance(result, ToolMessage) and result.tool_call_id == call["id"])
    final = langchain_said(model.bind_tools([tool]), [*messages, first, result], how)
    text = answered(final.text, final.tool_calls)
    expect("finish_reason stop", final.response_metadata["finish_reason"] == "stop")
    usage = final.usage_metadata["total_tokens"]
    return {"finish": ["tool_calls", "stop"], "id": call["id"], "usage": usage, "text": text}


def langchain_structured(method, how):
    """Ask with `with_structured_output`; JSON mode needs the form in the prompt."""
    model = langchain_model().with_structured_output(City, method=method)
    asked = RECORD if method != "json_mode" else f"{RECORD} Answer in JSON with the keys name and country."
    found = model.invoke(asked) if how == "whole" else last(model.stream(asked))
    return {"parsed": described(found)}


# --- LiteLLM


def litellm_said(messages, how, **options):
    """Return a response, whole or put together by LiteLLM."""
    given = {**AT.options, "model": f"openai/{AT.model}", "api_base": f"{AT.url}/v1", "api_key": AT.key, **options}
    given |= {"num_retries": 0, "timeout": LIMIT_S}
    if how == "whole":
        return litellm.completion(messages=messages, **given)
    chunks = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **given)
    return litellm.stream_chunk_builder(list(chunks), messages=messages)


def litellm_loop(choice, how):
    """Run the loop, sending back LiteLLM's message with all its fields."""
    messages = question(choice)
    first = litellm_said(messages, how, tools=[TOOL], tool_choice=choice)
    message = first.choices[0].message
    call = one_call(message.tool_calls, message.content)
    called(call.function.name, call.function.arguments)
    expect("finish_reason tool_calls", first.choices[0].finish_reason == "tool_calls")
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    final = litellm_said(messages, how, tools=[TOOL])
    text = answered(final.choices[0].message.content, final.choices[0].message.tool_calls)
    expect("finish_reason stop", final.choices[0].finish_reason == "stop")
    expect("usage", final.usage.prompt_tokens > 0 and final.usage.completion_tokens > 0)
    return {"finish": ["tool_calls", "stop"], "id": call.id, "usage": final.usage.total_tokens, "text": text}


def litellm_structured(how):
    """Ask for a pydantic model as `response_format`."""
    found = litellm_said([{"role": "user", "content": RECORD}], how, response_format=City)
    if found.choices[0].finish_reason == "length":
        raise Wrong(f"wrote {found.choices[0].message.content!r:.200}")
    return {"parsed": described(City.model_validate_json(found.choices[0].message.content))}


# --- pydantic-ai


def pydantic_agent(**options):
    """Return an agent of pydantic-ai."""
    provider = OpenAIProvider(base_url=f"{AT.url}/v1", api_key=AT.key)
    settings = {"temperature": 0, "max_tokens": LIMIT, "timeout": LIMIT_S}
    return Agent(OpenAIChatModel(AT.model, provider=provider), model_settings=settings, retries=0, **options)


def pydantic_said(agent, asked, how):
    """Return (output, usage, all messages) of a run."""
    if how == "whole":
        found = agent.run_sync(asked, usage_limits=LIMITS)
        return found.output, found.usage, found.all_messages()

    async def streamed():
        async with agent.run_stream(asked, usage_limits=LIMITS) as run:
            output = await run.get_output()
            return output, run.usage, run.all_messages()

    return asyncio.run(streamed())


def pydantic_loop(how, output=str, asked=ASK):
    """Run the agent's own loop; an output type that is a model makes every answer a call."""
    agent = pydantic_agent(tools=[weather], system_prompt=SYSTEM, output_type=output)
    found, usage, messages = pydantic_said(agent, asked, how)
    calls = [part for message in messages for part in message.parts if part.part_kind == "tool-call"]
    if not calls:
        raise Wrong(f"made no call and wrote {found!r:.200}")
    called(calls[0].tool_name, calls[0].args)
    usage = usage() if callable(usage) else usage
    expect("usage", usage.input_tokens > 0 and usage.output_tokens > 0)
    kept = {"id": calls[0].tool_call_id, "usage": usage.total_tokens}
    return kept | ({"text": answered(found)} if output is str else {"text": str(found)})


def pydantic_structured(form, how):
    """Ask for a model by a forced call, by a JSON schema, or in the prompt."""
    found, _, _ = pydantic_said(pydantic_agent(output_type=form(City)), RECORD, how)
    return {"parsed": described(found)}


# --- instructor


def instructor_structured(mode, how):
    """Ask for a pydantic model in one of instructor's modes; a stream yields partial models."""
    client = instructor.from_openai(openai_client(), mode=getattr(instructor.Mode, mode))
    asked = {"messages": [{"role": "user", "content": RECORD}], "response_model": City, "max_retries": 0, **AT.options}
    if how == "whole":
        found, raw = client.chat.completions.create_with_completion(**asked)
        return {"parsed": described(found), "finish": [raw.choices[0].finish_reason], "usage": raw.usage.total_tokens}
    return {"parsed": described(last(client.chat.completions.create_partial(**asked)))}


# --- llm


def llm_run(how, *words):
    """Run the command `llm`; return (its output, what it logged of the last response)."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"model_id": "own", "model_name": AT.model, "api_base": f"{AT.url}/v1", "api_key_name": "own"}
        own |= {"supports_tools": True, "supports_schema": True, "can_stream": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([own]))  # JSON is YAML
        (Path(folder) / "keys.json").write_text(json.dumps({"own": AT.key}))
        command = [sys.executable, "-m", "llm"]
        options = ["-m", "own", "-o", "temperature", "0", "-o", "max_tokens", str(LIMIT)]
        options += ["--no-stream"] if how == "whole" else []
        around = {"env": {**os.environ, "LLM_USER_PATH": folder}, "text": True, "timeout": LIMIT_S}
        around["stdin"] = subprocess.DEVNULL  # which it would else read to its end
        done = subprocess.run([*command, *options, *words], capture_output=True, check=False, **around)
        if "Chain limit" in done.stderr:
            raise Wrong("called the tool again and again")
        if done.returncode:
            raise ValueError(f"llm ended with {done.returncode}: {done.stderr[-400:]}")
        logged = subprocess.run([*command, "logs", "--json", "-n", "0"], capture_output=True, check=True, **around)
        return done.stdout.strip(), json.loads(logged.stdout)


def llm_loop(how):
    """Run the command with a tool, whose loop it runs itself."""
    code = f"def weather(city: str) -> str:\n    'Return the weather in a city.'\n    return {RESULT!r}\n"
    said, logged = llm_run(how, "-s", SYSTEM, "--functions", code, ASK)
    call = one_call([call for each in logged for call in each.get("tool_calls", ())], said)
    called(call["name"], call["arguments"])
    usage = sum(each.get("output_tokens") or 0 for each in logged)
    expect("usage", usage > 0)
    return {"id": call.get("tool_call_id"), "usage": usage, "text": answered(said)}


def llm_structured(how):
    """Run the command with a schema."""
    said, _ = llm_run(how, "--schema", "name, country", RECORD)
    return {"parsed": described(json.loads(said))}


# --- openai-agents


def agents_run(agent, asked, how):
    """Return the result of a run."""
    if how == "whole":
        return agents.Runner.run_sync(agent, asked, max_turns=4)

    async def streamed():
        run = agents.Runner.run_streamed(agent, asked, max_turns=4)
        async for _ in run.stream_events():
            pass
        return run

    return asyncio.run(streamed())


def agents_agent(**options):
    """Return an agent over chat completions."""
    client = openai.AsyncOpenAI(base_url=f"{AT.url}/v1", api_key=AT.key, max_retries=0, timeout=LIMIT_S)
    model = agents.OpenAIChatCompletionsModel(model=AT.model, openai_client=client)
    choice = options.pop("tool_choice", None)
    settings = agents.ModelSettings(temperature=0, max_tokens=LIMIT, tool_choice=choice, include_usage=True)
    return agents.Agent(name="one", model=model, model_settings=settings, **options)


def agents_loop(choice, how):
    """Run the agent's own loop."""
    agent = agents_agent(instructions=SYSTEM, tools=[agents.function_tool(weather)], tool_choice=choice)
    run = agents_run(agent, question(choice)[1]["content"], how)
    calls = [item.raw_item for item in run.new_items if item.type == "tool_call_item"]
    call = one_call(calls, run.final_output)
    called(call.name, call.arguments)
    usage = run.context_wrapper.usage
    expect("usage", usage.input_tokens > 0 and usage.output_tokens > 0)
    return {"id": call.call_id, "usage": usage.total_tokens, "text": answered(run.final_output)}


def agents_structured(how):
    """Ask for a pydantic model as the output type."""
    run = agents_run(agents_agent(output_type=City), RECORD, how)
    return {"parsed": described(run.final_output)}


# --- the cases


def both(client, what, run):
    """Return a case whole and the same case streamed; `run` takes how."""
    return {(client, what, how): lambda how=how: run(how) for how in ("whole", "streamed")}


CASES = {}
for choice in ("auto", "required"):
    for how, collect in (("whole", openai_whole), ("streamed", openai_deltas), ("stream()", openai_final)):
        CASES["openai", f"loop, {choice}", how] = lambda c=choice, collect=collect: openai_loop(c, collect)
    CASES |= both("langchain-openai", f"loop, {choice}", lambda how, c=choice: langchain_loop(c, how))
    CASES |= both("litellm", f"loop, {choice}", lambda how, c=choice: litellm_loop(c, how))
    CASES |= both("openai-agents", f"loop, {choice}", lambda how, c=choice: agents_loop(c, how))
CASES |= both("openai", "parse, json_schema", openai_parsed)
for method in ("json_schema", "function_calling", "json_mode"):
    CASES |= both("langchain-openai", f"structured, {method}", lambda how, m=method: langchain_structured(m, how))
CASES |= both("litellm", "structured, json_schema", litellm_structured)
CASES |= both("pydantic-ai-slim", "loop, auto", pydantic_loop)
CASES |= both("pydantic-ai-slim", "loop, required", lambda how: pydantic_loop(how, ToolOutput(City), FORCED))
for name, form in (("forced call", ToolOutput), ("json_schema", NativeOutput), ("in the prompt", PromptedOutput)):
    CASES |= both("pydantic-ai-slim", f"structured, {name}", lambda how, f=form: pydantic_structured(f, how))
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON", "MD_JSON"):
    CASES |= both("instructor", f"structured, {mode}", lambda how, m=mode: instructor_structured(m, how))
CASES |= both("llm", "loop, auto", llm_loop)
CASES |= both("llm", "structured, json_schema", llm_structured)
CASES |= both("openai-agents", "structured, json_schema", agents_structured)


def run(client, what, how):
    """Run one case."""
    try:
        return {"kept": CASES[client, what, how]()}
    except (Wrong, *CUT, UnexpectedModelBehavior) as error:
        return {"model": f"{type(error).__name__}: {error}"[:400]}
    except FAULTS as error:
        traceback.print_exc()
        return {"fault": f"{type(error).__name__}: {error}"[:400]}


def at(url, key, model):
    """Choose the server."""
    AT.url, AT.key, AT.model = url, key, model
    return {}


def main():
    """Serve until standard input closes."""
    agents.set_tracing_disabled(True)
    litellm.suppress_debug_info = True
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = {
        "hello": lambda: {name: metadata.version(name) for name in PACKAGES},
        "at": at,
        "cases": lambda: {"cases": list(CASES)},
        "run": run,
    }
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(calls[request.pop("call")](**request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
