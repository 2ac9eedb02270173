"""A pool in which each sequence has one contiguous row, and the prefix cache of such a pool.

A row is a page as long as the longest sequence may be, so a lane needs no other rules for it. Contiguous keys suit
kernels that read no pages, tiles of one key, and meshes that split each sequence's keys over devices. A prefill fills a
copy of the row, which replaces the row before the row is decoded or another row is prefilled: a program over all rows
would compute and write every row. A pool of one row is filled in place.
"""

from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tessera.core import interrupt
from tessera.core.mesh import num_stripes, put
from tessera.core.shapes import round_up
from tessera.models.cache import Cache
from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.models.pages import Pages
from tessera.runtime.compilation import capacity_bucket, chunk_sizes
from tessera.runtime.pool import Pool
from tessera.runtime.prefix import Prefix
from tessera.runtime.step import (
    CHUNK,
    Rows,
    allocate,
    enlarge,
    read_head,
    read_page,
    require_room,
    score_hidden,
    sharing,
    spread_chunk,
    stripe_rows,
    write_page,
)
from tessera.sparse.contract import Policy, Reads


class RowPool(Pool):
    """Keys and values in rows. Page n is row n - 1.

    Requests are prefilled in order of arrival, in chunks as long as possible, so that the same prompts run the same
    programs on a quick machine and on a slow one. `num_keys` is the minimum to allocate per row; `require` allocates
    more, which compiles new programs. `sizes` and `kv_dtype` are as in `Engine`.
    """

    order = "fcfs"
    width = 1

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        rows: int,
        num_keys: int,
        sizes: Sequence[int] | None = None,
        kv_dtype: str | None = None,
    ):
        super().__init__(params, config, policy)
        self.rows, self.batches, self.kv_dtype = rows, (rows,), kv_dtype
        self.sharing = sharing(params, config)
        self.sizes = self._sizes(num_keys) if sizes is None else tuple(sizes)
        self.unit, self.stripe = self.sizes[-1], self._stripe()
        self.page = self.bucket(num_keys)
        sizes = {"batch": rows, "num_keys": self.page, "kv_dtype": kv_dtype}
        self.cache = allocate(params, config=config, stripe=self.stripe, **sizes)
        self._part: tuple[int, Cache] | None = None  # (row, its copy), which is newer than the row

    def _sizes(self, num_keys: int) -> tuple[int, ...]:
        parts = num_stripes(self.mesh)
        if parts > 1:  # a chunk is one stripe per device, so there is one size
            return (stripe_rows(self.policy.query_tile, parts) * parts,)
        sizes = chunk_sizes(self.policy.query_tile, CHUNK)
        large = spread_chunk(self.params, self.config, num_keys=num_keys, unit=sizes[0])
        return sizes if large is None else (large, *(size for size in sizes if size < large))

    def _stripe(self) -> int | None:
        parts = num_stripes(self.mesh)
        if parts == 1:
            return None
        if len(self.sizes) > 1 or self.sizes[0] % parts:
            raise ValueError(
                f"sizes={self.sizes} must be one chunk size, a multiple of {parts}, because {parts} devices share it"
            )
        return self.sizes[0] // parts

    def bucket(self, num_keys: int) -> int:
        """Return a row length for `num_keys` keys and the last chunk's padding: XLA shifts writes past the end."""
        size = capacity_bucket(round_up(num_keys, self.unit))
        return size if self.stripe is None else round_up(size, self.unit)

    def size_for(self, start: int, left: int, room: int) -> int:
        left = round_up(left, self.unit)  # only a last chunk of the smallest size holds padding
        return next((size for size in self.sizes if size <= min(room, left)), self.unit)

    def require(self, num_keys: int, num_tokens: int) -> None:
        grow = self.bucket(num_keys) > self.page
        copied = self.rows if grow else int(self.rows > 1)
        if copied:
            size = {"num_keys": max(num_keys, self.page), "num_tokens": num_tokens, "kv_dtype": self.kv_dtype}
            require_room(self.params, self.config, batch=copied, **size)
        if grow:
            self._flush()
            self.page = self.bucket(num_keys)
            self.cache = enlarge(self.cache, num_keys=self.page, stripe=self.stripe)

    def prefill(self, tokens, start, pages, size, policy=None):
        row, spread = pages[0] - 1 if pages else 0, self.stripe is None and self.sharing.by_rows(size)
        part, rows, reads = self._fill(self._take(row), tokens, start, size, policy, spread=spread)
        if self.rows == 1:
            self.cache = part
        else:
            self._part = row, part
        return rows, reads

    def run(self, tokens: Sequence[int], start: int = 0, page: int = 1) -> Iterator[tuple[int, Rows, Reads | None]]:
        """Prefill a whole prompt from position `start` on; yield each chunk's number of tokens, rows and key counts."""
        while start < len(tokens):
            interrupt.check()
            left = self.boundary(start, len(tokens)) - start
            size = self.size_for(start, left, self.sizes[0])
            count = min(size, left)
            yield count, *self.prefill(tokens[start : start + count], start, [page], size)
            start += count

    def fill(self, tokens: Sequence[int]) -> tuple[Float[Array, "1 V"], list[Reads]]:
        """Prefill a whole prompt into the first row; return next-token logits and key counts per chunk."""
        chunks = list(self.run(tokens))
        return read_head(self.params, chunks[-1][1].last), [reads for *_, reads in chunks if reads is not None]

    def logits(self, tokens: Sequence[int]) -> tuple[Float[Array, "1 T V"], bool]:
        """Prefill a whole prompt into the first row; return logits of all its rows, and whether all are finite."""
        found, good = [], True
        for count, rows, _ in self.run(tokens):
            out, finite = score_hidden(self.params, rows.hidden)
            found.append(out[:, :count])
            good &= bool(np.asarray(finite)[:, :count].all())
        return jnp.concatenate(found, 1), good

    def seats(self, pages):
        return self.rows, [page - 1 for [page] in pages]

    def decode(self, policy, token_B, position, pages):
        seats = [page - 1 for [page] in pages]
        if self._part is not None and self._part[0] in seats:
            self._flush()
        # Every row writes a key: those that are not decoded at the last position, which `RowPrefix` never keeps.
        position_B, alive_B = np.full(self.rows, self.page - 1, np.int32), np.zeros(self.rows, bool)
        position_B[seats], alive_B[seats] = position, True
        self.cache, out, reads = self._feed(self.cache, policy, token_B, position_B, alive_B)
        return out, reads

    def save(self, pages):
        self._flush()
        rows = [read_page(self.cache, np.int32(page - 1), stripe=self.stripe) for page in pages]
        return [jax.tree.map(np.asarray, row) for row in rows]

    def restore(self, pages, saved):
        self._flush()
        for page, part in zip(pages, saved, strict=True):
            part = jax.tree.map(lambda x: put(x, self.mesh), part)
            if part.num_keys < self.page:
                part = enlarge(part, num_keys=self.page, stripe=self.stripe)
            self.cache = write_page(self.cache, part, np.int32(page - 1), stripe=self.stripe)

    def _take(self, row: int) -> Cache:
        """Return the cache that a prefill of a row fills: a copy of the row, or the only row itself."""
        if self.rows == 1:
            return self.cache
        if self._part is None or self._part[0] != row:
            self._flush()
            self._part = row, read_page(self.cache, np.int32(row), stripe=self.stripe)
        return self._part[1]

    def _flush(self) -> None:
        if self._part is not None:
            row, part = self._part
            self._part = None
            self.cache = write_page(self.cache, part, np.int32(row), stripe=self.stripe)

    def _warm_copies(self) -> int:
        self._flush()
        return 2 if self.rows > 1 else 0


