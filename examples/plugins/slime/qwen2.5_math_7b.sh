#!/usr/bin/env bash
# Qwen2.5-Math-7B with DARO in slime, on one node of eight GPUs. docs/plugins.md says how to see that DARO is on.
#
#   bash examples/plugins/slime/qwen2.5_math_7b.sh SLIME HF_MODEL TORCH_DIST_MODEL TRAIN.jsonl SAVE [options of train.py]
#   DRY_RUN=1 bash examples/plugins/slime/qwen2.5_math_7b.sh ...      prints the command, starts nothing
#
# MEGATRON_LM: environment variable, the folder of Megatron-LM (in the Docker image of slime it is there).
#
# SLIME: the checkout. TORCH_DIST_MODEL: made by its tools/convert_hf_to_torch_dist.py. TRAIN.jsonl: prompt and label.
# This package must be importable on every node: pip install --no-deps . in this checkout, in slime's environment.
set -euo pipefail
[ $# -ge 5 ] || { sed -n '2,10p' "$0" >&2; exit 2; }
slime=$1 model=$2 start=$3 train=$4 save=$5
shift 5

export MEGATRON_DARO_OPTIONS=${MEGATRON_DARO_OPTIONS:-daro.learning_rate=0.01}
# Ray workers get these, too: hooks are imported there.
environment=$(printf '{"env_vars": {"PYTHONPATH": "%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "MEGATRON_DARO_OPTIONS": "%s"}}' \
    "${MEGATRON_LM:?set it to the folder of Megatron-LM, as in the Docker image of slime}" "$MEGATRON_DARO_OPTIONS")
# shellcheck disable=SC1090
source "$slime/scripts/models/${MODEL_SIZE:-qwen2.5-7B}.sh"
read -r -a daro <<<"$(python -m megatron_daro.plugins.slime --flags | tr -d '\\' | tr '\n' ' ')"

command=(ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}"
    --runtime-env-json="$environment" -- python3 train.py
    --actor-num-nodes "${NODES:-1}" --actor-num-gpus-per-node 8 --colocate
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "$model" --ref-load "$start" --load "$save" --save "$save" --save-interval 50
    --prompt-data "$train" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type math
    --num-rollout 500 --rollout-batch-size 128 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len "${RESPONSE:-3072}" --rollout-temperature 1
    --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.0 --use-rollout-logprobs --calculate-per-token-loss
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --tensor-model-parallel-size "${TP:-2}" --sequence-parallel --pipeline-model-parallel-size 1
    --context-parallel-size "${CP:-1}" --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu "${TOKENS:-9216}"
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash --rollout-num-gpus-per-engine "${ENGINE:-2}" --sglang-mem-fraction-static 0.7
    --use-tensorboard --tb-project-name daro --tb-experiment-name "${MODEL_SIZE:-qwen2.5-7B}"
    "${daro[@]}" "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit
fi
cd "$slime"
[ -n "${RAY_ADDRESS:-}" ] || ray start --head --num-gpus 8 --disable-usage-stats --dashboard-host=127.0.0.1 --dashboard-port=8265
exec "${command[@]}"
