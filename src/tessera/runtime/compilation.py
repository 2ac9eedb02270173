"""What gets compiled and where it is kept: shape buckets, and the persistent cache in the user's cache folder.

Buckets are geometric, so that a model meets few shapes: prompts are cut into chunks of three sizes, caches are
allocated in steps of at most 2x (1.5x and 1.33x from 1,024 keys on).
"""

import gc
import logging
import tempfile
from collections.abc import Iterator
from math import lcm
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tessera.core.files import user_cache
from tessera.core.shapes import round_up

logger = logging.getLogger(__name__)

CAPACITY_STEP = 128
CHUNK_UNIT = 64
CHUNK_GROWTH = 4


def cache_folder() -> Path:
    """This user's folder for compiled programs."""
    return user_cache() / "compiled"


def enable_cache() -> Path | None:
    """Keep compiled programs across processes; a folder that the user already gave JAX is left as it is.

    Returns:
        the folder in use; None if it cannot be written (one log line says so and every process compiles anew).
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
    # JAX keeps programs that took a second; ours are many and small, and together they are the start-up time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    compilation_cache.reset_cache()  # JAX settles on "no cache" at the first compilation of the process
    return folder


def forget_programs(above: int = 30_000) -> bool:
    """Drop all compiled programs if this process has more memory maps than `above`; whether it did.

    A program on the CPU takes about 25 maps, a model's with unrolled layers hundreds. Linux allows a process 65,530
    (vm.max_map_count), and XLA crashes at the next one: long runs of many programs call this between their steps.
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
    """Keys to allocate for a request of `num_keys`: the next of 128, 256, 512, 1024, 1536, 2048, 3072, 4096, ..."""
    size = CAPACITY_STEP
    while size < num_keys:
        if size >= 1024 and size * 3 // 2 >= num_keys:
            return size * 3 // 2
        size *= 2
    return size


def capacity_buckets(num_keys: int) -> Iterator[int]:
    """All buckets up to the one that holds `num_keys`, ascending."""
    size = 0
    while size < num_keys:
        size = capacity_bucket(size + 1)
        yield size


def chunk_sizes(query_tile: int, chunk: int) -> tuple[int, ...]:
    """Prefill chunk lengths, descending; multiples of the query tile, so that tiles never depend on the cut."""
    unit = lcm(CHUNK_UNIT, query_tile)
    sizes = [unit]
    while sizes[-1] * CHUNK_GROWTH <= max(chunk, unit):
        sizes.append(sizes[-1] * CHUNK_GROWTH)
    return tuple(reversed(sizes))


def cut_chunks(length: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, size) of the chunks that cover `length` rows, largest first; only the last unit is padded."""
    start, end = 0, round_up(length, sizes[-1])
    for size in sizes:
        while end - start >= size:
            yield start, size
            start += size
