"""The generation loop: submit requests, step, cancel. Requests join and leave between steps.

    engine = model.engine(slots=4)
    first = engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=16))
    while engine.busy:
        for event in engine.step():
            ...

An engine has one lane (`lane.py`), which runs all requests over one pool of keys. In both layouts of the pool, a
token's policy depends only on its position: prefill runs the tokens below the plan's cross-over
(`Plan.crossover_tokens`) dense and the others under the plan; decode has its own cross-over. An engine is not
thread-safe.
"""

import logging
import time
from collections import abc
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
from tessera.runtime.pool import PagePool, Paging
from tessera.runtime.requests import End, Event, Failure, PoolState, Request, Token, check_tokens
from tessera.runtime.row_pool import RowPool, RowPrefix
from tessera.runtime.sampling import Method, Sampling
from tessera.runtime.scheduler import Scheduler
from tessera.runtime.sequence import Sequence
from tessera.runtime.step import require_room
from tessera.runtime.stored import StoredPrefix
from tessera.sparse.contract import Policy

logger = logging.getLogger(__name__)

LAG = 2
"""Number of steps that an accelerator runs ahead of the host: the host reads finished tokens instead of waiting."""


class Engine:
    """Generates the answers of many requests together, step by step.

    After an exception, such as the KeyboardInterrupt of Ctrl-C, the cache may have been donated to a program and be
    unusable: collect partial answers with `cancel`, then discard the engine. `step` does not raise an error that
    concerns a single request; it returns a `Failure` event.

    Args:
        tokenizer: the model's tokenizer; with None, answers have tokens and no text.
        slots: how many requests run at the same time; None means as many as wait in the first step.
        num_keys: minimum number of keys to allocate per row. The pool grows for a request that needs more, and JAX then
            compiles new programs.
        sizes: lengths of prefill chunks, descending multiples of the policy's query tile; None uses
            `compilation.chunk_sizes`.
        lag: number of decode steps that the device runs ahead of the host. None means LAG on accelerators and 0 on a
            CPU, where a step past the end of an answer takes as much time as any other step.
        kv_dtype: dtype of cached keys and values: "int8", or None for the dtype of the weights.
        paging: sizes of a pool that keeps keys in pages, or None for one row per request. With pages, prompts with a
            common prefix share keys, `num_keys` is the maximum number of keys per request, and `slots` is required.
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
        sizes: abc.Sequence[int] | None = None,
        lag: int | None = None,
        kv_dtype: str | None = None,
        paging: Paging | None = None,
    ):
        if slots is not None and slots < 1:
            raise ValueError(f"{slots=} must be at least 1, or None")
        self.params, self.config, self.policy, self.tokenizer = params, config, policy, tokenizer
        self.slots, self.num_keys, self.sizes, self.kv_dtype = slots, num_keys, sizes, kv_dtype
        self.lag = (0 if jax.default_backend() == "cpu" else LAG) if lag is None else lag
        self.paging = paging
        if paging is not None and slots is None:
            raise ValueError("slots=None: an engine with pages needs a fixed number of slots, such as slots=16")
        self.lane: Lane | None = None
        self._waiting: list[Sequence] = []  # for the next step
        self._open: dict[int, Sequence] = {}
        self._submitted = 0

    @property
    def busy(self) -> bool:
        return any(sequence.open for sequence in self._open.values())

    @property
    def num_waiting(self) -> int:
        waiting = (*self._waiting, *(() if self.lane is None else self.lane.waiting))
        return sum(sequence.open for sequence in waiting)

    @property
    def pool_state(self) -> PoolState | None:
        """How full the pool is; None before a request or `warm` has opened it."""
        return None if self.lane is None else self.lane.state()

    @property
    def scheduler(self) -> Scheduler | None:
        """The lane's scheduler; None before a request or `warm` has opened the lane."""
        return None if self.lane is None else self.lane.scheduler

    def policies_of(self, prompt_tokens: int, new_tokens: int) -> set[Policy]:
        """Return the policies under which an answer's first and last token were chosen."""
        unit = self.lane.pool.unit if self.paging is None else self.paging.unit
        last = [self.policy.decode_at(prompt_tokens + new_tokens - 2, unit)] if new_tokens > 1 else []
        return {self.policy.at_position(prompt_tokens - 1, unit), *last}

    def submit(self, request: Request, *, started_s: float | None = None) -> int:
        """Queue a request and return its id.

        Time to first token is measured from `started_s`, a value of time.perf_counter(); None means now.

        Raises:
            ValueError: the request does not fit the model (prompt, tokens, `stop` without a tokenizer), leaves no token
                to choose, or its guide raises it.
        """
        check_tokens(request.prompt, self.config, "the prompt")
        if request.stop and self.tokenizer is None:
            raise ValueError(f"stop={request.stop} needs a tokenizer, and this model has none: leave stop empty")
        room = self.config.max_positions - len(request.prompt) + 1  # the last token is never fed back
        limit = min(request.max_new_tokens, room)
        eos_ids = (*(() if request.ignore_eos else self.config.eos_ids), *request.ends)
        options = {"shown": request.shown, "min_tokens": request.min_tokens}
        answer = Answer(len(request.prompt), limit, eos_ids, request.stop, self.tokenizer, **options)
        started_s = time.perf_counter() if started_s is None else started_s
        guide = None if request.guide is None else request.guide()
        sequence = Sequence(
            id=self._submitted,
            tenant=request.tenant,
            arrived_s=started_s,
            deadline_s=None if request.deadline_s is None else started_s + request.deadline_s,
            prompt_tokens=len(request.prompt),
            request=request,
            answer=answer,
            guide=guide,
        )
        check_bias(sequence, self.config.vocab_size)
        sequence.guided = None if guide is None else guided_bias(sequence)
        self._submitted += 1
        self._open[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence.id

    def step(self) -> list[Event]:
        """Decode one token of every request that is answering, prefill part of the others, and return the new events.

        Every request ends with one End or Failure event, unless it is cancelled.
        """
        interrupt.check()
        self._open = {id: sequence for id, sequence in self._open.items() if sequence.open}
        events: list[Event] = []
        waiting, self._waiting = [sequence for sequence in self._waiting if sequence.open], []
        if self.lane is None and waiting:
            events += self._open_lane(waiting)
        if self.lane is not None:
            for sequence in waiting:
                if sequence.open:
                    self.lane.add(sequence)
            self.lane.advance()
            events += self.lane.collect()
        return events

    def cancel(self, id: int) -> Generation:
        """Drop a request and return its partial answer, whose finish_reason is "interrupted".

        If the request ended in the last step, return its complete answer with the finish_reason of that end; if before,
        raise KeyError.
        """
        sequence = self._open.pop(id)
        sequence.dropped = True
        return sequence.answer.generation(sequence.arrived_s)

    def drain(
        self, stream: abc.Callable[[int, str], Any] | None = None, progress: abc.Callable[[int, int], Any] | None = None
    ) -> abc.Iterator[End]:
        """Step until every request has ended; yield the End event of each.

        Args:
            stream: called with (request id, piece of text) as soon as the piece is final.
            progress: called after each step until all prompts are prefilled, with (prompt tokens prefilled so far,
                prompt tokens to prefill in total), both summed over the requests that were open at the start.

        Raises:
            ValueError, MemoryError: the error of the first request that fails. The other requests stay open.
        """
        asked = [sequence for sequence in self._open.values() if sequence.open]
        done, total = 0, 1
        while self.busy:
            events = self.step()
            if progress is not None and done < total:
                done, total = (sum(counts) for counts in zip(*(sequence.prefilled for sequence in asked)))
                progress(done, total)
            for event in events:
                match event:
                    case Token() if stream is not None and event.text:
                        stream(event.id, event.text)
                    case End():
                        yield event
                    case Failure():
                        raise event.error

    def pin(self, tokens: abc.Sequence[int], tenant: str = "") -> int:
        """Prefill a prefix, cut to whole units (`Paging.unit`), and keep its keys for as long as the engine lives.

        Return the number of tokens whose keys are kept. Raise ValueError if the engine has no pages or the prefix is
        not a valid prompt, and MemoryError if the pool is too small.
        """
        if self.paging is None:
            raise ValueError("paging=None: only an engine with pages can pin a prefix; pass `paging`")
        self.submit(Request(prompt=tokens, max_new_tokens=1, tenant=tenant))
        for _ in self.drain():
            pass
        return self.lane.pin(tokens, tenant)

    def close(self) -> None:
        if self.lane is not None:
            self.lane.prefix.close()

    def warm(self, samplings: abc.Iterable[Sampling] = (Sampling(),), *, extras: bool = False) -> int:
        """Compile every program that requests of up to `num_keys` keys use; return the number of programs.

        Args:
            samplings: sampling parameters of later requests. Programs are compiled for all mixtures of them in one
                batch, but values that need the same optional steps (`Sampling.method`) share a program.
            extras: also compile the programs for requests with `bias`, `guide`, `top_logprobs` or `prompt_logprobs`.
        """
        if self.busy:
            raise ValueError("some requests are unfinished: call warm before submit, or after all requests have ended")
        found: set[Method] = set()  # of every mixture
        for sampling in samplings:
            found |= {sampling.method} | {method | sampling.method for method in found}
        if extras:
            found |= {method | Method(extra=True) for method in found}
        if self.lane is None:
            self.lane = self._make_lane(self.slots or 1, self.num_keys, self.num_keys)
        return self.lane.warm(found, extras=extras)

    def _open_lane(self, waiting: abc.Iterable[Sequence]) -> list[Event]:
        """Open the lane for the requests that fit in memory: fail the longest one until the rest fits."""
        failures, left = [], sorted(waiting, key=lambda sequence: sequence.answer.num_keys)
        while left and self.lane is None:
            num_tokens = max(sequence.prompt_tokens for sequence in left)
            try:
                self.lane = self._make_lane(self.slots or len(left), left[-1].answer.num_keys, num_tokens)
            except MemoryError as error:
                failures.append(fail(left.pop(), error))
                continue
            longest, pool = left[-1].answer.num_keys, self.lane.pool
            used = {pool.policy_at(num_tokens - 1).name, pool.decode_policy_at(longest - 1).name}
            if self.policy.name not in used:
                names = used.pop(), self.policy.name
                logger.info(
                    "requests of up to %d tokens are below the cross-over: attention is %s, not %s", longest, *names
                )
        return failures

    def _make_lane(self, slots: int, num_keys: int, num_tokens: int) -> Lane:
        """Make a lane for requests of at most `num_keys` keys; raise MemoryError if the keys do not fit in memory."""
        model = self.params, self.config, self.policy
        if self.paging is not None:
            pool = PagePool(*model, context=self.num_keys, paging=self.paging, kv_dtype=self.kv_dtype)
            return Lane(pool, StoredPrefix(pool), slots=slots, lag=self.lag)
        num_keys = max(num_keys, self.num_keys)
        sizes = {"num_keys": num_keys, "kv_dtype": self.kv_dtype}
        require_room(self.params, self.config, batch=slots, num_tokens=num_tokens, **sizes)
        rows = RowPool(*model, rows=slots, sizes=self.sizes, **sizes)
        return Lane(rows, RowPrefix(rows), slots=slots, lag=self.lag)
