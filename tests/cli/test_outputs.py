"""A path that cannot be written is refused in one sentence before the work starts."""

import errno

import jax
import pytest

from tessera.cli import main as cli
from tessera.cli.errors import explained
from tessera.core import memory
from tessera.core.files import DEMO_MODEL, write_whole
from tessera.models.files import checkpoint
from tessera.train import loop


@pytest.mark.parametrize(
    "command",
    [
        "calibrate --text TEXT --out",
        "train --text TEXT --out",
        "eval --out",
        "bench --model none --out",
        "convert MODEL",
        "verify --out",
        "tune --workload prefill_8k --out",
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(command, tmp_path, monkeypatch, capsys):
    """The path lies below a file, where not even root can write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert cli.main([*command.split(), "file/out"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "file" in line
    assert "cannot be written" in line or "does not exist" in line or "is no folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_takes_no_default_record_is_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evidence").write_text("not a folder")
    for command in ("eval", "bench --model none", "tune --workload prefill_8k"):
        assert cli.main(command.split()) == 2
        assert "evidence/records.jsonl cannot be written (Not a directory)" in capsys.readouterr().err


def test_a_full_disk_names_the_place_and_the_way_out(tmp_path, monkeypatch, capsys):
    """A write to an open file raises an error without a name."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_file", full)
    assert cli.main(["convert", str(DEMO_MODEL), str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path / 'out'}: No space left on device: free some space, or name another place"
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "file", full)
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--save-every-s nan", "save_every_s=nan must be a number of seconds"),
        ("--save-every-s -1", "save_every_s=-1.0 must be a number of seconds"),
        ("--batch 1000000000", "the scores of a batch of 1,000,000,000 x 512 tokens needs"),
    ],
)
def test_training_values_that_cannot_work_are_refused_first(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "start", pytest.fail)
    (tmp_path / "text").write_text("some words " * 1000)
    command = ["train", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), *flags.split()]
    assert cli.main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "out").exists()


def test_too_little_address_space_for_programs_is_refused_before_they_abort(monkeypatch, capsys):
    monkeypatch.setattr(memory, "_process_free_bytes", lambda: memory.PROGRAM_BYTES)
    assert cli.main(["generate", "hello"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "of address space, but the limit leaves 512.0 MiB free: raise the limit" in line


def test_an_allocation_that_fails_says_what_to_do():
    said = explained(MemoryError("std::bad_alloc"))
    assert said.startswith("this process ran out of memory (std::bad_alloc): raise its limit")
    assert explained(MemoryError("x needs 2 GiB: take less")) == "x needs 2 GiB: take less"


def test_a_limit_of_address_space_bounds_what_fits(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 42, 1 << 42))
    assert 1 << 41 < memory._process_free_bytes() < 1 << 42
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert memory.available_bytes(jax.devices("cpu")[0]) < 0
