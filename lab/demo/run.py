"""Run the demo: print tables, and write a JSON record and an HTML page to build/demo."""

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.demo import findings, page, pictures, reading, reading_report
from lab.demo.findings import Answered, LayerTimes, ReadMap
from lab.demo.stages import Stages
from lab.eval.quality import Accuracy
from tessera.core import hardware
from tessera.core.units import quantity
from tessera.generate import Model, load
from tessera.measure import evidence, timing
from tessera.measure.evidence import Comparison, How, Record, What
from tessera.models.files import fetch

HERE = Path(__file__).parent
COMMAND = "python -m lab demo"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Questions and sizes of the measurements; the defaults take a few minutes on two cores.

    Attributes:
        model: folder of the checkpoint, with plan.json next to the weights.
        document: text file that the questions are about.
        subjects: subjects of the questions (see `findings.ask`).
        first_token_lengths: prompt lengths for the time to first token.
        attention_lengths: lengths for the attention-only times; they may exceed the model's context.
        passkey_lengths: prompt lengths of the pass-key tasks.
        tasks: pass-key tasks per length.
        repeats: samples per timed point.
    """

    model: Path = HERE / "model"
    document: Path = HERE / "document.txt"
    subjects: tuple[str, ...] = ("the pass key",)
    first_token_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    attention_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    passkey_lengths: tuple[int, ...] = (2048, 4096)
    tasks: int = 10
    repeats: int = 3


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of one run of the demo."""

    settings: Settings
    document: str
    crossover_tokens: int
    kinds: tuple[str, ...]
    answers: list[Answered]
    accuracy: dict[str, dict[int, Accuracy]]
    first_token: dict[int, dict[str, list[float]]]
    attention: dict[int, LayerTimes]
    reads: ReadMap

    @property
    def same(self) -> bool:
        """Whether Kascade gave the same tokens as dense on every question."""
        return all(answer.same for answer in self.answers)


def run(out: str | os.PathLike = "build/demo", settings: Settings | reading.Settings | None = None) -> int:
    """Run the demo; write record.json, index.html and, for the embedded model, lengths.svg to `out`.

    Args:
        out: the folder for the results.
        settings: settings for the embedded model or for a real model; None uses the real model if it can be fetched,
            else the embedded model.

    Returns:
        the exit code. For the embedded model: 0 if Kascade gave the same tokens as dense on every question, else 1. For
        a real model: 0 if Kascade kept more of dense's right answers than the control did, else 1.

    Raises:
        ValueError: `out` cannot be written to; raised before anything is fetched or measured.
    """
    out, console, missing = Path(out), Console(), ""
    make_folder(out)
    if settings is None:
        settings, missing = choose_model(console)
    if isinstance(settings, reading.Settings):
        return run_real(out, settings, console)
    models = load_models(settings.model)
    found = measure_all(models, settings, console)
    write_records(out, records(found, models))
    times_svg = draw_times(found)
    (out / "lengths.svg").write_text(times_svg, encoding="utf-8")
    (out / "index.html").write_text(render(found, models, times_svg, missing), encoding="utf-8")
    for note in [*notes(found), *([missing] if missing else [])]:
        console.print(note, markup=False)
    finish(out, console)
    return 0 if found.same else 1


def choose_model(console: Console) -> tuple[Settings | reading.Settings, str]:
    """Return (settings of the real model, ""); if it cannot be fetched, (settings of the embedded model, reason)."""
    try:
        console.print(f"[bold]Tessera demo[/bold]: {fetch.SOURCES['smollm2'].words}", highlight=False)
        return reading.Settings(model=fetch.fetch("smollm2")), ""
    except (OSError, ValueError) as error:
        missing = (
            f"This is the small embedded model, because the real model could not be fetched: {error}. To see the real "
            "model, connect to a network, run `tessera fetch smollm2`, and run the demo again."
        )
        console.print(missing, style="yellow", markup=False)
        return Settings(), missing


def run_real(out: Path, settings: reading.Settings, console: Console) -> int:
    """Run the demo of a real model; see `run`."""
    console.print(reading_report.ABOUT)
    stages = Stages(console)
    stages("loading the model")
    models = reading.policies(load(settings.model), settings.plan)
    found = reading.read(models, settings, stages)
    stages("done")
    for table in (reading_report.turn_table, reading_report.answer_table, reading_report.figure_table):
        console.print(table(found))
    for note in reading_report.notes(found):
        console.print(note, highlight=False, markup=False)
    kascade = models["kascade"]
    write_records(out, reading_report.records(found, kascade))
    (out / "lengths.svg").unlink(missing_ok=True)  # left by an earlier run of the embedded model
    body = {"lead": lead(), "origin": origin(), **reading_report.page_data(found, kascade)}
    (out / "index.html").write_text(page.render(body, "reading.html"), encoding="utf-8")
    console.print("Next steps:")
    for command, words in reading_report.NEXT:
        console.print(f"  {command}  ({words})", highlight=False, markup=False, soft_wrap=True)
    finish(out, console)
    return 0 if found.kept("kascade") > found.kept("control") else 1


