#!/usr/bin/env bash
# The tests of tasks of the package verifiers (0.4.0), with its own code.
#
#   bash tests/verifiers_hub.sh                     arguments go to pytest
#
# Those on SGLang servers need $MEGATRON_DARO_SGLANG, the environment of tools/sglang_cpu_env.sh.
# Makes a virtual environment in $MEGATRON_DARO_VERIFIERS, else .venv-verifiers, that sees the packages of the active one
# (else .venv) and adds verifiers and what it lacks, from PyPI. The last lines are pytest's; exit status: pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

base=${VIRTUAL_ENV:-$PWD/.venv}/bin/python
place=${MEGATRON_DARO_VERIFIERS:-$PWD/.venv-verifiers}
if [ "$(cat "$place/.made" 2>/dev/null)" != "verifiers 0.4.0" ]; then
    "$("$base" -c 'import sys; print(sys._base_executable)')" -m venv --clear "$place"
    "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
        >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    "$place/bin/python" -m pip install -q --disable-pip-version-check verifiers==0.4.0
    echo "verifiers 0.4.0" >"$place/.made"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$place/bin/python" -m pytest -q "$@" tests/unit/environments/test_verifiers_tasks.py \
    tests/e2e/test_verifiers_runs.py
