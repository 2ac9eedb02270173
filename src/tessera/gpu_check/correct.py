"""Every GPU kernel on fresh random numbers against float32 on the same device, and how rows lie in shared memory.

The oracle is the reference kernel in float32 on the same numbers. What is allowed: two units in the last place of the
dtype (weights and output are rounded once each, half a unit) as the norm of out's error, one unit in lse (a kernel may
sum rounded weights), and eight in the mass, whose logarithms a kernel may keep in half precision.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tessera.attention import reference
from tessera.attention.contract import AttentionSpec, Kernel, Positions, Selection, Shapes
from tessera.evidence import How, What
from tessera.gpu_check import calls
from tessera.gpu_check.calls import LLAMA_8B, Setting
from tessera.gpu_check.session import Session, until_late

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ALLOWED = {"out": 2.0, "lse": 1.0, "mass": 8.0}
"""Errors in units of the dtype: norms of out and mass, the largest of lse."""

PREFILL = (
    Setting(1, 1024, 1024, *LLAMA_8B),
    Setting(2, 640, 1300, 8, 2, 64),
    Setting(1, 500, 2048, 14, 2, 128, causal=False),
    Setting(1, 2048, 2048, 16, 1, 128),
)
DECODE = (Setting(4, 1, 4096, *LLAMA_8B), Setting(3, 1, 1100, 7, 1, 64), Setting(1, 1, 32768, 16, 8, 128))
DRY = {"prefill": (Setting(1, 48, 96, 2, 1, 64),), "decode": (Setting(1, 1, 160, 2, 1, 64),)}


def run(session: Session) -> None:
    """A record per kernel, call and dtype; then the single-key gather's layout."""
    for kernel in calls.gpu_kernels(session):
        settings = DRY[kernel.phase] if session.dry else {"prefill": PREFILL, "decode": DECODE}[kernel.phase]
        settings = [setting for setting in settings if calls.taken(kernel, setting)]
        cases = [s._replace(dtype=d) for s in settings for d in kernel.dtypes[: 1 if session.dry else None]]
        for setting in until_late(session, cases, 30):
            what = What(op="correctness", kernel=kernel.name, workload=setting.words(), dtype=setting.dtype)
            session.attempt(what, partial(compare, kernel, setting, session.dry))
    for kernel in calls.gpu_kernels(session):
        if kernel.role == "sparse" and kernel.phase == "prefill" and takes_single_keys(kernel):
            what = What(op="correctness", kernel=kernel.name, workload="layout of gathered rows", dtype="bfloat16")
            session.attempt(what, partial(layout, kernel))


def compare(kernel: Kernel, setting: Setting, dry: bool) -> dict:
    """Errors of out, lse and mass over what is allowed; ragged lengths in every sequence but the first."""
    seed, key = calls.fresh_key()
    spec, shapes = calls.taken(kernel, setting, query_tile=16 if dry else 32)
    q, k, v = setting.inputs(key)
    positions = ragged(setting)
    k, v = (poisoned(x, positions) for x in (k, v))
    selection = setting.selection(spec, key) if kernel.role == "sparse" else None
    with calls.machine(kernel):
        found = jax.block_until_ready(
            calls.ready(kernel, spec, shapes)(q, *calls.as_cached(k, v), positions, selection)
        )
    upcast = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = jax.jit(partial(reference.attend, spec=spec, config=reference.Config()))(
        *upcast, positions=positions, selection=selection
    )
    seen = jnp.isfinite(expected.lse)
    errors = {"out": calls.relative_error(found.out, expected.out)}
    errors["lse"] = float(jnp.max(jnp.where(seen, jnp.abs(found.lse - expected.lse), 0.0)))
    if found.mass is not None:
        errors["mass"] = calls.relative_error(found.mass, expected.mass)
    errors = {name: error / ALLOWED[name] / UNIT[setting.dtype] for name, error in errors.items()}
    wrong = [] if bool(jnp.all(jnp.isfinite(found.lse) == seen)) else ["lse is not -inf exactly where no key is seen"]
    wrong += [f"{name} is {error:.3g} of what is allowed" for name, error in errors.items() if not error <= 1]
    if wrong:
        raise ValueError(f"wrong: {'; '.join(wrong)} (seed {seed}, tile {spec.tile})")
    check = "against float32 on the same device, fresh random numbers, padding NaN"
    facts = {"seed": seed, "tile": spec.tile, "query_tile": spec.query_tile, "over_allowed": errors}
    return {"samples": [max(errors.values())], "unit": "of allowed", "how": How(check=check), "facts": facts}


