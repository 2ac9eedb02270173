"""Parse request bodies. A worker process parses a large body first, because parsing holds the GIL.

The server's own process parses it only after the worker has accepted it. Bodies of one tenant are checked in turn.
"""

import logging
import sys
import weakref

from fastapi import Request

from tessera.core.child import Ended, Worker
from tessera.serve.api.schema import Refusal, Schema
from tessera.serve.edge.parsing import parse
from tessera.serve.edge.turns import Turns, in_turn

logger = logging.getLogger(__name__)

SMALL = 32 << 10
"""Maximum bytes of a body that the server parses without the worker."""
CHECK_S = 5.0
"""Maximum seconds of processor time for the worker to check a body. Most bodies take milliseconds."""
WAIT_S = 10.0
"""Maximum seconds to wait for the worker. A busy machine may exceed them, so the body is not to blame."""
READY_S = 60.0
"""Maximum seconds until the worker process is ready. The server starts it before the engine."""


class Bodies:
    """Parser of the bodies of one server, whose requests have at most `context` tokens (see `parsing.parse`)."""

    def __init__(self, context: int | None = None):
        self.context = context
        self._turns = Turns()
        command = [sys.executable, "-P", "-m", "tessera.serve.edge.body_worker"]
        self._worker = Worker(command, ready_s=READY_S, exit_s=2.0)
        weakref.finalize(self, self._worker.close)

    def start(self) -> None:
        """Start the worker process, so that the first large body need not wait; if that fails, the body tries again."""
        try:
            self._worker.start()
        except (Ended, OSError) as error:
            logger.warning("the process that checks large bodies does not start: %s", error)

    async def of[Body: Schema](self, request: Request, schema: type[Body]) -> Body:
        """Parse the body of a request; raise Refusal if it is wrong, or as soon as the client disconnects."""
        raw = await request.body()
        if len(raw) > SMALL:
            await in_turn(request, self._turns, self._check, schema, raw)
        return parse(schema, raw, self.context)

    async def parse[Body: Schema](self, tenant: str, schema: type[Body], raw: bytes) -> Body:
        if len(raw) > SMALL:
            await self._turns.run(tenant, self._check, schema, raw)
        return parse(schema, raw, self.context)

    def _check(self, schema: type[Schema], raw: bytes) -> None:
        asked = {"schema": schema.__name__, "size": len(raw), "context": self.context, "limit_s": CHECK_S}
        try:
            reply = self._worker.ask_again(asked, WAIT_S, raw)
        except (Ended, OSError) as error:
            if isinstance(error, Ended) and error.spent:
                said = f"the body takes over {CHECK_S:g} s of processor time to check: send a smaller one"
                raise Refusal(413, said) from error
            logger.exception("the process that checks large bodies ended")
            raise Refusal(503, "the server could not check the body: send the request again", retry_s=5) from error
        if reply:
            raise Refusal(reply["status"], reply["message"], param=reply["param"])
