"""Restrict answers to JSON of a schema, or to text of a regex or a grammar: llguidance says which tokens may come next.

Limits bound the time that a client's schema or grammar may cost. One that exceeds them fails only its own request.
"""

import json
import re
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Bool

from tessera.core.child import Ended, Worker
from tessera.models.text.tokenizer import Tokenizer
from tessera.runtime.requests import Guide
from tessera.serve.api.forms import Form
from tessera.serve.api.json_schema import check, prepared
from tessera.serve.api.schema import Refusal

COMPACT = {"whitespace_flexible": False}
"""Option of llguidance that forbids optional white space; otherwise a model may write white space indefinitely."""
LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 150_000, "step_max_items": 50_000}
"""Limits of llguidance on its work for a schema and its first mask, and for each later mask.

With llguidance's defaults, a nested repetition such as (a{1000}){1000} stops all streams for seconds. Half of these
limits would refuse an enum of 10,000 numbers, and [\\p{L} ]{0,200} with a vocabulary of 128,000 tokens.
"""
REQUEST_S, TOKEN_S = 0.3, 0.01
"""Seconds of processor time that the grammars of a request's answers together may take on the engine's thread: in a
burst, and per token on average. All other requests wait for it. Harmless schemas take less than half of it."""

ESCAPE = re.compile(r"(?s)\\.")
ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\S": r"[^ \t\n\r\f\v]",
}
"""Class of characters in a regex -> what other servers take it for, also inside [...]. llguidance takes it for all of
Unicode."""

WORKER = Path(__file__).with_name("grammar_worker.py")
COMPILE_S = 2.0
"""Maximum seconds of processor time to compile a schema. Most schemas take milliseconds."""
WAIT_S = 6.0
"""Maximum seconds to wait for the worker. A busy machine may exceed them, so the schema is not to blame."""
READY_S, EXIT_S = 60.0, 2.0
"""Maximum seconds until the worker process is ready (0.3 s on an idle machine), and until it exits."""


class Grammars:
    """Compiler of grammars for one model, with `vocab_size` logits; ids that the tokenizer lacks are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        folder = tempfile.TemporaryDirectory()
        path, ends = Path(folder.name) / "tokenizer.json", list(eos_ids)
        path.write_text(_literal(tokenizer.backend.to_str()), encoding="utf-8")
        self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=ends)
        self._asked = {"tokenizer": str(path), "vocab_size": vocab_size, "eos_ids": ends}
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._worker = Worker([sys.executable, "-P", str(WORKER)], ready_s=READY_S, exit_s=EXIT_S)
        self._lock = threading.Lock()
        weakref.finalize(self, folder.cleanup)
        weakref.finalize(self, self._worker.close)  # which reads the folder's file, and so ends first

    def guides(self, form: Form) -> Callable[[], Guide]:
        """Return a function that makes, for each answer, a `Guide` to follow `form`; raise ValueError if it is wrong,
        unsupported, too large or slow, and Refusal if the worker process is to blame."""
        text, name = form.text, form.noun
        if form.kind == "json":
            text = json.dumps(prepared(json.loads(text)))
        elif form.kind == "regex":
            text = ESCAPE.sub(lambda found: ASCII.get(found[0], found[0]), text)
        elif form.kind == "grammar":
            _check_schemas_in(text)
        grammar = self._tried(form.kind, text, name)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        first = _mask(matcher)  # so that the engine's thread need not compute it for each answer
        _check(matcher, name)
        allowance = Allowance(REQUEST_S)
        return lambda: Following(matcher.deep_copy(), first, allowance, name)

    def _tried(self, kind: str, text: str, name: str) -> str:
        """Return the grammar in llguidance's own form, after the worker process has compiled it within the limits."""
        asked = {**self._asked, "limits": LIMITS, "overrides": COMPACT, "limit_s": COMPILE_S}
        lost = Refusal(503, f"the server could not compile the {name}: send the request again", retry_s=5)
        with self._lock:
            try:
                self._worker.start()
            except (Ended, OSError) as error:
                raise lost from error
            try:
                reply = self._worker.ask_again({**asked, "kind": kind, "text": text}, WAIT_S)
            except Ended as ended:
                if ended.late:
                    raise lost from ended
                slow = f"it takes over {COMPILE_S:g} s of processor time to compile"
                reason = slow if ended.spent else "it needs too much memory or its references are too deep"
                raise ValueError(f"the {name} is refused, because {reason}: simplify it") from ended
        if "error" in reply:
            raise _refused(reply["error"], name)
        return reply["grammar"]


@dataclass
class Allowance:
    """Seconds of processor time that the answers of one request may still take on the engine's thread."""

    left_s: float


class Following:
    """Guide of one answer. `first` says with which tokens it may begin; a request's answers share one `allowance`."""

    def __init__(self, matcher: llguidance.LLMatcher, first: Bool[np.ndarray, "V"], allowance: Allowance, name: str):
        self._matcher, self._first, self._allowance, self._name = matcher, first, allowance, name

    def allowed(self) -> Bool[np.ndarray, "V"]:
        return self._timed(_mask, self._matcher) if self._first is None else self._first

    def push(self, token: int) -> None:
        self._first = None
        self._allowance.left_s = min(self._allowance.left_s + TOKEN_S, REQUEST_S)
        self._timed(self._matcher.consume_token, token)

    def _timed[Result](self, work: Callable[..., Result], *args: Any) -> Result:
        began_s = time.thread_time()
        result = work(*args)
        self._allowance.left_s -= time.thread_time() - began_s
        _check(self._matcher, self._name)
        if self._allowance.left_s < 0:
            said = f"the {self._name} is refused, because it takes too much processor time per token: simplify it"
            raise ValueError(said)
        return result


def _literal(tokenizer: str) -> str:
    """Return a tokenizer.json in which no text spells a special token; all ids stay.

    llguidance tokenises the text that a grammar prescribes, and would turn the name of a special token in it into the
    token. It takes the added tokens here for special. Their new names contain a control character, which JSON escapes.
    """
    raw = json.loads(tokenizer)
    model, names = raw["model"], {}
    for token in raw["added_tokens"]:
        if token["special"] or (token["content"].startswith("<") and token["content"].endswith(">")):
            names[token["content"]] = token["content"] = f"\0{token['id']}"
            token.update(special=True, normalized=False)
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint([*pair, "".join(pair)])]
    return json.dumps(raw)


def _mask(matcher: llguidance.LLMatcher) -> Bool[np.ndarray, "V"]:
    return np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0


def _check_schemas_in(grammar: str) -> None:
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # no schema: llguidance refuses it, unless it is part of a text
        check(schema)


def _check(matcher: llguidance.LLMatcher, name: str) -> None:
    if matcher.is_error():
        raise _refused(matcher.get_error(), name)


def _refused(error: str, name: str) -> ValueError:
    reason, _, _ = error.partition("\n<state>")  # the parser's state, and the whole grammar
    if reason == "NoExtensionBias":
        reason = "no text follows it"
    if reason.startswith("oneOf constraints are not supported"):
        reason = "it cannot tell that at most one schema of a oneOf holds: use anyOf"
    return ValueError(f"llguidance refuses the {name}: {reason[:300]}")
