"""Compare every kernel with float64 oracles over the catalogue of workloads; check properties that need none."""

import dataclasses
import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionOut, AttentionSpec, KeyValues, Positions, Selection, call_shapes
from tessera.attention.dispatch import KERNELS, attention
from tessera.attention.workloads import WORKLOADS, tagged
from tessera.attention.xla import sparse as xla_sparse

NAMED = {w.name: w for w in WORKLOADS}
COVERING = {
    "prefill": {"ragged", "window_softcap", "both_ways", "decode_ragged", "heads_16", "int8_ragged"},
    "decode": {"decode_ragged", "decode_window", "decode_both_ways", "decode_heads_16", "int8_decode"},
}
"""Phase -> the workloads that a kernel runs by default: ragged batches, empty rows, G (query heads per KV head) of 1, 4
and 8, a window with a softcap, attention that is not causal, one row through a prefill kernel, and one list per head.
The catalogue's other workloads repeat these features in other sizes."""
ALSO = {
    ("tpu", "sparse", "prefill"): {"tail", "int8_wide"},
    ("tpu", "score", "prefill"): {"heads_32_wide"},
    ("gpu", "score", "prefill"): {"heads_32_wide"},
    ("gpu", "dense", "prefill"): {"hopper_window"},
    ("gpu", "dense", "decode"): {"hopper_decode"},
    ("gpu", "score", "decode"): {"hopper_decode"},
    ("gpu", "sparse", "decode"): {"hopper_decode"},
}
"""Extra workloads for branches of one platform's kernels: a tile as wide as all lanes, a query tile of several row
blocks, and on Hopper G of 7 and 16, where the query rows do not fill a block or fill it exactly."""
EVERY_DTYPE = ("ragged", "window_softcap", "decode_ragged", "decode_window", "hopper_ragged", "hopper_decode")
ROUNDING = {"float32": 2e-6, "bfloat16": 2**-6}
GRADIENT = {"float32": 2e-5, "bfloat16": 2**-5}
PREFILL, DECODE = NAMED["ragged"], NAMED["decode_ragged"]
WINDOWS = NAMED["window_softcap"], NAMED["decode_window"]
BOTH_WAYS = NAMED["both_ways"], NAMED["decode_both_ways"]


def blocked(kernels):
    """Keep the kernels that work block by block, that is, all but the reference."""
    return [kernel for kernel in kernels if not kernel.name.startswith("reference")]


def numbers(x, instead=0.0):
    """Replace the array's NaN. NumPy's `nan_to_num` misses them in dtypes that NumPy lacks, such as bfloat16."""
    return np.where(np.isnan(x), np.asarray(instead, x.dtype), x)


def in_covering_set(kernel, workload, dtype) -> bool:
    """Return whether the call runs by default; the others are exhaustive."""
    if workload.name not in COVERING[kernel.phase] | ALSO.get((kernel.platform, kernel.role, kernel.phase), set()):
        return False
    if kernel.phase == "prefill" and workload is DECODE:  # other kernels' tests cover score and single keys
        return dtype == kernel.dtypes[0] and kernel.role != "score" and kernel.name != "gpu_keys_sparse"
    if kernel.platform == "tpu" and workload in (PREFILL, DECODE):  # test_every_switch runs bfloat16
        return dtype == "float32"
    if kernel.platform == "gpu" and workload in (PREFILL, DECODE):  # WINDOWS run float16
        return dtype == kernel.dtypes[0]
    if kernel.platform == "gpu" and workload in WINDOWS:
        return dtype == "float16"
    if kernel.platform != "any" and kernel.role == "sparse" and workload in BOTH_WAYS:
        return False  # test_all_tiles_is_dense_and_each_listed_tile_matters runs them with more lists
    return dtype == kernel.dtypes[0] or workload in (PREFILL, DECODE)


