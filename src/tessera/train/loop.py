"""Training: the step, checkpoints that survive a kill, and the loop.

The loss is the weighted mean of the cross-entropy, sum_i w_i (-ln p_i) / sum_i w_i, in float32. A step clips the
gradient's global norm, then applies AdamW to the float32 master weights p: u = m / (sqrt(v) + eps) + decay * p and
p <- p - rate * u, where m and v are Adam's moments of the gradient. The batch of a step is a pure function of (recipe,
step), so a resumed run repeats the loss curve bit for bit.
"""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh
from rich.console import Console

from tessera.attention.contract import Positions
from tessera.attention.xla import prefill as xla_prefill
from tessera.core import interrupt
from tessera.core.extras import installed
from tessera.core.files import remove_left, sole_writer
from tessera.core.memory import require
from tessera.core.mesh import SHARD, put, sharding
from tessera.core.processes import LEAVE_S
from tessera.core.quant import has_quantised
from tessera.models import decoder
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import save_folder
from tessera.models.files.source import Source, open_source
from tessera.models.layers import Params
from tessera.models.text.tokenizer import Tokenizer, byte_tokenizer
from tessera.models.weights import layer_weights, num_parameters, outer_weights
from tessera.sparse.baselines import Dense
from tessera.train import data
from tessera.train.checkpoints import checkpoints, load_checkpoint, load_weights, remove_incomplete, save_checkpoint
from tessera.train.losses import LOG_NAME, Line, draw_losses, open_log, read_losses
from tessera.train.mesh import anywhere, check_shared, find_mesh, gathered, is_lead, row_axes, told_by_lead
from tessera.train.recipes import Recipe, Stage
from tessera.train.state import State, optimizer, shardings, start


class Sums(NamedTuple):
    """Sums over a batch: weighted cross-entropy, weights, correctly predicted answer tokens, and all answer tokens."""

    loss: Array
    weight: Array
    right: Array
    asked: Array


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a run: the weights, the number of steps done, and the folder of the model in Hugging Face layout."""

    params: Params
    step: int
    model: Path


@dataclass(frozen=True, kw_only=True)
class SmallBlocks(Dense):
    """Dense attention for training, in blocks of 64 query rows x 128 keys, which skip the part above the diagonal and
    stay in the CPU's cache: forward and backward at length 1,024 took a third of the time of attention without blocks.
    """

    def attend(self, layer, q, kv, spec, positions, state):
        config = xla_prefill.Config(block_t=min(64, q.shape[1]), block_s=min(128, kv.k.shape[2]))
        return xla_prefill.launch(q, kv, spec, positions, None, config).out, state


def loss_sums(
    params: Params,
    tokens: Array,
    weights: Array,
    *,
    config: ModelConfig,
    remat: bool,
    dtype: str,
    mesh: Mesh | None = None,
) -> Sums:
    """Compute `Sums` over a batch of tokens [B,T+1] with weights [B,T]; activations in `dtype`, loss in float32."""
    if has_quantised(params):
        raise ValueError(
            "quantised weights cannot be trained, because integers have no gradient: load the model without `weights`"
        )
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    gather = None
    if mesh is not None and mesh.shape[SHARD] > 1:
        gather = partial(gathered, table=layer_weights(config), mesh=mesh)
        params = gathered(params, outer_weights(config), mesh)
    batch, length = weights.shape
    full = jnp.full(batch, length, jnp.int32)
    positions = Positions(jnp.zeros(batch, jnp.int32), full, full)
    hidden, _, _ = decoder.forward(
        params, tokens[:, :-1], None, positions, config=config, policy=SmallBlocks(), remat=remat, gather=gather
    )
    scores = decoder.logits(params, hidden)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    entropy = jax.nn.logsumexp(scores, -1) - picked
    most = jnp.max(weights)
    least = jnp.where(most >= data.VALUE_WEIGHT, data.VALUE_WEIGHT, jnp.minimum(most, 1.0))
    asked = (weights >= least) & (weights > 0)
    right = (picked >= jnp.max(scores, -1)) & asked
    return Sums(jnp.sum(weights * entropy), jnp.sum(weights), jnp.sum(right), jnp.sum(asked))


@partial(jax.jit, static_argnames=("recipe", "stage", "mesh"), donate_argnames="state")
def train_step(
    state: State, tokens: Array, weights: Array, rate: Array, *, recipe: Recipe, stage: Stage, mesh: Mesh | None = None
) -> tuple[State, tuple[Array, Array, Array]]:
    """Run one update over `stage.accumulate` slices of the batch, on `mesh` or, with None, on the devices of `state`.

    Return (state, (loss, share of answer tokens predicted correctly, gradient norm)).
    """
    placed = State(None, None) if mesh is None else shardings(recipe, mesh)

    def keep(tree: Any, where: Any) -> Any:
        return tree if mesh is None else jax.lax.with_sharding_constraint(tree, where)

    def objective(params: Params, tokens: Array, weights: Array) -> tuple[Array, Sums]:
        options = dict(config=recipe.config, remat=stage.remat, dtype=recipe.compute_dtype, mesh=mesh)
        sums = loss_sums(params, tokens, weights, **options)
        return sums.loss, sums

    def gradient(tokens: Array, weights: Array) -> tuple[Params, Sums]:
        total, sums = jax.grad(objective, has_aux=True)(state.params, tokens, weights)
        return keep(total, placed.params), sums

    if stage.accumulate == 1:
        total, sums = gradient(tokens, weights)
    else:
        slices = jax.tree.map(lambda x: x.reshape(stage.accumulate, -1, x.shape[-1]), (tokens, weights))
        if mesh is not None:
            slices = keep(slices, sharding(mesh, (None, *row_axes(mesh, slices[0].shape[1]))))
        first = jax.tree.map(lambda x: x[0], slices)
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, *first))
        (total, sums), _ = jax.lax.scan(
            lambda carry, part: (jax.tree.map(jnp.add, carry, gradient(*part)), None), none, slices
        )
    weight = jnp.maximum(sums.weight, 1e-6)
    grads = jax.tree.map(lambda g: g / weight, total)
    updates, moments = optimizer(recipe).update(grads, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    new = keep(State(params, moments), placed)  # with the old state's shardings: else JAX could not donate it
    return new, (sums.loss / weight, sums.right / jnp.maximum(sums.asked, 1), optax.tree.norm(grads))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Checked arguments of `train`, and the text and the tokenizer that it has read; `last` is the step to stop at."""

    recipe: Recipe
    mesh: Mesh
    folder: Path
    corpus: data.Split
    tokenizer: Tokenizer
    base: Source | None
    save_every_s: float
    last: int
    console: Console


