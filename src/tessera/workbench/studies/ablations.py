"""Estimate the worth of each choice in the TPU prefill kernel: undo each one separately and compare the schedules.

    tessera study tpu-ablations --chip v6e     # compiles the kernel unchanged and without each choice
    tessera study tpu-ablations --report       # a record per chip and choice into evidence/

Every variant computes the same attention. One is less exact: it keeps weighted values (and row sums, where the matrix
unit makes them) in bfloat16 between updates, each of which widens them, adds and rounds. On v7x the kernel keeps its
statistics in VMEM, and the first variant keeps them in registers. Without prefetch, nothing hides the copies, so their
time is added.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tessera.attention.contract import AttentionSpec
from tessera.attention.tpu import prefill as tpu_prefill
from tessera.attention.tpu import prefill_rows
from tessera.attention.tpu.prefill_blocks import Cut
from tessera.attention.tpu.prefill_rows import Rows
from tessera.core import files
from tessera.deviceless import inspection, programs
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu import compiler as tpu
from tessera.deviceless.tpu import predict
from tessera.workbench import campaign, evidence

COMMAND = "tessera study tpu-ablations, and --report"
RECORDS = Path("evidence/tpu-ablations.jsonl")
OP = "kernel choice"
AS_IT_IS = "as it is"
PREFETCH = "prefetch"
CALL = MappingProxyType({"role": "dense", "phase": "prefill", "length": 16384, "heads": 32, "kv_heads": 8})


def other_place(*call) -> Cut:
    """Replace `prefill_blocks.cut_call`: after every chunk, keep the state in VMEM where it is not, and the reverse."""
    cut = CUT_CALL(*call)
    return cut._replace(state_in_vmem=not cut.state_in_vmem)


def spread_statistics(state: Rows, q, k, v, cut, start, mask=None, real=None) -> Rows:
    """Replace `prefill_rows.absorb`: keep one number per row and spread it over lanes at every use."""
    s = prefill_rows.dot(q, k, 1)
    if mask is not None:
        s = prefill_rows.masked(s, mask, cut.groups)
    if real is not None:
        v = jnp.where(real, v, jnp.zeros_like(v))
    m_old = state.m[:, :1]
    m = jnp.maximum(m_old, s.max(-1, keepdims=True))
    alpha, p = jnp.exp2(m_old - m), prefill_rows.weigh(s - m, cut.half_exp)
    pv = prefill_rows.dot(p.astype(v.dtype), prefill_rows.extend(v, start, cut), 0)
    acc = state.acc * alpha + pv[:, : state.acc.shape[1]]
    sums = None if state.sums is None else prefill_rows.add_lanes(state.sums * alpha, p)
    return Rows(m, acc, sums)


def store_spread(refs, rows, bank, state: Rows) -> None:
    """Replace `tpu_prefill.store` for a state of `spread_statistics`."""
    STORE(refs, rows, bank, state._replace(m=jnp.broadcast_to(state.m, (state.m.shape[0], refs.m.shape[1]))))


def sliced_blocks(refs, rows, state, start, at, bank, cut, mask=None, real=None) -> Rows:
    """Replace `tpu_prefill.update`: read a whole block of keys and values and slice the chunk out of it."""
    if not isinstance(at.start, int):  # slices of values need static bounds
        return UPDATE(refs, rows, state, start, at, bank, cut, mask, real)
    chunk = slice(at.start, at.start + at.size)
    k, v = refs.k[0, 0][chunk], refs.v[0, 0][chunk]
    state = prefill_rows.absorb(state, refs.q_scaled[rows], k, v, cut, start + at.start, mask, real)
    if cut.state_in_vmem:
        tpu_prefill.store(refs, rows, bank, state)
        return tpu_prefill.load(refs, rows, bank)
    return state


class HalfSums:
    """Replaces `pltpu.VMEM`: the second plain float32 scratch, the accumulator, is bfloat16; the first is the
    maximum."""

    def __init__(self):
        self.seen = 0

    def __call__(self, shape, dtype):
        self.seen += dtype == jnp.float32 and len(shape) == 2
        half = self.seen == 2
        self.seen += half
        return VMEM(shape, jnp.bfloat16 if half else dtype)


def half_accumulator(state: Rows, *args, **kwargs) -> Rows:
    """Replace `prefill_rows.absorb`: keep the weighted values in bfloat16."""
    updated = ABSORB(state._replace(acc=state.acc.astype(jnp.float32)), *args, **kwargs)
    return updated._replace(acc=updated.acc.astype(jnp.bfloat16))


def one_buffer(block_shape=None, index_map=None, **kwargs):
    """Replace `pl.BlockSpec`: use a single buffer, so a block's copy starts after the last use of the block before."""
    return BLOCK_SPEC(block_shape, index_map, **kwargs, pipeline_mode=pl.Buffered(1))


UPDATE, STORE, ABSORB = tpu_prefill.update, tpu_prefill.store, tpu_prefill.absorb
VMEM, BLOCK_SPEC, CUT_CALL = pltpu.VMEM, pl.BlockSpec, tpu_prefill.cut_call

