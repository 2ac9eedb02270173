"""Answers follow a regex, a choice, a grammar or a schema, under the names and in the notations of other servers."""

import itertools
import json
import time
from contextlib import suppress

import pytest

from tessera.models.text.tokenizer import byte_tokenizer
from tessera.serve import grammar
from tessera.serve.api.forms import FORM_CHARACTERS, json_form
from tessera.serve.api.json_schema import FORMATS, prepared
from tessera.serve.api.protocol import ChatBody, CompletionBody
from tessera.serve.api.schema import Refusal
from tessera.serve.edge.parsing import parse
from tessera.serve.grammar import Grammars

BYTES = byte_tokenizer()
GBNF = r"""
root  ::= (expr "=" ws term "\n")+   # llama.cpp's own example
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
FROM_SCHEMA = r"""
char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})
name-kv ::= "\"name\"" space ":" space string
root ::= "{" space name-kv "}" space
space ::= | " " | "\n"{1,2} [ \t]{0,20}
string ::= "\"" char* "\"" space
"""
LARK = """
?start: select_statement
?select_statement: "SELECT " column " from " table
?column: "col_1" | "col_2"
?table: "table_1" | "table_2"
"""


@pytest.fixture(scope="module")
def grammars():
    return Grammars(BYTES, BYTES.vocab_size, [BYTES.eos_id])


def form_of(body):
    asked = {"messages": [{"role": "user", "content": "x"}], **body}
    return parse(ChatBody, json.dumps(asked).encode(), 256).form()


def follows(grammars, body, text):
    guide = grammars.guides(form_of(body))()
    for token in text.encode():
        if not guide.allowed()[token]:
            return False
        guide.push(token)
    return bool(guide.allowed()[BYTES.eos_id])


ANY, INTEGER = {"type": "object"}, {"type": "integer"}
ROWS = [
    # body, a text that follows, one that does not
    ({"structured_outputs": {"json": INTEGER}}, "12", '"a"'),
    ({"structured_outputs": {"json": json.dumps(INTEGER)}}, "12", "[]"),
    ({"structured_outputs": {"json_object": True}}, '{"a":1}', "1"),
    ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, "555-1234", "555-123"),
    ({"structured_outputs": {"choice": ["good", "bad <|end|>"]}}, "bad <|end|>", "goo"),
    ({"structured_outputs": {"grammar": GBNF, "disable_any_whitespace": True}}, "1+2=3\n", "1+=3\n"),
    ({"guided_json": INTEGER}, "-3", "3.5"),
    ({"guided_regex": r"^[\w.]+@\w+\.com$"}, "a.b@c.com", "^a@c.com$"),
    ({"guided_regex": r"\d[\d.-]*\w[^\w]\W\\d"}, "2.0a é\\d", "２.0a é\\d"),
    ({"regex": r"[\S]\s\D"}, "é\té", "é\u2003é"),
    ({"structured_outputs": {"regex": r"[^\d]\d"}}, "２2", "1２"),
    ({"guided_choice": ['say "é"', "a/b\n"]}, 'say "é"', "say"),
    ({"guided_grammar": LARK, "guided_decoding_backend": "xgrammar"}, "SELECT col_1 from table_2", "SELECT x"),
    ({"guided_grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
    ({"regex": "(yes|no)"}, "yes", "y"),
    ({"ebnf": 'root ::= "Paris" | "London"\n'}, "Paris", "Rome"),
    ({"json_schema": INTEGER}, "7", "x"),
    ({"json_schema": json.dumps(INTEGER)}, "7", "x"),
    ({"grammar": FROM_SCHEMA}, '{ "name": "x\\n\\u00e9"}', '{"nam": "x"}'),
    ({"grammar": 'root ::= ("a" | "ab") "bc" " "* " "'}, "abc  ", "abbb "),
    ({"grammar": r'root ::= "\u00e9\x41" [\u00e8-\u00ea] "\[\]" [a/\]] "\\u00e9"'}, "éAé[]/\\u00e9", "éAé[]/é"),
    ({"response_format": {"type": "json_object"}}, '{"a":[1]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": INTEGER}}, "1", "{}"),
    ({"response_format": {"type": "json_schema", "schema": INTEGER}}, "1", "{}"),
    ({"response_format": {"type": "json", "value": INTEGER}}, "1", "{}"),
    ({"response_format": {"type": "regex", "value": "a+"}}, "aaa", "b"),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, "a", "b"),
]


@pytest.mark.parametrize(("body", "right", "wrong"), ROWS, ids=lambda value: str(value)[:50])
def test_each_field_restricts_the_answer(grammars, body, right, wrong):
    assert follows(grammars, body, right)
    assert not follows(grammars, body, wrong)


@pytest.mark.parametrize(
    "body",
    [{"grammar": ""}, {"regex": ""}, {"structured_outputs": {}}, {"guided_json": None}]
    + [{"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}],
)
def test_what_asks_for_nothing_restricts_nothing(body):
    assert form_of(body) is None


ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
WRONG = [
    ({"guided_json": ANY, "guided_regex": "a"}, "guided_json", "guided_json and guided_regex cannot be combined"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "regex and response_format cannot be"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex", "cannot be combined"),
    ({"grammar": "x", "tools": [ADD], "tool_choice": "required"}, "grammar", "grammar and a forced tool call"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "use tools with tool_choice",
    ),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": ["a", ""]}, "guided_choice.1", "at least 1 character"),
    ({"guided_json": "{"}, "guided_json", "guided_json is not a JSON schema"),
    ({"guided_json": "[1]"}, "guided_json", "guided_json is not a JSON schema"),
    ({"json_schema": {"enum": ["x" * FORM_CHARACTERS]}}, "json_schema", "may have at most 65,536"),
    ({"regex": "x" * (FORM_CHARACTERS + 1)}, "regex", "the regex has 65,537 characters, but may have at most 65,536"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "takes json_schema or schema, but"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format", "response_format.value is no regex"),
    ({"response_format": {"type": "text", "schema": ANY}}, "response_format", "takes no further field, but"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
]


@pytest.mark.parametrize(("body", "field", "said"), WRONG, ids=lambda value: str(value)[:50])
def test_a_wrong_field_is_named(body, field, said):
    with pytest.raises(Refusal, match=said) as refused:
        form_of(body)
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"regex": "(?=a)b"}, "(?s)the regex: .*look-around"),
        ({"regex": "["}, "unclosed character class"),
        ({"regex": "((((a{100}){100}){100}){100})"}, "the regex"),
        ({"grammar": "root ::= foo"}, "the grammar: Rule 'foo' not found"),
        ({"grammar": 'roo ::= "a"'}, "No 'root' rule"),
        ({"grammar": "root ::= root"}, "no text follows it"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "the grammar"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
        ({"grammar": "start: <eos>"}, "unknown special token"),
        ({"grammar": "x"}, "llguidance refuses the grammar"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "x-guidance"),
        ({"grammar": 'start: %json {"maximum": 1e30, "minimum": 1e29}'}, "not kept exactly"),
        ({"grammar": 'start: %json {"type": "wizard"}'}, "the grammar"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_or_hostile_grammar_is_refused_and_the_next_is_served(grammars, body, said):
    with pytest.raises(ValueError, match=said):
        grammars.guides(form_of(body))
    assert follows(grammars, {"regex": "a"}, "a")


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": 'start: a\na: a a a a | "a" | ""'},
        {"grammar": "start: x{1000}\nx: y{1000}\ny: /[ab]*/"},
        {"grammar": 'start: s\ns: s s s | "(" s ")" | "a" | "b" | "" | s "c"'},
        {"grammar": "start: " + " | ".join(f"/(a|b){{{i},}}c{{{i}}}/" for i in range(900))},
        {"regex": "(a|a)*b(.*.*.*)*(x+x+)+y"},
        {"regex": ".*a.{900}b"},
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_hostile_grammar_ends_within_its_processor_time(grammars, body):
    """It is refused at once or while the answer grows; either costs other requests less than the limits."""
    with suppress(ValueError):
        guide = grammars.guides(form_of(body))()
        began_s = time.thread_time()
        for token in itertools.islice(itertools.cycle(b"aab("), 3000):
            if not guide.allowed()[token]:
                break
            guide.push(token)
            assert guide._allowance.left_s >= 0
        assert time.thread_time() - began_s < grammar.REQUEST_S + 3000 * grammar.TOKEN_S
    assert follows(grammars, {"regex": "a"}, "a")


# --- schemas that llguidance would refuse needlessly


def value_follows(grammars, schema, value):
    return follows(grammars, {"json_schema": schema}, json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize("form", ["int32", "decimal", "uri-reference", "password", "x"])
def test_an_unknown_format_is_an_annotation(grammars, form):
    assert value_follows(grammars, {"type": "string", "format": form}, "any text")
    named = {"type": "object", "properties": {"format": {"const": form}}, "required": ["format"]}
    assert value_follows(grammars, named, {"format": form})
    assert prepared({"const": {"format": form}}) == {"const": {"format": form}}


@pytest.mark.parametrize("form", sorted(FORMATS - {"unknown"}))
def test_a_known_format_is_followed(grammars, form):
    assert not value_follows(grammars, {"type": "string", "format": form}, "@ any text")


@pytest.mark.parametrize(
    "note",
    [
        {"$comment": "x", "title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True},
        {"readOnly": True, "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "text/plain"},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$anchor": "a"},
        {"example": 1, "nullable": False, "x-order": 1, "propertyOrdering": ["a"], "markdownDescription": "d"},
        {"$dynamicAnchor": "node", "if": {"type": "string"}, "minContains": 1, "uniqueItems": False},
        {"then": {"const": 1}, "propertyNames": {"type": "string"}, "unevaluatedProperties": True},
        {"dependentRequired": {}, "else": {"const": 1}},
    ],
    ids=str,
)
def test_notes_change_no_schema(grammars, note):
    schema = {"type": "object", "properties": {"a": {"type": "integer", **note}}, "required": ["a"], **note}
    assert value_follows(grammars, schema, {"a": 5})
    assert not value_follows(grammars, schema, {"a": "x"})


COLOURS = {"$defs": {"Colour": {"enum": ["red", "green", "blue"], "title": "Colour", "type": "string"}}}
SETS = [
    # keywords of the list, values that follow, values that do not
    ({"items": {"enum": ["a", "b", "c"]}}, [[], ["c", "a"], ["a", "b", "c"]], [["a", "a"], ["d"]]),
    ({"items": {"$ref": "#/$defs/Colour"}, "title": "Colours"}, [["red", "blue"]], [["red", "red"]]),
    ({"items": {"const": 1}, "minItems": 1}, [[1]], [[], [1, 1]]),
    ({"items": {"type": "boolean"}, "minItems": 2}, [[True, False]], [[True], [True, True]]),
    ({"items": {"anyOf": [{"const": 1}, {"type": "null"}]}}, [[None, 1]], [[None, None]]),
    ({"items": {"enum": list(range(15))}, "maxItems": 2}, [[14, 3], [0]], [[1, 1], [1, 2, 3]]),
    ({"items": {"type": "string"}, "maxItems": 1}, [["x"], []], [["x", "y"]]),
    ({"items": {"enum": [1, 1.0, True]}, "minItems": 1.0}, [[1], [True, 1]], [[], [1, 1]]),
    ({"items": {"enum": [{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]}}, [[{"a": 1, "b": 2}]], [[{"a": 1, "b": 2}] * 2]),
    ({"type": ["array", "null"], "items": {"enum": ["a", "b"]}}, [None, ["b", "a"]], [["a", "a"], "a"]),
    ({"items": {"type": ["string", "null"], "enum": ["a", None]}}, [["a", None]], [[None, None]]),
    ({"items": {"type": ["boolean", "null"]}}, [[None, True]], [[True, True]]),
    ({"items": {"type": "number", "enum": [1, 2.5]}}, [[2.5, 1]], [[1, 1]]),
    ({"items": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}}, [[3, 1]], [[2], [1, 1]]),
    ({"prefixItems": [{"const": 1}], "items": {"enum": [1, 2]}}, [[], [1, 2]], [[2], [1, 1]]),
    ({"prefixItems": [{"enum": [1, 2]}, {"enum": [1, 2]}], "items": False}, [[2, 1], [1]], [[1, 1], [1, 2, 3]]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 2}, [[1, 2]], [[1, 1], [1, 2, 3]]),
]


@pytest.mark.parametrize(("keywords", "right", "wrong"), SETS, ids=lambda value: str(value)[:50])
def test_a_list_of_distinct_values_out_of_a_few_is_kept(grammars, keywords, right, wrong):
    array = {"type": "array", "uniqueItems": True, **keywords}
    schema = {"type": "object", "properties": {"set": array}, "required": ["set"], **COLOURS}
    for value in right:
        assert value_follows(grammars, schema, {"set": value}), value
    for value in wrong:
        assert not value_follows(grammars, schema, {"set": value}), value


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ({"items": {"type": "string"}}, "only for arrays whose items are an enum"),
        ({"items": {"enum": ["a", 1], "type": "string"}}, "only for arrays whose items are an enum"),
        ({"items": {"$ref": "#/$defs/Nothing"}}, "only for arrays whose items are an enum"),
        ({"items": {"$ref": "#"}}, "only for arrays whose items are an enum"),
        ({"prefixItems": [{"const": 1}]}, "only for arrays whose items are an enum"),
        ({"items": {"enum": [1, 2], "const": 1}}, "only for arrays whose items are an enum"),
        ({"items": {"enum": list(range(400))}, "maxItems": 2}, "over 400 lists of the 400 values"),
        ({"items": {"enum": list(range(9))}}, "over 400 lists of the 9 values: lower maxItems"),
        ({"items": {"enum": [10**6 + i for i in range(9000)]}, "minItems": 8000}, "over 400 lists"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_list_of_other_distinct_values_is_refused_by_name(array, said):
    with pytest.raises(ValueError, match=f"uniqueItems=true .*{said}"):
        prepared({"type": "array", "uniqueItems": True, **array})


ONE_OF = [
    ([{"const": 1, "title": "one"}, {"const": 2}], [1, 2], [3]),
    ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}, {"type": "null"}], ["a", "c", None], ["b", "d"]),
    ([{"$ref": "#/$defs/Colour"}, {"const": "none"}], ["red", "none"], ["x"]),
    ([{"const": 1}, {"const": 1.0}, {"const": 2}], [2], [1]),
]


@pytest.mark.parametrize(("schemas", "right", "wrong"), ONE_OF, ids=lambda value: str(value)[:50])
def test_one_of_constants_is_kept(grammars, schemas, right, wrong):
    schema = {"type": "array", "prefixItems": [{"oneOf": schemas}], "minItems": 1, "maxItems": 1, **COLOURS}
    assert all(value_follows(grammars, schema, [value]) for value in right)
    assert not any(value_follows(grammars, schema, [value]) for value in wrong)


def test_one_of_that_may_overlap_is_refused_with_a_way_out(grammars):
    with pytest.raises(ValueError, match="at most one schema of a oneOf holds: use anyOf"):
        grammars.guides(form_of({"json_schema": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}))


def test_a_schema_that_the_client_sent_is_not_changed():
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2], "format": "x"}, "then": {}}
    before = json.dumps(schema)
    with pytest.raises(ValueError, match="uniqueItems"):
        prepared({"items": schema | {"minLength": 2}})
    assert json.dumps(schema) == before


def test_completions_take_the_same_fields():
    body = parse(CompletionBody, b'{"prompt": "x", "guided_choice": ["a"]}', 256)
    assert body.form().field == "guided_choice"
    assert json_form({"const": 1}, "x").text == '{"const": 1}'
