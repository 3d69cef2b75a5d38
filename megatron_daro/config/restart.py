"""What a changed option means for a run that is resumed: one class for every field of the configuration.

Place in the data flow: read by the restart audit (runtime/restart_audit.py), which compares the configuration of a
resumed run with the one its checkpoint was made with. Holds names only. A field without a class makes a test red: an
option that is taken, ignored or refused by accident is the fault that the audit exists for.
"""

from __future__ import annotations

from typing import Literal

ChangeClass = Literal["runs", "trains", "refused", "content"]

_RUNS = """
model.trust_remote_code
rollout.finish_batch
actor.tensor_parallel actor.pipeline_parallel actor.virtual_pipeline_parallel actor.context_parallel actor.data_parallel
actor.sequence_parallel
actor.expert_parallel actor.expert_tensor_parallel
actor.recompute actor.micro_batch_tokens actor.logprob_chunk_tokens
engine.kind engine.replicas engine.colocate engine.embedded.batch_size engine.embedded.threads
engine.sglang.python engine.sglang.urls engine.sglang.arguments engine.sglang.env engine.sglang.tensor_parallel
engine.sglang.nodes engine.sglang.fp8_blocks
engine.sglang.sync engine.sglang.sync_dir engine.sglang.bucket_mib engine.sglang.verify
engine.sglang.max_tokens_in_flight engine.sglang.start_timeout_s engine.sglang.request_timeout_s
engine.sglang.answer_workers engine.sglang.stall_timeout_s engine.sglang.sync_timeout_s engine.sglang.max_restarts
reward.workers
trainer.run_dir trainer.save_every_steps trainer.keep_checkpoints trainer.keep_every_steps trainer.eval_every_steps
trainer.deadline_scale trainer.export_hf
cluster.nodes cluster.gpus_per_node cluster.gpu
observe.progress observe.tensorboard observe.save_rollouts
observe.wandb.enabled observe.wandb.project observe.wandb.name
"""
# Where and how the run computes: in effect at once, the training stays the same but for rounding and order.

_TRAINS = """
data.eval.*.name data.eval.*.format data.eval.*.problem_field data.eval.*.answer_field
data.eval.*.rollouts_per_prompt data.eval.*.temperature data.eval.*.max_prompts
data.eval.*.drop_unusable data.eval.*.top_p data.eval.*.template data.eval.*.rows
rollout.temperature rollout.top_p rollout.max_response_tokens rollout.stop rollout.stop_token_ids rollout.max_staleness
rollout.oversampling rollout.max_refill_rounds rollout.keep_surplus
algorithm.options algorithm.std algorithm.filter algorithm.clip_low algorithm.clip_high algorithm.dual_clip
algorithm.entropy_coefficient
algorithm.old_logprobs algorithm.kl.coefficient algorithm.kl.estimator
algorithm.correction.kind algorithm.correction.level algorithm.correction.cap algorithm.correction.low
algorithm.correction.high algorithm.overlong.kind algorithm.overlong.max_tokens algorithm.overlong.cache_tokens
algorithm.daro.learning_rate algorithm.daro.betas algorithm.daro.magnitude algorithm.daro.normalizer
algorithm.daro.scale algorithm.daro.clamp
algorithm.dgpo.temperature algorithm.f_grpo.gamma algorithm.fade.max_power algorithm.fade.min_scale
algorithm.fade.rate algorithm.fade.target_entropy algorithm.ha_dw.rate algorithm.ha_dw.scale algorithm.ha_dw.window
algorithm.lambda_grpo.betas algorithm.lambda_grpo.learning_rate algorithm.lambda_grpo.spread algorithm.mgpo.strength
algorithm.mgpo.target algorithm.sapo.negative algorithm.sapo.positive algorithm.trust_region
actor.optimizer.learning_rate actor.optimizer.weight_decay actor.optimizer.betas actor.optimizer.eps
actor.optimizer.grad_clip actor.optimizer.warmup_steps actor.optimizer.schedule
actor.optimizer.min_learning_rate_ratio
actor.routing_replay actor.megatron
actor.fp8_recipe actor.fp8_format actor.num_layers_at_start_in_bf16 actor.num_layers_at_end_in_bf16
engine.seed engine.sglang.pause
reward.verifier reward.timeout_s reward.memory_mib reward.strict reward.marker reward.correct_reward
reward.incorrect_reward reward.refuse_restated
trainer.steps trainer.on_nonfinite
"""
# What is trained or measured: in effect from the resumed step on, so the run is not the one that was begun.

_REFUSED = {
    "model.megatron_weights": "the reference policy starts from it",
    "data.format": "the prompts would be others",
    "data.problem_field": "the prompts would be others",
    "data.answer_field": "the right answers would be others",
    "data.prompt_template": "the prompts would be others",
    "data.template": "the prompts would be others",
    "data.max_prompt_tokens": "the prompts would be others",
    "data.shuffle": "the order of the prompts would be another",
    "data.order": "the order of the prompts would be another",
    "data.curriculum.start": "the order of the prompts would be another",
    "data.curriculum.ramp_prompts": "the order of the prompts would be another",
    "data.prioritised.by": "the order of the prompts would be another",
    "data.prioritised.exponent": "the order of the prompts would be another",
    "data.prioritised.floor": "the order of the prompts would be another",
    "data.prioritised.memory": "the order of the prompts would be another",
    "rollout.rollouts_per_prompt": "DARO's weights belong to K",
    "rollout.prompts_per_step": "groups that wait in the checkpoint belong to batches of that size",
    "algorithm.name": "the checkpoint holds the state of that algorithm",
    "algorithm.daro.parameter": "the saved weights are in that unit",
    "algorithm.daro.kernels": "the saved weights are theirs",
    "algorithm.daro.half_life": "the saved weights are averages with it, and Adam's without",
    "algorithm.daro.length_edges": "the saved weights belong to those classes of lengths",
    "actor.precision": "the saved weights and optimizer state belong to that precision",
    "actor.optimizer.distributed": "the saved optimizer state is laid out for it",
    "trainer.seed": "order of prompts and sampling come from it",
    "trainer.updates_per_batch": "the checkpoint counts batches of that many steps",
}
"""Fields that a checkpoint is bound to, each with the reason."""

_CONTENT = ("model.path", "data.train", "data.eval.*.path")
# Files: a path may be another one; what the files hold is compared (and belongs to the classes of restart_audit.py).

CLASS_OF: dict[str, ChangeClass] = {
    **dict.fromkeys(_RUNS.split(), "runs"),
    **dict.fromkeys(_TRAINS.split(), "trains"),
    **dict.fromkeys(_REFUSED, "refused"),
    **dict.fromkeys(_CONTENT, "content"),
}
"""The class of each field, by dotted path (`*` for a position in a list)."""


def why_refused(path: str) -> str:
    """Why the checkpoint is bound to this field."""
    return _REFUSED[path]
