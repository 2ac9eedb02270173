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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tessera.attention.contract import Positions
from tessera.attention.xla import prefill as xla_prefill
from tessera.core import interrupt
from tessera.core.extras import installed
from tessera.core.files import remove_left, sole_writer, write_whole
from tessera.core.memory import require
from tessera.core.quant import has_quantised
from tessera.models import decoder
from tessera.models.checkpoint import load_params, read_tokenizer, save_folder
from tessera.models.config import ModelConfig
from tessera.models.layers import Params, rope_frequencies
from tessera.models.tokenizer import byte_tokenizer
from tessera.models.weights import init_params, num_parameters
from tessera.sparse.baselines import Dense
from tessera.train import data
from tessera.train.losses import LOG_NAME, Line, draw_losses, open_log, read_losses
from tessera.train.recipes import Recipe, Stage

LOOK_BACK_PAIRS = 10
LOOK_BACK_SHARPNESS = 7.6


class State(NamedTuple):
    """State carried between steps: float32 master weights and the optimizer's moments."""

    params: Params
    optimizer: Any


class Sums(NamedTuple):
    """Sums over a batch: weighted cross-entropy, weight, answer tokens predicted right, and answer tokens."""

    loss: Array
    weight: Array
    right: Array
    asked: Array


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a run: weights, steps done, and the folder written in Hugging Face layout."""

    params: Params
    step: int
    model: Path


@dataclass(frozen=True, kw_only=True)
class SmallBlocks(Dense):
    """Dense attention for training.

    Blocks of 64 x 128 skip the part above the diagonal and stay in the CPU's cache: forward and backward at length
    1,024 took a third of the time of attention without blocks. The dispatcher's larger blocks suit inference.
    """

    def attend(self, layer, q, kv, spec, positions, state):
        config = xla_prefill.Config(block_t=min(64, q.shape[1]), block_s=min(128, kv.k.shape[2]))
        return xla_prefill.launch_dense(q, kv, spec, positions, None, config).out, state


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Build the optimizer: gradient clipping, Adam, decoupled decay of matrices (not of norms and biases).

    `train_step` applies the learning rate.
    """

    def decayed(params: Params) -> Any:
        def is_matrix(path, leaf) -> bool:
            name = jax.tree_util.keystr(path)
            return not ("norm" in name or "bias" in name)

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=recipe.b1, b2=recipe.b2),
        optax.add_decayed_weights(recipe.weight_decay, mask=decayed),
    )


def init_state(recipe: Recipe) -> State:
    """Return the state at step 0: fresh weights, or those of the recipe's base, and zero moments."""
    if recipe.base is not None:
        params = load_params(recipe.base, recipe.config, dtype=jnp.float32, stacked=True)
    else:
        params = init_params(recipe.config, jax.random.key(recipe.seed))
    if recipe.look_back:
        params = look_back(params, recipe.config)
    return State(params, optimizer(recipe).init(params))


