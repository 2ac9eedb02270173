"""Break a Hopper kernel on purpose and run it in the interpreter: one request per line in, one verdict per line out.

    PYTHONPATH=tests python tests/mutants.py gpu_decode_dense     # every mutant of a kernel
    PYTHONPATH=tests python tests/mutants.py gpu_backward_rows gpu_backward_keys     # and of the gradient's two

A mutant leaves out one line's operation: a barrier's wait or arrival, a fence before the asynchronous proxy reads, the
wait for a store; or the last turn of a loop; or, in a sparse call, the last tile of every list. A kernel is compiled
once, with a label on every such line, and each run skips the line of one label: compiling takes ten times as long as
running. Some mutants hang. A wait at a barrier raises after the time of the whole kernel; `Mutants` runs mutants in a
separate process and kills it if one hangs elsewhere.
"""

import contextlib
import functools
import json
import linecache
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from tessera.attention.contract import KeyValues
from tessera.core.hardware import prepare_simulator

OPERATIONS = {
    "wait": ("barrier_wait", "_barrier_wait"),
    "arrival": ("barrier_arrive", "_barrier_arrive"),
    "fence": ("commit_smem", "commit_smem"),
    "store": ("wait_smem_to_gmem", "wait_smem_to_gmem"),
}
"""Kind -> the operation in a kernel, and the interpreter's function that runs it."""
KINDS = (*OPERATIONS, "turn", "list")
GRADIENTS = {"gpu_backward_rows": "rows_body", "gpu_backward_keys": "keys_body"}
"""Kernel of the gradient -> the function of `gpu_backward` to break."""
EQUIVALENT = {
    (
        "gpu_keys_sparse",
        "wait",
        "sparse_rows.Rows.unmasked: plgpu.barrier_wait(self.refs.v_full.at[slot])",
    ): "a block's keys and values are announced together: who has waited for its keys has waited for both",
}
"""Equivalent mutants, with the reason."""
ABSENT = {
    (f"gpu_decode_{role}", "arrival"): "one warpgroup both fetches and computes: it hands nothing back"
    for role in ("dense", "score", "sparse")
}
"""Operations that a kernel does not have, with the reason."""
ATTENTION = Path(__file__).parents[1] / "src/tessera/attention/gpu"
START_S = 300.0
"""Seconds to wait for a process's first verdict, on the unbroken kernel, whose time shows how slow this machine is."""
PATIENCE_S = 0.5
"""Seconds after which a barrier wait counts as endless, or the time of the whole compiled kernel if that is more."""
WHOLE_S: dict[str, float] = {}
"""Seconds to wait at a barrier, per kernel that ran unbroken in this process."""
SITES: dict[str, dict[str, list[str]]] = {}
"""Kernel -> kind -> the places traced so far."""
LEFT_OUT: list[str] = [""]
"""The label of the place that the running mutant leaves out; no place has the empty one."""


def workload(kernel, kind):
    """Build a workload with two query tiles, more blocks than stages, NaN after the last key, and long lists.

    For kind "list", the dropped end of a list must carry weight: every key is visible, and lists of single keys are
    short.
    """
    from tessera.attention.contract import AttentionSpec
    from tessera.attention.workloads import Workload

    if kernel.phase == "decode":
        sizes = {"num_queries": 1, "num_keys": 330, "kv_len": (310,), "q_start": (309,), "tags": ("decode",)}
    else:
        sizes = {"num_queries": 40, "num_keys": 330, "kv_len": (310,), "q_start": (270,), "tags": ("prefill",)}
    spec = AttentionSpec(tile=32, query_tile=32)
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    base = Workload(name="mutant", spec=spec, fraction=0.9, **heads, **sizes)
    if kernel.refusal(base.role_spec(kernel.role), base.shapes(kernel.role)) is not None:
        base = replace(base, spec=replace(spec, tile=1), fraction=0.05 if kind == "list" else 0.9)
    return replace(base, spec=replace(base.spec, causal=False), kv_len=None) if kind == "list" else base


def backward_workload():
    """Build a workload that gives every barrier work.

    It has two row tiles, more steps than stages for either kernel, steps masked at both ends and whole ones between,
    and a cap at head dim 128, where two warpgroups share their keys.
    """
    from tessera.attention.contract import AttentionSpec
    from tessera.attention.workloads import Workload

    sizes = {"num_queries": 200, "num_keys": 330, "kv_len": (310,), "q_start": (110,), "tags": ("prefill",)}
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    return Workload(name="mutant", spec=AttentionSpec(window=200, softcap=3.0), **heads, **sizes)


