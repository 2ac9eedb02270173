"""Checks of a model on a mesh of eight fake devices, run by runtime/test_mesh.py in one child process.

    python mesh_subjects.py FOLDER [NAME ...]

prints the name of each check that passed, and ends with the traceback of the first that fails. JAX fixes the number of
devices once per process, so the tests cannot run these checks themselves.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

from peak import peak_bytes

HEADS = 8  # KV heads of most checks
CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def config_of(num_kv_heads: int, **changes):
    from tiny import CONFIG

    sizes = dict(num_layers=2, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, tie_embeddings=False)
    return replace(CONFIG, **sizes | changes)


def policies(num_kv_heads: int) -> dict:
    """Return dense, and Kascade with a head map that crosses devices; its second layer reuses the first's tiles."""
    from tessera.sparse.baselines import Dense
    from tessera.sparse.kascade import Kascade

    head_map = (tuple(range(num_kv_heads)), tuple(reversed(range(num_kv_heads))))
    remap = Kascade(anchors=(0,), head_map=head_map, tile=16, query_tile=16, fraction=0.3, minimum=16)
    return {"dense": Dense(), "remap": remap, "pooled": replace(remap, heads="pooled")}


def saved(folder: Path, config, name: str) -> Path:
    from tiny import save_tiny

    path = folder / name
    return path if path.exists() else save_tiny(path, config, plan=False)


def run(folder: Path, config, policy, mesh: str | None, by_rows: bool = False, **options):
    """Prefill two prompts in chunks over a cache full of NaN, decode greedily; return the logits of every step."""
    import jax
    import numpy as np
    from batch import Batch

    from tessera.generate import load

    model = load(folder, mesh=mesh, **options)
    batch = Batch(model.params, config, policy, rows=2, num_keys=256, size=64, kv_dtype=model.kv_dtype)
    if by_rows:  # whatever sends fewer bytes
        batch.sharing = SimpleNamespace(by_rows=lambda rows: True)

    def unread(x):  # no program may read what it has not written
        full = np.full(x.shape, np.nan if jax.numpy.issubdtype(x.dtype, np.floating) else 99, x.dtype)
        return jax.device_put(full, x.sharding)

    batch.cache = jax.tree.map(unread, batch.cache)
    prompts = [list(range(3, 153)), list(range(40, 110))]
    scores, _ = batch.prefill(prompts)
    found, lengths = [np.asarray(scores)], np.array([len(prompt) for prompt in prompts], np.int32)
    for step in range(3):
        scores, _ = batch.decode(found[-1].argmax(-1).astype(np.int32), lengths + step)
        found.append(np.asarray(scores))
    return np.stack(found)


@cache
def runs(folder: Path, num_kv_heads: int, attention: str, mesh: str | None):
    config = config_of(num_kv_heads)
    return run(saved(folder, config, f"kv{num_kv_heads}"), config, policies(num_kv_heads)[attention], mesh)


def check_same(folder: Path, num_kv_heads: int, attention: str, *meshes: str) -> None:
    import numpy as np

    expected = runs(folder, num_kv_heads, attention, None)
    assert np.isfinite(expected).all()
    for mesh in meshes:
        found = runs(folder, num_kv_heads, attention, mesh)
        assert (found.argmax(-1) == expected.argmax(-1)).all(), mesh
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0, err_msg=mesh)


def programs(name: str, num_partitions: int) -> list[str]:
    """Return the texts of the programs that ran on this many devices, as the compiler left them."""
    import jax

    modules = [module for e in jax.devices()[0].client.live_executables() for module in e.hlo_modules()]
    texts = [module.to_string() for module in modules if module.name == f"jit_{name}"]
    return [text for text in texts if f"num_partitions={num_partitions}" in text]


def compiled(name: str, num_partitions: int) -> str:
    """Return the text of one of these programs."""
    return programs(name, num_partitions)[0]


