"""Grammars follow schemas to the letter or refuse them, within limits, and a lost worker process costs no answer."""

import json
import signal
import threading
import time
from typing import Literal

import numpy as np
import psutil
import pytest
import tokenizers
from pydantic import BaseModel
from tokenizers import AddedToken, decoders, models, normalizers

from tessera.core.child import Worker
from tessera.models.text.tokenizer import Tokenizer, byte_tokenizer
from tessera.serve import grammar
from tessera.serve.api.forms import json_form
from tessera.serve.api.schema import Refusal
from tessera.serve.api.tools import call_schema
from tessera.serve.grammar import Grammars

BYTES = byte_tokenizer()
EOS = BYTES.eos_id


@pytest.fixture(scope="module")
def grammars():
    return Grammars(BYTES, BYTES.vocab_size, [EOS])


def compiled(grammars, schema):
    return grammars.guides(json_form(schema, "response_format"))


def follows(grammars, schema, value):
    """Return whether a value, as JSON text, follows a schema."""
    guide = compiled(grammars, schema)()
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    for token in BYTES.encode(text, add_special=False, parse_special=False):
        if not guide.allowed()[token]:
            return False
        guide.push(token)
    return bool(guide.allowed()[EOS])


def forced(tokenizer, schema, eos):
    """Return the ids of an answer for which the schema leaves no choice but how to tokenise it."""
    guide, ids = Grammars(tokenizer, tokenizer.vocab_size, [eos]).guides(json_form(schema, "response_format"))(), []
    while not (allowed := guide.allowed())[eos] and len(ids) < 100:
        ids.append(int(np.flatnonzero(allowed)[0]))
        guide.push(ids[-1])
    return ids


# --- limits


@pytest.mark.parametrize("pattern", ["^(a{1000}){1000}$", "^b(a{1000}){1000}$", "^((a{100}){100}){100}$"])
def test_a_nested_repetition_is_refused_before_an_answer(grammars, pattern):
    with pytest.raises(ValueError, match="too many expressions"):
        compiled(grammars, {"type": "string", "pattern": pattern})


def test_a_nested_repetition_that_comes_late_ends_its_answer(grammars):
    late = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    schema = {"type": "array", "prefixItems": [{"type": "integer"}, late], "minItems": 2}
    with pytest.raises(ValueError, match="too many expressions"):
        follows(grammars, schema, '[1,"aaaa')


def test_an_answer_whose_masks_take_long_is_ended(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "REQUEST_S", 0.0)
    guide = compiled(grammars, {"type": "string", "pattern": "^(a{100}){100}$"})()
    assert guide.allowed()[ord('"')]
    with pytest.raises(ValueError, match="too much processor time per token"):
        guide.push(ord('"'))


def test_the_answers_of_a_request_share_its_processor_time(grammars):
    make = compiled(grammars, {"type": "string"})
    first, second = make(), make()
    first._allowance.left_s = -1.0
    with pytest.raises(ValueError, match="too much processor time per token"):
        second.push(ord('"'))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [*range(10_000)]},
        {"type": "string", "pattern": "^[\\p{L} ]+$", "maxLength": 200},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "format": "date-time"} for i in range(300)}},
    ],
)
def test_large_schemas_of_real_use_are_accepted(grammars, schema):
    assert compiled(grammars, schema)().allowed().any()


# --- to the letter


@pytest.mark.parametrize("text", ["<|end|>", "a<|user|>b", "<|eos|>", "<tool_call>"])
def test_the_name_of_a_special_token_is_text(text):
    ids = forced(BYTES, {"const": text}, EOS)
    assert BYTES.decode(ids) == json.dumps(text)
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    assert BYTES.decode(forced(BYTES, named, EOS)) == f'{{"{text}":1}}'


def test_the_name_of_a_special_token_is_text_in_a_vocabulary_like_sentencepiece():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'<s>/b"', "</", "s>", "<b>"]
    pieces += ["</s", "<b"]
    merges = [("<", "/"), ("s", ">"), ("</", "s"), ("</", "s>"), ("</s", ">"), ("<", "b"), ("<b", ">"), ("s>", "</s>")]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, "s></s>"]))}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    backend.add_tokens([AddedToken("<b>", special=False)])
    tokenizer = Tokenizer(backend=backend)
    for text in ("</s>", "b<s></s>", "<b>", "é </b>"):
        ids = forced(tokenizer, {"const": text}, vocab["</s>"])
        assert not {0, 1, 2, vocab["<b>"]} & {*ids}
        assert tokenizer.decode(ids) == json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "x-guidance": {"whitespace_flexible": True}},
        {"type": "array", "items": {"x-guidance": {}}},
        {"anyOf": [{"type": "null"}, {"properties": {"a": {"x-guidance": {}}}}]},
    ],
)
def test_options_of_llguidance_are_refused(grammars, schema):
    with pytest.raises(ValueError, match="x-guidance"):
        compiled(grammars, schema)