def ragged(setting: Setting) -> Positions:
    """The first sequence full; the others shorter by an odd number of keys."""
    full = setting.positions()
    short = jnp.arange(setting.batch, dtype=jnp.int32) * min(37, setting.keys // 8)
    kv_len = full.kv_len - short
    return Positions(jnp.maximum(kv_len - setting.queries, 0), kv_len, full.q_len)


def poisoned(x: jax.Array, positions: Positions) -> jax.Array:
    """Keys or values with NaN at and past kv_len."""
    valid = jnp.arange(x.shape[1]) < positions.kv_len[:, None]
    return jnp.where(valid[:, :, None, None], x, jnp.nan)


def takes_single_keys(kernel: Kernel) -> bool:
    """Whether it reads keys one by one."""
    spec = AttentionSpec(tile=1, causal=False)
    return kernel.supports(spec, Shapes(1, 128, 256, 1, 1, 128, 64, "bfloat16")) is None


def layout(kernel: Kernel) -> dict:
    """Whether a gathered row's every number lands where the product looks for it, which no interpreter models.

    Row r of q is the unit vector e_(r mod H), and its query tile lists one key, another one per tile, twice over all of
    K. So out must be that row of V to the last bit, and lse the scale times that key's number r mod H.
    """
    dim, rows, num_keys = 128, 1024, 256
    seed, key = calls.fresh_key()
    spec = AttentionSpec(tile=1, query_tile=32, causal=False, scale=1.0)
    tiles = rows // spec.query_tile
    k, v = (jax.random.normal(x, (1, num_keys, 1, dim), jnp.bfloat16) for x in jax.random.split(key))
    q = jnp.eye(dim, dtype=jnp.bfloat16)[jnp.arange(rows) % dim][None, :, None]
    listed = np.random.default_rng(seed).permutation(num_keys)[:tiles]
    capacity = 64
    ids = np.full((1, 1, tiles, capacity), 1 << 30, np.int32)  # rubbish past the count
    ids[0, 0, :, 0] = listed
    selection = Selection(jnp.asarray(ids), jnp.ones((1, 1, tiles), jnp.int32))
    positions = Positions(*(jnp.full((1,), n, jnp.int32) for n in (0, num_keys, rows)))
    with calls.machine(kernel):
        shapes = Shapes(1, rows, num_keys, 1, 1, dim, capacity, "bfloat16")
        found = jax.block_until_ready(
            calls.ready(kernel, spec, shapes)(q, *calls.as_cached(k, v), positions, selection)
        )
    which = np.repeat(listed, spec.query_tile)
    values = np.asarray(v[0, which, 0], np.float32)
    scores = np.asarray(k, np.float32)[0, which, 0, np.arange(rows) % dim]
    wrong_v = int(np.sum(np.asarray(found.out[0, :, 0], np.float32) != values))
    wrong_k = int(np.sum(np.abs(np.asarray(found.lse[0, :, 0]) - scores) > 1e-5 * (1 + np.abs(scores))))
    if wrong_v or wrong_k:
        raise ValueError(f"wrong: {wrong_v} of {values.size} numbers of V, {wrong_k} of {rows} of K misplaced")
    how = How(check="unit vectors, lists of one key: out is V's row to the last bit, lse a number of K")
    return {"samples": [0.0], "unit": "misplaced", "how": how, "facts": {"seed": seed}}
