"""The pool that holds the keys and values of many sequences, and the programs that fill and read it.

One kind of program prefills the next tokens of one sequence; the other decodes one token for each of a few sequences.
A pool has one of two layouts. Here, sequences have pages anywhere in the pool, and programs take the page numbers as an
argument, so the same program runs wherever they are. In `row_pool.RowPool`, each sequence has one contiguous row.

The policy of a token depends only on its position and on whether prefill or decode runs it. The keys in a page
therefore depend only on the model, the policy and the tokens up to the end of the page, and sequences that begin alike
can share pages.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from tessera.core.files import sources
from tessera.core.mesh import mesh_of, num_stripes, put
from tessera.core.shapes import ceil_div, round_up
from tessera.models.cache import Cache
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint
from tessera.models.layers import Params
from tessera.models.pages import NULL, page_table
from tessera.runtime.prefix import salt
from tessera.runtime.prompt_scores import score_prompt_rows
from tessera.runtime.scheduler import Order
from tessera.runtime.step import Rows, allocate, decode_token, prefill_chunk, read_head, read_page, write_page
from tessera.sparse.contract import Policy, Reads


@dataclass(frozen=True, kw_only=True)
class Paging:
    """Sizes of a pool and of its programs.

    Attributes:
        num_pages: number of pages, including the null page (`pages.NULL`), which padding uses.
        page: number of positions per page.
        unit: prefills start at multiples of `unit` positions. It is a multiple of `page` and of the policy's query
            tile. The policy's cross-over to sparse attention is rounded up to a multiple of `unit`.
        sizes: numbers of rows of the prefill programs: descending multiples of `unit`, of which the last is `unit`.
        batches: numbers of sequences of the decode programs, ascending.
        spill: folder that stores pages that the prefix cache evicts (`spill.Spill`); None drops these pages.
        spill_bytes: maximum size of the folder in bytes.
    """

    num_pages: int
    page: int = 64
    unit: int = 64
    sizes: tuple[int, ...] = (512, 64)
    batches: tuple[int, ...] = (1, 4, 16)
    spill: Path | None = None
    spill_bytes: int = 8 << 30

    def __post_init__(self):
        if self.page < 1 or self.unit % self.page:
            raise ValueError(f"unit={self.unit} must be a multiple of page={self.page}, which must be at least 1")
        if not self.sizes or any(size % self.unit for size in self.sizes) or self.sizes[-1] != self.unit:
            raise ValueError(f"sizes={self.sizes} must be multiples of unit={self.unit}, and the last must be the unit")
        if list(self.sizes) != sorted(set(self.sizes), reverse=True):
            raise ValueError(f"sizes={self.sizes} must be in descending order, each once")
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches={self.batches} must be positive numbers in ascending order, each once")

    def check(self, policy: Policy) -> None:
        """Raise ValueError if a prefill could end inside a query tile of the policy."""
        if self.unit % policy.query_tile:
            raise ValueError(f"unit={self.unit} must be a multiple of the policy's query tile {policy.query_tile}")


class Pool(ABC):
    """Keys and values of many sequences on the device; subclasses lay them out.

    Attributes:
        unit, sizes, batches, page: as in `Paging`.
        width: maximum pages of a sequence.
        order: order in which a lane over this pool prefills requests (`Scheduler`).
        stripe: positions per stripe, if devices share every sequence's keys (`attention.context`); else None.
    """

    unit: int
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    page: int
    width: int
    order: Order
    stripe: int | None = None

    def __init__(self, params: Params, config: ModelConfig, policy: Policy):
        self.params, self.config, self.policy = params, config, policy
        self.mesh, self.dtype = mesh_of(params), str(params.embed.dtype)

    @property
    def context(self) -> int:
        return self.width * self.page

    def policy_at(self, position: int) -> Policy:
        return self.policy.at_position(position, self.unit)

    def decode_policy_at(self, position: int) -> Policy:
        return self.policy.decode_at(position, self.unit)

    def boundary(self, position: int, end: int) -> int:
        """Return the first position after `position` and before `end` where another policy begins, or `end`."""
        policy, unit = self.policy_at(position), self.unit
        starts = range(position - position % unit + unit, end, unit)
        return next((start for start in starts if self.policy_at(start) != policy), end)

    @abstractmethod
    def size_for(self, start: int, left: int, room: int) -> int:
        """Return the number of rows of the program that prefills next, from position `start` on.

        `left` tokens remain up to the end of the prompt or the next boundary. The result is at most `room`, unless the
        smallest program has more rows.
        """

    @abstractmethod
    def require(self, num_keys: int, num_tokens: int) -> None:
        """Raise MemoryError unless `num_keys` keys and a prompt of `num_tokens` tokens fit into the empty pool."""

    @abstractmethod
    def prefill(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], size: int, policy: Policy | None = None
    ) -> tuple[Rows, Reads | None]:
        """Prefill tokens of one sequence and write their keys and values; return hidden states and key counts.

        Args:
            tokens: at most `size` tokens, all of which have the same policy.
            start: position of the first token, a multiple of `unit`.
            pages: all pages of the sequence in order of position, with room for the tokens.
            size: number of rows of the program: one of `sizes`.
            policy: None takes the policy of the position.
        """

    @abstractmethod
    def seats(self, pages: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """Return the batch of the program that decodes sequences with these pages, and each sequence's index in it."""

    @abstractmethod
    def decode(
        self, policy: Policy, token_B: Array, position: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Feed one token to each of `len(pages)` sequences; return next-token logits and key counts.

        The tokens are in `token_B` at the sequences' `seats`; the rest of the batch is padding.
        """

    @abstractmethod
    def save(self, pages: Sequence[int]) -> list[Cache]:
        """Copy pages to the host."""

    @abstractmethod
    def restore(self, pages: Sequence[int], saved: Sequence[Cache]) -> None:
        """Overwrite pages with the copies that `save` returned, in the same order."""

    def examples(self) -> list[tuple[list[tuple[int, int]], list[int]]]:
        """Return the steps to time for `LinearCosts.fit`, each as the arguments (prefill, decode) of `Costs.step_s`."""
        prefills = [[(start, size)] for size in self.sizes for start in dict.fromkeys((0, self.context - size))]
        decodes = [[keys] * batch for batch in self.batches for keys in dict.fromkeys((1, self.context))]
        return [(prefill, []) for prefill in prefills] + [([], decode) for decode in decodes]

    def time(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        began_s = time.perf_counter()
        for start, size in prefill:
            self.prefill([0] * size, start, [], size)
        if decode:
            token = put(np.zeros(len(decode), np.int32), self.mesh)
            policy = self.decode_policy_at(decode[0] - 1)
            self.decode(policy, token, [keys - 1 for keys in decode], [[]] * len(decode))
        jax.block_until_ready(self.cache)
        return time.perf_counter() - began_s

    def warm(self, *, scores: bool = True) -> int:
        """Run every program once, without sequences, and those that score prompts if asked; return their number."""
        count = 0
        for policy, start in self._each_policy(self.policy_at):
            for size in self.sizes:
                if start + self.unit <= self.context and size <= self.context:
                    rows, _ = self.prefill([], min(start, self.context - size), [], size, policy)
                    count += 1
                    if scores:
                        score_prompt_rows(self.params, rows.hidden, np.zeros(size, np.int32))
        count += len(self.sizes) if scores else 0
        for policy, _ in self._each_policy(self.decode_policy_at):
            for batch in self.batches:
                self.decode(policy, put(np.zeros(batch, np.int32), self.mesh), [], [])
            count += len(self.batches)
        read_head(self.params, rows.last)
        count += 1 + self._warm_copies()
        jax.block_until_ready(self.cache)
        return count

    def _fill(self, cache: Cache, tokens, start: int, size: int, policy: Policy | None, **how: bool):
        """Prefill a chunk into a cache of batch 1; return the cache, hidden states and key counts."""
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        where = np.array([start], np.int32), np.array([len(tokens)], np.int32)
        how |= {"config": self.config, "policy": policy or self.policy_at(start), "stripe": self.stripe}
        return prefill_chunk(self.params, cache, padded, *where, **how)

    def _feed(self, cache: Cache, policy: Policy, token_B: Array, position_B: np.ndarray, alive_B: np.ndarray):
        """Decode a token per sequence; return the cache, logits and a list of key counts."""
        how = {"config": self.config, "policy": policy, "stripe": self.stripe}
        cache, out, reads = decode_token(self.params, cache, token_B, position_B, alive_B, **how)
        return cache, out, [] if reads is None else [reads]

    def _warm_copies(self) -> int:
        self.restore([NULL], self.save([NULL]))
        return 2

    def _each_policy(self, policy_at) -> Iterator[tuple[Policy, int]]:
        """Yield each policy that a sequence can have, with a position that has it."""
        last = self.context - self.unit
        yield from {policy_at(start): start for start in (last, 0)}.items()


class PagePool(Pool):
    """Keys and values in pages, for sequences of at most `context` positions."""

    order = "edf"

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        context: int,
        paging: Paging,
        kv_dtype: str | None = None,
    ):
        super().__init__(params, config, policy)
        paging.check(policy)
        self.paging = paging
        self.unit, self.sizes, self.batches, self.page = paging.unit, paging.sizes, paging.batches, paging.page
        if num_stripes(self.mesh) > 1:
            raise ValueError(
                f"the mesh axis `context` has {num_stripes(self.mesh)} devices, but a page cannot be split over them: "
                "use a mesh that splits only heads, such as 4x1"
            )
        self.width = ceil_div(round_up(context, paging.unit), paging.page)
        sizes = {"batch": paging.num_pages, "num_keys": paging.page, "kv_dtype": kv_dtype}
        self.cache = allocate(params, config=config, **sizes)

    def salt(self) -> bytes:
        return salt(
            weights=fingerprint(self.params, self.config),
            plan=repr(self.policy),
            dtype=f"{self.dtype} {jax.tree.leaves(self.cache)[0].dtype}",
            unit=self.unit,
            crossover=self.boundary(0, self.context),
            # `dispatch` chooses kernels and their configs by the device, the sizes and the tables among the sources.
            kernels={"device": jax.devices()[0].device_kind, "rows": str(self.sizes), "keys": str(self.width)},
            code=f"{sources()} jax {jax.__version__}",
        )

    def size_for(self, start: int, left: int, room: int) -> int:
        return next((size for size in self.sizes if size <= room and size < 2 * left), self.unit)

    def require(self, num_keys: int, num_tokens: int) -> None:
        size = self.paging.num_pages - 1
        need = ceil_div(num_keys, self.page)
        if need <= size and need <= self.width:
            return
        cause = "pages" if size < self.width else "keys per request"
        raise MemoryError(
            f"prompt and answer need {num_keys} keys, but a request may have {min(size, self.width) * self.page}: "
            f"shorten one of them, or allow more {cause}"
        )

    def prefill(self, tokens, start, pages, size, policy=None):
        cache, rows, reads = self._fill(self._paged([pages]), tokens, start, size, policy)
        self.cache = cache._replace(pages=None)
        return rows, reads

    def seats(self, pages):
        return next(size for size in self.batches if size >= len(pages)), list(range(len(pages)))

    def decode(self, policy, token_B, position, pages):
        batch, count = token_B.shape[0], len(pages)
        position_B = np.zeros(batch, np.int32)
        position_B[:count] = position
        cache = self._paged([*pages, *[()] * (batch - count)])
        cache, out, reads = self._feed(cache, policy, token_B, position_B, np.arange(batch) < count)
        self.cache = cache._replace(pages=None)
        return out, reads

    def save(self, pages):
        return [jax.tree.map(np.asarray, read_page(self.cache, np.int32(page))) for page in pages]

    def restore(self, pages, saved):
        for page, part in zip(pages, saved, strict=True):
            self.cache = write_page(self.cache, part, np.int32(page))

    def _paged(self, rows: Sequence[Sequence[int]]) -> Cache:
        return self.cache._replace(pages=put(page_table(rows, self.width), self.mesh))
