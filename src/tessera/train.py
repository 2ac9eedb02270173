"""Training: recipes, the step, checkpoints that survive a kill, and a one-line progress.

The loss is the weighted mean of the cross-entropy, sum_i w_i (-ln p_i) / sum_i w_i, in float32. A step clips the
gradient's global norm, then AdamW: u = m / (sqrt(v) + eps) + decay * p, p <- p - rate * u, on float32 master weights.
The batch of a step is a pure function of (recipe, step), so a resumed run repeats the loss curve bit for bit.
"""

import hashlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from safetensors import safe_open
from safetensors.numpy import save_file

from tessera import data
from tessera.attention import xla_prefill
from tessera.attention.contract import Positions
from tessera.models import decoder
from tessera.models.config import ModelConfig, Rope
from tessera.models.layers import Params, init_params, rope_frequencies
from tessera.sparse.baselines import Dense


@dataclass(frozen=True, kw_only=True)
class SmallBlocks(Dense):
    """Dense attention in small blocks: forward plus backward at length 1,024 took a third of the naive path's time
    (64 x 128 blocks skip what lies above the diagonal and stay in the cache); the dispatcher's larger ones suit
    inference."""

    def attend(self, layer, q, k, v, spec, positions, state):
        config = xla_prefill.Config(block_t=min(64, q.shape[1]), block_s=min(128, k.shape[1]))
        return xla_prefill.launch_dense(q, k, v, spec, positions, None, config).out, state


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps of one shape: batch * length tokens each, kinds of example by share, learning rate from first to last."""

    length: int
    batch: int
    steps: int
    mixture: tuple[tuple[str, float], ...]
    rate: float = 2e-3
    last_rate: float | None = None
    accumulate: int = 1
    remat: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what weights come out."""

    name: str
    config: ModelConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    warmup: int = 50
    clip: float = 1.0
    weight_decay: float = 0.05
    b1: float = 0.9
    b2: float = 0.95
    compute_dtype: str = "float32"
    look_back: bool = False

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """The stage of a step and the step's place within it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise ValueError(f"{step=} must be below the recipe's {self.steps} steps")

    def rate_at(self, step: int) -> float:
        """Learning rate: linear within a stage, times a linear warm-up over the first steps."""
        stage, within = self.stage_at(step)
        last = stage.rate if stage.last_rate is None else stage.last_rate
        rate = stage.rate + (last - stage.rate) * within / max(stage.steps - 1, 1)
        return rate * min(1.0, (step + 1) / self.warmup)

    def fingerprint(self, step: int) -> str:
        """Hash of all that shaped the weights up to `step`: later stages may be changed or added, earlier ones not."""
        past = {key: value for key, value in asdict(self).items() if key not in ("stages", "name")}
        past["stages"], left = [], step
        for stage in self.stages:
            if left <= 0:
                break
            steps = min(left, stage.steps)
            cut = asdict(replace(stage, steps=steps))
            if steps < stage.steps and stage.last_rate not in (None, stage.rate):
                cut["decays_over"] = stage.steps
            past["stages"].append(cut)
            left -= steps
        return hashlib.sha256(json.dumps(past, sort_keys=True).encode()).hexdigest()[:16]


DEMO_CONFIG = ModelConfig(
    vocab_size=data.VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=352,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=4096,
    rope=Rope(theta=500000.0),
    norm_eps=1e-5,
    tie_embeddings=True,
    bos_id=data.BOS,
    eos_ids=(data.EOS, data.END),
)

COPYING = (("copy", 1.0),)
DEMO = Recipe(
    name="demo",
    config=DEMO_CONFIG,
    look_back=True,
    stages=(
        Stage(length=24, batch=64, steps=486, mixture=COPYING),
        Stage(length=64, batch=48, steps=44, mixture=(("copy", 0.6), ("recall", 0.4))),
        Stage(length=128, batch=32, steps=170, mixture=(("copy", 0.1), ("recall", 0.3), ("notes", 0.6))),
        Stage(length=256, batch=16, steps=200, mixture=(("recall", 0.2), ("notes", 0.75), ("text", 0.05))),
        Stage(length=512, batch=10, steps=120, mixture=(("recall", 0.1), ("notes", 0.85), ("text", 0.05))),
        Stage(length=1024, batch=6, steps=150, mixture=(("recall", 0.1), ("notes", 0.85), ("text", 0.05))),
        Stage(length=2048, batch=3, steps=150, mixture=(("recall", 0.1), ("notes", 0.85), ("text", 0.05)), rate=1.5e-3),
        Stage(length=4096, batch=2, steps=280, rate=1.5e-3, mixture=(("recall", 0.1), ("notes", 0.85), ("text", 0.05)), last_rate=1e-4),
    ),
)
TINY = Recipe(
    name="tiny",
    config=replace(
        DEMO_CONFIG, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    ),
    stages=(Stage(length=24, batch=8, steps=12, mixture=COPYING), Stage(length=48, batch=4, steps=8, mixture=COPYING)),
    warmup=5,
)
RECIPES = {recipe.name: recipe for recipe in (DEMO, TINY)}


LOOK_BACK_PAIRS = 10
LOOK_BACK_SHARPNESS = 7.6


class State(NamedTuple):
    """What a step carries: float32 master weights and Adam's moments."""

    params: Params
    optimizer: Any


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clip, Adam, decoupled decay of matrices (norms and biases are left alone); the rate is applied by the step."""

    def decayed(params: Params) -> Any:
        def matrix(path, leaf) -> bool:
            name = jax.tree_util.keystr(path)
            return not ("norm" in name or "bias" in name)

        return jax.tree_util.tree_map_with_path(matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(b1=recipe.b1, b2=recipe.b2),
        optax.add_decayed_weights(recipe.weight_decay, mask=decayed),
    )


def init_state(recipe: Recipe) -> State:
    """Fresh weights and zero moments."""
    params = init_params(recipe.config, jax.random.key(recipe.seed))
    if recipe.look_back:
        params = look_back(params, recipe.config)
    return State(params, optimizer(recipe).init(params))


def look_back(params: Params, config: ModelConfig) -> Params:
    """Let the first two query heads of layer 0 start out looking one and two positions back.

    Every embedding gets a common unit vector u; q = W u and k = W' u are then the same at all positions, and rotary
    embedding makes their product sum_i cos(f_i (distance - shift)), largest at the wanted distance. With this half of
    the copying circuit given, the other half forms in a few hundred steps instead of thousands (LOG.md).
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
    q = q.at[0, head : 2 * head].set(jnp.outer(direction(-1.0), u))
    k = params.layers.k.at[0, :head].set(jnp.outer(direction(1.0), u))
    return replace(params, embed=params.embed + u, layers=replace(params.layers, q=q, k=k))


