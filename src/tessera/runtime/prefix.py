"""The prefix cache: prompts that start with the same tokens share the pages that prefill wrote. Host-side only.

A page is named by a hash chain over the tokens up to the page's end:

    hash[0] = blake2b(blake2b(tenant) | tokens of page 0 | salt)
    hash[i] = blake2b(hash[i-1]       | tokens of page i | salt)

The salt (see `salt`) names everything else that the keys and values depend on, so equal hashes mean equal contents. One
request's life:

    hashes -> match -> allocate the rest -> prefill -> publish each full page -> decode -> `Pages.release`

Only pages that prefill wrote in full may be published. Under a sparse policy, decode writes other keys, because it
selects tiles per token, and prefill per query tile (the keys differed by 12 to 54 % of their maximum).

Pages without a user stay cached in order of release, and the longest unused one is evicted first. A page is evicted
only after the held pages that continue it, because `match` walks the chain from its start and could not reach them
without this page.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tessera.models.pages import OutOfPages, Pages

logger = logging.getLogger(__name__)

HASH_BYTES = 32
"""Bytes of a hash. Requests choose their tokens, so a collision must be out of reach: it would leak keys."""


def salt(
    *,
    weights: str,
    plan: str | None,
    dtype: str,
    unit: int,
    crossover: int,
    kernels: Mapping[str, str],
    code: str,
) -> bytes:
    """Return a digest of everything on which a page's contents depend, except its tokens. No argument has a default.

    Args:
        weights: fingerprint of the weights, in the form in which they are multiplied (quantised or not).
        plan: hash of the plan; None if every row runs dense.
        dtype: dtype of the cache.
        unit: prefills start at multiples of this many positions.
        crossover: first position that runs under the plan.
        kernels: name and config of the kernel in each prefill role, for example {"sparse": "xla.sparse block=64"}.
        code: version of the code that computes pages, such as `core.files.sources` and JAX's version.

    Raises:
        ValueError: a part is empty.
    """
    parts = {"weights": weights, "plan": plan, "dtype": dtype, "unit": unit, "crossover": crossover, "code": code}
    parts["kernels"] = dict(kernels)
    for name, value in parts.items():
        if value in ("", {}) or (value is None and name != "plan"):
            raise ValueError(f"{name}={value!r} names nothing: pages of two models could then have one hash")
    return _digest(json.dumps(parts, sort_keys=True).encode())


@dataclass
class _Held:
    """A published page, the hash that it continues, and the hashes of held pages that continue it."""

    page: int
    parent: bytes | None
    children: set[bytes] = field(default_factory=set)


class Prefix:
    """Published pages by hash. Only this class may seal and evict pages of its pool.

    Args:
        pages: the pool.
        salt: result of `salt`.
        on_evict: called with the hash and the page before a page is evicted, children before parents. It is the last
            chance to copy the contents.

    Attributes:
        query_tokens: tokens of all full pages looked for by `match`.
        hit_tokens: tokens of those that it found.
    """

    def __init__(self, pages: Pages, salt: bytes, on_evict: Callable[[bytes, int], None] | None = None):
        if not salt:
            raise ValueError(f"{salt=} is empty: build it with tessera.runtime.prefix.salt")
        self.pages = pages
        self.hit_tokens = self.query_tokens = 0
        self._salt, self._on_evict = salt, on_evict
        self._held: dict[bytes, _Held] = {}
        self._hash: dict[int, bytes] = {}  # by page
        self._pins: Counter[bytes] = Counter()
        self._withdrawn: dict[int, bytes] = {}  # hashes of bad pages that may still be in use

    @property
    def num_cached(self) -> int:
        """Pages that no sequence uses and whose contents are kept."""
        return len(self.pages.cached)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self.pages.free)

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out: free ones, and cached ones, which it would evict."""
        return self.num_free + self.num_cached

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._held

    def held(self) -> list[tuple[bytes, int]]:
        """List hash and page of every published page, parents before the pages that continue them."""
        return [(name, held.page) for name, held in self._held.items()]

    def hashes(self, tokens: Sequence[int] | np.ndarray, tenant: str = "") -> list[bytes]:
        """Return the hash of each full page of a sequence. Different tenants never share a page.

        Raises:
            ValueError: the tokens are not a list of integers from 0 to 2**32 - 1.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
            raise ValueError(f"tokens must be a flat list of ids, got shape {tokens.shape} of {tokens.dtype}")
        if tokens.size and tokens.max() >= 1 << 32:
            raise ValueError(f"token {tokens.max()} does not fit into 4 bytes")
        data, size = tokens.astype("<u4").tobytes(), 4 * self.pages.page
        parent, found = _digest(tenant.encode("utf-8", "surrogatepass")), []
        for start in range(0, len(data) - size + 1, size):
            parent = _digest(parent + data[start : start + size] + self._salt)
            found.append(parent)
        return found

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest run of held hashes, and make the caller a user of each: release them later.

        A prefill needs at least one token, so a prompt that ends with a full page should not look for its last hash.
        """
        run = []
        for name in hashes:
            if name not in self._held:
                break
            run.append(self._held[name].page)
        self.pages.share(run)
        self.query_tokens += len(hashes) * self.pages.page
        self.hit_tokens += len(run) * self.pages.page
        return run

    def publish(self, hash: bytes, parent: bytes | None, page: int) -> int:
        """Offer a page that prefill wrote in full, and return the page that the caller uses from now on.

        If another page holds the hash, the caller becomes a user of that one and `page` is released. If the parent is
        not held, or a bad page of this hash is still in use, `page` stays private: it, or what its users publish next,
        may be computed from bad keys.

        Args:
            hash, parent: the page's hash and the one before it; None for a sequence's first page.
            page: page that the caller alone uses.

        Raises:
            ValueError: the page is shared, sealed under another hash or not in use.
        """
        held = self._held.get(hash)
        if held and held.page == page:
            return page
        if not self.pages.writable(page):
            raise ValueError(f"cannot publish {page=}: it must have one user and no other hash")
        if held:
            self.pages.share([held.page])
            self.pages.release([page])
            return held.page
        if self._is_bad(hash) or (parent is not None and parent not in self._held):
            return page
        self.pages.seal([page])
        self.pages.share([page] * self._pins[hash])
        self._held[hash] = _Held(page, parent)
        self._hash[page] = hash
        if parent is not None:
            self._held[parent].children.add(hash)
        return page

    def allocate(self, count: int) -> list[int]:
        """Take pages that the caller owns and may write, evicting cached pages if too few are free.

        Raises:
            OutOfPages: fewer pages are free or can be evicted; nothing changes.
        """
        short = count - len(self.pages.free)
        if short > 0:
            victims = self._victims(short)
            if len(victims) < short:
                raise OutOfPages(
                    f"{count} pages of {self.pages.page} positions are needed, {self.num_free} are free and "
                    f"{len(victims)} can be evicted: wait for a request to end"
                )
            for page in victims:
                if self._on_evict:
                    self._on_evict(self._hash[page], page)
                self._drop(self._hash[page])
                self.pages.evict([page])
        taken = self.pages.allocate(count)
        for page in taken:
            self._withdrawn.pop(page, None)
        return taken

    def forget(self, pages: Iterable[int]) -> list[bytes]:
        """Withdraw pages whose contents are bad (NaN), and all that continue them; return their hashes.

        A withdrawn page is never matched again. Sequences that use it keep it until they release it; no page is
        published under its hash before that, so nothing that they compute from it enters the cache. Pages that were
        never published are skipped.
        """
        withdrawn = []
        for page in pages:
            if page in self._hash:
                gone = self._with_descendants(self._hash[page])
                logger.warning("prefix cache: withdrew page %s and the %s pages that continue it", page, len(gone) - 1)
                for name in reversed(gone):
                    self._withdraw(name)
                withdrawn += gone
        return withdrawn

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Never evict these pages until each `pin` has its `unpin`. A page not held is pinned when it is published."""
        for name in hashes:
            self._pins[name] += 1
            if name in self._held:
                self.pages.share([self._held[name].page])

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Take back one `pin` of each hash.

        Raises:
            ValueError: a hash is not pinned; nothing is unpinned.
        """
        for index, name in enumerate(hashes):
            if not self._pins[name]:
                raise ValueError(f"cannot unpin page {index} of {len(hashes)}: it is not pinned")
        self._pins -= Counter(hashes)  # drops zeros
        for name in reversed(hashes):  # children first, as `_victims` takes them
            if name in self._held:
                self.pages.release([self._held[name].page])

    def _victims(self, count: int) -> list[int]:
        """List up to `count` cached pages in the order of eviction: the longest unused page that no held one continues.

        One walk suffices. A page that has children when the walk comes to it is passed; when its last child goes, it is
        the longest unused candidate, because all other passed pages still have children.
        """
        found, passed, lost = [], set(), Counter()
        for page in self.pages.cached:
            passed.add(page)
            while page in passed and lost[page] == len(self._held[self._hash[page]].children):
                if len(found) == count:
                    return found
                passed.remove(page)
                found.append(page)
                parent = self._held[self._hash[page]].parent
                if parent is None:
                    break
                page = self._held[parent].page
                lost[page] += 1
        return found

    def _with_descendants(self, name: bytes) -> list[bytes]:
        """List a held hash and all that continue it, parents before children."""
        found = [name]
        for each in found:
            found.extend(self._held[each].children)
        return found

    def _withdraw(self, name: bytes) -> None:
        """Drop a bad page that no held page continues; it becomes free when its last user releases it."""
        page = self._held[name].page
        self._drop(name)
        self.pages.discard([page])
        self._withdrawn[page] = name
        for _ in range(self._pins[name]):
            self.pages.release([page])

    def _is_bad(self, name: bytes) -> bool:
        """Return whether a sequence still uses a withdrawn page of this hash."""
        return any(each == name and self.pages.references(page) for page, each in self._withdrawn.items())

    def _drop(self, name: bytes) -> None:
        """Remove a hash that no held page continues."""
        held = self._held.pop(name)
        del self._hash[held.page]
        if held.parent is not None:
            self._held[held.parent].children.remove(name)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
