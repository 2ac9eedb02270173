"""Checks of training on eight fake devices, run by train/test_train_mesh.py in one child process.

    python train_subjects.py FOLDER [NAME ...]

prints the name of each check that passed, and ends with the traceback of the first that fails.
"""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

DEVICES = 8
CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def recipe_of(folder: Path, **changes):
    """Return four steps on own text: norms of queries and keys, an untied head, weights of two layers."""
    from train_recipes import TINY

    from tessera.train.recipes import Stage, text_recipe

    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text to train on, {i * i}\n" for i in range(400)))
    config = replace(TINY.config, family="qwen3", num_heads=4, num_kv_heads=2, qk_norm=True, tie_embeddings=False)
    recipe = text_recipe(text, config=config, length=16)
    stage = Stage(length=16, batch=16, steps=4, mixture=(("text", 1.0),), rate=1e-2, **changes)
    return replace(recipe, warmup=2, stages=(stage,))


def train(folder: Path, out: str, mesh: str, until: int | None = None, **changes):
    """Run or resume a run; return the losses and gradient norms of all steps so far, and the result."""
    from rich.console import Console

    from tessera.train import loop
    from tessera.train.losses import read_losses

    quiet = Console(file=io.StringIO())
    result = loop.train(recipe_of(folder, **changes), folder / out, mesh=mesh, until=until, console=quiet)
    return [(line["loss"], line["norm"]) for line in read_losses(folder / out / "loss.jsonl")], result


@cache
def alone(folder: Path):
    """Train on one device, whole batches."""
    return train(folder, "alone", "data=1")


@check
def a_run_moves_between_meshes_and_keeps_its_curve(folder: Path) -> None:
    """Two steps fully sharded, one on data x shard in slices with recomputation, one on a single device."""
    import numpy as np

    expected, whole = alone(folder)
    train(folder, "moved", "shard=8", until=2)
    train(folder, "moved", "data=2,shard=4", until=3, accumulate=2, remat=True)
    found, result = train(folder, "moved", "data=1")
    assert len(found) == 4
    assert expected[0][0] - expected[-1][0] > 0.1  # it learns: an update that is lost would show
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for path in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (result.model / path).stat().st_size == (whole.model / path).stat().st_size


@check
def nothing_is_whole_on_one_device(folder: Path) -> None:
    """After a step, each device of shard=8 holds an eighth of weights and moments; the step reused their memory."""
    import jax
    import numpy as np

    from tessera.models.weights import layer_weights
    from tessera.train import data, loop
    from tessera.train.mesh import MeshShape, build
    from tessera.train.state import start

    recipe, mesh = recipe_of(folder), build(MeshShape(shard=DEVICES))
    state = start(recipe, mesh, None)
    corpus = data.Split(np.frombuffer(Path(recipe.text).read_bytes(), np.uint8).astype(np.int32), np.zeros(0))
    new, _ = loop.run_step(state, corpus, recipe, 0, mesh)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for leaf in jax.tree.leaves(new):
        held = [shard.data.nbytes for shard in leaf.addressable_shards]
        assert held == [leaf.nbytes // DEVICES if leaf.ndim else leaf.nbytes] * DEVICES, (leaf.shape, leaf.sharding)
    modules = [module for e in jax.devices()[0].client.live_executables() for module in e.hlo_modules()]
    texts = [module.to_string() for module in modules if module.name == "jit_train_step"]
    text = next(text for text in texts if "'shard'=8" in text)
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1].count("-alias)")
    assert aliased == len(jax.tree.leaves(state))
    # No array stacks a whole weight of all layers: neither residuals of the forward pass nor gradients.
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    matrices = [weight.name for weight in layer_weights(recipe.config) if weight.is_matrix]
    whole = {tuple(getattr(new.params.layers, name).shape) for name in matrices}
    stacked = {(count, *order) for count, *size in whole for order in (size, size[::-1])}
    assert not shapes & stacked, shapes & stacked
    assert {shape[1:] for shape in whole} <= {shape[-2:] for shape in shapes}  # each layer's weights are gathered


@check
def a_checkpoint_holds_parts_and_loads_anywhere(folder: Path) -> None:
    import jax
    import numpy as np
    from safetensors import safe_open

    from tessera.train.checkpoints import checkpoints, load_checkpoint, load_weights, save_checkpoint
    from tessera.train.mesh import MeshShape, build

    alone(folder)
    recipe = recipe_of(folder)
    whole = load_checkpoint(checkpoints(folder / "alone")[-1], recipe, build(MeshShape()))
    for number, shape in enumerate((MeshShape(shard=8), MeshShape(4, 2), MeshShape(data=8))):
        (parts := folder / f"parts{number}").mkdir()
        split = load_checkpoint(checkpoints(folder / "alone")[-1], recipe, build(shape))
        save_checkpoint(parts, split, 4, recipe)
        found = checkpoints(parts)[-1]
        with safe_open(found.files[0], "numpy") as file:
            names = [name for name in file.keys() if name.partition(" @ ")[0] == ".params.layers.q"]
            assert len(names) == shape.shard  # of the copies along "data", one is written
        again = load_checkpoint(found, recipe, build(MeshShape(2, 2)))
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(load_weights(found, recipe)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


def main() -> None:
    """Run the named checks, or all."""
    import jax

    assert len(jax.devices()) == DEVICES
    folder, *names = sys.argv[1:]
    for name in names or CHECKS:
        CHECKS[name](Path(folder))
        print(name, flush=True)


if __name__ == "__main__":
    main()
