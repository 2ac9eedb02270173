"""Shared set-up: tests run on the CPU unless JAX_PLATFORMS says otherwise, and never touch the user's caches."""

import os
import signal
import tempfile

from tessera.core.files import user_cache

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Only the fetched model is shared with the user's cache: its bytes never change, and a download takes 93 MB.
os.environ.setdefault("TESSERA_TEST_MODELS", str(user_cache() / "models"))
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="tessera-test-cache-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# A shell that runs the tests in the background, or nohup, makes them ignore a signal, as would their child processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from emitters import fast_flags

from tessera.core.hardware import prepare_simulator
from tessera.runtime.compilation import forget_programs

prepare_simulator()


def pytest_configure(config):
    """Register pytest-xdist's group mark, which does nothing without xdist, and choose XLA's fastest compilation.

    Most of the suite's time is compiling programs that run once. LLVM's optimizations double that time, and so do XLA's
    newer emitters of fusions, which lower them through MLIR. The exhaustive suite compiles as users do, and so do child
    processes unless their results must equal this process's bit for bit.
    """
    config.addinivalue_line("markers", "xdist_group(name): tests of one name run in one process")
    if config.getoption("--exhaustive"):
        return
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:  # XLA reads the flags once, at its start; child processes must not
        patch.setenv("XLA_FLAGS", fast_flags())
        jax.devices()


def pytest_addoption(parser):
    """Add `--exhaustive`, which also runs the tests that repeat a behaviour that another test covers."""
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive too (hours)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out exhaustive tests unless `--exhaustive` is given, and group the others for xdist.

    The tests of a file run in one process, but tests over the kernel table are split by kernel.
    """
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        kernel = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
        name = getattr(kernel, "name", kernel if isinstance(kernel, str) else "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {name}".strip()))


def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs between files: a process runs dozens of files and would keep all their programs."""
    if nextitem is not None and nextitem.path != item.path:
        forget_programs(above=25_000)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Fetch the GGUF of SmolLM2-135M-Instruct once per machine; link it into the tests' cache for --model smollm2.

    Skip only if the file cannot be fetched. Several processes may call this at once: one downloads, the others wait.
    """
    from tessera.models.files import fetch

    try:
        path = fetch.fetch("smollm2", folder=os.environ["TESSERA_TEST_MODELS"], quiet=True)
    except fetch.NotReachable as error:
        pytest.skip(str(error))
    link = user_cache() / "models" / path.name
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(path)
    return path


@pytest.fixture
def nothing_compiles() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that fails if anything compiles inside it; it also tests its own detection."""

    @contextmanager
    def watch():
        compiled = []

        def listen(name: str, duration_s: float, **_) -> None:
            if name == "/jax/core/compile/backend_compile_duration":
                compiled.append(name)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
            assert compiled == []
            jax.jit(lambda x: x + len(compiled))(np.float32(1))
            assert compiled != []  # the listener works
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return watch
