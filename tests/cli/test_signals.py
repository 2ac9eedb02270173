"""Ctrl-C, a closed pipe, a full disk and a small address space end a command with one sentence or none.

`python tests/interrupted.py` stops all long commands at random times; this file tests a few fixed cases.
"""

import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import interrupted
import pytest

LIMIT_S = 60.0
"""Seconds in which a command must end. Other tests share the cores; `tests/interrupted.py` allows only 3 s."""

PROGRAM = """
import gc, hashlib, sys, time
from tessera.core import interrupt
with interrupt.handled():
    interrupt.defer()
    try:
        gc.callbacks.append(lambda *_: time.sleep(0.01))
        print("ready", flush=True)
        WORK
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
"""
WORK = {
    "a loop that asks": ("while True: gc.collect(); interrupt.check()", b"interrupted\n"),
    "a wait": ("with interrupt.at_once(): sys.stdin.readline()", b"interrupted\n"),
    "Python that does not ask": ("while True: pass", b"interrupted\n"),
    "a callback that loses it": ("while True: gc.collect()", b"interrupted in the middle of a step\n"),
    "a long call": (
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
        b"interrupted in the middle of a step\n",
    ),
    "a slow end, and Ctrl-C again": (
        "while not interrupt.asked(): pass\n        print('ending', flush=True)\n        time.sleep(600)",
        b"interrupted twice: exiting at once\n",
    ),
}


def test_ctrl_c_ends_every_kind_of_work_once():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    programs = {name: PROGRAM.replace("WORK", work) for name, (work, _) in WORK.items()}
    processes = {name: subprocess.Popen([sys.executable, "-c", text], **pipes) for name, text in programs.items()}
    for process in processes.values():
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
    again = processes["a slow end, and Ctrl-C again"]
    assert again.stdout.readline() == b"ending\n"
    again.send_signal(signal.SIGINT)
    for name, process in processes.items():
        _, errors = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, errors) == (130, WORK[name][1]), name


def test_a_library_user_keeps_pythons_own_handler():
    program = "import signal, tessera\nfrom tessera.core import interrupt\ninterrupt.check()\n"
    program += "with interrupt.at_once(): pass\nassert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("name", "at_s"), [("generate", 0.0), ("generate", 3.0), ("train", 2.5)])
def test_ctrl_c_ends_a_command_and_damages_nothing(name, at_s, tmp_path):
    end = interrupted.stop(name, tmp_path, at_s)
    assert not interrupted.faults(end, tmp_path, LIMIT_S), end


def test_a_kill_damages_nothing(tmp_path):
    end = interrupted.stop("train", tmp_path, 3.0, signal.SIGKILL)
    assert not interrupted.faults(end, tmp_path, LIMIT_S, signal.SIGKILL), end


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["generate", "--help"], ["fit", "llama-3.1-8b"]])
def test_a_closed_pipe_ends_the_command_silently(argv):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", "tessera", *argv], stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_full_disk_behind_standard_output_is_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tessera", "--version"], stdout=full, stderr=subprocess.PIPE)
    said = b"error: cannot write to standard output (No space left on device): redirect it elsewhere\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("argv", "redirection", "status", "out", "err"),
    [
        ("--version", ">&-", 2, "", "error: standard output is closed: redirect it to a file or to /dev/null\n"),
        ("generate -", "<&-", 2, "", "error: prompt 0 is empty: pass some text\n"),
        ("chat", "<&-", 0, "", ""),
        ("nonsense", "2>&-", 2, "", ""),
        ("--version", "<&- 2>&-", 0, f"tessera {version('tessera-attention')}\n", ""),
    ],
)
def test_closed_streams(argv, redirection, status, out, err):
    command = f"exec {shlex.quote(sys.executable)} -m tessera {argv} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_ctrl_c_while_importing_is_a_sentence():
    with subprocess.Popen(
        [sys.executable, "-m", "tessera", "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while process.poll() is None and int(field(process.pid, "Threads")) < 2:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"interrupted\n"
    assert process.returncode == 130


def test_ctrl_c_inside_an_exec_has_the_same_exit_code(tmp_path):
    (tmp_path / "stopped.py").write_text(
        "import sys\nfrom tessera import __main__ as command\n"
        "command._answer = lambda module: exec('raise KeyboardInterrupt')\nsys.exit(command.run())\n"
    )
    done = subprocess.run([sys.executable, "-m", "stopped"], cwd=tmp_path, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def field(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as status:
        return next(line.split()[1] for line in status if line.startswith(f"{name}:"))


def test_too_small_an_address_space_is_a_sentence():
    command = f"ulimit -v {1 << 20}; exec {shlex.quote(sys.executable)} -m tessera generate x"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: this process may use 1 GiB of address space")
