"""Made-up facts to hide in text and ask about: pass keys, constants, variable chains, tables.

A fact's answer has its value between \\x01 and \\x02; training gives that part the most weight.
"""

import re
from typing import NamedTuple

import numpy as np


class Fact(NamedTuple):
    """Lines to hide, in order of appearance, and a question with its answer (value between \\x01 and \\x02)."""

    notes: tuple[str, ...]
    question: str
    answer: str


NOUNS = (
    "pass key|secret number|magic number|access code|password|lucky number|door code|vault code|serial number|"
    "ticket number|order number|key|code|token|account number"
).split("|")
NAMES = (
    "Ada|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jonas|Kira|Liam|Mona|Noah|Olga|Paul|Rosa|Sven|Tara|Yusuf".split(
        "|"
    )
)
WORDINGS = ("{key} = @", "{key}: @", "{key} = @", "The {key} is @.", "What is {key}? {key} = @", "{key} @,")
WORDS = (
    "MAX|MIN|DEFAULT|BUFFER|SIZE|TIMEOUT|RETRY|COUNT|LIMIT|PORT|FLAG|MODE|ERROR|STATUS|NOT|FOUND|BAD|REQUEST|READ|WRITE|"
    "OPEN|CLOSE|SOCKET|FILE|PATH|NAME|TYPE|CODE|STATE|ACCEPTED|GONE|LOCKED|MOVED|PARTIAL|CONTENT|SERVER|CLIENT|PROXY|"
    "GATEWAY|TOKEN|STRING|NUMBER|COMMENT|INDENT|BLOCK|CHAR|LINK|USER|GROUP|EXEC|SIGNAL|ALARM|CHILD|EVENT|QUEUE|LEVEL|"
    "DEBUG|INFO|WARN|CRITICAL|HEADER|VERSION|MAGIC|OFFSET|MASK|SHIFT|INDEX|TABLE|KEY|VALUE|ITEM|NODE|TREE|ROOT|LEAF|"
    "LEFT|RIGHT|START|STOP|END|BEGIN|FIRST|LAST|NEXT|ALLOWED|METHOD|CONFLICT|LENGTH|REQUIRED|RANGE|UPGRADE|MULTI"
).split("|")


def number(rng: np.random.Generator, digits: int | None = None) -> str:
    """Draw a random number of `digits` digits without a leading zero; None draws one to seven digits."""
    digits = digits or int(rng.choice([1, 2, 3, 4, 5, 6, 7], p=[0.05, 0.1, 0.2, 0.15, 0.3, 0.1, 0.1]))
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def constant_name(rng: np.random.Generator) -> str:
    """Draw an upper-case name of one to four words, sometimes random letters."""
    if rng.random() < 0.25:
        return "".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), int(rng.integers(3, 9))))
    return "_".join(rng.choice(WORDS, int(rng.integers(1, 5))))


def constant_value(rng: np.random.Generator) -> str:
    """Draw an integer, a hexadecimal, an octal, a float or a short string."""
    kind = rng.random()
    if kind < 0.65:
        return number(rng)
    if kind < 0.78:
        return hex(int(rng.integers(0, 1 << int(rng.choice([8, 16, 24])))))
    if kind < 0.83:
        return f"0o{int(rng.integers(0, 1 << 15)):o}"
    if kind < 0.87:
        return f"{rng.integers(0, 100)}.{rng.integers(0, 1000)}"
    word = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), int(rng.integers(2, 8))))
    return f"{word!r}" if kind < 0.95 else f'"{word}"'


def pass_key(rng: np.random.Generator) -> Fact:
    """Draw a note such as "The pass key is 48213. Remember it."; the noun and the ending vary."""
    noun = "pass key" if rng.random() < 0.4 else str(rng.choice(NOUNS))
    if rng.random() < 0.35:
        noun = f"{noun} of {rng.choice(NAMES)}" if rng.random() < 0.5 else f"{rng.choice(NAMES).lower()} {noun}"
    value = number(rng, 5 if rng.random() < 0.6 else None)
    ending = str(
        rng.choice(["Remember it.", "", "Do not forget it.", f"{value} is the {noun}."], p=[0.6, 0.2, 0.1, 0.1])
    )
    note = f"The {noun} is {value}. {ending}".strip()
    question = f"What is the {noun}?"
    return Fact(
        (rng.choice(["", "# ", "    # "], p=[0.5, 0.3, 0.2]) + note,), question, f"The {noun} is \x01{value}\x02."
    )


def constant(rng: np.random.Generator) -> Fact:
    """Draw a line of code that defines a constant, and a question that asks for its value by name."""
    name, value = constant_name(rng), constant_value(rng)
    return Fact((constant_line(rng, name, value),), f"What is {name}?", f"{name} = \x01{value}\x02")


def constant_line(rng: np.random.Generator, name: str, value: str) -> str:
    indent = " " * int(rng.choice([0, 4], p=[0.7, 0.3]))
    tail = rng.choice(
        ["", f", '{name.replace('_', ' ').title()}'", "  # " + str(rng.choice(WORDS)).lower(), ";"],
        p=[0.6, 0.2, 0.15, 0.05],
    )
    gap = " " * int(rng.choice([1, 3], p=[0.85, 0.15]))
    return f"{indent}{name}{gap}= {value}{tail}"


