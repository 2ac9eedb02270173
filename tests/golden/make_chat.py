"""Make chat/golden.json: chat requests, and the prompts that transformers renders for them with seven chat templates.

Run in the peers' environment (transformers alone suffices, see lab/peers/requirements.txt):

    .venv-peers/bin/python tests/golden/make_chat.py

chat/ has the templates. Each follows the rules of one family's published template, faults included, in other words:
the text that introduces the tools is ours, the marks and their order are the family's.

A request is what clients of OpenAI's API send, and is the same for every family. `careful` turns its messages into what
a careful user of transformers would pass to that family's template.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).parent / "chat"


@dataclass(frozen=True)
class Family:
    """What a family's template demands of messages.

    Attributes:
        specials: its named special tokens.
        text_arguments: whether arguments are JSON text rather than an object.
        null_content: whether calls are written only if the content is None; text then needs a message for itself.
        single: whether a message has one call at most.
    """

    specials: dict[str, str]
    text_arguments: bool = False
    null_content: bool = False
    single: bool = False


def specials(eos: str, bos: str | None = None) -> dict[str, str]:
    """Return the named special tokens."""
    return {"eos_token": eos} | ({"bos_token": bos} if bos else {})


FAMILIES = {
    "qwen25": Family(specials("<|im_end|>")),
    "qwen3": Family(specials("<|im_end|>")),
    "llama31": Family(specials("<|eot_id|>", "<|begin_of_text|>"), single=True),
    "mistral_v3": Family(specials("</s>", "<s>")),
    "hermes2pro": Family(specials("<|im_end|>", "<|begin_of_text|>")),
    "deepseek_r1_distill": Family(
        specials("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"), text_arguments=True, null_content=True
    ),
    "functionary31": Family(specials("<|eot_id|>", "<|begin_of_text|>"), text_arguments=True),
}


def tool(name: str, description: str, **properties: dict) -> dict:
    """Return a tool as OpenAI's API describes it."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    "Look up the weather",
    city={"type": "string", "description": "name of the city"},
    days={"type": "integer", "description": "days ahead"},
)
CLOCK = tool("get_time", "Tell the time", zone={"type": "string", "description": "such as Europe/Zürich"})
BOTH, ONLY = [WEATHER, CLOCK], [WEATHER]


def user(content) -> dict:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def says(content, *calls: tuple[str, str, str], **more) -> dict:
    """Return a message of the assistant; each call is its id, the name of the tool and the arguments as JSON text."""
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {}) | more


def result(id: str, content) -> dict:
    """Return the message with the result of a call."""
    return {"role": "tool", "tool_call_id": id, "content": content}


def part(text: str) -> dict:
    """Return a part of a content."""
    return {"type": "text", "text": text}


A, B, C = "call_Vq3kZ0hR8tYw1mNbXc5Lp7Ds", "call_000000000000000000000001", "call_000000000000000000000002"
PARIS = (A, "get_weather", '{"city": "Paris"}')
ROME = (B, "get_weather", '{"city": "Rome", "days": 3}')
TIME = (C, "get_time", '{"zone": "Europe/Rome"}')
QUESTION = user("How is the weather in Paris?")
ONE = [QUESTION, says(None, PARIS), result(A, "18 °C")]
SEVERAL = [
    user("And in Rome? And how late is it there?"),
    says(None, ROME, TIME),
    result(B, "24 °C"),
    result(C, "9:41"),
]
AWKWARD = json.dumps({"city": 'Saint-"É"\n</tool_call> ```', "days": 1.5}, ensure_ascii=False)

