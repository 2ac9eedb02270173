"""Breaks a Hopper kernel on purpose and runs it in the interpreter: one request a line in, one verdict a line out.

    PYTHONPATH=tests python tests/mutants.py gpu_decode_dense     # every mutant of a kernel

A mutant leaves out the n-th call of an operation while the kernel is traced: a barrier's wait or arrival, a fence
before the asynchronous proxy reads, the wait for a store; or the last turn of the n-th loop; or, of a sparse call, the
last tile of every list. Run as a process of its own, since a mutant may wait forever: `Mutants` ends it then.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

OPERATIONS = {
    "wait": "barrier_wait",
    "arrival": "barrier_arrive",
    "fence": "commit_smem",
    "store": "wait_smem_to_gmem",
}
KINDS = (*OPERATIONS, "turn", "list")
START_S = 300.0
"""A process may take this long for its first verdict, of the kernel as it is, which tells how slow this machine is."""


def workload(kernel, kind):
    """Two query tiles, more blocks than stages, a tail with NaN behind it, a list of nearly all keys.

    Where the last of a list is left out it must be seen, and weigh something: every key visible, few of single ones.
    """
    from tessera.attention.contract import AttentionSpec
    from tessera.workloads import Workload

    if kernel.phase == "decode":
        sizes = {"num_queries": 1, "num_keys": 330, "kv_len": (310,), "q_start": (309,), "tags": ("decode",)}
    else:
        sizes = {"num_queries": 40, "num_keys": 330, "kv_len": (310,), "q_start": (270,), "tags": ("prefill",)}
    spec = AttentionSpec(tile=32, query_tile=32)
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    base = Workload(name="mutant", spec=spec, fraction=0.9, **heads, **sizes)
    if kernel.supports(base.role_spec(kernel.role), base.shapes(kernel.role)) is not None:
        base = replace(base, spec=replace(spec, tile=1), fraction=0.05 if kind == "list" else 0.9)
    return replace(base, spec=replace(base.spec, causal=False), kv_len=None) if kind == "list" else base


@contextlib.contextmanager
def broken(kind: str, site: int):
    """Leave out call number `site` of the operation; yields the count of calls as a list of one."""
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu

    seen = [0]

    def nth() -> bool:
        seen[0] += 1
        return seen[0] - 1 == site

    if kind == "turn":
        place, name, whole = jax.lax, "fori_loop", jax.lax.fori_loop

        def patched(lower, upper, *args, **kwargs):
            return whole(lower, upper - 1 if nth() else upper, *args, **kwargs)
    elif kind in OPERATIONS:
        place, name = plgpu, OPERATIONS[kind]
        whole = getattr(plgpu, name)

        def patched(*args, **kwargs):
            return None if nth() else whole(*args, **kwargs)
    else:
        yield seen
        return
    setattr(place, name, patched)
    try:
        yield seen
    finally:
        setattr(place, name, whole)


def verdict(name: str, kind: str, site: int) -> dict:
    """Whether the mutant passes for the kernel, and what gave it away; how many sites the kernel has."""
    import jax
    import numpy as np

    from tessera import oracle, trials, verify
    from tessera.attention.dispatch import KERNELS

    kernel = next(k for k in KERNELS if k.name == name)
    call = trials.make(workload(kernel, kind), kernel.role, "bfloat16")
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, "bfloat16")
    run_on = call._replace(count=np.maximum(call.count - 1, 0)) if kind == "list" else call
    jax.clear_caches()
    trials.compiled.cache_clear()
    said = []
    with broken(kind, site) as seen:
        try:
            result = trials.run(kernel, run_on, "bfloat16")
        except trials.Race:
            said.append("race")
        except Exception as error:  # noqa: BLE001  whatever the interpreter says of a broken kernel gives it away
            said.append(" ".join(str(error).splitlines()[-1:])[:120] or type(error).__name__)
        else:
            errors, wrong = verify.compare(result, truth, allowed, kernel.role)
            said += [*wrong, *(["wrong values"] if (errors > 1).any() else [])]
    return {"caught": said, "sites": seen[0]}


class Mutants:
    """A process that gives verdicts, started again after one that never ended."""

    def __init__(self):
        self._process = None
        self._limit_s = START_S

    def ask(self, kernel: str, kind: str, site: int) -> dict:
        """What gave the mutant away ("caught", empty if nothing), and how many sites of this kind there are.

        A mutant that takes five times as long as the kernel did while its process started never ends.
        """
        if self._process is None:
            self._start()
            start = time.monotonic()
            whole = self._answer([kernel, "none", 0], START_S)
            if whole is None or whole["caught"]:
                raise AssertionError(f"{kernel} fails before anything is broken: {whole}")
            self._limit_s = 5 * (time.monotonic() - start)
        found = self._answer([kernel, kind, site], self._limit_s)
        if found is None:
            self.close()
            return {"caught": ["it never ends"], "sites": None}
        return found

    def _answer(self, request: list, limit_s: float) -> dict | None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return None
        if not line:
            raise AssertionError(f"the process died of {request}")
        return json.loads(line)

    def _start(self):
        here = Path(__file__)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    @staticmethod
    def _read(stream, lines):
        for line in iter(stream.readline, ""):
            lines.put(line)
        lines.put("")

    def close(self):
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def main() -> int:
    """Answer requests until the input ends; with names of kernels, try every mutant of them and print a table."""
    if sys.argv[1:]:
        return every(sys.argv[1:])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(verdict(*json.loads(line))) + "\n")
        replies.flush()
    return 0


def every(kernels: list[str]) -> int:
    """Every mutant of the kernels, a line each."""
    mutants = Mutants()
    for kernel, kind in product(kernels, KINDS):
        if kind == "list" and not kernel.endswith("sparse"):
            continue
        site, sites = 0, 1
        while site < sites:
            found = mutants.ask(kernel, kind, site)
            if kind != "list" and found["sites"] is not None:
                sites = found["sites"]
            if site < sites:
                print(kernel, kind, f"{site + 1}/{sites}", "; ".join(found["caught"]) or "NOT CAUGHT", flush=True)
            site += 1
    mutants.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
