"""The loop of `tessera chat`: read messages and /commands from a terminal or a pipe, and print the answers."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console

from tessera.chat.turns import Reply, Turns
from tessera.cli.prompt_bar import PromptBar
from tessera.core import interrupt
from tessera.core.escapes import escaped
from tessera.generate import Interrupted

QUOTES = '"""'
COMMANDS = MappingProxyType(
    {
        "/help": "list these commands",
        "/system [TEXT]": 'show the system message, or set it; /system "" removes it',
        "/undo": "take back the last question and its answer",
        "/regenerate": "answer the last question again",
        "/save FILE": "write the conversation to a file",
        "/load FILE": "continue a saved conversation",
        "/clear": "forget the conversation, but keep the system message",
        "/exit": "leave the chat; the end of the input does so, too",
    }
)
"""The commands that /help lists, with their help texts."""
ALIASES = MappingProxyType(
    {"/?": "/help", "/reset": "/clear", "/regen": "/regenerate", "/retry": "/regenerate", "/quit": "/exit"}
    | {"/bye": "/exit"}
)
"""Names of commands in ollama and llama-cli -> names of the same commands here."""
HELP = "\n".join(
    [
        *(f"{name:16}{what}" for name, what in COMMANDS.items()),
        f"A line that ends with \\ continues on the next line; {QUOTES} starts and ends a message of several lines.",
    ]
)
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters of an answer that a terminal would obey: control characters, except for tabs and ends of lines, and those
that reverse the direction of text."""
ReadLine = Callable[[str], str | None]
"""Function that shows a prompt and returns the next input line, or None at the end of the input."""


class Entry(NamedTuple):
    """A message (then `command` is ""), or a command and the text after it; None if the input ended inside quotes."""

    command: str
    text: str | None


def converse(chat: Turns, read_line: ReadLine, *, interactive: bool) -> bool:
    """Answer messages and run commands until /exit or the end of the input; return whether every entry succeeded.

    Answers go to standard output; remarks and errors go to standard error.
    """
    return _Terminal(chat, interactive).run(entries(read_line, interactive))


class _Terminal:
    def __init__(self, chat: Turns, interactive: bool):
        self.chat, self.interactive = chat, interactive
        self.remarks = Console(stderr=True, highlight=False, soft_wrap=True)

    def run(self, found: Iterator[Entry]) -> bool:
        good = True
        for command, text in found:
            if command == "/exit":
                break
            try:
                self.obey(command, text)
            except (ValueError, MemoryError) as error:
                self.remarks.print(f"error: {escaped(error, None)}", style="red", markup=False)
                good = False
        return good

    def obey(self, command: str, text: str | None) -> None:
        chat = self.chat
        if text is None:
            raise ValueError(f"the input ends inside a message that {QUOTES} opened: close it with {QUOTES}")
        if command in ("/undo", "/regenerate", "/clear", "/help") and text:
            raise ValueError(f"{command} takes no text, got {escaped(text)}: type {command} alone")
        match command:
            case "":
                self.turn(lambda *shown: chat.ask(text, *shown))
            case "/regenerate":
                self.regenerate()
            case "/help":
                self.remarks.print(HELP, markup=False)
            case "/system":
                self.system(text)
            case "/undo":
                self.say(f"Taken back: {escaped(chat.undo())}")
            case "/clear":
                chat.clear()
                self.say("The conversation is forgotten.")
            case "/save":
                self.say(f"Saved in {self.file(command, text, chat.save)}: {len(chat.turns) // 2} turns.")
            case "/load":
                self.say(f"Loaded {self.file(command, text, chat.load)}: {len(chat.turns) // 2} turns.")
            case _:
                names = ", ".join(name.split()[0] for name in COMMANDS)
                raise ValueError(
                    f"{escaped(command)} is not a command; the commands are {names}. "
                    f"To send a message that starts with /, put {QUOTES} before and after it"
                )

    def say(self, remark: str) -> None:
        self.remarks.print(remark, style="dim", markup=False)

    def system(self, text: str) -> None:
        if text:
            self.chat.set_system(None if text == '""' else text)
        system = self.chat.system
        self.say("There is no system message." if system is None else f"System message: {escaped(system, 500)}")

    def file(self, command: str, text: str, use: Callable[[Path], None]) -> str:
        """Call `use` (save or load) with the path `text`; return the path, escaped for display."""
        if not text:
            raise ValueError(f"{command} needs a file: {command} FILE")
        try:
            use(Path(text).expanduser())
        except (OSError, RuntimeError) as error:  # RuntimeError: an unknown ~user
            raise ValueError(f"{command} {escaped(text, 200)}: {getattr(error, 'strerror', None) or error}") from error
        return escaped(text, None)

    def regenerate(self) -> None:
        before = self.chat.turns[-1:]
        self.turn(self.chat.regenerate)
        if self.chat.turns[-1:] == before and not self.chat.draws:
            self.say(
                "The same answer again: at temperature 0 nothing is random. For other answers, start chat with "
                "--temperature 0.8."
            )

    def turn(self, ask: Callable[..., Reply]) -> None:
        begun, terminal, held = False, sys.stdout.isatty(), ""

        def show(piece: str) -> None:
            nonlocal begun, held
            begun = True
            if terminal:
                piece = held + piece
                held = "\r" if piece.endswith("\r") else ""  # perhaps the first half of an end of line
                piece = harmless(piece.removesuffix("\r"))
            print(piece, end="", flush=True)

        try:
            with PromptBar() as bar:
                reply = ask(show, bar.show)
        except Interrupted:
            print()
            if not self.interactive:
                raise
            interrupt.forget()
            self.say("(interrupted)")
            return
        except (ValueError, MemoryError):
            if begun:
                print(flush=True)  # the error message starts on a line of its own
            raise
        print(flush=True)
        if reply.dropped_turns:
            remark = f"The oldest {reply.dropped_turns} turns were forgotten: the context is full."
            self.remarks.print(remark, style="yellow")
        if self.interactive:
            self.say(f"({'; '.join(filter(None, (reply.usage, self.chat.note)))})")


def harmless(text: str) -> str:
    r"""Return the text with the characters in UNSAFE escaped, such as \x1b. Each \r\n becomes \n."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))


