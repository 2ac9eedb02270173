"""Compile for absent chips in a separate process: a compiler may hang or crash, and libtpu starts once per process.

The process reads JSON requests from standard input, one per line, and answers each with a line of JSON on standard
output. Run as a file (`python -P worker.py`), it needs only jax and the compiler. It can therefore compile the kernels
of other libraries in environments without tessera. The caller sets the environment variables that the compilers read.

A request names a factory "module:function" with JSON keyword arguments. The factory returns (function, abstract
arguments), and optionally a mapping to send back in the reply, with keys such as "settings". If it has a parameter
`devices`, it gets the first devices of the topology, as many as the request says, and must return arguments with
shardings.

A request also names the `platform`: "tpu" with a `topology`, or "cuda" with the chip's `target` configuration. A "cuda"
request also names the file `report` for the compiler's report on every kernel. The program's text goes to the folder
`dump`. A TPU worker can answer only one request with a dump, because libtpu writes all schedules of a process to one
folder.
"""

import importlib.util
import inspect
import json
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ImportError, OSError)
"""Errors that a compiler raises, or that a faulty program raises before it reaches the compiler."""

DUMP_TO = "MOSAIC_GPU_DUMP_TO"


def pallas_errors(platform: str) -> tuple[type[Exception], ...]:
    from jax._src.pallas.mosaic.error_handling import MosaicError

    if platform == "tpu":
        from jax._src.pallas.mosaic.lowering import LoweringException as LoweringError
    else:
        from jax._src.pallas.mosaic_gpu.lowering import LoweringError
    return MosaicError, LoweringError


def main() -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library prints go to stderr and cannot break the protocol
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
    return 0


def follow(parent: int) -> None:
    """Exit once the parent process has ended: the parent may be killed while the compiler runs for minutes."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def answer(request: dict) -> dict:
    import jax

    jax.clear_caches()  # hundreds of programs would fill the memory, and a cached program leaves no report
    platform, report = request["platform"], request.get("report")
    stage, start = "compiler", time.perf_counter()
    try:
        devices, stage = find_devices(request), "lower"
        with on_chip(devices[0], platform):
            function, arguments, about = build(request, devices)
        with on_mesh(arguments) or on_chip(devices[0], platform):
            lowered = jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
        stage, lowered_at = "compile", time.perf_counter()
        with reports(Path(report)) if report else nullcontext():
            compiled = lowered.compile(compiler_options=request.get("compiler_options"))
    except (*ERRORS, *pallas_errors(platform)) as error:
        reply = {"compiled": False, "stage": stage, "compile_s": time.perf_counter() - start}
        said = Path(report).read_text()[-4000:] if report and Path(report).exists() else ""
        return reply | {"error": f"{type(error).__name__}: {error}", "said": said}
    compile_s = time.perf_counter() - lowered_at
    if request.get("dump"):
        Path(request["dump"], "program.hlo").write_text(compiled.as_text())
    return {"compiled": True, "compile_s": compile_s, "memory": memory(compiled), "about": about}


def find_devices(request: dict) -> list:
    from jax.experimental import topologies

    if request["platform"] == "tpu":
        found = topologies.get_topology_desc(topology_name=request["topology"], platform="tpu")
        return found.devices[: request.get("devices", 1)]
    find_tools()
    found = topologies.get_topology_desc(platform="cuda", target_config=request["target"], topology="1x1x1")
    os.environ[DUMP_TO] = request["dump"]
    return found.devices


def find_tools() -> None:
    """Tell the compiler where ptxas and nvdisasm are: NVIDIA's wheels put both into nvidia/cu13/bin."""
    import jax.experimental.mosaic.gpu.core  # noqa: F401  sets the variable from what JAX finds

    places = [Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])]
    wheels = importlib.util.find_spec("nvidia")
    if wheels is not None:
        places = [Path(place) / "cu13" for place in wheels.submodule_search_locations] + places
    for place in places:
        if (place / "bin" / "ptxas").exists() and (place / "bin" / "nvdisasm").exists():
            os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(place)
            return
    raise FileNotFoundError("ptxas and nvdisasm are missing")


@contextmanager
def reports(path: Path):
    """Context that writes ptxas' report and the disassembly of every kernel, and nothing else, to a file.

    MOSAIC_GPU_DUMP_TO is unset first. Otherwise the compiler would also print the result of every pass: hundreds of
    megabytes for a large kernel.
    """
    del os.environ[DUMP_TO]
    os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
    kept = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def on_chip(device, platform: str):
    """Return a context in which code that asks jax for the device during tracing gets `device`."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    cores, name = (getattr(device, "num_cores", 1), "tpu") if platform == "tpu" else (device.core_count, "gpu")
    abstract = AbstractDevice(device.device_kind, cores, name)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=abstract))


def on_mesh(arguments):
    """Return a context in which code that asks jax for the mesh gets the arguments' mesh; None if they have none."""
    import jax

    for leaf in jax.tree.leaves(arguments):
        if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding):
            return jax.sharding.use_abstract_mesh(leaf.sharding.mesh.abstract_mesh)
    return None


def jit(function):
    import jax

    # A function that is already jitted keeps its donated arguments and shardings.
    return function if hasattr(function, "trace") else jax.jit(function)


def build(request: dict, devices) -> tuple:
    """Return (function, abstract arguments placed on the devices, the factory's mapping for the reply or {})."""
    import jax

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
    found = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    return {name: int(getattr(found, f"{name}_size_in_bytes")) for name in names}


if __name__ == "__main__":
    sys.exit(main())
