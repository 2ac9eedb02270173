"""Untrusted chat templates end within limits of time and memory, and a failure is one printable sentence."""

import copy
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from gguf_files import small_file

from tessera.cli.main import main
from tessera.core.child import Worker
from tessera.models.text import chat_template
from tessera.models.text.chat_template import Renderer
from tessera.models.text.tokenizer import Tokenizer, byte_tokenizer

USER = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def with_template(source: str) -> Tokenizer:
    return Tokenizer(backend=byte_tokenizer().backend, chat_template=source)


def refusal(tokenizer: Tokenizer) -> str:
    with pytest.raises(ValueError, match="chat template cannot render the conversation: ") as caught:
        tokenizer.render_chat(USER)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{{ cycler|tojson }}", "not JSON serializable"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "Error"),
        ("{{ raise_exception('\\x1b[2J' ~ 'x' * 9999) }}", r"\x1b[2J"),
        ("{{ raise_exception(messages) }}", "Hi"),
        ("{{ 'x'*3000000000 }}", "memory"),
        ("{% set x = 'x'*3000000000 %}", "memory"),
        ("{{ '%3000000000d' % 1 }}", "memory"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than 1,048"),
    ],
)
def test_a_template_that_fails_is_refused(source, named):
    tokenizer = with_template(source)
    assert named in refusal(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"  # the tokenizer still works
    assert tokenizer.render_chat(USER) == "Hi"


@pytest.mark.parametrize("source", [LOOPS, "{{ 9**(9**9) }}"])
def test_a_template_that_never_ends_is_ended(monkeypatch, source):
    monkeypatch.setattr(chat_template, "LIMIT_S", 1.0)
    tokenizer = with_template(source)
    assert "over 1 s of processor time" in refusal(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenizer.render_chat(USER) == "Hi"


def test_long_conversations_are_rendered_whole():
    text = "".join(map(chr, [0xE9, 0x1F600, 0x0A, 0x2028, 0x22])) * 400_000
    assert with_template("{{ messages[0].content }}{{ x }}").render_chat([{"content": text}], x=1) == text + "1"


def test_one_process_per_tokenizer_ends_with_it():
    tokenizer = with_template("{{ messages[0].content }}")
    assert tokenizer._renderer._worker._process is None  # no process before the first rendering
    tokenizer.render_chat(USER)
    process = tokenizer._renderer._worker._process
    tokenizer.render_chat(USER)
    assert tokenizer._renderer._worker._process is process
    assert copy.deepcopy(tokenizer._renderer)._worker._process is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del tokenizer
        gc.collect()
    assert process.returncode == 0


def test_an_interrupted_rendering_leaves_no_answer_behind():
    renderer = Renderer()
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            renderer.render("{% for i in range(99999) %}{% for j in range(200) %}{% endfor %}{% endfor %}", {})
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert renderer.render("{{ x }}", {"x": 2}) == "2"


def test_a_conversation_whose_worker_is_killed_is_rendered_by_another():
    renderer = Renderer()
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    worker = renderer._worker._process
    worker.send_signal(signal.SIGSTOP)  # so that it is killed with the request
    threading.Timer(0.5, worker.kill).start()
    assert renderer.render("{{ x }}", {"x": 2}) == "2"


def test_a_worker_that_gets_no_processor_time_is_not_the_templates_fault(monkeypatch):
    monkeypatch.setattr(chat_template, "WAIT_S", 1.0)
    renderer = Renderer()
    assert renderer.render("{{ x }}", {"x": 1}) == "1"
    renderer._worker._process.send_signal(signal.SIGSTOP)
    with pytest.raises(chat_template.Unavailable, match="try again"):
        renderer.render("{{ x }}", {"x": 2})
    monkeypatch.undo()
    assert renderer.render("{{ x }}", {"x": 3}) == "3"


@pytest.mark.parametrize("command", ["false", "no such program"])
def test_a_worker_that_does_not_start_is_not_the_templates_fault(command):
    renderer = Renderer()
    renderer._worker = Worker([command], ready_s=5)
    with pytest.raises(chat_template.Unavailable, match="try again"):
        renderer.render("{{ x }}", {"x": 1})


PARENT = f"""
import sys, time
from tessera.models.text import chat_template
chat_template.LIMIT_S = 1.0
renderer = chat_template.Renderer()
renderer.render("", {{}})
print(renderer._worker._process.pid, flush=True)
if sys.argv[1] == "busy":
    renderer.render({"{{ 9**(9**9) }}"!r}, {{}})
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_process_ends_after_its_parent_was_killed(state):
    """An idle worker sees its input end; a busy worker, which reads nothing, is ended by a timer."""
    with subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)  # until the worker is busy
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_worker_imports_no_jax():
    program = "import sys, template_worker; assert not {'jax', 'numpy', 'tessera'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(chat_template.__file__).parent)


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    small_file(tmp_path)
    path = tmp_path / "whole.gguf"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"{{ messages }}", b"{{ 1/0      }}"))
    assert main(["generate", "--model", str(path), "--chat", "hi"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "error: the chat template cannot render the conversation: ZeroDivisionError: division by zero"


GOES_ON = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is string else m.content[-1].text }}<|end|>"
GOES_ON += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize("content", ["Well, ", [{"type": "text", "text": "Well, "}], "</think>a  <|end|>"])
def test_a_message_that_goes_on_ends_the_text(content):
    tokenizer = with_template(GOES_ON)
    chat = [*USER, {"role": "assistant", "content": content}]
    last = content if isinstance(content, str) else content[-1]["text"]
    assert tokenizer.render_chat(chat, continue_final=True) == "<|user|>Hi<|end|><|assistant|>" + last
    assert tokenizer.encode_chat(chat, continue_final=True) == [259, *b"Hi", 261, 260, *last.encode()]


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        (
            GOES_ON.replace("m.content if", "m.content.split('</think>')[-1] if"),
            "<think>a</think>b",
            "leaves out a part",
        ),
        ("{{ messages[0].content }}", "Well", "does not write the last message"),
        (GOES_ON, [{"type": "image"}], "not a text part"),
    ],
)
def test_a_message_that_cannot_go_on_is_refused(source, content, said):
    chat = [*USER, {"role": "assistant", "content": content}]
    for write in (with_template(source).render_chat, with_template(source).encode_chat):
        with pytest.raises(ValueError, match=said):
            write(chat, continue_final=True)
