"""Compilation: shape buckets, and the persistent cache of programs in the user's cache folder.

Sizes are rounded up to a geometric series of buckets, so that JAX compiles programs for few shapes: prompts are cut
into chunks of three sizes, and cache sizes grow by factors of 2, or of 1.5 and 1.33 in turn from 1,024 keys on.
"""

import gc
import logging
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from math import lcm
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from tessera.core.files import user_cache

logger = logging.getLogger(__name__)

CAPACITY_STEP = 128
CHUNK_UNIT = 64
CHUNK_GROWTH = 4


CHECKSUM_BYTES = 4


class CheckedCache(LRUCache):
    """JAX's folder of compiled programs, with a checksum at the end of each file.

    JAX's own cache would warn about a damaged entry in every process and never replace it. This cache deletes the
    entry, so JAX compiles and stores the program again.
    """

    def get(self, key: str) -> bytes | None:
        stored = super().get(key)
        if stored is None:
            return None
        value, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
        if checksum == _checksum(value):
            return value
        self._drop(key)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Store an entry; if that fails, on a full disk for example, warn and store nothing."""
        try:
            super().put(key, value + _checksum(value))
        except OSError as error:
            logger.warning("a compiled program cannot be stored: %s (%s)", self.path, error.strerror or error)
            self._drop(key)

    def _drop(self, key: str) -> None:
        with suppress(OSError):  # the file is another user's, or is already gone
            (self.path / f"{key}-cache").unlink()


def _checksum(value: bytes) -> bytes:
    return zlib.crc32(value).to_bytes(CHECKSUM_BYTES, "little")


def cache_folder() -> Path:
    return user_cache() / "compiled"


def enable_cache() -> Path | None:
    """Keep compiled programs across processes, in the returned folder; None (and a warning) if it is not writable.

    A folder already set in JAX's config takes precedence.
    """
    chosen = jax.config.jax_compilation_cache_dir
    if chosen:
        return Path(chosen)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("compiled programs are not kept: %s is not writable (%s)", folder, error.strerror or error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default, JAX stores only programs that took a second. Ours are many and small, and add up to the start-up time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    compilation_cache.reset_cache()  # or JAX keeps "no cache", if the process has compiled anything before
    compilation_cache._cache = CheckedCache(str(folder), max_size=-1)  # JAX has no public way to choose the class
    compilation_cache._cache_initialized = True
    return folder


def forget_programs(above: int = 30_000) -> bool:
    """Drop all compiled programs if this process has more memory maps than `above`; return whether they were dropped.

    A CPU program takes about 25 maps, a model with unrolled layers hundreds. Linux allows a process 65,530 maps
    (vm.max_map_count), and XLA crashes at the next one. Long runs of many programs therefore call this between steps.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return False
    with maps.open("rb") as lines:
        crowded = sum(1 for _ in lines) > above
    if crowded:
        jax.clear_caches()
        gc.collect()
    return crowded


def capacity_bucket(num_keys: int) -> int:
    """Round `num_keys` up to the keys to allocate: the next of 128, 256, 512, 1024, 1536, 2048, 3072, 4096, ..."""
    size = CAPACITY_STEP
    while size < num_keys:
        if size >= 1024 and size * 3 // 2 >= num_keys:
            return size * 3 // 2
        size *= 2
    return size


def capacity_buckets(num_keys: int) -> Iterator[int]:
    size = 0
    while size < num_keys:
        size = capacity_bucket(size + 1)
        yield size


def chunk_sizes(query_tile: int, chunk: int) -> tuple[int, ...]:
    """Return the lengths of prefill chunks, descending, of at most `chunk` rows.

    Each is a multiple of CHUNK_UNIT and of the query tile, so that no cut splits a tile. If the least common multiple
    is longer than `chunk`, it is the only length.
    """
    unit = lcm(CHUNK_UNIT, query_tile)
    sizes = [unit]
    while sizes[-1] * CHUNK_GROWTH <= max(chunk, unit):
        sizes.append(sizes[-1] * CHUNK_GROWTH)
    return tuple(reversed(sizes))
