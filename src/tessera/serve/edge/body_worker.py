"""Check request bodies in a separate process, where parsing does not hold the server's GIL.

The process reads requests from standard input: a line of JSON with the fields "schema" (name of a class in `protocol`),
"size", "context" (see `parsing.parse`) and "limit_s", and then `size` bytes, the body. It answers each with a line of
JSON on standard output: {} if the body is right, or else the status, message and param of its `Refusal`. A body that
takes over `limit_s` seconds of processor time ends the process.
"""

import json
import os
import signal
import sys

from tessera.serve.api import protocol
from tessera.serve.edge.parsing import parse

NICENESS = 5
"""Added to the server's niceness: the engine gets most of the processor time."""


def main() -> int:
    os.nice(NICENESS)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores SIGPROF passes that on
    print("ready", flush=True)
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        raw = sys.stdin.buffer.read(asked["size"])
        signal.setitimer(signal.ITIMER_PROF, asked["limit_s"])
        reply = checked(asked["schema"], raw, asked["context"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)
    return 0


def checked(schema: str, raw: bytes, context: int | None) -> dict[str, object]:
    try:
        parse(getattr(protocol, schema), raw, context)
    except protocol.Refusal as refusal:
        return {"status": refusal.status, "message": str(refusal), "param": refusal.param}
    return {}


if __name__ == "__main__":
    sys.exit(main())
