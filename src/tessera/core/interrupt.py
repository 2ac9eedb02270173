"""Handle Ctrl-C in Tessera's commands: the handler sets a flag, which long loops check between their steps.

Python's own handler raises KeyboardInterrupt at whatever line the main thread runs next. If that line is inside a
garbage-collection callback (JAX has one) or a finalizer, Python prints the exception and continues, and the Ctrl-C is
lost. With the handler here, the first of these events ends the command:

    check() or asked()    a loop checks the flag between two steps
    at_once()             a wait for input or for a worker raises KeyboardInterrupt immediately
    RAISE_S seconds pass  no loop checked the flag: KeyboardInterrupt is raised wherever the main thread runs Python
    EXIT_S seconds pass   the main thread is in a compiler or device call, or a callback lost the exception: exit
    a second Ctrl-C       exit

A separate thread measures these times, because Python runs signal handlers only between two bytecode instructions.
Only the commands install the handler (`handled`); in a program that uses the library, check() and at_once() do nothing.
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
"""Seconds from the first Ctrl-C until KeyboardInterrupt is raised, and until the process exits."""
STATUS = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
FORGET = 0
"""Byte that tells the handler's thread, which reads signal numbers from the same socket, to forget earlier signals."""

_groups: set[int] = set()
_handler: "Handler | None" = None


class Handler:
    """State of Ctrl-C in this process, and the thread that enforces the deadlines.

    Attributes:
        pressed: the thread has seen a Ctrl-C.
        heard: Python's signal handler has seen a Ctrl-C; it may see one before or after the thread does.
        taken: a loop has seen the flag, so the command is ending by itself, and the deadlines no longer apply.
        raised: KeyboardInterrupt is propagating in the main thread; the deadlines still apply.
        told: the command has printed that it was interrupted.
        eager: on Ctrl-C, the signal handler raises KeyboardInterrupt at once instead of only setting `heard`.
    """

    def __init__(self):
        self.pressed = self.heard = self.taken = self.raised = self.told = False
        self.eager = True
        self._receive, self._send = socket.socketpair()
        self._send.setblocking(False)
        self._own_signals, self._forgotten = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ctrl-c")

    def start(self) -> None:
        """Install the SIGINT handler and start the thread."""
        signal.signal(signal.SIGINT, self._hear)
        signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._thread.start()

    def stop(self) -> None:
        """Restore the system's handling of SIGINT, which ends the process without a traceback."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        sys.unraisablehook = self._hook

    def _hear(self, number, frame) -> None:
        self.heard = True
        if self.eager and not (self.taken or self.raised):
            self.raised = True
            raise KeyboardInterrupt

    def _unraisable(self, lost) -> None:
        """Ignore a KeyboardInterrupt that Python cannot propagate, as in a finalizer; report any other exception."""
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
        """Wait until the thread has read every signal sent so far; then reset the state, as if none had been sent."""
        self._forgotten.clear()
        self._send.send(bytes([FORGET]))
        self._forgotten.wait()
        self.pressed = self.heard = self.taken = self.raised = self.told = self.eager = False

    def _raise(self) -> None:
        """Send SIGINT to the main thread, which interrupts a blocking system call."""
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
    """Handle Ctrl-C in the block as this module describes; until `defer` is called, raise KeyboardInterrupt at once.

    This does nothing on Windows, or if SIGINT is ignored, as in a background job of a shell script.
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
        release()


def release() -> None:
    """Stop handling Ctrl-C. A server calls this and handles signals itself."""
    global _handler
    if _handler is not None:
        _handler.stop()
        _handler = None


def defer() -> None:
    """Make Ctrl-C wait for check(), asked() or at_once() from now on."""
    if _handler is not None:
        _handler.eager = False


def asked() -> bool:
    """Return whether Ctrl-C was pressed. If so, the deadlines no longer apply, and the caller must end the command."""
    if _handler is None or not (_handler.pressed or _handler.heard):
        return False
    _handler.taken = True
    return True


def told() -> None:
    """Record that the command has printed why it ends, so that a forced exit prints nothing more."""
    if _handler is not None:
        _handler.told = True


def check() -> None:
    if asked():
        raise KeyboardInterrupt


def forget() -> None:
    """Continue after a Ctrl-C; the next Ctrl-C counts as the first."""
    if _handler is not None:
        _handler.forget()


@contextmanager
def at_once() -> Iterator[None]:
    """Raise KeyboardInterrupt as soon as Ctrl-C is pressed while the block runs.

    Use this only for waits: an interrupted wait leaves no work half done.
    """
    if _handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _handler.eager = _handler.eager, True  # a later Ctrl-C raises; check() sees an earlier one
    try:
        check()
        yield
    finally:
        if _handler is not None:
            _handler.eager = before


def end_with_us(group: int) -> None:
    """Register a process group to kill if Ctrl-C forces this process to exit."""
    _groups.add(group)


def ended(group: int) -> None:
    """Unregister a process group that has ended, because the system may reuse its number."""
    _groups.discard(group)
