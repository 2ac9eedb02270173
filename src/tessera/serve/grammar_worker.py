"""Compile schemas and grammars in a separate process: a small one may crash llguidance or keep it busy for minutes.

The process reads one JSON request per line from standard input, with the fields "tokenizer" (path of a tokenizer.json),
"vocab_size", "eos_ids", "limits", "overrides", "kind" (of `forms.Form`), "text" and "limit_s". It answers each with a
line of JSON on standard output, with the field "grammar" or "error". A text that takes over `limit_s` seconds of
processor time ends the process. It runs this file directly and imports only llguidance and the standard library.
"""

import json
import re
import resource
import signal
import sys
import threading
from contextlib import suppress
from functools import cache

import llguidance
from llguidance import gbnf_to_lark as gbnf

MEMORY_BYTES = 2 << 30
STACK_BYTES = 1 << 20
"""Stack size of the compiling thread: an eighth of the server's. A schema that compiles here cannot overflow the
server's stack."""
RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
"""Start of a rule in GBNF, llama.cpp's notation, which xgrammar calls EBNF. Without one, a grammar is Lark's."""
ESCAPE = re.compile(r"(?s)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")
CHARACTER = re.compile(r"(?s)\\x..|\\.|.")
"""A character of a text in a grammar, which may be escaped."""


def main() -> int:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores SIGPROF passes that on
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    return 0


def answer() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request.pop("limit_s"))
        try:
            reply = compiled(**request)
        except (ValueError, MemoryError) as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


@cache
def tokenizer_of(path: str, vocab_size: int, eos_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=list(eos_ids))


def compiled(
    tokenizer: str, vocab_size: int, eos_ids: list[int], limits: dict[str, int], overrides: dict, kind: str, text: str
) -> dict[str, str]:
    """Compile a text and compute the mask of the first token, which for some patterns is most of the work."""
    grammar = grammar_of(kind, text, overrides)
    reader = tokenizer_of(tokenizer, vocab_size, tuple(eos_ids))
    matcher = llguidance.LLMatcher(reader, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
    matcher.consume_token(matcher.compute_logit_bias().find(200))  # an error in the mask shows only at a token
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def grammar_of(kind: str, text: str, overrides: dict) -> str:
    """Return the grammar in llguidance's own form; raise ValueError if it is in none of the known notations."""
    if kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "grammar" and RULE.search(text):
        try:
            text = lark_of(text)
        except Exception as error:  # llguidance raises no other class if a rule is missing
            raise ValueError(str(error)) from error
    return llguidance.LLMatcher.grammar_from_lark(text)


def lark_of(text: str) -> str:
    """Return a grammar in GBNF in Lark's notation.

    llguidance's own conversion makes terminals of whole rules. As a terminal takes all characters that it can, a rule
    such as [ ]* " " would then match no text. Here each character is a terminal, which is slower but exact.
    """
    rules = gbnf.GrammarParser().parse(ESCAPE.sub(_unescaped, text))
    gbnf.resolve(rules)
    for index, rule in enumerate(rules.values()):
        rule.name = "start" if rule.name == "start" else f"rule{index}"
        rule.alternatives, rule.comment = _split(rule.alternatives), ""
    return "\n".join(map(str, rules.values()))


def _unescaped(found: re.Match) -> str:
    """Return the character that a number names; llguidance drops the number's leading zeros."""
    if not (found[1] or found[2]):
        return found[0]
    code = int(found[1] or found[2], 16)
    return f"\\x{code:02x}" if code < 128 else chr(code)


def _split(node: gbnf.ASTNode) -> gbnf.ASTNode:
    match node:
        case gbnf.LiteralNode():
            parts = [{"\\[": "[", "\\]": "]"}.get(part, part) for part in CHARACTER.findall(node.value)]
            return gbnf.SequenceNode([gbnf.LiteralNode(part) for part in parts])
        case gbnf.RepetitionNode():
            return gbnf.RepetitionNode(_split(node.node), node.min_times, node.max_times)
        case gbnf.SequenceNode():
            return gbnf.SequenceNode([_split(part) for part in node.nodes])
        case gbnf.AlternativeNode():
            return gbnf.AlternativeNode([_split(part) for part in node.alternatives])
    return node


if __name__ == "__main__":
    sys.exit(main())
