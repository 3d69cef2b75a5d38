"""Options of the adapters from one environment variable."""

from __future__ import annotations

import subprocess
import sys

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
    assert (algorithm.difficulty.learning_rate, algorithm.difficulty.clamp, algorithm.std) == (
        0.5,
        (0.5, 2.0),
        "sample",
    )
    assert options.correct_above == 0


def test_what_a_host_does_not_hand_on_is_refused_at_the_start():
    with pytest.raises(AlgorithmError, match=r"^daro\.magnitude: got"):
        read_options("daro.magnitude=advantage").algorithm(4)
    read_options("daro.half_life=9").algorithm(4)


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
    ],
)
def test_verdicts(text, rewards, verdicts):
    assert read_options(text).verdicts(torch.tensor(rewards)).tolist() == verdicts


@pytest.mark.parametrize("rewards", [[0.0, 0.9], [-1.0, 0.0], [1.0, 0.5]])
def test_shaped_rewards_are_no_verdicts(rewards):
    with pytest.raises(AlgorithmError, match="correct_above"):
        read_options("").verdicts(torch.tensor(rewards))


def test_importing_the_core_needs_no_host():
    code = (
        "import sys, torch.distributed as dist, megatron_daro.plugins.core, megatron_daro.plugins.options;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'ray', 'megatron', 'transformers', 'verl', 'slime'}),"
        "dist.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["[]", "False"]


@pytest.mark.parametrize(
    ("rewards", "got"),
    [([0.0, 0.9], "got 0.9,"), ([-1.0, 0.0, 1.0], "got 0 beside -1,"), ([1.0, -0.5, 0.25], "got -0.5,")],
)
def test_the_first_reward_that_is_no_verdict_is_named(rewards, got):
    with pytest.raises(AlgorithmError) as raised:
        read_options("").verdicts(torch.tensor(rewards))
    assert got in str(raised.value) and f"{VARIABLE}='correct_above=0'" in str(raised.value)


def test_a_reward_is_right_above_the_threshold_and_not_at_it():
    assert read_options("correct_above=0.5").verdicts(torch.tensor([0.5, 0.75])).tolist() == [False, True]
    assert read_options("").verdicts(torch.tensor([-1.0, -1.0])).tolist() == [False, False]


def test_defaults_of_the_options_and_words_of_a_wrong_one(monkeypatch):
    monkeypatch.setenv(VARIABLE, "start_fresh=true")
    assert read_options().start_fresh and not read_options("").start_fresh
    options = read_options("")
    assert (options.std, options.correct_above, options.allow_host_options) == ("auto", None, ())
    with pytest.raises(ConfigError, match=r"std: got 'mad'; allowed: .*; fix: change or remove it in my words"):
        read_options("std=mad", source="my words")
    with pytest.raises(AlgorithmError, match="rollouts_per_prompt: got 1"):
        options.algorithm(1)
    assert options.algorithm(4).name == "daro"
