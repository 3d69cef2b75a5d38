"""The algorithm of a run: the options that it gets, what is said about them, and what the builder of batches gets."""

from __future__ import annotations

import pytest
from run_configuration import configured

from megatron_daro.errors import ConfigError
from megatron_daro.runtime import parts
from megatron_daro.runtime.parts import algorithm_of, algorithm_remarks, batch_builder


def remarks(**sections) -> list[str]:
    config = configured(**sections)
    return algorithm_remarks(config, algorithm_of(config))


def test_the_named_algorithm_gets_its_own_options_and_no_others():
    daro = algorithm_of(configured(algorithm={"name": "daro", "daro": {"clamp": (0.5, 2.0)}, "filter": "none"}))
    assert daro.difficulty.clamp == (0.5, 2.0)
    assert daro.kept_bins == set(range(9))
    # Options of daro are there in every configuration; only daro takes them.
    assert algorithm_of(configured(algorithm={"name": "grpo", "std": "sample"})).std == "sample"
    with pytest.raises(ConfigError, match=r"options of algorithm grpo: .*'gamma'"):
        algorithm_of(configured(algorithm={"name": "grpo", "options": {"gamma": 2.0}}))
    with pytest.raises(ConfigError, match=r"options of algorithm daro: .*'gamma'"):
        algorithm_of(configured(algorithm={"name": "daro", "options": {"gamma": 2.0}}))


def test_a_divisor_that_the_algorithm_has_not_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"algorithm\.std: got 'batch', allowed with rloo: auto or none"):
        algorithm_of(configured(algorithm={"name": "rloo", "std": "batch"}))


def test_another_divisor_than_the_published_one_is_remarked():
    for name in ("dr_grpo", "dgpo", "lite_ppo", "maxrl"):
        (remark,) = remarks(algorithm={"name": name, "std": "sample"})
        assert remark.startswith(f"algorithm.std: got 'sample'; auto is what {name} is")
    assert remarks(algorithm={"name": "grpo", "std": "sample"}) == []


@pytest.mark.parametrize(
    ("name", "more", "remarked"),
    [
        ("grpo", {}, True),
        ("daro", {}, False),
        ("grpo", {"finish_batch": "enough"}, False),
        ("grpo", {"keep_surplus": True}, False),
    ],
)
def test_oversampling_without_any_use_is_remarked(name, more, remarked):
    found = remarks(algorithm={"name": name}, rollout={"oversampling": 2.0, **more})
    assert bool(found) is remarked
    assert all("rollout.oversampling: got 2, but no group is filtered" in remark for remark in found)


def test_the_builder_hands_the_options_of_lengths_on(monkeypatch):
    overlong = {"kind": "penalty", "max_tokens": 64, "cache_tokens": 16}
    reward = {"weight": 0.5, "fade_steps": 10}
    config = configured(algorithm={"overlong": overlong, "length_reward": reward, "repetition_penalty": 0.25})
    monkeypatch.setattr(parts, "build_batch", lambda groups, algorithm, **options: (groups, options))
    groups, options = batch_builder(config, algorithm_of(config))(["a group"], 5)
    assert groups == ["a group"] and options.pop("length_weight") == config.algorithm.length_reward.weight_at(5) > 0
    assert options.pop("repetition_penalty") == 0.25
    assert options == {"overlong": "penalty", "max_tokens": 64, "cache_tokens": 16, "teacher": None, "by_turn": False}
