"""Ask a model, under each policy, for a chat turn and for facts that a document states.

Every prompt is the document and then a question, in the model's own chat template, if it has one. A `Reader` prefills
the document once and reuses its keys for each question, as `tessera chat` does. All prefill calls have the same size,
because each size needs a program per policy, and 30 unrolled layers take most of a minute to compile on a busy machine.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.core.files import DEMO_MODEL
from tessera.generate import Model
from tessera.measure.judge.contenders import without_choice
from tessera.runtime.answers import Generation
from tessera.runtime.compilation import chunk_sizes
from tessera.runtime.requests import Request
from tessera.sparse.plan import Plan

HERE = Path(__file__).parent
CHUNK = 256
"""Rows per prefill call. A question takes one call; a call with 1,024 rows would cost four times as much."""
SIDES = ("dense", "kascade", "control")
WORDS = MappingProxyType({"dense": "dense", "kascade": "Kascade", "control": "control"})


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about the document.

    `start` is the beginning of the sentence that states the answer in the document. The prompt ends with `start`, so
    that the model completes the sentence.
    """

    text: str
    start: str

    def expected(self, document: str) -> str:
        """Return the rest of the document's sentence that begins with `start`.

        Raises:
            ValueError: the document has no such sentence.
        """
        found = re.search(rf"{re.escape(self.start)} ([^.\n]+)\.", document)
        if found is None:
            raise ValueError(f"no sentence of the document begins with {self.start!r}: change the question's start")
        return found[1]


def _ask(words: str, verb: str = "is", asked: str = "What") -> Question:
    return Question(text=f"{asked} {verb} {words}?", start=f"{words[0].upper()}{words[1:]} {verb}")


QUESTIONS = (
    _ask("the door code of the Oslo office"),
    _ask("the phone extension of Maria"),
    _ask("the name of the ship's cat"),
    Question(text="From which platform does the train to Geneva leave?", start="The train to Geneva leaves from"),
    _ask("the colour of the spare key"),
    _ask("the special number of Lisbon"),
    Question(text="Where does the meeting on Friday start?", start="The meeting on Friday starts at"),
    _ask("the budget of the garden project"),
    _ask("the special number of Nairobi"),
    _ask("the birthday of Anna"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to ask which model; the defaults fit the six minutes that `make demo` has on two cores.

    Without a plan, the model's own is used. The chat turn `turn` follows the document in the prompt; None asks none.
    """

    model: str | Path = "smollm2"
    plan: Plan | None = None
    document: Path = HERE / "library.txt"
    turn: str | None = "In one or two sentences: what is a shelf, according to the text?"
    turn_tokens: int = 40
    questions: tuple[Question, ...] = QUESTIONS
    answer_tokens: int = 10


OFFLINE = Settings(
    model=DEMO_MODEL, document=HERE / "document.txt", turn=None, questions=(_ask("the pass key"),), answer_tokens=8
)
"""The shipped model, which has not learned to chat and which was trained on this question."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One policy's answers: only the chat turn's time to first token includes the document's prefill."""

    turn: Generation | None  # None for the control
    answers: tuple[Generation, ...]  # one per question


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of one run: the answers of dense, Kascade and the control, and the document's answer to each question.

    `compile_s` is the time in seconds to compile the programs of all sides together, or to load them from the cache.
    """

    settings: Settings
    document: str
    expected: tuple[str, ...]
    crossover_tokens: int
    compile_s: float
    sides: Mapping[str, Side]

    def right(self, name: str) -> tuple[bool, ...]:
        """Return, for each question, whether the side `name` (a name in SIDES) gives the document's answer."""
        return tuple(said(a) == wanted for a, wanted in zip(self.sides[name].answers, self.expected))

    def kept(self, name: str) -> int:
        """Count the questions that both dense and the side `name` answer correctly."""
        return sum(dense and ours for dense, ours in zip(self.right("dense"), self.right(name)))

    @property
    def lost(self) -> list[int]:
        """Indices of the questions that dense answers correctly and Kascade does not."""
        pairs = zip(self.right("dense"), self.right("kascade"))
        return [index for index, (dense, kascade) in enumerate(pairs) if dense and not kascade]


def said(answer: Generation) -> str:
    """Return an answer's words on one line."""
    return " ".join(answer.text.split())


def policies(dense: Model, plan: Plan | None = None) -> dict[str, Model]:
    """Return the model under three policies: dense, Kascade whose prompts have no cross-over, and the control.

    The control is Kascade that chooses nothing. A head of the control reads all keys if its budget is 1. Otherwise it
    reads only the tiles that the plan always lists: the tiles of the queries themselves, local tiles and sinks.
    """
    kascade = dense.with_attention("kascade", plan, crossover_tokens=0)
    control = dense.with_attention("kascade", without_choice(kascade.plan), crossover_tokens=0)
    return {"dense": dense, "kascade": kascade, "control": control}


class Reader:
    """One policy's engine, whose cache keeps the document after the first prompt."""

    def __init__(self, model: Model, *, num_keys: int):
        self.chunk = chunk_sizes(model.policy.query_tile, CHUNK)[0]
        self.engine = model.engine(slots=1, num_keys=num_keys, sizes=(self.chunk,))
        self.prefix: Generation | None = None

    def hold(self, tokens: Sequence[int]) -> None:
        """Prefill a prefix that all later prompts share; leave out its last chunk if that is incomplete."""
        whole = tokens[: len(tokens) - len(tokens) % self.chunk]
        self.prefix = self._run(Request(prompt=whole, max_new_tokens=1)) if whole else None

    def answer(
        self, tokens: Sequence[int], max_new_tokens: int, stop: Sequence[str] = (), *, started_s: float | None = None
    ) -> Generation:
        """Answer a prompt that begins with the tokens given to `hold`; count the keys that their prefill read, too."""
        request = Request(prompt=tokens, max_new_tokens=max_new_tokens, stop=tuple(stop))
        answer = self._run(request, started_s)
        return answer if self.prefix is None else _with_prefix(answer, self.prefix)

    def _run(self, request: Request, started_s: float | None = None) -> Generation:
        self.engine.submit(request, started_s=started_s)
        [end] = self.engine.drain()
        return end.generation


def _with_prefix(answer: Generation, prefix: Generation) -> Generation:
    """Add the keys that a prefix read to those of an answer that reused its keys. Every layer sees as many keys."""
    own, shared = ((one.prefill_keys + one.decode_keys) / one.density for one in (answer, prefix))
    part = own / (own + shared)
    layers = zip(answer.layer_density, prefix.layer_density)
    return replace(
        answer,
        prefill_keys=answer.prefill_keys + prefix.prefill_keys,
        density=part * answer.density + (1 - part) * prefix.density,
        layer_density=tuple(part * ours + (1 - part) * theirs for ours, theirs in layers),
    )


def prompts(model: Model, settings: Settings, document: str) -> tuple[list[int] | None, list[list[int]]]:
    """Encode the chat turn, if any, and each question with the start of its answer; all begin with the document."""

    def render(said: str, start: str = "") -> list[int]:
        text = f"{document.rstrip()}\n\n{said}"
        if settings.turn is None:
            return model.tokenizer.encode(f"{text} {start}")
        text = model.tokenizer.render_chat([{"role": "user", "content": text}]) + start
        return model.tokenizer.encode(text, add_special=False)

    turn = None if settings.turn is None else render(settings.turn)
    return turn, [render(q.text, q.start) for q in settings.questions]


def shared(lists: Sequence[Sequence[int]]) -> int:
    """Return the length of the prefix that all lists share."""
    columns = zip(*lists)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, lists)))


