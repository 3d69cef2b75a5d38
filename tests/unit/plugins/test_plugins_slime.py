"""slime's hooks where slime itself is not needed: flags, groups, plans, what is refused."""

from __future__ import annotations

import pickle
import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins import miles, slime
from megatron_daro.plugins.options import read_options
from megatron_daro.plugins.slime import bins_and_advantages

K = 4
ARGUMENTS = Namespace(n_samples_per_prompt=K, custom_megatron_init_path="megatron_daro.plugins.slime.megatron_init")


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
    with pytest.raises(AlgorithmError):
        slime.reward_post_process(ARGUMENTS, [Sample(r, g) for r, g in zip(REWARDS, groups, strict=True)])


def test_a_batch_that_is_no_multiple_of_k_is_refused():
    with pytest.raises(AlgorithmError, match="got 7"):
        slime.reward_post_process(ARGUMENTS, [Sample(r, None) for r in REWARDS[:7]])


DEFAULTS = {
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "kl_coef": 0.0,
    "eps_clip_high": None,
    "custom_advantage_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "use_unbiased_kl": False,
    "rollout_temperature": 1.0,
    "invented_by_a_later_version": 0.5,
    **dict.fromkeys(slime.HOOKS),
}
"""Some of slime's own options."""


def good_arguments(**changes):
    hooks = {option: f"{slime.MODULE}.{name}" for option, name in slime.HOOKS.items()}
    base = {"loss_type": "custom_loss", "advantage_estimator": "grpo", "kl_coef": 0, **hooks}
    return Namespace(**{**DEFAULTS, **base, **changes})


def check(arguments, text=""):
    slime.check_flags(arguments, slime.HOST, slime.MODULE, DEFAULTS, read_options(text))


@pytest.mark.parametrize("checking", [None, "mine.init"])
def test_the_reward_hook_alone_is_refused(checking):
    args = Namespace(n_samples_per_prompt=K, custom_megatron_init_path=checking)
    with pytest.raises(ConfigError, match=r"--custom-megatron-init-path.*--flags"):
        slime.reward_post_process(args, [Sample(r, None) for r in REWARDS])


@pytest.mark.parametrize("host", [slime, miles], ids=["slime", "miles"])
def test_the_printed_flags_are_what_is_checked(host, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [host.MODULE, "--flags"])
    slime.main(host.MODULE)
    words = capsys.readouterr().out.replace("\\", "").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    arguments = Namespace(**{**DEFAULTS, **{name[2:].replace("-", "_"): value for name, value in given.items()}})
    slime.check_flags(arguments, host.HOST, host.MODULE, DEFAULTS, read_options(""))
    hooks = [value.rpartition(".") for value in given.values() if value.startswith(host.MODULE)]
    assert len(hooks) == len(slime.HOOKS) and all(callable(getattr(host, name)) for *_, name in hooks)


def test_every_wrong_flag_is_named_at_once():
    wrong = good_arguments(loss_type="policy_loss", use_critic=True, custom_loss_function_path=None)
    with pytest.raises(ConfigError) as caught:
        check(wrong)
    for flag in ("--loss-type", "--use-critic", "--custom-loss-function-path"):
        assert flag in str(caught.value)
    check(good_arguments(eps_clip_high=0.28, use_unbiased_kl=True, rollout_temperature=0.7))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("custom_advantage_function_path", "mine.advantages"),
        ("custom_pg_loss_reducer_function_path", "mine.reducer"),
        ("grpo_std_normalization", False),
        ("invented_by_a_later_version", 0.6),
        ("non_persistent_ckpt_type", "global"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}: got"):
        check(good_arguments(**{option: value}))


def test_an_unknown_option_can_be_allowed_by_name():
    check(good_arguments(invented_by_a_later_version=0.6), "allow_host_options='[invented-by-a-later-version]'")


def policy_loss(args, batch, logits, sum_of_sample_mean):
    """slime's policy_loss_function where a custom reducer is named (loss.py: `custom_pg_loss_reducer_func(...)`)."""
    module, _, name = args.custom_pg_loss_reducer_function_path.rpartition(".")
    reducer = getattr(sys.modules[module], name)
    pg_loss = reducer(batch["total_lengths"], batch["response_lengths"], batch["kept"], False)(logits)
    return pg_loss + sum_of_sample_mean(logits), {"pg_loss": pg_loss.detach(), "tis": torch.zeros(())}


@pytest.fixture
def own_session():
    """As the first hook makes it, over parts of slime that are here."""
    parts = slime.Parts(policy_loss, lambda batch, masks: masks, lambda args, metrics: None)
    model = Namespace(save_checkpoint=print, load_checkpoint=print, get_args=print)
    slime.begin_session(ARGUMENTS, slime.HOST, model, read_options(""), parts)
    return slime.session()


