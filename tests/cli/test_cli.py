"""The command line: frozen flags, exit codes, and which text goes to which stream."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import typing
from dataclasses import replace

import pytest
from tiny import CONFIG, PROMISE, promising, save_tiny

import tessera
from tessera import doctor, generate
from tessera.cli import main as cli
from tessera.sparse.plan import Plan
from tessera.sparse.policies import POLICIES

MODEL = ["--model", "-m", "--attention", "--plan", "--dtype", "--weights", "--mesh", "--kv-dtype", "--debug"]
SAMPLING = (
    "--temperature --temp --top-k --top-p --min-p --repetition-penalty --repeat-penalty --frequency-penalty "
    "--presence-penalty --seed -s"
).split()
FLAGS = {
    "generate": MODEL
    + SAMPLING
    + (
        "--prompt -p --file -f --max-new-tokens --max-tokens --n-predict -n --stop --chat --parse-special --tokens "
        "--stream --json --stats --coordinator --processes --process --wait-s"
    ).split(),
    "chat": MODEL
    + SAMPLING
    + (
        "--system --system-prompt -sys --max-new-tokens --max-tokens --n-predict -n --parse-special --url "
        "--api-key-file"
    ).split(),
    "serve": (
        "--model -m --plan --attention --host --port --api-key-file --name --served-model-name --alias --context -c "
        "--ctx-size --max-model-len --slots -np --parallel --max-num-seqs --pages --pin --spill --spill-gb --exact "
        "--queue --dtype --kv-dtype --weights --mesh --replicas --cors --debug"
    ).split(),
    "calibrate": (
        "--text -f --model -m --plan --out --keep --max-kl --anchors --tile --query-tile --local --sinks --fraction "
        "--minimum --heads --crossover --decode-crossover --max-tokens --dtype --debug"
    ).split(),
    "fetch": ["--debug"],
    "convert": ["--dtype", "--debug"],
    "train": (
        "--out --mesh --accumulate --save-every-s --until --text --base --steps --length --batch --rate "
        "--coordinator --processes --process --wait-s --debug"
    ).split(),
    "doctor": "--plan --model -m --all --json --debug".split(),
    "bench": "--model -m --plan --weights --out --compare --debug".split(),
    "verify": "--kernel --simulate --configs --random --seed --out --debug".split(),
    "tune": (
        "--workload --role --candidates --quick --finalists --rounds --limit-s --memory-gib --seed --out "
        "--table --debug"
    ).split(),
    "eval": "--model -m --plan --rival --weights --suite --text --out --resume --debug".split(),
    "inspect": (
        "--chip --role --phase --batch --length --queries --heads --kv-heads --head-dim --dtype --tile --query-tile "
        "--fraction --window --softcap --model -m --weights --kv-dtype --mesh --attention --kernel --config --limit-s "
        "--picture --evidence --json --debug"
    ).split(),
    "fit": (
        "--chip --devices --batch --length --chunk --plan --weights --compile --limit-s --picture --json --debug"
    ).split(),
}
"""Command -> its flags. Users' scripts rely on them, so removing or renaming a flag is a breaking change."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("cli"))


