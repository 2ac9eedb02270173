"""Checkpoints of training: each process writes the parts that it holds, and a run on any mesh can read them.

One process writes checkpoint-<step>.safetensors, N processes write checkpoint-<step>-<i>-of-<N>.safetensors. A tensor's
name is its path in the state; a part of a tensor adds its bounds, as in ".params.embed @ 0:264,64:128". Each file
appears whole or not at all, and a checkpoint counts once all its files are there. If a process is killed during a save,
the previous checkpoint is therefore still the newest.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from tessera.core.files import write_whole
from tessera.models.files.tensor_file import write_file
from tessera.models.layers import Params
from tessera.train.recipes import Recipe
from tessera.train.state import State, init_state, shardings

FILE = re.compile(r"checkpoint-(\d{8,})(?:-(\d{5})-of-(\d{5}))?\.safetensors")

Box = tuple[tuple[int, int], ...]
"""First index and end of a part along each axis."""


class Checkpoint(NamedTuple):
    """A complete checkpoint: the number of steps done, and the files, in order of the processes that wrote them."""

    step: int
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return str(self.files[0])


class Piece(NamedTuple):
    """A part of a tensor in an open file."""

    box: Box
    file: Any
    name: str


def checkpoints(folder: Path) -> list[Checkpoint]:
    """List the complete checkpoints in a folder, oldest first."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("checkpoint-*.safetensors"):
        if place := FILE.fullmatch(path.name):
            step, index, count = int(place[1]), int(place[2] or 0), int(place[3] or 1)
            found.setdefault((step, count), {})[index] = path
    complete = {key: files for key, files in found.items() if sorted(files) == list(range(key[1]))}
    return [Checkpoint(step, tuple(complete[step, n][i] for i in range(n))) for step, n in sorted(complete)]


def save_checkpoint(folder: Path, state: State, step: int, recipe: Recipe) -> Path:
    """Write this process's file of a checkpoint, whole or not at all; process 0 deletes all but the last two."""
    index, count = jax.process_index(), jax.process_count()
    number = f"-{index:05d}-of-{count:05d}" if count > 1 else ""
    path = folder / f"checkpoint-{step:08d}{number}.safetensors"
    held = dict(_held(state))
    specs = {name: (part.dtype, part.shape) for name, part in held.items()}
    about = {"step": str(step), "recipe": recipe.fingerprint(step), "name": recipe.name}
    arrays = (np.asarray(part) for part in held.values())  # one at a time: a device's memory may exceed the host's
    write_whole(path, lambda temporary: write_file(temporary, specs, arrays, about))
    if index == 0:
        remove(folder, checkpoints(folder)[-2:])
    return path


def remove(folder: Path, but: Sequence[Checkpoint]) -> None:
    """Delete the files of all checkpoints older than but[0]. Newer files stay, because a save may be under way."""
    for path in folder.glob("checkpoint-*.safetensors"):
        place = FILE.fullmatch(path.name)
        if place and but and int(place[1]) < but[0].step:
            path.unlink()


def remove_incomplete(folder: Path) -> None:
    """Delete the files of checkpoints that a killed run did not complete."""
    kept = {path for found in checkpoints(folder) for path in found.files}
    for path in folder.glob("checkpoint-*.safetensors"):
        if FILE.fullmatch(path.name) and path not in kept:
            path.unlink()


