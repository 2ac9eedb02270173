"""The `tessera` command as a process: Ctrl-C and a closed pipe end it without a traceback, even while it imports."""

import os
import signal
import sys


def run() -> int:
    """Run the command line and return its exit code: 130 after Ctrl-C, 141 if the reader of our output has closed it.

    141 is 128 + SIGPIPE: what a shell reports of a program that ends by that signal, as most tools do.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this process silently until the next lines take over
    from tessera.core import interrupt

    try:
        with interrupt.handled():
            status = _answer()
            sys.stdout.flush()  # Python would do it later, and print a traceback if that fails
    except KeyboardInterrupt:
        interrupt.told()
        print("interrupted", file=sys.stderr)
        status = interrupt.STATUS
    except BrokenPipeError:
        status = 141
        _drop_output()
    except OSError as error:  # a full disk
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        status = 2
        _drop_output()
    if status == interrupt.STATUS:
        exec("")  # clears a note by CPython that Ctrl-C left an exec (dataclass has one): -m would die by SIGINT
    return status


def _answer() -> int:
    from tessera.cli.main import main

    try:
        return main()
    except SystemExit as end:  # help, or an unknown flag
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(run())