def write_records(out: Path, made: Sequence[Record]) -> None:
    """Write the records to record.json, from which `publish` takes them."""
    body = {"schema": evidence.SCHEMA, "records": [json.loads(evidence.encode(record)) for record in made]}
    (out / "record.json").write_text(json.dumps(body, indent=1) + "\n")


def finish(out: Path, console: Console) -> None:
    """Print the folder that holds the results."""
    console.print(f"record.json and index.html are in {out}", highlight=False)


def make_folder(out: Path) -> None:
    """Create the folder `out`, and write a temporary file there to check that the folder is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out} is not a writable folder ({error.strerror}): use another folder") from error


def publish(out: str | os.PathLike = "build/demo", folder: str = "evidence", picture: str = "docs/demo.svg") -> None:
    """Store a run's records under `folder`, and copy the embedded model's plot of times to `picture`."""
    body = json.loads((Path(out) / "record.json").read_text(encoding="utf-8"))
    found = [evidence.decode(json.dumps(record)) for record in body["records"]]
    evidence.append(Path(folder) / f"demo-{hardware.device_slug()}.jsonl", found)
    drawn = Path(out) / "lengths.svg"
    if drawn.is_file():
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        Path(picture).write_bytes(drawn.read_bytes())


def load_models(folder: Path) -> dict[str, Model]:
    """Load the checkpoint under dense, Kascade and the control, with shared weights.

    Kascade runs at every length here. Otherwise it would run dense below the plan's cross-over, and show nothing.
    """
    kascade = load(folder, attention="kascade")
    return reading.policies(kascade.with_attention("dense"), kascade.plan)


def measure_all(models: Mapping[str, Model], settings: Settings, console: Console) -> Findings:
    """Run all measurements, the answers first."""
    document = settings.document.read_text(encoding="utf-8")
    size = f"{len(document):,} characters"
    console.print(f"[bold]Tessera demo[/bold]: questions about {settings.document.name} ({size})", highlight=False)
    stages = Stages(console)
    stages("compiling")
    findings.ask(models, document, settings.subjects[0])  # compiles the shapes, so that no answer waits for a compiler
    stages("answering")
    answers = [findings.ask(models, document, subject) for subject in settings.subjects]
    accuracy = findings.passkey_accuracy(models, settings.passkey_lengths, settings.tasks, stages)
    pair = {name: models[name] for name in ("dense", "kascade")}
    first_token = findings.first_token_times(pair, settings.first_token_lengths, settings.repeats, stages)
    kascade = models["kascade"]
    attention = findings.attention_times(kascade, settings.attention_lengths, settings.repeats, stages)
    stages("counting the keys that each layer read")
    prompt = findings.make_prompt(document, settings.subjects[0])
    reads = findings.read_map(kascade, kascade.tokenizer.encode(prompt))
    stages("done")
    for table in (answer_table(answers), speed_table(answers), accuracy_table(accuracy)):
        console.print(table)
    return Findings(
        settings=settings,
        document=document,
        crossover_tokens=kascade.plan.crossover_tokens,
        kinds=findings.kinds(kascade.policy),
        answers=answers,
        accuracy=accuracy,
        first_token=first_token,
        attention=attention,
        reads=reads,
    )


HEADS = tuple(reading.WORDS[side] for side in reading.SIDES)


def _yes(value: bool) -> str:
    return "yes" if value else "[bold red]NO[/bold red]"


def answer_table(answers: Sequence[Answered]) -> Table:
    """Tabulate, per question, the answers of dense, Kascade and the control.

    The column "same" says whether dense and Kascade agree, and "right" whether both are right.
    """
    table = Table("question", *HEADS, "same", "right", title="Answers", title_justify="left")
    for a in answers:
        said = [escape(reading.said(getattr(a, side))) for side in reading.SIDES]
        table.add_row(a.question, *said, _yes(a.same), _yes(a.right))
    return table


def figures(answers: Sequence[Answered]) -> list[list[str]]:
    """Return table rows for median time to first token, decode speed and keys read.

    A row is a label, then a cell for each of reading.SIDES.
    """
    rows = []
    for words, unit, read in (
        ("time to first token", "s", lambda g: g.ttft_s),
        ("decode speed", "tokens/s", lambda g: g.decode_tokens_per_s),
        ("keys read", "fraction", lambda g: g.density),
    ):
        sides = [[read(getattr(a, side)) for a in answers] for side in reading.SIDES]
        rows.append([words, *(quantity(statistics.median(side), unit) for side in sides)])
    return rows


def speed_table(answers: Sequence[Answered]) -> Table:
    """Tabulate the times and the keys read of dense, Kascade and the control, as medians over the questions."""
    tokens = answers[0].dense.prompt_tokens
    title = f"Speed on these questions ({tokens:,} tokens, medians)"
    table = Table("", *HEADS, title=title, title_justify="left")
    for row in figures(answers):
        table.add_row(*row)
    return table


def accuracy_rows(accuracy: Mapping[str, Mapping[int, Accuracy]]) -> list[list[str]]:
    """Return table rows of pass keys found, one per length: a label, then a cell for each of reading.SIDES."""
    return [
        [
            f"pass keys found in {length:,} tokens",
            *(f"{accuracy[side][length].num_right} of {accuracy[side][length].num_tasks}" for side in reading.SIDES),
        ]
        for length in accuracy["dense"]
    ]


def accuracy_table(accuracy: Mapping[str, Mapping[int, Accuracy]]) -> Table:
    """Tabulate the pass keys found per length."""
    table = Table("", *HEADS, title="Hidden pass keys, held-out text", title_justify="left")
    for row in accuracy_rows(accuracy):
        table.add_row(*row)
    return table


def notes(found: Findings) -> list[str]:
    """Return a list of facts that a reader of the figures needs."""
    lines = []
    if not found.same:
        lines.append("The answers DIFFER: Kascade did not give the same tokens as dense on every question.")
    if not all(a.right for a in found.answers):
        lines.append("Not every answer is what the document says: the model is small.")
    total = {side: sum(one.num_right for one in found.accuracy[side].values()) for side in reading.SIDES}
    if total["dense"]:
        lines.append(
            f"Dense finds {total['dense']} pass keys, Kascade {total['kascade']}, the control {total['control']}. "
            f"{reading_report.CONTROL}"
        )
    if total["dense"] and total["control"] >= total["kascade"]:
        lines.append("The control finds as many as Kascade: pass keys do NOT show here that the choice matters.")
    if found.crossover_tokens > found.answers[0].dense.prompt_tokens:
        lines.append(
            f"The plan's measured cross-over is {found.crossover_tokens:,} tokens: below it Tessera runs dense. "
            "Here Kascade was made to run at every length, so that there is something to see."
        )
    return lines


def records(found: Findings, models: Mapping[str, Model]) -> list[Record]:
    """Build the run's records: answers, accuracy, time to first token and attention time."""
    plan = models["kascade"].plan
    made = [_answer_record(found, name) for name in reading.SIDES]
    config = {"model": plan.model, "anchors": list(plan.anchors), "own": list(plan.own), "tile": plan.tile}
    for name, by_length in found.accuracy.items():
        for length, accuracy in by_length.items():
            what = What(op="demo", kernel=name, workload=f"demo_passkey_{length}", config=config,
                        title=f"pass key in {length:,} tokens")  # fmt: skip
            facts = {"trials": accuracy.num_tasks}
            made.append(_record(what, [accuracy.share], unit="fraction", density=accuracy.layer_density, facts=facts))
    for length, samples in found.first_token.items():
        title = f"time to first token, {length:,} tokens"
        made += _pair("demo_first_token", title, length, samples, config)
    for length, layer in found.attention.items():
        total = layer.total(found.kinds)
        title = f"attention of all layers, {length:,} tokens"
        one = {"kinds": list(found.kinds), "one_layer_s": {k: list(v) for k, v in layer.samples.items()}}
        made += _pair("demo_attention", title, length, {n: [s] for n, s in total.items()}, config | one)
    return made