def load_checkpoint(found: Checkpoint, recipe: Recipe, mesh: Mesh) -> State:
    """Load the state of a checkpoint onto `mesh`, which may differ from the mesh of the run that saved it. Each process
    reads only the parts that its devices hold."""

    def place(shape: tuple[int, ...], read: Callable[[Box], np.ndarray], where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(shape, where, lambda index: read(_box(index, shape)))

    return _load(found, recipe, place, shardings(recipe, mesh))


def load_weights(found: Checkpoint, recipe: Recipe) -> Params:
    """Load the weights of a checkpoint, without the moments, into host memory."""

    def whole(shape: tuple[int, ...], read: Callable[[Box], np.ndarray], wanted: bool) -> np.ndarray | None:
        return read(_box((slice(None),) * len(shape), shape)) if wanted else None

    like = jax.eval_shape(partial(init_state, recipe))
    wanted = State(jax.tree.map(lambda _: True, like.params), jax.tree.map(lambda _: False, like.optimizer))
    return _load(found, recipe, whole, wanted).params


def _load(found: Checkpoint, recipe: Recipe, make: Callable[..., Any], marks: State) -> State:
    """Build a state whose arrays are make(shape, read, mark): read(box) returns a part of the stored array, and `mark`
    is the array's entry in `marks`."""
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, framework="numpy")) for path in found.files]
            for path, file in zip(found.files, files):
                _check_recipe(path, file.metadata() or {}, recipe)
            pieces = _pieces(files)

            def load(where: tuple, like: jax.ShapeDtypeStruct, mark: Any) -> Any:
                name = jax.tree_util.keystr(where)
                return make(like.shape, cache(partial(_assemble, name, pieces.get(name, ()), like)), mark)

            return jax.tree_util.tree_map_with_path(load, jax.eval_shape(partial(init_state, recipe)), marks)
        except (SafetensorError, Damaged) as error:
            raise ValueError(f"{found} is damaged ({error}): delete it to resume from an older one") from error


class Damaged(Exception):
    """A checkpoint's files lack values of a tensor, or hold them in another dtype or shape."""


def _held(state: State) -> Iterator[tuple[str, jax.Array]]:
    """Yield the name and the value of each part that this process writes. Each part is written by one process only."""
    for number, (where, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(state)[0]):
        name = jax.tree_util.keystr(where)
        for shard in leaf.addressable_shards:
            copies = leaf.sharding.num_devices * shard.data.size // leaf.size
            if shard.replica_id == number % copies:  # so that the processes share the writing
                whole = shard.data.shape == leaf.shape
                bounds = ",".join(f"{start}:{end}" for start, end in _box(shard.index, leaf.shape))
                yield (name if whole else f"{name} @ {bounds}"), shard.data


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _pieces(files: Sequence[Any]) -> Mapping[str, list[Piece]]:
    """Return the parts in these files, grouped by the name of their tensor."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for name in file.keys():
            tensor, _, bounds = name.partition(" @ ")
            if bounds:
                box = tuple(tuple(map(int, bound.split(":"))) for bound in bounds.split(","))
            else:
                box = tuple((0, size) for size in file.get_slice(name).get_shape())
            pieces.setdefault(tensor, []).append(Piece(box, file, name))
    return pieces


def _assemble(name: str, pieces: Sequence[Piece], like: jax.ShapeDtypeStruct, box: Box) -> np.ndarray:
    """Return a part of a tensor, read from the stored parts that overlap it."""
    out = np.empty([end - start for start, end in box], like.dtype)
    filled = 0
    for piece in pieces:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, box)]
        if len(piece.box) != len(box) or any(start >= end for start, end in common):
            continue
        source = tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(common, piece.box))
        target = tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(common, box))
        values = piece.file.get_slice(piece.name)[source] if source else piece.file.get_tensor(piece.name)
        if values.shape != out[target].shape or values.dtype != out.dtype:
            raise Damaged(
                f"{piece.name} is {values.dtype}{list(values.shape)}, not {out.dtype}{list(out[target].shape)}"
            )
        out[target] = values
        filled += values.size
    if filled != out.size:
        raise Damaged(f"it lacks {out.size - filled:,} of the {out.size:,} values of {name}{list(box)}")
    return out


def _check_recipe(path: Path, about: Mapping[str, str], recipe: Recipe) -> None:
    step = int(about.get("step", -1))
    if step < 0 or about.get("recipe") != recipe.fingerprint(step):
        raise ValueError(
            f"{path} belongs to another recipe ({about.get('name')!r}, {about.get('recipe')}) than "
            f"{recipe.name!r} ({recipe.fingerprint(max(step, 0))}): choose another folder"
        )
