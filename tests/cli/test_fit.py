"""`tessera fit`: what it prints, and one sentence and exit code 2 for every impossible request."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tessera.cli import main as cli
from tessera.core.memory import format_bytes
from tessera.deviceless import model_inspection
from tessera.deviceless.model_inspection import StepInspection

LLAMA = "fit llama-3.1-8b --chip v6e --devices 8 --batch 4 --length 131072"
REFUSED = [
    ("llama-3.1-8b --length 0", "--length 0 must be at least 1 and below 2,147,483,648"),
    ("llama-3.1-8b --batch 1000000000000", "--batch 1000000000000 must be at least 1 and below"),
    ("llama-3.1-8b --devices -1", "--devices -1 must be at least 1"),
    ("llama-9b", "model 'llama-9b' does not exist: pass a Hugging Face folder, a GGUF file, a hub id"),
    ("llama-9b", "or one of llama-3.1-8b, llama-3.1-70b"),
    ("qwen3-8b --plan none.json", "plan 'none.json' does not exist: make one with `tessera calibrate`"),
    (
        "llama-3.1-8b --chip h100 --compile",
        "--compile supports the chips v5e, v5p, v6e, v7x, not --chip h100: drop --compile",
    ),
    ("llama-3.1-8b --devices 32 --compile", "--compile takes --devices of 1, 2, 4, 8, 16 on v6e, not 32"),
    ("llama-3.1-8b --devices 16 --compile", "8 KV heads, so the mesh needs a context axis, which --compile does not"),
    ("llama-3.1-8b --compile --limit-s nan", "--limit-s nan must be above 0 and at most"),
    ("llama-3.1-8b --picture none/fit.svg", "the folder none for --picture does not exist: create it"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_impossible_requests(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(model_inspection, "inspect_step", lambda *_, **__: pytest.fail("it compiled"))
    assert cli.main(["fit", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert words in err


def test_its_old_name_works_and_names_the_new_one(capsys):
    assert cli.main(["plan", "llama-3.1-8b", "--length", "0"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert "`tessera plan` is now `tessera fit`" in note
    assert "--length 0 must be" in error


def test_unknown_chips_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", "llama-3.1-8b", "--chip", "v9"])
    assert end.value.code == 2
    assert "v9" in capsys.readouterr().err


def test_a_folder_without_a_config_and_one_whose_vocabulary_does_not_divide(tmp_path, capsys):
    assert cli.main(["fit", str(tmp_path)]) == 2
    assert "it has no config.json" in capsys.readouterr().err
    config = {"model_type": "llama", "vocab_size": 1001, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["fit", str(tmp_path), "--devices", "2"]) == 2
    assert "cannot split vocab_size=1001 into 2 equal parts" in capsys.readouterr().err
    assert cli.main(["fit", str(tmp_path), "--length", "600"]) == 0
    assert "context is 512 tokens, less than the planned 600" in capsys.readouterr().out


def test_it_prints_pairs_times_and_the_first_choice(capsys):
    assert cli.main(LLAMA.split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "llama-3.1-8b, 8.03B parameters, on 8 x v6e (mesh 8x1: heads x context)" in shown
    assert "First choice: weights, cache = bfloat16, bfloat16" in shown
    assert "A prefill chunk of 1,024 rows is shared by heads" in shown
    assert shown.count("kascade") == 16
    assert cli.main("fit llama-3.1-70b --chip v5e".split()) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits. int4, int8: " in shown
    assert "Predicted" not in shown


def test_it_says_why_devices_cannot_share_a_model_in_some_types(tmp_path, capsys):
    """One line per reason, whether or not another pair fits; types that are only too large have none."""
    assert cli.main("fit llama-3.1-8b --devices 16 --weights bfloat16 int8".split()) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("Refused: ") == 1
    assert "Refused: weights bfloat16, int8 with cache int8: an int8 cache cannot be split over devices" in shown
    config = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"fit {tmp_path} --length 512 --weights int4-g64 int8 --devices 2"
    assert cli.main([*flags.split(), "--batch", "100000000"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("Refused: weights int4-g64 with cache bfloat16, int8: ") == shown.count("Refused: ") == 1
    assert "Nothing fits. int8, int8: " in shown


@pytest.mark.parametrize(("model", "said"), [("llama-3.2-1b", True), ("llama-3.2-3b", False)])
def test_it_says_that_shares_are_of_wider_heads(model, said, capsys):
    """llama-3.2-1b has heads of 64, llama-3.2-3b of 128."""
    words = "share of the peak rate as with heads of 128 elements; with 64, prefill takes longer than predicted."
    assert cli.main(f"fit {model} --weights bfloat16".split()) == 0
    assert (words in " ".join(capsys.readouterr().out.split())) == said


def test_a_narrow_terminal_cuts_no_figures_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert cli.main(LLAMA.split()) == 0
    assert "…" not in capsys.readouterr().out


def test_ctrl_c_while_planning_prints_nothing():
    program = (
        "import signal, sys\n"
        "from tessera import __main__ as command\n"
        "from tessera.runtime import planner\n"
        "plan = planner.plan\n"
        "planner.plan = lambda *a, **k: (signal.raise_signal(signal.SIGINT), plan(*a, **k))[1]\n"
        "sys.exit(command.run())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *LLAMA.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_json_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "fit.svg"
    assert cli.main([*LLAMA.split(), "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"heads": 8, "context": 1}
    pair = found["pairs"][0]
    assert pair["total_bytes"] == sum(pair["parts"].values())
    assert "compiled" not in found
    assert ET.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize("refused", [False, True])
def test_compile_compares_with_the_compiler(refused, capsys, monkeypatch):
    """The compiler's answer is invented here; deviceless tests run the real one."""
    asked = []

    def inspect(chip, model, devices, *, limit_s, **call):
        asked.append((chip, model, devices, call["phase"], call["attention"], call["queries"]))
        about = {"model": model, "chip": chip, "mesh": devices, "phase": call["phase"]}
        if refused:
            return StepInspection(compiled=False, error="HBM: full", **about)
        return StepInspection(compiled=True, hbm_bytes=10 << 30, **about)

    monkeypatch.setattr(model_inspection, "inspect_step", inspect)
    assert cli.main([*LLAMA.split(), "--compile"]) == (1 if refused else 0)
    assert asked == [
        ("v6e", "llama-3.1-8b", 8, "decode", "dense", 1024),
        ("v6e", "llama-3.1-8b", 8, "prefill", "kascade", 1024),
    ]
    shown = " ".join(capsys.readouterr().out.split())
    assert ("the compiler: HBM: full" if refused else f"compiled {format_bytes(10 << 30)} (+") in shown
