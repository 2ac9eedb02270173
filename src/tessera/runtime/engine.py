"""The generation loop: submit requests, step, cancel. Requests join and leave between steps.

    engine = model.engine(slots=4)
    first = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=16))
    while engine.busy:
        for event in engine.step():
            ...

A request shorter than the cross-over (`Plan.crossover_tokens`) uses dense attention; every other request uses the
engine's policy. The requests of each policy form a lane (`lane.py`), so there are at most two lanes. With pages, all
requests form one lane (`paged_lane.py`). An engine is not thread-safe.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from tessera.core import interrupt
from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.models.text.tokenizer import Tokenizer
from tessera.runtime.answers import Answer, Generation
from tessera.runtime.bias import check_bias, guided_bias
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
"""Number of steps that an accelerator runs ahead of the host: the host reads finished tokens instead of waiting."""


class Engine:
    """Generates the answers of many requests together, step by step.

    After an exception, such as the KeyboardInterrupt of Ctrl-C, the caches may have been donated to a program and be
    unusable: collect partial answers with `cancel`, then discard the engine. `step` does not raise an error that
    concerns a single request; it returns a `Failure` event.

    Args:
        params, config, policy: the model's weights, config and attention policy.
        tokenizer: the model's tokenizer; with None, answers have tokens and no text.
        slots: number of rows of each lane, which is how many requests it runs at the same time. None gives a lane one
            row for each request that waits when the lane opens.
        num_keys: minimum number of keys to allocate per row. The cache grows for a request that needs more, and JAX
            then compiles new programs.
        sizes: lengths of prefill chunks, descending multiples of the policy's query tile. None uses the result of
            `compilation.chunk_sizes`, usually 1,024, 256 and 64.
        lag: number of decode steps that the device runs ahead of the host. None means LAG on accelerators and 0 on a
            CPU, where a step past the end of an answer takes as much time as any other step.
        cache: dtype of cached keys and values: "int8", or None for the dtype of the weights.
        together: whether to prefill prompts in one batch when enough of them wait to fill all rows of a lane. A server
            switches this off: it then compiles half as many programs, and its prompts seldom arrive together.
        paging: sizes of a pool that keeps keys in pages, or None for a cache without pages. With pages, all requests
            share one lane, prompts with a common prefix share keys, and the policy of a token depends only on its
            position. `num_keys` is then the maximum number of keys per request, and `slots` is required.

    Raises:
        ValueError: `slots` is below 1, or None although there is `paging`.
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
            raise ValueError("slots=None: an engine with pages needs a fixed number of rows, such as slots=16")
        self.lanes: dict[Policy, Lane | PagedLane] = {}
        self._waiting: list[Ticket] = []
        self._tickets: dict[int, Ticket] = {}
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return any(ticket.open for ticket in self._tickets.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that are waiting for a row."""
        queues = (self._waiting, *(lane.waiting for lane in self.lanes.values()))
        return sum(ticket.open for queue in queues for ticket in queue)

    @property
    def pool_state(self) -> PoolState | None:
        """How full the pool of pages is; None without pages, or before a request or `warm` has opened the pool."""
        lane = self.lanes.get(self.policy)
        return lane.state() if isinstance(lane, PagedLane) else None

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the pool of pages; None without pages, or before a request or `warm` has opened the pool."""
        lane = self.lanes.get(self.policy)
        return lane.scheduler if isinstance(lane, PagedLane) else None

    def policy_of(self, num_keys: int) -> Policy:
        """Return the policy of a request that caches `num_keys` keys; with pages, the policy of the last key."""
        if self.paging is None:
            return self.policy.at_length(num_keys)
        return self.policy.at_position(num_keys - 1, self.paging.unit)

    def submit(self, request: Request, *, started_s: float | None = None) -> int:
        """Queue a request and return its id.

        Args:
            request: the request, which gets a row in the first step in which a row is free for it.
            started_s: value of time.perf_counter() from which the time to first token is measured; None means now.

        Raises:
            ValueError: the prompt is empty or longer than the context, a token of the prompt, of `bias` or of `allowed`
                is outside the vocabulary, these and `min_tokens` leave no token, the request has `stop` texts but the
                engine has no tokenizer, the request has `prompt_logprobs` but the engine has no pages, or the request's
                guide raises ValueError.
        """
        check_tokens(request.prompt, self.config, "the prompt")
        if request.stop and self.tokenizer is None:
            raise ValueError(f"stop={request.stop} needs a tokenizer, and this model has none: leave stop empty")
        if request.prompt_logprobs is not None and self.paging is None:
            raise ValueError(
                f"prompt_logprobs={request.prompt_logprobs} needs an engine with pages: pass `paging` to the engine"
            )
        room = self.config.max_positions - len(request.prompt) + 1  # the last token is never fed back
        limit = min(request.max_new_tokens, room)
        eos_ids = (*(() if request.ignore_eos else self.config.eos_ids), *request.ends)
        options = {"shown": request.shown, "min_tokens": request.min_tokens}
        answer = Answer(len(request.prompt), limit, eos_ids, request.stop, self.tokenizer, **options)
        started_s = time.perf_counter() if started_s is None else started_s
        guide = None if request.guide is None else request.guide()
        ticket = Ticket(id=self._submitted, request=request, answer=answer, started_s=started_s, guide=guide)
        check_bias(ticket, self.config.vocab_size)
        ticket.guided = None if guide is None else guided_bias(ticket)
        self._submitted += 1
        self._tickets[ticket.id] = ticket
        self._waiting.append(ticket)
        return ticket.id

    def step(self) -> list[Event]:
        """Run each lane once and return the new events.

        A lane decodes one token of every request that is answering, and prefills part of the prompts that are joining.
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

        If the request ended in the last step, return its complete answer with the finish_reason of that end.

        Raises:
            KeyError: no request has this id, or the request ended before the last step.
        """
        ticket = self._tickets.pop(id)
        ticket.dropped = True
        return ticket.answer.generation(ticket.started_s)

    def drain(
        self, stream: Callable[[int, str], Any] | None = None, progress: Callable[[int, int], Any] | None = None
    ) -> Iterator[End]:
        """Step until every request has ended; yield the End event of each.

        Args:
            stream: called with (request id, piece of text) as soon as the piece is final.
            progress: called after each step until all prompts are prefilled, with (prompt tokens prefilled so far,
                prompt tokens to prefill in total), both summed over the requests that were open at the start.

        Raises:
            ValueError, MemoryError: the error of the first request that fails. The other requests stay open.
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
        """Prefill a prefix, cut to whole chunks, under the engine's policy, and keep its keys in a row.

        Set `Request.held` to the result: the prefill of that request then starts after the prefix. The row still counts
        as free. If a request with another prefix takes the row, the keys are lost, and later requests with this `held`
        prefill the prefix again.

        Raises:
            ValueError: the engine has pages, no row is free, or the prefix is empty, too long or has a wrong token.
            MemoryError: the prefix does not fit in memory.
        """
        check_tokens(tokens, self.config, "the prefix")
        lane = self.lanes.get(self.policy) or self._open(self.policy, self.slots or 1, len(tokens), len(tokens))
        return lane.hold(tokens)

    def pin(self, tokens: Sequence[int], tenant: str = "") -> int:
        """Prefill a prefix and keep its keys in the pool for as long as the engine lives.

        The prefix is cut to a multiple of `Paging.unit` tokens. Return the number of tokens whose keys are kept.

        Raises:
            ValueError: the engine has no pages, or the prefix is empty, too long or has a wrong token.
            MemoryError: the pool is too small.
        """
        if self.paging is None:
            raise ValueError("paging=None: only an engine with pages can pin a prefix; without pages, use hold")
        self.submit(Request(prompt=tokens, max_new_tokens=1, tenant=tenant))
        for _ in self.drain():
            pass
        return self.lanes[self.policy].pin(tokens, tenant)

    def close(self) -> None:
        """Write the prefix cache to disk, if the engine has a folder for it (`Paging.spill`)."""
        for lane in self.lanes.values():
            if isinstance(lane, PagedLane):
                lane.close()

    def warm(self, samplings: Iterable[Sampling] = (Sampling(),), *, joins: bool = True, extras: bool = False) -> int:
        """Compile every program that requests of up to `num_keys` keys use; return the number of programs.

        Each program runs once, on empty rows.

        Args:
            samplings: sampling parameters that later requests will have. Programs are compiled for all mixtures of
                them in one batch, but values that need the same optional steps (`Sampling.method`) share a program.
            joins: also compile the programs for requests that join while others decode.
            extras: also compile the programs for requests with `bias`, `guide` or `top_logprobs`.

        Raises:
            ValueError: a request is unfinished.
        """
        if self.busy:
            raise ValueError("some requests are unfinished: call warm before submit, or after all requests have ended")
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
        """Hand new requests to the lanes of their policies and open missing lanes; return Failure events."""
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
        """Return the policy whose lane takes a request of `num_keys` keys."""
        return self.policy if self.paging is not None else self.policy.at_length(num_keys)

    def _open_for(self, policy: Policy, tickets: Sequence[Ticket]) -> list[Event]:
        """Open a lane for as many of the requests as fit in memory.

        Fail the longest request until the rest fits; return the Failure events.
        """
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
                logger.info(
                    "requests of up to %d tokens are below the cross-over: attention is %s, not %s", longest, *names
                )
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
