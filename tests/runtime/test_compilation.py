"""The folder of compiled programs: a damaged entry costs one compilation and nothing else."""

import jax
import pytest
from jax._src import compilation_cache

from tessera.runtime.compilation import CheckedCache, enable_cache


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:-9] + bytes(9)])
def test_a_damaged_entry_is_dropped_once(tmp_path, damage):
    cache = CheckedCache(str(tmp_path), max_size=-1)
    cache.put("program", bytes(range(256)))
    [path] = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("program") is None
    assert not path.exists()
    cache.put("program", b"compiled again")
    assert cache.get("program") == b"compiled again"


def test_a_full_disk_keeps_no_entry(tmp_path, caplog, monkeypatch):
    cache = CheckedCache(str(tmp_path), max_size=-1)

    def write_half(path, data):
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(cache.path), "write_bytes", write_half)
    cache.put("program", bytes(100))
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_jax_compiles_again_without_a_warning(tmp_path, monkeypatch):
    """JAX warns of entries that it cannot read, and pytest turns warnings into errors."""
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", KEPT_S)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        folder = enable_cache()
        jax.config.update(KEPT_S, 0)
        for damaged in (True, False):
            jax.clear_caches()
            assert jax.jit(lambda x: x * 7919)(3) == 3 * 7919
            entries = list(folder.glob("*-cache"))
            sizes = {path: path.stat().st_size for path in entries}
            assert entries
            assert min(sizes.values()) > 0
            for path in entries if damaged else ():
                path.write_bytes(b"")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.clear_caches()


KEPT_S = "jax_persistent_cache_min_compile_time_secs"