def messages(text: str) -> list[tuple[str, str]]:
    """Return kind and result type of each operation in which devices exchange data."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(", text)
    return [(kind, result) for result, kind in found]


@check
def host_memory_is_the_model_and_one_tensor(folder: Path) -> None:
    """First of the checks, because a compilation takes more memory than this model."""
    import jax
    import numpy as np

    from tessera.models.files.checkpoint import load_params
    from tessera.models.files.families import render_config
    from tessera.models.files.source import open_source
    from tessera.models.files.tensor_file import write_file
    from tessera.models.weights import expected_shapes, num_parameters

    config = config_of(HEADS, hidden_size=1024, intermediate_size=4096, num_layers=6, head_dim=16)
    path = folder / "large"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(render_config(config, "float32")))
    shapes = expected_shapes(config)
    largest = 4 * max(int(np.prod(shape)) for shape in shapes.values())
    total = 4 * num_parameters(config)
    assert total > 300e6 > 10 * largest
    values = np.random.default_rng(0).normal(size=largest // 4).astype(np.float32)
    specs = {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}
    write_file(path / "model.safetensors", specs, (values[: int(np.prod(s))].reshape(s) for s in shapes.values()))
    jax.block_until_ready(jax.numpy.zeros(8))
    from tessera.core.mesh import MeshShape, build

    mesh = build(MeshShape(8, 1))
    before = peak_bytes()  # only grows, so the smaller form first
    small = load_params(open_source(path), mesh=mesh, weight_format="int8")
    held = sum(shard.data.nbytes for x in jax.tree.leaves(small) for shard in x.addressable_shards)
    grown = peak_bytes() - before
    assert held < 0.3 * total
    assert grown < held + 2 * largest + (32 << 20), f"{grown=} {held=} {largest=}"
    del small
    gc.collect()
    before = peak_bytes()
    params = load_params(open_source(path), mesh=mesh)
    grown = peak_bytes() - before
    assert sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards) >= total
    assert grown < total + 2 * largest + (32 << 20), f"{grown=} {total=} {largest=}"
    del params
    gc.collect()


@check
def three_kv_heads_dense(folder: Path) -> None:
    check_same(folder, 3, "dense", "3")


@check
def eight_kv_heads_kascade(folder: Path) -> None:
    check_same(folder, 8, "remap", "8")


@check
def decode_sums_twice_a_layer_and_moves_no_table(folder: Path) -> None:
    """One more sum looks up the embedding. Kascade's head map moves tile numbers of other devices' heads."""
    for num_kv_heads, attention in ((3, "dense"), (8, "remap")):
        config = config_of(num_kv_heads)
        runs(folder, num_kv_heads, attention, str(num_kv_heads))
        found = messages(compiled("decode_token", num_kv_heads))
        sums = [result for kind, result in found if kind == "all-reduce"]
        assert 0 < len(sums) <= 2 * config.num_layers + 1, found
        assert all(result.startswith("s32") for kind, result in found if kind != "all-reduce"), found
        shapes = [dims.split(",") for _, result in found for dims in re.findall(r"\[([\d,]+)\]", result)]
        table = config.vocab_size * config.hidden_size // num_kv_heads
        assert max(prod(map(int, dims)) for dims in shapes) < table / 8


@check
def nothing_is_whole_on_one_device(folder: Path) -> None:
    """Weights but norms, cache and logits are split equally; the cache never was whole."""
    import jax

    from tessera.generate import load
    from tessera.runtime.row_pool import RowPool

    config = config_of(3)
    model = load(saved(folder, config, "kv3"), mesh="3")
    pool = RowPool(model.params, config, model.policy, rows=2, num_keys=192)
    runs(folder, 3, "dense", "3")
    leaves = [*jax.tree.leaves(pool.cache), *(x for x in jax.tree.leaves(model.params) if x.ndim > 1)]
    for x in leaves:
        assert [shard.data.nbytes for shard in x.addressable_shards] == [x.nbytes // 3] * 3, (x.shape, x.sharding)
    text = compiled("allocate", 3)
    assert "[2,1,256," in text
    assert "[2,3,256," not in text


@check
def pages_on_a_mesh_give_the_tokens_of_one_device(folder: Path) -> None:
    """Three requests in a pool that holds two: one gives way, and a fourth finds the first's pages."""
    import numpy as np

    from tessera.generate import load
    from tessera.runtime.pool import Paging
    from tessera.runtime.requests import End, Request

    path = saved(folder, config_of(HEADS), f"kv{HEADS}")
    policy = replace(policies(HEADS)["remap"], crossover_tokens=64)
    paging = Paging(num_pages=8, page=64, unit=64, sizes=(64,), batches=(1, 3))
    prompts = [[seed + token % 200 for token in range(150)] for seed in (3, 30, 50, 3)]
    found, scored = {}, {}
    for mesh in (None, f"{HEADS}x1"):
        engine = replace(load(path, mesh=mesh), policy=policy).engine(slots=3, num_keys=256, paging=paging)
        for prompt in prompts[:3]:
            engine.submit(Request(prompt=prompt, max_new_tokens=50, prompt_logprobs=0))
        ends = list(engine.drain())
        engine.submit(Request(prompt=prompts[3], max_new_tokens=50))
        ends += engine.drain()
        assert engine.pool_state.preempted, "nothing gave way"
        assert all(isinstance(end, End) for end in ends)
        found[mesh] = [end.generation.tokens for end in sorted(ends, key=lambda end: end.id)]
        scored[mesh] = [token.logprob for end in ends for token in end.prompt[1:]]
    assert found[None] == found[f"{HEADS}x1"]
    np.testing.assert_allclose(scored[None], scored[f"{HEADS}x1"], atol=1e-4)
    keys = engine.lane.pool.cache.k[0]
    assert keys.addressable_shards[0].data.shape[1] == keys.shape[1] // HEADS, "a device holds all heads"


