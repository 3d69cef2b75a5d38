#!/usr/bin/env bash
# Qwen2.5-Math-7B with DARO in ROLL, on one node of eight GPUs. docs/plugins.md says how to see that DARO is on.
#
#   bash examples/plugins/roll/qwen2.5_math_7b.sh ROLL
#   DRY_RUN=1 bash examples/plugins/roll/qwen2.5_math_7b.sh ...      prints the command, starts nothing
#
# ROLL: the checkout. This package must be importable on every node: pip install --no-deps . in this checkout.
# Model, data and folders are in qwen2.5_math_7b.yaml beside this file.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
roll=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export MEGATRON_DARO_OPTIONS=${MEGATRON_DARO_OPTIONS:-daro.learning_rate=0.01}
export PYTHONPATH=$roll:$roll/mcore_adapter/src${PYTHONPATH:+:$PYTHONPATH}
command=(python -m megatron_daro.plugins.roll_driver --config_path "$here" --config_name qwen2.5_math_7b)
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit
fi
cd "$roll"
exec "${command[@]}"
