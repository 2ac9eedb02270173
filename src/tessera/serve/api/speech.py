"""Split a growing chat answer into reasoning, text and tool calls."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tessera.serve.api.call_forms import Tools
from tessera.serve.api.calls import forced, safe_end, split

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around a model's reasoning: of DeepSeek R1 and Qwen3, and of Magistral."""

SETTLES = ("\n", "```")
"""Parts of an answer at which complete JSON is looked for: at every token, that would take too long."""


class Said(NamedTuple):
    """A part of an answer: its reasoning and its text. Either may be ""."""

    reasoning: str = ""
    text: str = ""


class Speech:
    """Splitter of a growing chat answer. It returns text as soon as the text cannot be part of a mark or of a call.

    Args:
        forced: whether a grammar makes the whole answer one call.
        single: whether to return only the first call.
        thoughts: pairs of marks around the reasoning with which the model may begin; none leaves it in the text.
        thinking: the pair of marks whose first mark the prompt has already written.
    """

    def __init__(
        self,
        tools: Tools | None = None,
        *,
        forced: bool = False,
        single: bool = False,
        thoughts: Sequence[tuple[str, str]] = (),
        thinking: tuple[str, str] | None = None,
    ):
        self.tools, self.forced, self.single = tools or {}, forced, single
        self._thoughts, self._close = tuple(thoughts), thinking[1] if thinking else None
        self._before = not thinking and bool(thoughts)  # whether reasoning may still begin
        self._text = ""  # what `push` has not returned yet
        self._start = True  # whether that begins the answer's text
        self._trim = thinking is not None  # whether white space at its start is left out: it surrounds reasoning

    def push(self, piece: str) -> Said:
        """Append a piece of the answer; return what may be shown now."""
        self._text += piece
        if self._before and not self._open():
            return Said()
        reasoning = self._think() if self._close is not None else ""
        self._trim_start()
        if self._close is not None:
            return Said(reasoning)
        end = len(self._text)
        if self.forced or self.tools:
            settle = any(mark in piece for mark in SETTLES)
            end = 0 if self.forced else safe_end(self._text, self.tools, start=self._start, settle=settle)
        text, self._text = self._text[:end], self._text[end:]
        self._start &= not text
        return Said(reasoning, text)

    def finish(self) -> tuple[Said, list[dict[str, Any]]]:
        """Return what `push` has not returned yet, and the calls. Reasoning that has not ended holds no calls."""
        rest, self._text = self._text, ""
        if self._close is not None:
            return Said(reasoning=rest.rstrip()), []
        if self.forced:
            call = forced(rest)
            return (Said(), [call]) if call else (Said(text=rest), [])
        if not self.tools:
            return Said(text=rest), []
        text, calls = split(rest, self.tools, start=self._start)
        return Said(text=text), calls[:1] if self.single else calls

    def whole(self, text: str) -> tuple[Said, list[dict[str, Any]]]:
        """Split a complete answer, of which nothing was pushed."""
        first, (rest, calls) = self.push(text), self.finish()
        text = first.text + rest.text
        return Said(first.reasoning + rest.reasoning, text.strip() if calls else text), calls

    def _trim_start(self) -> None:
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text

    def _open(self) -> bool:
        """Look for the mark that opens the reasoning; return False while the text may still become one."""
        begun = self._text.lstrip()
        for opening, closing in self._thoughts:
            if begun.startswith(opening):
                self._text, self._close = begun.removeprefix(opening), closing
                self._before, self._trim = False, True
                self._trim_start()
                return True
        self._before = any(opening.startswith(begun) for opening, _ in self._thoughts)
        return not self._before

    def _think(self) -> str:
        """Take the reasoning that may be shown off the text, and look for the mark that closes it."""
        self._trim_start()
        before, mark, after = self._text.partition(self._close)
        if mark:
            self._text, self._close, self._trim = after, None, True
            return before.rstrip()
        held = range(min(len(self._close) - 1, len(before)), 0, -1)
        end = len(before) - next((count for count in held if self._close.startswith(before[-count:])), 0)
        end = len(before[:end].rstrip())  # white space before the closing mark is not part of the reasoning
        self._text = before[end:]
        return before[:end]