@check
def the_engine_answers_as_one_device_does_and_compiles_nothing(folder: Path) -> None:
    """Requests join, leave, sample and are penalised; then the model scores the text in one call and in chunks."""
    import jax
    import numpy as np

    from tessera.generate import load
    from tessera.runtime.requests import End, Request
    from tessera.runtime.sampling import Sampling
    from tessera.runtime.score import run_whole, score_rows

    expected = runs(folder, 3, "dense", None)
    model = load(saved(folder, config_of(3), "kv3"), mesh="3")
    engine = model.engine(slots=2, num_keys=192, sizes=(64,))
    penalised = Sampling(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5)
    engine.warm([Sampling(), penalised])
    count = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, s, **_: count.append(name) if name.endswith("backend_compile_duration") else None
    )
    prompts = [list(range(3, 153)), list(range(40, 110))]
    events = []
    for prompt in prompts:  # the second joins while the first decodes
        engine.submit(Request(prompt=prompt, max_new_tokens=4))
        events += [event for _ in range(4) for event in engine.step()]
    events += [event for _ in range(6) for event in engine.step()]
    ends = {event.id: event.generation.tokens for event in events if isinstance(event, End)}
    assert [list(ends[id]) for id in (0, 1)] == expected.argmax(-1).T.tolist()
    for seed in range(3):
        engine.submit(Request(prompt=prompts[1], max_new_tokens=3, sampling=penalised, seed=seed))
    assert len(list(engine.drain())) == 3
    assert count == []
    scores = np.asarray(model.logits([prompts[0]]))[0]
    np.testing.assert_allclose(scores[-1], expected[0, 0], atol=1e-5)
    tokens = np.array(prompts[0])
    hidden, _ = run_whole(model, tokens, model.policy)
    logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    rows = np.arange(100, 149)
    np.testing.assert_allclose(score_rows(model, hidden, tokens, rows).loss, -logp[rows, tokens[rows + 1]], atol=1e-4)


@check
def a_saved_model_and_its_fingerprint_are_those_of_one_device(folder: Path) -> None:
    import jax

    from tessera.generate import load, save
    from tessera.models.files.checkpoint import fingerprint
    from tessera.runtime.requests import explain_not_finite

    config = config_of(3)
    source = saved(folder, config, "kv3")
    one, model = load(source), load(source, mesh=3)
    assert fingerprint(model.params, config) == fingerprint(one.params, config)
    save(model, folder / "again")
    name = "model.safetensors"
    assert (folder / "again" / name).read_bytes() == (source / name).read_bytes()
    broken = replace(model.params, embed=model.params.embed * jax.numpy.nan)
    assert "params.embed hold NaN" in explain_not_finite(broken)


