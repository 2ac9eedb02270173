"""Ctrl-C of the command line: a flag that the long loops look at between their steps.

Python's own handler raises KeyboardInterrupt at whatever line the main thread runs next. Inside a garbage-collection
callback (JAX has one) or a finalizer, Python prints the exception and continues: the Ctrl-C is lost. The handler here
sets a flag, and these end the command, whichever comes first:

    check() or asked()   a loop looks at the flag between two steps
    at_once()            a wait for input or for a worker raises KeyboardInterrupt immediately
    RAISE_S              no loop looked: KeyboardInterrupt is raised wherever the main thread runs Python
    EXIT_S               the main thread is inside a compiler or a device call, or a callback lost the exception: exit
    a second Ctrl-C      exit

A thread keeps the clock, because Python runs signal handlers only between two of its own instructions. Only the command
line installs the handler (`handled`); in a program that uses the library, check() and at_once() do nothing.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

RAISE_S, EXIT_S = 2.0, 2.5
"""Seconds after the first Ctrl-C."""
STATUS = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
FORGET = 0
"""No signal has this number: through the socket it reaches the thread in order with the signals."""

_groups: set[int] = set()
_handler: "Handler | None" = None


class Handler:
    """State of Ctrl-C in this process, and the thread that keeps the clock.

    Attributes:
        pressed: the thread has seen a Ctrl-C.
        heard: Python's signal handler has; whichever is first counts.
        taken: a loop has asked: the command is ending, in the time that it needs; the clock has stopped.
        raised: KeyboardInterrupt is on its way through the main thread; the clock goes on.
        told: the command has said that it was interrupted.
        eager: raise KeyboardInterrupt in the signal handler.
    """

    def __init__(self):
        self.pressed = self.heard = self.taken = self.raised = self.told = False
        self.eager = True
        self._receive, self._send = socket.socketpair()
        self._send.setblocking(False)
        self._own_signals, self._forgotten = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ctrl-c")

    def start(self) -> None:
        """Take over SIGINT."""
        signal.signal(signal.SIGINT, self._hear)
        signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._thread.start()

    def stop(self) -> None:
        """Leave SIGINT to the system: from here on it ends the process without a traceback."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        sys.unraisablehook = self._hook

    def _hear(self, number, frame) -> None:
        self.heard = True
        if self.eager and not (self.taken or self.raised):
            self.raised = True
            raise KeyboardInterrupt

    def _unraisable(self, lost) -> None:
        """Silence a KeyboardInterrupt that Python could not raise."""
        if lost.exc_type is KeyboardInterrupt:
            self.raised = False
        else:
            self._hook(lost)

    def _watch(self) -> None:
        began = deadline = None
        while True:
            self._receive.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            try:
                byte = self._receive.recv(1)[0]
            except TimeoutError:
                if self.taken or not self.pressed:
                    deadline = None
                elif deadline == began + RAISE_S:
                    deadline = began + EXIT_S
                    self._raise()
                else:
                    self._exit(b"interrupted in the middle of a step\n")
                continue
            if byte == FORGET:
                self.pressed, deadline = False, None
                self._forgotten.set()
            elif byte != signal.SIGINT:
                continue
            elif self._own_signals:
                self._own_signals -= 1
            elif self.pressed:
                self._exit(b"interrupted twice: exiting at once\n")
            else:
                self.pressed, began = True, time.monotonic()
                deadline = began + RAISE_S

    def forget(self) -> None:
        """Return to the state before the first Ctrl-C, once the thread has read every signal that came until now."""
        self._forgotten.clear()
        self._send.send(bytes([FORGET]))
        self._forgotten.wait()
        self.pressed = self.heard = self.taken = self.raised = self.told = self.eager = False

    def _raise(self) -> None:
        """Raise KeyboardInterrupt in the main thread unless it is on its way; a signal also ends its system call."""
        self.eager, self._own_signals = True, self._own_signals + 1
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _exit(self, said: bytes) -> None:
        for group in list(_groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        shown = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides the cursor
        with suppress(OSError):
            os.write(2, shown if self.told else shown + said)
        os._exit(STATUS)


@contextmanager
def handled() -> Iterator[None]:
    """Answer Ctrl-C as this module says, until the block ends. Raises at once until `defer` is called.

    Does nothing where SIGINT is ignored (nohup) and on Windows.
    """
    global _handler
    if os.name == "nt" or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    _handler = Handler()
    _handler.start()
    try:
        yield
    finally:
        _handler.stop()
        _handler = None


def defer() -> None:
    """From here on, Ctrl-C waits for check(), asked() or at_once()."""
    if _handler is not None:
        _handler.eager = False


def asked() -> bool:
    """Return whether Ctrl-C was pressed. The caller then ends the command, in the time that it needs."""
    if _handler is None or not (_handler.pressed or _handler.heard):
        return False
    _handler.taken = True
    return True


def told() -> None:
    """Note that the command has said why it ends: should its last steps take too long, exit without a word."""
    if _handler is not None:
        _handler.told = True


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed."""
    if asked():
        raise KeyboardInterrupt


def forget() -> None:
    """Go on after a Ctrl-C: the next one counts as the first."""
    if _handler is not None:
        _handler.forget()


@contextmanager
def at_once() -> Iterator[None]:
    """Raise KeyboardInterrupt as soon as Ctrl-C is pressed: for waits, which leave nothing half done."""
    if _handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _handler.eager = _handler.eager, True  # first: a signal from here on raises, and check() sees one before
    try:
        check()
        yield
    finally:
        if _handler is not None:
            _handler.eager = before


def end_with_us(group: int) -> None:
    """Kill this process group if Ctrl-C exits without cleaning up."""
    _groups.add(group)


def ended(group: int) -> None:
    """Forget a process group that has ended: its number may be given to another."""
    _groups.discard(group)
