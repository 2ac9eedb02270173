"""Probes for heads that look far back: text with planted facts, which are repeated at its end.

Plain text rarely needs the few heads that retrieve facts, so a plan built on text alone loses them (LOG.md). A fact is
a sentence made of a key ("The secret number of WORD is") and an answer (five digits). A probe is a window of the user's
text with facts hidden at even depths; at its end, the facts and a passage of the text are repeated. Only the repeated
answers, and the repeated passage after its first tokens, are judged. Without a tokenizer, keys and answers are random
tokens of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FACTS, DIGITS = 4, 5
KEY_TOKENS, ANSWER_TOKENS = 8, 4
"""Number of tokens of the key and of the answer in a fact of random tokens."""
PASSAGE, CUE = 24, 8
"""Number of tokens of the repeated passage. Its first CUE tokens are only a cue; the others are judged."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One window with planted facts and, at its end, their repetition.

    Attributes:
        answers: (first, end) positions of the judged tokens of each repetition, end excluded.
        text_end: position after the text and its planted facts, where the repetitions start.
    """

    tokens: np.ndarray
    answers: tuple[tuple[int, int], ...]
    text_end: int


def plant(model: Any, window: np.ndarray, seed: Sequence[int], num_facts: int = FACTS) -> Probe:
    """Hide facts in a window of text, and repeat the facts and a passage of the text at the window's end.

    The window keeps its length: its last tokens are cut off. The same seed gives the same probe.
    """
    rng = np.random.default_rng(list(seed))
    text = "" if model.tokenizer is None else model.tokenizer.decode(window)
    words = rng.permutation(sorted(set(re.findall(r"[A-Za-z]{4,12}", text))))[:num_facts]
    facts = [_fact(model, words, window, rng, index) for index in range(num_facts)]
    sentences = [np.concatenate(fact) for fact in facts]
    asked = rng.permutation(num_facts)
    room = len(window) - 2 * sum(map(len, sentences)) - PASSAGE
    if room < 4 * PASSAGE:
        raise ValueError(
            f"a window of {len(window)} tokens is too short to hide {num_facts} facts in: pass longer text"
        )
    body, text = [], window[:room]
    cuts = [int((index + 0.5) / num_facts * room) for index in range(num_facts)]
    for start, end, sentence in zip([0, *cuts], [*cuts, room], [*sentences, window[:0]]):
        body += [text[start:end], sentence]
    first = int(rng.integers(0, max(cuts[0] - PASSAGE, 1)))  # before the first fact, so that the passage holds no fact
    tail, answers = [], []
    position = end_of_text = sum(map(len, body))
    for index in asked:
        key, answer, rest = facts[index]
        answers.append((position + len(key), position + len(key) + len(answer)))
        tail.append(sentences[index])
        position += len(sentences[index])
    answers.append((position + CUE, position + PASSAGE))
    tail.append(text[first : first + PASSAGE])
    tokens = np.concatenate([*body, *tail]).astype(np.int32)
    return Probe(tokens=tokens, answers=tuple(answers), text_end=end_of_text)


def _fact(
    model: Any, words: Sequence[str], window: np.ndarray, rng: np.random.Generator, index: int
) -> tuple[np.ndarray, ...]:
    """Draw one fact, and return the tokens of its key, of its answer and of the sentence's ending."""
    if model.tokenizer is None:
        pick = rng.choice(window, KEY_TOKENS + ANSWER_TOKENS)
        return pick[:KEY_TOKENS], pick[KEY_TOKENS:], window[:0]
    word = words[index] if index < len(words) else f"item {index + 1}"
    key = f"\nThe secret number of {word} is"
    parts = (key, f" {rng.integers(10 ** (DIGITS - 1), 10**DIGITS)}", ".\n")
    return tuple(np.asarray(model.tokenizer.encode(part, add_special=False), np.int32) for part in parts)
