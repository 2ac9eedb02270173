"""A cache dealt over the mesh axis "context", against one device that holds the keys in order of position.

    python context_subjects.py FOLDER '[[name, subject, arguments], ...]'

prints one JSON line per subject: its name and what it found, or how it failed. runtime/test_context.py runs it in one
child process with eight devices on the CPU, because JAX fixes the number of devices once per process.
"""

import json
import re
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from batch import Batch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import CONFIG, save_tiny

from tessera.attention import context, dispatch
from tessera.attention.contract import AttentionSpec, KeyValues, Selection
from tessera.attention.selection import select_tiles
from tessera.core.mesh import mesh_of, num_stripes
from tessera.deviceless.hlo import collectives
from tessera.generate import load
from tessera.runtime.step import prefill_chunk, sharing
from tessera.sparse.baselines import Dense
from tessera.sparse.kascade import Kascade

TILE, QUERY_TILE, HEAD_DIM, BATCH = 16, 16, 16, 2
FOLDER = Path(sys.argv[1])


def positions(q_start, kv_len, q_len):
    return {name: jnp.asarray(x, jnp.int32) for name, x in (("q_start", q_start), ("kv_len", kv_len), ("q_len", q_len))}


def layer(q, kv, where, spec, backend=None):
    """Run all three roles of one layer: score, the selection from its mass, dense, sparse."""
    attend = partial(dispatch.attend, q, kv, **where, backend=backend)
    scored = attend(replace(spec, mass=True))
    selection = select_tiles(scored.mass, spec, fraction=0.3, minimum=32, **where)
    return scored, selection, attend(spec), attend(spec, selection=selection)


@partial(jax.jit, static_argnames="spec", donate_argnames="cache")
def dealt_step(q, k, v, cache, where, spec):
    new = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    cache = tuple(context.append(c, x, where["q_start"], (), spec.stripe) for c, x in zip(cache, new))
    return layer(q, KeyValues(*cache), where, spec), cache


whole_step = jax.jit(partial(layer, backend="reference"), static_argnames="spec")


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


def study(heads: int, parts: int, kv_heads: int, groups: int, softcap: float | None) -> dict:
    """Fill a cache chunk by chunk, then decode at several lengths; compare every call with one device."""
    width = QUERY_TILE * 2
    chunk, total = width * parts, 3 * width * parts
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
    for at in ((total - 1, 3), (2 * chunk - 5, chunk), (total - chunk + width, 0)):  # whole and cut rounds of stripes
        alive = np.array([1, int(at[1] != 0)])
        where = positions(at, np.where(alive, np.array(at) + 1, 0), alive)
        pick = jax.vmap(lambda x, p: jax.lax.dynamic_slice_in_dim(x, p, 1))
        one = [pick(x, where["q_start"]) for x in (q, k, v)]
        want = whole_step(one[0], KeyValues.of(k, v), where, spec)
        with jax.set_mesh(mesh):
            got, cache = dealt_step(*one, cache, where, striped)
        errors["decode"].append(compare(got, want))
    found["errors"] = {phase: worst(each) for phase, each in errors.items()}
    found["share"] = cache[0].addressable_shards[0].data.nbytes / cache[0].nbytes
    return found


