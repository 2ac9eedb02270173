"""The GPU script's parent: an item that hangs or dies fails alone; a stop or a full disk counts against no item."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lab.gpu import __main__ as program
from lab.gpu import supervisor
from tessera.measure import evidence

PLANTED = """
import os
import resource
import signal
import time

from jax.errors import JaxRuntimeError

from tessera.measure.evidence import What


def fine():
    return {"samples": [1.0], "unit": "good", "facts": {"pid": os.getpid()}}


def refuse():
    raise ValueError("not this call")


def fault():
    raise JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def no_kernel():
    raise RuntimeError("No available kernel")


def escape():
    raise Exception("of no kind that anybody knows")


ITEMS = {"good": fine, "hangs": lambda: time.sleep(600), "dies": os.abort, "refuses": refuse}
ITEMS |= {"faults": fault, "before": fine, "has none": no_kernel, "after": fine, "escapes": escape, "last": fine}


def run(session):
    for name, act in ITEMS.items():
        session.attempt(What(op="planted", kernel="k", workload=name), act, 1.0 if name == "hangs" else 100.0)


def waits(session):
    session.attempt(What(op="planted", kernel="k", workload="waits"), lambda: time.sleep(600), 500.0)


def says_and_waits(session):
    session.attempt(What(op="planted", kernel="k", workload="says"), fine)
    waits(session)


def stopped(session):
    stop = lambda: os.kill(os.getpid(), signal.SIGTERM)
    session.attempt(What(op="planted", kernel="k", workload="stopped"), stop)


def fills_the_disk(session):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (session.out.stat().st_size, resource.RLIM_INFINITY))
    session.attempt(What(op="planted", kernel="k", workload="first"), fine)
    session.attempt(What(op="planted", kernel="k", workload="second"), lambda: limit() or fine())


def has_no_room(session):
    def full():
        raise OSError(28, "No space left on device")

    session.attempt(What(op="planted", kernel="k", workload="no room"), full)


def outside(session):
    os.abort()
"""


def supervise(folder: Path, function: str = "run", limit_s: float = 400.0) -> tuple[bool, list[evidence.Record]]:
    """Supervise a planted piece; return (whether it got through, the records of this run)."""
    (folder / "planted.py").write_text(PLANTED)
    out = folder / "x.jsonl"
    before = len(evidence.read(out)) if out.exists() else 0
    request = {"pieces": [f"planted:{function}"], "out": str(out), "dry": True, "again": False, "since": before}
    whole = supervisor.supervise(request, limit_s, [str(folder)])
    return whole, evidence.read(out)[before:] if out.exists() else []


def test_what_hangs_dies_or_faults_costs_itself_alone(tmp_path):
    whole, found = supervise(tmp_path)
    assert whole
    crashing = ["hangs", "dies", "faults", "escapes"]
    in_order = ["good", "hangs", "dies", "refuses", "faults", "before", "has none", "after", "escapes", "last"]
    # The crashed items run once more, after all others.
    assert [record.what.workload for record in found] == in_order + crashing
    errors = {record.what.workload: record.error for record in found}
    pids = {record.what.workload: record.facts["pid"] for record in found if record.error is None}
    assert set(pids) == {"good", "before", "after", "last"}
    assert errors["hangs"] == "hung after 1 s"
    assert errors["dies"].startswith("crashed: ended with status -6")
    assert errors["refuses"] == "ValueError: not this call"
    assert errors["faults"] == "crashed: JaxRuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert errors["has none"] == "RuntimeError: No available kernel"
    assert errors["escapes"] == "crashed: Exception: of no kind that anybody knows"
    assert pids["before"] == pids["after"]
    assert len(set(pids.values())) == 3  # after a crash or fault, items run in a new process
    whole, found = supervise(tmp_path)
    assert whole
    # Hangs, crashes and faults get no third try.
    assert [record.what.workload for record in found] == ["refuses", "has none"]
    assert not (tmp_path / "x.now").exists()


def test_what_the_end_of_the_time_cuts_short_is_nobodys_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "OVERTIME_S", 0.0)
    assert supervise(tmp_path, "waits", 12.0) == (True, [])
    assert not (tmp_path / "x.now").exists()


def test_a_stop_by_a_signal_is_nobodys_fault(tmp_path):
    """The child is stopped here, as all processes of a cancelled job are."""
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            supervise(tmp_path, "stopped")
        assert not (tmp_path / "x.now").exists()
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_script_is_stopped_like_by_ctrl_c(number, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    out = tmp_path / "x.jsonl"
    program = (
        f"import signal; signal.signal({int(number)}, signal.{'default_int_handler' if number == 2 else 'SIG_DFL'})\n"
        "import sys; from lab.gpu import __main__ as m; whole = m.supervise\n"
        f"m.supervise = lambda r, s: whole({{**r, 'pieces': ['planted:says_and_waits']}}, s, [{str(tmp_path)!r}])\n"
        f"sys.exit(m.main(['--dry', '--out', {str(out)!r}]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    while not out.exists() or not evidence.read(out) or '"waits"' not in out.with_suffix(".now").read_text():
        assert parent.poll() is None
        time.sleep(0.1)
    parent.send_signal(number)
    assert parent.communicate()[1] == "interrupted: the same command resumes where it stopped\n"
    assert parent.returncode == 130
    assert not out.with_suffix(".now").exists()


def test_what_cannot_be_written_ends_the_run_and_blames_no_item(tmp_path, monkeypatch):
    with pytest.raises(supervisor.Unwritable, match=r"x.* cannot be written: File too large"):
        supervise(tmp_path, "fills_the_disk")
    assert not (tmp_path / "x.now").exists()
    assert [record.what.workload for record in evidence.read(tmp_path / "x.jsonl")] == ["first"]

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor.files, "replace_text", full)  # the parent cannot write either
    with pytest.raises(supervisor.Unwritable, match=r"x.now cannot be written: No space left on device"):
        supervise(tmp_path)
    assert not (tmp_path / "x.now").exists()


def test_what_cannot_be_written_is_one_line_with_the_free_space(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert program.main(["--dry"]) == 2
    (tmp_path / "file").write_text("")
    assert program.main(["--dry", "--out", str(tmp_path / "file" / "x.jsonl")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("error: ")
        assert " are free in " in line
        assert line.endswith("the same command resumes where it stopped")


def test_an_item_without_room_on_the_disk_is_tried_by_every_run(tmp_path):
    for _ in range(3):
        whole, [record] = supervise(tmp_path, "has_no_room")
        assert whole
        assert record.error.startswith("no room on the disk: OSError")


def test_a_child_that_ends_outside_of_every_item_ends_the_script(tmp_path, capsys):
    assert supervise(tmp_path, "outside") == (False, [])
    assert "while no item ran" in capsys.readouterr().err


def test_no_child_outlives_its_parent(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    out = tmp_path / "x.jsonl"
    request = {"pieces": ["planted:says_and_waits"], "out": str(out), "dry": True, "again": False, "since": 0}
    program = "from lab.gpu import supervisor\n"
    program += f"supervisor.supervise({request!r}, 400.0, [{str(tmp_path)!r}])"
    parent = subprocess.Popen([sys.executable, "-c", program])
    while not out.exists() or not evidence.read(out):
        assert parent.poll() is None
        time.sleep(0.1)
    child = int(evidence.read(out)[0].facts["pid"])
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        time.sleep(0.1)  # if the child lives on, this test hangs