def test_data_may_have_the_names_of_keywords(grammars):
    assert follows(grammars, {"const": {"x-guidance": 1, "minimum": 2.5}}, {"x-guidance": 1, "minimum": 2.5})
    named = {"type": "object", "properties": {"x-guidance": {"const": 1}, "minimum": {"const": "a"}}}
    assert follows(grammars, named, {"x-guidance": 1, "minimum": "a"})


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum=9007199254740993"),
        ({"type": "integer", "minimum": 1e30, "maximum": 1e31}, r"minimum=1e\+30"),
        ({"type": "integer", "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum=9223372036854775807"),
        ({"allOf": [{"type": "integer"}, {"maximum": 2**64}]}, "maximum=18446744073709551616"),
        ({"type": "object", "properties": {"a": {"const": 2**53 + 1}}}, "constant 9007199254740993"),
        ({"enum": ["a", [{"b": 10**400}]]}, "constant 1000"),
    ],
)
def test_numbers_that_would_change_are_refused(grammars, schema, named):
    with pytest.raises(ValueError, match=named):
        compiled(grammars, schema)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, -(2**53), 2**53 + 1),
        ({"type": "integer", "maximum": 10**18}, 10**18, 10**18 + 1),
        ({"type": "number", "minimum": 0.5, "maximum": 1e17}, 10**17, 10**17 + 1),
        ({"enum": [10**18, 1.5]}, 10**18, 10**18 + 1),
        ({"enum": [True, 2]}, True, 1),
    ],
)
def test_numbers_that_are_kept_are_accepted(grammars, schema, inside, outside):
    assert follows(grammars, schema, inside)
    assert not follows(grammars, schema, outside)


# --- schemas of tool calls


class City(BaseModel, extra="forbid"):
    name: Literal["Oslo"]


class Trip(BaseModel, extra="forbid"):
    to: City


class Part(BaseModel, extra="forbid"):
    parts: list["Part"] = []


TRIP, PART = Trip.model_json_schema(), Part.model_json_schema()
OTHER = {"$defs": {"City": {"const": 5}}, "properties": {"to": {"$ref": "#/$defs/City"}}, "required": ["to"]}
ROOT = {
    "type": "object",
    "properties": {"v": {"const": 1}, "$ref": {"anyOf": [{"$ref": "#"}, {"const": {"$ref": "#/v"}}]}},
    "additionalProperties": False,
}
NAMED = {"$id": "https://example.com/a", "definitions": {"A": {"const": 1}}, "type": "object"} | {
    "properties": {"a": {"$ref": "#/definitions/A"}, "b": {"$ref": "https://example.com/a#/definitions/A"}}
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {"trip": TRIP, "part": PART, "other": OTHER, "root": ROOT, "named": NAMED}.items()
]
CALLS = [
    ("trip", {"to": {"name": "Oslo"}}, True),
    ("trip", {"to": 5}, False),
    ("part", {"parts": [{"parts": []}, {}]}, True),
    ("part", {"parts": [{"name": "part"}]}, False),
    ("other", {"to": 5}, True),
    ("other", {"to": {"name": "Oslo"}}, False),
    ("root", {"v": 1, "$ref": {"v": 1, "$ref": {"$ref": "#/v"}}}, True),
    ("root", {"v": 1, "$ref": {"name": "root", "arguments": {}}}, False),
    ("named", {"a": 1, "b": 1}, True),
    ("named", {"a": 2}, False),
]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("name", "arguments", "right"), CALLS)
def test_references_of_parameters_are_resolved_in_them(grammars, name, arguments, right, several):
    call = {"name": name, "arguments": arguments}
    assert follows(grammars, call_schema(TOOLS, None if several else name), call) == right


def test_the_parameters_of_a_tool_are_not_changed():
    before = json.dumps(TOOLS)
    call_schema(TOOLS, None)
    assert json.dumps(TOOLS) == before


# --- a lost worker


def test_a_schema_whose_worker_is_killed_is_compiled_by_another(grammars):
    grammars._worker.start()
    worker = grammars._worker._process
    worker.send_signal(signal.SIGSTOP)  # so that it is killed with the request
    while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    threading.Timer(0.5, worker.kill).start()
    assert follows(grammars, {"const": 1}, 1)
    assert grammars._worker._process.pid != worker.pid


def test_a_schema_that_ends_two_workers_is_refused(grammars):
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(10_000)}
    with pytest.raises(ValueError, match="references are too deep"):
        grammars._tried("json", json.dumps({"$ref": "#/$defs/0", "$defs": chain}), "schema")
    assert follows(grammars, {"const": 1}, 1)


@pytest.mark.parametrize("command", ["false", "no such program"])
def test_a_worker_that_does_not_start_is_not_the_schemas_fault(command):
    broken = Grammars(BYTES, BYTES.vocab_size, [EOS])
    broken._worker = Worker([command], ready_s=5)
    with pytest.raises(Refusal, match="again") as refused:
        compiled(broken, {"const": 1})
    assert refused.value.status == 503
