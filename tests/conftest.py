"""Shared set-up: tests run on the CPU unless the caller says otherwise, and never touch the user's caches."""

import os
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="tessera-test-cache-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# XLA's threads on the CPU: simulated warpgroups wait on them, and two (a machine of two cores) can wait for each other.
os.environ.setdefault("NPROC", "8")

# A shell that runs the tests in the background has them ignore Ctrl-C, which tests' child processes would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest


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
