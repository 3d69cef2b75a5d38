#!/usr/bin/env bash
# Qwen2.5-Math-7B with DARO in NeMo-RL, on one node of eight GPUs. docs/plugins.md says how to see that DARO is on.
#
#   bash examples/plugins/nemo_rl/qwen2.5_math_7b.sh NEMO_RL MODEL [key=value ...]
#   DRY_RUN=1 bash examples/plugins/nemo_rl/qwen2.5_math_7b.sh ...      prints the command, starts nothing
#
# NEMO_RL: the checkout, with uv as its documentation says. Its driver and workers import this package from PYTHONPATH,
# which NeMo-RL hands on to Ray; it needs nothing that NeMo-RL's environments do not have (torch, pydantic, PyYAML).
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
nemo=$1 model=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)

export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export MEGATRON_DARO_OPTIONS=${MEGATRON_DARO_OPTIONS:-daro.learning_rate=0.01}
# One optimizer step a batch: train_global_batch_size is prompts times generations.
command=(uv run python "$here/examples/plugins/nemo_rl/run_grpo_daro.py" "$nemo/examples/run_grpo.py"
    --config "$nemo/examples/configs/grpo_math_8B.yaml"
    policy.model_name="$model"
    grpo.num_prompts_per_batch=64 grpo.num_generations_per_prompt=8 policy.train_global_batch_size=512
    policy.max_total_sequence_length=4096 policy.optimizer.kwargs.lr=1e-6
    grpo.use_leave_one_out_baseline=false grpo.normalize_rewards=true
    loss_fn.token_level_loss=true loss_fn.reference_policy_kl_penalty=0
    loss_fn.ratio_clip_min=0.2 loss_fn.ratio_clip_max=0.28
    data_plane.enabled=false cluster.gpus_per_node=8 cluster.num_nodes=1
    logger.tensorboard_enabled=true checkpointing.checkpoint_dir=results/daro_qwen2.5_math_7b
    "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit
fi
cd "$nemo"
exec "${command[@]}"
