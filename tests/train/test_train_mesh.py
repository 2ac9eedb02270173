"""Training on a mesh equals training on one device, holds nothing whole on any, and survives kills in every process."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import train_subjects
from addresses import free_address
from emitters import fast_child
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from tiny import CONFIG, save_tiny
from train_recipes import COPYING, TINY

import tessera
from tessera.cli import main as cli
from tessera.core import memory
from tessera.models.files.source import open_source
from tessera.models.weights import num_parameters
from tessera.train import loop
from tessera.train.checkpoints import checkpoints, remove, remove_incomplete
from tessera.train.losses import read_losses
from tessera.train.mesh import MeshShape, build, check, parse
from tessera.train.recipes import Stage, text_recipe


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    tests = Path(train_subjects.__file__)
    environment = fast_child(8) | {
        "PYTHONPATH": os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", str(tests), str(tmp_path_factory.mktemp("mesh"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout.split(), done.stderr[-4000:]


@pytest.mark.parametrize("name", train_subjects.CHECKS)
def test_on_eight_devices(passed, name):
    names, errors = passed
    assert name in names, errors


@contextmanager
def two_processes(folder: Path, *flags: object):
    """Start two processes, with two devices each, that train the model in `folder` on the text in it; end them."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # they compile for seconds and run for one
    files = ("--base", folder / "model", "--text", folder / "text.txt", "--out", folder / "out")
    shape = (
        "--length",
        16,
        "--batch",
        8,
        "--accumulate",
        2,
        "--mesh",
        "data=2,shard=2",
        "--steps",
        4000,
        "--rate",
        0.02,
    )
    command = [sys.executable, "-m", "tessera", "train", *files, *shape, "--coordinator", free_address(), *flags]
    commands = ([str(word) for word in (*command, "--processes", 2, "--process", index)] for index in (0, 1))
    running = [subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) for words in commands]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def ended(processes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Wait for both processes; return their exit codes and what they said."""
    said = [process.communicate(timeout=400)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.fixture
def begun(tmp_path):
    """Save a model and a text; return the folder and a function that trains them here, on one device."""
    config = replace(CONFIG, num_layers=1, max_positions=128)
    save_tiny(tmp_path / "model", config, plan=False)
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text to train on, {i * i}\n" for i in range(400)))
    recipe = text_recipe(
        tmp_path / "text.txt",
        config=open_source(tmp_path / "model").config,
        base=tmp_path / "model",
        length=16,
        batch=8,
        steps=4000,
        rate=0.02,
    )

    def train(out: str, until: int) -> list[float]:
        loop.train(recipe, tmp_path / out, until=until, console=Console(file=io.StringIO()))
        return [line["loss"] for line in read_losses(tmp_path / out / "loss.jsonl")]

    return tmp_path, train


def test_two_processes_stop_together_and_one_device_goes_on(begun):
    """Ctrl-C reaches one process only: both stop at one step and write their parts, from which one device resumes."""
    folder, train = begun
    deadline = time.monotonic() + 400
    with two_processes(folder) as running:
        while len(read_losses(folder / "out" / "loss.jsonl")) < 2:
            assert all(process.poll() is None for process in running), ended(running)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running[1].send_signal(signal.SIGINT)
        status, said = ended(running)
    assert status == [130, 130], said
    assert "the same command resumes there" in said[0]
    assert said[1] in ("", "process 1 ends, because process 0 was interrupted\n")
    [found] = checkpoints(folder / "out")
    names = [f"checkpoint-{found.step:08d}-{index:05d}-of-00002.safetensors" for index in (0, 1)]
    assert [path.name for path in found.files] == names
    assert all(path.stat().st_size > 50_000 for path in found.files)
    assert (folder / "out" / "loss.svg").is_file()
    expected = train("alone", found.step + 2)
    np.testing.assert_allclose(train("out", found.step + 2), expected, rtol=1e-4)


@pytest.mark.exhaustive  # the other test runs both processes, too; load_weights is checked on eight devices
def test_two_processes_write_the_model_of_one_device(begun):
    folder, train = begun
    with two_processes(folder, "--until", 3) as running:
        assert ended(running)[0] == [0, 0]
    train("alone", 3)
    one, two = (folder / out / "model" for out in ("alone", "out"))
    assert sorted(os.listdir(one)) == sorted(os.listdir(two))
    whole, parts = ((path / "model.safetensors").read_bytes() for path in (one, two))
    header = 8 + int.from_bytes(whole[:8], "little")
    assert whole[:header] == parts[:header]
    np.testing.assert_allclose(np.frombuffer(parts[header:], "f4"), np.frombuffer(whole[header:], "f4"), atol=1e-4)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data=8", (8, 1)),
        ("shard=8", (1, 8)),
        ("data=2,shard=4", (2, 4)),
        ("shard=4,data=2", (2, 4)),
        ("data=1", (1, 1)),
    ],
)
def test_a_mesh_names_its_axes(text, shape):
    assert parse(text) == MeshShape(*shape)


@pytest.mark.parametrize("text", ["", "8", "4x2", "data", "data=0", "data=8,", "data=2,data=2", "heads=8"])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"must be like data=8 .*, shard=8 .* or data=2,shard=4"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "recipe", "devices", "processes", "words"),
    [
        ("shard=5", TINY, 8, 1, "data=1,shard=5 cannot split hidden_size=32 into 5 equal parts: use shard=4$"),
        ("shard=64", TINY, 64, 1, "cannot split hidden_size=32 into 64 equal parts: use shard=32$"),
        (
            "data=8",
            replace(TINY, stages=(TINY.stages[0], Stage(length=16, batch=10, steps=1, mixture=COPYING))),
            8,
            1,
            "batch=10 of stage 2 equally among 8 devices: take a batch that is a multiple of 8",
        ),
        ("data=4", TINY, 8, 1, "batch=4 of stage 2 in 2 slices equally among 4 devices: .* a multiple of 8, or"),
        ("data=2", TINY, 1, 1, "data=2,shard=1 needs 2 devices, but JAX finds 1"),
        ("data=2", TINY, 4, 2, "leaves out 2 of the 4 devices of 2 processes: use all, or start fewer processes"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(text, recipe, devices, processes, words):
    with pytest.raises(ValueError, match=words):
        check(parse(text), recipe, devices, processes)


def test_the_command_refuses_a_mesh_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "start", pytest.fail)
    for flags, words in (
        (["--mesh", "2"], "error: mesh '2' must be like data=8"),
        (["--mesh", "shard=2"], "error: mesh data=1,shard=2 needs 2 devices, but JAX finds 1"),
        (["--accumulate", "3"], "error: batch=8 must be a multiple of accumulate=3"),
    ):
        assert cli.main(["train", "--text", __file__, "--out", str(tmp_path / "out"), *flags]) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_model_on_a_mesh_of_training_is_not_run(tmp_path):
    """That mesh has no axis by which devices share heads or keys."""
    model = tessera.load(save_tiny(tmp_path))
    params = jax.device_put(model.params, NamedSharding(build(MeshShape()), PartitionSpec()))
    with pytest.raises(ValueError, match="a mesh with the axes data, shard has no axis .* save the trained weights"):
        replace(model, params=params).generate([[1, 2]], max_new_tokens=1)


def test_a_state_that_does_not_fit_is_refused(monkeypatch):
    needed = 16 * num_parameters(TINY.config)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryError, match=r"training 27,040 parameters .* needs .* free on cpu: share them among more"):
        loop.check_room(TINY, build(MeshShape()))
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    loop.check_room(TINY, build(MeshShape()))


def test_a_checkpoint_counts_when_all_its_files_are_there(tmp_path):
    names = ["00000010", "00000020-00000-of-00002", "00000020-00001-of-00002", "00000030-00001-of-00002", "100000000"]
    for name in names:
        (tmp_path / f"checkpoint-{name}.safetensors").touch()
    (tmp_path / "checkpoint-mine.safetensors").touch()
    assert [(found.step, len(found.files)) for found in checkpoints(tmp_path)] == [(10, 1), (20, 2), (100_000_000, 1)]
    remove(tmp_path, but=checkpoints(tmp_path)[1:2])
    assert not (tmp_path / "checkpoint-00000010.safetensors").exists()
    remove_incomplete(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    kept = [f"checkpoint-{name}.safetensors" for name in ("00000020-00000-of-00002", "00000020-00001-of-00002")]
    assert left == [*kept, "checkpoint-100000000.safetensors", "checkpoint-mine.safetensors"]


def test_slices_and_recomputation_do_not_make_another_recipe():
    stage = Stage(length=16, batch=8, steps=4, mixture=COPYING)
    one = replace(TINY, stages=(stage,))
    other = replace(TINY, stages=(replace(stage, accumulate=4, remat=True),))
    assert one.fingerprint(3) == other.fingerprint(3)
