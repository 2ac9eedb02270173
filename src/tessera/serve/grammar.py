"""Restrict answers to JSON that follows a given schema: llguidance says which tokens may come next.

Limits bound the time that a client's schema may cost. A schema that exceeds them fails only its own request.
"""

import json
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Bool

from tessera.core.child import Ended, Worker
from tessera.models.tokenizer import Tokenizer
from tessera.runtime.requests import Guide
from tessera.serve.protocol import SCHEMA_CHARACTERS, Refusal

COMPACT = {"whitespace_flexible": False}
"""Option of llguidance that forbids optional white space; otherwise a model may write white space indefinitely."""
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
"""llguidance's default limits: at most about 20 ms per schema and 15 ms per token. They are written out because the
server relies on them."""

WORKER = Path(__file__).with_name("grammar_worker.py")
COMPILE_S, WAIT_S = 2.0, 6.0
"""Maximum seconds of processor time to compile a schema, which is the schema's fault if they are exceeded, and maximum
seconds to wait for it, which on a busy machine are not. Most schemas take milliseconds."""
READY_S = 60.0
"""Maximum seconds until the worker process is ready. It starts in 0.3 s on an idle machine."""


class Grammars:
    """Compiler of grammars for one model.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of logits per step; token ids that the tokenizer lacks are never allowed.
        eos_ids: ids of the end-of-sequence tokens.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        folder = tempfile.TemporaryDirectory()
        path, ends = Path(folder.name) / "tokenizer.json", list(eos_ids)
        path.write_text(tokenizer.backend.to_str(), encoding="utf-8")
        self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=ends)
        self._asked = {"tokenizer": str(path), "vocab_size": vocab_size, "eos_ids": ends}
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._worker = Worker([sys.executable, "-P", str(WORKER)], ready_s=READY_S)
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._worker, folder)

    def json(self, schema: Mapping[str, Any]) -> Callable[[], Guide]:
        """Return a function that makes a new `Guide` for each answer; the guide makes the answer follow the schema.

        The schema {"type": "object"} allows any object.

        Raises:
            ValueError: the schema is wrong, unsupported or too large, or takes too long to compile.
            Refusal: the worker process got no processor time to compile it.
        """
        text = json.dumps(schema)
        if len(text) > SCHEMA_CHARACTERS:
            raise ValueError(
                f"the schema has {len(text):,} characters, but may have at most {SCHEMA_CHARACTERS:,}: shorten it"
            )
        matcher = llguidance.LLMatcher(self._tokenizer, self._tried(text), log_level=0, limits=self._limits)
        _check(matcher)
        return lambda: Following(matcher.deep_copy())

    def _tried(self, schema: str) -> str:
        """Return the schema's grammar after the worker process has compiled it within the limits."""
        asked = {**self._asked, "limits": LIMITS, "overrides": COMPACT, "schema": schema, "limit_s": COMPILE_S}
        with self._lock:
            try:
                reply = self._worker.ask(asked, WAIT_S)
            except Ended as ended:
                if ended.late:
                    message = "the server could not compile the schema in time: send the request again"
                    raise Refusal(503, message, retry_s=5) from ended
                slow = f"it takes over {COMPILE_S:g} s of processor time to compile"
                reason = slow if ended.spent else "its references are too deep"
                raise ValueError(f"the schema is refused, because {reason}: simplify it") from ended
        if "error" in reply:
            raise ValueError(f"llguidance refuses the schema: {reply['error'][:300]}")
        return reply["grammar"]


def _close(worker: Worker, folder: tempfile.TemporaryDirectory) -> None:
    worker.close()
    folder.cleanup()


class Following:
    """Guide (`requests.Guide`) that allows only the tokens with which an answer still follows the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return, for each token id, whether the grammar allows the token next."""
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        _check(self._matcher)
        return mask

    def push(self, token: int) -> None:
        """Advance the grammar by one generated token."""
        self._matcher.consume_token(token)
        _check(self._matcher)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(f"llguidance refuses the schema: {matcher.get_error()[:300]}")
