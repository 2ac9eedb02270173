#!/usr/bin/env bash
# Check this package on a machine with a Hopper GPU: environment, correctness, timing, tuning.
#   lab/gpu/check.sh                 run all parts for at most seven minutes; run it again to resume
#   lab/gpu/check.sh env correct     run these parts
#   lab/gpu/check.sh --dry           run all parts in the interpreter, on any machine
# Needs Python 3.12 with jax and numpy; the variable PYTHON names an interpreter other than python3. Installs nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_PREALLOCATE=false # PyTorch shares the GPU
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "error: $python is older than 3.12" >&2; exit 2; }
"$python" -c 'import jax, numpy' || { echo "error: $python has no jax; name one that has it: PYTHON=... $0" >&2; exit 2; }
# jaxtyping serves only annotations here, so a stub can replace it.
"$python" -c 'import jaxtyping' 2>/dev/null || export PYTHONPATH="$PYTHONPATH:$PWD/lab/gpu/stand_in"
exec "$python" -m lab.gpu "$@"
