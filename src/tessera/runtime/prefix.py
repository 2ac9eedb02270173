"""The prefix cache: prompts that start with the same tokens share the pages that prefill wrote. Host-side only.

A page is named by a hash chain over the tokens up to the page's end:

    hash[0] = blake2b(blake2b(tenant) | tokens of page 0 | salt)
    hash[i] = blake2b(hash[i-1]       | tokens of page i | salt)

The salt (see `salt`) covers everything else on which the keys and values depend, so equal hashes mean equal contents.
The life of a request is:

    hashes -> match -> allocate the rest -> prefill -> publish each full page -> decode -> `Pages.release`

Only pages that prefill wrote in full may be published: under a sparse policy, decode selects key tiles for each token
and prefill for each query tile, so decode writes different keys (by 12 to 54 % of their maximum).

Pages without a user stay cached. The page that has been unused for longest is evicted first, but only after all
published pages that continue it, which `match` could not reach without it.
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
"""Bytes of a hash. Clients choose the tokens, so it must be infeasible to find a collision, which would leak keys."""


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
    """Return a digest of everything except tokens on which the contents of a page depend. No argument has a default.

    Args:
        weights: fingerprint of the weights, in the form in which they are multiplied (quantised or not).
        plan: text that identifies the policy; None if attention is dense at every position.
        unit: prefills start at multiples of `unit` positions.
        crossover: first position that runs under the plan.
        kernels: whatever decides which kernel, with which config, prefills.
        code: version of the code that computes pages, such as `core.files.sources` and JAX's version.
    """
    parts = {"weights": weights, "plan": plan, "dtype": dtype, "unit": unit, "crossover": crossover, "code": code}
    parts["kernels"] = dict(kernels)
    for name, value in parts.items():
        if value in ("", {}) or (value is None and name != "plan"):
            raise ValueError(
                f"{name}={value!r} names nothing: pass a value that differs between models, or they could share pages"
            )
    return _digest(json.dumps(parts, sort_keys=True).encode())


@dataclass
class _Held:
    """A published page, the hash of the page before it (None for the first) and the hashes of the pages after it."""

    page: int
    parent: bytes | None
    children: set[bytes] = field(default_factory=set)


class Prefix:
    """Published pages by hash. Only this class may seal and evict pages of its pool.

    Args:
        on_evict: called with (hash, page) just before a page is evicted, which is the last chance to copy its contents.
            A page is evicted after the pages that continue it.
    """

    def __init__(self, pages: Pages, salt: bytes, on_evict: Callable[[bytes, int], None] | None = None):
        if not salt:
            raise ValueError(f"{salt=} is empty: build it with tessera.runtime.prefix.salt")
        self.pages = pages
        self._salt, self._on_evict = salt, on_evict
        self._held: dict[bytes, _Held] = {}
        self._hash: dict[int, bytes] = {}  # by page
        self._pins: Counter[bytes] = Counter()
        self._withdrawn: dict[int, bytes] = {}  # hashes of bad pages that may still be in use

    @property
    def block(self) -> int:
        """Number of positions per hash."""
        return self.pages.page

    @property
    def num_cached(self) -> int:
        """Number of pages that no sequence uses and whose contents are kept."""
        return len(self.pages.cached)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` could hand out: free pages, and cached pages, which it would evict."""
        return len(self.pages.free) + self.num_cached

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._held

    def held(self) -> list[tuple[bytes, int]]:
        """List (hash, page) of every published page; each page comes before the pages that continue it."""
        return [(name, held.page) for name, held in self._held.items()]

    def hashes(self, tokens: Sequence[int] | np.ndarray, tenant: str = "") -> list[bytes]:
        """Return the hash of each full page of a sequence. Different tenants never share a page."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
            raise ValueError(f"tokens must be a flat list of ids, got shape {tokens.shape} of {tokens.dtype}")
        if tokens.size and tokens.max() >= 1 << 32:
            raise ValueError(f"token {tokens.max()} does not fit into 4 bytes: ids must be below 2**32")
        data, size = tokens.astype("<u4").tobytes(), 4 * self.pages.page
        parent, found = _digest(tenant.encode("utf-8", "surrogatepass")), []
        for start in range(0, len(data) - size + 1, size):
            parent = _digest(parent + data[start : start + size] + self._salt)
            found.append(parent)
        return found

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of the leading hashes that are published, up to the first that is not.

        The caller becomes a user of these pages and must release them later. A prefill needs at least one token, so the
        caller should leave out the last hash of a prompt that ends with a full page.
        """
        run = []
        for name in hashes:
            if name not in self._held:
                break
            run.append(self._held[name].page)
        self.pages.share(run)
        return run

    def positions(self, matched: Sequence[int]) -> int:
        return len(matched) * self.pages.page

    def release(self, pages: Iterable[int]) -> None:
        self.pages.release(pages)

    def publish(self, hash: bytes, parent: bytes | None, page: int) -> int:
        """Publish a page that prefill wrote in full, and return the page that the caller uses from now on.

        If another page is already published under this hash, the caller becomes a user of that page, and `page` is
        released. If the parent is not published, or a withdrawn page of this hash is still in use, `page` stays
        private, because it may have been computed from bad keys.
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
        """Take pages to own and write, evicting cached ones if need be; if that raises OutOfPages, nothing changes."""
        short = count - len(self.pages.free)
        if short > 0:
            victims = self._victims(short)
            if len(victims) < short:
                raise OutOfPages(
                    f"{count} pages of {self.pages.page} positions are needed, {len(self.pages.free)} are free and "
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
        """Withdraw pages whose contents are bad (NaN) and all pages that continue them; return the withdrawn hashes.

        A withdrawn page is never matched again. Sequences that use it keep it until they release it. Until then, no
        page is published under its hash, so nothing that they compute from it enters the cache.
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
        """Protect the pages of these hashes, also those published later, from eviction until `unpin` undoes it."""
        for name in hashes:
            self._pins[name] += 1
            if name in self._held:
                self.pages.share([self._held[name].page])

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Undo one `pin` of each hash; if one is not pinned, raise ValueError and unpin none."""
        for index, name in enumerate(hashes):
            if not self._pins[name]:
                raise ValueError(f"cannot unpin page {index} of {len(hashes)}: it is not pinned")
        self._pins -= Counter(hashes)  # drops zeros
        for name in reversed(hashes):  # children first, as `_victims` takes them
            if name in self._held:
                self.pages.release([self._held[name].page])

    def _victims(self, count: int) -> list[int]:
        """List up to `count` cached pages in the order of eviction.

        The next page to evict is always the one that has been unused for longest, of those whose children (the
        published pages that continue it) are all evicted before. One walk over the cached pages, in order of their
        release, finds them: it passes a page that still has children, and takes it as soon as its last child is taken,
        because all other passed pages still have children then.
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
        """List a published hash and all published hashes that continue it, parents before children."""
        found = [name]
        for each in found:
            found.extend(self._held[each].children)
        return found

    def _withdraw(self, name: bytes) -> None:
        """Drop a bad page that no published page continues; it becomes free when its last user releases it."""
        page = self._held[name].page
        self._drop(name)
        self.pages.discard([page])
        self._withdrawn[page] = name
        for _ in range(self._pins[name]):
            self.pages.release([page])

    def _is_bad(self, name: bytes) -> bool:
        return any(each == name and self.pages.references(page) for page, each in self._withdrawn.items())

    def _drop(self, name: bytes) -> None:
        """Remove a hash that no published page continues."""
        held = self._held.pop(name)
        del self._hash[held.page]
        if held.parent is not None:
            self._held[held.parent].children.remove(name)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
