"""Run every check that needs a Hopper GPU, in one command: `scripts/gpu_check.sh` runs it.

    python -m tessera.workbench.gpu_check                    # env, correct, time, tune; ends by itself within --limit-s
    python -m tessera.workbench.gpu_check correct time       # only these pieces
    python -m tessera.workbench.gpu_check --dry --out FILE   # in the interpreter, tiny shapes; measures nothing

Needs Python, jax and numpy; also times torch and flash_attn if they are installed. Every result is appended to the file
as a record when it arrives, and so is the error of an item (one measurement) that fails. The first items of `correct`
and `time` run before the rest of both. A child process (`worker.py`) does the work, and its parent (`supervisor.py`)
survives hangs and crashes. `session.py` decides what is done and what to retry.
"""
