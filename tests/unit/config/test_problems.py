"""Each problem of the checks: the option it is told of, the options it rests on, and that its fix mends it."""

from __future__ import annotations

import re

import pytest

from megatron_daro.config import Hardware, check, resolve
from megatron_daro.config.problems import Problem

SERVERS = "engine.kind=sglang engine.sglang.python=/usr/bin/python3"
WORDS = {
    "SERVERS": SERVERS,
    "RUNNING": "engine.kind=sglang engine.sglang.urls=[http://h:1]",
    "TURNS": f"{SERVERS} engine.colocate=true cluster.gpus_per_node=8 cluster.gpu=H100 engine.sglang.sync=tensor "
    "actor.tensor_parallel=2 actor.data_parallel=4 engine.replicas=4 engine.sglang.tensor_parallel=2",
    "PPO": "algorithm.name=ppo",
    "TEACHER": "algorithm.name=grpo algorithm.distill.urls=[http://t:1]",
    "PARALLEL": "actor.tensor_parallel actor.pipeline_parallel actor.context_parallel actor.data_parallel",
    "BATCH": "rollout.prompts_per_step rollout.rollouts_per_prompt trainer.updates_per_batch",
    "LENGTHS": "data.max_prompt_tokens rollout.max_response_tokens",
}

# Overrides | the option told of | further options it rests on | what mends it, where the fix does not name values.
# A line that is too long goes on, indented, in the next.
CASES = r"""
engine.colocate=true | engine.colocate | engine.kind engine.sglang.urls | engine.colocate=false
RUNNING engine.colocate=true | engine.colocate | engine.kind engine.sglang.urls | engine.colocate=false
TURNS engine.sglang.sync=distributed | engine.sglang.sync | engine.colocate |
TURNS engine.sglang.sync=shards | engine.sglang.sync | engine.colocate |
TURNS rollout.max_staleness=1 | rollout.max_staleness | engine.colocate |
TURNS trainer.replace_lost_ranks=true | trainer.replace_lost_ranks | engine.colocate |
TURNS engine.sglang.arguments.quantization=fp8 | engine.sglang.arguments | engine.colocate | engine.colocate=false
TURNS engine.sglang.arguments.enable_memory_saver=false | engine.sglang.arguments | engine.colocate |
  engine.colocate=false
TURNS actor.megatron.nccl_ub=true | actor.megatron.nccl_ub | engine.colocate | actor.megatron.nccl_ub=false
TURNS engine.sglang.tensor_parallel=3 | engine.sglang.tensor_parallel | engine.colocate actor.tensor_parallel |
TURNS engine.sglang.tensor_parallel=16 | engine.sglang.tensor_parallel | engine.colocate |
TURNS engine.replicas=2 | engine.replicas | engine.colocate engine.sglang.tensor_parallel |
cluster.gpus_per_node=8 actor.data_parallel=9 | actor | PARALLEL | actor.data_parallel=8
cluster.gpus_per_node=3 cluster.nodes=3 actor.tensor_parallel=2 actor.data_parallel=4 | actor.tensor_parallel |
  PARALLEL | actor.data_parallel=3
SERVERS cluster.gpus_per_node=8 actor.data_parallel=8 | engine.replicas | PARALLEL engine.kind engine.sglang.urls
  engine.sglang.tensor_parallel | actor.data_parallel=7
SERVERS cluster.gpus_per_node=8 actor.data_parallel=2 | actor | PARALLEL | actor.data_parallel=6
actor.data_parallel=5 | actor | PARALLEL | actor.data_parallel=4
actor.sequence_parallel=true | actor.sequence_parallel | actor.tensor_parallel | actor.sequence_parallel=null
actor.tensor_parallel=16 | actor.tensor_parallel | model.path | actor.tensor_parallel=8
actor.pipeline_parallel=3 | actor.pipeline_parallel | model.path | actor.pipeline_parallel=4
rollout.prompts_per_step=65536 rollout.rollouts_per_prompt=65 | rollout.prompts_per_step |
  rollout.rollouts_per_prompt | rollout.rollouts_per_prompt=64
trainer.updates_per_batch=7 | trainer.updates_per_batch | BATCH | trainer.updates_per_batch=8
rollout.prompts_per_step=1 rollout.rollouts_per_prompt=2 actor.data_parallel=3 | actor.data_parallel | BATCH |
  actor.data_parallel=2
actor.micro_batch_tokens=5119 | actor.micro_batch_tokens | LENGTHS |
actor.micro_batch_tokens=5000 data.max_prompt_tokens=1022 actor.context_parallel=2 | actor.micro_batch_tokens |
  LENGTHS |
actor.context_parallel=2 actor.tensor_parallel=2 actor.micro_batch_tokens=16386 | actor.micro_batch_tokens |
  actor.tensor_parallel actor.pipeline_parallel actor.context_parallel |
rollout.max_response_tokens=7169 | rollout.max_response_tokens | LENGTHS model.path | rollout.max_response_tokens=7168
actor.precision=fp8 | actor.precision | actor.fp8_recipe |
actor.fp8_recipe=mxfp8 | actor.fp8_recipe | |
actor.num_layers_at_end_in_bf16=1 | actor.num_layers_at_end_in_bf16 | |
rollout.temperature=0.0009 | rollout.temperature | | rollout.temperature=0.001
rollout.temperature=0 | rollout.temperature | |
data.eval=[{"name":"a","path":"TRAIN","temperature":0.0009}] | data.eval.0.temperature | |
data.eval=[{"name":"a","path":"TRAIN","rollouts_per_prompt":2}] | data.eval.0.temperature | |
  data.eval.0.rollouts_per_prompt=1
rollout.keep_surplus=true | rollout.keep_surplus | rollout.max_staleness |
rollout.stop_token_ids=[5,100] | rollout.stop_token_ids | model.path | rollout.stop_token_ids=[5,99]
rollout.max_staleness=1 | algorithm.correction.kind | rollout.max_staleness |
rollout.finish_batch=enough | rollout.finish_batch | engine.kind |
rollout.segment_tokens=1000 rollout.max_staleness=5 engine.kind=my:Own | rollout.segment_tokens | engine.kind |
rollout.segment_tokens=1000 rollout.max_staleness=5 environment.kind=my:Own | rollout.segment_tokens |
  environment.kind |
rollout.segment_tokens=1000 rollout.max_staleness=4 | rollout.max_staleness | rollout.segment_tokens
  rollout.max_response_tokens |
rollout.repetition.tokens=65 rollout.repetition.period=33 | rollout.repetition.period | |
algorithm.repetition_penalty=0.5 | algorithm.repetition_penalty | |
algorithm.daro.clamp=[1,1] | algorithm.daro.clamp | |
algorithm.daro.clamp=[1.1,2] | algorithm.daro.clamp | |
algorithm.daro.clamp=[0.5,0.9] | algorithm.daro.clamp | |
algorithm.daro.clamp=[0,2] | algorithm.daro.clamp | |
algorithm.daro.parameter=linear algorithm.daro.half_life=5 | algorithm.daro.parameter | algorithm.daro.half_life |
algorithm.correction.kind=mis algorithm.correction.low=2 | algorithm.correction.low | algorithm.correction.high |
  algorithm.correction.low=1.9
algorithm.correction.kind=tis algorithm.old_logprobs=rollout | algorithm.correction.kind | algorithm.old_logprobs |
algorithm.trust_region=gspo algorithm.correction.kind=tis | algorithm.correction.level | algorithm.trust_region |
algorithm.trust_region=gspo algorithm.clip_high=0.011 | algorithm.trust_region | algorithm.clip_low
  algorithm.clip_high |
algorithm.trust_region=cispo algorithm.dual_clip=3 | algorithm.dual_clip | algorithm.trust_region |
algorithm.old_logprobs=forward trainer.updates_per_batch=2 | algorithm.old_logprobs | trainer.updates_per_batch
  trainer.epochs_per_batch |
algorithm.trust_region=reinforce trainer.epochs_per_batch=2 | trainer.epochs_per_batch | algorithm.trust_region |
algorithm.name=kimi algorithm.trust_region=gspo | algorithm.trust_region | algorithm.name |
  algorithm.trust_region=clip
algorithm.name=kimi algorithm.dual_clip=3 | algorithm.dual_clip | algorithm.name | algorithm.dual_clip=null
algorithm.name=kimi | trainer.updates_per_batch | algorithm.name |
algorithm.kl.place=reward algorithm.kl.mean=rollouts | algorithm.kl.mean | algorithm.kl.place |
algorithm.name=grpo algorithm.kl.place=token_reward | algorithm.kl.place | algorithm.name |
algorithm.name=grpo_sequence algorithm.kl.coefficient=0.1 | algorithm.kl.mean | algorithm.name |
algorithm.name=ha_dw trainer.updates_per_batch=2 | algorithm.ha_dw.every | trainer.updates_per_batch
  trainer.epochs_per_batch |
algorithm.name=dgpo reward.correct_reward=2 | algorithm.dgpo.deviation | |
algorithm.name=dgpo algorithm.length_reward.weight=0.1 | algorithm.dgpo.deviation | |
algorithm.name=dgpo algorithm.kl.coefficient=0.1 algorithm.kl.place=reward | algorithm.dgpo.deviation | |
algorithm.overlong.kind=both | reward.incorrect_reward | algorithm.overlong.kind |
algorithm.overlong.kind=penalty algorithm.overlong.max_tokens=5000 algorithm.overlong.cache_tokens=904 |
  algorithm.overlong.max_tokens | rollout.max_response_tokens algorithm.overlong.cache_tokens |
algorithm.overlong.kind=penalty algorithm.overlong.max_tokens=3 algorithm.overlong.cache_tokens=3 |
  algorithm.overlong.cache_tokens | rollout.max_response_tokens algorithm.overlong.max_tokens |
trainer.export_critic=true | trainer.export_critic | algorithm.name |
algorithm.critic.learning_rate=1e-4 | algorithm.critic | algorithm.name |
algorithm.ppo.gamma=0.9 | algorithm.ppo | algorithm.name |
PPO algorithm.critic.value_clip=0.2 | algorithm.critic.value_clip | trainer.updates_per_batch |
PPO algorithm.critic.offload=true trainer.replace_lost_ranks=true | algorithm.critic.offload |
  trainer.replace_lost_ranks |
PPO algorithm.critic.pretrain_steps=100 | algorithm.critic.pretrain_steps | trainer.steps |
  algorithm.critic.pretrain_steps=99
PPO algorithm.critic.warmup_steps=101 | algorithm.critic.warmup_steps | trainer.steps |
  algorithm.critic.warmup_steps=100
PPO algorithm.ppo.bootstrap_truncated=true rollout.max_response_tokens=1 | algorithm.ppo.bootstrap_truncated |
  rollout.max_response_tokens | rollout.max_response_tokens=2
TEACHER algorithm.kl.place=reward algorithm.kl.coefficient=0.1 | algorithm.distill | algorithm.kl.place |
environment.kind=my:Own algorithm.turn_rewards=true algorithm.kl.place=reward algorithm.kl.coefficient=0.1 |
  algorithm.turn_rewards | algorithm.kl.place |
algorithm.distill.coefficient=2 | algorithm.distill | | algorithm.distill.coefficient=1
TEACHER algorithm.distill.urls=[http://t:1,http://t:1] | algorithm.distill.urls | |
  algorithm.distill.urls=[http://t:1]
TEACHER RUNNING engine.sglang.urls=[http://t:1] | algorithm.distill.urls | engine.sglang.urls |
  engine.sglang.urls=[http://h:1]
TEACHER rollout.temperature=0.9 | algorithm.distill | rollout.temperature |
TEACHER algorithm.name=ppo | algorithm.distill | algorithm.name |
TEACHER algorithm.distill.coefficient=0 | algorithm.distill | |
engine.options.x=1 | engine.options | engine.kind | engine.kind=my:Own
engine.sglang.sync=disk | engine.sglang | engine.kind |
RUNNING engine.sglang.env.A=b | engine.sglang.urls | engine.sglang.env | engine.sglang.urls=[]
RUNNING engine.sglang.urls=[http://h:1,http://h:1] | engine.sglang.urls | | engine.sglang.urls=[http://h:1]
SERVERS engine.sglang.sync=tensor | engine.sglang.sync | engine.sglang.urls |
RUNNING cluster.gpus_per_node=8 engine.sglang.sync=tensor | engine.sglang.sync | engine.sglang.urls |
RUNNING engine.sglang.sync=shards | engine.sglang.sync | engine.sglang.urls |
SERVERS engine.sglang.sync=shards engine.sglang.fp8_blocks=true | engine.sglang.sync | engine.sglang.fp8_blocks |
SERVERS engine.sglang.shards_over=rdma | engine.sglang.shards_over | |
SERVERS engine.sglang.sync_dir=d | engine.sglang.sync_dir | |
SERVERS engine.sglang.nodes=3 engine.sglang.tensor_parallel=4 | engine.sglang.nodes | engine.sglang.tensor_parallel |
SERVERS engine.sglang.nodes=2 engine.sglang.tensor_parallel=2 engine.sglang.sync=tensor | engine.sglang.nodes |
  engine.sglang.sync |
RUNNING engine.sglang.nodes=2 engine.sglang.tensor_parallel=2 | engine.sglang.nodes | engine.sglang.urls |
  engine.sglang.nodes=1
TURNS engine.sglang.nodes=2 | engine.sglang.nodes | engine.colocate |
actor.routing_replay=true | actor.routing_replay | engine.kind |
RUNNING actor.routing_replay=true | actor.routing_replay | model.path | actor.routing_replay=false
RUNNING actor.routing_replay=true actor.megatron.moe_router_fusion=true | actor.megatron.moe_router_fusion |
  actor.routing_replay | actor.megatron.moe_router_fusion=false
SERVERS trainer.seed=4294967296 | engine.seed | engine.kind engine.replicas | engine.seed=4294967295
SERVERS engine.sglang.fp8_blocks=true engine.sglang.sync=disk | engine.sglang.sync | engine.sglang.fp8_blocks |
SERVERS engine.sglang.fp8_blocks=true | engine.sglang.fp8_blocks | engine.sglang.tensor_parallel model.path |
reward.incorrect_reward=1 | reward.correct_reward | reward.incorrect_reward |
reward.options.x=1 | reward.options | reward.verifier | reward.verifier=my:Own
reward.verifier=my:Own reward.marker=x reward.refuse_restated=true | reward.verifier | reward.marker
  reward.refuse_restated | reward.verifier=math
environment.options.x=1 | environment.options | environment.kind | environment.kind=my:Own
environment.reward_weights.x=1 | environment.reward_weights | environment.kind | environment.kind=my:Own
algorithm.turn_rewards=true | algorithm.turn_rewards | environment.kind | algorithm.turn_rewards=false
actor.optimizer.warmup_steps=101 | actor.optimizer.warmup_steps | trainer.steps | actor.optimizer.warmup_steps=100
trainer.eval_every_steps=1 | trainer.eval_every_steps | data.eval |
data.prompt_template=none data.template="{prompt}?" | data.template | data.prompt_template |
data.prompt_template=r1 reward.verifier=integer | data.prompt_template | reward.verifier |
data.eval=[{"name":"a","path":"TRAIN","template":"r1"}] reward.verifier=exact | data.eval.0.template |
  reward.verifier |
data.pass_rates=[0.9,0.1] | data.pass_rates | |
data.format=parquet | data.train.0 | data.format | data.format=auto
data.eval=[{"name":"a","path":"TRAIN"},{"name":"a","path":"TRAIN"}] | data.eval | | data.eval.1.name=b
"""


