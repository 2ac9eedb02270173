"""The demo model's recipe is what ships, and its first weights look back."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lab.training.data import passkey_task
from lab.training.look_back import LOOKING_BACK
from lab.training.recipes import COPYING, DEMO, DEMO_CONFIG, TINY
from tessera.attention.contract import Positions
from tessera.core.files import DEMO_MODEL
from tessera.models import decoder
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
from tessera.models.weights import num_parameters
from tessera.sparse.baselines import Dense
from tessera.train import loop as train
from tessera.train import losses
from tessera.train.recipes import Stage
from tessera.train.state import init_state

start = jax.jit(init_state, static_argnums=0)
"""Compiled as one program; run eagerly, each weight's shape would compile several."""


def test_look_back_starts_with_heads_that_favour_the_previous_tokens():
    config = DEMO_CONFIG
    params = start(replace(DEMO, stages=TINY.stages)).params
    tokens = np.random.default_rng(0).integers(0, 256, (1, 200)).astype(np.int32)

    @jax.jit
    def first_layer(params):
        seen = []

        class Spy(Dense):
            layers_alike = False  # a trace that layers share must not leak q

            def attend(self, layer, q, kv, spec, positions, state):
                seen.append((q, kv.k))
                return q, state

        one = replace(params, layers=(jax.tree.map(lambda leaf: leaf[0], params.layers),))
        full = jnp.full(1, 200, jnp.int32)
        decoder.forward(one, tokens, None, Positions(full * 0, full, full), config=config, policy=Spy())
        return seen[0]

    q, k = (np.asarray(x, np.float64) for x in first_layer(params))
    for head, distance in ((0, 1), (1, 2)):
        scores = q[0, :, head] @ k[0, 0].T
        by_distance = [np.mean(np.diagonal(scores, -back)) for back in range(12)]
        assert int(np.argmax(by_distance)) == distance


@pytest.mark.exhaustive  # fine-tuning shows learning; other tests check the look-back heads and this data
def test_loss_falls_on_copying(tmp_path):
    stage = Stage(length=24, batch=32, steps=60, mixture=COPYING, rate=5e-3)
    recipe = replace(TINY, stages=(stage,), data=LOOKING_BACK)
    train.train(recipe, tmp_path, console=Console(quiet=True))
    values = [line["loss"] for line in losses.read_losses(tmp_path / "loss.jsonl")]
    assert np.mean(values[-5:]) < np.mean(values[:5]) - 0.4


def test_demo_recipe_is_what_ships():
    config = DEMO.config
    assert config.num_layers >= 8
    assert config.groups > 1
    assert config.head_dim == 64
    assert max(stage.length for stage in DEMO.stages) == config.max_positions == 4096
    assert num_parameters(config) * 4 < 16 << 20
    assert sum(DEMO.flops(i, i + 100) for i in range(0, DEMO.steps, 100)) == pytest.approx(DEMO.flops(0, DEMO.steps))


def test_shipped_weights_are_the_recipes_and_find_pass_keys():
    folder = DEMO_MODEL
    config = open_source(folder).config
    assert replace(config, eos_ids=(), bos_id=None) == replace(DEMO.config, eos_ids=(), bos_id=None)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 16 << 20
    params = load_params(open_source(folder), dtype=jnp.float32, stacked=True)
    tasks = [passkey_task(np.random.default_rng(i), 1024, chat=bool(i % 2)) for i in range(8)]
    tokens = np.stack([np.concatenate([task.prompt, task.answer]) for task in tasks])
    full = jnp.full(8, 1024, jnp.int32)

    def guess(params):
        hidden, _, _ = decoder.forward(
            params, tokens, None, Positions(full * 0, full, full), config=config, policy=Dense()
        )
        return decoder.logits(params, hidden[:, -6:-1]).argmax(-1)

    right = np.all(np.asarray(jax.jit(guess)(params)) == tokens[:, -5:], axis=1)
    assert right.sum() >= 7


def test_the_tiny_recipe_trains_on_the_library(tmp_path):
    recipe = replace(TINY, stages=tuple(replace(stage, steps=2) for stage in TINY.stages))
    train.train(recipe, tmp_path, console=Console(quiet=True))
    assert [line["step"] for line in losses.read_losses(tmp_path / "loss.jsonl")] == [1, 2, 3, 4]