def train(
    recipe: Recipe,
    out: str | os.PathLike,
    *,
    base: Source | None = None,
    mesh: str | None = None,
    save_every_s: float = 120.0,
    until: int | None = None,
    console: Console | None = None,
) -> Trained:
    """Run a recipe to its end, resuming from the newest checkpoint in `out` if there is one.

    Write checkpoint-*.safetensors (the last two), loss.jsonl, loss.svg and, at the end, model/ (Hugging Face layout).
    With several processes (`jax.distributed`), each must call this with the same arguments, and all must see the same
    folder.

    Args:
        base: the files at `recipe.base`, if they are open already.
        mesh: devices that share the work, such as "data=8", "shard=8" or "data=2,shard=4" (`train.mesh`). A run may
            resume on another mesh. None means data parallelism on all devices; if they cannot share a batch equally,
            each of them computes the whole batch.
        save_every_s: seconds between checkpoints.
        until: number of steps in total after which to stop; None means the end of the recipe.
        console: where to print progress; None means standard error.

    Raises:
        ValueError: the folder holds another recipe's run, the text is too short, the loss is not finite, or the mesh
            cannot share the model or a batch.
        MemoryError: the state of training, or the logits of a batch, do not fit in memory.
        OSError: another process trains in this folder.
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint is written first, and the message says how to resume.
    """
    if until is not None and until < 0:
        raise ValueError(f"{until=} must be at least 0 steps, or None to run the recipe to its end")
    if math.isnan(save_every_s) or save_every_s < 0:
        raise ValueError(f"{save_every_s=} must be a number of seconds, at least 0")
    on = find_mesh(mesh, recipe)
    check_room(recipe, on)
    base = open_source(recipe.base) if base is None and recipe.base is not None else base
    tokenizer = byte_tokenizer() if base is None else base.tokenizer
    corpus = recipe.data.read(recipe.text, tokenizer)
    longest = max(stage.length for stage in recipe.stages)
    if len(corpus.train) <= longest:
        raise ValueError(f"the text has {len(corpus.train)} tokens, but must have more than length={longest}: add text")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} is not a writable folder ({error.strerror}): name another") from error
    console = Console(stderr=True, quiet=not is_lead()) if console is None else console
    last = recipe.steps if until is None else min(until, recipe.steps)
    asked = dict(recipe=recipe, mesh=on, folder=folder, corpus=corpus, tokenizer=tokenizer, base=base)
    run = Run(**asked, save_every_s=save_every_s, last=last, console=console)
    with sole_writer(folder / "train") if is_lead() else nullcontext():
        if is_lead():
            remove_left(folder)
            remove_incomplete(folder)
        check_shared(folder)
        return _train(run)


