"""The process of `tessera serve`: signals, flags, keys and pinned files."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
from live_server import CONTEXT

from tessera.runtime.pool import Paging
from tessera.runtime.requests import End, Request
from tessera.serve import service, warm
from tessera.serve.edge import server
from tessera.serve.metrics import Metrics
from tessera.serve.service import Service


@contextmanager
def serving(folder, until):
    """Run `tessera serve`; yield the process and its address once it has printed a line that begins with `until`."""
    flags = ["--port", "0", "--slots", "1", "--name", "tiny", "--exact"]  # fewer programs to compile
    command = [sys.executable, "-m", "tessera", "serve", str(folder), *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    url = None
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            for line in process.stderr:
                url = next((word.rstrip(",") for word in line.split() if word.startswith("http://")), url)
                if line.startswith(until):
                    break
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_after_the_open_answers(model, number):
    server = serving(model.source, "ready")
    with server as (process, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "prompt": "x"}
        events = iter(client.completions.create(**asked, n=8, max_tokens=200, stream=True, temperature=0))
        next(events)
        late = socket.create_connection(("127.0.0.1", httpx.URL(url).port))
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{")
        for _ in range(2 if number == signal.SIGHUP else 1):  # a terminal that closes sends two
            process.send_signal(number)
            time.sleep(0.1)
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**asked)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert [event.choices[0].finish_reason for event in events][-1] in ("stop", "length")
        late.sendall(b'"prompt": "x"}')
        with late:
            assert late.recv(12) == b"HTTP/1.1 503"  # not cut, though no answer was open any more
        said = process.stderr.read()
        assert (process.wait(20), "Traceback" in said) == (0, False), said


def unwarmed(model, **options):
    found = Service(lambda: model.engine(slots=1, num_keys=CONTEXT), metrics=Metrics(), **options)
    found.start(lambda engine: None)
    while not found.ready:
        time.sleep(0.01)
    return found


def test_stopping_waits_until_the_pages_are_on_disk(model, monkeypatch):
    monkeypatch.setattr(service, "STOP_S", 0.1)
    found, closed = unwarmed(model, queue=1), []
    monkeypatch.setattr(found._engine, "close", lambda: (time.sleep(1.0), closed.append(True)))
    found.stop()
    assert closed


def test_with_several_keys_and_no_queue_one_request_runs(model):
    found, events = unwarmed(model, queue=0, shared=True), []
    found.submit((Request(prompt=[1], max_new_tokens=1), events.append))
    while not any(isinstance(event, End) for event in events):
        time.sleep(0.01)
    found.stop()


def test_a_signal_in_the_middle_of_a_write_to_the_log_is_not_lost(caplog):
    """Python runs signal handlers inside writes too, and a write inside a write raises RuntimeError."""
    work = SimpleNamespace(draining=False, open=0, alive=True)
    work.drain = lambda: setattr(work, "draining", True)
    found = server.Server(server.configured(lambda *_: None), work)

    class Writing(logging.Handler):
        def emit(self, record):
            raise RuntimeError("reentrant call")

    handler = Writing()
    server.logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO):
            found.handle_exit(signal.SIGTERM, None)
    finally:
        server.logger.removeHandler(handler)
    assert (work.draining, found.should_exit) == (True, True)


def test_ctrl_c_ends_the_warm_up_at_once(model):
    with serving(model.source, "tiny at") as (process, _):
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said = process.stderr.read()
        assert (process.wait(20), "Traceback" in said) == (0, False), said
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", ""], '--host "" is empty'),
        (["--name", ""], '--name "" is empty'),
        (["--name", "mod\udce9le"], r"the model's name 'mod\udce9le' cannot be shown"),
        (["--name", "\x1b[31mred"], r"the model's name '\x1b[31mred' cannot be shown"),
        (["--pin"], "--pin names no file"),
        (["--cors"], "--cors names no origin"),
        (["--cors", "example.org"], "--cors 'example.org' is no origin"),
        (["--pin", ""], "--pin names no file"),
        (["--spill-gb", "nan"], "--spill-gb nan must be"),
        (["--port", "99999"], "--port 99999"),
        (["--context", "100000"], "exceeds the model's context"),
        (["-np", "0"], "--slots 0"),
        (["-m", "other"], "given twice"),
        (["--spill", __file__], "--spill"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(model, flags, said, capsys):
    from tessera.cli.main import main

    assert main(["serve", model.source, *flags]) == 2
    assert said in capsys.readouterr().err


def test_pins_that_leave_no_room_for_a_request_are_refused_at_once(model):
    paging = Paging(num_pages=9, page=64, unit=64, sizes=(64,), batches=(1,))
    with pytest.raises(ValueError, match="--pin keeps 4 pages .2 times.* has 3"):
        warm.start(model, context=300, slots=1, queue=1, paging=paging, pins=[[5] * 130], tenants=("one", "two")).stop()


def test_a_file_of_keys_may_come_from_any_editor(tmp_path):
    from tessera.cli.serve import Serve

    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n# team two\r\ntwo\r\none\r\n")
    assert Serve(api_key_file=file).keys() == ("one", "two")
    for wrong, said in (
        ("one".encode("utf-16"), "UTF-8"),
        (b" \n", "no key"),
        ("k\u00e9y".encode(), "outside printable ASCII"),
    ):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"{file} .*{said}"):
            Serve(api_key_file=file).keys()


def test_addresses_of_this_machine_alone_need_no_keys():
    from tessera.cli.serve import Serve

    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert Serve(host=host).keys() == ()
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(ValueError, match=f"--host {host} may let other machines connect"):
            Serve(host=host).keys()


def test_a_port_in_use_is_named_before_the_model_is_loaded(capsys):
    from tessera.cli.main import main

    with server.listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    assert f"port {port} (Address already in use): use another --port" in capsys.readouterr().err


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1 port 0 .*: use another --host"):
        server.listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("long.txt", b"x" * (CONTEXT + 1), "has 258 tokens"),
        ("short.txt", b"x" * 10, "has 11 tokens, but needs at least 64"),
        ("binary.txt", bytes(range(256)), "byte 128 is not UTF-8"),
        ("list.json", b"[1]", "not a JSON object"),
        ("other.json", b'{"messages": [{"role": "user", "content": "x"}], "foo": 1}', "unknown field foo"),
        ("deep.json", b"[" * 100_000, "recursion"),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused_by_name(model, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        warm.pinned(model, [tmp_path / name], CONTEXT, 64)
    assert f"--pin {tmp_path / name}" in str(refused.value)


def test_a_pin_has_the_tokens_that_a_request_with_its_text_has(model, tmp_path):
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\n" * 20)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two " * 20}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    text, chat = warm.pinned(model, [tmp_path / "marked.txt", tmp_path / "chat.json"], CONTEXT, 64)
    assert text == model.tokenizer.encode("one\r\n" * 20)
    assert chat == model.tokenizer.encode_chat([{"role": "user", "content": "one \n" + "two " * 20}])