def cases(text: str) -> list[str]:
    return re.sub(r"\n +", " ", text.strip()).splitlines()


def findings(run_files, text: str) -> list[Problem]:
    """Problems and warnings of the overrides."""
    text = text.replace("TRAIN", str(run_files.root / "train.jsonl"))
    overrides = [override for word in text.split() for override in WORDS.get(word, word).split()]
    report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
    return [*report.problems, *report.warnings]


@pytest.mark.parametrize("case", cases(CASES))
def test_a_problem_names_what_it_rests_on_and_its_fix_mends_it(run_files, case):
    overrides, field, rests_on, mend = (part.strip() for part in case.split("|"))
    also = tuple(name for word in rests_on.split() for name in WORDS.get(word, word).split())
    found = findings(run_files, overrides)
    told = [one for one in found if (one.field, one.also) == (field, also)]
    assert len(told) == 1, found
    if not mend:
        first = next(words for words in told[0].fix.split(" or ") if "=" in words)
        mend = " ".join(re.findall(r"[\w.]+=(?:\[[^]]*\]|[^\s,;]+)", first.replace(", ", ",")))
    mended = findings(run_files, f"{overrides} {mend}")
    assert not [one for one in mended if (one.field, one.also) == (field, also)], told


# What stands at the edge of a problem and is none.
FINE = """
algorithm.daro.clamp=[1,2]
algorithm.daro.clamp=[0.5,1]
algorithm.name=my:Own algorithm.kl.place=token_reward
algorithm.name=my:Own trainer.export_critic=true
PPO algorithm.kl.place=token_reward
PPO trainer.export_critic=true
TEACHER algorithm.distill.coefficient=0 algorithm.distill.reward_weight=1
algorithm.trust_region=gspo algorithm.clip_high=0.01 algorithm.correction.kind=tis algorithm.correction.level=sequence
algorithm.trust_region=gspo algorithm.clip_high=0.01 algorithm.dual_clip=3
algorithm.overlong.kind=penalty algorithm.overlong.max_tokens=5000 algorithm.overlong.cache_tokens=905
  reward.incorrect_reward=-1
algorithm.overlong.kind=filter algorithm.overlong.max_tokens=5000 algorithm.overlong.cache_tokens=5000
algorithm.name=dgpo
rollout.repetition.tokens=64 rollout.repetition.period=32
rollout.segment_tokens=1000 rollout.max_staleness=5 algorithm.correction.kind=tis
data.pass_rates=[0.5,0.5]
data.prompt_template=r1
reward.verifier=my:Own data.prompt_template=r1
reward.verifier=my:Own reward.options.x=1
environment.kind=my:Own environment.options.x=1 environment.reward_weights.x=1 algorithm.turn_rewards=true
engine.kind=my:Own engine.options.x=1
SERVERS engine.sglang.sync=disk engine.sglang.sync_dir=d
SERVERS engine.sglang.sync=shards engine.sglang.shards_over=rdma
SERVERS engine.sglang.arguments.enable_memory_saver=true cluster.gpus_per_node=2
TURNS engine.sglang.sync=disk
TURNS engine.sglang.arguments.enable_memory_saver=true
"""


@pytest.mark.parametrize("overrides", cases(FINE))
def test_the_last_that_is_allowed_is_not_spoken_of(run_files, overrides):
    assert not findings(run_files, overrides)
