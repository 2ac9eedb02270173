"""Parse request bodies. A worker process parses a large body first, because parsing holds the GIL.

A hostile body thus costs the server's process nothing: it is parsed there only after the worker has accepted it.
"""

import sys
import weakref

from fastapi import Request

from tessera.core.child import Ended, Worker
from tessera.serve.protocol import Refusal, Schema, parse
from tessera.serve.turns import Turns, in_turn

SMALL = 32 << 10
"""Maximum bytes of a body that is parsed at once. That takes 3 ms at most, as long as a request takes anyway."""
CHECK_S = 10.0
"""Maximum seconds for the worker to check a body. Most take milliseconds, unless the machine is busy."""
READY_S = 60.0
"""Maximum seconds until the worker process is ready. It starts in half a second on an idle machine."""
NICENESS = 5
"""Niceness of the worker: the engine gets most of the processor time."""


class Bodies:
    """Parser of the bodies of one server.

    Args:
        context: maximum tokens of one request; None accepts prompts of any length.
    """

    def __init__(self, context: int | None = None):
        self.context = context
        self._turns = Turns()
        command = [sys.executable, "-P", "-m", "tessera.serve.body_worker"]
        self._worker = Worker(command, niceness=NICENESS, ready_s=READY_S)
        weakref.finalize(self, self._worker.close)

    def start(self) -> None:
        """Start the worker process, so that the first large body need not wait for it."""
        self._worker.start()

    async def of[Body: Schema](self, request: Request, schema: type[Body]) -> Body:
        """Parse the body of a request; raise Refusal if it is wrong, or as soon as the client disconnects."""
        raw = await request.body()
        if len(raw) > SMALL:
            await in_turn(request, self._turns, self._check, schema, raw)
        return parse(schema, raw, self.context)

    async def parse[Body: Schema](self, tenant: str, schema: type[Body], raw: bytes) -> Body:
        """Parse a tenant's body; raise Refusal if it is wrong."""
        if len(raw) > SMALL:
            await self._turns.run(tenant, self._check, schema, raw)
        return parse(schema, raw, self.context)

    def _check(self, schema: type[Schema], raw: bytes) -> None:
        asked = {"schema": schema.__name__, "size": len(raw), "context": self.context}
        try:
            reply = self._worker.ask(asked, CHECK_S, raw)
        except Ended as ended:
            raise Refusal(413, f"the body takes over {CHECK_S:g} s to read: send a smaller one") from ended
        if reply:
            raise Refusal(reply["status"], reply["message"], param=reply["param"])
