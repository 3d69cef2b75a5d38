"""The algorithm of a run: the options that it gets, what is said about them, and what batches are built with."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from run_configuration import configured
from test_batch import make_group

from megatron_daro.actor.objective_settings import objective_settings
from megatron_daro.algo.objective import token_objective
from megatron_daro.algo.weighting import Daro, Kimi
from megatron_daro.config.algorithm import READ_BY_REGION, AlgorithmSection
from megatron_daro.config.rules import algorithm as rules
from megatron_daro.config.rules import unread
from megatron_daro.data.batch import build_step_batch
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.runtime.parts import batch_builder
from megatron_daro.runtime.run_algorithm import algorithm_of, algorithm_remarks


class Twice(Daro):
    """DARO with fewer options, and one more."""

    name = "twice"

    def __init__(self, *, rollouts_per_prompt, max_response_tokens, std, group_filter, factor, normalizer="bin"):
        common = {"std": std, "group_filter": group_filter, "normalizer": normalizer}
        super().__init__(rollouts_per_prompt=rollouts_per_prompt, max_response_tokens=max_response_tokens, **common)
        self.factor = factor


class Mirrored(Kimi):
    """Kimi k1.5's under another name."""

    name = "mirrored"


class Sequences(Kimi):
    """One with a ratio for each sequence, unasked."""

    name = "sequences"
    own_objective = {"trust_region": "gspo"}


class Misspelt(Kimi):
    """One whose own objective nobody knows."""

    name = "misspelt"
    own_objective = {"trust_regon": "sapo"}


def remarks(**sections) -> list[str]:
    config = configured(**sections)
    return algorithm_remarks(config, algorithm_of(config), generates=True)


def test_the_named_algorithm_gets_its_own_options():
    daro = algorithm_of(configured(algorithm={"name": "daro", "daro": {"clamp": (0.5, 2.0)}, "filter": "none"}))
    assert daro.difficulty.clamp == (0.5, 2.0)
    assert daro.kept_bins == set(range(9))
    assert algorithm_of(configured(algorithm={"name": "grpo", "std": "sample"})).std == "sample"


@pytest.mark.parametrize(
    "section",
    [
        {"daro": {"clamp": (1.1, 2.0)}},
        {"daro": {"parameter": "linear", "half_life": 5.0}},
        {"trust_region": "sapo", "dual_clip": 3.0},
        {"trust_region": "gspo", "correction": {"kind": "tis", "level": "token"}},
        {"correction": {"kind": "mis", "low": 1.2}},
        {"correction": {"kind": "mis", "high": 0.9}},
    ],
    ids=str,
)
def test_the_losses_refuse_by_themselves_what_the_configuration_refuses(section):
    config = configured(algorithm=section)
    assert [*rules.loss(config), *rules.daro(config), *unread.refused(config)]
    with pytest.raises((AlgorithmError, ConfigError)):
        objective_settings(config.algorithm, algorithm_of(config))


