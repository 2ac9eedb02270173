"""The worker process of a peer library. Its clock runs in that process."""

import os
from pathlib import Path
from typing import Any

from tessera.core.child import Worker


class Peer(Worker):
    """Worker process in a peer library's environment; the process takes its own measurements."""

    def __init__(self, python: str | os.PathLike, script: str | os.PathLike, *args: str):
        if not Path(python).exists():
            raise FileNotFoundError(
                f"peer_python={os.fspath(python)!r} does not exist: `make peers` builds .venv-peers"
            )
        super().__init__([os.fspath(python), os.fspath(script), *args])

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for the answer.

        Raises:
            RuntimeError: the worker reported an error, or ended.
        """
        answer = super().ask({"call": call, **arguments})
        if "error" in answer:
            raise RuntimeError(f"peer {call!r}: {answer['error']}")
        return answer
