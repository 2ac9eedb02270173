"""Render chat templates, which are untrusted code, in a separate process that may be killed.

The process reads JSON requests {"template", "variables", "limit_s", "limit_characters"} from standard input, one per
line, and answers each with a line of JSON on standard output: {"text"} or {"error"}. A template that takes over
`limit_s` seconds of processor time ends the process. It runs this file directly and imports only jinja2 and the
standard library, so it starts in about 0.2 s.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
"""Maximum bytes of this process's address space. A conversation of 20 million characters needs half as much."""


class Refusal(Exception):
    """Error: a template is invalid or failed. The message says why."""


def main() -> int:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores SIGPROF passes that on
    limit_memory()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The timer ends the process even if the parent is killed meanwhile. A Python thread could not: one power of two
        # large numbers holds the interpreter for hours.
        signal.setitimer(signal.ITIMER_PROF, request.pop("limit_s"))
        try:
            reply = {"text": render(**request)}
        except Refusal as error:
            reply = {"error": str(error)[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)
    return 0


def limit_memory() -> None:
    """Limit the address space to MEMORY_BYTES. Where the system refuses (macOS), only time and output are limited."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


def render(template: str, variables: Mapping[str, Any], limit_characters: int) -> str:
    """Render one template; raise Refusal if it is invalid, fails, or writes more than `limit_characters`."""
    try:
        pieces, count = [], 0
        for piece in environment().from_string(template).generate(**variables):
            pieces.append(piece)
            if (count := count + len(piece)) > limit_characters:
                raise jinja2.TemplateError(f"it writes more than {limit_characters:,} characters")
        text = "".join(pieces)
        text.encode()  # fails for a lone surrogate, which has no UTF-8 bytes to tokenise
        return text
    except jinja2.TemplateError as error:
        raise Refusal(error) from error
    except MemoryError as error:
        raise Refusal(f"it needs more than {MEMORY_BYTES >> 30} GiB of memory") from error
    except Exception as error:  # a template calls functions with any argument, so any error may come back
        raise Refusal(f"{type(error).__name__}: {error}") from error


def environment() -> ImmutableSandboxedEnvironment:
    """Build the jinja sandbox that chat templates expect: transformers' options, filters and functions."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training tools. It renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """Refuse the conversation with the template's message. Templates call this function."""
    raise jinja2.TemplateError(message)


def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return the value as plain JSON. Jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    sys.exit(main())
