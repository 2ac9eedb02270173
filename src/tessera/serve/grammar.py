"""Answers that are JSON of a given schema: llguidance says which tokens may come next.

Its limits bound what a schema from a stranger may cost; a grammar that exceeds them fails its request alone.
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
"""Without this, a model may write white space for ever."""
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
"""llguidance's defaults, some 20 ms for a schema and 15 ms for a token at most; named because the server relies on
them."""


class Grammars:
    """Compiles grammars for one model.

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
        """Return what starts a guide to JSON of the schema; {"type": "object"} takes any object.

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
    """A guide that follows a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return which tokens may come next."""
        mask = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) > 0
        _check(self._matcher)
        return mask

    def push(self, token: int) -> None:
        """Take the token that came."""
        self._matcher.consume_token(token)
        _check(self._matcher)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(f"the grammar fails: {matcher.get_error()[:300]}")