def entries(read_line: ReadLine, interactive: bool = False) -> Iterator[Entry]:
    r"""Yield messages and commands. An entry is a line, a block in triple quotes, or lines joined by \ at their ends.

    Empty lines are skipped. Ctrl-C at a terminal drops an entry that is not complete yet.
    """
    while (line := read_line("> ")) is not None:
        try:
            entry = _complete(line.strip(), read_line)
        except KeyboardInterrupt:
            if not interactive:
                raise
            interrupt.forget()
            print("(dropped)", file=sys.stderr)
            continue
        if entry is not None:
            yield entry


def _complete(line: str, read_line: ReadLine) -> Entry | None:
    """Return the entry that starts with this line, after reading its further lines; None for an empty line."""
    command, rest = (*line.split(None, 1), "")[:2] if line.startswith("/") else ("", line)
    command = ALIASES.get(command, command)
    if rest.startswith(QUOTES):
        return Entry(command, _block(rest.removeprefix(QUOTES), read_line))
    while rest.endswith("\\") and (following := read_line("... ")) is not None:
        rest = rest[:-1] + "\n" + following.rstrip()
    return Entry(command, rest) if command or rest else None


def _block(first: str, read_line: ReadLine) -> str | None:
    """Read lines up to the closing quotes; return None if the input ends before them."""
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        if (line := read_line("... ")) is None:
            return None
        lines.append(line.removesuffix("\n"))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def typed_line(prompt: str) -> str | None:
    """Read one line of standard input, with a prompt and line editing at a terminal; None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # Windows has no readline: its terminal edits lines itself
            import readline  # noqa: F401  (gives input() line editing and history)
    with interrupt.at_once():
        try:
            return input(prompt) if interactive else next(sys.stdin)
        except (EOFError, StopIteration):
            return None
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text ({error.reason}): convert it first") from error