class Sums(NamedTuple):
    """Weighted cross-entropy, weight, and how many answer tokens were right, of how many; summed over a batch."""

    loss: Array
    weight: Array
    right: Array
    asked: Array


def loss_sums(params: Params, tokens: Array, weights: Array, *, config: ModelConfig, remat: bool, dtype: str) -> Sums:
    """Sums over one batch; the compute dtype holds weights and activations, the cross-entropy is float32."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    batch, length = weights.shape
    full = jnp.full(batch, length, jnp.int32)
    positions = Positions(jnp.zeros(batch, jnp.int32), full, full)
    hidden, _, _ = decoder.forward(params, tokens[:, :-1], None, positions, config=config, policy=SmallBlocks(), remat=remat)
    scores = decoder.logits(params, hidden)
    target = tokens[:, 1:]
    picked = jnp.take_along_axis(scores, target[..., None], -1)[..., 0]
    entropy = jax.nn.logsumexp(scores, -1) - picked
    asked = weights >= jnp.where(jnp.any(weights >= data.VALUE_WEIGHT), data.VALUE_WEIGHT, 1.0)
    right = (picked >= jnp.max(scores, -1)) & asked
    return Sums(jnp.sum(weights * entropy), jnp.sum(weights), jnp.sum(right), jnp.sum(asked))


@partial(jax.jit, static_argnames=("recipe", "stage"), donate_argnames="state")
def train_step(state: State, tokens: Array, weights: Array, rate: Array, *, recipe: Recipe, stage: Stage):
    """One update over `stage.accumulate` slices of the batch -> state, loss, answer accuracy, gradient norm."""

    def objective(params, tokens, weights):
        sums = loss_sums(params, tokens, weights, config=recipe.config, remat=stage.remat, dtype=recipe.compute_dtype)
        return sums.loss, sums

    gradient = jax.grad(objective, has_aux=True)
    if stage.accumulate == 1:
        total, sums = gradient(state.params, tokens, weights)
    else:
        slices = jax.tree.map(lambda x: x.reshape(stage.accumulate, -1, x.shape[-1]), (tokens, weights))

        def add(carry, batch):
            return jax.tree.map(jnp.add, carry, gradient(state.params, *batch)), None

        first = jax.tree.map(lambda x: x[0], slices)
        rest = jax.tree.map(lambda x: x[1:], slices)
        (total, sums), _ = jax.lax.scan(add, gradient(state.params, *first), rest)
    grads = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-6), total)
    norm = optax.global_norm(grads)
    updates, moments = optimizer(recipe).update(grads, state.optimizer, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics = (sums.loss / jnp.maximum(sums.weight, 1e-6), sums.right / jnp.maximum(sums.asked, 1), norm)
    return State(params, moments), metrics


# Checkpoints: one safetensors file per kept step, written beside and renamed.


def save_checkpoint(folder: Path, state: State, step: int, recipe: Recipe, *, keep: int = 2) -> Path:
    """Write checkpoint-<step>.safetensors whole or not at all (tmp, fsync, rename) and drop all but the last `keep`."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    tensors = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    path = folder / f"checkpoint-{step:08d}.safetensors"
    partial_path = path.with_suffix(".tmp")
    save_file(tensors, partial_path, {"step": str(step), "recipe": recipe.fingerprint(step), "name": recipe.name})
    with open(partial_path, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial_path, path)
    for old in sorted(folder.glob("checkpoint-*.safetensors"))[:-keep]:
        old.unlink()
    return path


