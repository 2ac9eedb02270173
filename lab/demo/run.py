"""Run the demo: print tables, and write a JSON record and an HTML page to build/demo."""

import json
import os
import tempfile
import time
from pathlib import Path

from rich.console import Console

from lab.demo import reading, report
from tessera.generate import load
from tessera.measure import evidence
from tessera.models.files import fetch


def run(out: str | os.PathLike = "build/demo", settings: reading.Settings | None = None) -> int:
    """Run the demo; write record.json and index.html to `out`.

    Without settings, SmolLM2 answers if it can be fetched, else the shipped model. The exit code is 0 if Kascade kept
    more of dense's right answers than the control did, else 1. A folder that cannot be written to raises ValueError
    before anything is fetched or measured.
    """
    out, console, missing = Path(out), Console(), ""
    make_folder(out)
    if settings is None:
        settings, missing = choose_model(console)
    console.print(report.ABOUT)
    started_s = time.perf_counter()

    def progress(words: str) -> None:
        seconds = time.perf_counter() - started_s
        console.print(f"{seconds:4.0f} s  {words}", style="dim", highlight=False, markup=False)

    progress("loading the model")
    models = reading.policies(load(settings.model), settings.plan)
    found = reading.read(models, settings, progress)
    progress("done")
    if settings.turn is not None:
        console.print(report.turn_table(found))
    console.print(report.answer_table(found), report.figure_table(found), sep="\n")
    for note in [*report.notes(found), *([missing] if missing else [])]:
        console.print(note, highlight=False, markup=False)
    made = report.records(found, models["kascade"])
    body = {"schema": evidence.SCHEMA, "records": [json.loads(evidence.encode(record)) for record in made]}
    (out / "record.json").write_text(json.dumps(body, indent=1) + "\n")
    (out / "index.html").write_text(report.page(found, models["kascade"], missing), encoding="utf-8")
    console.print("Next steps:")
    for command, words in report.NEXT:
        console.print(f"  {command}  ({words})", highlight=False, markup=False, soft_wrap=True)
    console.print(f"record.json and index.html are in {out}", highlight=False)
    return 0 if found.kept("kascade") > found.kept("control") else 1


def choose_model(console: Console) -> tuple[reading.Settings, str]:
    """Return (settings of the real model, ""); if it cannot be fetched, (settings of the shipped model, reason)."""
    try:
        console.print(f"[bold]Tessera demo[/bold]: {fetch.SOURCES['smollm2'].words}", highlight=False)
        return reading.Settings(model=fetch.fetch("smollm2")), ""
    except (OSError, ValueError) as error:
        missing = (
            f"This is the small model in the package, because the real one could not be fetched: {error}. To see the "
            "real model, connect to a network, run `tessera fetch smollm2`, and run the demo again."
        )
        console.print(missing, style="yellow", markup=False)
        return reading.OFFLINE, missing


def make_folder(out: Path) -> None:
    """Create the folder `out`, and write a temporary file there to check that the folder is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out} is not a writable folder ({error.strerror}): use another folder") from error
