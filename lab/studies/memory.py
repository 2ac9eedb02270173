"""Measure steps of SmolLM2 with and without donation and recomputation, and in two dtypes.

The study measures memory and time on this CPU, and memory on an absent v6e.

    python -m lab study memory             # minutes; --list prints what is left
    python -m lab study memory --report    # a record per step, form and device in evidence/

Bytes are the compiler's. Times are measured on the CPU, where the forms of a step take turns; nothing runs on the v6e.
A step runs as the engine and `tessera train` run it, except for the one choice that names its form. XLA's own count of
operations is not stored: it counts the body of a loop over layers once.
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lab import campaign
from tessera.core import files, mesh
from tessera.deviceless.compiler import factory_program
from tessera.deviceless.tpu.compiler import Compiler
from tessera.deviceless.worker import memory
from tessera.measure import evidence, timing
from tessera.models.cache import init_cache
from tessera.models.config import ModelConfig
from tessera.models.files.source import find_config
from tessera.models.weights import abstract_params
from tessera.runtime.step import decode_token
from tessera.sparse.baselines import Dense
from tessera.train import mesh as training_mesh
from tessera.train.loop import train_step
from tessera.train.recipes import Recipe, Stage
from tessera.train.state import init_state, shardings

COMMAND = "python -m lab study memory; python -m lab study memory --report"
EVIDENCE = "evidence/step-memory.jsonl"
OP = "memory of a step"
MODEL = "smollm2"
KEYS = 8192
"""Keys in the cache of the decode step, all of which the new token reads."""
ROWS = 512
"""Tokens per training step."""
ROUNDS = MappingProxyType({"decode": 10, "training": 5})
"""Step -> number of timed calls of each form on the CPU."""

FORMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "decode": {"cache donated": {}, "cache kept": {"donate": False}},
        "training": {"as stored": {}, "recomputed": {"remat": True}, "bfloat16": {"dtype": "bfloat16"}},
    }
)
"""Step -> form -> arguments of the step's factory. The other forms of a step are compared with its first form."""
HELD = MappingProxyType({"decode": 1, "training": 0})
"""Step -> index of the argument whose new value is the step's first result: the cache, or the training state."""
CHIPS = ("cpu", "v6e")
CASES = tuple({"step": step, "form": form, "chip": chip} for chip in CHIPS for step in FORMS for form in FORMS[step])


@cache
def _config() -> ModelConfig:
    return find_config(MODEL)[0]


def decode(devices: Sequence[jax.Device], donate: bool = True) -> tuple[Any, tuple]:
    """Return (jitted step, abstract arguments) to decode one token after KEYS - 1 others, with unrolled layers.

    Weights and cache are bfloat16 on a TPU and float32 on a CPU.
    """
    config = replace(_config(), dtype="float32" if devices[0].platform == "cpu" else "bfloat16")
    on = mesh.build(mesh.MeshShape(1, 1), devices)

    def place(shape: Sequence[int], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(on, axes))

    empty = jax.eval_shape(lambda: init_cache(config, 1, KEYS, dtype=config.dtype, stacked=False))
    held = jax.tree.map(lambda x: place(x.shape, x.dtype, None, "kv_heads"), empty)
    rows = (place((1,), jnp.int32), place((1,), jnp.int32), place((1,), bool))
    step = partial(decode_token.__wrapped__, config=config, policy=Dense())
    params = abstract_params(config, on, stacked=False)
    return jax.jit(step, donate_argnums=HELD["decode"] if donate else ()), (params, held, *rows)


def training(devices: Sequence[jax.Device], remat: bool = False, dtype: str = "float32") -> tuple[Any, tuple]:
    """Return (jitted step, abstract arguments) of one update on a sequence of ROWS tokens; `dtype` is the activations'
    dtype."""
    stage = Stage(length=ROWS, batch=1, steps=1, mixture=(("text", 1.0),), remat=remat)
    config = replace(_config(), dtype="float32")
    recipe = Recipe(name=MODEL, config=config, stages=(stage,), compute_dtype=dtype)
    on = training_mesh.build(training_mesh.MeshShape(), devices)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # optax computes constants, which an absent chip cannot
        shapes, places = jax.eval_shape(partial(init_state, recipe)), shardings(recipe, on)
    state = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, places)
    whole = NamedSharding(on, PartitionSpec())
    given = (((1, ROWS + 1), jnp.int32), ((1, ROWS), jnp.float32), ((), jnp.float32))
    step = partial(train_step.__wrapped__, recipe=recipe, stage=stage, mesh=on)
    rest = (jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in given)
    return jax.jit(step, donate_argnums=HELD["training"]), (state, *rest)


