"""Saving a model: a kill at any point leaves the old or the new folder whole, and the user's files are never lost."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import CONFIG, random_params

from tessera.core import files
from tessera.models.files.checkpoint import load_params, save_folder
from tessera.models.files.source import open_source, resolve
from tessera.models.text.tokenizer import byte_tokenizer


def same_weights(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_an_interrupted_save_leaves_the_old_folder_whole(tmp_path, monkeypatch):
    save_folder(tmp_path, random_params(CONFIG, 0), CONFIG)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def write_half(path, specs, arrays):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("tessera.models.files.checkpoint.write_file", write_half)
    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path, random_params(CONFIG, 1), CONFIG)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Killed(BaseException):
    """Simulated kill, which no `except Exception` catches."""


@pytest.mark.parametrize("survived", range(3))
def test_a_save_killed_between_its_renames_leaves_one_whole_model(tmp_path, monkeypatch, survived):
    folder = tmp_path / "model"
    old, new = (random_params(CONFIG, seed) for seed in (0, 1))
    save_folder(folder, old, CONFIG, shard_bytes=10_000)
    (folder / "notes.txt").write_text("mine")
    rename, calls = os.rename, []

    def die(*names):
        calls.append(names)
        if len(calls) > survived:
            raise Killed
        rename(*names)

    def never(*names):
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(files.os, "rename", die)
        dying.setattr(files.shutil, "rmtree", never)
        with pytest.raises(Killed):
            save_folder(folder, new, CONFIG, shard_bytes=20_000)
    found = load_params(resolve(folder), stacked=True)
    assert same_weights(found, old if survived == 0 else new)
    assert (folder / "notes.txt").read_text() == "mine"
    save_folder(folder, old, CONFIG, shard_bytes=20_000)
    assert same_weights(load_params(open_source(folder), stacked=True), old)
    assert list(tmp_path.iterdir()) == [folder]


def test_what_is_not_ours_stays(tmp_path):
    folder = tmp_path / "model"
    params = random_params(CONFIG, 0)
    save_folder(folder, params, CONFIG, byte_tokenizer(), shard_bytes=10_000)
    (folder / "runs").mkdir()
    (folder / "runs" / "one").write_text("1")
    (folder / "link").symlink_to("runs/one")
    (folder / "plan.json").write_text("{}")
    folder.chmod(0o750)
    (tmp_path / "alias").symlink_to(folder)
    save_folder(tmp_path / "alias", params, CONFIG, extra=lambda new: (new / "plan.json").write_text("[]"))
    assert (folder / "link").read_text() == "1"
    assert (folder / "link").is_symlink()
    assert (folder / "plan.json").read_text() == "[]"
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("model-*"))
    assert folder.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alias", "model"]


def test_a_new_tokenizer_takes_nothing_from_the_old_one(tmp_path):
    params = random_params(CONFIG, 0)
    save_folder(tmp_path, params, CONFIG, byte_tokenizer())
    save_folder(tmp_path, params, CONFIG, replace(byte_tokenizer(), chat_template=None))
    assert open_source(tmp_path).tokenizer.chat_template is None


def test_places_that_cannot_be_replaced_are_refused(tmp_path, monkeypatch):
    params = random_params(CONFIG, 0)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    for place, words in (("../file", "is a file"), (".", "working folder"), ("..", "working folder"), ("/", "mount")):
        with pytest.raises(ValueError, match=words):
            save_folder(place, params, CONFIG)
    assert (tmp_path / "file").read_text() == "mine"
    save_folder("model", params, CONFIG)
    assert (tmp_path / "inside" / "model" / "config.json").is_file()


SAVER = """
import sys, time
from pathlib import Path
from tessera.core import files
with files.replace_folder(Path(sys.argv[1])) as new:
    (new / "weights").write_bytes(bytes(1000))
    print("saving", flush=True)
    sys.stdin.readline()
"""


def start_saver(folder) -> subprocess.Popen:
    pipe = subprocess.PIPE
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(folder)], stdin=pipe, stdout=pipe, text=True)
    assert saver.stdout.readline() == "saving\n"
    return saver


def test_a_second_writer_is_refused_and_the_first_one_finishes(tmp_path):
    folder = tmp_path / "model"
    save_folder(folder, random_params(CONFIG, 0), CONFIG)
    with start_saver(folder) as saver:
        with pytest.raises(OSError, match=rf"process {saver.pid} is writing .*: wait until it has finished"):
            save_folder(folder, random_params(CONFIG, 1), CONFIG)
        assert resolve(folder).path == folder
        saver.communicate("go on\n")
    assert saver.returncode == 0
    assert (folder / "weights").stat().st_size == 1000
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_copy_of_a_killed_save_is_named_by_a_load_and_removed_by_a_save(tmp_path, caplog):
    folder, params = tmp_path / "model", random_params(CONFIG, 0)
    save_folder(folder, params, CONFIG)
    with start_saver(folder) as saver:
        saver.kill()
    resolve(folder)
    [said] = [record.getMessage() for record in caplog.records]
    assert "left a copy of 1,000 bytes" in said
    assert str(tmp_path / ".model.tessera-new") in said
    save_folder(folder, params, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_temporary_files_of_dead_writers_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".plan.json.{dead.pid}{files.TEMPORARY}"
    alive = tmp_path / f".plan.json.{os.getppid()}{files.TEMPORARY}"
    for path in (left, alive):
        path.write_text("half")
    files.replace_text(tmp_path / "plan.json", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "plan.json"]


def test_two_writers_at_the_same_time_take_turns(tmp_path):
    """A lock file appears and disappears with its owner: no two processes hold it at once, and none is left."""
    program = """
import sys
from pathlib import Path
from tessera.core import files
taken = 0
while taken < 40:
    try:
        with files.sole_writer(Path("thing")):
            Path("held").touch(exist_ok=False)
            Path("held").unlink()
            taken += 1
    except FileExistsError:
        raise SystemExit("two at once")
    except OSError:
        pass
"""
    writers = [subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert not list(tmp_path.iterdir())