def look_back(params: Params, config: ModelConfig) -> Params:
    """Initialise the first two query heads of layer 0 to favour one and two positions back.

    A common unit vector u is added to every embedding, and these heads' q and k read only u, so that before rotation
    they are the same at all positions. The rotary embedding, with frequencies f_i, turns their product into sum_i
    cos(f_i (distance - shift)), which is largest at the wanted distance. Given this half of the copying circuit, the
    other half forms in a few hundred steps instead of thousands (LOG.md).
    """
    size, head = config.hidden_size, config.head_dim
    u = jax.random.normal(jax.random.key(7), (size,))
    u = u / jnp.linalg.norm(u)
    frequency, _ = rope_frequencies(config.rope, head)
    fast = jnp.arange(head // 2) < LOOK_BACK_PAIRS
    scale = LOOK_BACK_SHARPNESS / (size / 2) ** 0.5

    def direction(shift: float) -> Array:
        angle = shift * frequency
        return jnp.concatenate([jnp.where(fast, jnp.cos(angle), 0), jnp.where(fast, jnp.sin(angle), 0)]) * scale

    q = params.layers.q.at[0, :head].set(jnp.outer(direction(0.0), u))
    if config.groups > 1:  # a second query head of the same KV head
        q = q.at[0, head : 2 * head].set(jnp.outer(direction(-1.0), u))
    k = params.layers.k.at[0, :head].set(jnp.outer(direction(1.0), u))
    return replace(params, embed=params.embed + u, layers=replace(params.layers, q=q, k=k))


def loss_sums(params: Params, tokens: Array, weights: Array, *, config: ModelConfig, remat: bool, dtype: str) -> Sums:
    """Compute `Sums` over a batch of tokens [B,T+1] with weights [B,T]; activations in `dtype`, loss in float32."""
    if has_quantised(params):
        raise ValueError("quantised weights cannot be trained, as integers have no gradient: load without weights=")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    batch, length = weights.shape
    full = jnp.full(batch, length, jnp.int32)
    positions = Positions(jnp.zeros(batch, jnp.int32), full, full)
    hidden, _, _ = decoder.forward(
        params, tokens[:, :-1], None, positions, config=config, policy=SmallBlocks(), remat=remat
    )
    scores = decoder.logits(params, hidden)
    picked = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    entropy = jax.nn.logsumexp(scores, -1) - picked
    asked = weights >= jnp.where(jnp.any(weights >= data.VALUE_WEIGHT), data.VALUE_WEIGHT, 1.0)
    right = (picked >= jnp.max(scores, -1)) & asked
    return Sums(jnp.sum(weights * entropy), jnp.sum(weights), jnp.sum(right), jnp.sum(asked))


@partial(jax.jit, static_argnames=("recipe", "stage"), donate_argnames="state")
def train_step(
    state: State, tokens: Array, weights: Array, rate: Array, *, recipe: Recipe, stage: Stage
) -> tuple[State, tuple[Array, Array, Array]]:
    """Run one update over `stage.accumulate` slices of the batch.

    Returns (state, (loss, share of answer tokens right, gradient norm)).
    """

    def objective(params: Params, tokens: Array, weights: Array) -> tuple[Array, Sums]:
        sums = loss_sums(params, tokens, weights, config=recipe.config, remat=stage.remat, dtype=recipe.compute_dtype)
        return sums.loss, sums

    gradient = jax.grad(objective, has_aux=True)
    if stage.accumulate == 1:
        total, sums = gradient(state.params, tokens, weights)
    else:
        slices = jax.tree.map(lambda x: x.reshape(stage.accumulate, -1, x.shape[-1]), (tokens, weights))

        def add(carry, part):
            return jax.tree.map(jnp.add, carry, gradient(state.params, *part)), None

        first, rest = (jax.tree.map(lambda x, cut=cut: x[cut], slices) for cut in (0, slice(1, None)))
        (total, sums), _ = jax.lax.scan(add, gradient(state.params, *first), rest)
    weight = jnp.maximum(sums.weight, 1e-6)
    grads = jax.tree.map(lambda g: g / weight, total)
    updates, moments = optimizer(recipe).update(grads, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics = (sums.loss / weight, sums.right / jnp.maximum(sums.asked, 1), optax.tree.norm(grads))
    return State(params, moments), metrics


def save_checkpoint(folder: Path, state: State, step: int, recipe: Recipe, *, keep: int = 2) -> Path:
    """Write checkpoint-<step>.safetensors, whole or not at all, and delete all but the last `keep` checkpoints."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    tensors = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    about = {"step": str(step), "recipe": recipe.fingerprint(step), "name": recipe.name}
    path = folder / f"checkpoint-{step:08d}.safetensors"
    write_whole(path, lambda temporary: save_file(tensors, temporary, about))
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first."""
    return sorted(folder.glob("checkpoint-*.safetensors"))


def load_checkpoint(path: Path, recipe: Recipe) -> tuple[State, int]:
    """Load the state and step of a checkpoint.

    Raises:
        ValueError: the checkpoint is damaged or belongs to another recipe.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(partial(init_state, replace(recipe, base=None))))
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            step = int(about.get("step", -1))
            if step < 0 or about.get("recipe") != recipe.fingerprint(step):
                raise ValueError(
                    f"{path} belongs to another recipe ({about.get('name')!r}, {about.get('recipe')}) than "
                    f"{recipe.name!r} ({recipe.fingerprint(max(step, 0))}): choose another folder"
                )
            leaves = [jnp.asarray(file.get_tensor(jax.tree_util.keystr(where))) for where, _ in flat]
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to resume from the one before") from error
    return jax.tree_util.tree_unflatten(tree, leaves), step


def train(
    recipe: Recipe,
    out: str | os.PathLike,
    *,
    save_every_s: float = 120.0,
    until: int | None = None,
    console: Console | None = None,
) -> Trained:
    """Run a recipe to its end, resuming from the newest checkpoint in `out` if there is one.

    Writes checkpoint-*.safetensors (the last two), loss.jsonl, loss.svg and, at the end, model/ (Hugging Face layout).

    Args:
        recipe: the model, its data and its optimizer.
        out: folder; created if missing.
        save_every_s: seconds between checkpoints.
        until: stop after this many steps in total; None is the recipe's end.
        console: where progress goes; None is standard error.

    Raises:
        ValueError: the folder holds another recipe's run, the text is too short, or the loss is not finite.
        MemoryError: a batch's scores over the vocabulary do not fit.
        OSError: another process trains in this folder.
        FileNotFoundError: the recipe's text does not exist.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the checkpoint is written first and the message says how to resume.
    """
    if until is not None and until < 0:
        raise ValueError(f"{until=} must be at least 0 steps, or None to run the recipe to its end")
    if math.isnan(save_every_s) or save_every_s < 0:
        raise ValueError(f"{save_every_s=} must be a number of seconds, at least 0")
    check_room(recipe)
    console = Console(stderr=True) if console is None else console
    tokenizer = byte_tokenizer() if recipe.base is None else read_tokenizer(recipe.base)
    corpus = data.library_corpus() if recipe.text is None else data.read_split(recipe.text, tokenizer)
    longest = max(stage.length for stage in recipe.stages)
    if len(corpus.train) <= longest:
        raise ValueError(f"the text has {len(corpus.train)} tokens, but must have more than length={longest}: add text")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} is not a writable folder ({error.strerror}): name another") from error
    with sole_writer(folder / "train"):
        remove_left(folder)
        for left in folder.glob(".tmp??????"):  # where safetensors writes a file before it renames it
            left.unlink()
        return _train(recipe, folder, corpus, tokenizer, save_every_s=save_every_s, until=until, console=console)


def _train(
    recipe: Recipe, folder: Path, corpus: data.Split, tokenizer: Any, *, save_every_s: float, until: int | None, console
) -> Trained:
    found = checkpoints(folder)
    state, step = load_checkpoint(found[-1], recipe) if found else (init_state(recipe), 0)
    state = jax.device_put(state, spread())
    if step > recipe.steps:
        raise ValueError(f"{found[-1]} is past the recipe's {recipe.steps} steps: choose another folder")
    last = recipe.steps if until is None else min(until, recipe.steps)
    if step:
        console.print(f"resuming at step {step} of {recipe.steps}", highlight=False)
    peak = peak_flops(recipe.compute_dtype)
    with (
        open_log(folder / LOG_NAME, step) as losses,
        Line(console, recipe.steps, peak) as line,
        stop_signals() as stopped,
    ):
        saved = time.monotonic()
        while step < last and not (stopped or interrupt.asked()):
            state, record = run_step(state, corpus, recipe, step)
            step += 1
            losses.write(json.dumps(record) + "\n")
            line.show(record, recipe.flops(step - 1, step), recipe.flops(step, recipe.steps))
            if time.monotonic() - saved >= save_every_s:
                save_checkpoint(folder, state, step, recipe)
                saved = time.monotonic()
    save_checkpoint(folder, state, step, recipe)
    lines = read_losses(folder / LOG_NAME)
    if lines and installed("matplotlib"):
        draw_losses(lines, folder / "loss.svg", f"recipe {recipe.name!r}: {num_parameters(recipe.config):,} parameters")
    if step < last:
        raise KeyboardInterrupt(f"stopped at step {step} of {recipe.steps}; the same command resumes there")
    save_folder(folder / "model", state.params, replace(recipe.config, dtype="float32"), tokenizer)
    return Trained(params=state.params, step=step, model=folder / "model")


def check_room(recipe: Recipe) -> None:
    """Raise MemoryError if the float32 scores over the vocabulary of one slice of a batch do not fit."""
    for stage in recipe.stages:
        num_bytes = 4 * stage.batch // stage.accumulate * stage.length * recipe.config.vocab_size
        what = f"the scores of a batch of {stage.batch:,} x {stage.length:,} tokens"
        require(num_bytes, jax.devices()[:1], what, "take a smaller batch or length")


def run_step(state: State, corpus: data.Split, recipe: Recipe, step: int) -> tuple[State, dict[str, Any]]:
    """Build the batch of a step, update, and return the new state and the log record."""
    stage, _ = recipe.stage_at(step)
    began = time.perf_counter()
    batch = data.make_batch(corpus, dict(stage.mixture), stage.length, stage.batch, recipe.seed, step)
    rate = np.float32(recipe.rate_at(step))
    tokens, weights = jax.device_put((batch.tokens, batch.weights), spread(stage.batch // stage.accumulate))
    state, metrics = train_step(state, tokens, weights, rate, recipe=recipe, stage=stage)
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


def spread(rows: int = 0) -> NamedSharding:
    """Return the sharding of a batch: its rows over all devices if they divide evenly, else a copy on each device.

    Weights pass 0 rows, so that each device gets a copy.
    """
    devices = jax.devices()
    even = rows > 0 and rows % len(devices) == 0
    return NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data") if even else PartitionSpec())


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, so that training stops between two steps.

    A step donates its state, so dying within one would lose the state. If the program has installed its own handler of
    SIGINT, such as the command line's (`interrupt`), that handler stays.
    """
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
