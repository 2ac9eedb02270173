"""Run every check that needs a Hopper GPU, in one command: `lab/gpu/check.sh` runs it.

    python -m lab.gpu                    # env, correct, time, tune; starts no item after --limit-s
    python -m lab.gpu correct time       # only these pieces
    python -m lab.gpu --dry --out FILE   # in the interpreter, tiny shapes; measures nothing

The check needs Python, jax and numpy; it also times torch and flash_attn if they are installed. An item is one
measurement. Each item's result or error is appended to the file as a record when it arrives. A first pass runs `env`
and only the first items of `correct` and `time`. A child process (`worker.py`) does the work, and its parent
(`supervisor.py`) survives hangs and crashes. `session.py` decides which items are done and which to retry.
"""
