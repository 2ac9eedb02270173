"""Clients: lm_eval, `tessera chat --url`, the page in a browser; and servers of others."""

import base64
import hashlib
import json
import os
import re
import signal
import socket
import threading
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import browser
import httpx2 as httpx
import jax
import numpy as np
import pytest
from live_server import KEY

from tessera.chat.remote import RemoteChat
from tessera.cli import main as cli
from tessera.generate import Interrupted
from tessera.sparse.baselines import Dense


def logprobs_of(model, tokens):
    """Return ln p of every next token in a window, under dense attention."""
    return np.asarray(jax.nn.log_softmax(replace(model, policy=Dense()).logits([tokens])[0]))


# --- lm_eval


def test_lm_eval_gets_the_probability_of_every_prompt_token(running, model):
    """Send the body of lm_eval's `local-completions` and read the response as its `parse_logprobs` does."""
    prompts = [model.tokenizer.encode("The door is red, and the key is blue."), list(range(40, 90))]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    running.client.completions.create(**body, echo=True)  # the suite drops programs between files: the server is shared
    compiled = running.metric("tessera:recompiles_total")
    for limit in (1, 0):
        found = running.client.completions.create(**body | {"max_tokens": limit}, echo=True)
        assert found.usage.completion_tokens == 2 * limit
        for prompt, choice in zip(prompts, sorted(found.choices, key=lambda choice: choice.index), strict=True):
            logp, given = logprobs_of(model, prompt), choice.logprobs
            assert len(given.tokens) == len(given.top_logprobs) == len(prompt) + limit
            assert given.token_logprobs[0] is given.top_logprobs[0] is None
            scored = given.token_logprobs[1 : len(prompt)]
            np.testing.assert_allclose(scored, logp[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
            greedy = [own == max(top.values()) for own, top in zip(scored, given.top_logprobs[1:])]
            assert greedy == (logp[: len(prompt) - 1].argmax(-1) == prompt[1:]).tolist()
            assert choice.text.startswith(model.tokenizer.decode(prompt, skip_special=False))
            assert "".join(given.tokens) == choice.text
    assert running.metric("tessera:recompiles_total") == compiled


def test_an_echo_without_probabilities_repeats_the_prompt(running):
    plain = running.client.completions.create(model="tiny", prompt="a door", max_tokens=5, temperature=0)
    found = running.client.completions.create(model="tiny", prompt="a door", max_tokens=5, temperature=0, echo=True)
    assert found.choices[0].text == "a door" + plain.choices[0].text
    assert found.choices[0].logprobs is None
    whole = running.client.completions.create(model="tiny", prompt=[65] * 256, max_tokens=0, echo=True)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("A" * 256, "length")


# --- tessera chat --url


def remote_chat(running, tmp_path, lines, *flags, key=KEY):
    """Run `tessera chat --url` on lines of input; return its exit code."""
    (tmp_path / "key").write_text(key + "\n")
    left = iter(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.cli.conversation.typed_line", lambda prompt: next(left, None))
        argv = ["chat", "--url", running.url, "--api-key-file", str(tmp_path / "key"), "-n", "9", *flags]
        return cli.main(argv)


def test_a_remote_chat_streams_the_answers_of_the_server(running, tmp_path, capsys):
    lines = ["Who?", "/regenerate", "What?", "/undo", "Where?", f"/save {tmp_path / 'saved'}"]
    assert remote_chat(running, tmp_path, lines, "--temperature", "0") == 0
    said = []

    def answered(messages, question):
        asked = [*messages, {"role": "user", "content": question}]
        options = {"model": "tiny", "messages": asked, "max_tokens": 9, "temperature": 0}
        said.append(running.client.chat.completions.create(**options).choices[0].message.content)
        return [*asked, {"role": "assistant", "content": said[-1]}]

    answered([], "Who?")
    first = answered([], "Who?")
    answered(first, "What?")
    messages = answered(first, "Where?")
    printed = capsys.readouterr()
    assert printed.out == "".join(answer + "\n" for answer in said)
    assert "Taken back: What?" in printed.err
    assert json.loads((tmp_path / "saved").read_text()) == {"tessera_chat": 1, "model": "tiny", "messages": messages}


def test_ctrl_c_stops_a_remote_answer_and_frees_its_row(running):
    pieces = []

    def stream(piece):
        pieces.append(piece)
        raise KeyboardInterrupt

    with closing(RemoteChat(running.url, key=KEY, options={"max_tokens": 200})) as chat:
        chat.connect(print)
        with pytest.raises(Interrupted):
            chat.ask("Who?", stream)
    assert [turn["content"] for turn in chat.turns] == ["Who?", pieces[0]]
    running.until(lambda: running.service.open == 0)
    running.until(lambda: running.metric("vllm:kv_cache_usage_perc") == 0)


def test_a_remote_chat_says_what_is_wrong(running, tmp_path, capsys, monkeypatch):
    assert remote_chat(running, tmp_path, [], key="wrong") == 2
    assert "refuses the API key" in capsys.readouterr().err
    assert remote_chat(running, tmp_path, [], "--dtype", "float32") == 2
    assert "--dtype float32 cannot be used with --url" in capsys.readouterr().err
    assert remote_chat(running, tmp_path, ["x" * 300]) == 2
    assert "answers 400: the conversation has" in capsys.readouterr().err
    with (
        closing(RemoteChat("http://127.0.0.1:9")) as chat,
        pytest.raises(ValueError, match="does not answer .*: start `tessera serve`"),
    ):
        chat.connect(print)
    with pytest.raises(ValueError, match="must start with http"):
        RemoteChat("localhost:8000")


def test_a_remote_chat_waits_for_the_warm_up(running, monkeypatch):
    said = []
    monkeypatch.setattr(running.service, "ready", False)

    def say(text):
        said.append(text)
        running.service.ready = True

    monkeypatch.setattr("tessera.chat.remote.WAIT_S", 0.01)
    with closing(RemoteChat(running.url, key=KEY)) as chat:
        chat.connect(say)
    assert "is not ready" in said[0]
    assert chat.source == "tiny"


def test_a_remote_chat_forgets_the_oldest_turns_when_the_context_is_full(running, tmp_path, capsys):
    lines = ["a" * 100, "b" * 100, "c" * 100, f"/save {tmp_path / 'saved'}"]
    assert remote_chat(running, tmp_path, lines) == 0
    assert "The oldest 1 turns were forgotten: the context is full." in capsys.readouterr().err
    turns = json.loads((tmp_path / "saved").read_text())["messages"]
    assert [turn["content"] for turn in turns[::2]] == lines[1:3]


# --- the clients, and servers of others


class Other(ThreadingHTTPServer):
    """A server with OpenAI's API, whose streams are given.

    Attributes:
        streams: body of each answer to come.
        asked: headers and body of each request for an answer.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.streams, self.asked = f"http://127.0.0.1:{self.server_port}", [], []
        self.hangs, self.released = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *what):
        pass

    def send(self, status, body, kind="application/json", length=None):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(200, b'{"data": [{"id": "other"}]}') if self.path == "/v1/models" else self.send(404, b"{}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.headers, json.loads(body)))
        stream = self.server.streams.pop(0)
        if isinstance(stream, int):
            self.send(stream, b'{"error": {"message": "the context \\u001b[2J is full"}}')
        elif stream == HANGS:
            self.server.hangs.set()
            self.server.released.wait(600)
        else:
            cut = stream.endswith(CUT)
            sent = stream.removesuffix(CUT).encode("utf-8", "surrogatepass")
            self.send(200, sent, "text/event-stream", len(sent) + 1 if cut else None)


def event(data):
    """Return an event of a stream."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def said(text):
    """Return an event that adds a text to an answer, of a chat or of a completion."""
    return event({"choices": [{"delta": {"content": text}, "text": text}]})


DONE, CUT, HANGS = "data: [DONE]\n\n", "<cut>", "<hangs>"


@pytest.fixture
def other():
    """Run a server of another kind on a thread."""
    with Other() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.released.set()
        found.shutdown()
        thread.join()


def test_a_remote_chat_reads_what_the_format_of_streams_allows(other, tmp_path, capsys):
    parts = [
        said("a\u2028b\u2029c\x85d\x1ce"),
        'data:{"choices":[{"delta":{"content":"f"}}]}\r\n\r\n',
        ': a remark\nevent: ping\ndata: {"type": "ping"}\n\n',
        'data: {"choices":\ndata: [{"delta": {"content": "g"}}]}\n\n',
        event({"error": None, "choices": []}),
        event({"usage": {"total_tokens": 3}}),
        event({"choices": [{"delta": None}]}),
        event({"choices": [{"index": 0}]}),
        event({"choices": None, "usage": None}),
        event({"choices": [{"delta": {"content": None, "reasoning_content": "hm"}}]}),
        event(""),
        said("h"),
        DONE,
    ]
    other.streams = ["".join(parts)]
    with closing(RemoteChat(other.url)) as chat:
        chat.connect(print)
        reply = chat.ask("Who?")
    assert chat.turns[-1]["content"] == "a\u2028b\u2029c\x85d\x1cefgh"
    assert reply.usage == ""


def test_a_remote_chat_keeps_its_system_message_when_it_forgets(other):
    other.streams = [said("A") + DONE, said("B") + DONE, 400, 400, said("C") + DONE, 400]
    with closing(RemoteChat(other.url, system="be brief")) as chat:
        chat.connect(print)
        dropped = [chat.ask(question).dropped_turns for question in "abc"]
        chat.clear()
        with pytest.raises(ValueError, match="is full"):
            chat.ask("d")
    assert dropped == [0, 0, 2]
    sent = ["".join(message["content"] for message in body["messages"]) for _, body in other.asked]
    assert sent == ["be brief" + text for text in ("a", "aAb", "aAbBc", "bBc", "c", "d")]


def test_ctrl_c_loses_no_turn_that_was_to_be_forgotten(other):
    other.streams = [said("A") + DONE, said("B") + DONE, 400, HANGS]
    with closing(RemoteChat(other.url)) as chat:
        chat.connect(print)
        chat.ask("a")
        chat.ask("b")
        interrupting = threading.Thread(target=lambda: (other.hangs.wait(60), os.kill(os.getpid(), signal.SIGINT)))
        interrupting.start()
        with pytest.raises(Interrupted):
            chat.ask("c")
        interrupting.join()
    assert [message["content"] for message in chat.messages][:5] == ["a", "A", "b", "B", "c"]


def test_a_remote_chat_says_that_a_server_does_not_answer_yet(monkeypatch):
    monkeypatch.setattr("tessera.chat.remote.READ_S", 0.05)

    def say(text):
        raise LookupError(text)

    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a server that is loading its model
        with closing(RemoteChat(f"http://127.0.0.1:{silent.getsockname()[1]}")) as chat:
            with pytest.raises(LookupError, match="is not ready"):
                chat.connect(say)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (event({"error": "boom"}), "boom"),
        (event({"error": {"message": "boom"}}), "boom"),
        (event({"error": {"code": 5}}), "{'code': 5}"),
        (event('{"choices": nonsense'), "sent an event that is not one of OpenAI's API"),
        (event([1]), "sent an event that is not one of OpenAI's API"),
        (event({"choices": {"delta": {}}}), "sent an event that is not one of OpenAI's API"),
        (event({"choices": [{"delta": {"content": [{"text": "x"}]}}]}), "is not one of OpenAI's API"),
        (event('{"choices": [{"delta": {"content": "\\ud83d"}}]}'), "is not one of OpenAI's API"),
        (event("[" * 100_000), "sent an event that is not one of OpenAI's API"),
        (CUT, "broke off the answer"),
        ("", "closed the connection before the answer was complete: ask again"),
        (503, "answers 503: the context \\x1b[2J is full"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_odd_answer_is_one_error_and_the_chat_goes_on(other, tmp_path, capsys, stream, why):
    other.streams = [stream if isinstance(stream, int) else said("half") + stream, said("whole") + DONE]
    assert remote_chat(other, tmp_path, ["one", "two", f"/save {tmp_path / 'saved'}"]) == 2
    printed = capsys.readouterr()
    [error] = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {other.url}")
    assert why in error
    assert printed.out == ("" if isinstance(stream, int) else "half\n") + "whole\n"
    kept = json.loads((tmp_path / "saved").read_text())["messages"]
    assert [message["content"] for message in kept] == ["two", "whole"]


def test_an_address_may_hold_a_password_that_no_message_shows(other):
    address = other.url.replace("http://", " HTTP://me:secret@") + "/v1/"
    other.streams = [said("yes") + DONE]
    remarks = []
    with closing(RemoteChat(address)) as chat:
        chat.connect(remarks.append)
        chat.ask("Who?")
    assert remarks == [f"other at {other.url}"]
    [(headers, _)] = other.asked
    assert headers["authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1", "http://a\x01b"])
def test_a_wrong_address_is_named(url, capsys):
    assert cli.main(["chat", "--url", url]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{url.encode('unicode_escape').decode()} is not an address" in line


def test_a_text_that_is_not_utf_8_is_named(other, tmp_path, capsys):
    other.streams = [said("yes") + DONE]
    assert remote_chat(other, tmp_path, ["caf\udce9", "coffee"]) == 2
    assert "the text is not UTF-8: it holds '\\udce9': convert it to UTF-8" in capsys.readouterr().err
    assert len(other.asked) == 1


def test_a_wrong_key_is_named_before_the_warm_up_ends(running, monkeypatch):
    monkeypatch.setattr(running.service, "ready", False)
    with closing(RemoteChat(running.url, key="wrong")) as chat, pytest.raises(ValueError, match="refuses the API key"):
        chat.connect(print)


# --- the page


def test_the_page_is_whole_and_its_policy_allows_only_its_own_script(running):
    found = httpx.get(running.url)  # without a key
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    script = found.text.partition("<script>")[2].partition("</script>")[0]
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    assert not re.search(r"https?://|innerHTML|\son[a-z]+=", found.text)


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed")
def test_a_browser_chats_on_the_page(running, tmp_path):
    html = '<b id="bold">x</b><img src=x onerror="window.broken = 1">'
    with browser.Browser(browser.installed(), tmp_path) as page:
        page.open(running.url)
        page.until("!at('keys').hidden && at('ask').hidden")
        page.type("#key", "sk\u2013one")  # what a mail program makes of sk-one: fetch refuses such a header
        assert page.run("[key, at('key').validity.patternMismatch]") == ["", True]
        page.run("at('key').value = ''")
        page.type("#key", "wrong")
        page.until("at('state').textContent == 'the server refuses this key'")
        page.type("#key", KEY)
        page.until("at('model').textContent == 'tiny' && !at('send').disabled")
        page.type("#text", html)
        page.until("request === null && !!document.querySelector('.assistant .faint')")
        assert page.run("document.querySelector('.user .said').textContent") == html
        assert page.run("add('assistant', document.querySelector('.user .said').textContent).childElementCount") == 1
        page.run("document.body.insertAdjacentHTML('beforeend', messages[0].content)")  # what the policy must stop
        page.until("document.querySelector('body > img').complete")
        assert page.run("[window.broken, document.querySelectorAll('#bold').length]") == [None, 1]
        answer = page.run("document.querySelector('.assistant .said').textContent")
        assert page.run("messages[1].content") == answer
        assert " new; " in page.run("document.querySelector('.assistant .faint').textContent")
        page.until("at('running').textContent == '0' && at('used').textContent == '0.0 %'")
        assert page.run("at('last').textContent").endswith(" %")
        page.type("#text", "y" * 300)
        page.until("request === null && !!document.querySelector('.error')")
        assert "New chat begins with an empty context" in page.run("document.querySelector('.error').textContent")
        assert page.run("[messages.length, at('text').value]") == [2, "y" * 300]
        page.run("at('text').value = ''")
        failed = "send = async () => { throw Error(); }; await look(); send = real; return at('model').textContent;"
        assert page.run(f"(async () => {{ const real = send; {failed} }})()") == ""
        page.until("at('model').textContent == 'tiny' && !at('send').disabled")
        page.type("#text", "again")
        page.until("request !== null || messages.length == 4")
        page.run("at('fresh').click()")
        page.until("request === null")
        assert page.run("[messages.length, at('log').childElementCount]") == [0, 0]
    running.until(lambda: running.service.open == 0)