def product():
    """Yield every kernel with every small workload of its phase; only some workloads run in every dtype."""
    for kernel in calls.kernels():
        for workload in calls.catalogue(kernel):
            for dtype in kernel.dtypes if workload.name in EVERY_DTYPE else kernel.dtypes[:1]:
                if (taken := calls.taken(kernel, workload, dtype)) is not None:
                    marks = () if in_covering_set(kernel, workload, dtype) else pytest.mark.exhaustive
                    name = f"{kernel.name}-{workload.name}-{dtype}"
                    yield pytest.param(kernel, taken, dtype, id=name, marks=marks)


def truth(workload, kernel, dtype, change=None):
    """Return (the call after `change`, the oracle's float64 answer from dtype's numbers, the kernel's tolerance)."""
    role = "dense" if kernel.role == "score" else kernel.role  # these roles share one answer
    roundings = calls.roundings(kernel)
    if not workload.scaled:
        roundings["dequantised"] = False  # makes no difference: one answer serves more kernels
    return _truth(workload, role, dtype, change, **roundings)


@functools.cache
def _truth(workload, role, dtype, change, **roundings):
    call = calls.make(workload, role, dtype)
    call = call if change is None else change(call)
    answer = oracle.attend(call)
    return call, answer, oracle.tolerance(call, answer, dtype, **roundings)


@pytest.mark.parametrize(("kernel", "workload", "dtype"), list(product()))
def test_kernel_meets_the_oracle(kernel, workload, dtype):
    call, answer, allowed = truth(workload, kernel, dtype)
    result = calls.run(kernel, call, dtype)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    empty = np.isinf(answer.lse)
    assert np.array_equal(np.isneginf(result.lse), empty)
    assert np.all(result.out[empty] == 0)
    assert np.abs(result.lse[~empty] - answer.lse[~empty]).max(initial=0) <= allowed.lse
    if kernel.role != "score":
        assert result.mass is None
        return
    assert np.abs(result.mass - answer.mass).max() <= allowed.mass
    rows = np.add.reduceat(~empty, range(0, call.q.shape[1], call.query_tile), axis=1).reshape(
        len(call.q), -1, call.k.shape[2], call.q.shape[2] // call.k.shape[2]
    )
    assert np.allclose(result.mass.sum(-1), np.moveaxis(rows.sum(-1), 1, 2), atol=allowed.mass * result.mass.shape[-1])


@pytest.mark.parametrize("kernel", [k for k in calls.kernels() if k.platform == "tpu"], ids=lambda k: k.name)
def test_every_switch_meets_the_oracle(kernel):
    """Run each TPU kernel in bfloat16 with every switch of `small_config` inverted; real chips choose the switches."""
    workload = DECODE if kernel.phase == "decode" else PREFILL
    call, answer, allowed = truth(workload, kernel, "bfloat16")
    result = calls.run(kernel, call, "bfloat16", calls.other_config(kernel))
    seen = ~np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), ~seen)
    assert np.abs(result.lse[seen] - answer.lse[seen]).max(initial=0) <= allowed.lse
    assert kernel.role != "score" or np.abs(result.mass - answer.mass).max() <= allowed.mass


def real_head_dims():
    """Yield each TPU kernel with head dims 64, 128 and 256; those that repeat another test's path are exhaustive.

    test_tpu_prefill.py scores and reads lists at head dim 64.
    """
    for kernel in (k for k in calls.kernels() if k.platform == "tpu"):
        for dim in (64, 128, 256):
            repeats = dim == 128 or (dim == 64 and (kernel.phase == "decode" or kernel.role != "dense"))
            marks = pytest.mark.exhaustive if repeats else ()
            yield pytest.param(kernel, dim, id=f"{kernel.name}-{dim}", marks=marks)


@pytest.mark.parametrize(("kernel", "head_dim"), list(real_head_dims()))
def test_real_head_dims_meet_the_oracle(kernel, head_dim):
    """The catalogue's head dims are small, but the head dim decides whether idle columns are left to hold row sums."""
    workload = NAMED["hopper_decode" if kernel.phase == "decode" else "hopper_ragged"]
    workload = dataclasses.replace(workload, head_dim=head_dim, spec=dataclasses.replace(workload.spec, tile=32))
    call, answer, allowed = truth(workload, kernel, "bfloat16")
    result = calls.run(kernel, call, "bfloat16")
    seen = ~np.isinf(answer.lse)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), ~seen)
    assert np.abs(result.lse[seen] - answer.lse[seen]).max(initial=0) <= allowed.lse
    assert kernel.role != "score" or np.abs(result.mass - answer.mass).max() <= allowed.mass


