"""Training: the step against plain code, resume bit for bit after a kill, refusals, the log, the picture."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_recipes
from emitters import fast_flags
from rich.console import Console
from train_recipes import COPIES, COPYING, TINY

from tessera.attention.contract import Positions
from tessera.models import decoder
from tessera.models.files.checkpoint import load_params
from tessera.models.files.source import open_source
from tessera.runtime.compilation import enable_cache
from tessera.sparse.baselines import Dense
from tessera.train import loop as train
from tessera.train import losses
from tessera.train.mesh import MeshShape, build
from tessera.train.recipes import VOCAB_SIZE, Recipe, Stage, text_recipe
from tessera.train.state import init_state

QUIET = Console(file=io.StringIO())
SHORT = replace(TINY, stages=(Stage(length=16, batch=4, steps=4, mixture=COPYING),), weight_decay=0.1, clip=0.5)
BATCH = COPIES.batch(COPIES.read(None, None), dict(COPYING), 16, 4, 0, 0)
start = jax.jit(init_state, static_argnums=0)
"""Compiled as one program; run eagerly, each weight's shape would compile several."""


def step(recipe: Recipe, stage: Stage):
    """Run the first step at a rate of 1e-3; return the new state and the metrics."""
    rate = np.float32(1e-3)
    return train.train_step(start(recipe), BATCH.tokens, BATCH.weights, rate, recipe=recipe, stage=stage)