def load_checkpoint(folder: Path, recipe: Recipe) -> tuple[State, int] | None:
    """The newest checkpoint in a folder, or None; one of another recipe is refused."""
    paths = sorted(folder.glob("checkpoint-*.safetensors"))
    if not paths:
        return None
    template = jax.eval_shape(lambda: init_state(recipe))
    flat, tree = jax.tree_util.tree_flatten_with_path(template)
    with safe_open(paths[-1], framework="numpy") as file:
        step, found = int(file.metadata()["step"]), file.metadata()["recipe"]
        if found != recipe.fingerprint(step):
            raise ValueError(
                f"{paths[-1]} holds step {step} of another recipe ({found}, not {recipe.fingerprint(step)}); "
                "give another --out folder, or delete this one"
            )
        leaves = [jnp.asarray(file.get_tensor(jax.tree_util.keystr(path))) for path, _ in flat]
    return jax.tree_util.tree_unflatten(tree, leaves), step


def train(recipe: Recipe, out: str | os.PathLike, *, save_every_s: float = 120.0, until: int | None = None) -> State:
    """Run a recipe, resuming from the newest checkpoint in `out`."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    found = load_checkpoint(folder, recipe)
    state, step = found if found is not None else (init_state(recipe), 0)
    corpus = data.library_corpus()
    saved, began, last = time.monotonic(), time.monotonic(), recipe.steps if until is None else until
    stop: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: stop.append(number))
    with open(folder / "loss.jsonl", "a") as log:
        while step < last and not stop:
            stage, within = recipe.stage_at(step)
            batch = data.make_batch(corpus, dict(stage.mixture), stage.length, stage.batch, recipe.seed, step)
            started = time.perf_counter()
            state, metrics = train_step(
                state, batch.tokens, batch.weights, np.float32(recipe.rate_at(step)), recipe=recipe, stage=stage
            )
            loss, accuracy, norm = (float(value) for value in metrics)
            seconds = time.perf_counter() - started
            step += 1
            line = {
                "step": step,
                "loss": loss,
                "answers": accuracy,
                "norm": norm,
                "length": stage.length,
                "tokens": stage.batch * stage.length,
                "seconds": round(seconds, 4),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            if step % 10 == 0:
                print(
                    f"{time.monotonic() - began:7.0f} s  step {step}  T {stage.length}  loss {loss:.3f}  answers {accuracy:.3f}  "
                    f"norm {norm:.2f}  {stage.batch * stage.length / seconds:.0f} tok/s",
                    flush=True,
                )
            if time.monotonic() - saved > save_every_s or step == last or stop:
                save_checkpoint(folder, state, step, recipe)
                saved = time.monotonic()
    return state
