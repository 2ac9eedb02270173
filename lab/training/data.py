"""Training text: library sources, hidden notes and questions about them. A batch is a pure function of (seed, step).

Every example is `length + 1` token ids with a weight per predicted token. Kinds of example:

    copy   random bytes with a short period, on which the model learns to find an earlier match
    recall random bytes in which earlier spans recur at any distance
    pairs  lines of keys and values, so similar that only the whole key identifies a value
    text   unmodified library source
    notes  library source with notes hidden in it (pass keys, constants, tables, variable chains) and questions about
           them further on and at the end, in plain text or as a chat

The text is the standard library of the running Python (`measure.judge.library`).
"""

from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from lab.training.facts import WORDINGS, Fact, column, draw_facts, draw_keys, natural, number
from tessera.measure.judge.library import library_corpus
from tessera.train.data import VALUE_WEIGHT, Data, Split, excerpt, text
from tessera.train.recipes import ASSISTANT, BOS, END, PAD, USER, VOCAB_SIZE

WORDING_WEIGHT = 1.0
QUESTION_WEIGHT = 0.1


def copy(rng: np.random.Generator, source: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Repeat random bytes with one period; the first period is noise and has no weight."""
    period = int(rng.integers(3, max(13, min(size // 2, 256))))
    ids = np.resize(rng.integers(0, 256, period), size).astype(np.int32)
    return ids, (np.arange(size) >= period + 1).astype(np.float32)


def recall(rng: np.random.Generator, source: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw spans of random bytes, about half of them copied from an earlier place in the example.

    New spans and the first three bytes of each copy have no weight, because they cannot be predicted.
    """
    ids, weights = np.zeros(size, np.int32), np.zeros(size, np.float32)
    ids[:16], end = rng.integers(0, 256, 16), 16
    while end < size:
        span = min(int(rng.integers(6, 40)), size - end)
        if rng.random() < 0.6 and end > span:
            start = int(rng.integers(0, end - span))
            ids[end : end + span] = ids[start : start + span]
            weights[end + 3 : end + span] = 1.0
        else:
            ids[end : end + span] = rng.integers(0, 256, span)
        end += span
    return ids, weights


def pairs(rng: np.random.Generator, source: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Write lines of keys and values in one wording, each pair several times; only the whole key identifies the value.

    The loss counts a value from its second occurrence on. The value's first character has the most weight: a model that
    matches only the last few characters of the key cannot predict it.
    """
    count = int(rng.integers(2, max(4, min(size // 24, 24))))
    keys = list(dict.fromkeys(draw_keys(rng, count)))
    values = column(rng, len(keys)) if rng.random() < 0.5 else [number(rng) for _ in keys]
    wording = str(rng.choice(WORDINGS))
    width = max(map(len, keys)) if rng.random() < 0.3 else 0
    parts, seen, filled, index = [], set(), 0, 0
    while filled < size:
        index = (index + int(rng.integers(1, max(2, len(keys))))) % len(keys)  # never the same key twice in a row
        before, after = wording.format(key=f"{keys[index]:{width}}" if width else keys[index]).split("@")
        value, weights = encode(values[index], WORDING_WEIGHT if index in seen else 0.0)
        weights[0] *= VALUE_WEIGHT
        parts += [encode(before, 0.0), (value, weights), encode(after + "\n", 0.0)]
        filled += sum(len(part[0]) for part in parts[-3:])
        seen.add(index)
    ids, weights = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    return ids[:size], weights[:size]


def encode(piece: str, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Encode text as bytes and weights; bytes between \\x01 and \\x02 get VALUE_WEIGHT."""
    raw = np.frombuffer(piece.encode("latin-1", "replace"), np.uint8).astype(np.int32)
    inside = np.cumsum(raw == 1) > np.cumsum(raw == 2)
    keep = (raw != 1) & (raw != 2)
    return raw[keep], np.where(inside, VALUE_WEIGHT, weight).astype(np.float32)[keep]


def dialogue(fact: Fact, chat: bool) -> tuple[np.ndarray, np.ndarray]:
    """Encode one question and its answer, as a chat turn or in plain text."""
    question, asked = encode(fact.question, QUESTION_WEIGHT)
    answer, weights = encode(fact.answer, WORDING_WEIGHT)
    if chat:
        ids = [[USER], question, [END, ASSISTANT], answer, [END]]
        all_weights = [[0.0], asked, [0.1, 0.1], weights, [WORDING_WEIGHT]]
    else:
        ids = [question, [32], answer, [10]]
        all_weights = [asked, [0.1], weights, [WORDING_WEIGHT]]
    return np.concatenate(ids).astype(np.int32), np.concatenate(all_weights).astype(np.float32)


def notes(rng: np.random.Generator, source: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Build a document with hidden notes, then questions about them and about the library's constants."""
    chat = bool(rng.random() < 0.5)
    head = [BOS, USER] if chat else [BOS]
    hidden, turns, room = [], [], size - len(head) - 2
    for group in draw_facts(rng, size):
        middle = dialogue(group[0], False) if rng.random() < 0.3 else None
        asked = [dialogue(fact, chat) for fact in group]
        cost = sum(len(line) + 1 for line in group[0].notes) + sum(len(turn[0]) for turn in asked)
        cost += 0 if middle is None else len(middle[0])
        if cost > (room - size * 0.3 if turns else room - 8):
            continue
        room -= cost
        hidden.append((group[0].notes, middle))
        turns += asked
    body = excerpt(rng, source.train, size)
    reserve = min(200, room // 3) if room > 300 else 0
    own = natural(bytes(body[: room - reserve].astype(np.uint8)))
    for index in rng.permutation(len(own)):
        turn = dialogue(own[index], chat)
        if len(turn[0]) <= reserve:
            turns, reserve, room = [*turns, turn], reserve - len(turn[0]), room - len(turn[0])
    document = hide(rng, body[: max(room, 0)], hidden, float(rng.choice([0.1, 0.3])))
    turns = [turns[index] for index in rng.permutation(len(turns))]
    if chat and turns:  # the first question shares the document's user turn
        turns[0] = (turns[0][0][1:], turns[0][1][1:])
    parts = [(np.array(head, np.int32), np.zeros(len(head), np.float32)), document, encode("\n\n", 0.1), *turns]
    ids, weights = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return fit(ids, weights, size)


def fit(ids: np.ndarray, weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut an example at the front, or pad it at the end, to exactly `size` tokens."""
    if len(ids) >= size:
        return ids[-size:], weights[-size:]
    missing = size - len(ids)
    return np.pad(ids, (0, missing), constant_values=PAD), np.pad(weights, (0, missing))


def hide(rng, body, hidden, filler_weight) -> tuple[np.ndarray, np.ndarray]:
    """Insert the notes in `hidden` into `body` after random line breaks, each question after its notes."""
    inserts = []
    for lines, turn in hidden:
        depths = np.sort(rng.random(len(lines) + (turn is not None)))
        pieces = [encode(line + "\n", 0.0) for line in lines] + ([turn] if turn is not None else [])
        inserts += [(int(depth * len(body)), piece) for depth, piece in zip(depths, pieces)]
    breaks = np.flatnonzero(body == 10) + 1
    parts, done = [], 0
    for place, piece in sorted(inserts, key=lambda item: item[0]):
        index = np.searchsorted(breaks, place)
        cut = int(breaks[index]) if index < len(breaks) else (int(breaks[-1]) if len(breaks) else place)
        cut = max(cut, done)
        parts += [(body[done:cut], np.full(cut - done, filler_weight, np.float32)), piece]
        done = cut
    parts.append((body[done:], np.full(len(body) - done, filler_weight, np.float32)))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


class Library(Data):
    """Examples made of bytes: the standard library's text, and questions about facts hidden in it."""

    name = "library"
    kinds = MappingProxyType({"copy": copy, "recall": recall, "pairs": pairs, "text": text, "notes": notes})
    vocab_size = VOCAB_SIZE

    def read(self, path, tokenizer):
        """Read the standard library, or the user's own text."""
        return library_corpus() if path is None else super().read(path, tokenizer)


LIBRARY: Final = Library()
"""Examples on fresh weights."""


class Task(NamedTuple):
    """A prompt, the answer tokens that greedy decoding must produce, and the pass key's depth in the text, 0 to 1."""

    prompt: np.ndarray
    answer: np.ndarray
    depth: float


def passkey_task(
    rng: np.random.Generator,
    length: int,
    *,
    source: Split | None = None,
    depth: float | None = None,
    chat: bool = False,
) -> Task:
    """Hide a five-digit pass key in held-out text; prompt and answer together are `length` tokens.

    Args:
        rng: draws the key, the depth and the text.
        length: tokens of prompt and answer.
        source: text to hide the key in (its held-out part); None is the standard library.
        depth: 0 (start) to 1 (end) of the text; None draws it uniformly.
        chat: whether to ask in a chat turn; if not, the question follows the text.

    Returns:
        the prompt, the answer, and the depth of the note, which follows the line break nearest to the wanted depth.

    Raises:
        ValueError: `length` is too short for the note and the question.
    """
    source = library_corpus() if source is None else source
    depth = float(rng.random()) if depth is None else depth
    key = number(rng, 5)
    note = encode(f"The pass key is {key}. Remember it.\n", 0.0)
    question = "\n\nWhat is the pass key?"
    tail = [*question.encode(), END, ASSISTANT] if chat else [*question.encode(), 32]
    tail = np.array([*tail, *b"The pass key is "], np.int32)
    head = np.array([BOS, USER] if chat else [BOS], np.int32)
    room = length - len(head) - len(note[0]) - len(tail) - len(key)
    if room < 1:
        raise ValueError(f"{length=} must be at least {length - room + 1} tokens to hold the note and the question")
    body = excerpt(rng, source.held_out, room)
    breaks = np.concatenate([[0], np.flatnonzero(body == 10) + 1])
    cut = int(breaks[np.argmin(np.abs(breaks - depth * room))])
    prompt = np.concatenate([head, body[:cut], note[0], body[cut:], tail])
    return Task(prompt, np.frombuffer(key.encode(), np.uint8).astype(np.int32), cut / room)
