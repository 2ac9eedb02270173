"""Generate long-context questions offline, in the manner of RULER (arXiv 2404.06654), for any length and tokenizer.

| kind | hidden | asked |
|---|---|---|
| single | one pass key in running text | the key |
| multi_key | pass keys of many names | the key of one name |
| multi_value | four pass keys of one name, and a pass key of each of four others | the four |
| tracking | a chain x = 48213, y = x, z = y, among other chains | the last name's number |
| common_words | a word list, ten words five times as often as the others | the ten |
| frequent_words | made-up words whose frequencies follow Zipf's law | the three most frequent |

The prompt ends where the answer begins, so that a base model can continue it. A sample's score is the share of the
expected strings that appear in the answer. The same seed gives the same sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from lab.training.facts import NAMES, number

MARGIN = 16
"""Tokens left free, since joined pieces of text may take more tokens than the separate pieces."""


class Sample(NamedTuple):
    """One question.

    Attributes:
        prompt: text; prompt and answer together fit into the requested length.
        expected: strings that the answer must contain.
        answer_tokens: maximum tokens to generate.
        depth: position of the hidden note, 0 (start) to 1 (end); None unless there is exactly one note.
    """

    prompt: str
    expected: tuple[str, ...]
    answer_tokens: int
    depth: float | None

    def score(self, answer: str) -> float:
        """Return the share of the expected strings that occur in the answer."""
        return sum(word.lower() in answer.lower() for word in self.expected) / len(self.expected)


class Draft(NamedTuple):
    """A question before its notes are hidden in the filler.

    Attributes:
        filler: text to hide notes in, or the word list that the question is about.
        notes: pairs (position, line to hide there); position 0 is the filler's start, 1 its end.
        question: text after the filler.
        expected: strings that the answer must contain.
    """

    filler: str
    notes: tuple[tuple[float, str], ...]
    question: str
    expected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hay:
    """Filler text, and a function that counts a text's tokens."""

    text: str
    count: Callable[[str], int]

    def excerpt(self, rng: np.random.Generator, size: int) -> str:
        """Cut `size` characters from a random line start, repeating the text if it is shorter."""
        text = self.text * (1 + size // max(len(self.text), 1) + 1)
        start = int(rng.integers(0, len(self.text)))
        start = text.rfind("\n", 0, start) + 1
        return text[start : start + size]


def single(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """Hide one pass key."""
    key = number(rng, 5)
    note = f"The pass key is {key}. Remember it."
    return Draft(hay.excerpt(rng, size), ((depth, note),), "What is the pass key? The pass key is ", (key,))


def multi_key(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """Hide a pass key for each of eight names and ask for one."""
    names = rng.permutation(NAMES)[:8]
    keys = [number(rng, 5) for _ in names]
    places = [depth, *rng.random(len(names) - 1)]
    notes = tuple((p, f"The pass key of {n} is {k}. Remember it.") for p, n, k in zip(places, names, keys))
    asked = f"What is the pass key of {names[0]}? The pass key of {names[0]} is "
    return Draft(hay.excerpt(rng, size), notes, asked, (keys[0],))


def multi_value(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """Hide four pass keys of one name and one pass key of each of four other names; ask for the four."""
    name, *others = rng.permutation(NAMES)[:5]
    keys = [number(rng, 5) for _ in range(4)]
    notes = [(p, f"One pass key of {name} is {k}.") for p, k in zip([depth, *rng.random(3)], keys)]
    notes += [(float(rng.random()), f"One pass key of {o} is {number(rng, 5)}.") for o in others]
    asked = f"What are the four pass keys of {name}? The four pass keys of {name} are "
    return Draft(hay.excerpt(rng, size), tuple(notes), asked, tuple(keys))


def tracking(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """Hide four chains of assignments (x = 48213, y = x, z = y) and ask for the value of one chain's last name."""
    letters = list("abcdefghijklmnopqrstuvwxyz")
    notes, asked = [], []
    for chain in range(4):
        names = ["".join(rng.choice(letters, 5)) for _ in range(4)]
        value = number(rng, 5)
        lines = [f"{names[0]} = {value}", *(f"{b} = {a}" for a, b in zip(names, names[1:]))]
        first = depth if chain == 0 else float(rng.random())
        places = np.sort(np.append(rng.uniform(first, 1, len(lines) - 1), first))
        notes += list(zip(map(float, places), lines))
        asked.append((names[-1], value))
    name, value = asked[0]
    return Draft(hay.excerpt(rng, size), tuple(notes), f"What is {name}? {name} = ", (value,))


def common_words(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """List words, ten of them five times as often as the others, and ask for those ten."""
    common, pool = _words(rng, 10), _words(rng, max(size // 14, 10))
    rounds = max(size // (8 * (10 * 10 + 2 * len(pool))), 1)
    listed = rng.permutation(np.array(common * 10 * rounds + pool * 2 * rounds))
    question = "What are the ten most common words above? The ten most common words are "
    return Draft(_numbered(listed, size), (), question, tuple(common))


def frequent_words(rng: np.random.Generator, hay: Hay, size: int, depth: float) -> Draft:
    """List made-up words, the n-th with probability in proportion to n^-2, and ask for the three most frequent."""
    pool = _words(rng, 50)
    weights = np.arange(1, 51) ** -2.0
    listed = rng.choice(pool, size // 6, p=weights / weights.sum())
    text = " ".join(listed)[:size]
    question = "What are the three most frequent words above? The three most frequent words are "
    return Draft(text, (), question, tuple(pool[:3]))


KINDS: Final[Mapping[str, Callable[[np.random.Generator, Hay, int, float], Draft]]] = MappingProxyType(
    {
        "single": single,
        "multi_key": multi_key,
        "multi_value": multi_value,
        "tracking": tracking,
        "common_words": common_words,
        "frequent_words": frequent_words,
    }
)
"""Kinds by name. To add one, write a function and add a line here."""


def make(kind: str, hay: Hay, length: int, *, seed: Sequence[int], depth: float | None = None) -> Sample:
    """Build a sample whose prompt and answer have `length` tokens, or slightly fewer.

    Args:
        kind: one of KINDS.
        hay: filler and token count.
        length: maximum tokens of prompt plus answer.
        seed: seed of all random choices.
        depth: position of the note that holds the answer, 0 (start) to 1 (end); random if None.

    Raises:
        ValueError: the kind is unknown, or `length` is too short for the notes and the question.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    rng = np.random.default_rng([*seed, *kind.encode()])
    depth = float(rng.random()) if depth is None else depth
    state = rng.bit_generator.state

    def draft(size: int) -> tuple[str, Draft]:
        rng.bit_generator.state = state
        made = KINDS[kind](rng, hay, size, depth)
        return _assemble(made, size), made

    answer_tokens = hay.count(", ".join(draft(0)[1].expected)) + 2
    room = length - answer_tokens - MARGIN
    if hay.count(draft(0)[0]) > room:
        raise ValueError(f"{length=} must be larger: notes and question of {kind} alone do not fit")
    low, high = 0, 16 * length  # characters of filler: no tokenizer averages more than 16 per token
    while high - low > max(room // 200, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if hay.count(draft(middle)[0]) <= room else (low, middle)
    text, made = draft(low)
    return Sample(text, made.expected, answer_tokens, depth if len(made.notes) == 1 else None)


def _assemble(made: Draft, size: int) -> str:
    """Insert each note into the filler as a line, at the line end nearest to its position, and append the question."""
    text = made.filler[:size]
    breaks = np.array([0, *(i + 1 for i, c in enumerate(text) if c == "\n"), len(text)])
    parts, last = [], 0
    for place, note in sorted(made.notes):
        cut = max(int(breaks[np.argmin(np.abs(breaks - place * len(text)))]), last)
        parts += [text[last:cut], note + "\n"]
        last = cut
    return "".join([*parts, text[last:], "\n\n", made.question])


def _words(rng: np.random.Generator, count: int) -> list[str]:
    """Draw distinct, pronounceable made-up words."""
    consonants, vowels = list("bdfgklmnprstvz"), list("aeiou")
    words: dict[str, None] = {}
    while len(words) < count:
        size = int(rng.integers(2, 4))
        words["".join(f"{rng.choice(consonants)}{rng.choice(vowels)}" for _ in range(size)) + "n"] = None
    return list(words)


def _numbered(words: Sequence[str], size: int) -> str:
    lines, total = [], 0
    for index, word in enumerate(words, start=1):
        lines.append(f"{index}. {word}")
        total += len(lines[-1]) + 1
        if total >= size:
            break
    return "\n".join(lines)
