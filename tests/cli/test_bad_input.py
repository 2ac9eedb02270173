"""Bad input: one sentence that names the value and the way out, exit code 2, and nothing half done."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, PLAN, random_params, save_tiny

import tessera
from tessera.cli import main as cli
from tessera.models.files.checkpoint import save_folder
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.sparse.policies import POLICIES


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def model(good):
    return tessera.load(good)


@pytest.fixture
def folder(good, tmp_path):
    """Return a copy of the good model that the test may break."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def refuse(capsys, *argv: str) -> str:
    """Run a command that must exit with 2 and print one line, on standard error; return the line."""
    assert cli.main(list(argv)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ----- prompts and sampling values, by the library


@pytest.mark.parametrize(
    ("prompts", "how", "words"),
    [
        ([""], {}, "prompt 0 is empty"),
        (["a", []], {}, "prompt 1 is an empty token list"),
        ([], {}, "prompts is an empty list"),
        ("bare text", {}, "wrap a single prompt in a list"),
        ([1, 2, 3], {}, "wrap a single prompt in a list"),
        ([["a", "b"]], {}, "must be a text or a list of integers"),
        ([[1] * 600], {}, "600 tokens but the model's context is 512: shorten it by 88"),
        (["x" * 600], {}, "601 tokens but the model's context is 512"),
        ([[1, 264]], {}, "token 264, outside the model's vocabulary of 264"),
        ([[1, -1]], {}, "token -1, outside"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        (["a"], {"temperature": -1.0}, "temperature=-1.0 must be 0"),
        (["a"], {"top_p": 2.0}, "top_p=2.0 must be above 0"),
        (["a"], {"presence_penalty": 3}, "presence_penalty=3 must be between -2 and 2"),
        (["a"], {"stop": [""]}, "must hold texts that are not empty"),
        (["a", "b"], {"seed": [1, 2, 3]}, "3 values for 2 prompts"),
    ],
)
def test_bad_requests_are_refused(model, prompts, how, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        model.generate(prompts, **{"max_new_tokens": 2, **how})


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([1, 2], r"shape \(2,\)"),
        ([[]], "pass a non-empty array"),
        ([[0.5]], "integers"),
        ([[1, 999]], r"tokens_BT\[0\] holds token 999"),
        ([[0] * 513], "513 tokens"),
    ],
)
def test_bad_tokens_for_logits_are_refused(model, tokens, words):
    with pytest.raises(ValueError, match=words):
        model.logits(tokens)


def test_a_missing_tokenizer_refuses_texts_only(model):
    bare = replace(model, tokenizer=None)
    for how, prompts in (({}, ["text"]), ({"stop": ["x"]}, [[1]]), ({"stream": print}, [[1]])):
        with pytest.raises(ValueError, match=r"needs a tokenizer and .* has none: add its tokenizer.json"):
            bare.generate(prompts, max_new_tokens=1, **how)
    [found] = bare.generate([[1, 2]], max_new_tokens=2)
    assert (found.text, len(found.tokens)) == ("", 2)


def test_nan_in_memory_is_traced_to_its_weights(model):
    layers = list(model.params.layers)
    layers[1] = replace(layers[1], up=layers[1].up.at[3, 4].set(jnp.nan))
    broken = replace(model, params=replace(model.params, layers=tuple(layers)))
    words = r"not finite: its weights params.layers\[1\].up hold NaN or inf"
    with pytest.raises(ValueError, match=words):
        broken.generate([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(ValueError, match=words):
        broken.logits([[1, 2, 3]])


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_compiled(model):
    huge = replace(model, config=replace(CONFIG, max_positions=2**40))
    with pytest.raises(
        MemoryError, match=r"a cache for 1 sequences of 1000000000002 tokens needs .* TiB but .* are free"
    ):
        huge.generate([[1, 2, 3]], max_new_tokens=10**12)


# ----- model folders, plans and flags, by the command line


def test_unknown_folder(capsys, tmp_path):
    assert "does not exist" in refuse(capsys, "generate", "x", "--model", str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "name", ["missing.gguf", "MISSING/x.gguf", "a/b.GGUF", "./a/b", "../a", "~/no/model", "/no/model", "a/b/c", "a/b/"]
)
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    line = refuse(capsys, "generate", "x", "--model", name)
    assert f"model {name!r} does not exist: pass a Hugging Face folder, a GGUF file, a hub id" in line


def test_a_model_that_is_no_file_or_that_has_no_home(capsys):
    assert "is neither a folder nor a file" in refuse(capsys, "generate", "x", "--model", "/dev/null")
    assert "begins with an unknown home folder" in refuse(capsys, "generate", "x", "--model", "~no-such-user/model")


def test_errors_hold_no_control_characters(capsys, tmp_path):
    assert "\\x1b[2J" in refuse(capsys, "generate", "x", "--model", "m", "--file", str(tmp_path / "\x1b[2J"))


def test_unreachable_hub_model(capsys):
    line = refuse(capsys, "generate", "x", "--model", "nobody/nothing")
    assert "neither a local folder nor reachable on the Hugging Face hub" in line


def test_missing_weights(capsys, folder):
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refuse(capsys, "generate", "x", "--model", str(folder))


def test_missing_shard(capsys, tmp_path):
    folder = tmp_path / "sharded"
    save_folder(folder, random_params(CONFIG), CONFIG, byte_tokenizer(), shard_bytes=40000)
    shard = sorted(folder.glob("model-00002-of-*"))[0]
    shard.unlink()
    assert shard.name in refuse(capsys, "generate", "x", "--model", str(folder))


def test_truncated_weights(capsys, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refuse(capsys, "generate", "x", "--model", str(folder))


def test_tensor_of_the_wrong_shape(capsys, folder):
    edit_json(folder / "config.json", intermediate_size=64)
    line = refuse(capsys, "generate", "x", "--model", str(folder))
    assert "model.layers.0.mlp" in line
    assert "48" in line
    assert "64" in line
    assert "correct config.json, or download the model again" in line


def test_weights_that_are_not_finite(capsys, tmp_path):
    params = random_params(CONFIG)
    save_folder(tmp_path, replace(params, final_norm=params.final_norm * np.inf), CONFIG, byte_tokenizer())
    line = refuse(capsys, "generate", "x", "--model", str(tmp_path))
    assert "model.norm.weight" in line
    assert line.endswith("download it again")


def test_unsupported_config(capsys, folder):
    edit_json(folder / "config.json", model_type="mamba")
    assert "mamba" in refuse(capsys, "generate", "x", "--model", str(folder))


def test_no_plan(capsys, folder):
    (folder / "plan.json").unlink()
    line = refuse(capsys, "generate", "x", "--model", str(folder), "--attention", "kascade")
    assert f"tessera calibrate --model {folder} --text TEXT" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 99}, "schema 99, newer than"),
        ({"model": "0123456789abcdef"}, "is of another model"),
        ({"num_layers": 2, "head_map": [[0, 1]] * 2}, "its num_layers is 2, but this model's is 3"),
        ({"tile": 24}, "tile=24 must be one of"),
        ({"anchors": [1]}, "anchors=[1] must ascend from 0"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"query_tile": 1024}, "query_tile=1024 does not fit this model's context of 512"),
        ({"promise": {"keep": 0.9}}, "promise lacks fresh, held, judged_tokens, measured"),
    ],
)
def test_plans_that_do_not_fit(capsys, folder, change, words):
    edit_json(folder / "plan.json", **change)
    assert words in refuse(capsys, "generate", "x", "--model", str(folder), "--attention", "kascade")