CHOICES: Mapping[str, Callable[[], list[tuple[Any, str, Callable]]]] = MappingProxyType(
    {
        AS_IT_IS: lambda: [],
        "statistics in registers": lambda: [(tpu_prefill, "cut_call", other_place)],
        "no lane broadcasts": lambda: [
            (tpu_prefill, "absorb", spread_statistics),
            (tpu_prefill, "store", store_spread),
        ],
        "no slicing": lambda: [(tpu_prefill, "update", sliced_blocks)],
        "float32 accumulation": lambda: [(tpu_prefill, "absorb", half_accumulator), (pltpu, "VMEM", HalfSums())],
        PREFETCH: lambda: [(pl, "BlockSpec", one_buffer)],
    }
)
"""Choice -> replacements (module, name, function) that undo it."""


@contextlib.contextmanager
def undone(choice: str) -> Iterator[None]:
    """Trace the kernel without this choice. A process that has traced it before must clear jax's caches first."""
    changes = CHOICES[choice]()
    held = [getattr(place, name) for place, name, _ in changes]
    try:
        for place, name, changed in changes:
            setattr(place, name, changed)
        yield
    finally:
        for (place, name, _), kept in zip(changes, held):
            setattr(place, name, kept)


def attention_without(choice: str, kernel: str, spec: Mapping, shapes: Mapping) -> tuple[Callable, tuple, dict]:
    """Trace `programs.attention_call` without the choice."""
    call, arguments, about = programs.attention_call(kernel, spec, shapes)

    def changed(*arguments):
        with undone(choice):
            return call(*arguments)

    return changed, arguments, about


def compile_one(chip: str, choice: str, limit_s: float) -> dict[str, Any]:
    """Compile the kernel without the choice; return cycles and slots of one main-loop pass, and the call's time."""
    spec, shapes = inspection.call(batch=1, head_dim=128, dtype="bfloat16", spec=AttentionSpec(), fraction=1.0, **CALL)
    kernel = programs.kernel_named("tpu_prefill_dense")
    made = {"kernel": kernel.name, "spec": asdict(spec), "shapes": shapes._asdict()}
    program = factory_program("tessera.workbench.studies.ablations:attention_without", choice=choice, **made)
    found = tpu.compile_for(chip, program, limit_s=limit_s)
    line = {"chip": chip, "choice": choice, "error": str(found.error) if found.error else None}
    if found.error:
        return line
    p = predict.predict(found, found.executions, predict.CALIBRATED)
    [schedule] = found.schedules
    [full] = [region for region in schedule.regions if region.name == "full"]
    passes = found.executions["full"]
    flops = kernel.cost(spec, shapes)["flops"]
    # Without prefetch, a step's work starts after its copy.
    ms = p.ms + (min(p.compute_ms, p.dma_ms) if choice == PREFETCH else 0.0)
    return line | {
        "ms": ms,
        "compute_ms": p.compute_ms,
        "dma_ms": p.dma_ms,
        "tflops": flops / ms / 1e9,
        "bound_by": p.bound_by,
        "full": {"cycles": full.cycles, "bundles": full.bundles, "slots": dict(full.slots), "passes": passes},
        "capacity": dict(schedule.capacity),
        "spill_slots": p.spill_slots,
        "vmem_bytes": schedule.vmem_bytes,
        "settings": found.settings,
        "compile_s": round(found.compile_s, 1),
    }


def identity(line: Mapping[str, Any]) -> tuple:
    """Return the line's key."""
    return line["chip"], line["choice"]


def records(found: list[dict[str, Any]]) -> list[evidence.Record]:
    """Build one record per chip and choice: the predicted time without it, against the unchanged kernel's."""
    whole = {line["chip"]: line["ms"] for line in found if line["choice"] == AS_IT_IS and not line["error"]}
    check, made = "predicted from the compiler's schedule, not measured", []
    for line in found:
        ratio = None if line["error"] or line["chip"] not in whole else whole[line["chip"]] / line["ms"]
        what = evidence.What(
            op=OP,
            kernel="tpu_prefill_dense",
            workload=f"{line['choice'] if line['choice'] == AS_IT_IS else 'without ' + line['choice']}, {line['chip']}",
            dtype="bfloat16",
        )
        record = evidence.make(
            what,
            [] if line["error"] else [line["ms"] / 1e3],
            command=COMMAND,
            how=evidence.How(check=check + ("; the copies' time is added" if line["choice"] == PREFETCH else "")),
            comparison=ratio and evidence.Comparison(against=AS_IT_IS, ratio=ratio),
            facts=line,
            error=line["error"],
        )
        made.append(campaign.of_its_code(record, line))
    return made


def study(options: Any) -> int:
    """Run `tessera study tpu-ablations`: compile what this commit has not compiled, or report."""
    if options.report:
        lines = campaign.of_last_code(campaign.lines_to_report(options.out), identity)
        evidence.append(RECORDS, records(lines))
        return 0
    found, code = files.read_lines(options.out), asdict(evidence.code())
    done = {identity(line) for line in found if campaign.is_done(line, code)}
    for chip in options.chip or tpu.TOPOLOGIES:
        for choice in CHOICES:
            if (chip, choice) not in done:
                line = compile_one(chip, choice, options.limit_s) | code
                files.append_line(options.out, line)
                said = line["error"] or f"{line['ms']:.3f} ms, {line['full']['cycles']:,} cycles in the main loop"
                print(f"{chip} {choice if choice == AS_IT_IS else 'without ' + choice}: {said}"[:240], flush=True)
    return 0
