"""Values that no run can mean, over all sections: each is refused before anything starts, by its field."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, resolve_and_check
from megatron_daro.errors import ConfigError

HERE = Hardware("cpu", 64, capability=None)

HOSTILE = r"""
rollout.prompts_per_step=1000000000
rollout.prompts_per_step=99999999999999999999
rollout.oversampling=1e9
rollout.oversampling=.inf
rollout.top_p=1e-300
rollout.top_p=.nan
rollout.temperature=1e30
rollout.temperature=1e-300
rollout.temperature=-0.0
rollout.max_staleness=2000000000
rollout.max_refill_rounds=1000000000000
rollout.rollouts_per_prompt=70000
rollout.stop=['']
rollout.stop_token_ids=[-1]
rollout.stop_token_ids=[123456789012345678901234567890]
rollout.max_response_tokens=1000000000000
data.train=[]
data.train=['']
data.train=[{train},{train}]
data.template="{prompt}{prompt}"
data.template=""
data.max_prompt_tokens=10000000000
data.curriculum.start=1e-300
data.curriculum.ramp_prompts=1000000000000000000000
data.prioritised.exponent=1e300
data.prioritised.exponent=101
data.prioritised.memory=1e300
data.eval=[{name: a/b, path: {train}}]
data.eval=[{name: a, path: {train}, temperature: 1e-9}]
data.eval=[{name: a, path: {train}, rollouts_per_prompt: 10000000000}]
data.eval=[{name: a, path: {train}, max_prompts: 99999999999999999999}]
algorithm.kl.coefficient=1e300
algorithm.correction.cap=1e-300
algorithm.daro.learning_rate=1e300
algorithm.daro.clamp=[1e-300,1e300]
algorithm.daro.half_life=1e-300
algorithm.f_grpo.gamma=1e300
algorithm.mgpo.strength=1e300
algorithm.dgpo.temperature=1e-300
algorithm.ha_dw.scale=1e308
algorithm.ha_dw.window=10000000000
algorithm.clip_low=1e-300
algorithm.clip_high=1e300
algorithm.dual_clip=1e300
algorithm.entropy_coefficient=1e300
algorithm.sapo.positive=1e-300
actor.optimizer.learning_rate=1e300
actor.optimizer.learning_rate=1e-300
actor.optimizer.weight_decay=1e300
actor.optimizer.eps=1e-300
actor.optimizer.betas=[0.9,1.0]
actor.optimizer.grad_clip=1e-300
actor.optimizer.warmup_steps=99999999999999999999
actor.micro_batch_tokens=99999999999999999999
actor.logprob_chunk_tokens=99999999999999999999
actor.data_parallel=99999999999999999999
engine.replicas=1000000000
engine.embedded.batch_size=1000000000
engine.embedded.threads=1000000000
engine.seed=18446744073709551616
reward.workers=1000000000
reward.timeout_s=1e-9
reward.timeout_s=1e300
reward.memory_mib=99999999999999999999
reward.correct_reward=1e308
reward.incorrect_reward=-1e308
reward.marker=""
trainer.run_dir=""
trainer.run_dir="a\0b"
trainer.steps=99999999999999999999
trainer.deadline_scale=1e-9
trainer.deadline_scale=1e300
trainer.save_every_steps=99999999999999999999
trainer.keep_checkpoints=0
trainer.seed=-1
cluster.nodes=99999999999999999999
observe.wandb.project=""
model.path=""
"""

EXTREME = """
rollout.temperature=0.001
rollout.temperature=100
rollout.top_p=1e-6
rollout.oversampling=100
rollout.prompts_per_step=65536
data.template="{problem} {{prompt}} %s"
data.train=[{train}]
reward.timeout_s=0.01
reward.correct_reward=1e6
trainer.deadline_scale=0.001
trainer.steps=2147483647
trainer.seed=9223372036854775807
data.prioritised.exponent=100
actor.optimizer.eps=1e-30
actor.optimizer.grad_clip=0
algorithm.daro.clamp=[1e-30,1e30]
algorithm.f_grpo.gamma=100
"""


def check(run_files, override: str) -> None:
    path = str(run_files.root / "train.jsonl")
    resolve_and_check(run_files.file, [override.replace("{train}", path)], HERE)


@pytest.mark.parametrize("override", HOSTILE.strip().splitlines())
def test_a_senseless_value_is_refused_by_name(run_files, override):
    with pytest.raises(ConfigError) as refused:
        check(run_files, override)
    field = override.partition("=")[0]
    named = [line for line in str(refused.value).splitlines() if line.strip().startswith(field)]
    assert named and all("allowed: " in line and "fix: " in line for line in named), refused.value


@pytest.mark.parametrize("override", EXTREME.strip().splitlines())
def test_the_last_sensible_value_is_not_refused(run_files, override):
    check(run_files, override)


def test_a_training_file_under_another_name_is_the_same_file(run_files):
    link = run_files.root / "link.jsonl"
    link.symlink_to(run_files.root / "train.jsonl")
    with pytest.raises(ConfigError, match=r"data.train: got '.*train.jsonl' 2 times"):
        check(run_files, f"data.train=[{{train}},{link}]")


@pytest.mark.parametrize(
    ("url", "refused"),
    [("http://localhost:99999", True), ("http://localhost:0", True), ("http://localhost:65535", False)],
)
def test_a_url_has_a_port_that_exists(run_files, url, refused):
    options = ["engine.kind=sglang", f'engine.sglang.urls=["{url}"]']
    if refused:
        with pytest.raises(ConfigError, match=r"engine.sglang.urls.0: got .* a port from 1 to 65535"):
            resolve_and_check(run_files.file, options, HERE)
    else:
        resolve_and_check(run_files.file, options, HERE)