def traffic(heads: int, parts: int) -> dict:
    """List what a dense and a sparse chunk send, for two lengths of the cache, and what a decoded token sends."""
    mesh = Mesh(np.array(jax.devices()[: heads * parts]).reshape(heads, parts), ("heads", "context"))
    width, counts = 2 * QUERY_TILE, (2 * heads, heads, heads)
    spec = AttentionSpec(tile=TILE, query_tile=QUERY_TILE, stripe=width)
    found = {}

    def program(q, k, v, where, *selections):
        return [dispatch.attend(q, KeyValues(k, v), spec, **where, selection=each).out for each in selections]

    def compiled(rows: int, num_keys: int) -> str:
        def array(shape, dtype, *split):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))

        split = "context" if rows > 1 else None
        q = array((BATCH, rows, counts[0], HEAD_DIM), jnp.float32, None, split, "heads")
        k, v = [array((BATCH, heads, num_keys, HEAD_DIM), jnp.float32, None, "heads", "context")] * 2
        where = {name: array((BATCH,), jnp.int32) for name in ("q_start", "kv_len", "q_len")}
        lists = (BATCH, heads, -(-rows // QUERY_TILE))
        selection = Selection(array((*lists, 4), jnp.int32, None, "heads"), array(lists, jnp.int32, None, "heads"))
        with jax.set_mesh(mesh):
            selections = (None, selection) if rows > 1 else (None,)
            return jax.jit(program).lower(q, k, v, where, *selections).compile().as_text()

    for name, rows, chunks in (("chunk", width * parts, 2), ("chunk", width * parts, 32), ("decode", 1, 32)):
        sent = [(c.opcode, c.bytes) for c in collectives(compiled(rows, chunks * width * parts))]
        found[f"{name} {chunks}"] = sorted(sent)
    return found


def generation(kv_heads: int, mesh: str, attention: str) -> dict:
    """Compare prefill and greedy decoding of a model on a mesh with one device's, over caches full of NaN."""
    config = replace(CONFIG, num_layers=3, num_heads=2 * kv_heads, num_kv_heads=kv_heads, tie_embeddings=False)
    path = FOLDER / f"kv{kv_heads}"
    if not path.exists():
        save_tiny(path, config, plan=False)
    heads = tuple(range(kv_heads))
    head_map = heads, heads[::-1], heads
    remap = Kascade(anchors=(0,), own=(2,), head_map=head_map, tile=16, query_tile=32, fraction=0.3, minimum=16)
    budgets = (0.2,) * kv_heads, (0.1,) * kv_heads, (0.4, *(0.0,) * (kv_heads - 1))
    policy = {"dense": Dense(), "remap": remap, "pooled": replace(remap, heads="pooled")}
    policy["budgets"] = replace(remap, budgets=budgets)
    found, error = {}, {}
    for shape in (None, mesh):
        model = load(path, mesh=shape)
        parts = num_stripes(mesh_of(model.params))
        batch = Batch(model.params, config, policy[attention], rows=2, num_keys=512, size=256)
        nan = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), batch.cache)
        batch.cache = nan
        error["share"] = batch.cache.k[0].addressable_shards[0].data.nbytes / batch.cache.k[0].nbytes
        prompts = [[(7 * i) % 250 for i in range(n)] for n in (300, 170)]
        scores, reads = batch.prefill(prompts)
        steps, tokens = [np.asarray(scores)], []
        batch.enlarge(1024)
        for step in range(3):
            tokens.append(steps[-1].argmax(-1).astype(np.int32))
            at = np.array([len(prompt) for prompt in prompts], np.int32) + step
            scores, more = batch.decode(tokens[-1], at)
            steps.append(np.asarray(scores))
            reads = reads + more
        found[shape] = np.stack(steps), tokens, [np.asarray(x) for each in reads for x in each]
    (want, want_tokens, want_reads), (got, got_tokens, got_reads) = found[None], found[mesh]
    error |= {"finite": float(np.isfinite(want).all()), "logits": float(np.abs(want - got).max())}
    error["tokens"] = float((np.array(want_tokens) != np.array(got_tokens)).sum())
    error["reads"] = float(max(np.abs(a - b).max() for a, b in zip(want_reads, got_reads)))
    return error | {"parts": parts}


SENT = {"all-gather": 1, "all-to-all": 1, "all-reduce": 2}
"""Bytes that a device sends in a ring, as multiples of (n - 1) / n times the bytes of the result."""


