"""One prompt's answer as it grows: tokens, text in whole characters, stop strings, and final statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Result of generating for one prompt.

    Attributes:
        text: the decoded tokens, cut before a stop string; "" for a model without a tokenizer.
        tokens: generated ids, including an end-of-sequence token or the token that completed a stop string.
        logprobs: ln of each token's probability under the raw distribution softmax(logits): before repetition penalty,
            temperature and filters.
        finish_reason: "stop" (end-of-sequence token or stop string), "length" (max_new_tokens or the model's context
            is used up) or "interrupted" (Ctrl-C).
        ttft_s: seconds from the request to its first token, waiting and compilation included; nan without a token.
        decode_tokens_per_s: decode rate after the first token; nan for fewer than two tokens.
        density: key positions read / key positions visible, each summed over layers, heads, prompt rows and decode
            steps.
        layer_density: the same quotient for each layer; empty before the first token.
        prefill_keys: key positions that the prompt's rows read, summed over rows, layers and KV heads.
        decode_keys: the same for the rows of the answer; its last token has no row, because it is never fed back.
        decode_density: the quotient of `density` for the rows of the answer alone; 1 without such a row.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    ttft_s: float
    decode_tokens_per_s: float
    density: float
    layer_density: tuple[float, ...]
    prefill_keys: float = 0.0
    decode_keys: float = 0.0
    decode_density: float = 1.0

    def usage(self) -> str:
        """Summarise in a few words what the answer cost, and say if only its prompt was read sparsely."""
        rate = "" if math.isnan(self.decode_tokens_per_s) else f" at {self.decode_tokens_per_s:.1f} tokens/s"
        answer = ", all by the answer" if self.decode_keys and self.decode_density == 1.0 > self.density else ""
        return f"{self.prompt_tokens} tokens; {len(self.tokens)} new{rate}; {self.density:.0%} of keys read{answer}"


class StopSearch:
    """Search for a stop string in a growing text, in constant time per character on average.

    `matched` is the length of the longest start of the stop string with which the text ends. Source: Knuth, Morris and
    Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    def __init__(self, stop: str):
        self.matched = 0
        self._stop = stop
        self._shorter = [0]  # by length of a start of `stop`, less 1: length of the longest shorter start that ends it
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def push(self, piece: str, *, heed: bool = True) -> int | None:
        """Add text. If it completes the stop string, return where the string begins, counted from the piece's start.

        Without `heed`, ignore stop strings that are complete within the piece.
        """
        for index, character in enumerate(piece):
            self.matched = self._next(self.matched, character)
            if self.matched == len(self._stop):
                if heed:
                    return index + 1 - self.matched
                self.matched = self._shorter[-1]
        return None

    def _next(self, matched: int, character: str) -> int:
        """Return the length of the longest start that ends a text, from that of the text without its last character."""
        while matched and self._stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self._stop[matched] == character)


class Answer:
    """An answer that grows token by token, to at most `limit`; `generation` returns the result.

    The text is cut before the first text of `stop`, which ends the answer after `min_tokens` tokens. Names of special
    tokens stay in the text only for the ids in `shown`. Without a tokenizer, there is no text.
    """

    def __init__(
        self,
        prompt_tokens: int,
        limit: int,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        tokenizer: Tokenizer | None,
        *,
        shown: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ):
        self.prompt_tokens = prompt_tokens
        self.limit, self.min_tokens = limit, min_tokens
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.eos_ids = frozenset(eos_ids)
        self._shown_ids = shown
        self._stop = [StopSearch(text) for text in stop]
        self._stream = None if tokenizer is None else tokenizer.stream(shown=shown)
        self._text = ""
        self._shown = 0  # characters of the text already returned
        self._times_s: list[float] = []
        self._read_L = self._visible_L = np.zeros(0)
        self._prefill_read = self._prefill_visible = 0.0

    @property
    def num_keys(self) -> int:
        """Number of keys to cache for prompt and answer. The last token has no key, because it is never fed back."""
        return self.prompt_tokens + self.limit - 1

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def push(self, token: int, logprob: float, time_s: float) -> str:
        """Add one token; return the text that became final: whole characters that cannot begin a stop string."""
        if not self.tokens:
            self._prefill_read, self._prefill_visible = float(self._read_L.sum()), float(self._visible_L.sum())
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self._times_s = [self._times_s[0] if self._times_s else time_s, time_s]
        ends = token in self.eos_ids
        if ends and token not in self._shown_ids:
            return self.finish("stop")
        if self._stream is not None and self._append(self._stream.push(token)):
            return self._hand_out(len(self._text))
        if ends or len(self.tokens) == self.limit:
            return self.finish("stop" if ends else "length")
        return self._hand_out(len(self._text) - self._held())

    def count(self, read_L: np.ndarray, visible_L: np.ndarray) -> None:
        """Add one call's key counts per layer: keys read for this sequence, and keys that a dense pass would read."""
        first = not self._visible_L.size
        self._read_L = read_L if first else self._read_L + read_L
        self._visible_L = visible_L if first else self._visible_L + visible_L

    def finish(self, reason: str) -> str:
        """Complete the answer and return the text that was still held back."""
        self.finish_reason = reason
        if self._stream is not None:
            self._append(self._stream.finish())
        return self._hand_out(len(self._text))

    def generation(self, started_s: float) -> Generation:
        """Return the answer with its statistics; `started_s` is on the same clock as `time_s` of `push`."""
        count = len(self.tokens)
        spent_s = self._times_s[1] - self._times_s[0] if count > 1 else 0.0
        read, visible = float(self._read_L.sum()), float(self._visible_L.sum())
        decode_keys = read - self._prefill_read if count else 0.0
        decode_visible = visible - self._prefill_visible if count else 0.0
        return Generation(
            text=self._text,
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            finish_reason=self.finish_reason or "interrupted",
            prompt_tokens=self.prompt_tokens,
            ttft_s=self._times_s[0] - started_s if count else float("nan"),
            decode_tokens_per_s=(count - 1) / spent_s if spent_s > 0 else float("nan"),
            density=read / visible if self._visible_L.size else 1.0,
            layer_density=tuple((self._read_L / self._visible_L).tolist()),
            prefill_keys=self._prefill_read,
            decode_keys=decode_keys,
            decode_density=decode_keys / decode_visible if decode_visible else 1.0,
        )

    def _append(self, piece: str) -> bool:
        """Add text. If it completes a stop string, cut the text before that string, end the answer and return True."""
        heed = len(self.tokens) > self.min_tokens
        found = [len(self._text) + at for stop in self._stop if (at := stop.push(piece, heed=heed)) is not None]
        self._text += piece
        if not found:
            return False
        self._text = self._text[: min(found)]
        self.finish_reason = "stop"
        return True

    def _held(self) -> int:
        """Count the characters at the end of the text that may start a stop string."""
        return max((stop.matched for stop in self._stop), default=0)

    def _hand_out(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
