"""Every configuration that is refused before anything starts, driven as the command line does it: a file and overrides.

For all of them: the error is a ConfigError that counts its refusals, one a line, each with the option, what was got,
what is allowed and how to fix it. For each: which options are named, and that the right value beside the wrong one is
accepted. The sentences are free.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_daro.config import Config, Hardware, resolve, resolve_and_check, yaml_text
from megatron_daro.config.loading import strip, walk
from megatron_daro.config.problems import show
from megatron_daro.errors import ConfigError

HERE = Hardware("cpu", 4, memory_bytes=64 * 2**30)
SERVERS = "engine.kind=sglang engine.sglang.python=/usr/bin/python3"
NODE = "cluster.gpus_per_node=8 cluster.gpu=H100"
WORDS = {
    "SERVERS": SERVERS,
    "RUNNING": "engine.kind=sglang engine.sglang.urls=[http://h:1]",
    "NODE": NODE,
    "TURNS": f"{SERVERS} {NODE} engine.colocate=true engine.sglang.sync=tensor actor.tensor_parallel=2 "
    "actor.data_parallel=4 engine.replicas=4 engine.sglang.tensor_parallel=2",
    "QUANTIZED": 'engine.sglang.arguments={"quantization":"fp8","load_format":"flash_rl"}',
    "PPO": "algorithm.name=ppo",
    "TEACHER": "algorithm.name=grpo algorithm.distill.urls=[http://t:1]",
    "FIRST": "actor.megatron.num_layers_in_first_pipeline_stage",
    "LAST": "actor.megatron.num_layers_in_last_pipeline_stage",
    "EMBEDDING": "actor.megatron.account_for_embedding_in_pipeline_split",
    "LOSS": "actor.megatron.account_for_loss_in_pipeline_split",
}
SIZES = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 65536}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"norm_topk_prob": True}
BLOCKS = {"model_type": "qwen3", "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 512}
SINKS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
OLMO = {"model_type": "olmo3", "rope_theta": 1e4, "sliding_window": 8, "layer_types": ["full_attention"] * 4}
LINEAR = {**EXPERTS, "model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MODELS = {
    "small": {},
    "linear": LINEAR,
    "olmo": OLMO,
    "olmo_by_type": {**OLMO, "rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "sinks": SINKS,
    "mxfp4": {**SINKS, "quantization_config": {"quant_method": "mxfp4"}},
    "six_layers": {**SIZES, "model_type": "llama"},
    "experts": {**SIZES, **EXPERTS},
    "some_dense": {**SIZES, **EXPERTS, "intermediate_size": 97, "mlp_only_layers": [0]},
    "endless": {"eos_token_id": None},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "llama": {"model_type": "llama"},
    "blocks": BLOCKS,
    "odd_blocks": {**BLOCKS, "hidden_size": 320},
    "odd": {"intermediate_size": 136},
    "more_tokens": {"vocab_size": 101},
    "fewer_layers": {"num_hidden_layers": 3},
    "short": {"max_position_embeddings": 5119},
    "headless": {"architectures": ["Qwen2Model"]},
    "other_tokenizer": {},
    "classifier": {"architectures": ["Qwen2ForSequenceClassification"], "hidden_size": 128, "num_hidden_layers": 2},
    "added": {},
    "added_51": {"vocab_size": 51},
    "added_50": {"vocab_size": 50},
    "unigram": {},
    "other_unigram": {},
    "block_experts": {**BLOCKS, **EXPERTS, "num_key_value_heads": 2, "moe_intermediate_size": 256},
    "odd_block_experts": {**BLOCKS, **EXPERTS, "num_key_value_heads": 2, "moe_intermediate_size": 100},
}
"""What each says otherwise than the model of conftest.py."""
TOKENIZERS = {
    "other_tokenizer": {"model": {"vocab": {"a": 1}}},
    **{name: {"added_tokens": [{"content": "<x>", "id": 50}]} for name in ("added", "added_51", "added_50")},
    "unigram": {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}},
    "other_unigram": {"model": {"vocab": [["b", -1.0], ["a", -2.0]]}},
}

# Options | the options that are named | what makes it right, where the fix does not name a value.
# A line that is too long goes on, indented, in the next.
REFUSED = r"""
modle.path=x | modle | -
rollout.x=1 | rollout.x | -
data.stop=x | data.stop | -
observe=3 | observe | observe={}
trainer={"optimizer.steps":3} | trainer.optimizer.steps | -
trainer.steps=true | trainer.steps | trainer.steps=1
trainer.steps='3' | trainer.steps | trainer.steps=3
trainer.steps=010 | trainer.steps | trainer.steps=10
trainer.steps=99999999999999999999 | trainer.steps | trainer.steps=2147483647
trainer.seed=-1 | trainer.seed | trainer.seed=0
trainer.seed=9223372036854775808 | trainer.seed | trainer.seed=9223372036854775807
trainer.run_dir="" | trainer.run_dir | trainer.run_dir=.
trainer.run_dir="a\0b" | trainer.run_dir | trainer.run_dir=ab
trainer.keep_checkpoints=0 | trainer.keep_checkpoints | trainer.keep_checkpoints=1
trainer.deadline_scale=1e-9 | trainer.deadline_scale | trainer.deadline_scale=0.001
trainer.deadline_scale=1e300 | trainer.deadline_scale | trainer.deadline_scale=1000
model.path="" | model.path | -
model.path=~nobody-of-this-name/m | model.path | -
model.path=/nowhere | model.path | -
model.path=TRAIN | model.path | -
model.path=MODELS/mxfp4 | model.path | model.path=MODELS/sinks
SERVERS NODE model.path=MODELS/olmo_by_type | model.path | model.path=MODELS/olmo
model.megatron_weights=MODELS | model.megatron_weights | model.megatron_weights=null
data.train=[] | data.train | data.train=TRAIN
data.train=[3] | data.train.0 | data.train=TRAIN
data.train=[/nowhere.jsonl] | data.train.0 | data.train=TRAIN
data.train=[/] | data.train.0 | data.train=TRAIN
data.train=[TRAIN,TRAIN] | data.train | data.train=[TRAIN]
data.template="" | data.template | data.template="{prompt}"
data.template="{prompt}{prompt}" | data.template | data.template="{problem}{{prompt}}%s"
data.prompt_template=none data.template="{prompt}?" | data.template | data.prompt_template=plain
data.prompt_template=r1 reward.verifier=integer | data.prompt_template |
data.eval=[{"name":"a","path":"TRAIN","template":"r1"}] reward.verifier=exact | data.eval.0.template |
data.pass_rates=[0,2] | data.pass_rates.1 | data.pass_rates=[0,1]
data.pass_rates=[0.9,0.1] | data.pass_rates | data.pass_rates=[0.5,0.5]
data.format=parquet | data.train.0 | data.format=auto
data.curriculum.start=1e-300 | data.curriculum.start | data.curriculum.start=1e-6
data.prioritised.floor=2 | data.prioritised.floor | data.prioritised.floor=1
data.eval=[{"name":"a"}] | data.eval.0.path | -
data.eval=[{"name":"a/b","path":"TRAIN"}] | data.eval.0.name | data.eval.0.name=a.b
data.eval=[{"name":"a","path":"/nowhere"}] | data.eval.0.path | data.eval.0.path=TRAIN
data.eval=[{"name":"a","path":"TRAIN"},{"name":"a","path":"TRAIN"}] | data.eval | data.eval.1.name=b
data.eval=[{"name":"a","path":"TRAIN","temperature":0.0009}] | data.eval.0.temperature | data.eval.0.temperature=0
data.eval=[{"name":"a","path":"TRAIN","rollouts_per_prompt":2}] | data.eval.0.temperature |
  data.eval.0.rollouts_per_prompt=1
