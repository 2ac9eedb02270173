"""Probes for heads that look far back: facts and passages planted in the user's own text and repeated at its end.

Plain text rarely needs the few heads that retrieve, so a plan built on text alone loses them (LOG.md). A probe is a
window of text with sentences hidden at even depths and repeated at the end; only the tokens of the repeated answers are
judged. Without a tokenizer, keys and answers are random tokens of the text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FACTS, DIGITS = 4, 5
KEY_TOKENS, ANSWER_TOKENS = 8, 4
"""Tokens of the key and of the answer in a fact of random tokens."""
PASSAGE, CUE = 24, 8
"""Tokens of a repeated passage, and number of its first tokens that are only a cue; the others are judged."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One window with planted facts and, at its end, their repetition.

    Attributes:
        tokens: token ids of the window.
        answers: (first, end) positions of each repeated answer's tokens; the row before a token predicts it.
        text_end: end of the text and its planted sentences; the repetitions start here.
    """

    tokens: np.ndarray
    answers: tuple[tuple[int, int], ...]
    text_end: int


def plant(model: Any, window: np.ndarray, seed: Sequence[int], num_facts: int = FACTS) -> Probe:
    """Hide facts in a window of text, and repeat the facts and a passage at its end; the window keeps its length.

    Args:
        model: a model; its tokenizer, if it has one, encodes the facts.
        window: token ids; the last ones are cut off to make room for the facts and repetitions.
        seed: the same seed gives the same probe.
        num_facts: number of facts to hide, at even depths.

    Raises:
        ValueError: the window is too short for its facts.
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
    """Draw the key, the answer and the ending of one planted sentence."""
    if model.tokenizer is None:
        pick = rng.choice(window, KEY_TOKENS + ANSWER_TOKENS)
        return pick[:KEY_TOKENS], pick[KEY_TOKENS:], window[:0]
    word = words[index] if index < len(words) else f"item {index + 1}"
    key = f"\nThe secret number of {word} is"
    parts = (key, f" {rng.integers(10 ** (DIGITS - 1), 10**DIGITS)}", ".\n")
    return tuple(np.asarray(model.tokenizer.encode(part, add_special=False), np.int32) for part in parts)