def impatient(patience_s: float) -> dict:
    """Return the threading module's names, with conditions that raise after waiting patience_s."""

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            if not super().wait(patience_s):
                raise TimeoutError("the kernel never ends")

    return {**vars(threading), "Condition": Condition}


def place() -> str | None:
    """Return the kernel's line that calls the operation, as "module.function: text"; None if no kernel does."""
    frame = sys._getframe(1)
    while frame and Path(frame.f_code.co_filename).parent != ATTENTION:
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).partition("  #")[0].strip()
    return f"{Path(code.co_filename).stem}.{code.co_qualname.replace('.<locals>', '')}: {text}"


@contextlib.contextmanager
def breakable(kernel: str, patience_s: float):
    """Label the kernel's places as they are traced, and skip the one that LEFT_OUT names.

    Of the gradient's two kernels, label only this one. A wait of patience_s at a barrier is an error.
    """
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    from tessera.attention.gpu import backward as gpu_backward

    body = GRADIENTS.get(kernel)
    seen, inside = SITES.setdefault(kernel, {kind: [] for kind in KINDS}), [body is None]

    def label(kind: str) -> str | None:
        where = place() if inside[0] else None
        if where is None:
            return None
        if where not in seen[kind]:
            seen[kind].append(where)
        return f"mutant {kind} {seen[kind].index(where)}."

    def labelled(kind: str, whole):
        def traced(*args, **kwargs):
            with jax.named_scope(label(kind) or "whole"):
                return whole(*args, **kwargs)

        return traced

    def skipped(whole):
        def run(*args, source_info, **kwargs):
            if LEFT_OUT[0] and LEFT_OUT[0] in str(source_info.name_stack):
                return args[0] if args else kwargs["token"]
            return whole(*args, source_info=source_info, **kwargs)

        return run

    def shorter(whole):
        def traced(lower, upper, *args, **kwargs):
            mine = label("turn")
            if mine is not None:
                cut = lambda: np.int32(LEFT_OUT[0] == mine)  # noqa: E731
                upper = upper - jax.pure_callback(cut, jax.ShapeDtypeStruct((), jnp.int32))
            return whole(lower, upper, *args, **kwargs)

        return traced

    def entered(whole):
        def traced(*args, **kwargs):
            inside[0] = True
            try:
                return whole(*args, **kwargs)
            finally:
                inside[0] = False

        return traced

    with contextlib.ExitStack() as changes:
        changes.enter_context(patch.object(shared_memory, "threading", SimpleNamespace(**impatient(patience_s))))
        for kind, (operation, function) in OPERATIONS.items():
            changes.enter_context(patch.object(plgpu, operation, labelled(kind, getattr(plgpu, operation))))
            changes.enter_context(patch.object(gpu_callbacks, function, skipped(getattr(gpu_callbacks, function))))
        changes.enter_context(patch.object(jax.lax, "fori_loop", shorter(jax.lax.fori_loop)))
        if body is not None:
            changes.enter_context(patch.object(gpu_backward, body, entered(getattr(gpu_backward, body))))
        yield


@functools.cache
def forward(name: str, kind: str):
    """Return a function that runs a kernel of the table and lists the faults of its answer."""
    from tessera.attention import oracle
    from tessera.attention.dispatch import KERNELS
    from tessera.measure import trials, verify

    kernel = next(k for k in KERNELS if k.name == name)
    call = trials.make(workload(kernel, kind), kernel.role, "bfloat16")
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, "bfloat16", **trials.roundings(kernel))
    run_on = call._replace(count=np.maximum(call.count - 1, 0)) if kind == "list" else call

    def faults() -> list[str]:
        result = trials.run(kernel, run_on, "bfloat16")
        errors, wrong = verify.compare(result, truth, allowed, kernel.role)
        return [*wrong, *(["wrong values"] if (errors > 1).any() else [])]

    return faults


