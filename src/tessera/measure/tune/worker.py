"""The tuner's child process, which runs candidates: a crash, a hang or too much memory ends it, but not the tuner.

Requests and answers are lines of JSON. A request names a kernel (a name in the table, or "module:attribute"), a call
and a config. The answer holds seconds per call, or the error. The worker compiles, checks the result of a warm-up call,
times each call on fresh inputs and checks the last result. A candidate that fails a check gets no times.
"""

import collections
import importlib
import json
import os
import resource
import sys
import time
from typing import NamedTuple

import jax

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Kernel
from tessera.deviceless import programs
from tessera.measure.errors import plain
from tessera.measure.tune import calls


class Program(NamedTuple):
    """A compiled candidate."""

    role: str
    spec: AttentionSpec
    shapes: Shapes
    compiled: jax.stages.Compiled
    compile_s: float


def kernel_named(name: str) -> Kernel:
    """Return the kernel with this name in the table of kernels; "module:attribute" names a kernel to import instead."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if attribute else programs.kernel_named(name)


KEPT: collections.OrderedDict[str, Program] = collections.OrderedDict()
"""Compiled candidates, kept so that contenders can take turns. The least recently used is dropped first."""
MOST_KEPT = 8


def program_of(request: dict) -> Program:
    """Return the compiled candidate of a request, from KEPT if it is there."""
    name = json.dumps([request[part] for part in ("kernel", "spec", "shapes", "config")], sort_keys=True)
    if name not in KEPT:
        kernel = kernel_named(request["kernel"])
        spec, shapes = AttentionSpec(**request["spec"]), Shapes(**request["shapes"])
        config = kernel.Config(**request["config"])

        def step(q, kv, positions, selection):
            return kernel.launch(q, kv, spec, positions, selection, config)

        start = time.perf_counter()
        compiled = jax.jit(step).lower(*calls.draw(spec, shapes, 0).arguments).compile()
        KEPT[name] = Program(kernel.role, spec, shapes, compiled, time.perf_counter() - start)
        if len(KEPT) > MOST_KEPT:
            KEPT.popitem(last=False)
    KEPT.move_to_end(name)
    return KEPT[name]


def measure(request: dict) -> dict:
    """Time `rounds` calls after one warm-up call; return their seconds and the compile seconds.

    If a result is wrong, return an error in place of the calls' seconds.
    """
    program = program_of(request)
    samples, fault = [], None
    for number in range(-1, request["rounds"]):
        call = jax.block_until_ready(calls.draw(program.spec, program.shapes, request["seed"] + 1 + number))
        arguments = jax.block_until_ready(call.arguments)
        start = time.perf_counter()
        out = jax.block_until_ready(program.compiled(*arguments))
        seconds = time.perf_counter() - start
        if number in (-1, request["rounds"] - 1):
            fault = calls.fault(program.spec, call, out, program.role)
        if fault:
            return {"samples": [], "compile_s": program.compile_s, "error": f"wrong: {fault}"}
        if number >= 0:
            samples.append(seconds)
    return {"samples": samples, "compile_s": program.compile_s, "error": None}


def main() -> None:
    """Answer requests until the input ends; argument 1 is the memory limit in bytes, and 0 means no limit."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep a candidate's prints out of the answers
    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except (RuntimeError, ValueError, TypeError, MemoryError, NotImplementedError) as error:
            answer = {"samples": [], "compile_s": 0.0, "error": plain(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
