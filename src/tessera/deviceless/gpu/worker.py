"""Compile for an NVIDIA GPU that this machine lacks, in a separate process, since a compiler may hang or crash it.

Reads JSON requests from standard input, one per line, and answers each with a line of JSON on standard output. A
request has the same form as in `tpu.worker`, plus the chip's target configuration in `target`. The compiler's reports
on every kernel go to the folder `dump`, where `sass.read` finds them.
"""

import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from tessera.deviceless.gpu import sass
from tessera.deviceless.tpu.worker import build, follow, jit, memory

DUMP_TO = "MOSAIC_GPU_DUMP_TO"


def main() -> int:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library prints go to stderr and cannot break the protocol
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
    return 0


def answer(request: dict) -> dict:
    """Lower and compile the requested program; an error of the compiler, or of the program, is an answer."""
    import jax
    from jax._src.pallas.mosaic.error_handling import MosaicError
    from jax._src.pallas.mosaic_gpu.lowering import LoweringError
    from jax.experimental import topologies

    errors = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, OSError, MosaicError, LoweringError)
    folder = Path(request["dump"])
    jax.clear_caches()  # a program from the cache would leave no report
    stage, start = "compiler", time.perf_counter()
    try:
        find_tools()
        topology = topologies.get_topology_desc(platform="cuda", target_config=request["target"], topology="1x1x1")
        device, stage = topology.devices[0], "lower"
        os.environ[DUMP_TO] = str(folder)
        with on_chip(device):
            function, arguments, about = build(request, [device])
            lowered = jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        stage, lowered_at = "compile", time.perf_counter()
        with reports(folder / sass.COMPILER):
            compiled = lowered.compile(compiler_options=request.get("compiler_options"))
    except errors as error:
        short = f"{type(error).__name__}: {error}"
        log = folder / sass.COMPILER
        said = log.read_text()[-4000:] if log.exists() else ""
        return {
            "compiled": False,
            "stage": stage,
            "error": short,
            "said": said,
            "compile_s": time.perf_counter() - start,
            "trace": traceback.format_exc()[-4000:],
        }
    (folder / "program.hlo").write_text(compiled.as_text())
    reply = {"compiled": True, "trace_s": lowered_at - start, "compile_s": time.perf_counter() - lowered_at}
    return reply | {"memory": memory(compiled), "jax": jax.__version__, "about": about}


def find_tools() -> None:
    """Tell the compiler where ptxas and nvdisasm are: the wheels put both into nvidia/cu13/bin.

    Raises:
        FileNotFoundError: neither the wheels nor a CUDA installation that JAX finds has both.
    """
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
    """Write ptxas' report and the disassembly of every kernel, and nothing else, to a file.

    With MOSAIC_GPU_DUMP_TO the compiler prints every pass too: hundreds of megabytes for a large kernel.
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


def on_chip(device):
    """Return a context in which code that queries the chip during tracing gets this one."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    abstract = AbstractDevice(device.device_kind, device.core_count, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=abstract))


if __name__ == "__main__":
    sys.exit(main())