def _answer_record(found: Findings, name: str) -> Record:
    answers = [getattr(a, name) for a in found.answers]
    facts: dict[str, Any] = {
        "questions": [a.question for a in found.answers],
        "answers": [a.text.strip() for a in answers],
        "same_as_dense": [a.tokens == dense.dense.tokens for a, dense in zip(answers, found.answers)],
        "expected": [a.expected for a in found.answers],
        "decode_tokens_per_s": [a.decode_tokens_per_s for a in answers],
        "prompt_tokens": answers[0].prompt_tokens,
        "density": [a.density for a in answers],
    }
    if name == "kascade":
        facts["crossover_tokens"] = found.crossover_tokens
        facts["choosing_layers"] = [a.layer for a in found.reads.anchors]
    what = What(op="demo", kernel=name, workload="demo_answers", title="questions about the document")
    density = tuple(found.reads.densities) if name == "kascade" else answers[0].layer_density
    return _record(what, [a.ttft_s for a in answers], density=density, facts=facts)


def _pair(
    workload: str, title: str, length: int, samples: Mapping[str, Sequence[float]], config: Mapping[str, Any]
) -> list[Record]:
    """Build the record of dense, and the record of Kascade with a comparison to dense."""
    out = []
    for name in ("dense", "kascade"):
        versus = None
        if name == "kascade":
            versus = Comparison(against="dense", ratio=timing.ratio(samples["dense"], samples["kascade"]))
        what = What(op="demo", kernel=name, workload=f"{workload}_{length}", config=config, title=title)
        made = _record(what, samples[name], comparison=versus)
        out.append(replace(made, how=replace(made.how, warmup=1, interleaved=True)))
    return out


