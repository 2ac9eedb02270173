"""Progress bar on a terminal while the model reads a long prompt."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LONG = 1024
"""Prompt tokens in one prefill chunk. A prompt of one chunk gets no bar: there is no progress within a chunk."""
PERIOD_S = 600.0
"""Seconds over which the rate is averaged. On a CPU, one chunk of a large model can take a minute."""


class PromptBar:
    """Progress bar on standard error: tokens read, tokens/s and time left. It vanishes once the prompt is read, and
    stays hidden for short prompts and without a terminal."""

    def __init__(self):
        self._progress: Progress | None = None

    def __enter__(self) -> "PromptBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` prompt tokens are read; see `Model.generate`."""
        if done >= total:
            self._stop()
        elif total > LONG:
            if self._progress is None:
                self._start(total)
            self._progress.update(self._progress.task_ids[0], completed=done, total=total)

    def _start(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), Rate())
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
            speed_estimate_period=PERIOD_S,
        )
        self._progress.add_task("", total=total)
        self._progress.start()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Rate(TextColumn):
    """Column of the progress bar that shows tokens per second."""

    def __init__(self):
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} tokens/s")
