"""The generation loop: submit requests, step, cancel. Requests join and leave between steps.

    engine = model.engine(slots=4)
    first = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=16))
    while engine.busy:
        for event in engine.step():
            ...

A request below the cross-over (`Plan.crossover_tokens`) runs dense; all others run under the engine's policy. The
requests of each policy form a lane (`lane.py`), so a step runs at most two lanes. An engine is not thread-safe.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from tessera.core import interrupt
from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.models.tokenizer import Tokenizer
from tessera.runtime.answers import Answer, Generation
from tessera.runtime.choosing import fail
from tessera.runtime.lane import Lane
from tessera.runtime.paged_lane import PagedLane
from tessera.runtime.pool import Paging, Pool
from tessera.runtime.requests import End, Event, Failure, Held, PoolState, Request, Ticket, Token, check_tokens
from tessera.runtime.sampling import Method, Sampling
from tessera.runtime.scheduler import Scheduler
from tessera.runtime.step import Session, require_room
from tessera.sparse.contract import Policy

logger = logging.getLogger(__name__)

LAG = 2
"""Steps that an accelerator runs ahead of the host, so that the host reads tokens that are already computed."""


class Engine:
    """Continues the prompts of many requests together.

    After an exception such as Ctrl-C, the caches may be donated and unusable: read partial answers with `cancel`, then
    drop the engine. An error in a single request does not raise; it becomes a `Failure` event.

    Args:
        params, config, policy: the model's weights, config and attention policy.
        tokenizer: the model's tokenizer; with None, answers have tokens and no text.
        slots: rows of each lane; None takes one row per request that waits when the lane opens.
        num_keys: minimum keys per row to allocate; a longer request grows the cache, which compiles new programs.
        sizes: lengths of prefill chunks, descending multiples of the policy's query tile; None takes those of
            `chunk_sizes`, usually 1,024, 256 and 64.
        lag: steps that the device runs ahead of the host; None is LAG on accelerators and 0 on a CPU, where a step past
            the end of an answer costs as much as any other.
        cache: dtype of keys and values, "int8" or None for the weights' own.
        together: whether prompts that fill all rows of a lane are prefilled in one batch. A server switches this off:
            that halves the programs to compile, and its prompts seldom come together.
        paging: keep keys in pages: all requests then share one lane, prompts that begin alike share keys, and a row's
            position alone selects its policy. `num_keys` is then the maximum per request; needs `slots`.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        tokenizer: Tokenizer | None = None,
        slots: int | None = None,
        num_keys: int = 1,
        sizes: Sequence[int] | None = None,
        lag: int | None = None,
        cache: str | None = None,
        together: bool = True,
        paging: Paging | None = None,
    ):
        if slots is not None and slots < 1:
            raise ValueError(f"{slots=} must be at least 1, or None")
        self.params, self.config, self.policy, self.tokenizer = params, config, policy, tokenizer
        self.slots, self.num_keys, self.sizes, self.cache = slots, num_keys, sizes, cache
        self.lag = (0 if jax.default_backend() == "cpu" else LAG) if lag is None else lag
        self.together = together
        self.paging = paging
        if paging is not None and slots is None:
            raise ValueError("slots=None: an engine with pages needs a number of rows")
        self.lanes: dict[Policy, Lane | PagedLane] = {}
        self._waiting: list[Ticket] = []
        self._tickets: dict[int, Ticket] = {}
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether any request still needs tokens."""
        return any(ticket.open for ticket in self._tickets.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        queues = (self._waiting, *(lane.waiting for lane in self.lanes.values()))
        return sum(ticket.open for queue in queues for ticket in queue)

    @property
    def pool_state(self) -> PoolState | None:
        """How full the pool of pages is; None without pages, or before the first request."""
        lane = self.lanes.get(self.policy)
        return lane.state() if isinstance(lane, PagedLane) else None

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the pool of pages; None without pages, or before the first request."""
        lane = self.lanes.get(self.policy)
        return lane.scheduler if isinstance(lane, PagedLane) else None

    def policy_of(self, num_keys: int) -> Policy:
        """Return the policy of a request that caches `num_keys` keys; with pages, the policy of its last row."""
        if self.paging is None:
            return self.policy.at_length(num_keys)
        return self.policy.at_position(num_keys - 1, self.paging.unit)

    def submit(self, request: Request, *, started_s: float | None = None) -> int:
        """Queue a request and return its id.

        Args:
            request: prompt to continue; it joins at a later step, once a row is free.
            started_s: start of the request on the clock of time.perf_counter, for its time to first token; None is now.

        Raises:
            ValueError: the prompt is empty or longer than the context, a token of the prompt or of `bias` is outside
                the vocabulary, the request has `stop` texts and the model has no tokenizer, or it has
                `prompt_logprobs` and the engine no pages.
        """
        check_tokens(request.prompt, self.config, "the prompt")
        if request.stop and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this model has none")
        if request.prompt_logprobs is not None and self.paging is None:
            raise ValueError(f"prompt_logprobs={request.prompt_logprobs} needs an engine with pages: pass paging")
        room = self.config.max_positions - len(request.prompt) + 1  # the last token is never fed back
        wrong = [token for token in request.bias if not 0 <= token < self.config.vocab_size]
        if wrong:
            raise ValueError(f"bias names token {wrong[0]}, outside the vocabulary of {self.config.vocab_size}")
        limit = min(request.max_new_tokens, room)
        answer = Answer(len(request.prompt), limit, self.config.eos_ids, request.stop, self.tokenizer)
        started_s = time.perf_counter() if started_s is None else started_s
        guide = None if request.guide is None else request.guide()
        ticket = Ticket(id=self._submitted, request=request, answer=answer, started_s=started_s, guide=guide)
        ticket.allowed = None if guide is None else guide.allowed()
        self._submitted += 1
        self._tickets[ticket.id] = ticket
        self._waiting.append(ticket)
        return ticket.id

    def step(self) -> list[Event]:
        """Run each lane once (one decoded token per row, one chunk of a joining prompt); return the new events.

        Every request ends with one End or Failure event, unless it is cancelled.
        """
        interrupt.check()
        self._tickets = {id: ticket for id, ticket in self._tickets.items() if ticket.open}
        events = self._admit()
        for lane in self.lanes.values():  # both lanes compute before the host waits for either
            lane.advance()
        for lane in self.lanes.values():
            events += lane.collect()
        return events

    def cancel(self, id: int) -> Generation:
        """Drop a request and return its partial answer, whose finish_reason is "interrupted".

        The answer is whole if the request ended in the last step.

        Raises:
            KeyError: there is no such request, or it ended before the last step.
        """
        ticket = self._tickets.pop(id)
        ticket.dropped = True
        return ticket.answer.generation(ticket.started_s)

    def drain(
        self, stream: Callable[[int, str], Any] | None = None, progress: Callable[[int, int], Any] | None = None
    ) -> Iterator[End]:
        """Step until no request is open; yield the End event of each.

        Args:
            stream: called with (id, text piece) as soon as text is final.
            progress: called after each step, until all prompts are computed, with totals over the open requests:
                (prompt tokens computed, prompt tokens to compute).

        Raises:
            ValueError, MemoryError: the error of the first request that fails; the other requests stay open.
        """
        tickets = [ticket for ticket in self._tickets.values() if ticket.open]
        done, total = 0, 1
        while self.busy:
            events = self.step()
            if progress is not None and done < total:
                done, total = (sum(counts) for counts in zip(*(ticket.prefilled for ticket in tickets)))
                progress(done, total)
            for event in events:
                match event:
                    case Token() if stream is not None and event.text:
                        stream(event.id, event.text)
                    case End():
                        yield event
                    case Failure():
                        raise event.error

    def hold(self, tokens: Sequence[int]) -> Held:
        """Prefill a prefix, cut to whole chunks, under the engine's policy.

        A request that has the result in its field `held` starts after the prefix. The row that holds the prefix counts
        as free: a request with another prefix may take it, and `held` then saves nothing.
        """
        check_tokens(tokens, self.config, "the prefix")
        lane = self.lanes.get(self.policy) or self._open(self.policy, self.slots or 1, len(tokens), len(tokens))
        return lane.hold(tokens)

    def pin(self, tokens: Sequence[int], tenant: str = "") -> int:
        """Compute a prefix, and keep its whole units (`Paging.unit`) for as long as the engine lives.

        Return the number of positions that are kept.

        Raises:
            ValueError: the engine has no pages, or the prefix is empty or too long.
            MemoryError: the pool is too small.
        """
        if self.paging is None:
            raise ValueError("paging=None: only an engine with pages can pin a prefix")
        self.submit(Request(prompt=tokens, max_new_tokens=1, tenant=tenant))
        for _ in self.drain():
            pass
        return self.lanes[self.policy].pin(tokens, tenant)

    def close(self) -> None:
        """Write the prefix cache to disk, if the engine has a folder for it."""
        for lane in self.lanes.values():
            if isinstance(lane, PagedLane):
                lane.close()

    def warm(self, samplings: Iterable[Sampling] = (Sampling(),), *, joins: bool = True, extras: bool = False) -> int:
        """Run once, on empty rows, every program that requests of up to `num_keys` keys use; count the programs.

        Args:
            samplings: sampling parameters of later requests, in any mixture; only their optional steps matter.
            joins: also run the programs of requests that join while others decode.
            extras: also run those of requests with `bias`, `guide` or `top_logprobs`.
        """
        if self.busy:
            raise ValueError("requests are open: warm the engine before submitting any")
        found: set[Method] = set()  # of every mixture
        for sampling in samplings:
            found |= {sampling.method} | {method | sampling.method for method in found}
        if extras:
            found |= {method | Method(extra=True) for method in found}
        rows, programs = self.slots or 1, 0
        for policy in dict.fromkeys(self._policy_of(n) for n in (1, self.num_keys)):
            lane = self.lanes.get(policy) or self._open(policy, rows, self.num_keys, self.num_keys)
            programs += lane.warm(found, joins=joins)
        return programs

    def _admit(self) -> list[Event]:
        """Hand new requests to the lanes of their policies, opening lanes as needed; return Failure events."""
        groups: dict[Policy, list[Ticket]] = {}
        for ticket in self._waiting:
            if ticket.open:  # each request's length alone selects its policy
                groups.setdefault(self._policy_of(ticket.answer.num_keys), []).append(ticket)
        self._waiting, failures = [], []
        if groups.keys() - self.lanes.keys():  # drop idle lanes, whose caches take memory
            self.lanes = {policy: lane for policy, lane in self.lanes.items() if lane.busy or policy in groups}
        for policy, tickets in groups.items():
            if policy not in self.lanes:
                failures += self._open_for(policy, tickets)
            if policy in self.lanes:
                self.lanes[policy].waiting.extend(ticket for ticket in tickets if ticket.open)
        return failures

    def _policy_of(self, num_keys: int) -> Policy:
        """Return the policy whose lane takes a request."""
        return self.policy if self.paging is not None else self.policy.at_length(num_keys)

    def _open_for(self, policy: Policy, tickets: Sequence[Ticket]) -> list[Event]:
        """Open a lane for as many requests as fit in memory; drop the longest first and return their Failure events."""
        failures, left = [], sorted(tickets, key=lambda ticket: ticket.answer.num_keys)
        while left:
            longest = left[-1].answer.num_keys
            num_tokens = max(ticket.answer.prompt_tokens for ticket in left)
            try:
                self._open(policy, self.slots or len(left), longest, num_tokens)
            except MemoryError as error:
                failures.append(fail(left.pop(), error))
                continue
            if policy != self.policy:
                names = policy.name, self.policy.name
                logger.info("%d tokens are below the cross-over: attention is %s, not %s", longest, *names)
            break
        return failures

    def _open(self, policy: Policy, batch: int, num_keys: int, num_tokens: int) -> Lane | PagedLane:
        if self.paging is not None:
            self.lanes[policy] = self._open_pool()
            return self.lanes[policy]
        num_keys = max(num_keys, self.num_keys)
        size = {"batch": batch, "num_keys": num_keys, "cache": self.cache}
        require_room(self.params, self.config, **size, num_tokens=num_tokens)
        session = Session(self.params, self.config, policy, **size, sizes=self.sizes)
        self.lanes[policy] = Lane(session, self.lag, self.together)
        return self.lanes[policy]

    def _open_pool(self) -> PagedLane:
        pool = Pool(self.params, self.config, self.policy, context=self.num_keys, paging=self.paging, cache=self.cache)
        return PagedLane(pool, slots=self.slots, lag=self.lag)
