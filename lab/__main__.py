"""Entry point: `python -m lab COMMAND` in the repository's root."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    sys.exit(run("lab.commands"))
