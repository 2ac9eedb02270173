"""Recipes: everything that determines the trained weights, as constants."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tessera.models.config import ModelConfig, Rope
from tessera.models.weights import num_parameters
from tessera.train.data import OWN_TEXT, Data

DTYPES = ("float32", "bfloat16")
BOS, EOS, PAD, USER, ASSISTANT, END = range(256, 262)
"""Special tokens of the tokenizer of bytes."""
VOCAB_SIZE = 264


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Training steps with batches of one shape.

    Attributes:
        length: number of tokens to predict per sequence.
        steps: number of updates.
        mixture: kinds of example (`Data.kinds`) and their shares.
        last_rate: learning rate at the last step, which the rate approaches linearly; None keeps the rate constant.
        accumulate: number of slices into which a batch is cut; they run one after another to bound memory.
        remat: whether the backward pass recomputes each layer's activations instead of storing them.
    """

    length: int
    batch: int
    steps: int
    mixture: tuple[tuple[str, float], ...]
    rate: float = 2e-3
    last_rate: float | None = None
    accumulate: int = 1
    remat: bool = False

    def __post_init__(self):
        for name in ("length", "batch", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate={self.rate} must be a positive number")
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}")
        if min((share for _, share in self.mixture), default=0) <= 0:
            raise ValueError(f"mixture={self.mixture} must have positive shares")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data and its optimizer.

    Attributes:
        name: name for display; it does not affect the training.
        seed: seed of the weights and of every batch.
        warmup: steps over which the learning rate rises from zero.
        clip: maximum global norm of the gradient.
        weight_decay: decoupled weight decay, which applies to matrices only.
        b1, b2: Adam's decay rates.
        compute_dtype: dtype of activations and of the weights' working copy; master weights and moments are float32.
        text: folder or file to train on; None if `data` has text of its own.
        base: Hugging Face folder to start from; None means fresh weights.
    """

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
    data: Data = OWN_TEXT
    text: str | None = None
    base: str | None = None

    def __post_init__(self):
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={self.compute_dtype!r} must be one of {DTYPES}")
        if not self.stages:
            raise ValueError(f"recipe {self.name!r} needs at least one stage")
        longest = max(stage.length for stage in self.stages)
        if longest > self.config.max_positions:
            raise ValueError(f"length={longest} must be at most max_positions={self.config.max_positions}")
        kinds, known = {kind for stage in self.stages for kind, _ in stage.mixture}, self.data.kinds
        if unknown := kinds - known.keys():
            raise ValueError(f"mixture kinds {sorted(unknown)} must be out of {tuple(known)}")
        if kinds - {"text"} and self.config.vocab_size != self.data.vocab_size:
            raise ValueError(
                f"mixture kinds {sorted(kinds - {'text'})} need vocab_size={self.data.vocab_size}, "
                f"not {self.config.vocab_size}: train this model on 'text' alone"
            )

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[Stage, int]:
        """Return the stage of a step and the step's index within it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise ValueError(f"{step=} is past the recipe's {self.steps} steps")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear within a stage, times a warm-up factor in the first steps."""
        stage, within = self.stage_at(step)
        last = stage.rate if stage.last_rate is None else stage.last_rate
        rate = stage.rate + (last - stage.rate) * within / max(stage.steps - 1, 1)
        return rate * min(1.0, (step + 1) / self.warmup)

    def flops(self, first: int, last: int) -> float:
        """Count the model FLOPs of the steps `first` to `last` - 1."""
        total, begin = 0.0, 0
        for stage in self.stages:
            steps = max(min(last, begin + stage.steps) - max(first, begin), 0)
            total += steps * stage.batch * stage.length * train_flops_per_token(self.config, stage.length)
            begin += stage.steps
        return total

    def fingerprint(self, step: int) -> str:
        """Return a hash of everything that shaped the weights up to `step`. Left out: later stages, and a stage's
        `accumulate` and `remat`, which change only rounding, so that a run may resume with other values."""
        past = {key: value for key, value in asdict(self).items() if key not in ("stages", "name")}
        past["data"] = self.data.name
        past = {key: value for key, value in past.items() if value is not None}
        past["stages"], left = [], step
        for stage in self.stages:
            if left <= 0:
                break
            cut = asdict(replace(stage, steps=min(left, stage.steps), accumulate=1, remat=False))
            if left < stage.steps and stage.last_rate not in (None, stage.rate):
                cut["decays_over"] = stage.steps
            past["stages"].append(cut)
            left -= stage.steps
        return hashlib.sha256(json.dumps(past, sort_keys=True).encode()).hexdigest()[:16]


SMALL_CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE,
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
    bos_id=BOS,
    eos_ids=(EOS, END),
)
"""Configuration of a model of 1.9 million parameters that reads bytes."""


def text_recipe(
    text: str | Path,
    *,
    config: ModelConfig = SMALL_CONFIG,
    base: str | Path | None = None,
    length: int = 512,
    batch: int = 8,
    steps: int = 1000,
    rate: float = 1e-3,
    compute_dtype: str = "float32",
) -> Recipe:
    """Build a recipe for next-token training on the user's text, from fresh weights or a Hugging Face folder (`base`),
    whose config `config` must then be. The learning rate falls linearly to a tenth of `rate`."""
    stage = Stage(length=length, batch=batch, steps=steps, mixture=(("text", 1.0),), rate=rate, last_rate=rate / 10)
    return Recipe(
        name="text",
        config=config,
        stages=(stage,),
        warmup=min(50, steps),
        compute_dtype=compute_dtype,
        text=str(Path(text).resolve()),
        base=None if base is None else str(Path(base).resolve()),
    )


def train_flops_per_token(config: ModelConfig, length: int) -> float:
    """Count forward and backward FLOPs per token of causal sequences: 6 P + 6 L S N H, with P parameters, L layers,
    sequence length S, N heads and head dim H. Causal attention computes half of the S x S scores."""
    attention = 6 * config.num_layers * length * config.num_heads * config.head_dim
    return 6.0 * num_parameters(config) + attention
