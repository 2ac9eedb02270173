"""Time attention alone: our dense call against other libraries; our sparse and score calls against our dense call."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lab.bench import peers
from lab.bench.stand import REST_S, Stand, compile_step, draw
from tessera.attention.contract import AttentionSpec, Selection, call_shapes
from tessera.attention.dispatch import attention, choose
from tessera.attention.selection import select_tiles
from tessera.measure import timing
from tessera.measure.evidence import How, Record, What
from tessera.measure.model_work import causal_pairs, fresh_seed, versus

HEAD_DIM = 128

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest allowed error by dtype, relative to the largest value in the checked rows. Rounding errors are smaller."""


def dense_prefill(stand: Stand, dtype: str) -> Iterator[Record]:
    """Time causal attention, 8 heads of head dim 128, against PyTorch and every other peer that runs on this device.

    Yields two records per peer, the peer's and ours, from the same rounds. For PyTorch, their workload is the case's
    name; for another peer, it is the case's name followed by the peer's name. Our record for PyTorch's workload is
    yielded even if PyTorch does not run, and its facts list each skipped peer and the reason.
    """
    length, heads = stand.sizes.attention_tokens, 8
    rows = _rows(length)
    inputs = _draw_inputs(0, length, heads, heads, dtype)
    spec = AttentionSpec()
    kernel = choose(spec, call_shapes(*inputs[:2])).name
    compile_s, step = compile_step(lambda q, k, v: attention(q, k, v, spec).out, inputs)

    def here(name: str, step: jax.stages.Compiled, number: int) -> float:
        arrays = _draw_inputs(fresh_seed(number), length, heads, heads, dtype)
        seconds, out = timing.time_call(step, *arrays)
        _check_rows(out, arrays, rows, None, name, dtype)
        return seconds

    def torch(number: int) -> float:
        seed = fresh_seed(number)
        answer = stand.peer.ask("sdpa", dtype=dtype, seed=seed, rows=rows, **_sizes(inputs))
        expected = oracle_rows(*_draw_inputs(seed, length, heads, heads, dtype), rows)
        check_output(np.asarray(answer["rows"], np.float32), expected, dtype, "torch")
        return answer["seconds"]

    steps, skipped = peers.ready(inputs)
    contenders = {"ours": partial(here, kernel, step)}
    if reason := stand.peer_refusal:
        skipped = {peers.TORCH: reason, **skipped}
    else:
        contenders["torch"] = torch
        torch(-2)  # start the worker before the first sample of any side
    contenders |= {name: partial(here, peers.PEERS[name].kernel, program) for name, (_, program) in steps.items()}
    taken = stand.interleave(contenders, rest_s=REST_S)
    compiled = {"ours": compile_s} | {name: seconds for name, (seconds, _) in steps.items()}
    yield from _dense_records(stand, inputs, kernel, taken, compiled, skipped)


def _dense_records(
    stand: Stand,
    inputs: Sequence[jax.Array],
    kernel: str,
    taken: Mapping[str, Sequence[float]],
    compile_s: Mapping[str, float],
    skipped: Mapping[str, str],
) -> Iterator[Record]:
    """Yield the peer's record and ours for every peer, PyTorch first; without PyTorch, ours alone comes first."""
    (_, length, heads, head_dim), dtype = inputs[0].shape, str(inputs[0].dtype)
    case = "dense_prefill_" + ("f32" if dtype == "float32" else "bf16")
    title = f"dense causal prefill, {length:,} tokens, {heads} heads of {head_dim}"
    config = _sizes(inputs)
    work = {"flops": 4.0 * heads * head_dim * causal_pairs(length), "bytes": 4.0 * inputs[0].nbytes}
    checked = "8 rows of every call against float64"
    how = How(warmup=1, iterations=len(taken["ours"]), interleaved=len(taken) > 1, check=checked)

    def record(side: str, kernel: str, workload: str, **fields) -> Record:
        what = What(op="attention", kernel=kernel, workload=workload, dtype=dtype, config=config, title=title)
        timed = _with_compile(how, compile_s[side]) if side in compile_s else how
        return stand.record(what, taken[side], timed, work=work, **fields)

    facts, against = {"skipped": dict(skipped)} if skipped else {}, None
    if "torch" in taken:
        versions = {name: stand.peer_versions[name] for name in ("torch", "threads")}
        yield record("torch", peers.TORCH, case, facts=versions)
        against = versus(peers.TORCH, taken["torch"], taken["ours"], 1.5)
    yield record("ours", kernel, case, comparison=against, facts=facts)
    for name, peer in peers.PEERS.items():
        if name in taken:
            yield record(name, peer.kernel, f"{case}_{name}", facts=peer.facts)
            against = versus(peer.kernel, taken[name], taken["ours"], None)
            yield record("ours", kernel, f"{case}_{name}", comparison=against)