def huge(call):
    return call._replace(q=call.q * call.q.dtype.type(2048))


def equal(call):
    return call._replace(k=np.where(np.isnan(call.k), np.nan, 1.0).astype(call.k.dtype))


def one_key(call):
    k, v = numbers(call.k, 0.5), numbers(call.v, 0.5)
    k[:, 1:] = v[:, 1:] = np.nan
    return call._replace(k=k, v=v, kv_len=np.ones_like(call.kv_len), q_start=call.q_start * 0)


@pytest.mark.parametrize("kernel", calls.kernels(), ids=lambda k: k.name)
@pytest.mark.parametrize("change", [huge, equal, one_key], ids=lambda change: change.__name__)
def test_adversarial_numbers(kernel, change):
    """Check logits of 1e4, tied maxima and a single visible key, in shapes that other tests compiled."""
    dtype = calls.dtype_of(kernel)
    workload = calls.taken(kernel, DECODE if kernel.phase == "decode" else PREFILL)
    call, answer, allowed = truth(workload, kernel, dtype, change)
    assert change is not huge or answer.top > 1e4
    result = calls.run(kernel, call, dtype)
    assert np.abs(result.out - answer.out).max() <= allowed.out
    assert np.array_equal(np.isneginf(result.lse), np.isneginf(answer.lse))
    if kernel.role == "score":
        assert np.abs(result.mass - answer.mass).max() <= allowed.mass


@pytest.mark.parametrize("kernel", calls.kernels(phase="prefill"), ids=lambda k: k.name)
def test_future_keys_change_nothing_bit_for_bit(kernel):
    dtype = calls.dtype_of(kernel)
    call = calls.make(calls.taken(kernel, PREFILL), kernel.role, dtype)
    before = calls.run(kernel, call, dtype)
    cut = 20  # rows after this one may change; sequence 0 starts at 50
    k, v = call.k.copy(), call.v.copy()
    first = call.q_start[0] + cut + 1
    order = np.random.default_rng(1).permutation(np.arange(first, call.k.shape[1]))
    k[0, first:], v[0, first:] = -3 * k[0, order], 100 * v[0, order]
    after = calls.run(kernel, call._replace(k=k, v=v), dtype)
    assert np.array_equal(before.out[0, : cut + 1], after.out[0, : cut + 1])
    assert np.array_equal(before.lse[0, : cut + 1], after.lse[0, : cut + 1])
    assert not np.array_equal(before.out[0, cut + 1 :], after.out[0, cut + 1 :])
    assert np.array_equal(before.out[1:], after.out[1:])


