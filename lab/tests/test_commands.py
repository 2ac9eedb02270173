"""The laboratory's command line: frozen flags, defaults in words, and errors before any work."""

import re
import subprocess
import sys
import typing

import pytest

from lab import bench, commands
from lab.studies.commands import STUDIES
from lab.training.recipes import RECIPES

FLAGS = {
    "bench": "--suite --only --resume --out --peer-python --gate --debug".split(),
    "eval": "--model -m --plan --suite --text --out --resume --debug".split(),
    "report": "--evidence --check --show --debug".split(),
    "study": (),
    "simulate": "--machine --day-hours --minutes --out --debug".split(),
    "demo": "--out --debug".split(),
    "train": (
        "--recipe --out --mesh --accumulate --save-every-s --until --coordinator --processes --process --wait-s --debug"
    ).split(),
}
"""Command -> its flags."""
UNSAID = re.compile(r"None|default: *\)")
"""Defaults that help leaves empty or shows as None."""


def ask_for_help(*argv: str) -> None:
    with pytest.raises(SystemExit) as left:
        commands.main([*argv, "--help"])
    assert left.value.code in (0, None)


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_frozen(command, capsys):
    ask_for_help(command)
    said = capsys.readouterr().out
    lines = re.findall(r"^[│ ] (-.*)", said, re.MULTILINE)
    found = [name for line in lines for name in re.findall(r"(?:^|, )(-[-a-z]+)", line)]
    assert sorted(found) == sorted([*FLAGS[command], "-h", "--help"])
    assert not UNSAID.search(said)


def test_commands_are_frozen(capsys):
    ask_for_help()
    assert re.findall(r"^[│ ] +[•*-] (\w+)", capsys.readouterr().out, re.MULTILINE) == list(FLAGS)


@pytest.mark.parametrize("name", STUDIES)
def test_help_of_studies_says_defaults_in_words(name, capsys):
    ask_for_help("study", name)
    assert not UNSAID.search(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("study fuz", "python -m lab study has no command fuz: did you mean fuzz? (see python -m lab study --help"),
        ("study fuzz --mutation 3", "python -m lab study fuzz has no flag --mutation: did you mean --mutations? (see"),
        ("benhc", "python -m lab has no command benhc: did you mean bench?"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(typed, said, capsys):
    with pytest.raises(SystemExit) as left:
        commands.main(typed.split())
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_choices_are_those_of_the_library():
    assert set(typing.get_args(typing.get_type_hints(commands.Bench)["suite"])) == set(bench.SUITES)
    assert set(typing.get_args(typing.get_type_hints(commands.Train)["recipe"])) == set(RECIPES)


@pytest.mark.parametrize("command", ["demo", "report"])
def test_a_missing_extra_is_named_before_any_work(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert commands.main([command]) == 2
    assert "pip install 'tessera-attention[report]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["eval --suite cache", "bench --suite smoke", "demo", "train --recipe tiny"])
def test_a_place_that_cannot_be_written_is_refused_first(command, tmp_path, monkeypatch, capsys):
    """The path lies below a file, where not even root can write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert commands.main([*command.split(), "--out", "file/out"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "cannot be written" in line or "does not exist" in line or "is no folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_takes_no_default_record_is_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evidence").write_text("not a folder")
    for command in ("eval", "bench"):
        assert commands.main([command]) == 2
        assert "evidence/records.jsonl cannot be written (Not a directory)" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom lab.commands import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'safetensors', 'tokenizers', 'huggingface_hub', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
