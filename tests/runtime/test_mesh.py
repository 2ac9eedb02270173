"""A model on a mesh gives the results of one device, holds nothing whole on any, and is loaded by parts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mesh_subjects
import pytest
from emitters import fast_child
from tiny import CONFIG, save_tiny

import tessera
from tessera.cli import main as cli
from tessera.core.mesh import MeshShape, check, parse
from tessera.models.files import checkpoint
from tessera.models.weights import split_sizes

QUICK, ALL = list(mesh_subjects.CHECKS)[:-1], list(mesh_subjects.CHECKS)[-1]


def run(folder: Path, *names: str) -> tuple[list[str], str]:
    tests = Path(mesh_subjects.__file__)
    environment = fast_child(8) | {
        "PYTHONPATH": os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", str(tests), str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout.split(), done.stderr[-4000:]


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("mesh"))


@pytest.mark.parametrize("name", QUICK)
def test_on_eight_devices(passed, name):
    names, errors = passed
    assert name in names, errors


@pytest.mark.exhaustive
def test_every_number_of_heads_and_devices(tmp_path):
    names, errors = run(tmp_path, ALL)
    assert names == [ALL], errors


@pytest.mark.parametrize(
    ("text", "num_kv_heads", "shape"),
    [("8", 8, (8, 1)), (8, 4, (4, 2)), ("8", 3, (1, 8)), ("6", 4, (2, 3)), ("4x2", 8, (4, 2)), ("1", 8, (1, 1))],
)
def test_a_number_of_devices_is_split_by_kv_heads_first(text, num_kv_heads, shape):
    assert parse(text, num_kv_heads) == MeshShape(*shape)


@pytest.mark.parametrize("text", ["", "0", "-2", "2x", "x2", "2x0", "4x2x1", "8 ", "two", 2.5])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match="must be a number of devices, like 8, or heads x context, like 4x2"):
        parse(text, 8)


@pytest.mark.parametrize(
    ("text", "changes", "devices", "words"),
    [
        ("8", {"window": 64}, 8, r"2x4 .* context of a model with a sliding window \(window=64\): use mesh 2x1$"),
        ("4x1", {}, 8, "4x1 .* cannot split num_kv_heads=2 into 4 equal parts: use mesh 2x1$"),
        ("2", {"vocab_size": 265}, 8, "cannot split vocab_size=265 into 2 equal parts: leave out the mesh$"),
        ("2", {"intermediate_size": 49}, 8, "cannot split intermediate_size=49 into 2 equal parts"),
        ("2", {}, 1, "2x1 .* needs 2 devices, but JAX finds 1: leave out the mesh$"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_one_that_does(text, changes, devices, words):
    config = replace(CONFIG, **changes)
    with pytest.raises(ValueError, match=words):
        check(parse(text, config.num_kv_heads), split_sizes(config), devices, window=config.window)


def test_the_command_refuses_a_mesh_before_it_reads_weights(tmp_path, capsys, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    monkeypatch.setattr(checkpoint, "load_weight", None)
    assert cli.main(["generate", "--model", str(folder), "--mesh", "2", "hello"]) == 2
    assert capsys.readouterr().err == (
        "error: mesh 2x1 (heads x context) needs 2 devices, but JAX finds 1: leave out the mesh\n"
    )


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    folder, other = save_tiny(tmp_path / "model"), save_tiny(tmp_path / "other")
    whole = checkpoint.load_weight

    def replacing(*call, **how):
        if (other / "model.safetensors").exists():
            os.replace(other / "model.safetensors", folder / "model.safetensors")
        return whole(*call, **how)

    monkeypatch.setattr(checkpoint, "load_weight", replacing)
    with pytest.raises(ValueError, match="was replaced while it was being read: load the model again"):
        tessera.load(folder)
    tessera.load(folder)
