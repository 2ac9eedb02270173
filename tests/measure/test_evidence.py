"""Records: round trip, appending across kills, refusal of what must not be stored."""

import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.core import hardware
from tessera.measure import evidence


def record(name="dense", samples=(3.0, 1.0, 2.0), **fields):
    what = evidence.What(op="attention", kernel=name, workload="tiny", dtype="float32", config={"block": 8})
    return evidence.make(what, samples, command="python -m lab bench --suite cpu --only tiny", **fields)


def test_make_fills_in_statistics_rates_machine_and_code():
    made = record(samples=(4.0, 1.0, 2.0, 3.0), work={"flops": 10.0, "bytes": 5.0})
    assert made.median == 2.5
    assert made.spread == pytest.approx(1.5)
    assert made.flops_per_s == pytest.approx(4.0)
    assert made.bytes_per_s == pytest.approx(2.0)
    assert made.where.cores >= 1
    assert made.where.memory_bytes > 1 << 28
    assert set(made.where.versions) >= {"jax", "jaxlib", "numpy"}
    assert made.code.commit is None or len(made.code.commit) == 40


def test_a_record_survives_a_round_trip(tmp_path):
    comparison = evidence.Comparison(against="peer", ratio=1.6, interval=(1.5, 1.7), target=">= 1.5", met=True)
    made = record(comparison=comparison, density=(1.0, 0.1), facts={"ttft_s": 0.5})
    evidence.append(tmp_path / "new" / "cpu.jsonl", made)
    (again,) = evidence.read(tmp_path / "new" / "cpu.jsonl")
    assert evidence.encode(again) == evidence.encode(made)
    assert again.comparison.ratio == 1.6
    assert again.density == (1.0, 0.1)
    assert again.schema == evidence.SCHEMA


def test_an_error_is_a_record():
    made = record(samples=(), error="RESOURCE_EXHAUSTED")
    assert made.median is None
    assert evidence.decode(evidence.encode(made)).error == "RESOURCE_EXHAUSTED"
    with pytest.raises(ValueError, match="samples"):
        record(samples=())


@pytest.mark.parametrize("word", [os.getcwd(), os.path.expanduser("~")])
def test_paths_of_this_machine_are_refused(word):
    with pytest.raises(ValueError, match="must not name"):
        record(facts={"note": f"see {word}/x"})


def test_host_name_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "some-host-17")
    with pytest.raises(ValueError, match="some-host-17"):
        record(facts={"note": "ran on some-host-17"})


@pytest.mark.parametrize("name", ["demo", "tiny-host"])
def test_only_whole_words_name_a_host(monkeypatch, name):
    """A record may contain the word demo on a host called demo, and letters of tiny-host inside a longer word."""
    monkeypatch.setattr(platform, "node", lambda: name)
    what = evidence.What(op="demo", kernel="dense", workload="demo_answers", title="untiny-hosted")
    evidence.make(what, [1.0], command="python -m lab demo")
    with pytest.raises(ValueError, match="must not name"):
        evidence.make(what, [1.0], command="python -m lab demo", facts={"note": f"first line\n{os.getcwd()}"})


def test_a_host_name_at_the_start_of_a_line_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "some-host-17")
    for note in ("line\nsome-host-17 said", "some-host-17.example.org", "(some-host-17)"):
        with pytest.raises(ValueError, match="some-host-17"):
            record(facts={"note": note})


def test_not_a_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        record(facts={"loss": float("nan")})


