"""A random model, small enough to compile in a second, saved as a folder with a byte tokenizer and a plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tessera.generate import Model, load
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint, save_folder
from tessera.models.layers import Params
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.models.weights import init_params
from tessera.sparse.plan import Plan


def config(**changes: Any) -> ModelConfig:
    """Return the config of a tiny llama with these changes."""
    sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_layers=3, max_positions=512)
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=16)
    return ModelConfig(**sizes | heads | changes)


CONFIG = config(tie_embeddings=True, eos_ids=(257,), bos_id=256)
PLAN = Plan(
    model="",
    num_layers=3,
    num_kv_heads=2,
    anchors=(0,),
    head_map=((0, 1), (1, 0), (1, 1)),
    tile=16,
    query_tile=16,
    fraction=0.2,
    minimum=16,
    crossover_tokens=100,
)

PROMISE = {
    "max_kl": 0.02,
    "judged_tokens": [400, 512],
    "fresh": True,
    "held": True,
    "measured": {
        "text_kl": 0.0124, "text_loss": 1.714, "text_loss_dense": 1.704, "text_kept": 0.9897, "probes_kl": 0.01851,
        "probes_kept": 0.9832, "asked": 9, "found_dense": 8, "found": 7, "density": 0.2175, "tokens": 1476,
    },
}  # fmt: skip
"""Target and measured figures of a plan, in the form that calibration writes."""


def promising(folder: Path) -> Path:
    """Add PROMISE to the plan in a model's folder; return the plan's path."""
    path = folder / "plan.json"
    replace(Plan.load(path), promise=PROMISE).save(path)
    return path


def random_params(config: ModelConfig, seed: int = 1) -> Params:
    """Draw weights with init_params' scales in NumPy, because compiling its generators takes longer than the tests."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if "norm" in jax.tree_util.keystr(path):
            return np.ones(like.shape, like.dtype)
        return (rng.normal(size=like.shape) * like.shape[-1] ** -0.5).astype(like.dtype)

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(fill, shapes)


def load_stacked(folder: Path, **options) -> Model:
    """Load a model with stacked layers, which run under scan, so that a program compiles one layer for all."""
    model = load(folder, **options)
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *model.params.layers)
    return replace(model, params=replace(model.params, layers=layers))


def save_tiny(folder: Path, config: ModelConfig = CONFIG, *, tokenizer: bool = True, plan: bool = True) -> Path:
    """Write the model and, by default, its tokenizer and a plan for its weights; a plan has at most three layers."""
    params = random_params(config)
    save_folder(folder, params, config, byte_tokenizer() if tokenizer else None)
    if plan:
        count = config.num_layers
        ours = replace(PLAN, num_layers=count, head_map=PLAN.head_map[:count], model=fingerprint(params, config))
        ours.save(folder / "plan.json")
    return folder


@contextmanager
def optimized() -> Iterator[None]:
    """Compile as users do, for a model that runs much longer than it compiles; see conftest.py."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
