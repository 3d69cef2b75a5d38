"""slime's hooks where slime itself is not needed: flags, groups, plans, what is refused."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins import slime
from megatron_daro.plugins.options import read_options
from megatron_daro.plugins.slime_rollouts import bins_and_advantages, plans_of

K = 4
ARGUMENTS = Namespace(n_samples_per_prompt=K)


class Sample:
    def __init__(self, reward, group):
        self.reward, self.group_index = reward, group

    def get_reward_value(self, args):
        return self.reward


REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_advantages_are_those_of_whole_groups():
    raw, advantages = slime.reward_post_process(ARGUMENTS, [Sample(r, i // K + 7) for i, r in enumerate(REWARDS)])
    assert raw == REWARDS
    root3 = 3**0.5
    expected = [root3, *[-1 / root3] * 3, *[1 / root3] * 3, -root3]
    assert advantages == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("groups", [[0, 1] * 4, [0, 0, 0, 1, 1, 1, 1, 1]])
def test_groups_out_of_order_are_refused(groups):
    with pytest.raises(AlgorithmError, match="whole and in order"):
        slime.reward_post_process(ARGUMENTS, [Sample(r, g) for r, g in zip(REWARDS, groups, strict=True)])


def test_a_batch_that_is_no_multiple_of_k_is_refused():
    with pytest.raises(AlgorithmError, match="got 7, allowed is a multiple"):
        slime.reward_post_process(ARGUMENTS, [Sample(r, None) for r in REWARDS[:7]])


def good_arguments(**changes):
    hooks = {option: f"{slime.MODULE}.{name}" for option, name in slime.HOOKS.items()}
    base = {"loss_type": "custom_loss", "advantage_estimator": "grpo", "kl_coef": 0, **hooks}
    return Namespace(**{**base, **changes})


def test_the_printed_flags_are_what_is_checked():
    done = subprocess.run(
        [sys.executable, "-m", slime.MODULE, "--flags"], capture_output=True, text=True, check=True, timeout=120
    )
    words = done.stdout.replace("\\", "").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    slime.check_flags(Namespace(kl_coef=0, **{name[2:].replace("-", "_"): value for name, value in given.items()}))
    assert len(given) == 7


def test_every_wrong_flag_is_named_at_once():
    wrong = good_arguments(loss_type="policy_loss", use_critic=True, custom_loss_function_path=None)
    with pytest.raises(ConfigError) as caught:
        slime.check_flags(wrong)
    for flag in ("--loss-type", "--use-critic", "--custom-loss-function-path"):
        assert flag in str(caught.value)
    slime.check_flags(good_arguments())


def test_every_hook_is_a_function_of_the_module():
    assert all(callable(getattr(slime, name)) for name in slime.HOOKS.values())


@pytest.fixture
def own_session(monkeypatch):
    monkeypatch.setattr(slime, "_session", slime.Session(slime.DifficultyStep(read_options("").algorithm(K))))
    return slime.session()


def rollout():
    """The second of two data-parallel ranks: three samples, two optimizer steps."""
    _, advantages = bins_and_advantages(ARGUMENTS, torch.tensor(REWARDS))
    return {
        "raw_reward": REWARDS,
        "partition": [6, 0, 3],
        "rewards": [float(advantages[i]) for i in (6, 0, 3)],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([1, 0, 1])],
        "advantages": [torch.zeros(2), torch.zeros(2), torch.zeros(3)],
        "num_microbatches": [1, 2],
        "micro_batch_indices": [[1], [2], [0]],
        "global_batch_sizes": [3, 5],
    }


def test_bins_travel_and_steps_are_planned(own_session):
    data = rollout()
    slime.rollout_data_postprocess(ARGUMENTS, 0, data)
    assert [values.tolist() for values in data["returns"]] == [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0, 1.0]]
    first, second = own_session.plans
    assert (first.bins_N.tolist(), first.lengths_N.tolist(), first.floored_tokens, first.rollouts) == ([1], [0], 1, 3)
    assert (second.bins_N.tolist(), second.lengths_N.tolist(), second.rollouts) == ([1, 3], [2, 2], 5)


def test_samples_that_changed_places_are_seen(own_session):
    data = rollout()
    data["partition"] = [0, 6, 3]
    with pytest.raises(AlgorithmError, match=r"sample 6 has 1\.73"):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


def test_a_loss_that_never_receives_the_rewards_stops_the_run(own_session):
    data = rollout()
    del data["raw_reward"]
    with pytest.raises(AlgorithmError, match="raw_reward missing"):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


def test_hooks_that_did_not_run_are_named(monkeypatch, own_session):
    with pytest.raises(AlgorithmError, match="rollout_data_postprocess did not run"):
        slime.before_train_step(ARGUMENTS, 0, 0, None, None, None)
    monkeypatch.setattr(slime, "_session", None)
    with pytest.raises(ConfigError, match="megatron_init did not run"):
        slime.session()


def test_plans_cover_every_micro_batch():
    data = rollout()
    plans = plans_of(data, torch.tensor([3, 1, 1]), torch.tensor([2, 0, 2]))
    assert [len(plan.bins_N) for plan in plans] == [1, 2]
