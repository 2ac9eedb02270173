"""`tessera verify` passes right kernels, and names the faults of planted wrong ones."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tessera.attention.contract import Selection
from tessera.attention.dispatch import KERNELS
from tessera.attention.workloads import WORKLOADS
from tessera.measure import evidence, trials, verify

NAMED = {w.name: w for w in WORKLOADS}
SPARSE = next(k for k in KERNELS if k.name == "xla_prefill_sparse")
SCORE = next(k for k in KERNELS if k.name == "xla_prefill_score")


def outcome(kernel, launch=None, numbers="normal", workload="ragged") -> verify.Outcome:
    planted = kernel if launch is None else dataclasses.replace(kernel, launch=launch)
    return verify.attempt(verify.Trial(planted, NAMED[workload], "float32", numbers, 0))


def without_last_tile(q, kv, spec, positions, selection, config):
    cut = Selection(selection.tiles, jnp.maximum(selection.count - 1, 0))
    return SPARSE.launch(q, kv, spec, positions, cut, config)


def with_all_tiles(q, kv, spec, positions, selection, config):
    num_tiles = -(-kv.k.shape[2] // spec.tile)
    tiles = jnp.broadcast_to(jnp.arange(num_tiles, dtype=jnp.int32), (*selection.count.shape, num_tiles))
    return SPARSE.launch(q, kv, spec, positions, Selection(tiles, jnp.full_like(selection.count, num_tiles)), config)


def without_window(q, kv, spec, positions, selection, config):
    return SCORE.launch(q, kv, dataclasses.replace(spec, window=None), positions, selection, config)


def with_mass_of_wrong_rows(q, kv, spec, positions, selection, config):
    result = SCORE.launch(q, kv, spec, positions, selection, config)
    return result._replace(mass=jnp.roll(result.mass, 1, axis=2))


def with_a_nan(q, kv, spec, positions, selection, config):
    result = SCORE.launch(q, kv, spec, positions, selection, config)
    return result._replace(out=result.out.at[0, 3, 0, 0].set(jnp.nan))


def that_fails(q, kv, spec, positions, selection, config):
    raise NotImplementedError("no such layout")


def that_says_nothing(*call):
    raise RuntimeError


@pytest.mark.parametrize("numbers", verify.NUMBERS)
@pytest.mark.parametrize("kernel", [SPARSE, SCORE], ids=lambda k: k.name)
def test_a_right_kernel_passes(kernel, numbers):
    found = outcome(kernel, numbers=numbers)
    assert found.passed, verify.reason(found)
    assert numbers == "no_key" or found.errors.size > 1000


@pytest.mark.parametrize(
    ("kernel", "launch", "workload", "said"),
    [
        (SPARSE, without_last_tile, "ragged", "past the tolerance"),
        (SPARSE, with_all_tiles, "ragged", "past the tolerance"),  # dense work in place of sparse
        (SCORE, without_window, "window_softcap", "past the tolerance"),
        (SCORE, with_mass_of_wrong_rows, "ragged", "past the tolerance"),
        (SCORE, with_a_nan, "ragged", "NaN"),
        (SCORE, that_fails, "ragged", "NotImplementedError: no such layout"),
        (SCORE, that_says_nothing, "ragged", "RuntimeError"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_planted_fault_is_caught_and_named(kernel, launch, workload, said):
    found = outcome(kernel, launch, workload=workload)
    assert not found.passed
    assert said in verify.reason(found)


def spread(kernel) -> list[verify.Trial]:
    """Choose trials of default blocks that vary the head count with the head dim.

    Portable kernels have the same blocks at every head dim, and single keys are simulated slowly, copy by copy, so both
    run one trial with head dim 128. test_gpu_prefill.py and test_gpu_decode.py fill pipelines at head dim 64.
    """
    found = list(verify.config_trials(kernel, every=False, seed=0))
    if kernel.platform == "any" or kernel.name == "gpu_keys_sparse":
        return [trial for trial in found if trial.workload.head_dim == 128][:1]
    if len(found) > len(verify.HEAD_DIMS):
        return found[:: len(verify.GROUPS) + 1]
    return [trial for trial in found if trial.workload.head_dim > 64]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize("kernel", [k for k in trials.kernels() if k.platform != "tpu"], ids=lambda k: k.name)
def test_production_blocks_meet_the_oracle(kernel, every):
    """Check the default of every head dim on more keys than its pipeline holds; `--configs all` checks every config.

    test_tpu_prefill.py and test_tpu_decode.py check the blocks that TPUs ship with.
    """
    chosen = verify.config_trials(kernel, every=False, seed=0) if every else spread(kernel)
    found = [verify.attempt(trial) for trial in chosen]
    assert {o.trial.workload.head_dim for o in found} >= ({64, 128} if every else {128})
    assert not [f"{o.trial.words()}: {verify.reason(o)}" for o in found if not o.passed]


def test_every_configuration_of_the_space_is_tried_and_a_broken_one_is_named():
    """The planted kernel drops a tile for one config only."""
    every = verify.config_trials(SPARSE, every=True, seed=0)
    large = [t for t in every if (t.workload.head_dim, t.workload.num_heads) == (64, verify.GROUPS[0])]
    spec, shapes = large[0].workload.role_spec("sparse"), large[0].workload.shapes("sparse", large[0].dtype)
    assert [t.config for t in large] == list(SPARSE.search_space(spec, shapes))

    def launch(*call):
        return (without_last_tile if call[-1] == large[-1].config else SPARSE.launch)(*call)

    planted = dataclasses.replace(SPARSE, launch=launch)
    failed = [o for o in (verify.attempt(t._replace(kernel=planted)) for t in large) if not o.passed]
    assert [o.trial.config for o in failed] == [large[-1].config]
    assert str(large[-1].config) in failed[0].trial.words()


def test_random_shapes_are_legal_and_differ():
    rng = np.random.default_rng(0)
    drawn = [verify.random_workload(rng, phase, n) for n, phase in enumerate(["prefill", "decode"] * 20)]
    assert all((w.num_queries == 1) == ("decode" in w.tags) or w.num_queries > 1 for w in drawn)
    assert len({w.shapes("dense") for w in drawn}) > 35
    assert any(w.spec.window for w in drawn)
    assert any(not w.spec.causal for w in drawn)


def test_a_run_keeps_records_and_says_failure_by_its_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trials, "catalogue", lambda kernel: (NAMED["ragged"],))
    right = dataclasses.replace(SPARSE, dtypes=("float32", "bfloat16"))
    monkeypatch.setattr(trials, "KERNELS", (SCORE, right))
    path = tmp_path / "verify.jsonl"
    assert verify.run(kernel="xla_prefill_sparse", random_shapes=1, seed=3, out=str(path)) == 0
    good = evidence.read(path)
    assert {r.what.dtype for r in good} == set(right.dtypes)
    assert all(r.error is None and r.facts["trials"] == 6 and r.facts["seed"] == 3 for r in good)
    assert all(0 < r.facts["distribution"]["p50"] <= r.facts["distribution"]["max"] <= 1 for r in good)

    broken = dataclasses.replace(right, launch=without_last_tile, dtypes=("float32",))
    monkeypatch.setattr(trials, "KERNELS", (broken,))
    trials.compiled.cache_clear()
    assert verify.run(random_shapes=0, seed=3, out=str(path)) == 1
    bad = evidence.read(path)[len(good) :]
    assert all("xla_prefill_sparse" in r.error and "--seed 3" in r.error for r in bad)
    assert "FAILED" in capsys.readouterr().out
    assert json.loads(path.read_text().splitlines()[-1])["what"]["op"] == "verify"


def test_simulation_does_not_wait_for_threads_on_two_cores(monkeypatch):
    """JAX reads both settings once, when it first queries the device."""
    monkeypatch.delenv("NPROC", raising=False)
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    with pytest.raises(ValueError, match="nosuch"):
        verify.run(kernel="nosuch", simulate=True)
    assert os.environ["NPROC"] == "8"
    assert not jax.config.values["jax_cpu_enable_async_dispatch"]
    monkeypatch.setenv("NPROC", "4")
    with pytest.raises(ValueError, match="nosuch"):
        verify.run(kernel="nosuch", simulate=True)
    assert os.environ["NPROC"] == "4"


def test_a_kernel_or_choice_of_blocks_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="--configs 'large' must be one of small, default, all"):
        verify.run(configs="large")
    with pytest.raises(ValueError, match="'nosuch' must be part of one of"):
        verify.run(kernel="nosuch")