@functools.cache
def gradient(name: str):
    """Return a function that runs the gradient's kernels on the oracle's out and lse and lists wrong dq, dk and dv."""
    import jax
    import jax.numpy as jnp

    from tessera.attention import oracle
    from tessera.attention.contract import AttentionOut, Positions
    from tessera.attention.gpu import backward as gpu_backward
    from tessera.attention.gpu import prefill as gpu_prefill
    from tessera.measure import trials

    work = backward_workload()
    call = trials.make(work, "dense", "bfloat16")
    truth = oracle.attend(call)
    d_out = np.random.default_rng(1).standard_normal(call.q.shape)
    exact = dict(zip(("dq", "dk", "dv"), oracle.gradients(call, d_out), strict=True))
    result = AttentionOut(jnp.asarray(truth.out, jnp.bfloat16), jnp.asarray(truth.lse, jnp.float32))
    slopes = AttentionOut(jnp.asarray(d_out, jnp.bfloat16), jnp.zeros_like(result.lse))
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    ready = jax.jit(lambda *x: gpu_backward.gradients(*x, work.spec, positions))

    def faults() -> list[str]:
        with trials.machine(gpu_prefill.KERNELS[0]):
            k, v, *_ = KeyValues.of(*map(jnp.asarray, call[1:3]))
            dq, *head_major = jax.block_until_ready(ready(jnp.asarray(call.q), k, v, result, slopes))
            found = dq, *KeyValues.of(*head_major)[:2]
        off = {x: np.abs(np.asarray(mine, np.float32) - exact[x]).max() for x, mine in zip(exact, found, strict=True)}
        return [f"wrong {x}" for x in exact if not off[x] <= 2**-6 * max(1.0, np.abs(exact[x]).max())]

    return faults


def verdict(name: str, kind: str, site: int) -> dict:
    """Run a mutant; return the faults that caught it (none if it passes), and the kernel's sites of each kind."""
    from tessera.measure import trials

    faults = gradient(name) if name in GRADIENTS else forward(name, "list" if kind == "list" else "none")
    LEFT_OUT[0] = f"mutant {kind} {site}."
    begun = time.monotonic()
    with breakable(name, WHOLE_S.get(name, START_S)):
        try:
            said = faults()
        except trials.Race:
            said = ["race"]
        except Exception as error:  # noqa: BLE001  whatever the interpreter says of a broken kernel gives it away
            said = [" ".join(str(error).splitlines()[-1:])[:120] or type(error).__name__]
    if kind == "none":  # the last of them was compiled before
        WHOLE_S[name] = max(time.monotonic() - begun, PATIENCE_S)
    return {"caught": said, "sites": SITES[name]}


class Mutants:
    """A process that gives verdicts, restarted after a mutant that hangs."""

    def __init__(self):
        self._process = None
        self._limits_s: dict[str, float] = {}
        self._sites: dict[str, dict[str, list[str]]] = {}

    def sites(self, kernel: str) -> dict[str, list[str]]:
        """Return the places to break, by kind."""
        if kernel not in self._sites:
            whole = self._whole(kernel)
            self._sites[kernel] = {**whole["sites"], "list": ["every list"] if kernel.endswith("sparse") else []}
        return self._sites[kernel]

    def caught(self, kernel: str, kind: str, site: int) -> list[str]:
        """Return the faults that caught the mutant, empty if none; five times the kernel's time counts as a hang."""
        if self._process is None or kernel not in self._limits_s:
            self._whole(kernel)
        found = self._answer([kernel, kind, site], self._limits_s[kernel])
        if found is None:
            self.close()
        return (found or {"caught": ["the kernel never ends"]})["caught"]

    def _whole(self, kernel: str) -> dict:
        """Return the verdict on the unbroken kernel, whose time sets the limit of its mutants in this process."""
        start = time.monotonic()
        if self._process is None:
            self._start()
        for _ in range(2):  # the second run, already compiled, shows how long a wait may take
            whole = self._answer([kernel, "none", 0], START_S)
            if whole is None or whole["caught"]:
                raise AssertionError(f"{kernel} fails before anything is broken: {whole or 'the kernel never ends'}")
        self._limits_s[kernel] = 5 * (time.monotonic() - start)
        return whole

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
            self._limits_s.clear()


def main() -> int:
    """Answer requests until the input ends; given names of kernels, try all their mutants and print a table."""
    if sys.argv[1:]:
        return every(sys.argv[1:])
    prepare_simulator()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(verdict(*json.loads(line))) + "\n")
        replies.flush()
    return 0


def every(kernels: list[str]) -> int:
    """Print a line per mutant of the kernels; return 1 if one that is not in EQUIVALENT is not caught."""
    mutants, missed = Mutants(), 0
    for kernel in kernels:
        for kind, places in mutants.sites(kernel).items():
            for site, where in enumerate(places):
                begun = time.monotonic()
                caught, why = mutants.caught(kernel, kind, site), EQUIVALENT.get((kernel, kind, where))
                missed += not caught and why is None
                said = "; ".join(caught) or (f"equivalent: {why}" if why else "NOT CAUGHT")
                print(f"{time.monotonic() - begun:.1f}", kernel, kind, where, said[:60], flush=True)
    mutants.close()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
