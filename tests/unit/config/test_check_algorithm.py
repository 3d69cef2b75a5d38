"""Options of the loss that contradict each other are refused by name, before anything starts."""

from __future__ import annotations

import pytest

from megatron_daro.config import Hardware, check, resolve


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["algorithm.daro.kernels=8", "rollout.rollouts_per_prompt=8"],
            "algorithm.daro.kernels",
            "got 8 with 8 rollouts per prompt; allowed: 2 to 7",
        ),
        (
            ["algorithm.daro.parameter=linear", "algorithm.daro.half_life=5"],
            "algorithm.daro.parameter",
            "got linear with half_life",
        ),
        (["algorithm.daro.length_edges=[64,32]"], "algorithm.daro.length_edges", "rising numbers of tokens"),
        (
            ["algorithm.name=lambda_grpo", "algorithm.lambda_grpo.spread=0.6", "rollout.rollouts_per_prompt=4"],
            "algorithm.lambda_grpo.spread",
            "got 0.6 with 4 rollouts per prompt; allowed: below 1 / sqrt(4 - 1) = 0.5774",
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
            ["algorithm.kl.place=reward", "algorithm.kl.mean=rollouts", "algorithm.kl.coefficient=0.1"],
            "algorithm.kl.mean",
            "got rollouts with place reward",
        ),
        (
            ["algorithm.trust_region=gspo", "algorithm.correction.kind=tis"],
            "algorithm.correction.level",
            "got token with trust_region gspo",
        ),
    ],
)
def test_a_contradiction_is_refused_in_words(run_files, overrides, field, words):
    report = check(resolve(run_files.file, overrides), Hardware("cpu", 4))
    found = [str(problem) for problem in report.problems]
    assert any(line.startswith(f"{field}: got ") and words in line for line in found), found
    assert all("; allowed: " in line and "; fix: " in line for line in found)


BATCHES = ["trainer.updates_per_batch=2", "rollout.prompts_per_step=4"]


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
