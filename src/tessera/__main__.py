"""Entry point of the `tessera` command.

Ctrl-C or a closed output pipe ends the command without a traceback, even while modules are being imported.
"""

import os
import signal
import sys
from importlib import import_module


def run(module: str = "tessera.cli.main") -> int:
    """Run the command line and return its exit code: 130 after Ctrl-C, 141 if standard output is a closed pipe.

    141 is 128 + SIGPIPE, the exit code that a shell reports for a program killed by that signal. The function `main` of
    `module` parses the arguments and runs the command.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `handled` takes over, Ctrl-C ends the process silently
    if _replace_closed_streams():
        print("error: standard output is closed: redirect it to a file or to /dev/null", file=sys.stderr)
        return 2
    from tessera.core import interrupt

    try:
        with interrupt.handled():
            status = _answer(module)
            sys.stdout.flush()  # Python itself would flush at exit, and print a traceback on failure
    except KeyboardInterrupt:
        interrupt.told()
        print("interrupted", file=sys.stderr)
        status = interrupt.STATUS
    except BrokenPipeError:
        status = 141
        _drop_output()
    except OSError as error:  # a full disk
        print(f"error: cannot write to standard output ({error.strerror}): redirect it elsewhere", file=sys.stderr)
        status = 2
        _drop_output()
    if status == interrupt.STATUS:
        # If a KeyboardInterrupt leaves exec() (dataclass calls it), CPython sets a flag: `python -m` dies by SIGINT.
        exec("")  # clears that flag
    return status


def _answer(module: str) -> int:
    try:
        return import_module(module).main()
    except SystemExit as end:  # help, or an unknown flag
        if isinstance(end.__context__, BrokenPipeError):  # rich exits with 1, which means something else here
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _replace_closed_streams() -> bool:
    """Open the null device for each standard stream that is closed; return whether standard output was closed.

    Python sets a closed stream to None. Without the null device, the next file that is opened would get the stream's
    file descriptor. What libraries write to standard error, for example, would then end up in that file.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # in the order of their descriptors, because open() takes the lowest free one
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    return "stdout" in closed


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(run())
