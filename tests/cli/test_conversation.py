"""The chat at the terminal: entries of one or more lines, commands, refusals, and output to a pipe."""

import sys
from types import SimpleNamespace

import pytest
from tiny import save_tiny

import tessera
from tessera.chat import Chat
from tessera.cli import conversation
from tessera.cli import main as cli
from tessera.cli.conversation import COMMANDS, converse, entries
from tessera.cli.prompt_bar import PromptBar
from tessera.core import interrupt
from tessera.runtime.sampling import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tessera.load(save_tiny(tmp_path_factory.mktemp("conversation"), plan=False))


def reader(*lines: str):
    left = iter(lines)
    return lambda prompt: next(left, None)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["hello\n", "\n", "  you \n"], [("", "hello"), ("", "you")]),
        (["one \\\n", "two\\\n", "three\n"], [("", "one \ntwo\nthree")]),
        (["cut \\"], [("", "cut \\")]),
        (['"""\n', "/a\n", "\n", '  b"""\n', "c\n"], [("", "/a\n\n  b"), ("", "c")]),
        (['"""all on one line"""\n'], [("", "all on one line")]),
        (['/system """be\n', 'brief"""\n'], [("/system", "be\nbrief")]),
        (['"""never closed\n', "x\n"], [("", None)]),
        (["/system \tbe brief\n", '/system ""\n'], [("/system", "be brief"), ("/system", '""')]),
        (["/bye\n", "/reset\n", "/regen\n"], [("/exit", ""), ("/clear", ""), ("/regenerate", "")]),
    ],
)  # fmt: skip
def test_lines_make_entries(lines, found):
    assert [tuple(entry) for entry in entries(reader(*lines))] == found


def test_ctrl_c_drops_what_is_not_complete(monkeypatch, capsys):
    lines = iter(['"""a\n', KeyboardInterrupt, "b\n"])

    def read(prompt: str) -> str | None:
        line = next(lines, None)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    forgotten = []
    monkeypatch.setattr(interrupt, "forget", lambda: forgotten.append(True))
    assert [entry.text for entry in entries(read, interactive=True)] == ["b"]
    assert forgotten == [True]
    assert capsys.readouterr().err == "(dropped)\n"


def test_commands_act_and_refusals_are_sentences(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat = Chat(model, Sampling(), max_new_tokens=5)
    lines = ["hello", '"""', "one", 'two"""', "/undo", "/regenerate", "/save chat.json", "/clear", "/load chat.json"]
    assert converse(chat, reader(*lines, "/help", "/exit", "never"), interactive=False)
    shown = capsys.readouterr()
    answer = chat.messages[-1]["content"]
    assert [message["content"] for message in chat.messages] == ["hello", answer]
    assert shown.out.startswith(f"{answer}\n")
    assert shown.out.endswith(f"\n{answer}\n")
    for words in ("Taken back: one two", "The same answer", "Saved in chat.json: 1 turns", "Loaded", *COMMANDS):
        assert words in shown.err
    assert "error" not in shown.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nonsense now", "/nonsense is not a command; the commands are /help, /system, /undo"),
        ("/etc/passwd is what?", 'put """ before and after it'),
        ("x" * 600, "has 604 tokens"),
        ("/save", "/save needs a file"),
        ("/save a\0b", "null byte"),
        pytest.param("/save " + "a" * 1000, "File name too long", id="long name"),
        ("a\udcff", "the text is not UTF-8: it holds '\\udcff': convert it to UTF-8"),
        ("/load missing.json", "/load missing.json: No such file or directory"),
        ("/load ~nouser/chat.json", "home directory"),
        ("/undo twice", "/undo takes no text, got twice"),
        ("/undo", "no turn to take back"),
        ("/system be brief", "role system must be user or assistant"),
        ('"""open', "the input ends inside a message"),
    ],
)
def test_a_refusal_is_one_line_and_the_chat_goes_on(model, tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    chat = Chat(model, Sampling(), max_new_tokens=2)
    assert not converse(chat, reader(line), interactive=False)
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert len(error) < 1000
    assert chat.messages == []


def test_a_closed_output_ends_the_chat():
    def ask(*shown):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        converse(SimpleNamespace(ask=ask), reader("hello"), interactive=False)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_an_answer(monkeypatch, capsys, terminal):
    def ask(text, stream, progress):
        for piece in (
            "\x1b]0;title\x07",
            "\x1b[2J",
            "\r\b\u202e",
            "\tone\ntwo\u2028\u00a0\u200d",
            "\x9b31m",
            "a\r\nb\r",
            "\nc",
        ):
            stream(piece)
        raise ValueError("no more")

    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert not converse(SimpleNamespace(ask=ask), reader("hello"), interactive=False)
    shown = capsys.readouterr()
    said = "\x1b]0;title\x07\x1b[2J\r\b\u202e\tone\ntwo\u2028\u00a0\u200d\x9b31ma\r\nb\r\nc\n"
    escaped = "\\x1b]0;title\\x07\\x1b[2J\\r\\x08\\u202e\tone\ntwo\u2028\u00a0\u200d\\x9b31ma\nb\nc\n"
    assert shown.out == (escaped if terminal else said)
    assert shown.err == "error: no more\n"


def test_an_interactive_turn_reports_its_cost(model, capsys):
    chat = Chat(model, Sampling(), max_new_tokens=2)
    assert converse(chat, reader("hello"), interactive=True)
    assert "0 tokens from the cache; 9 tokens; 2 new" in capsys.readouterr().err
    assert conversation.QUOTES in conversation.HELP


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_long_prompt_at_a_terminal_shows_a_bar(monkeypatch, capsys, terminal):
    for name, value in {"FORCE_COLOR": "1" if terminal else "", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    with PromptBar() as bar:
        bar.show(0, 900)
        assert bar._progress is None
        for done in (0, 1024, 2048):
            bar.show(done, 4000)
        rate = bar._progress.tasks[0].speed
        bar.show(4000, 4000)
        assert bar._progress is None
    shown = capsys.readouterr().err
    assert ("2048/4000" in shown and "tokens/s" in shown and "left" in shown) == terminal
    assert bool(shown) == terminal
    assert rate > 0


def test_an_instruct_model_without_its_template_is_told_once(model, capsys):
    ask = ["generate", "--model", model.source, "--max-new-tokens", "1"]
    said = []
    for argv in (["hi"], ["hi", "--chat"], ["1 2", "--tokens"], ["<|user|>hi"]):
        assert cli.main([*ask, *argv]) == 0
        said.append(capsys.readouterr().err)
    assert said[0] == "this model has a chat template: add --chat to apply it to the prompt\n"
    assert said[1:] == ["", "", ""]
