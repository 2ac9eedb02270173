"""The prefix cache of a pool; it can keep pages on disk when they are evicted from memory."""

import logging
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from tessera.models.pages import Pages
from tessera.runtime.pool import PagePool
from tessera.runtime.prefix import Prefix
from tessera.runtime.spill import Spill

logger = logging.getLogger(__name__)


class StoredPrefix(Prefix):
    """Published pages of a pool by hash, in memory and, with `Paging.spill`, on disk.

    A page goes to disk when it is evicted, or when `close` is called, and comes back when a prompt matches it.
    """

    def __init__(self, pool: PagePool):
        paging, salt = pool.paging, pool.salt()
        self.pool = pool
        self.spill = None if paging.spill is None else Spill(paging.spill, salt, paging.spill_bytes)
        super().__init__(Pages(paging.num_pages, paging.page), salt, None if self.spill is None else self._store)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of the leading hashes, up to the first that is neither in memory nor on disk.

        `hashes` starts at a sequence's first page, or at a page that is in memory.
        """
        run = super().match(hashes)
        while self.spill is not None and len(run) < len(hashes) and self.available:
            index = len(run)
            arrays = self.spill.load(hashes[index])
            if arrays is None:
                break
            [page] = self.allocate(1)
            self.pool.restore([page], [jax.tree.unflatten(jax.tree.structure(self.pool.cache), arrays)])
            run.append(self.publish(hashes[index], hashes[index - 1] if index else None, page))
        return run

    def forget(self, pages: Iterable[int]) -> list[bytes]:
        withdrawn = super().forget(pages)
        for name in withdrawn if self.spill is not None else ():
            self.spill.remove(name)
        return withdrawn

    def warmed(self) -> None:
        """Do nothing: programs that run without a sequence write to the null page."""

    def close(self) -> None:
        """Write all pages to disk, so that the next start finds them."""
        if self.spill is None:
            return
        pages = self.held()
        logger.info("writing the keys of %d pages to disk", len(pages))
        for name, page in reversed(pages):  # see `Spill`: a page after those that continue it
            self._store(name, page)

    def _store(self, name: bytes, page: int) -> None:
        if self.spill.touch(name):
            return
        arrays = jax.tree.leaves(self.pool.save([page]))
        if all(np.isfinite(array).all() for array in arrays):  # a restart must not meet a bad page again
            self.spill.save(name, arrays)