OTHERS = {"clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.01, "sapo": {"positive": 3.0, "negative": 3.0}}


@pytest.mark.parametrize("option", OTHERS)
@pytest.mark.parametrize("region", READ_BY_REGION)
def test_a_trust_region_reads_the_options_that_the_configuration_says(region, option):
    grpo = algorithm_of(configured(algorithm={"name": "grpo"}))

    def losses(**options):
        section = AlgorithmSection(trust_region=region, **options)
        ratio_T = torch.tensor([0.5, 1.05, 0.97, 1.5, 3.0], dtype=torch.float64)
        logprobs_T = torch.cat([ratio_T, ratio_T]).log().requires_grad_()
        result = token_objective(
            logprobs_T,
            None,
            old_logprobs_T=torch.zeros(10, dtype=torch.float64),
            rollout_logprobs_T=None,
            ref_logprobs_T=None,
            advantages_T=torch.tensor([1.0] * 5 + [-1.0] * 5, dtype=torch.float64),
            mask_T=torch.ones(10, dtype=torch.bool),
            sample_T=torch.arange(10),
            num_samples=10,
            settings=objective_settings(section, grpo),
        ).loss_T
        (slope_T,) = torch.autograd.grad(result.sum(), logprobs_T)
        return result.tolist() + slope_T.tolist()

    if option == "dual_clip" and option not in READ_BY_REGION[region]:
        with pytest.raises(AlgorithmError):
            losses(dual_clip=OTHERS[option])
    else:
        assert (losses() != losses(**{option: OTHERS[option]})) == (option in READ_BY_REGION[region])


def test_a_class_of_ones_own_gets_the_section_daro_if_it_learns_those_weights():
    section = {"name": f"{__name__}:Twice", "options": {"factor": 3.0}, "daro": {"normalizer": "batch"}}
    daro = algorithm_of(configured(algorithm=section))
    assert (daro.factor, daro.difficulty.normalizer, daro.difficulty.clamp) == (3.0, "batch", (0.1, 10.0))
    with pytest.raises(ConfigError, match=r"algorithm\.daro\.scale: got .*; fix: "):
        algorithm_of(configured(algorithm={**section, "daro": {"scale": "mean"}}))
    with pytest.raises(ConfigError, match=r"algorithm\.daro: got normalizer .*toy_algorithm:Toy.*; allowed: .*; fix: "):
        algorithm_of(configured(algorithm={**section, "name": "toy_algorithm:Toy", "options": {"baseline": 0.5}}))


@pytest.mark.parametrize(
    ("name", "options", "allowed"),
    [
        ("grpo", {"gamma": 2.0}, "none"),
        ("daro", {"gamma": 2.0}, "none"),
        ("kimi", {"tua": 2.0}, "tau, reset_optimizer; did you mean tau"),
        ("kimi", {"tau": "0.1"}, "a number"),
        ("kimi", {"tau": True}, "a number"),
        ("kimi", {"tau": 0}, "above 0"),
        ("kimi", {"reset_optimizer": 1}, "true or false"),
        ("dgpo", {"deviation": "reward"}, "verdicts, rewards"),
        ("ha_dw", {"window": 2.5}, "an integer"),
        ("ha_dw", {"window": 1}, "2 or more"),
        ("mgpo", {"target": 1}, "above 0 and below 1"),
        ("ppo", {"gamma": 1.5}, "0 to 1"),
        ("ppo", {"critic_lambda": "x"}, "a number, or null"),
        ("daro_ppo", {"length_factor": 0}, "above 0"),
        ("toy_algorithm:Toy", {"baseline": "1"}, "a number"),
        ("daro", {"name": "grpo"}, "none"),
        ("grpo", {"rollouts_per_prompt": 4}, "other names"),
        ("grpo", {"group_filter": "none"}, "other names"),
        ("daro", {"clamp": [1, 1]}, "other names"),
        ("daro_ppo", {"environments": ["a", "b"]}, "other names"),
    ],
)
def test_an_option_that_the_algorithm_does_not_take_is_refused(name, options, allowed):
    (option,) = options
    with pytest.raises(ConfigError, match=rf"algorithm\.options\.{option}: got .*allowed .*{allowed}.*; fix: "):
        algorithm_of(configured(algorithm={"name": name, "options": options}))


@pytest.mark.parametrize("given", [{"turn_rewards": True}, {"distill": {"urls": ["http://t:1"]}}])
def test_an_algorithm_that_weighs_by_a_rollouts_advantage_has_none_per_token(given):
    with pytest.raises(ConfigError, match=rf"algorithm\.{next(iter(given))}: got it with algorithm\.name ha_dw"):
        algorithm_of(configured(algorithm={"name": "ha_dw", **given}))


@pytest.mark.parametrize(
    ("name", "given", "option"),
    [
        ("toy_algorithm:Toy", {"kl": {"place": "token_reward"}}, "kl.place"),
        ("toy_algorithm:Fluent", {"kl": {"place": "token_reward"}}, "kl.place"),
        (f"{__name__}:Mirrored", {"trust_region": "cispo"}, "trust_region"),
        (f"{__name__}:Mirrored", {"dual_clip": 3.0}, "dual_clip"),
        (f"{__name__}:Sequences", {"correction": {"kind": "tis"}}, "correction.level"),
        (f"{__name__}:Misspelt", {}, "own_objective"),
    ],
)
def test_a_class_of_ones_own_is_asked_for_what_the_rules_cannot_know_of_it(name, given, option):
    options = {"toy_algorithm:Toy": {"baseline": 0.5}, "toy_algorithm:Fluent": {"scale": 0.1, "discount": 0.9}}
    section = {"name": name, "options": options.get(name, {})}
    if option != "own_objective":
        algorithm_of(configured(algorithm=section))
    with pytest.raises(ConfigError, match=rf"algorithm\.{re.escape(option)}: got .*allowed"):
        algorithm_of(configured(algorithm={**section, **given}))


def test_a_divisor_that_the_algorithm_has_not_is_refused_and_another_than_the_published_one_remarked():
    with pytest.raises(ConfigError, match=r"algorithm\.std: got 'batch'"):
        algorithm_of(configured(algorithm={"name": "rloo", "std": "batch"}))
    (remark,) = remarks(algorithm={"name": "dr_grpo", "std": "sample"})
    assert "algorithm.std: got 'sample'" in remark
    assert remarks(algorithm={"name": "grpo", "std": "sample"}) == []


@pytest.mark.parametrize(
    ("name", "more", "remarked"),
    [
        ("grpo", {}, True),
        ("daro", {}, False),
        ("grpo", {"keep_surplus": True}, False),
        ("grpo", {"segment_tokens": 32}, False),
    ],
)
def test_oversampling_without_any_use_is_remarked(name, more, remarked):
    found = remarks(algorithm={"name": name}, rollout={"oversampling": 2.0, **more})
    assert len(found) == remarked and all("rollout.oversampling: got 2" in remark for remark in found)


class OneBatch:
    """An engine that says how it works, and never does."""

    one_batch_at_a_time = True

    def __init__(self, *, model_path, replicas, seed): ...

    async def start(self): ...

    async def answer(self, prompt_tokens, sampling, seed): ...

    async def load_weights(self, directory, version): ...

    async def close(self): ...


class ManyAtOnce(OneBatch):
    one_batch_at_a_time = False


@pytest.mark.parametrize(
    ("kind", "one"), [("embedded", True), ("sglang", False), (OneBatch, True), (ManyAtOnce, False)]
)
def test_a_batch_waits_for_all_where_the_engine_works_on_one_at_a_time_as_one_of_ones_own_may_say(kind, one):
    engine = {"kind": kind if isinstance(kind, str) else f"{__name__}:{kind.__name__}", "seed": 1}
    early = remarks(engine=engine, rollout={"finish_batch": "enough"})
    assert [remark.partition(":")[0] for remark in early] == ["rollout.finish_batch"] * one
    surplus = remarks(engine=engine, algorithm={"name": "grpo"}, rollout={"oversampling": 2.0})
    assert [remark.partition(":")[0] for remark in surplus] == ["rollout.oversampling"] * one


def test_batches_are_built_with_the_penalties_of_the_configuration():
    options = {"overlong": "penalty", "max_tokens": 8, "cache_tokens": 4}
    overlong = {"kind": "penalty", "max_tokens": 8, "cache_tokens": 4}
    reward = {"weight": 0.5, "start_step": 4}
    config = configured(
        algorithm={"name": "grpo", "overlong": overlong, "length_reward": reward},
        rollout={"rollouts_per_prompt": 4},
    )
    algorithm, groups = algorithm_of(config), [make_group(0, [True, True, False, False], [2, 5, 6, 7])]
    built = batch_builder(config, algorithm)(groups, 5)
    weight = config.algorithm.length_reward.weight_at(5)
    np.testing.assert_array_equal(
        built.advantages_N, build_step_batch(groups, algorithm, length_weight=weight, **options).advantages_N
    )
    assert weight > 0 and not np.allclose(
        built.advantages_N, build_step_batch(groups, algorithm, **options).advantages_N
    )