def read(models: Mapping[str, Model], settings: Settings, progress: Callable[[str], Any]) -> Findings:
    """Put the chat turn and every question to each model, one model after another."""
    document = settings.document.read_text(encoding="utf-8")
    expected = tuple(question.expected(document) for question in settings.questions)
    turn, questions = prompts(models["dense"], settings, document)
    common = shared([*([turn] if turn else []), *questions, questions[0][:-1]])  # a prompt's last token is not shared
    longest = max(len(turn or ()) + settings.turn_tokens, max(map(len, questions)) + settings.answer_tokens)
    progress(f"compiling {2 * len(models)} programs of {models['dense'].config.num_layers} layers, once per machine")
    started_s = time.perf_counter()
    readers = {name: Reader(model, num_keys=max(longest, CHUNK)) for name, model in models.items()}
    with ThreadPoolExecutor() as pool:  # XLA compiles one program on little more than one core
        list(pool.map(lambda reader: reader.engine.warm(), readers.values()))
    compile_s = time.perf_counter() - started_s
    sides = {}
    for name, reader in readers.items():
        progress(f"{WORDS[name]}: reading the document, {common:,} tokens")
        started_s = time.perf_counter()
        reader.hold(questions[0][:common])
        reply = None
        if turn and name != "control":
            progress(f"{WORDS[name]}: the chat turn")
            reply = reader.answer(turn, settings.turn_tokens, started_s=started_s)
        progress(f"{WORDS[name]}: {len(questions)} questions")
        answers = [reader.answer(tokens, settings.answer_tokens, (".", "\n")) for tokens in questions]
        sides[name] = Side(turn=reply, answers=tuple(answers))
    return Findings(
        settings=settings,
        document=document,
        expected=expected,
        crossover_tokens=models["kascade"].plan.crossover_tokens,
        compile_s=compile_s,
        sides=sides,
    )
