#!/usr/bin/env bash
# Qwen2.5-Math-7B with DARO in Megatron-LM's own RL script, eight GPUs. docs/plugins.md says how to see that DARO is on.
#
#   bash examples/plugins/megatron_lm/qwen2.5_math_7b.sh MEGATRON_LM CHECKPOINT RUN [options of train_rl.py]
#   DRY_RUN=1 bash examples/plugins/megatron_lm/qwen2.5_math_7b.sh ...      prints the command, starts nothing
#
# MEGATRON_LM: the checkout, in an environment as its examples/rl/README.md says; this package: pip install --no-deps .
# there. CHECKPOINT: made by its tools/checkpoint/convert.py. The model's options are those of its own example
# examples/rl/model_configs/qwen_2p5_math_7b.sh, which is sourced; two options more are DARO's.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
megatron=$1 run=$3
export CHECKPOINT=$2
shift 3

export MEGATRON_DARO_OPTIONS=${MEGATRON_DARO_OPTIONS:-daro.learning_rate=0.01}
export ENV_CONFIG=${ENV_CONFIG:-$megatron/examples/rl/environment_configs/dapo.yaml}
# A packed batch has one bin a micro-batch.
export MICRO_BATCH_SIZE=1 GRPO_GROUP_SIZE=${GRPO_GROUP_SIZE:-16} RUN_REQUEST_ARGS=
# shellcheck disable=SC1091
source "$megatron/examples/rl/model_configs/qwen_2p5_math_7b.sh" >&2

# The example's options are words in three strings.
# shellcheck disable=SC2206
command=(torchrun --nproc-per-node 8 --nnodes "${NODES:-1}" -m megatron_daro.plugins.megatron_rl "$megatron/train_rl.py"
    $MODEL_OPTIONS $COMMON_OPTIONS $ENV_DEPENDENT
    --rl-use-sequence-packing --rl-sequence-packing-algo fifo
    --perform-rl-step --use-distributed-optimizer --mock-data --train-samples 48828125
    --no-create-attention-mask-in-dataloader --accumulate-allreduce-grads-in-fp32
    --log-interval 1 --tensorboard-log-interval 1 --tensorboard-dir "$run/tensorboard"
    --save "$run/checkpoints" --load "$run/checkpoints" --save-interval 20 --eval-interval 20 --rl-prompts-per-eval 32
    --data-cache-path "$run/data_cache" "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit
fi
cd "$megatron"
exec "${command[@]}"