trainer.eval_every_steps=1 | trainer.eval_every_steps |
rollout.rollouts_per_prompt=1 | rollout.rollouts_per_prompt | rollout.rollouts_per_prompt=2
rollout.prompts_per_batch=99999999999999999999 | rollout.prompts_per_batch | rollout.prompts_per_batch=65536
rollout.prompts_per_batch=65536 rollout.rollouts_per_prompt=65 | rollout.prompts_per_batch |
  rollout.rollouts_per_prompt=64
rollout.oversampling=.inf | rollout.oversampling | rollout.oversampling=100
rollout.top_p=.nan | rollout.top_p | rollout.top_p=1
rollout.top_p=1e-300 | rollout.top_p | rollout.top_p=1e-6
rollout.temperature=1e30 | rollout.temperature | rollout.temperature=100
rollout.temperature=-0.1 | rollout.temperature | rollout.temperature=0.001
rollout.temperature=0.0009 | rollout.temperature | rollout.temperature=0.001
rollout.temperature=0 | rollout.temperature |
rollout.stop=[''] | rollout.stop.0 | rollout.stop=[]
rollout.stop_token_ids=[-1] | rollout.stop_token_ids.0 | rollout.stop_token_ids=[0]
rollout.stop_token_ids=[5,100] | rollout.stop_token_ids | rollout.stop_token_ids=[5,99]
model.path=MODELS/endless | rollout.stop_token_ids | rollout.stop_token_ids=[0]
model.path=MODELS/endless | rollout.stop_token_ids | rollout.stop=[x]
rollout.max_response_tokens=7169 | rollout.max_response_tokens | rollout.max_response_tokens=7168
rollout.keep_surplus=true | rollout.keep_surplus | rollout.max_staleness=1
rollout.segment_tokens=1000 rollout.max_staleness=4 | rollout.max_staleness |
rollout.segment_tokens=1000 rollout.max_staleness=5 engine.kind=my:Own | rollout.segment_tokens |
rollout.segment_tokens=1000 rollout.max_staleness=5 environment.kind=my:Own | rollout.segment_tokens |
algorithm.repetition_penalty=0.5 | algorithm.repetition_penalty | rollout.repetition.tokens=256
algorithm.name=doro | algorithm.name | algorithm.name=daro
algorithm.name=my:Own:Two | algorithm.name | algorithm.name=my.file:Own
algorithm.clip_low='0.2' | algorithm.clip_low | algorithm.clip_low=0.2
algorithm.clip_low=1 | algorithm.clip_low | algorithm.clip_low=0.999
algorithm.kl.coefficient=1e300 | algorithm.kl.coefficient | algorithm.kl.coefficient=1000
algorithm.kl.place=reward algorithm.kl.mean=rollouts | algorithm.kl.mean | algorithm.kl.mean=tokens
algorithm.name=grpo algorithm.kl.place=token_reward | algorithm.kl.place | algorithm.name=ppo
algorithm.daro.half_life=1e-300 | algorithm.daro.half_life | algorithm.daro.half_life=0.001
algorithm.daro.parameter=linear algorithm.daro.half_life=5 | algorithm.daro.parameter | algorithm.daro.half_life=null
algorithm.daro.clamp=0.5 | algorithm.daro.clamp | algorithm.daro.clamp=[0.5,2]
algorithm.daro.clamp=[1.5,2] | algorithm.daro.clamp | algorithm.daro.clamp=[1,2]
algorithm.daro.clamp=[1.1,2] | algorithm.daro.clamp | algorithm.daro.clamp=[0.5,1]
algorithm.daro.clamp=[0.5,0.9] | algorithm.daro.clamp |
algorithm.daro.clamp=[0,2] | algorithm.daro.clamp | algorithm.daro.clamp=[1e-30,1e30]
algorithm.name=grpo algorithm.daro.normalizer=shared | algorithm.daro | algorithm.name=daro_ppo
algorithm.name=grpo algorithm.daro.clamp=[1.5,2] | algorithm.daro | algorithm.daro.clamp=[0.1,10]
algorithm.dual_clip=1 | algorithm.dual_clip | algorithm.dual_clip=1.01
algorithm.trust_region=cispo algorithm.dual_clip=3 | algorithm.dual_clip | algorithm.trust_region=gspo
algorithm.trust_region=reinforce algorithm.dual_clip=3 | algorithm.dual_clip |
algorithm.trust_region=reinforce trainer.epochs_per_batch=2 | trainer.epochs_per_batch |
algorithm.trust_region=gspo algorithm.correction.kind=tis | algorithm.correction.level |
algorithm.correction.kind=mis algorithm.correction.low=1.01 | algorithm.correction.low | algorithm.correction.low=1
algorithm.correction.kind=mis algorithm.correction.high=0.99 | algorithm.correction.high | algorithm.correction.high=1
algorithm.correction.kind=tis algorithm.old_logprobs=rollout | algorithm.correction.kind |
algorithm.old_logprobs=forward trainer.minibatches_per_batch=2 | algorithm.old_logprobs |
algorithm.old_logprobs=forward trainer.epochs_per_batch=2 | algorithm.old_logprobs |
algorithm.name=kimi algorithm.trust_region=gspo | algorithm.trust_region | algorithm.trust_region=clip
algorithm.name=kimi algorithm.dual_clip=3 | algorithm.dual_clip |
algorithm.overlong.kind=penalty algorithm.overlong.max_tokens=5000 algorithm.overlong.cache_tokens=904 |
  algorithm.overlong.max_tokens | algorithm.overlong.cache_tokens=905
algorithm.overlong.kind=penalty algorithm.overlong.max_tokens=3 algorithm.overlong.cache_tokens=4 |
  algorithm.overlong.cache_tokens | algorithm.overlong.cache_tokens=3
