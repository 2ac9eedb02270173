"""Shared set-up: tests run on the CPU unless the caller says otherwise, and never touch the user's caches."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="tessera-test-cache-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
