"""Restrict answers to JSON that follows a given schema: llguidance says which tokens may come next.

Limits bound the time that a client's schema may cost. A grammar that exceeds them fails only its own request.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Bool

from tessera.models.tokenizer import Tokenizer
from tessera.runtime.requests import Guide

COMPACT = {"whitespace_flexible": False}
"""Option of llguidance that forbids optional white space; otherwise a model may write white space indefinitely."""
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
"""llguidance's default limits: at most about 20 ms per schema and 15 ms per token. They are written out because the
server relies on them."""


class Grammars:
    """Compiler of grammars for one model.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: logits per step; ids that the tokenizer lacks are never allowed.
        eos_ids: ids that end an answer.

    Raises:
        ValueError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(tokenizer.backend.to_str(), encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_ids))
        self._limits = llguidance.LLParserLimits(**LIMITS)

    def json(self, schema: Mapping[str, Any]) -> Callable[[], Guide]:
        """Return a function that makes a guide for one answer, which then follows the schema.

        The schema {"type": "object"} allows any object.

        Raises:
            ValueError: the schema is wrong, unsupported or too large.
        """
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)
        first = self._matcher(grammar)
        return lambda: Following(first.deep_copy())

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        return matcher


class Following:
    """Guide (`requests.Guide`) that allows only tokens with which the answer still follows the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return, for each token id, whether the grammar allows it next."""
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        _check(self._matcher)
        return mask

    def push(self, token: int) -> None:
        """Advance the grammar by the generated token."""
        self._matcher.consume_token(token)
        _check(self._matcher)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(f"the grammar fails: {matcher.get_error()[:300]}")