def sparse_prefill(stand: Stand) -> Iterator[Record]:
    """Time our sparse call and our score call against our dense call.

    The sparse call reads 10 % of the tiles. The score call is dense and also returns each key tile's probability mass.
    All calls have 8 query heads and 2 KV heads of head dim 128, tile 128 and query tile 32.
    """
    length, heads, kv_heads = stand.sizes.sparse_tokens, 8, 2
    dense_spec = AttentionSpec(tile=128, query_tile=32)
    score_spec = AttentionSpec(tile=128, query_tile=32, mass=True)
    rows = _rows(length)
    inputs = _draw_inputs(0, length, heads, kv_heads, "float32")
    dense_s, dense = compile_step(lambda q, k, v: attention(q, k, v, dense_spec).out, inputs)
    score_s, score = compile_step(lambda q, k, v: attention(q, k, v, score_spec), inputs)
    _, select = compile_step(lambda mass: select_tiles(mass, dense_spec, fraction=0.1), [score(*inputs).mass])
    selection = select(score(*inputs).mass)
    sparse_s, sparse = compile_step(
        lambda q, k, v, tiles: attention(q, k, v, dense_spec, selection=tiles).out, [*inputs, selection]
    )
    densities, select_s, current = [], [], {}

    def fresh(number: int) -> list[jax.Array]:
        if current.get("number") != number:
            current.clear()
            current.update(number=number, inputs=_draw_inputs(fresh_seed(number), length, heads, kv_heads, "float32"))
        return current["inputs"]

    def run_dense(number: int) -> float:
        seconds, out = timing.time_call(dense, *fresh(number))
        _check_rows(out, fresh(number), rows, None, "dense")
        return seconds

    def run_score(number: int) -> float:
        seconds, out = timing.time_call(score, *fresh(number))
        _check_rows(out.out, fresh(number), rows, None, "score")
        total = float(jnp.sum(out.mass))
        if abs(total / (length * heads) - 1) > 1e-3:
            raise ValueError(f"mass sums to {total}, but must sum to {length * heads}: 1 per row and head")
        current["mass"] = out.mass
        return seconds

    def run_sparse(number: int) -> float:
        arrays = fresh(number)
        mass = current["mass"] if "mass" in current else score(*arrays).mass
        seconds, chosen = timing.time_call(select, mass)
        select_s.append(seconds)
        seconds, out = timing.time_call(sparse, *arrays, chosen)
        _check_rows(out, arrays, rows, (chosen, dense_spec), "sparse")
        if number >= 0:
            densities.append(realised_density(chosen, dense_spec, length))
        return seconds

    contenders = {"dense": run_dense, "score": run_score, "sparse": run_sparse}
    taken = stand.interleave(contenders, rest_s=REST_S)
    yield from _sparse_records(
        stand,
        inputs,
        taken,
        density=float(np.mean(densities)),
        select_s=float(np.median(select_s)),
        compile_s={"dense": dense_s, "score": score_s, "sparse": sparse_s},
    )


