"""Several processes over loopback: one answer, each holds its share, and all end together. Two devices per process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes_subject
import pytest
from addresses import free_address
from tiny import CONFIG, random_params, save_tiny

import tessera
from tessera.cli import main as cli
from tessera.core import processes
from tessera.core.processes import join, place
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import files_digest, save_folder
from tessera.models.files.families import render_config
from tessera.models.files.source import open_source
from tessera.models.files.tensor_file import write_file
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.models.weights import expected_shapes, num_parameters

SUBJECT = processes_subject.__file__


@pytest.fixture
def start():
    """Return a function that starts a Python command with two devices; the fixture ends and closes what it started."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = []

    def begin(*command: object) -> subprocess.Popen:
        running.append(subprocess.Popen([sys.executable, *map(str, command)], env=environment, **pipes))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def save_coarse(folder: Path, config: ModelConfig) -> Path:
    """Write a model of which int8 keeps only a few steps: in each row of o and down, the last weight is large.

    That weight meets a zero, so the float model ignores it. A process that took the scales from its own columns alone
    would keep more steps, and answer otherwise.
    """
    params = random_params(config)
    layers = params.layers
    layers.v[:, -config.head_dim :] = layers.up[:, -1] = 0
    layers.o[..., -1] = layers.down[..., -1] = 10
    save_folder(folder, params, config, byte_tokenizer())
    return folder


@pytest.mark.parametrize("weights", [None, pytest.param("int8", marks=pytest.mark.exhaustive)])  # parts: test_mesh.py
def test_two_processes_answer_as_one(tmp_path, start, weights):
    config = replace(CONFIG, num_layers=1, num_heads=8, num_kv_heads=4)
    folder = (save_coarse if weights else save_tiny)(tmp_path / "model", config)
    command = ("-m", "tessera", "generate", "--model", folder, "--tokens", "-n", 4, "--coordinator", free_address())
    command += ("--weights", weights) if weights else ()
    prompts = ["1 2 3", "7,8,9,10"]
    running = [start(*command, "--processes", 2, "--process", index, *prompts) for index in (0, 1)]
    done = [(*process.communicate(timeout=300), process.returncode) for process in running]
    answers = tessera.load(folder, weights=weights).generate([[1, 2, 3], [7, 8, 9, 10]], max_new_tokens=4)
    text = "".join(f"--- {index}\n{' '.join(map(str, answer.tokens))}\n" for index, answer in enumerate(answers))
    assert done == [(text, "", 0), ("", "", 0)]


def test_a_process_reads_only_its_share(tmp_path, start):
    """A process of two grows by half of the model and one tensor; the whole model would not fit the limit."""
    config = replace(CONFIG, num_heads=8, num_kv_heads=4, hidden_size=1024, intermediate_size=4096)
    shapes = expected_shapes(config)
    (tmp_path / "config.json").write_text(json.dumps(render_config(config, "float32", None)))
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    values = np.random.default_rng(0).normal(size=largest).astype(np.float32)
    specs = {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}
    write_file(tmp_path / "model.safetensors", specs, (values[: int(np.prod(s))].reshape(s) for s in shapes.values()))
    address = free_address()
    running = [start(SUBJECT, address, 2, index, "load", tmp_path) for index in (0, 1)]
    out, errors = running[0].communicate(timeout=300)
    assert running[1].wait(60) == 0
    grown, held, total = map(int, out.split())
    assert total == 4 * num_parameters(config) > 150e6, errors
    assert 0.5 * total <= held < 0.51 * total
    assert 0.9 * held < grown < held + 4 * largest + (24 << 20) < 0.8 * total


@pytest.mark.parametrize(
    ("sent", "to", "status", "words"),
    [
        (signal.SIGKILL, 1, 2, "process 0 ends, because process 1 was killed or lost its connection"),
        (signal.SIGTERM, 0, 2, "process 1 ends, because process 0 was killed or lost its connection"),
        (signal.SIGINT, 0, 130, "process 1 ends, because process 0 was interrupted"),
    ],
)
def test_all_processes_end_when_one_does(start, sent, to, status, words):
    address = free_address()
    running = [start(SUBJECT, address, 2, index, "loop") for index in (0, 1)]
    assert running[0].stdout.readline() == "summed\n"  # without the lines that gloo prints
    running[to].send_signal(sent)
    started_s = time.monotonic()
    with ThreadPoolExecutor() as pool:  # a full pipe would stop a process
        ended = [pool.submit(process.communicate, timeout=30) for process in running]
        assert running[1 - to].wait(30) == status
        took_s = time.monotonic() - started_s
    assert ended[1 - to].result()[1].splitlines()[-1] == words
    assert running[to].returncode == (130 if sent == signal.SIGINT else -sent)
    assert took_s < 10  # JAX itself needs 100 s, or hangs


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--process", "1"], "--process needs --coordinator HOST:PORT"),
        (["--coordinator", "localhost:7000"], "--coordinator localhost:7000 needs --processes too"),
        (["--coordinator", "localhost", "--processes", "2", "--process", "0"], "must be HOST:PORT, like 10.0.0.1:7000"),
        (["--coordinator", "h:7000", "--processes", "1", "--process", "0"], "--processes 1 must be at least 2"),
        (["--coordinator", "h:7000", "--processes", "2", "--process", "2"], "--process 2 must be between 0 and 1"),
        (
            ["--coordinator", "{}", "--processes", "2", "--process", "1"],
            "process 0 did not answer .* within 0.5 s: start",
        ),
        (["--coordinator", "{}", "--processes", "3", "--process", "0"], "1, 2 of 3 did not connect"),
    ],
)
def test_bad_flags_and_a_coordinator_that_does_not_answer(capsys, flags, words):
    flags = [flag.format(free_address()) for flag in flags]
    assert cli.main(["generate", *flags, "--wait-s", "0.5", "hello"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(words, line), line


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "-1", "0"])
def test_a_wait_that_is_no_time_is_refused(capsys, seconds):
    flags = ["--coordinator", free_address(), "--processes", "2", "--process", "0", f"--wait-s={seconds}"]
    assert cli.main(["generate", *flags, "hello"]) == 2
    assert re.search(r"^error: --wait-s \S+ must be above 0 and at most 86,400\n$", capsys.readouterr().err)


