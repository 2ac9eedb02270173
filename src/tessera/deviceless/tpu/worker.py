"""Compile for TPUs that this machine lacks, in a separate process, since libtpu initialises once.

Reads JSON requests from standard input, one per line, and answers each with a line of JSON on standard output. With a
`dump` it answers only one request: libtpu writes all schedules of a process to one folder. Run as a file
(`python -P worker.py`) it needs only jax and libtpu, so that peers compile in environments without tessera.
The caller sets the environment variables that libtpu reads (`tessera.deviceless.tpu.compiler.environment`).

A request names a kernel of `tessera.attention.dispatch` with its spec, shapes and config, or a factory
"module:function" with JSON keyword arguments. The factory returns (function, abstract arguments), and optionally a
third value to send back in the reply ("executions", "settings"). A factory that takes `devices` gets that many of the
topology's and returns arguments with shardings.
"""

import importlib
import inspect
import json
import os
import sys
import threading
import time
import traceback

ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ImportError)
"""Errors of a compiler, or of a program that is wrong before it reaches one."""


def mosaic_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Pallas' own lowering, which are not among `ERRORS`."""
    from jax._src.pallas.mosaic import error_handling, lowering

    return error_handling.MosaicError, lowering.LoweringException


def main() -> int:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library prints go to stderr and cannot break the protocol
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
    return 0


def follow(parent: int) -> None:
    """Exit with the parent: it may be killed while the compiler runs for minutes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def answer(request: dict) -> dict:
    """Compile the requested program; an error of the compiler, or of the program, is an answer."""
    import jax
    from jax.experimental import topologies

    jax.clear_caches()  # drop earlier programs: hundreds of them would fill the memory
    stage, start = "trace", time.perf_counter()
    try:
        topology = topologies.get_topology_desc(topology_name=request["topology"], platform="tpu")
        devices = topology.devices[: request.get("devices", 1)]
        with on_chip(devices[0]):
            function, arguments, about = build(request, devices)
        with on_mesh(arguments) or on_chip(devices[0]):
            traced = jit(function).trace(*arguments)
            lowered = traced.lower(lowering_platforms=("tpu",))
        stage, traced_at = "compile", time.perf_counter()
        compiled = lowered.compile(compiler_options=request.get("compiler_options"))
    except (*ERRORS, *mosaic_errors()) as error:
        short = f"{type(error).__name__}: {error}"
        took, trace = time.perf_counter() - start, traceback.format_exc()[-4000:]
        return {"compiled": False, "stage": stage, "error": short, "compile_s": took, "trace": trace}
    reply = {"compiled": True, "trace_s": traced_at - start, "compile_s": time.perf_counter() - traced_at}
    reply |= {"memory": memory(compiled), "cost": cost(compiled), "jax": jax.__version__, "about": about}
    if request.get("dump"):
        with open(os.path.join(request["dump"], "program.hlo"), "w") as file:
            file.write(compiled.as_text())
    return reply


def jit(function):
    """Jit the function, unless it is jitted already (with its own donation or shardings)."""
    import jax

    return function if hasattr(function, "trace") else jax.jit(function)


def on_chip(device):
    """Return a context in which code that queries the chip during tracing gets this one."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    abstract = AbstractDevice(device.device_kind, getattr(device, "num_cores", 1), "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=abstract))


def on_mesh(arguments):
    """Return the same context for the mesh that a program's arguments are sharded over; None for one device."""
    import jax

    for leaf in jax.tree.leaves(arguments):
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding):
            return jax.sharding.use_abstract_mesh(leaf.sharding.mesh.abstract_mesh)
    return None


def build(request: dict, devices) -> tuple:
    """Return (function, abstract arguments placed on the devices, the factory's third value: executions, settings)."""
    import jax

    if "kernel" in request:
        from tessera.deviceless.programs import attention_call

        made = attention_call(**{k: request.get(k) for k in ("kernel", "spec", "shapes", "config")})
    else:
        module, _, name = request["factory"].partition(":")
        factory = getattr(importlib.import_module(module), name)
        extra = {"devices": devices} if "devices" in inspect.signature(factory).parameters else {}
        made = factory(**request.get("kwargs", {}), **extra)
    function, arguments, about = made if len(made) == 3 else (*made, {})
    one = jax.sharding.SingleDeviceSharding(devices[0])

    def place(x):
        sharding = getattr(x, "sharding", None)
        return x if sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)

    return function, jax.tree.map(place, arguments), about


def memory(compiled) -> dict:
    """Return the program's main memory on one device, in bytes."""
    found = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    return {name: int(getattr(found, f"{name}_size_in_bytes")) for name in names}


def cost(compiled) -> dict:
    """Return XLA's counts for the whole program: flops and bytes."""
    found = compiled.cost_analysis() or {}
    return {"flops": float(found.get("flops", 0.0)), "bytes": float(found.get("bytes accessed", 0.0))}


if __name__ == "__main__":
    sys.exit(main())
