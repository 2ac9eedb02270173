"""Everything to be found out on a machine with a Hopper GPU, in one command: `scripts/gpu_check.sh` runs it.

    python -m tessera.workbench.gpu_check                    # env, correct, time, tune; ends by itself within --limit-s
    python -m tessera.workbench.gpu_check correct time       # pieces
    python -m tessera.workbench.gpu_check --dry --out FILE   # all of it here: interpreter, tiny shapes, nothing meant

Needs Python, jax, numpy; torch and flash_attn are timed where they are installed. Every result is a record, a failed
item's error too, appended as it goes. A little of `correct` and `time` comes before the whole of either. A child
process (`worker.py`) does the work, and its parent (`supervisor.py`) outlives what hangs or crashes. What is done, and
what is tried again, `session.py` says.
"""