def ask_for_help(*argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([*argv, "--help"])
    assert left.value.code in (0, None)


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_frozen(command, capsys):
    ask_for_help(command)
    said = capsys.readouterr().out
    lines = re.findall(r"^[│ ] (-.*)", said, re.MULTILINE)
    found = [name for line in lines for name in re.findall(r"(?:^|, )(-[-a-z]+)", line)]
    assert sorted(found) == sorted([*FLAGS[command], "-h", "--help"])
    assert not UNSAID.search(said)


UNSAID = re.compile(r"None|default: *\)")
"""Defaults that help leaves empty or shows as None."""


UNKNOWN = {
    "genrate": "tessera has no command genrate: did you mean generate? (see tessera --help)",
    "llama-server": "tessera has no command llama-server: serve answers over HTTP",
    "study fuzz": "tessera has no command study: run `python -m lab study` in a checkout of the repository",
    "demo": "tessera has no command demo: run `python -m lab demo` in a checkout of the repository",
    "load http://a": "tessera has no command load: GuideLLM (`guidellm run`) measures a running server",
    "-m x": "tessera takes a command before its flags, such as tessera generate -m ... (see tessera --help)",
    "generate hi --max_toknes 4": "tessera generate has no flag --max-toknes: did you mean --max-tokens? (see ",
    "generate hi -ngl 99": "tessera generate has no flag -ngl: JAX takes the accelerator that it finds",
    "generate hi -c 4096": "tessera generate has no flag -c: the cache grows with the request",
    "generate hi -mli": "tessera generate has no flag -mli: use `tessera chat`, where a line that ends",
    "generate hi -xyz": "tessera generate has no flag -xyz (see tessera generate --help)",
    "generate hi --mirostat 1": "tessera generate has no flag --mirostat: sampling has --temperature",
    "generate hi --dtype half": "tessera generate has no --dtype half: float16 weights are not supported: use bfloat16",
    "generate hi --dtype=bf16": "tessera generate has no --dtype bf16: use bfloat16",
    "calibrate --txt a": "tessera calibrate has no flag --txt: did you mean --text? (see tessera calibrate --help",
    "convert --model x": "tessera convert has no flag --model (see tessera convert --help)",
    "fetch smollm2 more": "tessera fetch takes no further argument, but got 'more': put quotes around",
}  # fmt: skip


@pytest.mark.parametrize("typed", UNKNOWN)
def test_what_tessera_lacks_is_answered_with_what_it_has(typed, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(typed.split())
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {UNKNOWN[typed]}")


def test_a_value_that_cannot_work_is_refused_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(generate, "load", pytest.fail)
    for typed, said in (
        ("hi -n -1", "--max-new-tokens -1 must be at least 1"),
        ("-f /nowhere", "/nowhere: No such file or directory\n"),
    ):
        assert cli.main(["generate", *typed.split()]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")


def test_flags_of_other_tools_work():
    asked = cli.parse(["generate", "a", *"-m x -p b -n 3 -f c --temp 0.5 -s 7 --top_k 2 --dtype auto".split()])
    own = cli.parse(["generate", "a", "b", *"--model x --max-new-tokens 3 --file c --temperature 0.5".split(),
                     *"--seed 7 --top-k 2".split()])  # fmt: skip
    assert replace(asked, prompt=(*asked.prompt, *asked.option), option=()) == own
    assert cli.parse("generate a --max_new_tokens 3".split()) == cli.parse("generate a -n3".split())
    assert cli.parse(["chat", "-sys", "be brief"]).system == "be brief"


def test_subcommands_are_frozen(capsys):
    ask_for_help()
    found = re.findall(r"^[│ ] +[•*-] (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert found == list(FLAGS)


def test_choices_are_those_of_the_library():
    from tessera.attention.contract import TILES
    from tessera.measure.judge import real
    from tessera.models.files.fetch import SOURCES
    from tessera.sparse.plan import HEADS

    def choices(kind: type, name: str) -> tuple:
        found = typing.get_type_hints(kind)[name]
        literals = typing.get_args(found) if type(None) in typing.get_args(found) else (found,)
        return tuple(value for literal in literals for value in typing.get_args(literal))

    assert typing.get_args(cli.Attention) == tuple(POLICIES)
    assert choices(cli.Calibrate, "tile") == TILES
    assert choices(cli.Calibrate, "heads") == HEADS
    assert choices(cli.Fetch, "name") == tuple(SOURCES)
    assert choices(cli.Eval, "suite") == tuple(real.SUITES)


def test_help_and_version_import_nothing_heavy():
    """`tessera --help` imports neither jax nor numpy, which keeps it under half a second."""
    program = (
        "import sys\nfrom tessera.cli import main as cli\nassert cli.main(['--version']) == 0\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'safetensors', 'tokenizers', 'huggingface_hub', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tessera 0.")


def test_generate_prints_what_the_library_gives(folder, tmp_path, capsys):
    [expected, other] = tessera.load(folder).generate(["ab", "a file"], max_new_tokens=6, temperature=1.0, seed=3)
    common = ["--model", str(folder), "--max-new-tokens", "6", "--temperature", "1", "--seed", "3"]
    assert cli.main(["generate", "ab", *common]) == 0
    assert capsys.readouterr().out == expected.text + "\n"
    assert cli.main(["generate", "ab", *common, "--stream"]) == 0
    assert capsys.readouterr().out == expected.text + "\n"
    path = tmp_path / "prompt.txt"
    path.write_text("a file")
    assert cli.main(["generate", "ab", "--file", str(path), *common, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["text"], f["tokens"], f["finish_reason"]) for f in found] == [
        (g.text, g.tokens, g.finish_reason) for g in (expected, other)
    ]
    assert set(found[0]) == set(typing.get_type_hints(tessera.Generation))


def test_json_has_no_nan(folder, capsys):
    assert cli.main(["generate", "ab", "--model", str(folder), "--max-new-tokens", "1", "--json"]) == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["decode_tokens_per_s"] is None
    assert found["ttft_s"] > 0


def test_generate_takes_token_ids_without_a_tokenizer(tmp_path, capsys):
    folder = save_tiny(tmp_path / "bare", tokenizer=False)
    [expected] = tessera.load(folder).generate([[1, 2, 3]], max_new_tokens=4)
    assert cli.main(["generate", "1, 2 3", "--tokens", "--model", str(folder), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, expected.tokens)) + "\n"


def run_tessera(*argv: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tessera", *argv], capture_output=True, text=True, **options)


def test_generate_and_chat_read_standard_input(folder):
    done = run_tessera("generate", "-", "--model", str(folder), "--max-new-tokens", "3", input="from a pipe")
    assert done.returncode == 0
    assert done.stderr == "this model has a chat template: add --chat to apply it to the prompt\n"
    [expected] = tessera.load(folder).generate(["from a pipe"], max_new_tokens=3)
    assert done.stdout == expected.text + "\n"
    done = run_tessera("chat", "--model", str(folder), "--max-new-tokens", "3", input="hello\n/exit\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("refused", ["x" * 600, "/nonsense"])
def test_chat_from_a_pipe_says_by_its_status_that_a_line_was_refused(folder, refused, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"hello\n{refused}\nhello\n"))
    assert cli.main(["chat", "--model", str(folder), "--max-new-tokens", "3"]) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert "error: " in shown.err


def test_ctrl_c_prints_what_there_is_and_leaves_with_130(tmp_path):
    folder = save_tiny(tmp_path / "long", replace(CONFIG, max_positions=65536, eos_ids=()))
    command = [
        sys.executable,
        "-u",
        "-m",
        "tessera",
        "generate",
        "<|user|>some words",
        "--model",
        str(folder),
        "--stream",
    ]
    command += ["--max-new-tokens", "60000", "--temperature", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        head = process.stdout.read(10)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate()
    assert len(head) == 10
    assert process.returncode == 130
    assert err.decode().splitlines() == ["interrupted"]
    assert out.endswith(b"\n")


def test_doctor_reports_and_judges(capsys):
    status = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["problems"] else 0)
    assert {(call["role"], call["phase"]) for call in found["kernels"]} == {
        (role, phase) for role in ("dense", "score", "sparse") for phase in ("prefill", "decode")
    }
    for call in found["kernels"]:
        chosen = [choice["kernel"] for choice in call["choices"] if choice["chosen"]]
        assert chosen == [call["kernel"]]
        assert all(choice["reason"] for choice in call["choices"] if not choice["chosen"])
    assert found["devices"][0]["platform"] == "cpu"
    assert found["versions"]["jax"]
    assert found["pip_check"]


def test_doctor_fits_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = doctor.examine() | {"problems": [f"problem {i}" for i in range(3)]}
    found["devices"] = [{"name": f"{i}: TPU v5 lite", "platform": "tpu", "free_bytes": 1 << 34} for i in range(8)]
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    for words in (
        "problem 2",
        "jax 0.",
        "8 x TPU v5 lite, 16.0 GiB free",
        "xla_decode_sparse",
        "smollm2.plan.json: asked",
    ):
        assert words in out
    cli.main(["doctor", "--all"])
    out = capsys.readouterr().out
    for words in ("Versions", "Devices", "why not the others", "Caches", "pip check", "problem 2"):
        assert words in out


@pytest.fixture
def promised(tmp_path):
    """Return the folder of a tiny model and the path of its plan, which holds a promise."""
    folder = save_tiny(tmp_path / "promised")
    return folder, promising(folder)


LINE = (
    "the plan was asked for max_kl 0.02; on new text (400 and 512 tokens) it reads 22% of keys and keeps 99.0% of "
    "dense's probability (KL 0.012; planted answers 98.3%, KL 0.019); it keeps 7 of 8 planted answers"
)


def test_loading_a_plan_shows_its_promise(promised, caplog):
    folder, path = promised
    caplog.set_level("INFO", logger="tessera")
    model = tessera.load(folder, attention="kascade")
    assert [record.getMessage() for record in caplog.records] == [LINE]
    caplog.clear()
    model.with_attention("window").with_attention("kascade")
    dense = tessera.load(folder)
    assert LINE not in caplog.text
    dense.with_attention("kascade", path)
    assert [record.getMessage() for record in caplog.records if "plan" in record.getMessage()] == [LINE]


def test_generate_reports_what_it_used_and_the_promise(promised, capsys):
    folder, _ = promised
    command = ["generate", "x" * 150, "--model", str(folder), "--max-new-tokens", "2"]
    assert cli.main([*command, "--attention", "kascade", "--json"]) == 0
    shown = capsys.readouterr()
    density = json.loads(shown.out)["density"]
    usage = shown.err.splitlines()[-1]
    assert re.fullmatch(r"\(151 tokens; 2 new at [0-9.]+ tokens/s; .*\)", usage)
    assert f"{density:.0%} of keys read; plan asked for max_kl 0.02, measured max_kl 0.01851" in usage


@pytest.mark.parametrize("flag", ["--plan", "--model"])
def test_doctor_reports_a_plan(promised, flag, capsys, monkeypatch):
    folder, path = promised
    monkeypatch.setenv("COLUMNS", "400")
    given = [flag, str(path if flag == "--plan" else folder)]
    cli.main(["doctor", *given])
    out = capsys.readouterr().out
    assert LINE in out
    assert "dense 1.7040, plan 1.7140" in out
    cli.main(["doctor", *given, "--json"])
    found = json.loads(capsys.readouterr().out)["plan"]
    assert found["path"] == str(path)
    assert found["promise"] == PROMISE
    assert found["summary"].startswith(LINE)


def test_doctor_names_what_is_wrong_with_a_plan(promised, capsys):
    _, path = promised
    path.write_text(json.dumps(json.loads(path.read_text()) | {"promise": {"keep": 0.9}}))
    assert cli.main(["doctor", "--plan", str(path), "--json"]) == 1
    assert any(
        "promise lacks fresh, held, judged_tokens, measured" in problem
        for problem in json.loads(capsys.readouterr().out)["problems"]
    )


def test_doctor_shows_the_shipped_promises(capsys):
    cli.main(["doctor", "--json"])
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans["smollm2.plan.json"] == (
        "the plan was asked for max_kl 0.02; on new text (3 windows of 8,192 tokens) it reads 20% of keys and keeps "
        "98.3% of dense's probability (KL 0.014; planted answers 97.3%, KL 0.045), which misses the target; it keeps "
        "12 of 13 planted answers"
    )
    assert "because dense finds only 3 of 36 planted answers" in plans["model/plan.json"]


@pytest.mark.parametrize("target", ["--anchors 2 --fraction 0.2", "--max-kl 9", "--keep 0.01"])
def test_calibrate_prints_what_dense_and_the_plan_lose(folder, tmp_path, capsys, target):
    text, out = tmp_path / "text.txt", tmp_path / "plan.json"
    text.write_text("".join(f"line {i}: {i * i}\n" for i in range(300)))
    arguments = ["--text", str(text), "--model", str(folder), "--out", str(out), "--crossover", "0", *target.split()]
    assert cli.main(["calibrate", *arguments, "--max-tokens", "1024", "--minimum", "16"]) == 0
    shown, plan = capsys.readouterr().out, json.loads(out.read_text())
    if "anchors" in target:
        number, stored = r"held-out perplexity: dense ([0-9.]+), plan ([0-9.]+);", plan["metrics"]
        names = ("perplexity_dense", "perplexity_kascade")
    else:
        number, stored = r"loss per token +dense ([0-9.]+), plan ([0-9.]+) ", plan["promise"]["measured"]
        names = ("text_loss_dense", "text_loss")
        assert "warning: dense finds fewer than 5 planted answers" in shown
    [pair] = re.findall(number, shown)
    assert [float(value) for value in pair] == [stored[name] for name in names]
    assert stored[names[0]] != stored[names[1]]


def test_convert_carries_the_plan(promised, tmp_path, capsys):
    folder, path = promised
    assert cli.main(["convert", str(folder), str(tmp_path / "out")]) == 0
    assert tessera.load(tmp_path / "out", attention="kascade").plan == Plan.load(path)
    replace(Plan.load(path), model="0123").save(path)
    assert cli.main(["convert", str(folder), str(tmp_path / "bare")]) == 0
    assert f"{path} is left out: the plan is of another model" in capsys.readouterr().err
    assert not (tmp_path / "bare" / "plan.json").exists()


def test_calibrate_writes_a_plan_that_generate_finds(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i}\n" for i in range(300)))
    out = folder / "plan.json"
    arguments = "--anchors 2 --tile 16 --fraction 0.2 --minimum 16 --crossover 0 --max-tokens 512".split()
    assert cli.main(["calibrate", "--text", str(text), "--model", str(folder), "--out", str(out), *arguments]) == 0
    assert "anchors [0, " in capsys.readouterr().out
    command = [
        "generate",
        "x" * 150,
        "--model",
        str(folder),
        "--attention",
        "kascade",
        "--max-new-tokens",
        "2",
        "--json",
    ]
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out)["density"] < 1


def test_a_missing_extra_is_named_before_any_work(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["inspect", "--picture", "x.svg"]) == 2
    assert "pip install 'tessera-attention[report]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
