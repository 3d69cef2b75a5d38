#!/usr/bin/env bash
# Compares DARO with its rivals on this machine; no GPU. Options and what comes out: examples/lab/README.md
#   bash examples/lab/run.sh [--quick] [--arms a,b] [--worlds a,b] [--seeds 5] [--processes 2] [--out runs/lab]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=${VIRTUAL_ENV:-$PWD/.venv}/bin
if ! "$bin/python" -c 'import megatron_daro' 2>/dev/null; then
    echo "run.sh: no environment with megatron_daro ($bin/python has none); activate one, or make .venv:" >&2
    echo "    python3.11 -m venv .venv && .venv/bin/python -m pip install -e ." >&2
    exit 1
fi
# Algorithms of the lab itself are found by the runs of the tiny world, too.
export PYTHONPATH=$PWD/examples/lab${PYTHONPATH:+:$PYTHONPATH}
# The C library would keep a language model's freed activations once for each thread that had some (glibc, mallopt(3)).
export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-1}
exec env OMP_NUM_THREADS=1 HF_HUB_DISABLE_PROGRESS_BARS=1 "$bin/python" -W ignore examples/lab/lab.py "$@"
