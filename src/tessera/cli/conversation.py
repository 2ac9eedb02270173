"""A chat at the terminal or through a pipe: messages of one or more lines, and commands."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console

from tessera.chat import Chat, Reply
from tessera.cli.prompt_bar import PromptBar
from tessera.core import interrupt
from tessera.core.escapes import escaped
from tessera.generate import Interrupted
from tessera.sparse.promise import promise_note

QUOTES = '"""'
COMMANDS = MappingProxyType(
    {
        "/help": "list these commands",
        "/system [TEXT]": 'show the system message, or set it; /system "" removes it',
        "/undo": "take back the last question and its answer",
        "/regenerate": "answer the last question again",
        "/save FILE": "write the conversation to a file",
        "/load FILE": "continue a saved conversation",
        "/clear": "forget the conversation, not the system message",
        "/exit": "leave (so does end of input)",
    }
)
"""What /help lists."""
ALIASES = MappingProxyType(
    {"/?": "/help", "/reset": "/clear", "/regen": "/regenerate", "/retry": "/regenerate", "/quit": "/exit"}
    | {"/bye": "/exit"}
)
"""What ollama and llama-cli call them."""
HELP = "\n".join(
    [
        *(f"{name:16}{what}" for name, what in COMMANDS.items()),
        f"A line that ends with \\ goes on in the next; {QUOTES} starts and ends a message of several lines.",
    ]
)
ReadLine = Callable[[str], str | None]
"""Takes a prompt to show and returns the next line, or None at the end of the input."""


class Entry(NamedTuple):
    """One message, or one command and the text after it.

    Attributes:
        command: "" for a message.
        text: a message that the quotes leave open at the end of the input is None.
    """

    command: str
    text: str | None


def converse(chat: Chat, read_line: ReadLine, *, interactive: bool) -> bool:
    """Answer each entry until the input ends or /exit; answers go to standard output, remarks to standard error.

    Returns:
        Whether every entry was answered or obeyed, for scripts, which do not read the remarks.
    """
    return _Terminal(chat, interactive).run(entries(read_line, interactive))


class _Terminal:
    def __init__(self, chat: Chat, interactive: bool):
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
        """Answer a message or obey a command; raise ValueError or MemoryError if it is refused."""
        chat = self.chat
        if text is None:
            raise ValueError(f"the input ends inside a message that {QUOTES} opened: close it with {QUOTES}")
        if command in ("/undo", "/regenerate", "/clear", "/help") and text:
            raise ValueError(f"{command} takes no text, got {escaped(text)}")
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
                    f"{escaped(command)} is not a command: {names}; a message that starts with / goes in {QUOTES}"
                )

    def say(self, remark: str) -> None:
        self.remarks.print(remark, style="dim", markup=False)

    def system(self, text: str) -> None:
        if text:
            self.chat.set_system(None if text == '""' else text)
        system = self.chat.system
        self.say("There is no system message." if system is None else f"System message: {escaped(system, 500)}")

    def file(self, command: str, text: str, use: Callable[[Path], None]) -> str:
        """Save to a file or load it; return its name."""
        if not text:
            raise ValueError(f"{command} needs a file: {command} FILE")
        try:
            use(Path(text).expanduser())
        except (OSError, RuntimeError) as error:  # RuntimeError: ~name of no user
            raise ValueError(f"{command} {text}: {getattr(error, 'strerror', None) or error}") from error
        return escaped(text, None)

    def regenerate(self) -> None:
        before = self.chat.turns[-1:]
        self.turn(self.chat.regenerate)
        if self.chat.turns[-1:] == before and not self.chat.sampling.temperature:
            self.say("The same answer: nothing is drawn at temperature 0. Start chat with --temperature 0.8.")

    def turn(self, ask: Callable[..., Reply]) -> None:
        """Show an answer as it grows."""

        def show(piece: str) -> None:
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
        print(flush=True)
        if reply.dropped_turns:
            remark = f"The oldest {reply.dropped_turns} turns were forgotten: the context is full."
            self.remarks.print(remark, style="yellow")
        if self.interactive:
            note = promise_note(self.chat.model.plan)
            parts = (f"{reply.reused_tokens} tokens from the cache", reply.generation.usage(), note)
            self.say(f"({'; '.join(filter(None, parts))})")


def entries(read_line: ReadLine, interactive: bool = False) -> Iterator[Entry]:
    r"""Yield messages and commands: a line, lines joined by a \ at the end of each, or a block in triple quotes.

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
    """Read the rest of an entry that starts with this line; None if it is empty."""
    command, rest = (*line.split(None, 1), "")[:2] if line.startswith("/") else ("", line)
    command = ALIASES.get(command, command)
    if rest.startswith(QUOTES):
        return Entry(command, _block(rest.removeprefix(QUOTES), read_line))
    while rest.endswith("\\") and (following := read_line("... ")) is not None:
        rest = rest[:-1] + "\n" + following.rstrip()
    return Entry(command, rest) if command or rest else None


def _block(first: str, read_line: ReadLine) -> str | None:
    """Read lines up to the closing quotes; None if there are none."""
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        if (line := read_line("... ")) is None:
            return None
        lines.append(line.removesuffix("\n"))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def typed_line(prompt: str) -> str | None:
    """Read a line: typed at a prompt, or plain when standard input is not a terminal; None at its end."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # Windows has none: its terminal edits lines itself
            import readline  # noqa: F401  (gives input() line editing and history)
    with interrupt.at_once():
        try:
            return input(prompt) if interactive else next(sys.stdin)
        except (EOFError, StopIteration):
            return None
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text ({error.reason}): convert it first") from error