def _train(run: Run) -> Trained:
    recipe, folder = run.recipe, run.folder
    state, step = _resumed(run)
    saved_step, saved_s = step, time.monotonic()
    if step:
        run.console.print(f"resuming at step {step} of {recipe.steps}", highlight=False)
    peak = peak_flops(recipe.compute_dtype) * (run.mesh.size if jax.default_backend() != "cpu" else 1)
    with (
        open_log(folder / LOG_NAME, step) if is_lead() else nullcontext() as losses,
        Line(run.console, recipe.steps, peak) as line,
        stop_signals() as stopped,
    ):
        stop, _ = anywhere(bool(stopped) or interrupt.asked(), False)
        while step < run.last and not stop:
            state, record = run_step(state, run.corpus, recipe, step, run.mesh)
            step += 1
            if losses is not None:
                losses.write(json.dumps(record) + "\n")
            line.show(record, recipe.flops(step - 1, step), recipe.flops(step, recipe.steps))
            due = time.monotonic() - saved_s >= run.save_every_s
            stop, due = anywhere(bool(stopped) or interrupt.asked(), due)
            if due:
                save_checkpoint(folder, state, step, recipe)
                saved_step, saved_s = step, time.monotonic()
    if step != saved_step or step == 0:
        save_checkpoint(folder, state, step, recipe)
    told_by_lead(step)  # wait until every process has written its part
    if is_lead():
        _draw(run)
    if is_lead() and step >= run.last:
        params = state.params if jax.process_count() == 1 else load_weights(checkpoints(folder)[-1], recipe)
        save_folder(folder / "model", params, replace(recipe.config, dtype="float32"), run.tokenizer)
    told_by_lead(step)  # wait for process 0
    if step < run.last:
        if not is_lead():  # process 0 reports where the run stopped; its exit ends the other processes
            time.sleep(LEAVE_S)
        raise KeyboardInterrupt(f"stopped at step {step} of {recipe.steps}; the same command resumes there")
    return Trained(params=state.params, step=step, model=folder / "model")


def _resumed(run: Run) -> tuple[State, int]:
    """Return the state and step of the newest checkpoint that process 0 sees, else a new state and 0."""
    found = {checkpoint.step: checkpoint for checkpoint in checkpoints(run.folder)}
    step = told_by_lead(max(found, default=-1))
    if step < 0:
        return start(run.recipe, run.mesh, run.base), 0
    if step not in found:
        raise ValueError(
            f"{run.folder} has no checkpoint of step {step} in process {jax.process_index()}: use a folder that all "
            "processes share"
        )
    state = load_checkpoint(found[step], run.recipe, run.mesh)
    if step > run.recipe.steps:
        raise ValueError(f"{found[step]} is past the recipe's {run.recipe.steps} steps: choose another folder")
    return state, step


def _draw(run: Run) -> None:
    lines, count = read_losses(run.folder / LOG_NAME), num_parameters(run.recipe.config)
    if lines and installed("matplotlib"):
        draw_losses(lines, run.folder / "loss.svg", f"recipe {run.recipe.name!r}: {count:,} parameters")


def check_room(recipe: Recipe, mesh: Mesh) -> None:
    """Raise MemoryError if the state and the gradients, or the float32 logits of one slice of a batch, do not fit."""
    devices, count = list(mesh.local_devices), num_parameters(recipe.config)
    what = f"training {count:,} parameters (float32 weights, gradients and two moments)"
    require(16 * count // mesh.shape[SHARD], devices, what, "share them among more devices (mesh shard=N)")
    for stage in recipe.stages:
        rows = stage.batch // stage.accumulate
        num_bytes = 4 * rows * stage.length * recipe.config.vocab_size // (mesh.size if row_axes(mesh, rows) else 1)
        what = f"the scores of a batch of {stage.batch:,} x {stage.length:,} tokens"
        require(num_bytes, devices, what, "take a smaller batch or length")


def run_step(state: State, corpus: data.Split, recipe: Recipe, step: int, mesh: Mesh) -> tuple[State, dict[str, Any]]:
    """Build the batch of a step and run the step; return the new state and the record for the log."""
    stage, _ = recipe.stage_at(step)
    began = time.perf_counter()
    batch = recipe.data.batch(corpus, dict(stage.mixture), stage.length, stage.batch, recipe.seed, step)
    rate = np.float32(recipe.rate_at(step))
    axes = row_axes(mesh, stage.batch // stage.accumulate)
    tokens, weights = (put(x, mesh, *axes) for x in (batch.tokens, batch.weights))
    state, metrics = train_step(state, tokens, weights, rate, recipe=recipe, stage=stage, mesh=mesh)
    loss, answers, norm = (float(value) for value in metrics)
    if not (np.isfinite(loss) and np.isfinite(norm)):
        raise ValueError(
            f"{loss=} and {norm=} at step {step + 1} are not finite: lower the rate ({rate:.2g}) or change the text; "
            "the last checkpoint is from before this step"
        )
    record = {
        "step": step + 1,
        "loss": loss,
        "answers": answers,
        "norm": norm,
        "length": stage.length,
        "tokens": stage.batch * stage.length,
        "seconds": round(time.perf_counter() - began, 4),
    }
    return state, record


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that training stops between two steps: a step donates the state, so a
    process that ended during a step would lose it. A program's own handler for SIGINT stays."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    names = (signal.SIGINT, signal.SIGTERM) if plain else (signal.SIGTERM,)
    before = [signal.signal(name, lambda number, frame: received.append(number)) for name in names]
    try:
        yield received
    finally:
        for name, handler in zip(names, before):
            signal.signal(name, handler)


def peak_flops(dtype: str) -> float:
    """Measure the peak FLOP/s of this machine, the denominator of MFU: a 1024^3 matrix product, best of ten runs."""
    size = 1024
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    product(a).block_until_ready()
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
