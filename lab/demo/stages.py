"""Progress lines of the demo."""

import time

from rich.console import Console


class Stages:
    """Printer of progress lines: one line with the seconds so far at the start of each stage.

    The last line thus explains a long silence.
    """

    def __init__(self, console: Console):
        self.console, self.started_s = console, time.perf_counter()

    def __call__(self, words: str) -> None:
        seconds = time.perf_counter() - self.started_s
        self.console.print(f"{seconds:4.0f} s  {words}", style="dim", highlight=False, markup=False)
