#!/usr/bin/env bash
# The tests of the Triton kernels on a machine without a GPU: their numbers in Triton's interpreter, and their
# compilation for GPUs.
#
#   bash tests/triton_kernels.sh                    arguments go to pytest
#
# Triton 3.9.0 (190 MB, from PyPI) is unpacked into $MEGATRON_DARO_TRITON, else .triton: beside the environment, since
# upstream's packages take other ways where they can import it. Uses the virtual environment that is active, else .venv.
# The last lines are pytest's; exit status: pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1

python=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=${MEGATRON_DARO_TRITON:-$PWD/.triton}
if [ ! -d "$place/triton-3.9.0.dist-info" ]; then
    rm -rf "$place"
    "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$place" triton==3.9.0
fi
export PYTHONPATH="$place${PYTHONPATH:+:$PYTHONPATH}"
TRITON_INTERPRET=1 "$python" -m pytest -q "$@" tests/kernels/test_logprob_kernels.py
"$python" -m pytest -q "$@" tests/kernels/test_kernel_compilation.py