def test_a_plan_for_another_attention_is_not_ignored(capsys, folder):
    line = refuse(capsys, "generate", "x", "--model", str(folder), "--plan", "plan.json")
    assert "--plan plan.json" in line
    assert "--attention kascade" in line


def test_corrupt_plan(capsys, folder):
    path = folder / "plan.json"
    path.write_bytes(path.read_bytes()[:40])
    assert "is not valid JSON" in refuse(capsys, "generate", "x", "--model", str(folder), "--attention", "kascade")


def test_tile_that_does_not_fit_the_context(capsys, tmp_path):
    folder = save_tiny(tmp_path, replace(CONFIG, max_positions=64))
    edit_json(folder / "plan.json", tile=128)
    line = refuse(capsys, "generate", "x", "--model", str(folder), "--attention", "kascade")
    assert "tile=128 does not fit this model's context of 64" in line


def test_unknown_attention():
    with pytest.raises(ValueError, match=f"attention='flash' must be one of {re.escape(str(tuple(POLICIES)))}"):
        tessera.load("anything", attention="flash")


def test_unknown_dtype():
    with pytest.raises(ValueError, match="dtype='float64' must be"):
        tessera.load("anything", dtype="float64")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "no prompt: pass one in quotes"),
        (["generate", "", "--model", "MODEL"], "prompt 0 is empty"),
        (["generate", "x", "--model", "MODEL", "--top-k", "-2"], "top_k=-2"),
        (["generate", "x", "--model", "MODEL", "--seed", str(2**64)], "seed=18446744073709551616 must be"),
        (["generate", "x", "--model", "MODEL", "--frequency-penalty", "-2.5"], "frequency_penalty=-2.5 must be"),
        (["generate", "x y", "--model", "MODEL", "--tokens"], "--tokens takes ids"),
        (["generate", "a", "b", "--model", "MODEL", "--stream"], "--stream prints the text of one prompt"),
        (["generate", "--file", "no/such/file", "--model", "MODEL"], "no/such/file"),
        (
            ["generate", "x", "--model", "MODEL", "--attention", "kascade", "--plan", "no/plan"],
            "plan 'no/plan' does not",
        ),
        (["calibrate", "--text", "no/such/text", "--model", "MODEL"], "no/such/text"),
        (["calibrate", "--text", "x", "--out", "no/such/folder/plan.json", "--model", "MODEL"], "no/such/folder"),
        (["calibrate", "--text", "x", "--out", ".", "--model", "MODEL"], "is a folder"),
        (["calibrate", "--text", "x", "--crossover", "-1", "--model", "MODEL"], "crossover=-1 must be at least 0"),
        (["calibrate", "--text", "x", "--max-tokens", "0", "--model", "MODEL"], "max_tokens=0 must be at least 1"),
        (["generate", "x", "--model", ""], "is not a model folder (it has no config.json)"),
        (["train", "--out", __file__, "--text", __file__], "is a file: name a folder"),
        (["train", "--out", "no", "--text", __file__, "--until", "-3"], "until=-3 must be at least 0"),
        (["train", "--out", "no", "--text", __file__, "--rate", "nan"], "rate=nan must be a positive number"),
    ],
)
def test_bad_command_lines(capsys, good, arguments, words):
    assert words in refuse(capsys, *(str(good) if word == "MODEL" else word for word in arguments))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "calibrate --fraction 0.7 --heads pooled --max-kl 0.1",
            "fraction=0.7, heads='pooled' cannot be combined with",
        ),
        ("calibrate --fraction 0.1", "fraction=0.1 cannot be combined with keep or max_kl: drop it, or pass anchors"),
        ("calibrate --max-kl inf", "max_kl=inf must be above 0 and finite"),
        ("calibrate --local 1000000000000", "local=1000000000000 must be below 2,147,483,648"),
        ("calibrate --query-tile 1000000000", "query_tile=1000000000 must be from 1 to 1,048,576"),
        ("calibrate --query-tile 1024", "query_tile=1024 does not fit the context of 512"),
        ("bench --compare a.jsonl b.jsonl", "--model cannot be used with --compare, which ignores it: drop it"),
    ],
)
def test_flags_that_would_be_ignored_or_overflow_are_refused(capsys, good, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words " * 400)
    command, *rest = flags.split()
    text = ["--text", "text.txt"] if command == "calibrate" else []
    assert words in refuse(capsys, command, "--model", str(good), *text, *rest)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--compare a.jsonl b.jsonl --plan p --weights int8", "--plan, --weights cannot be used with --compare"),
        ("--plan plan.json", "--plan plan.json needs --model"),
    ],
)
def test_bench_flags_that_say_two_things_are_refused(capsys, flags, words):
    assert words in refuse(capsys, "bench", *flags.split())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "model.gguf", "notes.txt"]
)
def test_calibrate_overwrites_nothing_but_a_plan(capsys, folder, name):
    path = folder / name
    if name == "notes.txt":
        path.write_text("mine")
    if name == "generation_config.json":
        path.unlink()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    line = refuse(capsys, "calibrate", "--model", str(folder), "--text", __file__, "--out", str(path))
    assert f"--out {path}" in line
    assert "name another file" in line
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_calibrate_does_not_overwrite_its_gguf(capsys, tmp_path):
    path, before = tmp_path / "ok.gguf", b"GGUF and the weights"
    path.write_bytes(before)
    line = refuse(capsys, "calibrate", "--model", str(path), "--text", __file__, "--out", str(path))
    assert f"--out {path} is the name of a model's file" in line
    assert path.read_bytes() == before


