"""Run the tuner's worker process. A candidate that crashes, hangs or takes too much memory counts as failed."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.core.child import Ended, Worker

START_S = 300.0
"""Seconds to wait until a worker is ready. A worker that takes longer counts as hung."""


class Child(Worker):
    """Worker process that measures candidates, with `limit_s` seconds per answer and `memory_bytes` bytes of memory."""

    def __init__(self, *, limit_s: float, memory_bytes: int, paths: Sequence[str] = ()):
        path = os.pathsep.join((*paths, *filter(None, [os.environ.get("PYTHONPATH")])))
        command = [sys.executable, "-m", "tessera.measure.tune.worker", str(memory_bytes)]
        super().__init__(command, {**os.environ, "PYTHONPATH": path}, ready_s=START_S)
        self.limit_s = limit_s

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's answer, or an answer with an error if the worker ends or stays silent past the limit."""
        try:
            return super().ask(request, self.limit_s)
        except Ended as end:
            said = f"the worker died with status {end.status}: it crashed or exceeded its memory limit"
            if end.late:
                said = f"killed after {self.limit_s:g} s without an answer"
            return {"samples": [], "compile_s": 0.0, "error": said}