def meet(address: str, facts: list[dict[str, str]], indices: list[int], counts: list[int]) -> list[str]:
    """Run `join` of several processes, which must all be refused; return their errors."""
    errors: dict[int, str] = {}

    def one(number: int) -> None:
        with pytest.raises(ValueError) as raised:
            join(place(address, counts[number], indices[number]), facts[number], 5)
        errors[number] = str(raised.value)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(facts))]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [errors[number] for number in range(len(facts))]


def test_processes_with_different_models_are_refused(tmp_path):
    one, other = save_tiny(tmp_path / "a"), save_tiny(tmp_path / "b", replace(CONFIG, max_positions=256))
    digests = [files_digest(open_source(folder)) for folder in (one, other, save_tiny(tmp_path / "c"))]
    assert digests[0] == digests[2] != digests[1]
    facts = [{"model": digest} for digest in digests[:2]]
    words = "process 1 has a different model from process 0: give all processes the same model"
    assert meet(free_address(), facts, [0, 1], [2, 2]) == [words, words]


def test_numbers_that_do_not_fit_are_refused():
    words = "process 1 has --processes 3, but process 0 has 2: give every process the same number"
    assert meet(free_address(), [{}, {}], [0, 1], [2, 3]) == [words, words]
    words = "two processes were given --process 1: number them 0 to 2"
    assert meet(free_address(), [{}] * 3, [0, 1, 1], [3] * 3) == [words] * 3


def test_strangers_at_the_port_are_ignored():
    address = free_address()
    host, port = address.split(":")
    heard = []

    def stranger() -> None:
        time.sleep(0.05)
        strange = (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"tessera": 1, "facts": {}}\n',
            b"[1]\n",
            b"\xff" * 20_000,
            b"[" * 16_384,
            b"",
        )
        for said in strange:
            with suppress(ConnectionError), socket.create_connection((host, int(port))) as line:
                line.sendall(said)
                heard.append(line.recv(100) if said else b"")

    thread = threading.Thread(target=stranger)
    thread.start()
    words = "process 1 has a different prompt from process 0: give all processes the same prompt"
    assert meet(address, [{"prompt": "a"}, {"prompt": "b"}], [0, 1], [2, 2]) == [words, words]
    thread.join()
    assert heard
    assert not any(heard)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_refused(offset):
    host, port = free_address().split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port) + offset))
        taken.listen()
        words = f"process 0 cannot listen at {host}:{int(port) + offset} .*choose a --coordinator port"
        with pytest.raises(ValueError, match=words):
            join(place(f"{host}:{port}", 2, 0), {}, 1)


def test_an_address_that_is_no_coordinator_is_refused():
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]

        def answer() -> None:
            with other.accept()[0] as line:
                line.sendall(b"SSH-2.0\r\n")

        threading.Thread(target=answer).start()
        with pytest.raises(ValueError, match="is not process 0 of a tessera command: correct the address"):
            join(place(f"localhost:{port}", 2, 1), {}, 3)


@pytest.mark.parametrize("said", [b"[]\n", b"null\n", b"{}\n", b'{"error": [1]}\n', b"[" * 16_384])
def test_a_verdict_that_is_none_is_refused(said):
    with socket.create_server(("localhost", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as line:
                line.recv(1000)
                line.sendall(said)

        threading.Thread(target=answer).start()
        with pytest.raises(ValueError, match="is not process 0 of a tessera command: correct the address"):
            join(place(f"localhost:{other.getsockname()[1]}", 2, 1), {}, 3)


def test_a_stranger_that_drips_bytes_cannot_extend_the_wait():
    """Bytes that arrive one by one, or one stranger after another, would restart a plain socket's timeout."""
    address = free_address()
    host, port = address.split(":")
    ended = threading.Event()

    def drip() -> None:
        while not ended.is_set():
            with suppress(OSError), socket.create_connection((host, int(port))) as line:
                while not ended.wait(0.05):
                    line.sendall(b"1")

    thread = threading.Thread(target=drip)
    thread.start()
    started_s = time.monotonic()
    try:
        with pytest.raises(ValueError, match="1 of 2 did not connect within 0.5 s"):
            join(place(address, 2, 0), {}, 0.5)
        assert time.monotonic() - started_s < 5
    finally:
        ended.set()
        thread.join()


def test_modules_of_processes_do_not_start_jax():
    program = "import sys, tessera.core.processes, tessera.cli.processes; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert Path(processes.__file__).is_file()
