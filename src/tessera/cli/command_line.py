"""Parse a command line into a command, a dataclass whose fields are its flags; run it; turn errors into exit codes."""

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, Union

import tyro

from tessera.cli import usage
from tessera.cli.errors import check_address_space, explained
from tessera.cli.flags import REGISTRY
from tessera.core import hardware, interrupt
from tessera.core.escapes import escaped

Commands = Mapping[str, type]
NO_GROUPS: Mapping[str, Commands] = MappingProxyType({})


def compile_without_chip() -> None:
    """Select the CPU if only compilers for absent chips are installed: call this before jax is imported."""
    if hardware.compiles_without_chip():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also for worker processes


def parse(
    argv: Sequence[str], prog: str, description: str, commands: Commands, groups: Mapping[str, Commands] = NO_GROUPS
) -> Any:
    """Parse the arguments, without the program's name `prog`, into a command with its flags.

    `groups` holds the commands that follow a command which is only a group, by that command's name. Raise SystemExit
    with code 0 after help, with code 2 if the arguments are wrong.
    """
    words = [*argv[1:], "--help"] if argv[:1] == ["help"] else list(argv) or ["--help"]
    kinds = [Annotated[kind, tyro.conf.subcommand(name=name)] for name, kind in commands.items()]
    whole, kind, below = prog, Union[*kinds], commands
    while below and words and not re.fullmatch("-h|--help|--tyro-.*", words[0]):  # --tyro-* writes shell completions
        word, *words = words
        if word not in below:
            refuse(usage.unknown_command(word, below, prog))
        prog, kind, below = f"{prog} {word}", below[word], groups.get(word, {}) if prog == whole else {}
    if not below and (error := usage.unknown_flag(words, usage.flags(kind), prog)):
        refuse(error)
    if not below and (error := usage.wrong_dtype(words, prog)):
        refuse(error)
    about = {"prog": prog, "description": description if prog == whole else None, "registry": REGISTRY}
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    command, extra = tyro.cli(kind, args=words, config=config, return_unknown_args=True, **about)
    if extra:
        refuse(usage.extra_words(extra, prog))
    return command


def refuse(message: str) -> NoReturn:
    print(f"error: {escaped(message, 400)}", file=sys.stderr)
    raise SystemExit(2)


def run(command: Any, *, computes: bool = True) -> int:
    """Run a command and return its exit code: after an error 2, with one line on standard error; after Ctrl-C 130.

    `computes` says whether the command needs the address space that JAX takes.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tessera").setLevel(logging.DEBUG if command.debug else logging.INFO)
    try:
        interrupt.defer()
        if computes:
            check_address_space()
        return command.run()
    except KeyboardInterrupt as interruption:
        interrupt.told()
        print(f"interrupted: {interruption}".removesuffix(": "), file=sys.stderr)
        return interrupt.STATUS
    except BrokenPipeError:  # standard output is closed: the caller ends the process
        raise
    except (ValueError, OSError, MemoryError) as error:
        if command.debug:
            raise
        print(f"error: {escaped(explained(error), None)}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # from the device, or a bug in Tessera
        if command.debug:
            raise
        said = f"{type(error).__name__}: {escaped(error, 500)}"
        print(f"error: {said} (--debug shows where)", file=sys.stderr)
        return 2
