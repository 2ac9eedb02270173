"""Check every GPU kernel's answers against float64, after checking where a kernel puts single keys in shared memory.

`layout.py` checks where single keys lie. The calls come from the catalogue (`attention/workloads.py`). As in
`tessera verify`, their numbers are random or adversarial, and each call gets its own tolerance. `timing.py` checks the
answers of long calls.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.gpu import calls, layout
from lab.gpu.session import Session, until_late
from tessera.attention import oracle, tuned
from tessera.attention.contract import TILES, AttentionSpec, KeyValues, Positions, Shapes
from tessera.attention.kernel import Kernel
from tessera.attention.workloads import Workload, tagged
from tessera.measure import trials, verify
from tessera.measure.evidence import How, What

DTYPES = ("bfloat16", "float16")
WIDE = 256
DRY = {
    "prefill": Workload(
        name="dry_prefill",
        batch=2,
        num_queries=24,
        num_keys=90,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        spec=AttentionSpec(tile=16, query_tile=16),
        fraction=0.6,
        q_start=(66, -3),
        kv_len=(90, 31),
        q_len=(24, 17),
        tags=("hopper", "prefill"),
    ),
    "decode": Workload(
        name="dry_decode",
        batch=2,
        num_queries=1,
        num_keys=90,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        spec=AttentionSpec(tile=16),
        fraction=0.6,
        q_start=(89, 0),
        kv_len=(90, 0),
        tags=("hopper", "decode"),
    ),
}
FIRST = 2
"""Number of cases of each kernel that run before anything is timed. All layout checks run even before these cases."""
GRADIENTS = 2.0**-5
"""Tolerance of a bfloat16 gradient, relative to max(largest entry, 1)."""


class Case(NamedTuple):
    """A workload, its dtype, and the kind of its numbers (a name in `verify.NUMBERS`).

    `small` is whether to use the smallest blocks instead of the tuned ones.
    """

    workload: Workload
    dtype: str = "bfloat16"
    numbers: str = "normal"
    small: bool = False

    def words(self) -> str:
        """Return the case's name in a record."""
        w = self.workload
        blocks = "smallest blocks" if self.small else "tuned blocks"
        return f"{w.name}, heads of {w.head_dim}, tile {w.spec.tile}, {self.numbers} numbers, {blocks}"


