"""Generate documents with hidden facts, and questions about the facts, for any text, tokenizer and seed.

| kind | hidden in the document | asked |
|---|---|---|
| single | a number for each of eight unrelated things | the number of each |
| alike | a number for each of eight cities, in the same words | the number of each |
| keys | a number for each of five people who share first names and surnames | the number of each |
| values | three numbers, under different names, for each of two cities | each number |
| chain | a number for each of four cities, and, elsewhere, the number after it | the number, then the one after it |
| copy | passages of random numbers | the last numbers of each passage, given the first ones |
| count | things of several kinds, numbered in order | the next number of each kind |

A question includes the beginning of its answer ("... The special number of Lisbon is"), since a small model continues
text better than it follows instructions. Questions are short, so that each can run from its document's cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from tessera.models.text.tokenizer import Tokenizer

ROOM = 128
"""Number of tokens, out of a document's length, that the document leaves free for a question and its answer.

Lengths are multiples of ROOM, so every question starts at a multiple of ROOM. If the query tile's size divides ROOM,
every question therefore starts at the start of a query tile.
"""

CITIES = (
    "Lisbon|Oslo|Cairo|Lima|Delhi|Paris|Rome|Berlin|Madrid|Vienna|Dublin|Prague|Athens|Warsaw|Helsinki|Nairobi|Havana|"
    "Ottawa|Tokyo|Seoul|Boston|Denver|Dallas|Sydney|Munich|Naples|Geneva|Toronto|Chicago|Bangkok"
).split("|")
PEOPLE = (
    "Anna|Peter|Maria|Thomas|Sarah|David|Laura|Michael|Julia|Daniel|Emma|Robert|Alice|James|Helen|George|Susan|Henry|"
    "Clara|Oscar"
).split("|")
SURNAMES = "Berg|Bell|Stone|Wood|Young|Martin|Cook|Fisher".split("|")
MEASURES = (
    "door code of the warehouse|phone extension of the library|population of the village|weight of the statue|"
    "price of the piano|length of the river|serial number of the engine|budget of the garden project|"
    "capacity of the stadium|salary of the captain|height of the tower|depth of the lake|mileage of the truck|"
    "membership card of Clara|ticket of the passenger|speed of the comet|invoice of the plumber|locker of the swimmer"
).split("|")
THINGS = "Crate|Lap|Page|Round|Step|Ticket|Train|Guest".split("|")


class Question(NamedTuple):
    """A question that follows a document, and its expected answer.

    Attributes:
        suffix: token ids of the question and of its answer's beginning.
        answer: expected token ids.
        given: per answer token, whether the token is given to the model rather than asked; empty if all are asked.
        depth: position in the document of the fact, or of its first line, from 0 (start) to 1 (end).
    """

    suffix: tuple[int, ...]
    answer: tuple[int, ...]
    given: tuple[bool, ...]
    depth: float


class Document(NamedTuple):
    """Token ids of a document, and questions. The document, one question and its answer fit into `length` tokens."""

    kind: str
    length: int
    prefix: np.ndarray
    questions: tuple[Question, ...]


class Fact(NamedTuple):
    """Lines to hide in a document, in order, and a question about them.

    `question` ends with the answer's beginning, without a trailing space. `answer` is pieces of text, spaces included,
    alternating: asked, given, asked, ...
    """

    notes: tuple[str, ...]
    question: str
    answer: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Tokenized text to hide facts in. `breaks` are the positions in `ids` right after a line end."""

    tokenizer: Tokenizer
    ids: np.ndarray
    breaks: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> "Filler":
        """Tokenize a text and find its line ends."""
        ids = np.asarray(tokenizer.encode(text, add_special=False, parse_special=False), np.int32)
        ends = {int(i) for i in np.unique(ids) if tokenizer.decode([int(i)]).endswith("\n")}
        breaks = np.flatnonzero(np.isin(ids, sorted(ends))) + 1
        if not len(breaks):
            raise ValueError("the text has no line ends: facts are hidden between lines")
        return cls(tokenizer=tokenizer, ids=ids, breaks=breaks)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False, parse_special=False)

    def excerpt(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Cut `size` tokens from a random line start, wrapping at the text's end; also return where its lines end."""
        start = int(rng.choice(self.breaks))
        at = (start + np.arange(size)) % len(self.ids)
        return self.ids[at], np.flatnonzero(np.isin(at + 1, self.breaks)) + 1


def number(rng: np.random.Generator) -> str:
    """Draw a number of five digits."""
    return str(rng.integers(10_000, 100_000))


def single(rng: np.random.Generator) -> list[Fact]:
    return [numbered(rng, thing) for thing in rng.permutation(MEASURES)[:8]]


def alike(rng: np.random.Generator) -> list[Fact]:
    return [numbered(rng, f"special number of {city}") for city in rng.permutation(CITIES)[:8]]


def numbered(rng: np.random.Generator, thing: str) -> Fact:
    """Draw a number for a thing, and build the fact that states and asks for it."""
    value = number(rng)
    return Fact((f"The {thing} is {value}.",), f"What is the {thing}? The {thing} is", (f" {value}",))


def keys(rng: np.random.Generator) -> list[Fact]:
    first, last = rng.permutation(PEOPLE)[:3], rng.permutation(SURNAMES)[:2]
    people = [f"{one} {two}" for one in first for two in last][:5]
    return [numbered(rng, f"special number of {person}") for person in people]


def values(rng: np.random.Generator) -> list[Fact]:
    names, cities = ("special number", "phone number", "access code"), rng.permutation(CITIES)[:2]
    return [numbered(rng, f"{name} of {city}") for city in cities for name in names]


def chain(rng: np.random.Generator) -> list[Fact]:
    facts = []
    for city in rng.permutation(CITIES)[:4]:
        value, after = number(rng), number(rng)
        line = f"The special number of {city} is"
        told = f".\n\n{value}"
        question = f"What comes after the special number of {city}? {line}"
        facts.append(Fact((f"{line} {value}.", f"{value} {after}"), question, (f" {value}", told, f" {after}")))
    return facts


def copy(rng: np.random.Generator) -> list[Fact]:
    facts = []
    for _ in range(6):
        row = [number(rng) for _ in range(7)]
        facts.append(Fact((" ".join(row),), " ".join(row[:5]), (" " + " ".join(row[5:]),)))
    return facts


def count(rng: np.random.Generator) -> list[Fact]:
    """For each of four kinds of thing, draw a last number from 3 to 7 and hide a note for every number from 1 to it."""
    facts = []
    for thing in rng.permutation(THINGS)[:4]:
        last = int(rng.integers(3, 8))
        notes = tuple(f"{thing} number {place} is done." for place in range(1, last + 1))
        facts.append(Fact(notes, f"{thing} number", (f" {last + 1}",)))
    return facts


KINDS: Final[Mapping[str, Callable[[np.random.Generator], list[Fact]]]] = MappingProxyType(
    {draw.__name__: draw for draw in (single, alike, keys, values, chain, copy, count)}
)
"""Kinds of facts by name. To add one, write a function and list it here."""


def make_document(kind: str, filler: Filler, length: int, seed: Sequence[int]) -> Document:
    """Build a document of `length - ROOM` tokens with the facts of one kind at random depths, and its questions."""
    if kind not in KINDS:
        raise ValueError(f"{kind=} must be one of {', '.join(KINDS)}")
    if length % ROOM:
        raise ValueError(f"{length=} must be a multiple of {ROOM}")
    rng = np.random.default_rng([*seed, *kind.encode()])
    facts = KINDS[kind](rng)
    head = [] if filler.tokenizer.bos_id is None else filler.tokenizer.encode("")
    lines = [(fact, [filler.encode(note + "\n") for note in fact.notes]) for fact in facts]
    size = length - ROOM - len(head) - sum(len(line) for _, own in lines for line in own)
    if size < 0:
        raise ValueError(f"{length=} must be larger: the facts of {kind} alone do not fit")
    body, breaks = filler.excerpt(rng, size)
    places, depth = [], {}
    for index, (_, own) in enumerate(lines):
        depths = np.sort(rng.random(len(own)))
        depth[index] = float(depths[0]) if len(own) else depth[index - 1]
        places += list(zip(depths.tolist(), own))
    places.sort(key=lambda place: place[0])
    cuts = [int(breaks[np.argmin(np.abs(breaks - at * size))]) if len(breaks) else 0 for at, _ in places]
    parts, last = [head], 0
    for cut, (_, line) in zip(cuts, places):
        parts += [body[last:cut], line]
        last = cut
    prefix = np.concatenate([np.asarray(part, np.int32) for part in [*parts, body[last:]]])
    questions = tuple(pose(filler, fact, depth[index]) for index, (fact, _) in enumerate(lines))
    return Document(kind, length, prefix, questions)


def pose(filler: Filler, fact: Fact, depth: float) -> Question:
    """Tokenize a fact's question and answer. Each piece is tokenized with the text before it, then split off."""
    text = "\n\n" + fact.question
    suffix = filler.encode(text)
    answer, given, before = [], [], suffix
    for index, piece in enumerate(fact.answer):
        text += piece
        whole = filler.encode(text)
        if whole[: len(before)] != before:
            raise ValueError(f"the tokenizer merges {piece!r} with the text before it, so it cannot be split off")
        answer += whole[len(before) :]
        given += [index % 2 == 1] * (len(whole) - len(before))
        before = whole
    if len(before) > ROOM:
        raise ValueError(f"{fact.question!r} has {len(before)} tokens with its answer, more than {ROOM}")
    return Question(tuple(suffix), tuple(answer), tuple(given) if any(given) else (), depth)
