"""A compiler in a separate process, whose failure is a result: a kernel may crash it, or keep it busy forever."""

from collections.abc import Mapping
from typing import Any

from tessera.core.child import Ended, Worker


class Process(Worker):
    """A compile worker."""

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the reply; if there is none, {"compiled": False, "error", "stage"}.

        The stage is "time" if the worker was killed after `limit_s` seconds, else "compile": the request crashed it.

        Raises:
            ValueError: the worker exited, not by a signal, before its first answer: it cannot start.
        """
        try:
            return super().ask(request, limit_s)
        except Ended as end:
            if end.late:
                return {"compiled": False, "stage": "time", "error": "ended", "compile_s": limit_s}
            if end.status > 0 and not end.answered:  # below 0, a signal killed it: a compiler crash is a result
                raise ValueError(f"the compiler did not start: {end.said}") from None
            return {"compiled": False, "stage": "compile", "error": f"it died with status {end.status}: {end.said}"}