def test_calibration_without_a_tokenizer(capsys, tmp_path):
    folder = save_tiny(tmp_path, tokenizer=False, plan=False)
    line = refuse(capsys, "calibrate", "--text", __file__, "--model", str(folder), "--out", str(tmp_path / "p.json"))
    assert "add its tokenizer.json" in line


def test_a_file_that_is_not_text(capsys, good, tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} is not UTF-8 text" in refuse(capsys, "generate", "--file", str(path), "--model", str(good))


def test_debug_shows_the_traceback(good):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        cli.main(["generate", "", "--model", str(good), "--debug"])


def test_an_unwritable_cache_folder_is_one_line_and_no_obstacle(good, tmp_path):
    """The cache folder's parent is a file, so the folder cannot be made; the command still answers."""
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    command = [
        sys.executable,
        "-m",
        "tessera",
        "generate",
        "x",
        "--chat",
        "--model",
        str(good),
        "--max-new-tokens",
        "2",
        "--json",
    ]
    environment = {"XDG_CACHE_HOME": str(obstacle), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("compiled programs are not kept: ")
    assert len(json.loads(done.stdout)["tokens"]) == 2


def test_the_plan_of_the_tests_is_of_no_model(good):
    """PLAN names no weights, so that a test which forgets to make its own plan fails."""
    with pytest.raises(ValueError, match="is of another model"):
        tessera.load(good, attention="kascade", plan=PLAN)