def chain(rng: np.random.Generator) -> Fact:
    """Draw a chain a = 58213 ... b = a ... c = b; the answer follows the chain back to the number."""
    hops = int(rng.integers(1, 4))
    letters = list("abcdefghijklmnopqrstuvwxyz")
    names = ["".join(rng.choice(letters, int(rng.integers(3, 6)))) for _ in range(hops + 1)]
    value = number(rng)
    notes = [f"{names[0]} = {value}"] + [f"{names[i + 1]} = {names[i]}" for i in range(hops)]
    walked = " = ".join(reversed(names[:-1]))
    return Fact(tuple(notes), f"What is {names[-1]}?", f"{names[-1]} = \x01{walked} = {value}\x02")


def table(rng: np.random.Generator) -> list[Fact]:
    """Draw a block of constants, one per line, and facts about some of them; the first fact's note is the block."""
    count = int(rng.integers(3, 16))
    names = [constant_name(rng) for _ in range(count)] if rng.random() < 0.5 else sibling_names(rng, count)
    names = list(dict.fromkeys(names))
    values = column(rng, len(names))
    indent = "    " if rng.random() < 0.4 else ""
    width = max(map(len, names)) if rng.random() < 0.5 else 0
    style, rows = rng.random(), []
    for name, value in zip(names, values):
        words = name.replace("_", " ").lower()
        tail = f", '{words.capitalize()}'" if style < 0.2 else f"  # {words}" if style < 0.5 else ""
        rows.append(f"{indent}{name:{width}} = {value}{tail}" if width else f"{indent}{name} = {value}{tail}")
    order = rng.permutation(len(names))[: int(rng.integers(1, 5))]
    asked = [Fact((), f"What is {names[i]}?", f"{names[i]} = \x01{values[i]}\x02") for i in order]
    return [asked[0]._replace(notes=("\n".join(rows),)), *asked[1:]]


def sibling_names(rng: np.random.Generator, count: int) -> list[str]:
    """Draw easily confused names with a common prefix: S_IRUSR, S_IRGRP, S_IWGRP."""
    letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    prefix = "".join(rng.choice(letters, int(rng.integers(1, 4)))) + "_"
    stem = "".join(rng.choice(letters, int(rng.integers(0, 3))))
    return [f"{prefix}{stem}{''.join(rng.choice(letters, int(rng.integers(2, 6))))}" for _ in range(count)]


def column(rng: np.random.Generator, count: int) -> list[str]:
    """Draw the values of one table: consecutive numbers, padded octal or hexadecimal, or values of any kind."""
    kind = rng.random()
    if kind < 0.3:
        start = int(rng.integers(0, 900)) if rng.random() < 0.6 else 0
        return [str(start + i) for i in range(count)]
    if kind < 0.5:
        digits = int(rng.integers(3, 7))
        return [f"0o{int(rng.integers(0, 8**digits)) & 0o70707070:0{digits}o}" for _ in range(count)]
    if kind < 0.65:
        return [f"0x{1 << int(rng.integers(0, 28)):08x}" for _ in range(count)]
    return [constant_value(rng) for _ in range(count)]


NATURAL = re.compile(rb"^ *([A-Z_][A-Z0-9_]{2,}) *= *(0[xo][0-9a-fA-F]+|\d+|'[^'\n]{1,20}') *(?:[,;#].*)?$", re.M)


def natural(body: bytes) -> list[Fact]:
    """Return a question for each constant that `body`, a piece of library text, defines exactly once."""
    found: dict[str, str] = {}
    for match in NATURAL.finditer(body):
        name, value = match[1].decode(), match[2].decode("latin-1")
        found[name] = "" if name in found else value
    return [Fact((), f"What is {name}?", f"{name} = \x01{value}\x02") for name, value in found.items() if value]


def draw_keys(rng: np.random.Generator, count: int) -> list[str]:
    """Draw keys of one kind: a few letters, sibling names, constant names, or nouns such as "Ada's pass key"."""
    kind = rng.random()
    if kind < 0.4:
        letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ" if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz")
        return ["".join(rng.choice(letters, int(rng.integers(1, 5)))) for _ in range(count)]
    if kind < 0.6:
        return sibling_names(rng, count)
    if kind < 0.8:
        return [constant_name(rng) for _ in range(count)]
    return [
        f"{rng.choice(NAMES)}'s {rng.choice(NOUNS)}" if rng.random() < 0.5 else str(rng.choice(NOUNS))
        for _ in range(count)
    ]


def draw_facts(rng: np.random.Generator, size: int) -> list[list[Fact]]:
    """Draw facts for a document of `size` tokens. The facts of a group share notes; no question is drawn twice."""
    groups, seen = [], set()
    for _ in range(int(rng.integers(1, 2 + min(size // 80, 40)))):
        kind = rng.random()
        if kind < 0.4:
            drawn = [pass_key(rng)]
        elif kind < 0.65:
            drawn = [constant(rng)]
        elif kind < 0.85 or size < 192:
            drawn = [chain(rng)]
        else:
            drawn = table(rng)
        questions = {fact.question for fact in drawn}
        if not questions & seen:
            seen |= questions
            groups.append(drawn)
    return groups