@check
def gguf_parts_equal_the_whole(folder: Path) -> None:
    """Blocks of 32 values, rows of q and k in llama.cpp's order, columns cut at blocks and within one."""
    import jax
    import numpy as np
    import pytest
    from gguf import quantize
    from gguf_files import Q, from_folder
    from quant_subjects import dequantised

    from tessera.core.mesh import MeshShape, build
    from tessera.core.quant import is_quantised
    from tessera.models.files.checkpoint import load_params
    from tessera.models.files.forms import check_forms
    from tessera.models.files.source import open_source

    def quantised(kind: Q, name: str, x: np.ndarray) -> tuple[np.ndarray, Q]:
        if x.ndim == 1 or name.startswith("token"):
            return x, Q.F32
        return (x.astype(np.float16), kind) if kind == Q.F16 else (quantize(x, kind), kind)

    config = config_of(4, hidden_size=64, intermediate_size=192, head_dim=16)
    source = saved(folder, config, "gguf")
    for kind, heads in ((Q.Q8_0, 4), (Q.Q4_0, 2), (Q.F16, 4)):
        path = from_folder(source, folder / f"{kind.name}.gguf", quantise=partial(quantised, kind))
        gguf = open_source(path)
        whole = load_params(gguf)
        parts = load_params(gguf, mesh=build(MeshShape(heads, 1)))
        stacked = load_params(gguf, mesh=build(MeshShape(heads, 1)), stacked=True)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(parts.layers[1]), jax.tree.leaves(stacked.layers), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b)[1])
        if kind == Q.F16:
            continue
        if heads > 2:  # a device would hold 48 inputs of down
            with pytest.raises(
                ValueError, match="blocks of 32 inputs, but mlp.down_proj.weight has 48 inputs on each of 4"
            ):
                check_forms(gguf, "gguf", heads)
            continue
        one, kept = (load_params(gguf, mesh=on, weight_format="gguf") for on in (None, build(MeshShape(2, 1))))
        leaves = [jax.tree.leaves(params, is_leaf=is_quantised) for params in (one, kept)]
        for a, b in zip(*leaves, strict=True):
            a, b = (dequantised(x) if is_quantised(x) else np.asarray(x) for x in (a, b))
            np.testing.assert_array_equal(a, b)


@check
def fewer_bits_equal_one_device(folder: Path) -> None:
    """Values, scales, fingerprint and products of every form are those of one device, and each device holds the planned
    bytes. A product whose inputs are split adds up once; integers agree on each row's largest value before."""
    import jax
    import numpy as np
    from quant_subjects import dequantised

    from tessera.core.mesh import MeshShape
    from tessera.core.quant import FORMS, is_quantised, num_bytes
    from tessera.generate import load
    from tessera.models.files.checkpoint import fingerprint
    from tessera.models.footprint import Types, weight_bytes
    from tessera.models.weights import device_bytes

    config = config_of(4, hidden_size=128, intermediate_size=256, head_dim=32)
    source = saved(folder, config, "bits")
    for name in FORMS:
        parts = {"int4-g128": 2, "fp8": 1}.get(name, 4)
        one, model = load(source, weights=name), load(source, weights=name, mesh=str(parts))
        assert fingerprint(model.params, config) == fingerprint(one.params, config)
        leaves = [jax.tree.leaves(params, is_leaf=is_quantised) for params in (one.params, model.params)]
        for a, b in zip(*leaves, strict=True):
            a, b = (dequantised(x) if is_quantised(x) else np.asarray(x) for x in (a, b))
            np.testing.assert_array_equal(a, b)
        types = Types(weights=name, dtype=config.dtype)
        planned = sum(weight_bytes(config, types=types, division=MeshShape(heads=parts)).values())
        assert (
            planned
            == device_bytes(model.params)
            == sum(num_bytes(x.addressable_shards[-1].data) for x in jax.tree.leaves(model.params))
        )
        check_products(one.params.layers[1], model.params.layers[1], name, parts)


def check_products(one, split, name: str, parts: int) -> None:
    """Compare a product with split outputs and one with split inputs, as in q and o, for few and many rows."""
    import numpy as np

    from tessera.core.mesh import keep, mesh_of, program, put
    from tessera.models.products import product

    @program()
    def both(layer, x, y):
        return product(x, layer.q), keep(product(y, layer.o))

    rng, on = np.random.default_rng(0), mesh_of(split)
    for rows in ((2, 1), (2, 40)):
        x, y = (rng.normal(size=(*rows, n)).astype(np.float32) for n in (one.q.shape[1], one.o.shape[1]))
        want = both(one, x, y)
        given = split, put(x, on), put(y, on, None, None, "heads")
        found = both(*given)
        for a, b in zip(want, found, strict=True):
            np.testing.assert_allclose(b, a, atol=2e-6 * np.abs(a).max(), rtol=0, err_msg=name)
        text = both.lower(*given).compile().as_text()
        kinds = [kind for kind, _ in messages(text)]
        integers = name in ("int8", "int4", "w8a8")
        assert kinds == ["all-reduce"] * (0 if parts == 1 else 2 if integers else 1), (name, rows, messages(text))


