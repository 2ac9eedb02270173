"""The laboratory's command line: frozen flags, defaults in words, and errors before any work."""

import re
import subprocess
import sys
import typing

import pytest

from lab import bench, commands
from lab.studies.commands import STUDIES

FLAGS = {
    "bench": "--suite --only --resume --out --peer-python --gate --debug".split(),
    "eval": "--model -m --plan --weights --suite --text --out --resume --debug".split(),
    "report": "--evidence --out --tables --check --debug".split(),
    "study": (),
    "simulate": "--machine --day-hours --minutes --out --debug".split(),
    "demo": "--out --debug".split(),
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


@pytest.mark.parametrize("command", ["demo", "report"])
def test_a_missing_extra_is_named_before_any_work(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert commands.main([command]) == 2
    assert "pip install 'tessera-attention[report]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom lab.commands import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'safetensors', 'tokenizers', 'huggingface_hub', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