def rollout():
    """The second of two data-parallel ranks: three samples, two optimizer steps."""
    _, advantages = bins_and_advantages(ARGUMENTS, torch.tensor(REWARDS))
    return {
        "raw_reward": REWARDS,
        "partition": [6, 0, 3],
        "rewards": [float(advantages[i]) for i in (6, 0, 3)],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([1, 0, 1])],
        "advantages": [torch.full((n,), float(advantages[i])) for n, i in ((2, 6), (2, 0), (3, 3))],
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
    with pytest.raises(AlgorithmError, match="sample 6"):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


def test_a_loss_that_never_receives_the_rewards_stops_the_run(own_session):
    data = rollout()
    del data["raw_reward"]
    with pytest.raises(AlgorithmError, match="raw_reward"):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


def test_a_hook_that_did_not_run_is_named(own_session):
    with pytest.raises(AlgorithmError, match="rollout_data_postprocess"):
        slime.before_train_step(ARGUMENTS, 0, 0, None, None, None)


def test_the_host_reports_and_adds_its_own_terms(own_session):
    """Only the reduction of token losses is DARO's; a token that a correction rejected stays in the denominator."""
    own_session.step.begin(torch.tensor([1, 2]), torch.tensor([2, 2]), lambda vector: vector)
    own_session.divisor = 8.0
    batch = {
        "total_lengths": [3, 3],
        "response_lengths": [2, 2],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1, 1])],
        "kept": [torch.tensor([1, 1]), torch.tensor([1, 0])],
        "returns": [torch.full((2,), 1.0), torch.full((2,), 2.0)],
    }
    losses = torch.tensor([1.0, 2.0, 4.0, float("nan")], requires_grad=True)
    args = Namespace(custom_pg_loss_reducer_function_path=None)
    total, report = slime.loss(args, batch, losses, lambda values: 0.5 * values[0])
    assert float(total) == pytest.approx(8 * ((1 + 2) / 2 + 4 / 2) + 0.5)
    assert set(report) == {"pg_loss", "tis"}
    assert args.custom_pg_loss_reducer_function_path is None


def test_a_host_that_does_not_ask_for_the_reduction_is_refused(own_session):
    own_session.parts = slime.Parts(lambda *given: (torch.zeros(()), {}), None, None)
    with pytest.raises(AlgorithmError):
        slime.loss(Namespace(), {}, torch.zeros(1), None)


def test_advantages_that_were_changed_on_the_way_are_seen(own_session):
    data = rollout()
    data["advantages"] = [
        torch.full((len(mask),), a) for a, mask in zip(data["rewards"], data["loss_masks"], strict=True)
    ]
    slime.rollout_data_postprocess(ARGUMENTS, 0, data)
    data["advantages"][2][1] += 0.5
    with pytest.raises(AlgorithmError, match="sample 3"):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


def test_places_travel_with_the_advantages(own_session):
    """slime 0.3.1 drops `partition` from what the train ranks get."""
    _, advantages = slime.reward_post_process(ARGUMENTS, [Sample(r, None) for r in REWARDS])
    advantages = pickle.loads(pickle.dumps(advantages))
    data = rollout()
    del data["partition"]
    data["rewards"] = [advantages[i] for i in (6, 0, 3)]
    slime.rollout_data_postprocess(ARGUMENTS, 0, data)
    assert [values.tolist() for values in data["returns"]] == [[3.0, 3.0], [1.0, 1.0], [1.0, 1.0, 1.0]]
    data["rewards"] = [float(a) for a in data["rewards"]]
    with pytest.raises(AlgorithmError):
        slime.rollout_data_postprocess(ARGUMENTS, 0, data)


class Optimizer:
    def __init__(self, taken=True):
        self.taken = taken

    def step(self):
        """Megatron's: (whether it was taken, norm of the gradient, zeros in it)."""
        return self.taken, 1.5, None


@pytest.fixture
def one_rank(monkeypatch):
    """Sums over one rank, which write down whether context-parallel ranks are in them."""
    asked = []
    for name in ("over_data", "over_data_and_stages"):
        monkeypatch.setattr(
            slime, name, lambda *, with_context, name=name: asked.append((name, with_context)) or (lambda v: v)
        )
    return asked