def _record(what: What, samples: Sequence[float], **fields: Any) -> Record:
    return evidence.make(what, samples, how=How(iterations=len(samples)), command=COMMAND, **fields)


def lead() -> str:
    """Describe the machine, the date and the commit that the page comes from."""
    code, where = evidence.code(), evidence.here()
    return (
        f"{where.cpu}, {where.cores} cores, jax {where.versions['jax']}; {evidence.now()[:10]}; "
        f"commit {(code.commit or 'unknown')[:9]}; repeat with: {COMMAND}"
    )


def origin() -> str:
    """Return the origin and licence of the demo's documents."""
    return (HERE / "NOTICE").read_text(encoding="utf-8")


def render(found: Findings, models: Mapping[str, Model], times_svg: str, missing: str = "") -> str:
    """Render the HTML page of the embedded model's demo; `missing` says why the real model did not run."""
    return page.render(
        {
            "lead": lead(),
            "missing": missing,
            "answers": [
                {
                    "question": a.question,
                    "said": [reading.said(getattr(a, side)) for side in reading.SIDES],
                    "same": a.same,
                    "right": a.right,
                }
                for a in found.answers
            ],
            "figures": figures(found.answers) + accuracy_rows(found.accuracy),
            "sides": HEADS,
            "notes": notes(found),
            "time_picture": {
                "svg": times_svg,
                "caption": f"Medians of {found.settings.repeats} runs; dense and Kascade take turns. The number above "
                "a point is dense's time divided by Kascade's. Left: every run uses a different held-out text. Right: "
                "one layer of each kind is timed on random inputs, even beyond the model's context; the plot shows the "
                "sum over the plan's layers, which includes choosing tiles.",
            },
            "read_pictures": read_pictures(found, models["kascade"]),
            "document": found.document,
            "origin": origin(),
        }
    )


def draw_times(found: Findings) -> str:
    """Plot time to first token and attention time against prompt length, for dense and Kascade."""
    sides = {"dense": "dense", "kascade": "Kascade"}
    totals = [layer.total(found.kinds) for layer in found.attention.values()]
    medians = {side: [statistics.median(s[name]) for s in found.first_token.values()] for name, side in sides.items()}
    attention = {side: [total[name] for total in totals] for name, side in sides.items()}
    whole = pictures.Panel(
        title="Time to first token, whole model",
        label="time to first token (ms)",
        lengths=list(found.first_token),
        sides=medians,
    )
    alone = pictures.Panel(
        title=f"Prefill attention alone, {len(found.kinds)} layers",
        label="attention time (ms)",
        lengths=list(found.attention),
        sides=attention,
    )
    return pictures.times([whole, alone])


def read_pictures(found: Findings, model: Model) -> list[dict[str, str]]:
    """Plot the keys read per layer, and the tiles that the choosing layers chose."""
    marks = [findings.what_it_says(found.document, subject)[1] for subject in found.settings.subjects]
    return [
        {
            "svg": pictures.densities(found.reads.densities, model.policy.roles()),
            "caption": "The keys in the tile lists that the kernels were given, for the first question's prompt.",
        },
        {
            "svg": pictures.chosen_tiles(found.reads.anchors, model.policy.tile, model.policy.query_tile, marks),
            "caption": "Each row is one query tile of the document and question, and each column is one key tile. "
            "White tiles are in the future. The diagonal is always read.",
        },
    ]
