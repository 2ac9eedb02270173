"""Notes, tables, records and the page of a run of the demo (`reading.py`)."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jinja2
from rich.markup import escape
from rich.table import Column, Table

from lab.demo import pictures
from lab.demo.reading import HERE, SIDES, WORDS, Findings, said
from tessera.core.units import quantity
from tessera.generate import Model
from tessera.measure import evidence, timing
from tessera.measure.evidence import Comparison, How, Record, What
from tessera.runtime.answers import Generation

COMMAND = "python -m lab demo"
MODELS = {True: "real", False: "shipped"}
CONTROL = (
    "The control is the same plan without its choice of keys: it reads only what the plan always reads (the newest "
    "keys and the first ones). An answer that the control also finds says nothing about what Kascade chooses."
)
ABOUT = (
    "One model reads a document and answers questions about it, three times. Dense reads every key (what the model "
    "keeps of each earlier token). Kascade reads the keys that it chooses. The control reads only what Kascade always "
    "reads."
)
NEXT = (
    ("tessera chat --model smollm2 --attention kascade", "talk to the model"),
    ("tessera serve smollm2", "answer OpenAI clients on port 8000, under the plan"),
    ('tessera generate --model smollm2 --attention kascade --chat "..."', "one answer"),
    ("tessera calibrate --model smollm2 --text TEXT --out plan.json", "make a plan from text that you choose"),
    ("tessera doctor", "what this machine has: devices, kernels, caches"),
)


def notes(found: Findings) -> list[str]:
    """Return a list of notes: the verdict with the answers that Kascade lost, then facts for reading the figures."""
    right = {name: found.right(name) for name in SIDES}
    count, total, lost = sum(right["dense"]), len(found.expected), found.lost
    read = quantity(_density(found.sides["kascade"].answers), "fraction")
    if lost:
        named = "; ".join(found.settings.questions[index].text for index in lost)
        lines = [f"Kascade LOSES {len(lost)} of the {count} answers that dense finds: {named}"]
    elif count:
        lines = [f"Kascade keeps all {count} answers that dense finds and reads {read} of the keys."]
    else:
        lines = ["Dense finds none of the answers: these questions say nothing about Kascade."]
    if count < total:
        lines.append(f"Dense itself misses {total - count} of {total}: the model is small.")
    kept = found.kept("control")
    if count:
        lines.append(f"The control keeps {kept} of the {count}. {CONTROL}")
    if count and kept >= found.kept("kascade"):
        lines.append("The control keeps as many as Kascade: here the questions do NOT show that selection matters.")
    dense, kascade = (found.sides[name] for name in ("dense", "kascade"))
    if dense.turn and dense.turn.tokens != kascade.turn.tokens:
        lines.append("The two answers to the chat turn differ: dense and Kascade chose different tokens at some point.")
    if found.crossover_tokens > dense.answers[0].prompt_tokens:
        lines.append(
            f"The plan's measured cross-over is {found.crossover_tokens:,} tokens: below it Tessera runs dense. "
            "Here Kascade was made to read prompts of every length, so that there is something to see."
        )
    if kascade.turn and kascade.turn.decode_density == 1.0:
        lines.append(
            "Kascade's answers were decoded dense: on the device that measured the plan, a decode step of this length "
            "is slower under the plan."
        )
    lines.append(
        f"Compiling took {quantity(found.compile_s, 's')}, once per machine; no figure here includes it. Dense, "
        "Kascade and the control ran once each, in turn, so other work on this machine makes their times longer."
    )
    return lines


def _density(answers: Sequence[Generation]) -> float:
    return statistics.median(answer.density for answer in answers)


def rows(found: Findings) -> list[list[str]]:
    """Return table rows with the columns label, dense, Kascade and control, which has no chat turn."""
    sides = [found.sides[name] for name in SIDES]
    turns = [side.turn for side in sides]

    def of_turns(words: str, unit: str, values: Sequence[float | None]) -> list[str]:
        return [words, *("" if value is None else quantity(value, unit) for value in values)]

    total = len(found.expected)
    shown = [
        ["right answers", *(f"{sum(found.right(name))} of {total}" for name in SIDES)],
        of_turns("keys read, prompt and answer", "fraction", [_density(side.answers) for side in sides]),
        of_turns(
            "time to first token, the document's keys cached",
            "s",
            [statistics.median(a.ttft_s for a in side.answers) for side in sides],
        ),
    ]
    if turns[0]:
        words = f"time to first token, chat turn, {turns[0].prompt_tokens:,} tokens"
        shown.append(of_turns(words, "s", [turn and turn.ttft_s for turn in turns]))
        speeds = [turn and turn.decode_tokens_per_s for turn in turns]
        shown.append(of_turns("decode speed, chat turn", "tokens/s", speeds))
    return shown


def turn_table(found: Findings) -> Table:
    """Tabulate both answers to the chat turn."""
    table = Table("", escape(found.settings.turn), title="Chat turn", title_justify="left")
    for name in ("dense", "kascade"):
        table.add_row(WORDS[name], escape(said(found.sides[name].turn)))
    return table


def answer_table(found: Findings) -> Table:
    """Tabulate each question with the document's answer and the three sides' answers; wrong ones are marked."""
    heads = [Column(WORDS[name], overflow="fold") for name in SIDES]
    table = Table("question", "document", *heads, title="Questions about the document", title_justify="left")
    right = {name: found.right(name) for name in SIDES}
    for index, question in enumerate(found.settings.questions):
        cells = []
        for name in SIDES:
            words = escape(said(found.sides[name].answers[index]))
            cells.append(words if right[name][index] else f"[red]{words} (wrong)[/red]")
        table.add_row(question.text, found.expected[index], *cells)
    return table


def figure_table(found: Findings) -> Table:
    """Tabulate right answers, keys read and times."""
    table = Table("", *(WORDS[name] for name in SIDES), title="Figures", title_justify="left")
    for row in rows(found):
        table.add_row(*row)
    return table


def records(found: Findings, model: Model) -> list[Record]:
    """Build the run's records: each side's right answers, and the time to first token of the chat turn."""
    plan, real = model.plan, found.settings.turn is not None
    config = {"model": plan.model, "anchors": list(plan.anchors), "own": list(plan.own), "tile": plan.tile}
    made = []
    for name in SIDES:
        side, right = found.sides[name], found.right(name)
        facts: dict[str, Any] = {
            "questions": [q.text for q in found.settings.questions],
            "starts": [q.start for q in found.settings.questions],
            "expected": list(found.expected),
            "answers": [said(a) for a in side.answers],
            "right": list(right),
            "density": [a.density for a in side.answers],
            "ttft_cached_s": [a.ttft_s for a in side.answers],
            "prompt_tokens": [a.prompt_tokens for a in side.answers],
        }
        what = What(op="demo", kernel=name, workload="demo_real_questions" if real else "demo_answers", config=config,
                    title=f"questions about the document, {MODELS[real]} model")  # fmt: skip
        layers = tuple(statistics.fmean(each) for each in zip(*(a.layer_density for a in side.answers)))
        made.append(_record(what, [sum(right) / len(right)], unit="fraction", density=layers, facts=facts))
    sides = {name: found.sides[name] for name in ("dense", "kascade") if found.sides[name].turn}
    for name, side in sides.items():
        turn, versus = side.turn, None
        if name == "kascade":
            ratio = timing.ratio([sides["dense"].turn.ttft_s], [turn.ttft_s])
            versus = Comparison(against="dense", ratio=ratio)
        facts = {"question": found.settings.turn, "answer": said(turn), "prompt_tokens": turn.prompt_tokens,
                 "decode_tokens_per_s": turn.decode_tokens_per_s, "keys_read": turn.density}  # fmt: skip
        what = What(op="demo", kernel=name, workload="demo_real_turn", config=config,
                    title="chat turn about the document, real model, cold")  # fmt: skip
        one = _record(what, [turn.ttft_s], density=turn.layer_density, facts=facts, comparison=versus)
        made.append(replace(one, how=How(warmup=1, iterations=1, compile_s=found.compile_s)))
    return made


def _record(what: What, samples: Sequence[float], **fields: Any) -> Record:
    return evidence.make(what, samples, how=How(iterations=len(samples)), command=COMMAND, **fields)


def page(found: Findings, model: Model, missing: str) -> str:
    """Render the run as one self-contained HTML page; `missing` says why the real model did not run."""
    right = {name: found.right(name) for name in SIDES}
    body = {
        "lead": lead(),
        "missing": missing,
        "origin": (HERE / "NOTICE").read_text(encoding="utf-8"),
        "about": ABOUT,
        "notes": notes(found),
        "lost": bool(found.lost),
        "turn": found.settings.turn,
        "replies": [(WORDS[name], side.turn.text.strip()) for name, side in found.sides.items() if side.turn],
        "sides": [WORDS[name] for name in SIDES],
        "questions": [
            {
                "text": question.text,
                "start": question.start,
                "expected": found.expected[index],
                "answers": [
                    {
                        "text": said(found.sides[name].answers[index]),
                        "right": right[name][index],
                        "read": quantity(found.sides[name].answers[index].density, "fraction"),
                        "seconds": quantity(found.sides[name].answers[index].ttft_s, "s"),
                    }
                    for name in SIDES
                ],
            }
            for index, question in enumerate(found.settings.questions)
        ],
        "figures": rows(found),
        "picture": {
            "svg": pictures.densities(found.sides["kascade"].answers[0].layer_density, model.policy.roles()),
            "caption": "The keys in the tile lists that the kernels were given, for the first question's prompt and "
            "answer.",
        },
        "next": NEXT,
        "document": found.document,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(body)


def lead() -> str:
    """Describe the machine, the date and the commit that the page comes from."""
    code, where = evidence.code(), evidence.here()
    return (
        f"{where.cpu}, {where.cores} cores, jax {where.versions['jax']}; {evidence.now()[:10]}; "
        f"commit {(code.commit or 'unknown')[:9]}; repeat with: {COMMAND}"
    )