class RowPrefix:
    """The prefix cache of a `RowPool`: a free row keeps the keys that prefill wrote for its last prompt.

    The next prompt takes over the free row with which it shares most whole units. Keys that decode wrote are never
    reused: under a sparse policy, they differ from the keys that prefill would write.
    """

    def __init__(self, pool: RowPool):
        self.pool, self.pages, self.block = pool, Pages(pool.rows + 1, pool.page), pool.unit
        self.hashes = Prefix(Pages(2, self.block), b"rows").hashes  # of each whole unit of a prompt
        self._kept: dict[int, list[bytes]] = {page: [] for page in range(1, pool.rows + 1)}

    def __contains__(self, hash: bytes) -> bool:
        return False  # rows are not shared

    @property
    def num_cached(self) -> int:
        return len(self.pages.cached)

    @property
    def available(self) -> int:
        return len(self.pages.free) + self.num_cached

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Take over the free row whose units agree with most of the hashes, keep only these, and return its page."""
        shared = {page: _common(self._kept[page], hashes) for page in self.pages.cached}
        page = max(shared, key=shared.get, default=None)
        if page is None or not shared[page]:
            return []
        self.pages.share([page])
        self.pages.discard([page])  # it has one user, who may write to it
        del self._kept[page][shared[page] :]
        return [page]

    def positions(self, matched: Sequence[int]) -> int:
        return sum(len(self._kept[page]) for page in matched) * self.block

    def publish(self, hash: bytes, parent: bytes | None, page: int) -> int:
        """Record that prefill wrote a unit of a row. The last position of a row is never kept: see `RowPool.decode`."""
        kept = self._kept[page]
        if parent is None:
            kept.clear()
        if (kept[-1] if kept else None) == parent and (len(kept) + 1) * self.block < self.pool.page:
            kept.append(hash)
        return page

    def allocate(self, count: int) -> list[int]:
        """Take free rows, and drop what they keep if no empty row is left."""
        short = count - len(self.pages.free)
        self.pages.evict(self.pages.cached[: max(0, short)])
        taken = self.pages.allocate(count)
        for page in taken:
            self._kept[page].clear()
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Free rows; those with units that prefill wrote keep them."""
        pages = list(pages)
        self.pages.seal(page for page in pages if self._kept[page])
        self.pages.release(pages)

    def forget(self, pages: Iterable[int]) -> None:
        """Drop what rows keep, because it is bad (NaN) or overwritten."""
        for page in pages:
            self._kept[page].clear()
            if page in self.pages.cached:
                self.pages.evict([page])

    def warmed(self) -> None:
        """Forget all rows: programs that run without a sequence write to them."""
        self.forget(self.pages.cached)

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Raise ValueError: a row cannot be kept from the next request."""
        raise ValueError("only an engine with pages can pin a prefix: pass `paging` to the engine")

    def close(self) -> None:
        """Do nothing: rows do not outlive the process."""


def _common(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    return next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
