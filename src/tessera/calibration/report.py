"""Show the progress of a calibration."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Report:
    """Progress bar with one line per pass over the text; `stage` names the current pass for the message on Ctrl-C."""

    def __init__(self, shown: bool):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self.stage = "reading"

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.bar.stop()

    def each(self, stage: str, items: Sequence[Any]) -> Iterator[Any]:
        self.stage = stage
        task = self.bar.add_task(stage, total=len(items))
        for item in items:
            yield item
            self.bar.advance(task)
