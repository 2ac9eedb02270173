"""Run every check that needs a Hopper GPU, in one command: `scripts/gpu_check.sh` runs it.

    python -m tessera.workbench.gpu_check                    # env, correct, time, tune; ends by itself within --limit-s
    python -m tessera.workbench.gpu_check correct time       # pieces
    python -m tessera.workbench.gpu_check --dry --out FILE   # in the interpreter, tiny shapes; measures nothing

Needs Python, jax and numpy; times torch and flash_attn where they are installed. Every result is a record, appended as
it arrives; so is a failed item's error. The first cases of `correct` and `time` run before the rest of either. A child
process (`worker.py`) does the work, and its parent (`supervisor.py`) survives hangs and crashes. `session.py` decides
what is done and what to retry.
"""
