"""Start a service: find the context that fits the memory, and compile every program before the first request."""

import logging
from collections.abc import Sequence
from math import lcm
from pathlib import Path

import jax

from tessera.core.memory import available_bytes, require
from tessera.core.mesh import MeshShape, mesh_of, num_head_parts
from tessera.core.shapes import round_up
from tessera.generate import Model
from tessera.models.footprint import Types, cache_bytes
from tessera.runtime.engine import Engine
from tessera.runtime.pool import Paging
from tessera.runtime.sampling import Sampling
from tessera.runtime.step import require_room
from tessera.serve.api.protocol import ChatBody
from tessera.serve.api.schema import Refusal
from tessera.serve.api.tools import encode
from tessera.serve.edge.parsing import parse
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
"""Sampling parameters for the warm-up: alone and mixed in one batch, they use every sampling program."""
SIZES = {"cpu": (64, 64, (256, 128)), "gpu": (64, 256, (4096, 1024)), "tpu": (128, 256, (4096, 1024))}
"""Platform -> (tokens per page, tokens of the smallest prefill program, tokens of the larger prefill programs). The
second number is the unit: every prefill starts at a multiple of it."""
SHARE = {True: 0.25, False: 0.8}
"""Whether the device is a CPU -> maximum share of the free memory that a pool takes. It is smaller on a CPU, whose
memory other programs use too."""
BATCHES = (4, 16, 64)
"""Batch sizes of decode programs, in addition to 1 and the number of slots."""


def context_that_fits(model: Model, wanted: int | None) -> int:
    """Return the maximum number of tokens of a request: `wanted`, or the model's context, halved until its keys fit."""
    limit = model.config.max_positions
    if wanted is not None and wanted > limit:
        raise ValueError(f"--context {wanted} exceeds the model's context of {limit} tokens: use at most {limit}")
    context = wanted or limit
    while True:
        try:
            require_room(
                model.params, model.config, batch=1, num_keys=context, num_tokens=context, kv_dtype=model.kv_dtype
            )
            return context
        except MemoryError:
            if wanted is not None or context <= 512:
                raise
            context //= 2
            logger.info("the keys of a longer request do not fit in memory: trying a limit of %d tokens", context)


def paging_for(model: Model, *, slots: int, context: int, pages: int | None = None, exact: bool = False) -> Paging:
    """Return the sizes of the engine's pages, page pool and programs.

    `pages` None allocates twice what `slots` requests of `context` tokens need, so that the keys of finished requests
    stay cached, but at most a share of the free memory (`SHARE`). With `exact`, there is only one prefill program and
    one decode program, so that no result depends on which requests run together.
    """
    device = jax.devices()[0]
    page, unit, sizes = SIZES.get(device.platform, SIZES["cpu"])
    unit = lcm(unit, model.policy.query_tile)
    sizes = (*(size for size in sizes if size % unit == 0 and size > unit), unit)
    division = MeshShape(heads=num_head_parts(mesh_of(model.params)))
    dtype = str(model.params.embed.dtype)
    size = cache_bytes(
        model.config, 1, page, types=Types(weights=dtype, dtype=dtype, cache=model.kv_dtype or dtype), division=division
    )
    one = round_up(context, unit) // page
    free = available_bytes(device)
    count = pages if pages is not None else 2 * slots * one
    if pages is None and free is not None:
        count = max(one, min(count, int(free * SHARE[device.platform == "cpu"]) // size))
    if count < one:
        raise ValueError(f"--pages {count} must be at least {one}, for one request of {context} tokens")
    require((count + 1) * size, [device], f"a pool of {count} pages", "use fewer --pages, or a smaller --context")
    batches = (slots,) if exact else decode_batches(slots)
    sizes = sizes[-1:] if exact else sizes
    return Paging(num_pages=count + 1, page=page, unit=unit, sizes=sizes, batches=batches)


def decode_batches(slots: int) -> tuple[int, ...]:
    return tuple(sorted({1, *(n for n in BATCHES if n < slots), slots}))


def grammars_for(model: Model) -> Grammars | None:
    if model.tokenizer is None or not model.config.eos_ids:
        return None
    return Grammars(model.tokenizer, model.config.vocab_size, model.config.eos_ids)


def pinned(model: Model, files: Sequence[Path], context: int, unit: int) -> list[list[int]]:
    """Read the files of `--pin`, whose keys are to stay in the cache, and return the token ids of each.

    A .json file holds the body of a chat completion: "messages" and perhaps "tools". Any other file holds plain text.
    """
    found = []
    for file in files:
        try:
            tokens = _pinned(model, file)
        except (ValueError, Refusal) as error:
            raise ValueError(f"--pin {file}: {error}") from error
        if not unit <= len(tokens) <= context:
            raise ValueError(
                f"--pin {file} has {len(tokens):,} tokens, but needs at least {unit}, whose keys are kept together, "
                f"and at most {context} (--context): pin another file, or change --context"
            )
        found.append(tokens)
    return found


def _pinned(model: Model, file: Path) -> list[int]:
    """Return the token ids of one file, exactly as a request with its text has them."""
    try:
        text = file.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text: convert the file to UTF-8") from error
    if file.suffix != ".json":
        return model.encode_prompt(text, "the text")
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, which a conversation needs: leave out --pin")
    body = parse(ChatBody, text.encode())
    return encode(model.tokenizer, [message.plain() for message in body.messages], body.offered)


def start(
    model: Model,
    *,
    context: int,
    slots: int,
    queue: int,
    paging: Paging | None = None,
    pins: Sequence[Sequence[int]] = (),
    tenants: Sequence[str] = ("",),
) -> Service:
    """Start a service, which refuses requests until it has compiled its programs and pinned the prefixes `pins`."""
    paging = paging_for(model, slots=slots, context=context) if paging is None else paging
    kept = sum(len(tokens) // paging.unit for tokens in pins) * (paging.unit // paging.page) * len(tenants)
    most = paging.num_pages - 1 - round_up(context, paging.unit) // paging.page
    if kept > most:
        raise ValueError(
            f"--pin keeps {kept} pages ({len(tenants)} times, once per API key), but besides the pages for a request "
            f"of {context} tokens, the pool has {most}: use more --pages, a smaller --context or shorter files"
        )

    def build() -> Engine:
        return model.engine(slots=slots, num_keys=context, paging=paging)

    def warm(engine: Engine) -> None:
        count = engine.warm(SAMPLINGS, extras=True)
        held = (paging.num_pages - 1) * paging.page
        logger.info(
            "ready: %d programs, %d requests at a time, %d tokens each, room for keys of %d tokens",
            count,
            slots,
            context,
            held,
        )

    def prepare(engine: Engine) -> None:
        for tenant in tenants:
            for tokens in pins:
                logger.info("pinned the keys of %d tokens", engine.pin(tokens, tenant))

    service = Service(build, queue=queue, metrics=Metrics(), shared=len(tenants) > 1)
    service.start(warm, prepare)
    return service
