#!/usr/bin/env bash
# Everything there is to find out on a machine with a Hopper GPU: environment, correctness, timing, tuning.
#   scripts/gpu_check.sh                 all pieces, as far as seven minutes go; again: resumes where it stopped
#   scripts/gpu_check.sh env correct     pieces
#   scripts/gpu_check.sh --dry           all of it in the interpreter, on any machine
# Needs Python 3.12 with jax and numpy (PYTHON names another one than python3); nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_PREALLOCATE=false # PyTorch shares the GPU
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "error: $python is older than 3.12" >&2; exit 2; }
"$python" -c 'import jax, numpy' || { echo "error: $python has no jax; name one that has it: PYTHON=... $0" >&2; exit 2; }
# Annotations are all that jaxtyping is for here.
"$python" -c 'import jaxtyping' 2>/dev/null || export PYTHONPATH="$PYTHONPATH:$PWD/scripts/stand_in"
exec "$python" -m tessera.workbench.gpu_check "$@"
