"""Compile one prefill or decode step of a whole model for a mesh that this machine lacks, and predict its time.

This is `tessera inspect --model`. The step is tensor-parallel. The predicted time is the sum of four parts:

- attention: each kernel's time, from its schedule,
- memory: the bytes of all operations outside the attention kernels / bandwidth,
- computing beyond memory: the time of the same operations by their schedules (matrix products included), less the
  memory time above,
- collectives: the bytes that devices exchange / bandwidth of their links.

The sum leaves out the latency of the exchanges, loops inside tile selection, and the time that devices wait for each
other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tessera.core.hardware import LINK_BYTES_PER_S
from tessera.core.memory import format_bytes
from tessera.core.mesh import MeshShape, check
from tessera.deviceless import hlo
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import fusions, predict
from tessera.models.config import ModelConfig
from tessera.models.files.forms import check_split
from tessera.models.weights import split_sizes

MESHES = MappingProxyType(
    {
        "v5e": {1: "v5e:2x2", 2: "v5e:2x2", 4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"},
        "v5p": {1: "v5p:2x2x1", 2: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4"},
        "v6e": {1: "v6e:2x2", 2: "v6e:2x2", 4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
        "v7x": {1: "tpu7x:2x2x1", 2: "tpu7x:2x2x1", 4: "tpu7x:2x2x1", 8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
    }
)
"""Chip -> mesh size -> topology whose first devices form the mesh. The compiler needs at least four chips."""


@dataclass(frozen=True, kw_only=True)
class StepInspection:
    """One step of a model on a mesh; bytes and times are of one device."""

    compiled: bool
    timed_out: bool = False
    model: str
    chip: str
    mesh: int
    phase: str
    error: str | None = None
    hbm_bytes: int | None = None
    memory: Mapping[str, int] = MappingProxyType({})
    collectives: tuple[tuple[str, int, str, int | None], ...] = ()  # `hlo.Collective`, times per step (None: unknown)
    predicted_ms: float | None = None  # the sum of `parts_ms` (see the module docstring)
    parts_ms: Mapping[str, float] = MappingProxyType({})
    attention: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # role -> kernel, layers, ms of one layer
    tokens_per_s: float | None = None
    compile_s: float | None = None

    def json(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}


def inspect_step(
    chip: str, model: str, mesh: int, *, config: ModelConfig, limit_s: float, **call: Any
) -> StepInspection:
    """Compile a step for `mesh` devices that share every layer, and predict its time.

    `model` is as in `find_config`, and `call` holds the other arguments of `steps.model_step`. A model that cannot be
    divided among the devices raises ValueError.
    """
    if mesh not in MESHES[chip]:
        raise ValueError(f"--mesh {mesh} must be one of {', '.join(map(str, MESHES[chip]))} on {chip}")
    if config.num_kv_heads % mesh:
        raise ValueError(f"--mesh {mesh} must divide the model's {config.num_kv_heads} KV heads")
    check(MeshShape(mesh, 1), split_sizes(config), mesh)
    check_split(config, call.get("weights"), mesh)
    program = factory_program("tessera.deviceless.steps:model_step", model=model, **call)
    found = tpu.compile_for(
        chip, program, topology=MESHES[chip][mesh], devices=mesh, limit_s=limit_s, with_fusions=True
    )
    about = {"model": model, "chip": chip, "mesh": mesh, "phase": call["phase"]}
    if found.error is not None:
        about |= {"timed_out": found.timed_out, "error": str(found.error), "compile_s": found.compile_s}
        return StepInspection(compiled=False, **about)
    rows = call["batch"] * (1 if call["phase"] == "decode" else call["queries"])
    kernels = attention_ms(found)
    parts = {
        "attention": sum(k["layers"] * k["ms"] for k in kernels.values()),
        **around_ms(found, config.num_layers),
        "collectives": collectives_ms(found, chip, mesh, config.num_layers),
    }
    total = sum(parts.values())
    times = {"program": 1, "layer": config.num_layers}
    return StepInspection(
        compiled=True,
        hbm_bytes=found.hbm_bytes,
        memory=dict(found.memory),
        collectives=tuple((*c, times.get(c.where)) for c in hlo.collectives(found.program)),
        predicted_ms=round(total, 4),
        parts_ms={name: round(ms, 4) for name, ms in parts.items()},
        attention=kernels,
        tokens_per_s=round(rows / total * 1e3, 1),
        compile_s=round(found.compile_s, 1),
        **about,
    )


def attention_ms(found: tpu.Compiled) -> dict[str, dict[str, Any]]:
    """Return `StepInspection.attention`."""
    kernels = {}
    for role, layers in found.about["roles"].items():
        figures = found.about["calls"][role]
        own = replace(found, schedules=tuple(s for s in found.schedules if role in s.name), operations=())
        counts = figures["executions"] or {predict.BYTES: figures["bytes"]}
        prediction = predict.predict(own, counts, predict.CALIBRATED)
        kernels[role] = {"kernel": figures["kernel"], "layers": layers, "ms": round(prediction.ms, 5)}
    return kernels


def around_ms(found: tpu.Compiled, layers: int) -> dict[str, float]:
    """Predict the milliseconds of all operations outside the attention kernels, in the module docstring's two parts.

    Operations in the program's entry run once, those in the loop over layers once per layer. Loops inside that loop,
    such as those of tile selection, are left out.
    """
    on = predict.device(found.chip)
    bandwidth = on.bytes_per_s * predict.CALIBRATED.bandwidth_share
    memory_s = whole_s = 0.0
    body = hlo.loop_body(found.program)
    for operations, times in ((found.operations, 1), (hlo.operations(found.program, body, layers), layers)):
        moved, busy = fusions.seconds(operations, found.fusions, on.clock_hz, bandwidth)
        memory_s, whole_s = memory_s + times * moved, whole_s + times * busy
    return {"memory": 1e3 * memory_s, "computing beyond memory": 1e3 * (whole_s - memory_s)}


def collectives_ms(found: tpu.Compiled, chip: str, mesh: int, layers: int) -> float:
    """Predict the milliseconds of the exchanges between devices.

    In a ring of n devices, each device sends 2 (n - 1) / n of an all-reduce's bytes, and (n - 1) / n of the bytes of
    any other exchange. It sends in one direction, at half of LINK_BYTES_PER_S.
    """
    total = 0.0
    for c in hlo.collectives(found.program):
        share = (2 if c.opcode == "all-reduce" else 1) * (mesh - 1) / mesh
        total += share * c.bytes * {"program": 1, "layer": layers}.get(c.where, 1)
    return 1e3 * total / (LINK_BYTES_PER_S[chip] / 2)


def print_step(result: StepInspection) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not result.compiled:
        verdict = "was not compiled in time" if result.timed_out else "does not compile"
        console.print(f"{result.model} {result.phase} on {result.mesh} x {result.chip} {verdict}", markup=False)
        console.print(f"  {result.error}", markup=False)
        return
    title = f"{result.model}, one {result.phase} step on {result.mesh} x {result.chip}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("predicted", f"{result.predicted_ms:.3f} ms, {result.tokens_per_s:,.0f} tokens/s")
    for name, ms in result.parts_ms.items():
        table.add_row(f"  {name}", f"{ms:.3f} ms")
    for role, figures in result.attention.items():
        table.add_row(f"  {role}", f"{figures['layers']} layers of {figures['ms']:.4f} ms ({figures['kernel']})")
    table.add_row("memory per device", format_bytes(result.hbm_bytes))
    for name, size in result.memory.items():
        table.add_row(f"  {name.replace('_', ' ')}", format_bytes(size))
    for opcode, size, where, times in result.collectives:
        table.add_row(opcode, f"{format_bytes(size)} {f'x {times}' if times else f'in an {where}'}")
    table.add_row("compiled in", f"{result.compile_s:.0f} s")
    console.print(table)
