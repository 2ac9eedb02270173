"""Compare the simulator with the real server: the same requests at the same times.

The simulator uses the step times that the server predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from lab.served.child import Client, Server
from lab.served.speed import LOAD, Found, poisson
from lab.served.stand import SLOTS, Sizes, Stand, first_s, percentile
from lab.simulate.replica import Open, Replica
from lab.simulate.traffic import Arrival, Text
from tessera.runtime.costs import LinearCosts
from tessera.runtime.scheduler import Scheduler, Work
from tessera.serve.warm import SIZES, decode_batches

REQUESTS = 8 * SLOTS
"""Number of requests in the comparison."""
TAIL_S = 600.0
"""Simulated seconds after the last arrival, enough for every request to end."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Step times that include padding: a decode step runs the smallest of `batches` that has room for its rows."""

    costs: LinearCosts
    batches: tuple[int, ...]

    def step_s(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Return the predicted seconds of a step."""
        batch = next((size for size in self.batches if size >= len(decode)), len(decode)) if decode else 0
        return self.costs.step_s(prefill, [*decode, *[max(decode, default=0)] * (batch - len(decode))])


def simulator(stand: Stand, seed: int) -> Found:
    """Compare the real median time to the first text with the simulated one, at LOAD times the throughput.

    The server's predictions are read before the requests are sent. As a control, a second simulation halves all step
    times.
    """
    sizes, server, count = stand.sizes, stand.server(), stand.scaled(REQUESTS)

    async def talk(client: Client) -> Found:
        prompts = client.prompts(2 * SLOTS + count, sizes.prompt, seed=seed)
        _, most_s = await client.crowd(prompts[: 2 * SLOTS], sizes.new, clients=SLOTS)
        per_s = LOAD * 2 * SLOTS / most_s
        costs, step_s = predicted(server)
        told = await poisson(client, prompts[2 * SLOTS :], sizes.new, per_s=per_s, seed=seed)
        starts = np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, count)).tolist()
        real = percentile(first_s(told), 50)
        half = LinearCosts(**{each.name: getattr(costs, each.name) / 2 for each in fields(costs)})
        simulated = [percentile(first_of(each, step_s, sizes, starts), 50) for each in (costs, half)]
        error, control = (abs(each / real - 1) for each in simulated)
        facts = {"requests_per_s": per_s, "first_p50_s": [real, *simulated], "costs": vars(costs), "step_s": step_s}
        return {"error": error, "control": control}, facts

    return server.drive(talk)


def predicted(server: Server) -> tuple[LinearCosts, float]:
    """Return a server's predicted step times, and its limit in seconds for a step with decoding rows."""
    costs = {each.name: server.metric("tessera:step_cost_seconds", f'of="{each.name}"') for each in fields(LinearCosts)}
    return LinearCosts(**costs), server.metric("tessera:step_limit_seconds")


def first_of(costs: LinearCosts, step_s: float, sizes: Sizes, starts_s: Sequence[float]) -> list[float]:
    """Simulate requests that arrive at `starts_s`; return the seconds to the first token of each."""
    _, unit, more = SIZES["cpu"]
    steps = tuple(sorted({unit, *more}))
    scheduler = Scheduler(costs, unit=unit, sizes=[rows // unit for rows in steps], step_s=step_s)
    replica = Replica(scheduler, sizes.pages, slots=SLOTS, costs=Padded(costs=costs, batches=decode_batches(SLOTS)))
    for number, at_s in enumerate(starts_s):
        replica.run_until(at_s)
        replica.submit(arriving(number, at_s, sizes))
    replica.run_until(starts_s[-1] + TAIL_S)
    return [each.first_s - each.work.arrived_s for each in replica.ended]


def arriving(number: int, at_s: float, sizes: Sizes) -> Open:
    """Return a request of the usual size that shares no tokens with others."""
    work = Work(
        id=number,
        tenant="",
        arrived_s=at_s,
        deadline_s=None,
        prompt_tokens=sizes.prompt,
    )
    text = Text(number, sizes.prompt)
    arrival = Arrival(at_s=at_s, kind="chat", tenant="", text=text, prompt_tokens=sizes.prompt, answer_tokens=sizes.new)
    return Open(arrival=arrival, work=work, hashes=())