def filled(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of valid values. Integers are the last position, which is also a valid token id."""
    value = KEYS - 1 if jnp.issubdtype(like.dtype, jnp.integer) else 0.01
    return jax.device_put(np.full(like.shape, value, like.dtype), like.sharding)


def on_cpu(step: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Compile the forms of a step for this CPU, time them in turns on one cache or state, and yield a line per form."""
    programs, lines = {}, []
    for form, options in FORMS[step].items():
        function, arguments = globals()[step](jax.devices("cpu")[:1], **options)
        begun = time.perf_counter()
        with mesh.entered(mesh.mesh_of(arguments)):
            programs[form] = function.lower(*arguments).compile()
        seconds = time.perf_counter() - begun
        line = {"step": step, "form": form, "chip": "cpu", "memory": memory(programs[form])}
        lines.append(line | {"compile_s": round(seconds, 1), "error": None})
    values = list(jax.tree.map(filled, arguments))

    def once(program: Any, _: int) -> float:
        seconds, out = timing.time_call(program, *values)
        values[HELD[step]] = out[0]  # the program may have donated the old one
        return seconds

    taken = timing.interleave({form: partial(once, program) for form, program in programs.items()}, rounds=rounds)
    for line in lines:
        yield line | {"ms": [round(1e3 * seconds, 3) for seconds in taken[line["form"]]]}


def on_tpu(case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Compile one form of a step for an absent TPU; return the line to store."""
    program = factory_program(f"{__name__}:{case['step']}", **FORMS[case["step"]][case["form"]])
    with Compiler() as compiler:
        found = compiler.compile(case["chip"], program, limit_s=limit_s)
    error = None if found.error is None else str(found.error)
    return {**case, "memory": dict(found.memory), "compile_s": round(found.compile_s, 1), "error": error}


def report(line: Mapping[str, Any]) -> evidence.Record:
    """Build the record of a case: bytes of main memory while the step runs, and milliseconds if they were measured."""
    held, ms = line["memory"], line.get("ms", [])
    total = held["argument"] + held["output"] + held["temp"] + held["generated_code"] - held["alias"]
    sizes = f"{KEYS} keys" if line["step"] == "decode" else f"{ROWS} tokens"
    narrow = line["form"] == "bfloat16" or (line["step"] == "decode" and line["chip"] != "cpu")
    what = evidence.What(
        op=OP,
        kernel=line["form"],
        workload=f"{MODEL} {line['step']}, {sizes}, {line['chip']}",
        dtype="bfloat16" if narrow else "float32",
    )
    facts = {name: line[name] for name in ("step", "form", "chip", "memory")}
    if ms:
        facts |= {"ms": statistics.median(ms), "ms_samples": ms}
    how = evidence.How(
        interleaved=bool(ms), compile_s=line["compile_s"], check="the compiler's bytes; times are of a CPU in use"
    )
    made = evidence.make(what, [total], command=COMMAND, unit="bytes", how=how, facts=facts)
    return campaign.of_its_code(made, line)


def identity(line: Mapping[str, Any]) -> tuple:
    """Return a tuple that identifies a case: the case and its line in the file of results give the same tuple."""
    return tuple(line[name] for name in ("step", "form", "chip"))


def study(options: Any) -> int:
    """Compile and time missing cases, or append the records; return 1 if a step does not
    compile."""
    if options.report:
        lines = {identity(line): line for line in campaign.lines_to_report(options.out)}
        lines = [lines[identity(case)] for case in CASES if identity(case) in lines]
        evidence.append(EVIDENCE, [report(line) for line in lines if line["error"] is None])
        return int(any(line["error"] for line in lines))
    code = asdict(evidence.code())
    done = {identity(line) for line in files.read_lines(options.out) if not campaign.out_of_time(line)}
    todo = [case for case in CASES if identity(case) not in done]
    if options.list:
        print("\n".join(map(json.dumps, todo)))
        return 0
    failed = False
    for line in _lines(todo, options.limit_s):
        files.append_line(options.out, line | code)
        failed |= line["error"] is not None
        print(f"{' '.join(identity(line))}: {line['error'] or line['memory']} {line.get('ms', '')}"[:400], flush=True)
    return int(failed)


def _lines(todo: Sequence[Mapping[str, Any]], limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield a line per case. If one form of a step is missing on the CPU, all its forms are timed again, in turns."""
    for step in dict.fromkeys(case["step"] for case in todo if case["chip"] == "cpu"):
        yield from on_cpu(step, ROUNDS[step])
    yield from (on_tpu(case, limit_s) for case in todo if case["chip"] != "cpu")