def _sparse_records(
    stand: Stand,
    inputs: Sequence[jax.Array],
    taken: Mapping[str, Sequence[float]],
    *,
    density: float,
    select_s: float,
    compile_s: Mapping[str, float],
) -> Iterator[Record]:
    """Yield three records: dense, score and sparse. The last two are compared with dense and have targets."""
    _, length, heads, head_dim = inputs[0].shape
    kv_heads = inputs[1].shape[2]
    if density > 0.5:
        raise ValueError(f"{density=:.3f} must be near 0.1: this run does not do sparse work")
    how = How(
        warmup=1,
        iterations=len(taken["dense"]),
        interleaved=True,
        check="8 rows of every call against float64",
    )
    pairs = 4.0 * heads * head_dim * causal_pairs(length)
    num_bytes = 2.0 * inputs[0].nbytes + 2.0 * inputs[1].nbytes
    config = {"length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    config |= {"tile": 128, "query_tile": 32, "fraction": 0.1}
    for role, target in (("dense", None), ("score", 1 / 1.25), ("sparse", 4.0)):
        share = density if role == "sparse" else 1.0
        spec = AttentionSpec(tile=128, query_tile=32, mass=role == "score")
        shapes = call_shapes(*inputs[:2])._replace(capacity=1 if role == "sparse" else None)
        kernel = choose(spec, shapes).name
        title = f"{role} prefill, {length:,} tokens, {heads}/{kv_heads} heads of {head_dim}"
        against = (
            "" if role == "dense" else choose(AttentionSpec(tile=128, query_tile=32), call_shapes(*inputs[:2])).name
        )
        yield stand.record(
            What(op="attention", kernel=kernel, workload="sparse_prefill", dtype="float32", config=config, title=title),
            taken[role],
            _with_compile(how, compile_s[role]),
            work={"flops": pairs * share, "bytes": num_bytes},
            density=(share,),
            comparison=versus(against, taken["dense"], taken[role], target) if target else None,
            facts={"select_s": select_s} if role == "sparse" else {},
        )


def realised_density(selection: Selection, spec: AttentionSpec, length: int) -> float:
    """Return the share of visible (row, key) pairs that a selection reads in a causal prefill of `length` tokens."""
    tiles, count = np.asarray(selection.tiles), np.asarray(selection.count)
    listed = np.arange(tiles.shape[-1]) < count[..., None]
    read = 0.0
    for offset in range(spec.query_tile):
        row = np.arange(tiles.shape[2])[:, None] * spec.query_tile + offset
        keys = np.clip(row + 1 - tiles * spec.tile, 0, spec.tile)
        read += float(np.sum(np.where(listed & (row < length), keys, 0), dtype=np.float64))
    return read / (tiles.shape[0] * tiles.shape[1] * causal_pairs(length))


def _sizes(inputs: Sequence[jax.Array]) -> dict[str, int]:
    """Return the sizes of a dense call, under the names that records and the PyTorch worker use."""
    (batch, length, heads, head_dim), kv_heads = inputs[0].shape, inputs[1].shape[2]
    return {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _with_compile(how: How, compile_s: float) -> How:
    return How(**{**vars(how), "compile_s": compile_s})


def _rows(length: int) -> list[int]:
    """Return eight evenly spaced rows to check: the first, the last, and six that are not at the edges of blocks."""
    return sorted({int(place) for place in np.linspace(0, length - 1, 8)})


def _draw_inputs(seed: int, length: int, heads: int, kv_heads: int, dtype: str) -> list[jax.Array]:
    """Draw q [1,T,N,H], k [1,T,K,H] and v [1,T,K,H] from a seed."""
    counts = (heads, kv_heads, kv_heads)
    return [jnp.asarray(draw([seed, i], (1, length, n, HEAD_DIM))).astype(dtype) for i, n in enumerate(counts)]


def oracle_rows(q, k, v, rows: Sequence[int], selected: tuple[Selection, AttentionSpec] | None = None) -> np.ndarray:
    """Return causal softmax(q k^T / sqrt(H)) v in float64, [N, rows, H], for a few rows of q [1,T,N,H].

    With `selected`, a row attends only to keys in its selected tiles.
    """
    q, k, v = (np.asarray(x[0].astype(jnp.float32), np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[1], len(rows), q.shape[2]))
    for head in range(q.shape[1]):
        for place, row in enumerate(rows):
            keys = np.arange(row + 1)
            if selected is not None:
                selection, spec = selected
                where = (0, head // groups, row // spec.query_tile)
                tiles = np.asarray(selection.tiles[where])[: int(selection.count[where])]
                keys = keys[np.isin(keys // spec.tile, tiles)]
            scores = k[keys, head // groups] @ q[row, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[head, place] = weights @ v[keys, head // groups] / weights.sum()
    return out


def _check_rows(out, arrays, rows, selected, name, dtype="float32") -> None:
    found = np.asarray(out[0, jnp.asarray(rows)], np.float32).swapaxes(0, 1)
    check_output(found, oracle_rows(*arrays, rows, selected), dtype, name)


def check_output(found: np.ndarray, expected: np.ndarray, dtype: str, name: str) -> None:
    """Check a timed call's output against the expected values, relative to the largest expected magnitude.

    Raises:
        ValueError: the largest relative error exceeds TOLERANCE[dtype].
    """
    error = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
    if not error <= TOLERANCE[dtype]:
        raise ValueError(f"{name} is wrong on a timed call: relative error {error:.2e} > {TOLERANCE[dtype]}")
