"""Shared set-up: tests run on the CPU unless the caller says otherwise, and never touch the user's caches."""

import os
import signal
import tempfile

from tessera.core.files import user_cache

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The one thing shared with the user's cache: the fetched model, the same bytes for everyone, 93 MB to get again.
os.environ.setdefault("TESSERA_TEST_MODELS", str(user_cache() / "models"))
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="tessera-test-cache-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# A shell that runs the tests in the background has them ignore Ctrl-C, which tests' child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from contextlib import suppress
from pathlib import Path

import pytest

from tessera.core.hardware import prepare_simulator
from tessera.runtime.compilation import forget_programs

prepare_simulator()


def pytest_configure(config):
    """The mark that pytest-xdist groups by; without xdist it says nothing."""
    config.addinivalue_line("markers", "xdist_group(name): tests of one name run in one process")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is spread over processes: a file as a whole, but tests over the kernel table kernel by kernel."""
    for item in items:
        kernel = item.callspec.params.get("kernel") if hasattr(item, "callspec") else None
        name = getattr(kernel, "name", kernel if isinstance(kernel, str) else "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {name}".strip()))


def pytest_runtest_teardown(item, nextitem):
    """Between files: a process runs dozens of them, and each leaves its programs."""
    if nextitem is not None and nextitem.path != item.path:
        forget_programs(above=25_000)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, fetched once per machine; in the tests' cache too, so --model smollm2 works.

    Skips only where it cannot be fetched. Safe in several processes at once: one downloads, the others wait.
    """
    from tessera.models import fetch

    try:
        path = fetch.fetch("smollm2", folder=os.environ["TESSERA_TEST_MODELS"], quiet=True)
    except fetch.NotReachable as error:
        pytest.skip(str(error))
    link = user_cache() / "models" / path.name
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(path)
    return path