@pytest.mark.parametrize("cut", range(1, 400, 37))
def test_a_cut_last_line_is_left_out_and_repaired(tmp_path, cut):
    path = tmp_path / "cpu.jsonl"
    evidence.append(path, [record("first"), record("second")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = ["first", "second"] if cut == 1 else ["first"]
    assert [r.what.kernel for r in evidence.read(path)] == kept
    evidence.append(path, record("third"))
    assert [r.what.kernel for r in evidence.read(path)] == [*kept, "third"]


def test_a_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "cpu.jsonl"
    evidence.append(path, record())
    path.write_bytes(b'{"what": {}\n' + path.read_bytes())
    with pytest.raises(ValueError, match="line 1"):
        evidence.read(path)


def test_newer_schema_and_unknown_fields_are_refused():
    body = json.loads(evidence.encode(record()))
    with pytest.raises(ValueError, match="update tessera"):
        evidence.decode(json.dumps(body | {"schema": evidence.SCHEMA + 1}))
    with pytest.raises(ValueError, match="colour"):
        evidence.decode(json.dumps(body | {"colour": "red"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"where": None}, "where=None must be an object"),
        ({"how": None}, "how=None must be an object"),
        ({"samples": []}, "must have an error, or samples and their median"),
        ({"median": None}, "must have an error, or samples and their median"),
        ({"samples": [1.0, "fast"]}, "'fast' must be a finite number"),
        ({"samples": [True]}, "True must be a finite number"),
        ({"date": 20261121}, "date=20261121 must be a string"),
        ({"median": 99.0}, "median=99.0 must be the median of its samples"),
        ({"comparison": {"against": "peer", "ratio": "lots"}}, "comparison.ratio='lots' must be .*float"),
        ({"comparison": {"against": "peer", "ratio": 1.0, "interval": [1.0]}}, "comparison.interval=.* must be"),
        ({"comparison": {"against": "peer", "ratio": 1.0, "met": "yes"}}, "comparison.met='yes' must be"),
        ({"comparison": "faster"}, "comparison|argument"),
        ({"how": {"iterations": 2.5}}, "how.iterations=2.5 must be .*int"),
        ({"code": {"commit": 7, "dirty": False}}, "code.commit=7 must be"),
        ({"facts": [1]}, r"facts=\[1\] must be an object"),
        ({"error": 5}, "error=5 must be a string"),
    ],
)
def test_a_malformed_record_is_named_before_anything_reads_it(tmp_path, change, said):
    path = tmp_path / "records.jsonl"
    whole = json.loads(evidence.encode(record()))
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole | change) + "\n")
    with pytest.raises(ValueError, match=f"records.jsonl line 2 is not a record: .*{said}"):
        evidence.read(path)


def test_a_machine_of_numbers_is_named(tmp_path):
    path, whole = tmp_path / "records.jsonl", json.loads(evidence.encode(record()))
    for name, value in {"cpu": 5, "cores": "two", "memory_bytes": None, "versions": []}.items():
        path.write_text(json.dumps(whole | {"where": whole["where"] | {name: value}}) + "\n\n")
        with pytest.raises(ValueError, match=f"records.jsonl line 1 is not a record: where.{name}=.* must be"):
            evidence.read(path)


def test_the_stored_records_are_whole():
    assert evidence.collect(Path(__file__).parents[2] / "evidence")