REQUESTS = {
    "plain": {"messages": [{"role": "system", "content": "Be brief."}, user("Hello")]},
    "turns": {"messages": [user("Hello"), says("Hi!"), user(" Who are you? ")]},
    "offered": {"messages": [{"role": "developer", "content": "Be brief."}, QUESTION], "tools": BOTH},
    "one": {"messages": ONE, "tools": ONLY},
    "text": {"messages": [QUESTION, says("Let me look.", PARIS), result(A, "18 °C")], "tools": ONLY},
    "several": {"messages": SEVERAL, "tools": BOTH},
    "swapped": {"messages": [SEVERAL[0], says(None, TIME, ROME), *SEVERAL[2:]], "tools": BOTH},
    "rounds": {"messages": [*ONE, says("It is 18 °C."), *SEVERAL, says("It is 24 °C."), user("Thanks")], "tools": BOTH},
    "chain": {"messages": [*ONE, says(None, TIME), result(C, "9:41")], "tools": BOTH},
    "parts": {
        "messages": [
            {"role": "system", "content": [part("Be brief."), part("Be kind.")]},
            user([part("How is the weather"), part("in Paris?")]),
            says([part("Well,"), part("where?")]),
            user([part("Paris")]),
            says(None, PARIS),
            result(A, [part("18 °C"), part("sunny")]),
        ],
        "tools": ONLY,
    },
    "nothing": {"messages": [QUESTION, says(None, (A, "get_time", "")), result(A, "")], "tools": BOTH},
    "awkward": {
        "messages": [QUESTION, says(None, (A, "get_weather", AWKWARD)), result(A, '{"é": "\\n"}')],
        "tools": ONLY,
    },
    "reasoning": {
        "messages": [
            user("Hello"),
            says("Hi!", reasoning_content="A greeting."),
            user("And now?"),
            says("<think>\nOld.\n</think>\n\nNow."),
            QUESTION,
            says(None, PARIS, reasoning_content="I must look it up."),
            result(A, "18 °C"),
        ],
        "tools": ONLY,
    },
    "withdrawn": {"messages": [*ONE, says("It is 18 °C."), user("Thanks")]},
}
VARIABLES = {
    "qwen3": {"no_thinking": ("one", {"enable_thinking": False})},
    "llama31": {
        "tools_in_system": ("one", {"tools_in_user_message": False}),
        "built_in": ("one", {"builtin_tools": ["get_weather"]}),
    },
}
"""Requests with variables for one family's template: name -> the request that they are added to, and the variables."""


def careful(family: Family, messages: list[dict]) -> list[dict]:
    """Return the messages in the form that a family's template demands."""
    found, ids, names = [], {}, {}
    for message in copy.deepcopy(messages):
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "tool":
            id = message["tool_call_id"]
            message |= {"tool_call_id": ids[id], "name": names[id]}
            found.insert(_after_call(found, ids[id]), message)
            continue
        calls = message.get("tool_calls", [])
        for call in calls:
            ids[call["id"]], names[call["id"]] = f"id{len(ids):07}", call["function"]["name"]
            call["id"] = ids[call["id"]]
            text = call["function"]["arguments"] or "{}"
            call["function"]["arguments"] = text if family.text_arguments else json.loads(text)
        if calls and family.null_content and message["content"]:
            found.append({"role": "assistant", "content": message.pop("content")})
        if calls and not message.get("content"):
            message["content"] = None if family.null_content else ""
        split = [message | {"tool_calls": [call]} for call in calls] if family.single and calls else [message]
        found += split
    return found


def _after_call(messages: list[dict], id: str) -> int:
    """Return the index behind the message with a call and behind the results that already follow it."""
    at = 1 + max(i for i, message in enumerate(messages) if any(c["id"] == id for c in message.get("tool_calls", [])))
    while at < len(messages) and messages[at]["role"] == "tool":
        at += 1
    return at


def render(name: str, body: dict, variables: dict) -> str:
    """Return transformers' prompt for a request."""
    family = FAMILIES[name]
    given = {
        "tools": body.get("tools"),
        "chat_template": (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"),
        "add_generation_prompt": True,
        **variables,
    }
    messages = careful(family, body["messages"])
    if family.null_content:  # which `apply_chat_template` removes before it calls the same function
        return render_jinja_template([messages], **given, **family.specials)[0][0]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **family.specials)
    return tokenizer.apply_chat_template(messages, tokenize=False, **given)


def main() -> None:
    """Render every request with every template and write golden.json."""
    made = {"transformers": transformers.__version__, "requests": dict(REQUESTS), "families": {}}
    for name, family in FAMILIES.items():
        prompts = {case: render(name, body, {}) for case, body in REQUESTS.items()}
        for case, (base, variables) in VARIABLES.get(name, {}).items():
            made["requests"][case] = REQUESTS[base] | {"chat_template_kwargs": variables}
            prompts[case] = render(name, REQUESTS[base], variables)
        made["families"][name] = {"specials": family.specials, "prompts": prompts}
    (FOLDER / "golden.json").write_text(json.dumps(made, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