@pytest.mark.parametrize("kernel", calls.kernels("sparse"), ids=lambda k: k.name)
def test_all_tiles_is_dense_and_each_listed_tile_matters(kernel):
    """Lists are longer than a block, and S and T are no multiple of one; every call runs the same program.

    Lengths past the arrays are those of the arrays. Then every other tile is listed, and the last ends in padding: a
    change in a listed tile changes the output, and one in an unlisted tile does not.
    """
    workload = NAMED["decode_both_ways" if kernel.phase == "decode" else "both_ways"]
    dtype = calls.dtype_of(kernel)
    workload = calls.taken(kernel, workload)
    num_keys, tile = 469, 16 if workload.spec.tile > 1 else 1
    num_tiles = -(-num_keys // tile)
    rng = np.random.default_rng(2)
    call = calls.make(workload, "dense", dtype)
    heads, dim = call.k.shape[2:]
    k, v = (rng.standard_normal((1, num_keys, heads, dim)).astype(oracle.DTYPES[dtype]) for _ in range(2))
    num_rows = -(-call.q.shape[1] // call.query_tile)
    tiles = np.broadcast_to(np.arange(num_tiles), (1, heads, num_rows, num_tiles))
    call = call._replace(k=k, v=v, tile=tile, kv_len=np.array([num_keys]))
    full = call._replace(tiles=tiles, count=np.full(tiles.shape[:3], num_tiles))
    dense = oracle.attend(call)
    allowed = oracle.tolerance(call, dense, dtype)
    past = 9 if blocked([kernel]) and kernel.phase == "prefill" else 0
    result = calls.run(kernel, full._replace(kv_len=full.kv_len + past, q_len=full.q_len + past), dtype)
    assert np.abs(result.out - dense.out).max() <= allowed.out
    assert np.abs(result.lse - dense.lse).max() <= allowed.lse

    listed = np.arange(1, num_tiles, 2)
    k[:, num_keys - 2 :] = v[:, num_keys - 2 :] = np.nan
    some = full._replace(tiles=tiles.copy(), count=np.full(tiles.shape[:3], len(listed)), kv_len=full.kv_len - 2)
    some.tiles[..., : len(listed)] = listed
    answer = oracle.attend(some)
    allowed = oracle.tolerance(some, answer, dtype)
    base = calls.run(kernel, some, dtype)
    assert np.abs(base.out - answer.out).max() <= allowed.out
    assert np.abs(base.lse - answer.lse).max() <= allowed.lse
    if blocked([kernel]):  # unlisted keys are not even read
        poison = np.repeat(~np.isin(np.arange(num_tiles), listed), tile)[:num_keys, None, None]
        poisoned = (np.where(poison, np.nan, x).astype(x.dtype) for x in (k, v))
        again = calls.run(kernel, some._replace(**dict(zip("kv", poisoned))), dtype)
        assert np.array_equal(again.out, base.out)
    every = range(num_tiles)
    few = kernel.platform in ("tpu", "gpu")  # slow in simulation: try four tiles, two of them listed
    for j in every[-1 :: -(len(every) // 3 - 1)] if few else every:
        k2, v2 = k.copy(), v.copy()
        span = slice(j * tile, (j + 1) * tile)
        k2[:, span], v2[:, span] = k2[:, span] + 1, v2[:, span] - 1
        again = calls.run(kernel, some._replace(k=k2, v=v2), dtype)
        assert np.array_equal(again.out, base.out) == (j not in listed), f"tile {j}"
        assert np.array_equal(again.lse, base.lse) == (j not in listed), f"tile {j}"


@pytest.mark.parametrize(
    "kernel",
    [k for k in blocked(calls.kernels("sparse")) if tagged("lists", k.phase)[0] in calls.catalogue(k)],
    ids=lambda k: k.name,
)
def test_a_head_reads_no_tile_of_another_heads_list(kernel):
    """KV heads list no far tile, all, or some; NaN in keys that a head does not list changes no bit of its output."""
    dtype = calls.dtype_of(kernel)
    workload = calls.taken(kernel, NAMED["decode_heads_16" if kernel.phase == "decode" else "heads_16"])
    call = calls.make(workload, "sparse", dtype)
    base = calls.run(kernel, call, dtype)
    k, v = call.k.copy(), call.v.copy()
    for b, h in np.ndindex(call.count.shape[:2]):
        listed = [call.tiles[b, h, i, : call.count[b, h, i]] for i in range(call.count.shape[2])]
        unlisted = ~np.isin(np.arange(call.k.shape[1]) // call.tile, np.concatenate(listed))
        assert h != 0 or b != 0 or unlisted.sum() > 90
        k[b, unlisted, h] = v[b, unlisted, h] = np.nan
    again = calls.run(kernel, call._replace(k=k, v=v), dtype)
    assert np.array_equal(again.out, base.out)
    assert np.array_equal(again.lse, base.lse)


@pytest.mark.parametrize("workload", tagged("lists"), ids=lambda w: w.name)
def test_a_head_with_the_whole_budget_is_dense(workload):
    """The oracle reads a full list as dense attention; a head without far tiles gives another result."""
    call = calls.make(workload, "sparse")
    sparse, dense = oracle.attend(call), oracle.attend(call._replace(tiles=None, count=None))
    group = workload.num_heads // workload.num_kv_heads
    for head, fraction in enumerate(workload.budget.fraction):
        mine = np.s_[:, :, head * group : (head + 1) * group]
        equal = np.array_equal(sparse.lse[mine], dense.lse[mine]) and np.array_equal(sparse.out[mine], dense.out[mine])
        assert equal == (fraction == 1)


@pytest.mark.parametrize("kernel", calls.kernels("dense"), ids=lambda k: k.name)
def test_partials_merge_to_the_whole(kernel):
    """Two calls over the halves of the keys, weighted by exp(lse), equal one call over all of them.

    All three calls have the shapes of the whole, so they share its program; NaN follows each half's keys.
    """
    dtype = calls.dtype_of(kernel)
    call = calls.make(calls.taken(kernel, DECODE if kernel.phase == "decode" else PREFILL), "dense", dtype)
    call = call._replace(q_len=np.full_like(call.q_len, call.q.shape[1]), q=numbers(call.q))
    whole = calls.run(kernel, call, dtype)
    half = call.k.shape[1] // 2
    first, second = ({"k": np.full_like(call.k, np.nan), "v": np.full_like(call.v, np.nan)} for _ in range(2))
    for name in "kv":
        first[name][:, :half] = getattr(call, name)[:, :half]
        second[name][:, :-half] = getattr(call, name)[:, half:]
    left = calls.run(kernel, call._replace(**first, kv_len=np.minimum(call.kv_len, half)), dtype)
    second |= {"q_start": call.q_start - half, "kv_len": np.maximum(call.kv_len - half, 0)}
    right = calls.run(kernel, call._replace(**second), dtype)
    top = np.maximum(np.maximum(left.lse, right.lse), -1e30)
    a, b = np.exp(left.lse - top)[..., None], np.exp(right.lse - top)[..., None]
    merged = (a * left.out + b * right.out) / np.where(a + b > 0, a + b, 1)
    assert np.any((a > 0) & (b > 0))
    assert np.abs(merged - whole.out).max() < ROUNDING[dtype] * np.abs(numbers(call.v)).max()


@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
def test_decode_is_the_last_row_of_prefill(role):
    """Through dispatch, one row alone equals the last row of a longer call."""
    rng = np.random.default_rng(3)
    num_keys, spec = 64, AttentionSpec(tile=16, query_tile=16, mass=role == "score")
    q, k, v = (jnp.asarray(rng.standard_normal((2, num_keys, n, 16)), jnp.float32) for n in (4, 2, 2))
    tiles = jnp.asarray(np.broadcast_to([0, 1, 3], (2, 2, 4, 3)), jnp.int32)
    lists = Selection(tiles, jnp.full(tiles.shape[:3], 3, jnp.int32)) if role == "sparse" else None
    last = Selection(lists.tiles[:, :, -1:], lists.count[:, :, -1:]) if role == "sparse" else None
    call = jax.jit(lambda *x, start, lists: attention(*x, spec, q_start=start, selection=lists))
    start = jnp.full((2,), num_keys - 1, jnp.int32)
    whole = call(q, k, v, start=start * 0, lists=lists)
    one = call(q[:, -1:], k, v, start=start, lists=last)
    assert jnp.abs(one.out[:, 0] - whole.out[:, -1]).max() < 5e-6
    assert jnp.abs(one.lse[:, 0] - whole.lse[:, -1]).max() < 5e-6
    if role == "score":
        assert one.mass.shape == (2, 2, 1, 4)
        assert jnp.abs(one.mass.sum(-1) - 2).max() < 1e-5


def gradient_cases():
    """Yield (kernel, workload name); those that repeat other cases are exhaustive: prefill kernels on one row.

    All decode kernels share one gradient in plain JAX, so a simulated one runs once. test_tpu_backward.py covers ragged
    batches and grouped heads, test_gpu_prefill.py a window with a softcap.
    """
    for kernel in calls.kernels("dense"):
        for name in (["ragged", "window_softcap"] if kernel.phase == "prefill" else ["decode_ragged"]) + [
            "decode_window"
        ]:
            simulated = kernel.platform != "any"
            repeats = name == "decode_window" and (kernel.phase == "prefill" or simulated)
            repeats |= name == {"tpu": "ragged", "gpu": "window_softcap"}.get(kernel.platform)
            marks = pytest.mark.exhaustive if repeats else ()
            yield pytest.param(kernel, name, id=f"{name}-{kernel.name}", marks=marks)


@pytest.mark.parametrize(("kernel", "name"), list(gradient_cases()))
def test_gradient_meets_the_oracle(kernel, name):
    """Rows that see no key get NaN and -inf cotangents, as a norm's 0 / 0 or lse's own -inf would produce them."""
    dtype = calls.dtype_of(kernel)
    workload = calls.taken(kernel, NAMED[name])
    call = calls.make(workload, "dense", dtype)
    d_out = np.random.default_rng(4).standard_normal(call.q.shape)
    unseen = np.isneginf(oracle.attend(call).lse)
    assert unseen.any() == (name != "decode_window")
    positions = Positions(*(jnp.asarray(x, jnp.int32) for x in (call.q_start, call.kv_len, call.q_len)))
    spec = calls.spec_of(call, "dense")
    config = calls.small_config(kernel, spec, workload.shapes("dense", dtype))
    exact = oracle.gradients(call._replace(q=numbers(call.q)), d_out)
    sent = AttentionOut(
        jnp.asarray(np.where(unseen[..., None], np.nan, d_out).astype(oracle.DTYPES[dtype])),
        jnp.asarray(np.where(unseen, -np.inf, 0.0).astype(np.float32)),
    )

    def gradients(q, k, v, sent):
        def attend(q, k, v):
            return kernel.launch(q, KeyValues.of(k, v), spec, positions, None, config)

        return jax.vjp(attend, q, k, v)[1](sent)

    with calls.machine(kernel):
        got = calls.jit_for(kernel, gradients)(*(jnp.asarray(x) for x in (call.q, call.k, call.v)), sent)
    for mine, truth in zip(got, exact, strict=True):
        mine = np.asarray(mine).astype(np.float32)
        assert np.all(np.isfinite(mine))
        assert np.abs(mine - truth).max() <= GRADIENT[dtype] * max(1.0, np.abs(truth).max())
    assert np.all(np.asarray(got[0])[unseen] == 0)


def largest(jaxpr) -> int:
    """Return the element count of the program's largest intermediate, inside loops and calls too."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in eqn.outvars]
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                sizes.append(largest(inner))
    return max(sizes)


def abstract(num_queries, num_keys, heads, kv_heads, dim, capacity=None, query_tile=32, dtype="float32"):
    """Return abstract q, k, v, positions and selection."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    whole = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q, k = shape((1, num_queries, heads, dim)), shape((1, num_keys, kv_heads, dim))
    lists = None
    if capacity:
        lead = (1, kv_heads, -(-num_queries // query_tile))
        lists = Selection(whole((*lead, capacity)), whole(lead))
    return q, k, k, Positions(whole((1,)), whole((1,)), whole((1,))), lists


@pytest.mark.parametrize(
    "kernel", [k for k in calls.kernels() if not k.name.startswith("reference")], ids=lambda k: k.name
)
def test_no_matrix_of_scores_is_ever_built(kernel):
    """No intermediate grows with T x S, in the kernel or in the gradient of a dense kernel."""
    num_keys = 16384
    num_queries = 1 if kernel.phase == "decode" else num_keys
    spec = AttentionSpec(mass=kernel.role == "score")
    capacity = 8 if kernel.role == "sparse" else None
    if kernel.platform == "gpu":  # a GPU kernel has few block sizes, and they depend on the call
        q, k, v, positions, lists = abstract(num_queries, num_keys, 2, 1, 64, capacity, dtype="bfloat16")
        spec = dataclasses.replace(spec, tile=1 if "keys" in kernel.name else 64)
        config = kernel.default_config(spec, call_shapes(q, k, lists))
    else:
        q, k, v, positions, lists = abstract(num_queries, num_keys, 2, 1, 32, capacity)
        config = kernel.Config(**dict.fromkeys(kernel.Config.__dataclass_fields__, 512))

    def program(q, k, v):
        return kernel.launch(q, KeyValues.of(k, v), spec, positions_of(), lists_of(), config)

    def positions_of():
        return Positions(*(jnp.zeros(p.shape, jnp.int32) for p in positions))

    def lists_of():
        return None if lists is None else Selection(*(jnp.zeros(x.shape, jnp.int32) for x in lists))

    tensor = max(np.prod(q.shape), np.prod(k.shape))
    limit = 2 * max(tensor, 2 * 512 * 512 * 2)
    assert limit < num_keys * num_keys / 16
    assert largest(jax.make_jaxpr(program)(q, k, v).jaxpr) <= limit
    if kernel.role == "dense":
        gradient = jax.grad(lambda *x: jnp.sum(program(*x).out), argnums=(0, 1, 2))
        assert largest(jax.make_jaxpr(gradient)(q, k, v).jaxpr) <= limit


def count_products(monkeypatch, launch) -> int:
    """Return the multiply-adds of the dot products that run; a callback in the compiled program counts each one."""
    total = 0
    plain = jax.lax.dot_general

    def add(products):
        nonlocal total
        total += products

    def counting(a, b, dims, *args, **kwargs):
        out = plain(a, b, dims, *args, **kwargs)
        products = int(np.prod(out.shape)) * int(np.prod([a.shape[d] for d in dims[0][0]]))
        jax.debug.callback(functools.partial(add, products))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(jax.lax, "dot_general", counting)
        jax.block_until_ready(jax.jit(lambda: launch())())  # a new function, so that jit cannot reuse an earlier trace
    jax.effects_barrier()
    return total


@pytest.mark.parametrize(
    "kernel",  # a simulated kernel's products cannot be counted; an earlier test checks that it reads no unlisted tile
    [k for k in calls.kernels("sparse") if not k.name.startswith("reference") and k.platform == "any"],
    ids=lambda k: k.name,
)
def test_sparse_work_follows_the_lists(kernel, monkeypatch):
    """Listing twice the tiles takes twice the arithmetic, whatever the cache size: no kernel silently runs dense."""
    num_queries = 1 if kernel.phase == "decode" else 32
    q, k, v, _, _ = abstract(num_queries, 512, 2, 1, 8)
    q, k, v = (jnp.ones(x.shape) for x in (q, k, v))
    spec, config = AttentionSpec(tile=16), calls.small_config(kernel)
    positions = Positions(*(jnp.full((1,), n, jnp.int32) for n in (512 - num_queries, 512, num_queries)))
    flops = {}
    for count in (1, 4, 8):
        lists = Selection(jnp.arange(8, dtype=jnp.int32)[None, None, None], jnp.full((1, 1, 1), count, jnp.int32))
        flops[count] = count_products(
            monkeypatch, lambda lists=lists: kernel.launch(q, KeyValues.of(k, v), spec, positions, lists, config)
        )
    exact = 2 * num_queries * 2 * 16 * 8
    assert flops[1] == exact
    assert flops[4] == 4 * exact
    assert flops[8] == 8 * exact


@pytest.mark.parametrize("num_tiles", [4, 6])
def test_a_head_with_a_short_list_does_not_pay_for_another(monkeypatch, num_tiles):
    """The kernel takes four query tiles per step, or three where there are six in all."""
    kernel = next(k for k in KERNELS if k.name == "xla_prefill_sparse")
    spec, config = AttentionSpec(tile=16, query_tile=8), calls.small_config(kernel)
    monkeypatch.setattr(xla_sparse, "STEP_SCORES", 4 * 16 * config.block_s)
    q, k, v, _, _ = abstract(8 * num_tiles, 512, 6, 3, 8)
    q, k, v = (jnp.ones(x.shape) for x in (q, k, v))
    positions = Positions(*(jnp.full((1,), n, jnp.int32) for n in (512 - 8 * num_tiles, 512, 8 * num_tiles)))
    counts = jnp.broadcast_to(jnp.array([0, 1, 24], jnp.int32)[None, :, None], (1, 3, num_tiles))
    lists = Selection(jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (*counts.shape, 24)), counts)
    done = count_products(monkeypatch, lambda: kernel.launch(q, KeyValues.of(k, v), spec, positions, lists, config))
    assert done == 2 * 2 * 8 * 16 * 8 * int(counts.sum())


def test_decode_work_follows_what_is_filled(monkeypatch):
    """With 40 keys in a cache of 512, decode reads three blocks of 16 keys; a window of 16 keys takes two."""
    kernel = next(k for k in KERNELS if k.name == "xla_decode_dense")
    q, k, v, _, _ = abstract(1, 512, 2, 1, 8)
    q, k, v = (jnp.ones(x.shape) for x in (q, k, v))
    positions = Positions(*(jnp.full((1,), n, jnp.int32) for n in (39, 40, 1)))
    for spec, blocks in ((AttentionSpec(), 3), (AttentionSpec(window=16), 2)):
        config = calls.small_config(kernel)
        done = count_products(
            monkeypatch,
            lambda spec=spec, config=config: kernel.launch(q, KeyValues.of(k, v), spec, positions, None, config),
        )
        assert done == blocks * 2 * 2 * 16 * 8


@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
def test_decode_copies_no_cache(role, stored):
    """The compiled program neither transposes nor copies all of a cache [B,K,S,H], nor widens all of an int8 one."""
    kernel = next(k for k in KERNELS if k.name == f"xla_decode_{role}")
    batch, heads, num_keys, dim = 2, 2, 4096, 32
    spec = AttentionSpec(mass=role == "score")
    lists = Selection(jnp.zeros((batch, heads, 1, 4), jnp.int32), jnp.ones((batch, heads, 1), jnp.int32))

    def step(q, k, v, positions, scales):
        kv = KeyValues(k, v, scales=scales)
        return kernel.launch(q, kv, spec, positions, lists if role == "sparse" else None, config)

    config = kernel.Config(block_s=128)
    cache = jax.ShapeDtypeStruct((batch, heads, num_keys, dim), stored)
    scales = jax.ShapeDtypeStruct((batch, heads, 2, num_keys), jnp.bfloat16) if stored == "int8" else None
    q = jax.ShapeDtypeStruct((batch, 1, 2 * heads, dim), jnp.float32)
    whole = jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = jax.jit(step).lower(q, cache, cache, Positions(whole, whole, whole), scales).compile()
    memory = program.memory_analysis()
    if memory is not None:
        assert memory.temp_size_in_bytes < batch * heads * num_keys * dim * cache.dtype.itemsize
    orders = (f"[{batch},{heads},{num_keys},{dim}]", f"[{batch},{num_keys},{heads},{dim}]")
    sizes = tuple(dtype + order for dtype in ("f32", "s8") for order in orders)
    for line in program.as_text().splitlines():
        made = line.partition("=")[2].strip()
        if made.startswith(sizes):
            assert any(word in made for word in ("parameter(", "get-tuple-element(", "bitcast(")), line


@pytest.mark.parametrize("kernel", [k for k in calls.kernels() if k.executions is not None], ids=lambda k: k.name)
def test_executions_count_what_every_workload_does(kernel):
    """For every call that a kernel takes, the counts are finite, with at least one step and the bytes of q and out."""
    for workload in tagged(kernel.phase):
        if (w := calls.taken(kernel, workload)) is None:
            continue
        spec, shapes = w.role_spec(kernel.role), w.shapes(kernel.role)
        runs = kernel.executions(spec, shapes, kernel.default_config(spec, shapes))
        assert all(np.isfinite(n) and n >= 0 for n in runs.values()), f"{workload.name}: {runs}"
        steps = sum(n for name, n in runs.items() if name.rpartition("/")[2] == "step")
        moved = sum(n for name, n in runs.items() if name.rpartition("/")[2] == "hbm_bytes")
        assert steps >= 1
        assert moved >= 2 * np.dtype(w.dtype).itemsize * w.batch * w.num_queries * w.num_heads * w.head_dim
