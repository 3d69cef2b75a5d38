"""Options of the adapters from one environment variable."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.options import VARIABLE, read_options


def test_defaults_are_those_of_the_configuration(monkeypatch):
    from megatron_daro.config.algorithm import DaroSection

    monkeypatch.delenv(VARIABLE, raising=False)
    options = read_options()
    assert options.daro == DaroSection()
    assert options.algorithm(8).rollouts_per_prompt == 8


def test_words_of_the_environment_reach_the_algorithm(monkeypatch):
    monkeypatch.setenv(VARIABLE, "daro.learning_rate=0.5 daro.clamp=[0.5,2] std=sample correct_above=0")
    options = read_options()
    algorithm = options.algorithm(4)
    assert (algorithm.difficulty.clamp, algorithm.std) == ((0.5, 2.0), "sample")
    algorithm.difficulty.update(torch.zeros(5), torch.ones(5))
    assert algorithm.weights[1:4].log().tolist() == pytest.approx([0.5] * 3), "Adam's first step: the learning rate"
    assert options.correct_above == 0


def test_what_a_host_does_not_hand_on_is_refused_at_the_start():
    with pytest.raises(AlgorithmError, match=r"daro\.magnitude"):
        read_options("daro.magnitude=advantage").algorithm(4)
    read_options("daro.half_life=9").algorithm(4)
    with pytest.raises(AlgorithmError, match="rollouts_per_prompt: got 1"):
        read_options("").algorithm(1)


def test_every_wrong_word_is_named():
    with pytest.raises(ConfigError) as caught:
        read_options("daro.learning_rate=-1 daro.lerning=2 std=mad nonsense")
    for part in ("daro.learning_rate", "daro.lerning", "std", "nonsense", VARIABLE):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rewards", "verdicts"),
    [
        ("", [0.0, 1.0], [False, True]),
        ("", [-1.0, 1.0], [False, True]),
        ("", [0.0, 0.0], [False, False]),
        ("correct_above=0", [-0.2, 0.7], [False, True]),
        ("correct_above=0.5", [0.5, 0.75], [False, True]),
    ],
)
def test_verdicts(text, rewards, verdicts):
    assert read_options(text).verdicts(torch.tensor(rewards)).tolist() == verdicts


@pytest.mark.parametrize("rewards", [[0.0, 0.9], [-1.0, 0.0], [1.0, 0.5]])
def test_shaped_rewards_are_no_verdicts(rewards):
    with pytest.raises(AlgorithmError, match="correct_above"):
        read_options("").verdicts(torch.tensor(rewards))
