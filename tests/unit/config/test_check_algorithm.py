"""Options of the loss that contradict each other are refused by name, before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_daro.config import Hardware, check, resolve
from megatron_daro.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["algorithm.daro.parameter=linear", "algorithm.daro.half_life=5"],
            "algorithm.daro.parameter",
            "got linear with half_life",
        ),
        (
            ["algorithm.trust_region=cispo", "algorithm.dual_clip=3"],
            "algorithm.dual_clip",
            "got 3 with trust_region cispo",
        ),
        (
            ["algorithm.trust_region=reinforce", "algorithm.dual_clip=3"],
            "algorithm.dual_clip",
            "got 3 with trust_region reinforce",
        ),
        (
            ["algorithm.name=kimi", "algorithm.trust_region=gspo"],
            "algorithm.trust_region",
            "got 'gspo' with name kimi, which has a surrogate of its own",
        ),
        (["algorithm.name=kimi", "algorithm.dual_clip=3"], "algorithm.dual_clip", "got 3.0 with name kimi"),
        (
            ["algorithm.kl.place=reward", "algorithm.kl.mean=rollouts", "algorithm.kl.coefficient=0.1"],
            "algorithm.kl.mean",
            "got rollouts with place reward",
        ),
        (
            ["algorithm.name=grpo", "algorithm.kl.place=token_reward", "algorithm.kl.coefficient=0.1"],
            "algorithm.kl.place",
            "got token_reward with name grpo, which has one advantage for all tokens",
        ),
        (
            ["algorithm.trust_region=gspo", "algorithm.correction.kind=tis"],
            "algorithm.correction.level",
            "got token with trust_region gspo",
        ),
        (["algorithm.distill.coefficient=2"], "algorithm.distill", "got coefficient without urls"),
        (
            ["algorithm.name=grpo", "algorithm.distill.urls=[http://t:1]", "rollout.temperature=0.7"],
            "algorithm.distill",
            "got a teacher with rollout.temperature 0.7; allowed: 1",
        ),
        (
            ["algorithm.name=ppo", "algorithm.distill.urls=[http://t:1]"],
            "algorithm.distill",
            "got a teacher with algorithm.name ppo, which makes advantages per token itself",
        ),
        (["algorithm.distill.urls=[http://t:1,http://t:1]"], "algorithm.distill.urls", "got a URL twice"),
        (
            ["engine.kind=sglang", "engine.sglang.urls=[http://t:1]", "algorithm.distill.urls=[http://t:1]"],
            "algorithm.distill.urls",
            "got http://t:1, which is a server of the policy",
        ),
        (
            ["algorithm.turn_rewards=true", "algorithm.kl.place=reward", "algorithm.kl.coefficient=0.1"],
            "algorithm.turn_rewards",
            "got advantages of tokens, which a KL term in the reward would not reach",
        ),
        (["algorithm.turn_rewards=true"], "algorithm.turn_rewards", "got true with environment.kind single_turn"),
        (["environment.reward_weights.x=2"], "environment.reward_weights", "got x with environment.kind single_turn"),
    ],
)
def test_a_contradiction_is_refused_in_words(run_files, overrides, field, words):
    report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
    found = [str(problem) for problem in report.problems]
    assert any(line.startswith(f"{field}: got ") and words in line for line in found), found
    assert all("; allowed: " in line and "; fix: " in line for line in found)


BATCHES = ["trainer.updates_per_batch=2", "rollout.prompts_per_step=4"]


def test_mirror_descent_with_one_update_is_said(run_files):
    def warned(*overrides):
        report = check(resolve(run_files.file, ["algorithm.name=kimi", *overrides]), Hardware("cpu", 4))
        assert not report.problems, report.problems
        return [str(w) for w in report.warnings if str(w).startswith("trainer.updates_per_batch: got 1")]

    assert "whose tau weighs what moved since the batch began" in warned()[0]
    assert not warned(*BATCHES)
    with pytest.raises(ConfigError, match=r"algorithm\.kimi\.tau \(command line\): got 0"):
        resolve(run_files.file, ["algorithm.kimi.tau=0"])


def test_a_penalty_beside_rewards_of_0_and_1_is_said(run_files):
    def warned(*overrides):
        report = check(resolve(run_files.file, list(overrides)), Hardware("cpu", 4))
        assert not report.problems, report.problems
        return [
            str(warning) for warning in report.warnings if str(warning).startswith("reward.incorrect_reward: got 0")
        ]

    for kind in ("penalty", "both"):
        (said,) = warned(f"algorithm.overlong.kind={kind}")
        assert "fix: set reward.incorrect_reward=-1" in said
        assert not warned(f"algorithm.overlong.kind={kind}", "reward.incorrect_reward=-1")
    assert not warned("algorithm.overlong.kind=filter")


@pytest.mark.parametrize(
    ("published", "field", "others"),
    [
        ("rewards", "algorithm.dgpo.deviation", ["algorithm.name=dgpo", "reward.incorrect_reward=-1"]),
        ("rewards", "algorithm.dgpo.deviation", ["algorithm.name=dgpo", "algorithm.overlong.kind=penalty"]),
        ("batch", "algorithm.ha_dw.every", ["algorithm.name=ha_dw", *BATCHES]),
        ("rollouts", "algorithm.kl.mean", ["algorithm.name=grpo_sequence", "algorithm.kl.coefficient=0.1"]),
    ],
)
def test_a_default_that_is_not_the_published_algorithm_is_said(run_files, published, field, others):
    def warned(overrides):
        report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
        assert not report.problems, report.problems
        return [str(warning) for warning in report.warnings if str(warning).startswith(f"{field}: got ")]

    (said,) = warned(others)
    assert f"{published} is the published" in said and f"set {field}={published}" in said
    assert not warned([*others, f"{field}={published}"])
    assert not warned(others[:1]), "without the other option both are the same"


def critic_directory(run_files, vocabulary=None, **changes):
    """A model beside the policy's, with its shape but for what is changed."""
    directory = run_files.root / "critic"
    shutil.copytree(run_files.model, directory)
    shape = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**shape, **changes}))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary or {}}}))
    return directory


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["algorithm.critic.learning_rate=1e-4"], "algorithm.critic", "got learning_rate with name daro"),
        (["algorithm.name=grpo", "algorithm.ppo.gae_lambda=0.9"], "algorithm.ppo", "got gae_lambda with name grpo"),
        (
            ["algorithm.name=ppo", "algorithm.critic.value_clip=0.2"],
            "algorithm.critic.value_clip",
            "got 0.2 with one update per batch",
        ),
        (
            ["algorithm.name=ppo", "algorithm.critic.pretrain_steps=5", "trainer.steps=5"],
            "algorithm.critic.pretrain_steps",
            "got 5, but the run has 5 optimizer steps",
        ),
        (
            ["algorithm.name=ppo", "algorithm.critic.offload=true", "trainer.replace_lost_ranks=true"],
            "algorithm.critic.offload",
            "whose snapshots need both models on the GPUs",
        ),
        (
            ["algorithm.name=ppo", "algorithm.critic.warmup_steps=6", "trainer.steps=5"],
            "algorithm.critic.warmup_steps",
            "allowed: at most 5",
        ),
        (
            ["algorithm.name=ppo", "algorithm.ppo.bootstrap_truncated=true", "rollout.max_response_tokens=1"],
            "algorithm.ppo.bootstrap_truncated",
            "answers of one token",
        ),
        (["algorithm.name=ppo", "algorithm.critic.path=nowhere"], "algorithm.critic.path", "which cannot be used"),
    ],
)
def test_what_does_not_fit_a_critic_is_refused_in_words(run_files, overrides, field, words):
    report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
    found = [str(problem) for problem in report.problems]
    assert any(line.startswith(f"{field}: got ") and words in line for line in found), found