@check
def fewer_bits_decode_as_on_one_device(folder: Path) -> None:
    """The products of TPUs, chunks shared by heads and by rows: within 1e-5, two sums a layer, weights sent as bytes.

    The CPU's products and an int8 cache round activations, where a change of 1e-7 can change an integer: one device's
    logits move by 3e-4 if its embedding is scaled by 1 + 3e-7. So does a mesh's, by no more than 1e-3.
    """
    from tessera.models import products

    config, on_cpu = config_of(4), products._on_cpu
    source, policy = saved(folder, config, "kv4"), policies(4)["dense"]
    try:
        products._on_cpu = products._fused
        want = run(source, config, policy, None, weights="int8")
        for mesh, by_rows in (("4", False), ("4", True), ("4x2", False)):
            found = run(source, config, policy, mesh, by_rows, weights="int8")
            check_close(found, want, 1e-5, f"{mesh=} {by_rows=}")
    finally:
        products._on_cpu = on_cpu
    gathered = [
        sum(kind == "all-gather" and result.startswith("s8") for kind, result in messages(text))
        for text in programs("prefill_chunk", 4)
    ]
    assert max(gathered) >= 7 * config.num_layers, gathered
    for text in programs("decode_token", 4):
        sums = [result for kind, result in messages(text) if kind == "all-reduce"]
        assert 0 < len(sums) <= 2 * config.num_layers + 1, sums
    policy, options = policies(4)["remap"], {"weights": "int4", "kv_dtype": "int8"}
    want, found = (run(source, config, policy, mesh, **options) for mesh in (None, "4"))
    check_close(found, want, 1e-3, "packed int4 weights, int8 cache, Kascade")


def check_close(found, want, atol: float, what: str) -> None:
    import numpy as np

    assert np.isfinite(want).all()
    assert (found.argmax(-1) == want.argmax(-1)).all(), what
    np.testing.assert_allclose(found, want, atol=atol, rtol=0, err_msg=what)


@check
def every_device_counts_in_the_memory_check(folder: Path) -> None:
    import pytest

    from tessera.core import memory
    from tessera.core.mesh import MeshShape
    from tessera.generate import load
    from tessera.runtime.step import needed, require_room

    config = config_of(3)
    model = load(saved(folder, config, "kv3"), mesh="3")
    asked = dict(batch=2, num_keys=1024, num_tokens=64)
    each = needed(config, dtype="float32", host=True, division=MeshShape(heads=3), **asked).beyond_weights
    alone = needed(config, dtype="float32", host=True, **asked).beyond_weights
    assert alone / 3 < each < alone
    original = memory.available_bytes
    try:
        memory.available_bytes = lambda device: 3 * each
        require_room(model.params, config, **asked)
        memory.available_bytes = lambda device: 3 * each - 1
        with pytest.raises(MemoryError, match="on each of 3 devices but .* are free on cpu in total"):
            require_room(model.params, config, **asked)
    finally:
        memory.available_bytes = original


@check
def all_others(folder: Path) -> None:
    """The other numbers of KV heads, devices and policies (exhaustive)."""
    for num_kv_heads in (1, 2, 3, 8):
        for attention in ("dense", "remap", "pooled"):
            counts = [n for n in (1, 2, 3, 4, 8) if num_kv_heads % n == 0]
            check_same(folder, num_kv_heads, attention, *map(str, counts))


def main() -> None:
    """Run the named checks, or all but the last."""
    import jax

    assert len(jax.devices()) == 8
    folder, *names = sys.argv[1:]
    for name in names or list(CHECKS)[:-1]:
        started = os.times()
        CHECKS[name](Path(folder))
        print(name, flush=True)
        print(f"{name}: {sum(os.times()[:2]) - sum(started[:2]):.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