def run(session: Session) -> None:
    """Append records of layouts, cases and gradients; if `session.first`, only layouts and FIRST cases per kernel."""
    kernels = list(calls.kernels_here(session))
    for kernel in filter(calls.takes_single_keys, kernels):
        for head_dim in (64,) if session.dry else (64, 128):
            for config in blocks_of(kernel, head_dim)[: 1 if session.dry else None]:
                what = What(
                    op="correctness",
                    kernel=kernel.name,
                    workload=f"layout of gathered rows, heads of {head_dim}, {config}",
                )
                tiles, blocks = (2, 1) if session.dry else (head_dim // layout.COLUMN, 4)
                session.attempt(what, partial(layout.look, kernel, head_dim, config, tiles, blocks))
    most = FIRST if session.first else None
    plans = {kernel: list(cases(kernel, dry=session.dry))[:most] for kernel in kernels}
    longest = max(map(len, plans.values()))
    turns = [(k, plan[n]) for n in range(longest) for k, plan in plans.items() if n < len(plan)]  # alternate kernels
    turns = [(kernel, case, what_of(kernel, case)) for kernel, case in turns]
    turns = [turn for turn in turns if not session.is_done(turn[2])]
    for kernel, case, what in until_late(session, turns, 0 if session.dry else 30):
        session.attempt(what, partial(compare, kernel, case))
    for kernel in () if session.first else kernels:
        if kernel.role == "dense" and kernel.phase == "prefill":
            for workload in gradient_workloads(kernel, dry=session.dry):
                what = What(
                    op="correctness", kernel=kernel.name, workload=f"{workload.name}, gradient", dtype="bfloat16"
                )
                session.attempt(what, partial(compare_gradients, kernel, workload))


def what_of(kernel: Kernel, case: Case) -> What:
    """Return the `what` field for a record of this kernel and case."""
    return What(op="correctness", kernel=kernel.name, workload=case.words(), dtype=case.dtype)


def blocks_of(kernel: Kernel, head_dim: int) -> list[object]:
    """Return one config per block size of the single-key kernel, since the block size decides where rows lie.

    Each config has the most stages that the search space allows for its block size.
    """
    spec = AttentionSpec(tile=1, query_tile=layout.TOKENS, causal=False)
    heads = 2 * head_dim // layout.TOKENS
    space = kernel.search_space(spec, Shapes(1, 64, 4096, heads, 1, head_dim, 2048, "bfloat16"))
    return list({c.block_s: c for c in sorted(space, key=lambda c: c.stages)}.values())


def cases(kernel: Kernel, *, dry: bool) -> Iterator[Case]:
    """Yield the kernel's cases, the most important first: Hopper calls, adversarial numbers, heads of 256, other tiles,
    int8, smallest blocks, float16, and last the small calls of `tessera verify`.
    """

    def takes(workload: Workload, dtype: str = "bfloat16") -> bool:
        return kernel.refusal(workload.role_spec(kernel.role), workload.shapes(kernel.role, dtype)) is None

    def fitting(tag: str, dtype: str = "bfloat16") -> list[Workload]:
        found = [trials.taken(kernel, w, dtype) for w in tagged(tag, kernel.phase)]
        return [w for w in found if w is not None]

    if dry:
        workload = trials.taken(kernel, DRY[kernel.phase], "bfloat16")
        yield Case(workload)
        return
    hopper = fitting("hopper")
    yield from map(Case, hopper)
    ragged = next((w for w in (*hopper, *fitting("test")) if w.batch > 1), None)
    if ragged is not None:
        yield from (Case(ragged, numbers=numbers) for numbers in tuple(verify.NUMBERS)[1:])
        wide = replace(ragged, head_dim=WIDE)
        yield from (Case(w) for w in (wide,) if takes(w))
        if kernel.role != "dense":
            others = (
                replace(ragged, spec=replace(ragged.spec, tile=tile)) for tile in TILES if tile != ragged.spec.tile
            )
            yield from (Case(w) for w in others if takes(w))
    if kernel.scaled:
        yield from map(Case, fitting("int8"))
    yield from (Case(w, small=True) for w in hopper)
    yield from (Case(w, dtype) for dtype in DTYPES[1:] for w in fitting("hopper", dtype))
    yield from map(Case, fitting("test"))


def compare(kernel: Kernel, case: Case) -> dict:
    """Run a case and return its record's fields; the sample is the largest error / tolerance over out, lse and mass.

    Raises:
        ValueError: an error exceeds the tolerance, or the answer breaks the contract in another way.
    """
    seed, _ = calls.fresh_key()
    w = case.workload
    call = verify.NUMBERS[case.numbers](trials.make(w, kernel.role, case.dtype, seed))
    spec, shapes = w.role_spec(kernel.role), w.shapes(kernel.role, case.dtype)
    config = trials.small_config(kernel, spec, shapes) if case.small else tuned.config(kernel, spec, shapes)
    found = trials.run(kernel, call, case.dtype, config)
    truth = oracle.attend(call)
    allowed = oracle.tolerance(call, truth, case.dtype, **trials.roundings(kernel))
    errors, wrong = verify.compare(found, truth, allowed, kernel.role)
    if wrong or (errors > 1).any():
        share = float((errors > 1).mean())
        said = f"{share:.2%} of elements past the tolerance; the worst error is {errors.max():.3g} times the tolerance"
        raise ValueError(f"wrong: {'; '.join((*wrong, said))} (seed {seed}, {config})")
    how = How(check="float64 oracle, derived tolerance, fresh random numbers, padding NaN")
    facts = {"seed": seed, "config": str(config), "elements": int(errors.size)}
    return {"samples": [float(errors.max(initial=0.0))], "unit": "of tolerance", "how": how, "facts": facts}


def gradient_workloads(kernel: Kernel, *, dry: bool) -> Iterator[Workload]:
    """Yield the Hopper prefill workloads, and one with head dim 256, unless the kernel refuses their dense calls."""
    found = [DRY["prefill"]] if dry else tagged("hopper", "prefill")
    wide = [] if dry else [replace(w, name=f"{w.name}_{WIDE}", head_dim=WIDE) for w in found[:1]]
    for w in (*found, *wide):
        if kernel.refusal(w.role_spec("dense"), w.shapes("dense", "bfloat16")) is None:
            yield w


def compare_gradients(kernel: Kernel, workload: Workload) -> dict:
    """Compare the gradients dq, dk and dv of sum(d_out * out) with gradients in float64; return a record's fields.

    The sample is the largest error / tolerance.

    Raises:
        ValueError: an error exceeds the tolerance.
    """
    seed, _ = calls.fresh_key()
    call = trials.make(workload, "dense", "bfloat16", seed)
    d_out = np.random.default_rng(seed).standard_normal(call.q.shape).astype(np.float32)
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    spec = workload.role_spec("dense")
    config = tuned.config(kernel, spec, workload.shapes("dense", "bfloat16"))

    def loss(q, k, v):
        return jnp.sum(kernel.launch(q, KeyValues.of(k, v), spec, positions, None, config).out * d_out)

    with calls.machine(kernel):
        found = jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jnp.asarray, call[:3])))
    over = {}
    for name, mine, truth in zip(("dq", "dk", "dv"), found, oracle.gradients(call, d_out)):
        limit = GRADIENTS * max(1.0, np.abs(truth).max())
        over[name] = float(np.abs(np.asarray(mine.astype(jnp.float32)) - truth).max() / limit)
    if not max(over.values()) <= 1:
        raise ValueError(f"wrong: the errors in units of the tolerance are {over}, but may be 1 at most (seed {seed})")
    how = How(check="gradients in float64, row by row, fresh random numbers")
    return {"samples": [max(over.values())], "unit": "of allowed", "how": how, "facts": {"seed": seed, "over": over}}
