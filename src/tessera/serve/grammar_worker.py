"""Compile JSON schemas in a separate process, because a small schema may crash llguidance or keep it busy for minutes.

The process reads one JSON request per line from standard input, with the fields "tokenizer" (path of a tokenizer.json),
"vocab_size", "eos_ids", "limits", "overrides", "schema" and "limit_s". It answers each with a line of JSON on standard
output, with the field "grammar" or "error". A schema that takes over `limit_s` seconds of processor time ends the
process. It runs this file directly and imports only llguidance and the standard library.
"""

import json
import resource
import signal
import sys
import threading
from contextlib import suppress
from functools import cache

import llguidance

MEMORY_BYTES = 2 << 30
"""Maximum bytes of this process's address space."""
STACK_BYTES = 1 << 20
"""Stack size of the compiling thread: an eighth of the server's. A schema that compiles here cannot overflow the
server's stack."""


def main() -> int:
    """Answer requests until standard input ends."""
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
    """Print "ready"; then compile the schema of each request and print the reply."""
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
    """Return the tokenizer that a file holds; read each file only once."""
    return llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=list(eos_ids))


def compiled(
    tokenizer: str, vocab_size: int, eos_ids: list[int], limits: dict[str, int], overrides: dict[str, bool], schema: str
) -> dict[str, str]:
    """Compile a schema and compute the mask of the first token, which for some patterns is most of the work.

    Return {"grammar": the grammar}, or {"error": what is wrong} if llguidance refuses it.
    """
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
    reader = tokenizer_of(tokenizer, vocab_size, tuple(eos_ids))
    matcher = llguidance.LLMatcher(reader, grammar, log_level=0, limits=llguidance.LLParserLimits(**limits))
    matcher.consume_token(matcher.compute_logit_bias().find(200))  # an error in the mask shows only at a token
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


if __name__ == "__main__":
    sys.exit(main())