PPO algorithm.options.bootstrap_truncated=true rollout.max_response_tokens=1 | algorithm.options.bootstrap_truncated |
  rollout.max_response_tokens=2
algorithm.critic.learning_rate=1e-4 | algorithm.critic | algorithm.name=ppo
trainer.export_critic=true | trainer.export_critic | algorithm.name=ppo
PPO algorithm.critic.value_clip=0.2 | algorithm.critic.value_clip | trainer.minibatches_per_batch=4
PPO algorithm.critic.offload=true trainer.replace_lost_ranks=true | algorithm.critic.offload |
PPO algorithm.critic.pretrain_steps=100 | algorithm.critic.pretrain_steps | algorithm.critic.pretrain_steps=99
PPO algorithm.critic.warmup_steps=101 | algorithm.critic.warmup_steps | algorithm.critic.warmup_steps=100
PPO algorithm.critic.path=/nowhere | algorithm.critic.path | algorithm.critic.path=null
lora.alpha=32 | lora | lora.rank=4
lora.rank=4 lora.targets=[w_proj] | lora.targets | lora.targets=[q_proj]
lora.rank=4 lora.targets=[] | lora.targets | lora.targets=all
lora.rank=4 lora.dropout=0.1 | lora.dropout | lora.dropout=0
lora.rank=4 lora.alpha=0 | lora.alpha | lora.alpha=0.5
lora.rank=999 | lora.rank | lora.rank=1
lora.rank=4 lora.path=/nowhere | lora.path | lora.path=null
NODE lora.rank=4 actor.precision=fp8 | lora.rank | actor.precision=bf16
lora.rank=4 model.path=MODELS/experts | lora.targets | lora.targets=[q_proj,k_proj,v_proj,o_proj]
lora.rank=4 model.path=MODELS/experts lora.targets=[q_proj,down_proj] | lora.targets | lora.targets=[q_proj]
lora.rank=4 model.path=MODELS/linear lora.targets=[q_proj] actor.pipeline_parallel=2 actor.data_parallel=2 |
  lora.targets | actor.pipeline_parallel=1 actor.data_parallel=4
trainer.export_adapter=true | trainer.export_adapter | lora.rank=4
SERVERS engine.sglang.sync=adapters | engine.sglang.sync | lora.rank=4
SERVERS engine.sglang.sync=adapters lora.rank=4 lora.targets=[q_proj] | engine.sglang.sync |
  lora.targets=[q_proj,v_proj]
SERVERS engine.sglang.sync=adapters lora.rank=4 lora.targets=[up_proj] | engine.sglang.sync |
  lora.targets=[up_proj,gate_proj]
SERVERS engine.sglang.sync=adapters lora.rank=4 engine.sglang.arguments.device=cpu model.path=MODELS/odd |
  engine.sglang.sync | lora.targets=[q_proj,v_proj]
SERVERS NODE QUANTIZED engine.sglang.sync=adapters lora.rank=4 | engine.sglang.sync |
PPO algorithm.critic.path=MODELS/more_tokens | algorithm.critic.path | algorithm.critic.path=MODELS/small
PPO algorithm.critic.path=MODELS/other_tokenizer | algorithm.critic.path | algorithm.critic.path=MODELS/small
PPO model.path=MODELS/unigram algorithm.critic.path=MODELS/other_unigram | algorithm.critic.path |
  algorithm.critic.path=MODELS/unigram
PPO model.path=MODELS/added algorithm.critic.path=MODELS/added_50 | algorithm.critic.path |
  algorithm.critic.path=MODELS/added_51
PPO algorithm.critic.path=MODELS/headless | algorithm.critic.path | algorithm.critic.path=null
PPO algorithm.critic.path=MODELS/short | algorithm.critic.path | rollout.max_response_tokens=4095
PPO algorithm.critic.path=MODELS/fewer_layers actor.pipeline_parallel=2 | algorithm.critic.path |
  actor.pipeline_parallel=1
NODE PPO actor.precision=fp8 algorithm.critic.path=MODELS/olmo | algorithm.critic.path | actor.precision=bf16
NODE PPO actor.precision=fp8 algorithm.critic.path=MODELS/odd | algorithm.critic.path |
  algorithm.critic.path=MODELS/small
