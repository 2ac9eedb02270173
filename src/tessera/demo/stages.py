"""Progress lines of the demo."""

import time

from rich.console import Console


class Stages:
    """Print a line with the seconds so far when a stage begins, so that the last line explains a long silence."""

    def __init__(self, console: Console):
        self.console, self.started_s = console, time.perf_counter()

    def __call__(self, words: str) -> None:
        seconds = time.perf_counter() - self.started_s
        self.console.print(f"{seconds:4.0f} s  {words}", style="dim", highlight=False, markup=False)