@pytest.mark.parametrize("taken", [True, False])
def test_a_step_is_counted_before_and_learnt_after_the_optimizer(own_session, one_rank, taken):
    reported = []
    own_session.parts = slime.Parts(
        policy_loss, lambda batch, masks: masks, lambda args, metrics: reported.append(metrics)
    )
    slime.rollout_data_postprocess(ARGUMENTS, 0, rollout())
    optimizer = Optimizer(taken)
    for step_id, divisor in ((0, 1.0), (1, 4.0)):
        args = Namespace(calculate_per_token_loss=True)
        slime.before_train_step(args, 5, step_id, None, optimizer, None)
        assert own_session.divisor == divisor
        plan = own_session.plans[step_id]
        ones = plan.lengths_N.double()
        own_session.step.weigh(slime.SampleSums(3 * ones, 3 * ones, ones), plan.bins_N)
        assert optimizer.step() == (taken, 1.5, None)
    slime.before_train_step(Namespace(calculate_per_token_loss=False), 5, 1, None, optimizer, None)
    assert own_session.divisor == 5.0, "rollouts of the step on all ranks"
    assert [metrics["train/step"] for metrics in reported] == [10, 11]
    assert [metrics["difficulty/skipped"] for metrics in reported] == [float(not taken)] * 2
    assert (own_session.step.algorithm.weights.tolist() == [1.0] * 5) == (not taken)
    assert ("over_data_and_stages", True) in one_rank and ("over_data", False) in one_rank
    assert {entry for entry in one_rank if entry[1]} == {("over_data_and_stages", True)}


def test_a_step_beyond_the_plans_is_refused(own_session, one_rank):
    slime.rollout_data_postprocess(ARGUMENTS, 0, rollout())
    with pytest.raises(AlgorithmError, match="step 2 of rollout 3"):
        slime.before_train_step(ARGUMENTS, 3, 2, None, Optimizer(), None)


BACKEND = "slime.backends.megatron_utils"


def offsets_with_cp(total, response):
    """Of 6 tokens with a prompt of 2, this rank holds the log-probs that end at tokens 0 .. 2 and 5."""
    assert (total, response) == (6, 4)
    return None, None, None, ((0, 3), (5, 6))


@pytest.mark.parametrize("observability", [True, False])
def test_the_first_hook_looks_up_what_the_others_call(monkeypatch, observability, caplog):
    written, main_rank = [], [True]
    log = f"slime.{'observability' if observability else 'utils'}.logging_utils"
    contents = {
        f"{BACKEND}.loss": {"policy_loss_function": policy_loss},
        f"{BACKEND}.cp_utils": {"get_logits_and_tokens_offset_with_cp": offsets_with_cp},
        f"{BACKEND}.initialize": {"is_megatron_main_rank": lambda: main_rank[0]},
        log: {"log": lambda args, metrics, step_key: written.append((metrics, step_key))},
        "slime.utils.arguments": {
            "get_slime_extra_args_provider": lambda: lambda parser: parser.add_argument("--use-opsm", default=False)
        },
        f"{BACKEND}.model": dict.fromkeys(("save_checkpoint", "load_checkpoint", "get_args"), print),
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    found = object() if observability else None
    monkeypatch.setattr(
        slime.importlib.util, "find_spec", lambda name: found if name == "slime.observability" else None
    )
    monkeypatch.setenv("MEGATRON_DARO_OPTIONS", "start_fresh=true")
    args = good_arguments(n_samples_per_prompt=K)
    slime.megatron_init(args)
    own = slime.session()
    assert own.start_fresh and own.step.rollouts_per_prompt == K and own.parts.policy_loss is policy_loss
    assert "DARO is on: slime" in caplog.text
    batch = {"total_lengths": [6], "response_lengths": [4]}
    for size, wanted in ((1, [1, 0, 1, 1]), (2, [1, 1])):
        mpu = Namespace(get_context_parallel_world_size=lambda size=size: size)
        monkeypatch.setitem(sys.modules, "megatron.core", Namespace(mpu=mpu))
        (mask,) = own.parts.local_masks(batch, [torch.tensor([1, 0, 1, 1])])
        assert mask.tolist() == wanted, "masks are cut as slime cuts log-probs"
    own.parts.report(args, {"a": 1.0})
    main_rank[0] = False
    own.parts.report(args, {"b": 1.0})
    assert written == [({"a": 1.0}, "train/step")]
    with pytest.raises(ConfigError, match="--use-opsm: got true"):
        slime.megatron_init(good_arguments(n_samples_per_prompt=K, use_opsm=True))


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("loss_type", "custom_loss", "policy_loss"),
        ("advantage_estimator", "grpo", "gspo"),
        ("kl_coef", 0, 0.1),
        ("kl_coef", 0.0, 1),
        *((name, False, True) for name in ("normalize_advantages", "use_critic", "use_opsm", "use_opd")),
        ("recompute_loss_function", False, True),
        ("custom_convert_samples_to_train_data_path", None, "mine.convert"),
        *(
            (n, True, False)
            for n in ("compute_advantages_and_returns", "grpo_std_normalization", "rewards_normalization")
        ),
    ],
)
def test_flags_that_have_one_value_with_daro(option, right, wrong):
    check(good_arguments(**{option: right}))
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}: got"):
        check(good_arguments(**{option: wrong}))
