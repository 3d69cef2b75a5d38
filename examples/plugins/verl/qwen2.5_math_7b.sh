#!/usr/bin/env bash
# Qwen2.5-Math-7B with DARO in verl 0.9.1, on one node of eight GPUs. docs/plugins.md says how to see that DARO is on.
#
#   bash examples/plugins/verl/qwen2.5_math_7b.sh MODEL TRAIN.parquet TEST.parquet [key=value ...]
#   bash examples/plugins/verl/qwen2.5_math_7b.sh MODEL TRAIN.parquet TEST.parquet --cfg job     prints the configuration, trains nothing
#
# Parquet files in verl's own format (examples/data_preprocess there). Rewards must be 0 and 1, or -1 and 1; for others set
# MEGATRON_DARO_OPTIONS=correct_above=... .
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
model=$1 train=$2 test=$3
shift 3

export VERL_USE_EXTERNAL_MODULES=megatron_daro.plugins.verl
export MEGATRON_DARO_OPTIONS=${MEGATRON_DARO_OPTIONS:-daro.learning_rate=0.01}
workers=+ray_kwargs.ray_init.runtime_env.env_vars

exec python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=daro \
    algorithm.use_kl_in_reward=False \
    "$workers.VERL_USE_EXTERNAL_MODULES=$VERL_USE_EXTERNAL_MODULES" \
    "$workers.MEGATRON_DARO_OPTIONS='$MEGATRON_DARO_OPTIONS'" \
    data.train_files="$train" \
    data.val_files="$test" \
    data.train_batch_size="${TRAIN_BATCH:-128}" \
    data.max_prompt_length=1024 \
    data.max_response_length=3072 \
    data.truncation=error \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
    trainer.project_name=daro \
    trainer.experiment_name=qwen2.5_math_7b \
    trainer.logger='["console"]' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.total_epochs=1 \
    "$@"