def sent_bytes(text: str, devices: int) -> dict[str, float]:
    """Sum the bytes that one device sends in a compiled program in float32, by kind of collective."""
    total = {}
    for line in text.splitlines():
        if opcode := re.search(r" (all-gather|all-to-all|all-reduce|reduce-scatter)\(", line):
            dims = re.findall(r"f32\[([\d,]+)\]", line[: opcode.start()])  # a tuple's type names each part
            count = sum(prod(map(int, each.split(","))) for each in dims)
            total[opcode[1]] = total.get(opcode[1], 0) + 4 * count * SENT[opcode[1]] * (devices - 1) / devices
    return total


def spread() -> dict:
    """Prefill with rows shared by heads and by rows on 8x1 devices: logits against one device, and the bytes sent."""
    config = replace(CONFIG, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, tie_embeddings=False)
    path = save_tiny(FOLDER / "spread", config, plan=False)
    policy = Kascade(anchors=(0,), head_map=(tuple(range(8)),) * 2, tile=16, query_tile=32, fraction=0.3, minimum=16)
    prompts, found = [[(7 * i) % 250 for i in range(n)] for n in (500, 170)], {}
    for name, shape, by_rows in (("one", None, False), ("heads", "8", False), ("rows", "8", True)):
        batch = Batch(load(path, mesh=shape).params, config, policy, rows=2, num_keys=512, size=512)
        found[f"{name} by default"] = batch.sharing.by_rows(2 * 512)
        batch.sharing = Fixed(by_rows)
        found[name] = np.asarray(batch.prefill(prompts)[0])
        if shape is not None:
            given = batch.params, batch.cache, np.zeros((2, 512), np.int32)
            zeros = np.zeros(2, np.int32)
            how = {"config": config, "policy": policy, "stripe": None, "spread": by_rows}
            text = prefill_chunk.lower(*given, zeros, zeros, **how).compile().as_text()
            found[f"{name} sent"] = sent_bytes(text, 8)
            layers = {name: 2 * x for name, x in sharing(batch.params, config).sent(2 * 512)._asdict().items()}
            # Once per chunk: by heads, the rows of the split embedding are added up; by rows, the table is gathered.
            rows, table = 2 * 2 * 512 * 64 * 4 * 7 / 8, batch.params.embed.nbytes * 7 / 8
            found["predicted"] = layers["by_heads"] + rows, layers["by_rows"] + table
    want = found.pop("one")
    for name in ("heads", "rows"):
        got = found.pop(name)
        found[f"{name} logits"] = float(np.abs(got - want).max())
        found[f"{name} tokens"] = int((got.argmax(-1) != want.argmax(-1)).sum())
    return found


class Fixed:
    """Shares every chunk as told."""

    def __init__(self, by_rows: bool):
        self.by_rows = lambda rows: by_rows


def refusals() -> dict[str, str]:
    """Return the error of each call that a dealt cache cannot serve."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("heads", "context"))
    q, k = jnp.zeros((1, 64, 2, HEAD_DIM)), jnp.zeros((1, 2, 128, HEAD_DIM))
    plain = AttentionSpec(tile=16, query_tile=16, stripe=16)
    cases = {
        "window": (q, k, replace(plain, window=32)),
        "rows": (q[:, :32], k, plain),
        "keys": (q, k[:, :, :96], plain),
        "tile": (q, k, replace(plain, tile=32, mass=True)),
        "query_tile": (q, k, replace(plain, query_tile=32, mass=True)),
    }
    found = {}
    for name, (q, k, spec) in cases.items():
        try:
            with jax.set_mesh(mesh):
                jax.eval_shape(partial(dispatch.attend, spec=spec), q, KeyValues(k, k))
        except ValueError as error:
            found[name] = str(error)
    return found


SUBJECTS = {"study": study, "traffic": traffic, "generation": generation, "refusals": refusals, "spread": spread}

if __name__ == "__main__":
    for name, subject, arguments in json.loads(sys.argv[2]):
        try:
            found = {"found": SUBJECTS[subject](**arguments)}
        except Exception:  # noqa: BLE001  one subject that fails must not hide what the others find
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"name": name, "cpu_s": time.process_time(), **found}), flush=True)