PPO actor.precision=fp8 algorithm.critic.path=MODELS/olmo | actor.precision |
algorithm.distill.coefficient=2 | algorithm.distill | algorithm.distill.coefficient=1
TEACHER algorithm.distill.coefficient=0 | algorithm.distill | algorithm.distill.reward_weight=1
TEACHER algorithm.distill.urls=[http://t:1,http://t:1] | algorithm.distill.urls | algorithm.distill.urls=[http://t:1]
TEACHER RUNNING engine.sglang.urls=[http://t:1] | algorithm.distill.urls | engine.sglang.urls=[http://h:1]
TEACHER rollout.temperature=0.9 | algorithm.distill |
TEACHER algorithm.name=ppo | algorithm.distill |
TEACHER algorithm.kl.place=reward algorithm.kl.coefficient=0.1 | algorithm.distill |
environment.kind=my:Own algorithm.turn_rewards=true algorithm.kl.place=reward algorithm.kl.coefficient=0.1 |
  algorithm.turn_rewards |
algorithm.turn_rewards=true | algorithm.turn_rewards | environment.kind=my:Own
environment.options.x=1 | environment.options | environment.kind=my:Own
environment.reward_weights.x=1 | environment.reward_weights | environment.kind=my:Own
environment.host=0.0.0.0 | environment.host |
environment.kind=my:Own environment.sandbox=true | environment.sandbox | environment.sandbox=false
environment.kind=agent environment.command=[x] environment.strict=true | environment.strict |
  environment.strict=false
environment.kind=verifiers:a environment.max_turns=3 | environment.max_turns | environment.kind=my:Own
environments=[{"name":"a","sources":["c"]},{"name":"a"}] | environments | environments=[{"name":"a"},{"name":"b"}]
environments=[{"name":"a","sources":["b"]},{"name":"b"}] | environments | environments=[{"name":"a"},{"name":"b"}]
environments=[{"name":"a","weight":1},{"name":"b"}] | environments | environments=[{"name":"a"},{"name":"b"}]
environments=[{"name":"a"},{"name":"b"}] environment.timeout_s=5 | environment | environment.timeout_s=300
environments=[{"name":"a","command":["x"]}] | environments.0.command | environments=[{"name":"a"}]
environments=[{"name":"a"}] rollout.segment_tokens=1000 rollout.max_staleness=5 | rollout.segment_tokens |
algorithm.daro.weights_by=environment_pass_rate | algorithm.daro.weights_by | algorithm.daro.weights_by=pass_rate
environment.kind=my:Own environment.reward_weights.a=x | environment.reward_weights.a | environment.reward_weights.a=1
environment={"kind":"my:Own","reward_weights":{"a.b":"x"}} | environment.reward_weights.a.b |
  environment.reward_weights={"a.b":1}
reward.incorrect_reward=1 | reward.correct_reward | reward.incorrect_reward=0.99
reward.correct_reward=1e308 | reward.correct_reward | reward.correct_reward=1e6
reward.timeout_s=1e-9 | reward.timeout_s | reward.timeout_s=0.01
reward.workers=1025 | reward.workers | reward.workers=1024
actor.precision=fp16 | actor.precision | actor.precision=bf16
actor.optimizer.learning_rate=1e-300 | actor.optimizer.learning_rate | actor.optimizer.learning_rate=1e-12
actor.optimizer.betas=[0.9] | actor.optimizer.betas | actor.optimizer.betas=[0.9,0]
actor.optimizer.betas=[0.9,1.0] | actor.optimizer.betas.1 | actor.optimizer.betas=[0.9,0.9999]
actor.optimizer.eps=1e-300 | actor.optimizer.eps | actor.optimizer.eps=1e-30
actor.optimizer.grad_clip=1e-300 | actor.optimizer.grad_clip | actor.optimizer.grad_clip=0
actor.optimizer.warmup_steps=101 trainer.minibatches_per_batch=2 | actor.optimizer.warmup_steps |
  actor.optimizer.warmup_steps=100
actor.sequence_parallel=true | actor.sequence_parallel | actor.sequence_parallel=null
trainer.minibatches_per_batch=65 | trainer.minibatches_per_batch | trainer.minibatches_per_batch=64
rollout.prompts_per_batch=1 rollout.rollouts_per_prompt=2 actor.data_parallel=3 | actor.data_parallel |
  actor.data_parallel=2
actor.micro_batch_tokens=5119 | actor.micro_batch_tokens |
actor.micro_batch_tokens=5000 data.max_prompt_tokens=1022 actor.context_parallel=2 | actor.micro_batch_tokens |
actor.context_parallel=2 actor.tensor_parallel=2 actor.micro_batch_tokens=16386 | actor.micro_batch_tokens |
NODE actor.precision=fp8 actor.micro_batch_tokens=16400 | actor.micro_batch_tokens |
actor.tensor_parallel=16 | actor.tensor_parallel | actor.tensor_parallel=8
actor.pipeline_parallel=3 | actor.pipeline_parallel | actor.pipeline_parallel=4
model.path=MODELS/six_layers actor.tensor_parallel=6 actor.micro_batch_tokens=12288 | actor.tensor_parallel |
  actor.tensor_parallel=4
model.path=MODELS/six_layers actor.tensor_parallel=8 | actor.tensor_parallel | actor.tensor_parallel=2
model.path=MODELS/six_layers actor.pipeline_parallel=4 | actor.pipeline_parallel | FIRST=1 LAST=1
model.path=MODELS/six_layers actor.pipeline_parallel=4 FIRST=1 | actor.pipeline_parallel | actor.pipeline_parallel=2
model.path=MODELS/six_layers actor.pipeline_parallel=2 FIRST=two | actor.pipeline_parallel | FIRST=2
model.path=MODELS/six_layers actor.pipeline_parallel=2 actor.virtual_pipeline_parallel=2 |
  actor.virtual_pipeline_parallel | actor.virtual_pipeline_parallel=3
model.path=MODELS/six_layers actor.pipeline_parallel=2 actor.virtual_pipeline_parallel=3 EMBEDDING=true LOSS=true |
  actor.virtual_pipeline_parallel | actor.virtual_pipeline_parallel=2
model.path=MODELS/six_layers actor.pipeline_parallel=2 actor.virtual_pipeline_parallel=2 FIRST=2 LAST=4 |
  actor.virtual_pipeline_parallel | FIRST=null
actor.virtual_pipeline_parallel=2 | actor.virtual_pipeline_parallel | actor.pipeline_parallel=2
actor.expert_parallel=2 | actor.expert_parallel | actor.expert_parallel=1
actor.expert_tensor_parallel=1 | actor.expert_tensor_parallel | actor.expert_tensor_parallel=null
model.path=MODELS/experts actor.expert_parallel=3 actor.data_parallel=3 | actor.expert_parallel |
  actor.expert_parallel=2 actor.data_parallel=2
model.path=MODELS/experts actor.expert_parallel=4 actor.data_parallel=2 | actor.expert_parallel | actor.data_parallel=4
model.path=MODELS/experts actor.expert_tensor_parallel=5 actor.data_parallel=5 | actor.expert_tensor_parallel |
  actor.expert_tensor_parallel=1
model.path=MODELS/experts actor.tensor_parallel=4 actor.data_parallel=3 actor.expert_parallel=2
  actor.expert_tensor_parallel=3 | actor.expert_parallel | actor.expert_tensor_parallel=2
model.path=MODELS/experts actor.tensor_parallel=2 actor.sequence_parallel=false | actor.sequence_parallel |
  actor.sequence_parallel=true
model.path=MODELS/some_dense actor.tensor_parallel=2 | actor.tensor_parallel | model.path=MODELS/experts
cluster.nodes=2 | cluster.nodes | cluster.gpus_per_node=8
cluster.gpus_per_node=8 actor.data_parallel=9 | actor | actor.data_parallel=8
cluster.gpus_per_node=8 actor.data_parallel=9 SERVERS | actor | cluster.nodes=2
cluster.gpus_per_node=3 cluster.nodes=3 actor.tensor_parallel=2 actor.data_parallel=4 | actor.tensor_parallel |
  actor.data_parallel=3
SERVERS NODE actor.data_parallel=8 | engine.replicas | actor.data_parallel=7
SERVERS NODE engine.replicas=2 engine.sglang.tensor_parallel=4 | engine.replicas | engine.replicas=1
SERVERS NODE engine.sglang.sync=tensor cluster.nodes=2 actor.data_parallel=8 | engine.replicas |
  engine.sglang.sync=distributed
engine.replicas=300 | engine.replicas | engine.replicas=200
actor.data_parallel=257 | actor | actor.data_parallel=128
actor.precision=fp8 | actor.precision |
NODE actor.precision=fp8 cluster.gpu=A100-80G | actor.precision | cluster.gpu=L40S
NODE actor.precision=fp8 actor.fp8_recipe=mxfp8 | actor.fp8_recipe |
NODE actor.precision=fp8 actor.fp8_recipe=blockwise cluster.gpu=L40S | actor.fp8_recipe |
NODE actor.precision=fp8 model.path=MODELS/odd | actor.precision | model.path=MODELS/small
NODE actor.precision=fp8 model.path=MODELS/odd cluster.gpu=A100 | actor.precision | actor.precision=bf16
NODE actor.precision=fp8 model.path=MODELS/sinks | actor.precision | actor.precision=bf16
model.path=MODELS/sinks actor.tensor_parallel=2 | actor.expert_tensor_parallel |
NODE actor.precision=fp8 model.path=MODELS/experts | actor.precision | actor.precision=bf16
NODE actor.precision=fp8 actor.num_layers_at_start_in_bf16=2 actor.num_layers_at_end_in_bf16=2 |
  actor.num_layers_at_end_in_bf16 | actor.num_layers_at_end_in_bf16=1
NODE actor.precision=fp8 actor.num_layers_at_start_in_bf16=3 actor.pipeline_parallel=2 |
  actor.num_layers_at_start_in_bf16 |
actor.megatron.hidden_size=4 | actor.megatron.hidden_size | -
actor.megatron.clip_grad=1 | actor.megatron.clip_grad | -
actor.megatron.fp8_param=true | actor.megatron.fp8_param | actor.megatron.fp8_param=false
actor.megatron.fp8_margin=0 | actor.megatron.fp8_margin | -
actor.megatron.mamba_state_dim=1 | actor.megatron.mamba_state_dim | -
actor.routing_replay=true model.path=MODELS/experts | actor.routing_replay | RUNNING
RUNNING actor.routing_replay=true | actor.routing_replay | model.path=MODELS/experts
RUNNING actor.routing_replay=true actor.megatron.moe_router_fusion=true model.path=MODELS/experts |
  actor.megatron.moe_router_fusion | actor.megatron.moe_router_fusion=false
engine.options.x=1 | engine.options | engine.kind=my:Own
engine.kind=my:Own engine.options.seed=1 | engine.options | -
engine.sglang.sync=disk | engine.sglang | engine.kind=sglang
SERVERS engine.sglang.env.A=1 | engine.sglang.env.A | engine.sglang.env.A="1"
RUNNING engine.sglang.env.A=b | engine.sglang.urls | engine.sglang.urls=[]
RUNNING engine.sglang.urls=[http://h:1,http://h:1] | engine.sglang.urls | engine.sglang.urls=[http://h:1]
RUNNING engine.sglang.urls=[http://h:99999] | engine.sglang.urls.0 | engine.sglang.urls=[http://h:65535]
RUNNING engine.sglang.urls=[http://h:0] | engine.sglang.urls.0 | engine.sglang.urls=[http://h]
SERVERS engine.sglang.sync=tensor | engine.sglang.sync |
RUNNING NODE engine.sglang.sync=tensor | engine.sglang.sync |
RUNNING engine.sglang.sync=shards | engine.sglang.sync | engine.sglang.sync=disk
SERVERS NODE model.path=MODELS/blocks engine.sglang.sync=shards engine.sglang.fp8_blocks=true | engine.sglang.sync |
SERVERS engine.sglang.shards_over=rdma | engine.sglang.shards_over | engine.sglang.sync=shards
SERVERS engine.sglang.sync_dir=d | engine.sglang.sync_dir | engine.sglang.sync=disk
SERVERS engine.sglang.nodes=3 engine.sglang.tensor_parallel=4 | engine.sglang.nodes | engine.sglang.nodes=2
SERVERS NODE engine.sglang.nodes=2 engine.sglang.tensor_parallel=2 engine.sglang.sync=tensor | engine.sglang.nodes |
  engine.sglang.sync=distributed
RUNNING engine.sglang.nodes=2 engine.sglang.tensor_parallel=2 | engine.sglang.nodes | engine.sglang.nodes=1
SERVERS cluster.gpus_per_node=8 cluster.nodes=3 engine.sglang.tensor_parallel=16 | engine.replicas |
  engine.sglang.nodes=2
SERVERS trainer.seed=4294967296 | engine.seed | trainer.seed=4294967295
SERVERS NODE engine.sglang.arguments.quantization=fp8 | engine.sglang.arguments |
  engine.sglang.arguments.quantization=null
SERVERS NODE engine.sglang.arguments.load_format=flash_rl | engine.sglang.arguments |
  engine.sglang.arguments.load_format=dummy
SERVERS NODE QUANTIZED engine.sglang.arguments.quantization=w8a8_int8 | engine.sglang.arguments |
  engine.sglang.arguments.quantization=fp8
SERVERS NODE QUANTIZED model.path=MODELS/llama | engine.sglang.arguments | model.path=MODELS/qwen3
SERVERS NODE QUANTIZED engine.sglang.sync=disk | engine.sglang.sync | engine.sglang.sync=tensor
SERVERS NODE QUANTIZED actor.precision=fp32 | engine.sglang.arguments | actor.precision=bf16
SERVERS NODE QUANTIZED cluster.gpu=A100 | engine.sglang.arguments | cluster.gpu=L40S
SERVERS QUANTIZED | engine.sglang.arguments | NODE
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true QUANTIZED | engine.sglang.fp8_blocks |
  engine.sglang.fp8_blocks=false
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true engine.sglang.sync=disk | engine.sglang.sync |
  engine.sglang.sync=tensor
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true actor.precision=fp32 | engine.sglang.fp8_blocks |
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true cluster.gpu=A100 | engine.sglang.fp8_blocks |
  cluster.gpu=L40S
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true cluster.gpu=B200 | engine.sglang.fp8_blocks |
SERVERS model.path=MODELS/blocks engine.sglang.fp8_blocks=true | engine.sglang.fp8_blocks | NODE
SERVERS NODE model.path=MODELS/blocks engine.sglang.fp8_blocks=true engine.sglang.tensor_parallel=2 |
  engine.sglang.fp8_blocks | engine.sglang.tensor_parallel=1
SERVERS NODE model.path=MODELS/odd_block_experts engine.sglang.fp8_blocks=true | engine.sglang.fp8_blocks |
  model.path=MODELS/block_experts
SERVERS NODE model.path=MODELS/odd_blocks engine.sglang.fp8_blocks=true | engine.sglang.fp8_blocks |
  model.path=MODELS/blocks
SERVERS NODE model.path=MODELS/sinks engine.sglang.fp8_blocks=true | engine.sglang.fp8_blocks |
  engine.sglang.fp8_blocks=false
engine.colocate=true | engine.colocate | engine.colocate=false
RUNNING engine.colocate=true | engine.colocate | engine.colocate=false
TURNS engine.sglang.sync=distributed | engine.sglang.sync |
TURNS engine.sglang.sync=shards | engine.sglang.sync | engine.sglang.sync=disk
TURNS rollout.max_staleness=1 | rollout.max_staleness |
TURNS trainer.replace_lost_ranks=true | trainer.replace_lost_ranks |
TURNS QUANTIZED | engine.sglang.arguments | engine.colocate=false cluster.nodes=2
  engine.sglang.sync=distributed
TURNS model.path=MODELS/blocks engine.sglang.fp8_blocks=true engine.sglang.tensor_parallel=1 engine.replicas=8 |
  engine.sglang.fp8_blocks | engine.sglang.fp8_blocks=false
TURNS engine.sglang.arguments.enable-memory-saver=false | engine.sglang.arguments |
  engine.sglang.arguments.enable-memory-saver=true
TURNS actor.megatron.nccl_ub=true | actor.megatron.nccl_ub | actor.megatron.nccl_ub=false
TURNS engine.sglang.tensor_parallel=3 | engine.sglang.tensor_parallel |
TURNS engine.sglang.tensor_parallel=16 | engine.sglang.tensor_parallel |
TURNS engine.replicas=2 | engine.replicas |
TURNS engine.sglang.sync=disk engine.sglang.nodes=2 | engine.sglang.nodes | engine.sglang.nodes=1
TURNS engine.sglang.nodes=2 | engine.sglang.nodes | engine.sglang.nodes=1
TURNS engine.colocate=false | engine.replicas | engine.colocate=true
trainer.steps | command line | -
trainer..steps=3 | command line | -
trainer.steps=[1 | command line trainer.steps:1:3 | -
data.train.5=x | data.train.5 | -
data.train.0.x=1 | data.train.0.x | -
rollout.temperature=0 trainer.minibatches_per_batch=65 actor.pipeline_parallel=3 trainer.steps=x model.path=/nowhere |
  trainer.steps model.path trainer.minibatches_per_batch rollout.temperature | -
rollout.prompts_per_batch=0 trainer.minibatches_per_batch=65 | rollout.prompts_per_batch | -
data.train=3 trainer.minibatches_per_batch=65 | data.train.0 trainer.minibatches_per_batch | -
"""


class Refusal(NamedTuple):
    """One line of the error."""

    option: str
    got: str
    allowed: str
    fix: str


FORM = re.compile(r"  (?P<option>\S.*?)(?: \([^()]*\))?: got (?P<got>.+); allowed: (?P<allowed>.+); fix: (?P<fix>.+)")


def refusals(file: Path, *overrides: str) -> list[Refusal]:
    """What is wrong with a file and overrides; empty where they are accepted."""
    try:
        resolve_and_check(file, overrides, HERE)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        assert str(file) in head and str(len(lines)) in head
        forms = [FORM.fullmatch(line) for line in lines]
        assert all(forms), lines
        return [Refusal(**form.groupdict()) for form in forms]
    return []


def options_of(found: list[Refusal]) -> list[str]:
    return sorted(refusal.option for refusal in found)


def table(text: str) -> list[list[str]]:
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    return [[part.strip() for part in line.split(" |")] for line in lines]


@pytest.fixture(scope="module")
def files(tmp_path_factory, new_run_files):
    """A run that is fine, and models beside its own."""
    files = new_run_files(tmp_path_factory.mktemp("refused"))
    for name, changes in MODELS.items():
        shutil.copytree(files.model, files.root / "models" / name)
        config = json.loads((files.model / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (files.root / "models" / name / "config.json").write_text(json.dumps(config))
    for name, tokenizer in TOKENIZERS.items():
        (files.root / "models" / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    return files


def overrides_of(files, text: str) -> list[str]:
    words = [part for word in text.split() for part in re.sub(r"^[A-Z]+", _spelled, word).split()]
    return [
        word.replace("MODELS", str(files.root / "models")).replace("TRAIN", str(files.root / "train.jsonl"))
        for word in words
    ]


def _spelled(word: re.Match[str]) -> str:
    return WORDS.get(word[0], word[0])


def values(overrides: list[str]) -> dict[str, object]:
    return {key: yaml_text.parse(text, key).value for key, _, text in (word.partition("=") for word in overrides)}


WITHOUT_THEIR_VALUE = ("data.train.5", "data.train.0.x")
"""The path is wrong whatever its value is, or another option makes it wrong."""


def advice(refusal: Refusal) -> list[str]:
    """The first values that a fix names, as overrides."""
    first = next((words for words in refusal.fix.split(" or ") if "=" in words), "")
    return re.findall(r"[\w.]+=(?:\[[^]]*\]|[^\s,;]+)", first.replace(", ", ","))


@pytest.mark.parametrize(("wrong", "named", "right"), table(REFUSED))
def test_a_wrong_option_is_named_and_the_right_value_beside_it_is_accepted(files, wrong, named, right):
    overrides = overrides_of(files, wrong)
    found = refusals(files.file, *overrides)
    assert options_of(found) == sorted(named.split()) or options_of(found) == [named], found
    given = values(overrides)
    for refusal in found:
        value = given.get(refusal.option)
        if isinstance(value, str | int | float) and refusal.option not in WITHOUT_THEIR_VALUE:
            assert show(value).strip("'") in refusal.got, refusal
    if right != "-":
        better = overrides_of(files, right) if right else advice(found[0])
        assert better, f"say what is right: the fix names no value: {found[0].fix}"
        assert refusals(files.file, *overrides, *better) == []


# What else is accepted, at the edge of a refusal.
ACCEPTED = """
algorithm.name=my:Own algorithm.kl.place=token_reward trainer.export_critic=true
PPO algorithm.kl.place=token_reward
PPO algorithm.critic.path=MODELS/qwen3 algorithm.critic.pretrain_steps=2
PPO algorithm.critic.path=MODELS/classifier
SERVERS NODE PPO engine.sglang.sync=shards algorithm.critic.path=MODELS/linear
data.prompt_template=r1 reward.verifier=my:Own reward.options.x=1
environment.kind=my:Own environment.options.x=1 environment.reward_weights.x=1 algorithm.turn_rewards=true
model.path=MODELS/six_layers actor.tensor_parallel=12 actor.micro_batch_tokens=24576
model.path=MODELS/six_layers actor.pipeline_parallel=2 LAST=2 actor.virtual_pipeline_parallel=2
model.path=MODELS/six_layers actor.pipeline_parallel=4 EMBEDDING=true LOSS=true actor.virtual_pipeline_parallel=2
model.path=MODELS/experts actor.expert_parallel=8 actor.data_parallel=8
model.path=MODELS/experts actor.expert_parallel=2 actor.tensor_parallel=4 actor.expert_tensor_parallel=1
actor.context_parallel=2 actor.tensor_parallel=2 actor.micro_batch_tokens=16388
NODE cluster.nodes=16 actor.data_parallel=128
NODE actor.precision=fp8
cluster.gpus_per_node=8 actor.precision=fp8
cluster.gpus_per_node=8 cluster.gpu=X1 actor.precision=fp8
NODE RUNNING actor.data_parallel=8
NODE engine.replicas=8 actor.data_parallel=8
NODE SERVERS QUANTIZED
TURNS engine.sglang.tensor_parallel=1 engine.replicas=8
TURNS engine.sglang.tensor_parallel=8 engine.replicas=1
TURNS cluster.nodes=4 actor.tensor_parallel=4 actor.data_parallel=8 engine.replicas=16
SERVERS cluster.gpus_per_node=8 cluster.nodes=3 engine.sglang.tensor_parallel=16 engine.sglang.nodes=2
actor.megatron.overlap_grad_reduce=true actor.megatron.bucket_size=1000
"""


@pytest.mark.parametrize("options", [row for (row,) in table(ACCEPTED)])
def test_what_only_looks_like_it_is_accepted(files, options):
    assert refusals(files.file, *overrides_of(files, options)) == []


TEXT = "model: {path: m}\ndata: {train: [a.jsonl]}\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "{file}"),
        ("# nothing\n", "{file}"),
        ("- a\n- b\n", "{file}"),
        ("model:\ndata:\n", "data.train model.path"),
        ("model: {path: m}\ndata: {train: [a, 3]}\n", "data.train.1"),
        (TEXT + "rollout: 5\n", "rollout"),
        (TEXT + "rollout: {top_p: 2}\n", "rollout.top_p"),
        (TEXT + "rollout: {temperature: 1,0}\n", "rollout"),
        (TEXT + "rollout: {top_p: 1, top_p: 1}\n", "rollout.top_p"),
        (TEXT + "rollout:\n\ttop_p: 1\n", "run.yaml:4:1"),
        (TEXT + "rollout: {top_p: 1\n", "run.yaml:4:1"),
        (TEXT + "trainer: &a {x: *a}\n", "trainer.x"),
        (TEXT + "a: &a [1]\n" + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in ("ab", "bc", "cd", "de",
         "ef")), "e."),
        (TEXT + "trainer: {run_dir: !!python/object/apply:os.mkdir ['made']}\n", "trainer.run_dir"),
        (TEXT + "? [a]\n: 1\n", "run.yaml"),
        (TEXT + "3: x\n", "run.yaml"),
        ("a\0b", "run.yaml"),
        ("9" * 5000, "run.yaml"),
        (b"\xff\xfe\x00", "{file}"),
        (None, "{file}"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused_by_its_line(tmp_path, monkeypatch, text, named):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = refusals(file)
    wanted = named.format(file=file).split()
    assert all(any(one.option.startswith(name) for one in found) for name in wanted), found
    assert not (tmp_path / "made").exists()


def test_a_wrong_value_has_the_line_or_the_command_line_where_it_was_written(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata:\n  train:\n  - a\n  - 3\nrollout:\n  top_p: 2\n  temperature: -1\n")
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(file, ["trainer.steps=0", " rollout ={top_p: 3}"], HERE)
    places = dict(re.findall(r"^  (\S+) \(([^)]*)\): got", str(caught.value), re.MULTILINE))
    assert places["data.train.1"] == "run.yaml:5" and places["trainer.steps"] == "command line"
    assert not {"rollout.top_p", "rollout.temperature"} & places.keys(), "its section was overridden"


def removed(name):
    return lambda files: (files.model / name).unlink()


def holding(name, content):
    return lambda files: (files.model / name).write_bytes(content)


def header(entries) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def index(**weight_map):
    """An index beside two parts, each with the tensor w."""

    def spoil(files):
        whole = (files.model / "model.safetensors").rename(files.model / "model-00001-of-00002.safetensors")
        shutil.copy(whole, files.model / "model-00002-of-00002.safetensors")
        (files.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def both(*spoils):
    return lambda files: [spoil(files) for spoil in spoils]


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("spoil", "file"),
    [
        (removed("config.json"), "config.json"),
        (holding("config.json", b'{"model_type'), "config.json"),
        (holding("config.json", b"\xef\xbb\xbf{}"), "config.json"),
        (holding("config.json", b"[]"), "config.json"),
        (removed("model.safetensors"), "*.safetensors"),
        (lambda files: (files.model / "model.safetensors").rename(files.model / "pytorch_model.bin"), "*.bin"),
        (holding("model.safetensors", b"abc"), "model.safetensors"),
        (holding("model.safetensors", b"\xff" * 7 + b"\0{}"), "model.safetensors"),
        (holding("model.safetensors", header({"a": {"data_offsets": [0, 3]}}) + b"12"), "model.safetensors"),
        (holding("model.safetensors", header({"a": {"data_offsets": [0, 3]}}) + b"1234"), "model.safetensors"),
        (holding("model.safetensors", header({"a": {}})), "model.safetensors"),
        (holding("model.safetensors", header([])), "model.safetensors"),
        (holding("model.safetensors.index.json", b"{"), "model.safetensors.index.json"),
        (holding("model.safetensors.index.json", b"{}"), "index"),
        (index(w=ONE), TWO),
        (both(index(w=ONE), removed(TWO), removed(ONE)), ONE),
        (index(w=ONE, v=TWO), TWO),
        (both(index(w=ONE), removed(TWO), lambda files: write_weights(files)), "model.safetensors"),
        (removed("tokenizer.json"), "tokenizer"),
        (holding("tokenizer.json", b'{"a'), "tokenizer.json"),
        (both(holding("tokenizer.model", b"x"), holding("tokenizer.json", b"[]")), "tokenizer.json"),
    ],
)
def test_a_model_whose_files_are_missing_or_torn_is_refused_by_the_file(run_files, spoil, file):
    spoil(run_files)
    (found,) = refusals(run_files.file)
    assert found.option == "model.path" and file in found.got


def write_weights(files) -> None:
    shutil.copy(files.model / ONE, files.model / "model.safetensors")


@pytest.mark.parametrize(
    "fine",
    [
        both(index(w=ONE), removed(TWO)),
        holding("model.safetensors.index.json", b'{"weight_map": {"w": "model.safetensors"}}'),
        both(removed("tokenizer.json"), holding("tokenizer.model", b"x")),
        both(removed("tokenizer.json"), holding("vocab.json", b"{}")),
        holding(
            "model.safetensors",
            header({"__metadata__": {"x": "y"}, "a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}) + b"123",
        ),
    ],
)
def test_files_of_a_whole_model_are_accepted(run_files, fine):
    fine(run_files)
    assert refusals(run_files.file) == []


@pytest.mark.parametrize(
    ("content", "form", "refused"),
    [
        (b" \n\n", "auto", True),
        (b"PAR1x", "gsm8k", True),
        (b"PAR1xPAR1", "jsonl", True),
        (b"PAR1xPAR1", "auto", False),
        (b"PAR1xPAR1", "parquet", False),
        (b"{}", "parquet", True),
        (b"{}", "jsonl", False),
    ],
)
def test_a_problem_file_that_is_empty_torn_or_of_another_format_is_refused(run_files, content, form, refused):
    (run_files.root / "train.jsonl").write_bytes(content)
    found = refusals(run_files.file, f"data.format={form}")
    assert options_of(found) == ["data.train.0"] * refused
    assert all(str(run_files.root / "train.jsonl") in one.got for one in found)


def test_a_training_file_under_another_name_is_the_same_file(run_files):
    link = run_files.root / "link.jsonl"
    link.symlink_to(run_files.root / "train.jsonl")
    (found,) = refusals(run_files.file, f"data.train=[{run_files.root / 'train.jsonl'},{link}]")
    assert found.option == "data.train" and "train.jsonl" in found.got


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
MOE = {"model_type": "qwen3_moe", "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "phi3"}, "phi3"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "Qwen2ForTokenClassification"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attention_dropout": False}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tomorrow": 1}, "tomorrow"),
        ({"num_experts": 4}, "num_experts"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", 3]}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "use_sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": "3"}, "max_window_layers"),
        ({"model_type": "mistral"}, "sliding_window"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "su"}}, "su"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "llama3"}}, "rope_type"),
        ({"rope_scaling": {**YARN, "twist": 1}}, "twist"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"a": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}}, "high_freq_factor"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 8}, "original_max_position_embeddings": 9},
         "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "factor": 1, "attention_factor": 2}}, "attention_factor"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate"),
        ({"rope_scaling": {**YARN, "beta_slow": -1}}, "beta_slow"),
        ({**MOE, "num_experts": 4}, "num_local_experts"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**MOE, "num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok"),
        ({**MOE, "num_local_experts": None}, "num_experts"),
        ({**MOE, "mlp_only_layers": [4]}, "mlp_only_layers"),
        ({**MOE, "decoder_sparse_step": 5}, "decoder_sparse_step"),
        ({**MOE, "output_router_logits": True, "router_aux_loss_coef": -1}, "router_aux_loss_coef"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
         "decoder_sparse_step"),
    ],
)  # fmt: skip
def test_a_model_that_would_be_another_one_is_refused_by_the_key_of_its_config(run_files, changes, told):
    run_files.set_shape(**changes)
    if changes.get("truncate", 0) is None or "rope_scaling" in changes:
        config = json.loads((run_files.model / "config.json").read_text())
        (run_files.model / "config.json").write_text(json.dumps(config | changes))
    (found,) = refusals(run_files.file)
    assert found.option == "model.path" and told in found.got


@pytest.mark.parametrize(
    ("of_the_job", "options", "named"),
    [
        (None, "engine.sglang.env.NCCL_CUMEM_ENABLE='1'", "engine.sglang.env"),
        ("1", "engine.sglang.env.NCCL_CUMEM_ENABLE='0'", "engine.sglang.env"),
        (None, "engine.sglang.arguments.enable_symm_mem=true", "engine.sglang.arguments"),
        ("1", "engine.sglang.env.NCCL_CUMEM_ENABLE='1' engine.sglang.arguments.enable_symm_mem=true", None),
        (None, "engine.sglang.env.NCCL_DEBUG=INFO", None),
        (None, "engine.sglang.sync=disk engine.sglang.env.NCCL_CUMEM_ENABLE='1'", None),
    ],
)
def test_servers_that_would_hand_out_memory_in_another_way_than_ranks_are_refused(
    files, monkeypatch, of_the_job, options, named
):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if of_the_job:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", of_the_job)
    found = refusals(files.file, *overrides_of(files, f"SERVERS NODE {options}"))
    assert options_of(found) == ([named] if named else [])


def installed(monkeypatch, package):
    """Make a package look installed, and return where None says that it is not."""
    find, there = importlib.util.find_spec, {package: "a spec"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there[name] if name in there else find(name))
    return there


@pytest.mark.parametrize(
    ("package", "option"), [("wandb", "observe.wandb.enabled=true"), ("triton", "actor.logprob_kernel=triton")]
)
def test_an_option_whose_package_is_missing_is_refused(files, monkeypatch, package, option):
    there, gpus = installed(monkeypatch, package), "cluster.gpus_per_node=8"
    assert refusals(files.file, gpus, option) == []
    there[package] = None
    (found,) = refusals(files.file, gpus, option)
    assert found.option == option.partition("=")[0] and package in found.got


@pytest.mark.parametrize(("interpreted", "refused"), [("0", ["actor.logprob_kernel"]), ("1", [])])
def test_kernels_of_triton_are_refused_without_a_gpu_but_not_interpreted(files, monkeypatch, interpreted, refused):
    installed(monkeypatch, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert options_of(refusals(files.file, "actor.logprob_kernel=triton")) == refused


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed: no names")
@pytest.mark.parametrize(("option", "meant"), [("bucket_sise", "bucket_size"), ("attention_drop", "")])
def test_a_name_that_megatron_does_not_have_is_refused_with_the_nearest(files, option, meant):
    (found,) = refusals(files.file, f"actor.megatron.{option}=1")
    assert found.option == f"actor.megatron.{option}" and meant in found.fix


@pytest.mark.parametrize(
    ("file", "key", "ends"),
    [
        ("generation_config.json", "eos_token_id", True),
        ("tokenizer_config.json", "eos_token", True),
        ("special_tokens_map.json", "eos_token", True),
        ("tokenizer_config.json", "bos_token", False),
    ],
)
def test_a_model_whose_files_name_no_end_of_an_answer_is_refused(run_files, file, key, ends):
    run_files.set_shape(eos_token_id=None)
    (run_files.model / file).write_text(json.dumps({key: 0}))
    assert options_of(refusals(run_files.file)) == ([] if ends else ["rollout.stop_token_ids"])


NUMBERS = [path for path, field in walk(Config) if strip(field.annotation)[0] in (int, float) and "*" not in path]


@pytest.mark.parametrize("value", [".nan", "1e300", "1e-300", "99999999999999999999"])
def test_no_option_takes_a_number_that_no_run_can_mean(tmp_path, value):
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    for option in NUMBERS:
        with pytest.raises(ConfigError, match=rf"  {re.escape(option)} \(command line\): got"):
            resolve(file, [f"{option}={value}"])
    assert len(NUMBERS) > 90


def test_a_path_that_no_file_system_holds_is_refused(files):
    assert options_of(refusals(files.file, f"trainer.run_dir=x/{'é' * 128}")) == ["trainer.run_dir"]
    assert refusals(files.file, f"trainer.run_dir=x/{'é' * 127}") == []
