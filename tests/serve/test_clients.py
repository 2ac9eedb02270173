"""What other programs send: lm_eval's scoring of prompts, `tessera chat --url`, and the page in a browser."""

import base64
import hashlib
import json
import re
from contextlib import closing

import browser
import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from live_server import KEY, start, tiny_model

from tessera.chat.remote import RemoteChat
from tessera.cli import main as cli
from tessera.generate import Interrupted
from tessera.runtime.step import score_tokens
from tessera.sparse.baselines import Dense


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def running(model):
    found = start(model, keys=(KEY,))
    yield found
    found.close()


def logprobs_of(model, tokens):
    """Return ln p of every next token in a window, from one call without a cache."""
    found, _ = score_tokens(
        model.params, jnp.array([tokens]), jnp.array([len(tokens)]), config=model.config, policy=Dense()
    )
    return np.asarray(jax.nn.log_softmax(found[0]))


# --- lm_eval


def test_lm_eval_gets_the_probability_of_every_prompt_token(running, model):
    """Send the body of lm_eval's `local-completions` and read the response as its `parse_logprobs` does."""
    prompts = [model.tokenizer.encode("The door is red, and the key is blue."), list(range(40, 90))]
    compiled = running.metric("tessera:recompiles_total")
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
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
        page.type("#text", "again")
        page.until("request !== null || messages.length == 4")
        page.run("at('fresh').click()")
        page.until("request === null")
        assert page.run("[messages.length, at('log').childElementCount]") == [0, 0]
    running.until(lambda: running.service.open == 0)
