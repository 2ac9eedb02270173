"""Attention over a cache dealt over a mesh, against one device that holds the keys in order; run by test_context.py.

It runs in a child process with 8 devices on the CPU, and prints one JSON line of findings per mesh.
"""

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tessera.attention import context, dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Selection
from tessera.attention.selection import select_tiles
from tessera.deviceless.hlo import collectives

TILE, QUERY_TILE, HEAD_DIM, BATCH = 16, 16, 16, 2


def positions(q_start, kv_len, q_len):
    return {name: jnp.asarray(x, jnp.int32) for name, x in (("q_start", q_start), ("kv_len", kv_len), ("q_len", q_len))}


def layer(q, kv, where, spec):
    """Run all three roles of one layer: score, the selection from its mass, dense, sparse."""
    scored = dispatch.attend(q, kv, replace(spec, mass=True), **where)
    selection = select_tiles(scored.mass, spec, fraction=0.3, minimum=32, **where)
    dense = dispatch.attend(q, kv, spec, **where)
    return scored, selection, dense, dispatch.attend(q, kv, spec, **where, selection=selection)


@partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def dealt_step(q, k, v, cache, where, spec):
    new = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    cache = tuple(context.append(c, x, where["q_start"], (), spec.stripe) for c, x in zip(cache, new))
    return layer(q, KeyValues(*cache), where, spec), cache


whole_step = jax.jit(layer, static_argnames="spec")


def compare(found, want) -> dict[str, float]:
    """Return the largest error of outputs, lse and mass per role, and whether the selections are equal."""
    error = {}
    for role, index in (("score", 0), ("dense", 2), ("sparse", 3)):
        for name, a, b in zip(("out", "lse", "mass"), found[index], want[index]):
            if a is not None:
                a, b = np.asarray(a), np.asarray(b)
                same = a == b  # -inf of rows that see no key
                error[f"{role} {name}"] = float(np.abs(np.where(same, 0, a) - np.where(same, 0, b)).max())
    ids, count = (np.asarray(x) for x in found[1])
    want_ids, want_count = (np.asarray(x) for x in want[1])
    listed = np.arange(ids.shape[-1]) < want_count[..., None]
    error["selection"] = float((count != want_count).sum() + ((ids != want_ids) & listed).sum())
    return error


def worst(errors) -> dict[str, float]:
    return {name: max(e[name] for e in errors) for name in errors[0]}


def study(heads: int, parts: int, kv_heads: int, groups: int, chunks: int, softcap: float | None) -> dict:
    """Fill a cache chunk by chunk, then decode at several lengths; compare every call with one device."""
    width = QUERY_TILE * 2
    chunk, total = width * parts, width * parts * chunks
    devices = np.array(jax.devices()[: heads * parts]).reshape(heads, parts)
    mesh = Mesh(devices, ("heads", "context"))
    keys = jax.random.split(jax.random.key(parts), 3)
    counts = kv_heads * groups, kv_heads, kv_heads
    q, k, v = (jax.random.normal(key, (BATCH, total, n, HEAD_DIM)) for key, n in zip(keys, counts))
    spec = AttentionSpec(tile=TILE, query_tile=QUERY_TILE, softcap=softcap)
    striped = replace(spec, stripe=width)
    empty = np.full((BATCH, kv_heads, total, HEAD_DIM), np.nan, np.float32)
    errors, found = {"prefill": [], "decode": []}, {}
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "heads", "context"))
        cache = tuple(jax.device_put(jnp.asarray(empty), sharding) for _ in range(2))
    lengths = total, total - chunk // 2 - 7  # the second sequence ends within a stripe
    for start in range(0, total, chunk):
        q_len = np.clip(np.array(lengths) - start, 0, chunk)
        where = positions([start] * BATCH, np.where(q_len > 0, start + q_len, 0), q_len)
        rows = slice(start, start + chunk)
        kv = KeyValues.of(k.at[:, start + chunk :].set(jnp.nan), v.at[:, start + chunk :].set(jnp.nan))
        want = whole_step(q[:, rows], kv, where, spec)
        with jax.set_mesh(mesh):
            got, cache = dealt_step(q[:, rows], k[:, rows], v[:, rows], cache, where, striped)
        errors["prefill"].append(compare(got, want))
    for at in ((total - 1, 3), (chunk, width - 1), (total - chunk + width, 0)):
        alive = np.array([1, int(at[1] != 0)])
        where = positions(at, np.where(alive, np.array(at) + 1, 0), alive)
        pick = jax.vmap(lambda x, p: jax.lax.dynamic_slice_in_dim(x, p, 1))
        one = [pick(x, where["q_start"]) for x in (q, k, v)]
        want = whole_step(one[0], KeyValues.of(k, v), where, spec)
        with jax.set_mesh(mesh):
            got, cache = dealt_step(*one, cache, where, striped)
        errors["decode"].append(compare(got, want))
    found["errors"] = {phase: worst(each) for phase, each in errors.items()}
    found["bytes per device"] = cache[0].addressable_shards[0].data.nbytes / cache[0].nbytes
    return found


def traffic(heads: int, parts: int) -> dict:
    """Count the bytes that a dense and a sparse call send, for two lengths of the cache, and decode's collectives."""
    mesh = Mesh(np.array(jax.devices()[: heads * parts]).reshape(heads, parts), ("heads", "context"))
    width, counts = 2 * QUERY_TILE, (2 * heads, heads, heads)
    spec = AttentionSpec(tile=TILE, query_tile=QUERY_TILE, stripe=width)
    found = {}

    def program(q, k, v, where, selection):
        return dispatch.attend(q, KeyValues(k, v), spec, **where, selection=selection).out

    def compiled(rows: int, num_keys: int, capacity: int | None) -> str:
        def array(shape, dtype, *split):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))

        split = "context" if rows > 1 else None
        q = array((BATCH, rows, counts[0], HEAD_DIM), jnp.float32, None, split, "heads")
        k, v = [array((BATCH, heads, num_keys, HEAD_DIM), jnp.float32, None, "heads", "context")] * 2
        where = {name: array((BATCH,), jnp.int32) for name in ("q_start", "kv_len", "q_len")}
        lists = (BATCH, heads, -(-rows // QUERY_TILE))
        selection = capacity and Selection(
            array((*lists, capacity), jnp.int32, None, "heads"), array(lists, jnp.int32, None, "heads")
        )
        with jax.set_mesh(mesh):
            return jax.jit(program).lower(q, k, v, where, selection).compile().as_text()

    for name, rows, capacity in (("dense", width * parts, None), ("sparse", width * parts, 4), ("decode", 1, None)):
        for chunks in (2, 32):
            sent = [(c.opcode, c.bytes) for c in collectives(compiled(rows, chunks * width * parts, capacity))]
            found[f"{name} {chunks}"] = sorted(sent)
    return found


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)  # as conftest does: every program runs a few times
    print(json.dumps(traffic(2, 4)), flush=True)
    for case in json.loads(sys.argv[1]):
        print(json.dumps(study(**case)), flush=True)