def without_clock(folder) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in losses.read_losses(folder / "loss.jsonl")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Run the tiny recipe without interruption. Its cached programs save the killed processes their compilation."""
    enable_cache()
    folder = tmp_path_factory.mktemp("whole")
    return folder, train.train(TINY, folder, console=QUIET)


def plain_loss(params, tokens, weights, config):
    """Compute the weighted cross-entropy with the dispatcher's attention and optax's cross-entropy."""
    full = jnp.full(tokens.shape[0], tokens.shape[1] - 1, jnp.int32)
    hidden, _, _ = decoder.forward(
        params, tokens[:, :-1], None, Positions(full * 0, full, full), config=config, policy=Dense()
    )
    entropy = optax.softmax_cross_entropy_with_integer_labels(decoder.logits(params, hidden), tokens[:, 1:])
    return jnp.sum(entropy * weights) / jnp.sum(weights)


@pytest.fixture(scope="module")
def plain_step():
    """Compute loss, gradient norm and updated parameters of SHORT's first step in plain code and optax's AdamW."""

    def decayed(params):
        norms = {"attn_norm": False, "mlp_norm": False}
        layers = replace(jax.tree.map(lambda _: True, params.layers), **norms)
        return replace(jax.tree.map(lambda _: True, params), layers=layers, final_norm=False)

    @jax.jit
    def update(before):
        loss, grads = jax.value_and_grad(plain_loss)(before, BATCH.tokens, BATCH.weights, SHORT.config)
        adamw = optax.adamw(1e-3, b1=SHORT.b1, b2=SHORT.b2, weight_decay=SHORT.weight_decay, mask=decayed)
        plain = optax.chain(optax.clip_by_global_norm(SHORT.clip), adamw)
        updates, _ = plain.update(grads, plain.init(before), before)
        return loss, optax.tree.norm(grads), optax.apply_updates(before, updates)

    return update(start(SHORT).params)


@pytest.mark.parametrize(
    "change", [{}, {"accumulate": 2, "remat": True}, pytest.param({"accumulate": 4}, marks=pytest.mark.exhaustive)]
)
def test_step_equals_plain_gradient_and_optax_adamw(plain_step, change):
    loss, norm, expected = plain_step
    before = start(SHORT).params
    state, metrics = step(SHORT, replace(SHORT.stages[0], **change))
    assert metrics[0] == pytest.approx(float(loss), rel=1e-5)
    assert metrics[2] == pytest.approx(float(norm), rel=1e-4)
    moved = [np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(jax.tree.leaves(state.params), _leaves(before))]
    assert all(change.max() > 0 for change in moved)
    for name, got, want in zip(_names(before), jax.tree.leaves(state.params), jax.tree.leaves(expected)):
        # Adam's first update is the gradient's sign, which is random where the gradient is rounding noise.
        far = np.abs(np.asarray(got) - np.asarray(want)) > 1e-5
        assert far.mean() < 2e-3, name


def _leaves(tree):
    return jax.tree.leaves(tree)


def _names(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(plain_step):
    recipe = replace(SHORT, compute_dtype="bfloat16")
    state, metrics = step(recipe, recipe.stages[0])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    loss = float(plain_step[0])
    assert metrics[0] == pytest.approx(loss, rel=0.02)
    assert float(metrics[0]) != pytest.approx(loss, rel=1e-5)
    traced = jax.make_jaxpr(
        lambda p: train.loss_sums(
            p, BATCH.tokens, BATCH.weights, config=recipe.config, remat=False, dtype=recipe.compute_dtype
        )
    )
    assert "bf16" in str(traced(state.params))


def test_plain_text_counts_every_token_as_asked():
    """All its weights are below the weight of an answer."""
    weights = np.full_like(BATCH.weights, 0.3)
    options = dict(config=SHORT.config, remat=False, dtype="float32")
    assert train.loss_sums(start(SHORT).params, BATCH.tokens, weights, **options).asked == weights.size
    assert train.loss_sums(start(SHORT).params, BATCH.tokens, 0 * weights, **options).asked == 0


def test_state_is_donated():
    state = start(SHORT)
    lowered = train.train_step.lower(
        state, BATCH.tokens, BATCH.weights, np.float32(0), recipe=SHORT, stage=SHORT.stages[0]
    )
    alias = lowered.compile().memory_analysis().alias_size_in_bytes
    assert alias >= sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))


def test_run_leaves_log_picture_checkpoints_and_a_model_that_loads(whole_run):
    folder, result = whole_run
    lines = losses.read_losses(folder / "loss.jsonl")
    assert [line["step"] for line in lines] == list(range(1, TINY.steps + 1))
    assert all(np.isfinite(line["loss"]) and line["tokens"] > 0 for line in lines)
    assert len(train.checkpoints(folder)) == 1
    assert (folder / "loss.svg").read_text().lstrip().startswith("<?xml")
    assert not list(folder.glob("*tmp*")) + list(folder.glob(".*tmp*"))
    config = open_source(result.model).config
    assert replace(config, eos_ids=(), bos_id=None) == replace(TINY.config, eos_ids=(), bos_id=None)
    loaded = load_params(open_source(result.model), dtype=jnp.float32, stacked=True)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(result.params)):
        np.testing.assert_array_equal(got, want)
    assert open_source(result.model).tokenizer.vocab_size == VOCAB_SIZE


def test_killed_anywhere_it_resumes_to_the_same_losses_bit_for_bit(whole_run, tmp_path):
    """The run is killed by SIGKILL after 3 steps, then stopped by Ctrl-C, which saves first, then finished.

    Takes 15 s for two processes that import, trace and train.
    """
    folder, uninterrupted = whole_run
    with training(tmp_path, save_every_s=0.0) as process:
        wait_for_steps(tmp_path / "loss.jsonl", 3, process)
        process.send_signal(signal.SIGKILL)
    with training(tmp_path, save_every_s=1e9) as process:
        wait_for_steps(tmp_path / "loss.jsonl", 14, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "the same command resumes there" in errors
    done = len(losses.read_losses(tmp_path / "loss.jsonl"))
    assert train.checkpoints(tmp_path)[-1].files[0].name == f"checkpoint-{done:08d}.safetensors"
    assert without_clock(tmp_path) == without_clock(folder)[:done]
    with open(tmp_path / "loss.jsonl", "a") as file:
        file.write('{"step": 99, "lo')  # a line that a kill cut short
    result = train.train(TINY, tmp_path, console=QUIET)
    assert without_clock(tmp_path) == without_clock(folder)
    for got, want in zip(jax.tree.leaves(result.params), jax.tree.leaves(uninterrupted.params)):
        np.testing.assert_array_equal(got, want)


@contextmanager
def training(folder: Path, *, save_every_s: float):
    """Start a process that trains the tiny recipe into the folder; end it on leaving the context."""
    flag = "jax_disable_most_optimizations"  # other optimizations or emitters would round otherwise
    env = os.environ | ({"XLA_FLAGS": fast_flags()} if jax.config.values[flag] else {})
    env["PYTHONPATH"] = os.pathsep.join([str(Path(train_recipes.__file__).parent), env.get("PYTHONPATH", "")])
    code = f"import jax\njax.config.update({flag!r}, {jax.config.values[flag]})\n"
    code += "from tessera.runtime.compilation import enable_cache\nfrom tessera.train import loop\n"
    code += "from train_recipes import TINY\n"
    code += f"enable_cache()\nloop.train(TINY, {str(folder)!r}, save_every_s={save_every_s})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_steps(path, steps: int, process) -> None:
    deadline = time.monotonic() + 240
    while len(losses.read_losses(path)) < steps:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_folder_of_another_recipe_is_refused_and_left_alone(whole_run):
    folder, _ = whole_run
    before = sorted(path.name for path in folder.iterdir())
    log = (folder / "loss.jsonl").read_text()
    for other in (replace(TINY, seed=1), replace(TINY, clip=2.0), replace(TINY, stages=TINY.stages[::-1])):
        with pytest.raises(ValueError, match="belongs to another recipe"):
            train.train(other, folder, console=QUIET)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "loss.jsonl").read_text() == log


def test_later_stages_may_change_earlier_ones_not():
    first, second = TINY.stages
    longer = replace(TINY, stages=(first, replace(second, steps=50), second))
    assert longer.fingerprint(12) == TINY.fingerprint(12)
    assert longer.fingerprint(15) != TINY.fingerprint(15)  # its rate falls more slowly
    assert replace(TINY, stages=(replace(first, batch=9), second)).fingerprint(5) != TINY.fingerprint(5)
    constant = replace(TINY, stages=(first,))
    assert replace(constant, stages=(replace(first, steps=99),)).fingerprint(9) == constant.fingerprint(9)


def test_damaged_checkpoint_and_lost_log(whole_run, tmp_path):
    [path] = train.checkpoints(whole_run[0])[-1].files
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="is damaged.*delete it"):
        train.train(TINY, tmp_path, console=QUIET)
    cut.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="ends at step 0, but the checkpoint is at step 20"):
        train.train(TINY, tmp_path, console=QUIET)


def test_loss_that_is_not_finite_stops(whole_run, tmp_path):
    log = (whole_run[0] / "loss.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "loss.jsonl").write_text("".join(log[:13]))
    state = train.load_checkpoint(train.checkpoints(whole_run[0])[-1], TINY, build(MeshShape()))
    params = replace(state.params, final_norm=state.params.final_norm * 3e38)  # finite, but the logits are not
    train.save_checkpoint(tmp_path, state._replace(params=params), 13, TINY)
    with pytest.raises(ValueError, match="not finite.*lower the rate"):
        train.train(TINY, tmp_path, console=QUIET)


def test_fine_tuning_a_folder_on_own_text(whole_run, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 100)
    base = whole_run[1].model
    recipe = text_recipe(
        tmp_path / "text", config=open_source(base).config, base=base, length=32, batch=4, steps=30, rate=5e-3
    )
    result = train.train(recipe, tmp_path / "out", console=QUIET)
    values = [line["loss"] for line in without_clock(tmp_path / "out")]
    assert values[-1] < 0.6 * values[0]
    assert (result.model / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match="belongs to another recipe"):
        train.train(replace(recipe, base=None), tmp_path / "out", console=QUIET)


@pytest.mark.parametrize(("body", "message"), [(None, "does not exist"), ("", "no text"), ("short", "add text")])
def test_text_missing_empty_or_too_short(tmp_path, body, message):
    folder = tmp_path / "text"
    if body is not None:
        folder.mkdir()
        (folder / "a.txt").write_text(body)
    recipe = text_recipe(folder, config=TINY.config, length=64)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.train(recipe, tmp_path / "out", console=QUIET)
    assert not (tmp_path / "out").exists()


def test_recipes_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="batch=3 must be a multiple of accumulate=2"):
        Stage(length=8, batch=3, steps=1, mixture=COPYING, accumulate=2)
    with pytest.raises(ValueError, match=r"mixture=\(\) must have positive shares"):
        Stage(length=8, batch=3, steps=1, mixture=())
    with pytest.raises(ValueError, match=r"mixture kinds \['poems'\] must be out of \('copy', 'text'\)"):
        replace(TINY, stages=(Stage(length=8, batch=3, steps=1, mixture=(("poems", 1.0),)),))
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        Stage(length=8, batch=3, steps=0, mixture=COPYING)
    with pytest.raises(ValueError, match="length=256 must be at most max_positions=128"):
        replace(TINY, stages=(Stage(length=256, batch=1, steps=1, mixture=COPYING),))
    with pytest.raises(ValueError, match=r"mixture kinds \['copy'\] need vocab_size=264, not 1000"):
        replace(TINY, config=replace(TINY.config, vocab_size=1000))
    with pytest.raises(ValueError, match="compute_dtype='float16'"):
        replace(TINY, compute_dtype="float16")


def test_progress_line_and_picture(tmp_path):
    stream = io.StringIO()
    line = {"step": 1, "loss": 1.25, "answers": 0.5, "norm": 1.0, "length": 24, "tokens": 1000, "seconds": 0.5}
    with losses.Line(Console(file=stream, width=200), 10, peak_flops=1e9) as progress:
        progress.show(line, flops=1e8, flops_left=9e8)
    assert "loss 1.250  answers 0.500  2,000 tokens/s  MFU 20%  0:00:04 left" in stream.getvalue()
    log = [line | {"step": i + 1, "length": 24 if i < 5 else 48} for i in range(12)]
    losses.draw_losses(log, tmp_path / "loss.png", "two stages")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_log_is_cut_to_its_checkpoint(tmp_path):
    path = tmp_path / "loss.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(1, 6)) + '{"step"')
    assert len(losses.read_losses(path)) == 5
    with losses.open_log(path, 3) as log:
        log.write(json.dumps({"step": 4, "loss": 2.0}) + "\n")
    assert [line["loss"] for line in losses.read_losses(path)] == [1.0, 1.0, 1.0, 2.0]
    assert os.listdir(tmp_path) == ["loss.jsonl"]