@pytest.mark.parametrize("option", ["gamma=1.5", "gae_lambda=-0.1", "critic_lambda=2", "length_factor=0"])
def test_options_of_ppo_out_of_range_are_refused(run_files, option):
    with pytest.raises(ConfigError, match=rf"algorithm\.ppo\.{option.split('=')[0]} \(command line\): got"):
        resolve(run_files.file, ["algorithm.name=ppo", f"algorithm.ppo.{option}"])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"vocab_size": 101}, "with an embedding of 101 tokens (the policy: 100)"),
        ({"vocabulary": {"a": 1}}, "whose tokenizer has other tokens"),
        ({"max_position_embeddings": 64}, "with max_position_embeddings 64"),
        (
            {"num_attention_heads": 6, "head_dim": 16},
            "with which actor.tensor_parallel is 4, which does not divide the model's 6 attention heads",
        ),
        ({"architectures": ["Qwen2Model"]}, "allowed for qwen2: Qwen2ForCausalLM, Qwen2ForSequenceClassification, "),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(run_files, made, words):
    (run_files.model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    path = critic_directory(run_files, **made)
    overrides = ["algorithm.name=ppo", f"algorithm.critic.path={path}", "actor.tensor_parallel=4"]
    found = [str(problem) for problem in check(resolve(run_files.file, overrides), Hardware("cpu", 4)).problems]
    assert len(found) == 1 and found[0].startswith("algorithm.critic.path: got ") and words in found[0], found


@pytest.mark.parametrize(
    ("numbers", "made"),
    [
        ({}, {"tie_word_embeddings": True}),
        ({}, {"hidden_size": 128, "num_hidden_layers": 2, "architectures": ["Qwen2ForSequenceClassification"]}),
        ({"a": 0, "b": 98}, {"vocab_size": 99}),
    ],
)
def test_a_fit_critic_is_taken(run_files, numbers, made):
    """Rows of an embedding that stand for no token of the tokenizer may be missing."""
    (run_files.model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": numbers}}))
    path = critic_directory(run_files, numbers, **made)
    overrides = ["algorithm.name=ppo", f"algorithm.critic.path={path}", "algorithm.critic.pretrain_steps=2"]
    assert not check(resolve(run_files.file, overrides), Hardware("cpu", 4)).problems