def test_appending_survives_a_kill(tmp_path):
    """A process that appends in a loop is killed; all lines but the last are whole, and reading raises nothing."""
    path = tmp_path / "cpu.jsonl"
    program = textwrap.dedent("""
        import sys
        from tessera.measure import evidence
        line = sys.stdin.readline()
        record = evidence.decode(line)
        while True:
            evidence.append(sys.argv[1], record)
            print("x", flush=True)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child.stdin.write(evidence.encode(record()) + "\n")
    child.stdin.close()
    for _ in range(5):
        assert child.stdout.readline() == "x\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    before = len(evidence.read(path))
    assert before >= 5
    evidence.append(path, record("after"))
    assert [r.what.kernel for r in evidence.read(path)][before:] == ["after"]


@pytest.mark.parametrize(
    ("op", "command", "found"),
    [
        ("model", "tessera bench --suite cpu --only crossover", ("cpu", "crossover")),
        ("eval task", "python -m lab eval --suite demo", ("demo", "")),
        ("eval real text", "tessera eval --suite real --rival a.json b.json", ("real", "--rival a.json b.json")),
        ("model", "tessera bench --model smollm2", ("own model", "smollm2")),
        ("tune", "tessera tune --workload w --method tpe", ("tpe", "")),
        ("demo", "python -m lab demo", ("", "")),
    ],
)
def test_old_records_get_the_suite_and_case_of_their_command(op, command, found):
    """Schema 1 had neither field."""
    new = replace(record(), what=evidence.What(op=op, kernel="k", workload="w"), command=command, suite="", case="")
    old = json.loads(evidence.encode(new)) | {"schema": 1}
    assert (evidence.decode(json.dumps(old)).suite, evidence.decode(json.dumps(old)).case) == found
    assert evidence.make(new.what, [1.0], command=command).key[-2:] == found


def test_later_records_replace_earlier_ones(tmp_path):
    evidence.append(tmp_path / "b.jsonl", [record("x", (2.0,)), record("y", (5.0,))])
    evidence.append(tmp_path / "c.jsonl", record("x", (1.0,)))
    table = evidence.latest(evidence.collect(tmp_path))
    assert [(key.kernel, r.median) for key, r in table.items()] == [("x", 1.0), ("y", 5.0)]


def elsewhere(made, **where):
    return replace(made, where=replace(made.where, **where))


@pytest.mark.parametrize("where", [{"cpu": "Other 9000"}, {"cores": 96}, {"device": "TPU v6 lite"}])
def test_records_of_another_machine_replace_nothing(where):
    here, there = record("x", (2.0,)), elsewhere(record("x", (1.0,)), **where)
    assert list(evidence.latest([here, there]).values()) == [here, there]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"cpu": "AMD EPYC", "cores": 2}, "AMD EPYC, 2 cores"),
        ({"cpu": "Intel(R) Xeon(R) Processor", "cores": 4}, "Intel Xeon, 4 cores"),
        ({"cpu": "Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "cores": 8}, "Intel Core i7-8550U @ 1.80GHz, 8 cores"),
        ({"device": "TPU v6 lite"}, "TPU v6 lite"),
        ({"device": "TPU v6 lite", "count": 4}, "4 x TPU v6 lite"),
    ],
)
def test_a_machine_in_words(where, words):
    assert elsewhere(record(), **where).where.machine == words


def crash(made):
    return replace(made, what=replace(made.what, kernel="", dtype=""), samples=(), median=None, error="no peers")


def test_a_good_run_of_the_same_command_replaces_a_crash():
    good, bad = record("x"), crash(record("x"))
    assert list(evidence.latest([bad, good]).values()) == [good]
    assert list(evidence.latest([good, bad]).values()) == [good, bad]
    assert list(evidence.latest([bad, replace(good, case="other")]).values())[0] == bad
    assert list(evidence.latest([bad, elsewhere(good, cores=96)]).values())[0] == bad


def test_chip_table_is_found_by_name_and_kind():
    assert hardware.chip("v6e") is hardware.chip("TPU v6 lite")
    assert hardware.chip("NVIDIA H200").bytes_per_s == 4800e9
    assert hardware.chip("abacus") is None
    names = [kind for chip in hardware.CHIPS for kind in (chip.name, *chip.device_kinds)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (
            "cpu family : 26\nmodel : 2\nmodel name : AMD EPYC\n\nmodel : 9\nmodel name : other",
            "AMD EPYC family 26 model 2",
        ),
        (
            "cpu family : 6\nmodel : 143\nmodel name : Intel(R) Xeon(R) Platinum 8481C",
            "Intel(R) Xeon(R) Platinum 8481C",
        ),
        ("processor : 0\nModel : Raspberry Pi 5", "Raspberry Pi 5"),
        ("model name : AMD EPYC", "AMD EPYC"),
        ("model name :\nprocessor : 0", ""),
    ],
)
def test_processors_of_one_name_are_told_apart(info, name):
    assert hardware.cpu_model(info) == name


def test_cpu_is_looked_up():
    cpu = hardware.cpu()
    assert cpu.model
    assert 1 <= cpu.cores <= os.cpu_count()
