"""Start a service: find the context that fits the memory, and compile every program before the first request."""

import logging

from tessera.generate import Model
from tessera.runtime.engine import Engine
from tessera.runtime.sampling import Sampling
from tessera.runtime.step import require_room
from tessera.serve.grammar import Grammars
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service

logger = logging.getLogger(__name__)

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(repetition_penalty=1.1),
)
"""Sampling parameters whose mixtures, one per batch, together need every sampling program."""


def context_that_fits(model: Model, slots: int, wanted: int | None) -> int:
    """Return the maximum tokens of a request: `wanted`; if None, the model's context, halved until the caches fit.

    Args:
        model: the model to serve.
        slots: number of requests that run at a time under each policy.
        wanted: maximum tokens of prompt and answer together.

    Raises:
        ValueError: `wanted` exceeds the model's context.
        MemoryError: the caches do not fit for `wanted` tokens or, if that is None, even for 512 or fewer.
    """
    limit = model.config.max_positions
    if wanted is not None and wanted > limit:
        raise ValueError(f"--context {wanted} exceeds the model's context of {limit}: name at most {limit}")
    context = wanted or limit
    while True:
        try:
            policies = {model.policy.at_length(n) for n in (1, context)}  # each has a cache
            size = {"batch": slots * len(policies), "num_keys": context, "num_tokens": context, "cache": model.cache}
            require_room(model.params, model.config, **size)
            return context
        except MemoryError:
            if wanted is not None or context <= 512:
                raise
            context //= 2
            logger.info("caches for %d requests do not fit: a request may have %d tokens", slots, context)


def grammars_for(model: Model) -> Grammars | None:
    """Return a compiler of grammars for the model; None if it has no tokenizer or no token that ends an answer."""
    if model.tokenizer is None or not model.config.eos_ids:
        return None
    return Grammars(model.tokenizer, model.config.vocab_size, model.config.eos_ids)


def start(model: Model, *, context: int, slots: int, queue: int) -> Service:
    """Start a service, which refuses requests until it has compiled its programs.

    Args:
        model: the model to serve.
        context: maximum tokens of a request, prompt and answer together.
        slots: number of requests that run at a time under each policy.
        queue: maximum number of requests that wait for a slot.
    """

    def build() -> Engine:
        return model.engine(slots=slots, num_keys=context, together=False)

    def warm(engine: Engine) -> None:
        count = engine.warm(SAMPLINGS, extras=True)
        logger.info("ready: %d programs, %d requests at a time, %d tokens each", count, slots, context)

    service = Service(build, queue=queue, metrics=Metrics())
    service.start(warm)
    return service
