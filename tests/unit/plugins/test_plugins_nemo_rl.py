"""NeMo-RL's options and launcher, with stand-ins for its modules: what is refused, and when."""

from __future__ import annotations

import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError
from megatron_daro.plugins import nemo_rl as adapter
from megatron_daro.plugins.options import read_options

K = 4
LAUNCHER = Path(__file__).parents[3] / "examples" / "plugins" / "nemo_rl" / "run_grpo_daro.py"


class Section:
    """A model of pydantic as NeMo-RL 0.7 and later have it: attributes, and fields with defaults."""

    class Field:
        def __init__(self, default):
            self.default = default

        def get_default(self, call_default_factory):
            return self.default

    model_fields = {"horizon": Field(3)}

    def __init__(self, **values):
        vars(self).update({"horizon": 3, **values})

    def __iter__(self):
        return iter(vars(self).items())


GRPO = {"num_generations_per_prompt": K, "use_leave_one_out_baseline": False, "normalize_rewards": True}


def config(kind, **sections):
    base = {"grpo": GRPO, "loss_fn": {"token_level_loss": True}, "data_plane": {"enabled": False}}
    sections = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    if kind == "mappings":  # 0.6
        return sections
    return Section(**{name: Section(**values) if name != "data_plane" else values for name, values in sections.items()})


@pytest.mark.parametrize("kind", ["mappings", "models"])
@pytest.mark.parametrize(
    ("section", "option", "value", "named"),
    [
        ("data_plane", "enabled", True, "data_plane.enabled"),
        ("grpo", "adv_estimator", {"name": "gdpo"}, "grpo.adv_estimator.name: got 'gdpo'"),
        ("grpo", "adv_estimator", {"normalize_rewards": False}, "adv_estimator.normalize_rewards"),
        ("grpo", "adv_estimator", {"minus_baseline": False}, "adv_estimator.minus_baseline"),
        ("grpo", "adv_estimator", {"use_leave_one_out_baseline": True}, "use_leave_one_out_baseline"),
        ("grpo", "async_grpo", {"enabled": True, "max_trajectory_age_steps": 2}, "grpo.async_grpo.enabled"),
        ("grpo", "use_leave_one_out_baseline", True, "use_leave_one_out_baseline"),
        ("grpo", "token_bonus", 0.5, "grpo.token_bonus: got 0.5"),
        ("loss_fn", "use_kl_in_reward", True, "loss_fn.use_kl_in_reward"),
        ("loss_fn", "positive_example_nll_weight", 0.1, "loss_fn.positive_example_nll_weight"),
        ("loss_fn", "token_level_loss", False, "loss_fn.token_level_loss"),
    ],
)
def test_options_that_daro_does_not_go_with_are_refused(kind, section, option, value, named):
    adapter.check_options(config(kind), read_options(""))
    with pytest.raises(ConfigError, match=named):
        adapter.check_options(config(kind, **{section: {option: value}}), read_options(""))


@pytest.fixture
def nemo(monkeypatch):
    """The modules that the launcher wraps."""
    names = ["nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.grpo", "nemo_rl.algorithms.grpo_sync"]
    names += ["nemo_rl.algorithms.loss", "nemo_rl.algorithms.loss.loss_functions"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    grpo, sync = modules["nemo_rl.algorithms.grpo"], modules["nemo_rl.algorithms.grpo_sync"]
    modules["nemo_rl"].__version__ = "0.7.0"
    modules["nemo_rl.algorithms.loss.loss_functions"].ClippedPGLossFn = object
    grpo.trained = []
    grpo.setup = lambda master_config, tokenizer: "set up"
    grpo.grpo_train = lambda policy, loss_fn, checkpointer, master_config: grpo.trained.append((policy, loss_fn))
    grpo.async_grpo_train = sync.grpo_train_sync = lambda policy, master_config: "trained without DARO"
    grpo._create_advantage_estimator = None
    return grpo


class Nothing:
    cfg: dict = {}

    def get_latest_checkpoint_path(self):
        return None


@pytest.mark.parametrize("kind", ["mappings", "models"])
def test_the_launcher_wraps_the_trainer_of_each_version(nemo, kind):
    runpy.run_path(str(LAUNCHER))["with_daro"](nemo)
    assert nemo.setup(config(kind), None) == "set up"
    nemo.grpo_train(Nothing(), torch.nn.Module(), checkpointer=Nothing(), master_config=config(kind))
    ((policy, loss_fn),) = nemo.trained
    assert isinstance(policy, adapter.DaroPolicy) and isinstance(loss_fn, adapter.DaroLoss)
    assert isinstance(nemo._create_advantage_estimator(None), adapter.DaroAdvantages)


def test_trainers_without_daro_are_refused_before_and_after_the_set_up(nemo):
    runpy.run_path(str(LAUNCHER))["with_daro"](nemo)
    plane, late = (
        config("models", data_plane={"enabled": True}),
        config("mappings", grpo={"async_grpo": {"enabled": 1}}),
    )
    with pytest.raises(ConfigError, match=r"data_plane\.enabled"):
        nemo.setup(plane, None)
    with pytest.raises(ConfigError, match=r"data_plane\.enabled"):
        sys.modules["nemo_rl.algorithms.grpo_sync"].grpo_train_sync(Nothing(), plane)
    with pytest.raises(ConfigError, match=r"async_grpo\.enabled"):
        nemo.async_grpo_train(Nothing(), late)


# As examples/run_grpo.py and examples/run_grpo_single_controller.py import what they train by.
BY_GRPO_TRAIN = "from nemo_rl.algorithms.grpo import grpo_train\n"
BY_SINGLE_CONTROLLER = "from nemo_rl.algorithms.single_controller import SingleControllerActor\n"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (BY_SINGLE_CONTROLLER + "if __name__ == '__main__': SingleControllerActor()", "does not import grpo_train"),
        (BY_GRPO_TRAIN + "if __name__ == '__main__': print('nothing to do')", "without a call of grpo_train"),
    ],
)
def test_a_script_that_trains_without_daro_ends_with_an_error(nemo, tmp_path, monkeypatch, script, named):
    started = []
    controller = ModuleType("nemo_rl.algorithms.single_controller")
    controller.SingleControllerActor = lambda: started.append("NeMo-RL's own estimator")
    monkeypatch.setitem(sys.modules, controller.__name__, controller)
    sys.modules["nemo_rl.algorithms"].grpo = nemo
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(sys, "argv", [str(LAUNCHER), str(tmp_path / "script.py")])
    with pytest.raises(ConfigError, match=named):
        runpy.run_path(str(LAUNCHER), run_name="__main__")
    assert not started


@pytest.mark.parametrize(("of_config", "of_call"), [(8, None), (4, 8)])
def test_a_batch_of_several_optimizer_steps_is_refused(of_config, of_call):
    daro, loss = adapter.Daro(K, read_options("")), object.__new__(adapter.DaroLoss)
    data = {"token_mask": torch.ones(4, 3), "sample_mask": torch.ones(4)}
    with pytest.raises(ConfigError, match="train_global_batch_size: got 8"):
        daro.wrap(SimpleNamespace(cfg={"train_global_batch_size": of_config})).train(data, loss, gbs=of_call)
    for size, given in ((4, None), (8, 4)):
        with pytest.raises(AlgorithmError, match="pass rates"):
            daro.wrap(SimpleNamespace(cfg={"train_global_batch_size": size})).train(data, loss, gbs=given)


def test_what_nemo_rl_reads_of_its_own_loss_is_there_also_in_the_workers():
    loss = adapter.DaroLoss(SimpleNamespace(reference_policy_kl_penalty=0.5))
    for one in (loss, pickle.loads(pickle.dumps(loss))):
        assert one.reference_policy_kl_penalty == 0.5


class ClippedLoss:
    """The token mean of NeMo-RL's ClippedPGLossFn (`masked_mean(..., global_normalization_factor=global_valid_toks)`),
    with a KL term that does not depend on advantages."""

    def __call__(self, logprobs, data, valid_seqs, valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        own = (-data["advantages"][:, 1:] * logprobs * mask).sum() / valid_toks
        return own + 0.125, {"probs_ratio": 1.0, "seqs": float(valid_seqs)}


class Trained:
    """NeMo-RL's policy: micro-batches of two samples, whose metrics are lists."""

    def __init__(self, grad_norm=1.0):
        self.cfg, self.calls, self.grad_norm = {"train_global_batch_size": 8}, [], grad_norm

    def train(self, data, loss_fn, **options):
        self.calls.append(options)
        if options.get("eval_mode"):
            return {"evaluated": True}
        found, self.losses = {}, []
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        for i in range(0, 8, 2):
            rows = {name: column[i : i + 2] for name, column in data.items()}
            loss, metrics = loss_fn(data["logprobs"][i : i + 2], rows, torch.tensor(8.0), tokens)
            self.losses.append(float(loss))
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)
        norm = {} if self.grad_norm is None else {"grad_norm": torch.tensor([self.grad_norm])}
        return {"all_mb_metrics": found, **norm}

    def save_checkpoint(self, weights_path, *arguments, **options):
        self.calls.append((weights_path, arguments, options))


REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])


def scored(daro, rewards=REWARDS):
    prompts = torch.tensor([[1, 2]] * K + [[3, 4]] * K)
    mask = torch.ones(8, 4)
    return adapter.DaroAdvantages(daro).compute_advantage(prompts, rewards, mask, repeated_batch=None)


def batch_of(advantages):
    generator = torch.Generator().manual_seed(0)
    token_mask = torch.ones(8, 4)
    token_mask[1, 2:] = 0
    sample_mask = torch.tensor([1.0] * 7 + [0.0])
    logprobs = -torch.rand(8, 3, generator=generator, dtype=torch.float64)
    return {"token_mask": token_mask, "sample_mask": sample_mask, "advantages": advantages, "logprobs": logprobs}


def test_advantages_are_those_of_groups_and_the_bins_are_noted():
    daro = adapter.Daro(K, read_options(""))
    advantages = scored(daro)
    root3 = 3**0.5
    wanted = [root3, *[-1 / root3] * 3, 1, 1, -1, -1]
    assert advantages.shape == (8, 4) and advantages[:, 3].tolist() == pytest.approx(wanted, rel=1e-5)
    assert advantages.dtype == torch.float32 and daro.bins_B.tolist() == [1] * 4 + [2] * 4
    with pytest.raises(AlgorithmError, match="correct_above"):
        scored(daro, REWARDS * 0.5)


def test_a_step_has_the_weighted_loss_and_its_metrics_and_teaches_the_weights():
    daro, policy = adapter.Daro(K, read_options("daro.learning_rate=0.1")), Trained()
    wrapped, data = daro.wrap(policy), batch_of(scored(daro))
    lengths = [3, 1, 3, 3, 3, 3, 3, 0]
    tokens = [sum(lengths[:4]), sum(lengths[4:])]
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    own = (-data["advantages"][:, 1:].double() * data["logprobs"] * mask).sum(1)
    sums = [float(own[:4].sum()), float(own[4:].sum())]
    for _ in range(2):
        before = daro.step.algorithm.weights.tolist()
        scored(daro)
        result = wrapped.train(dict(data), adapter.DaroLoss(ClippedLoss()), gbs=None, timer=None)
        found = result["all_mb_metrics"]
        wanted = sum(before[k + 1] * sums[k] / tokens[k] for k in range(2))
        assert sum(policy.losses) == pytest.approx(wanted + 4 * 0.125)
        assert found["loss/policy"] == [pytest.approx(wanted)] and found["probs_ratio"] == [1.0] * 4
        assert [found[f"difficulty/tokens/{k}"] for k in range(5)] == [[0.0], [10.0], [9.0], [0.0], [0.0]]
        assert [found[f"difficulty/loss/{k + 1}"][0] for k in range(2)] == pytest.approx(
            [sums[k] / tokens[k] for k in range(2)]
        )
        assert found["difficulty/skipped"] == [0.0] and not any(name.startswith("daro/") for name in found)
        assert daro.step.algorithm.weights.tolist() != before and daro.bins_B is None
    assert policy.calls == [{"gbs": None, "timer": None}] * 2


@pytest.mark.parametrize(("norm", "skipped"), [(float("inf"), 1.0), (float("nan"), 1.0), (None, 0.0), (2.0, 0.0)])
def test_weights_move_only_where_the_norm_of_the_gradient_is_finite(norm, skipped):
    daro = adapter.Daro(K, read_options(""))
    wrapped = daro.wrap(Trained(norm))
    result = wrapped.train(batch_of(scored(daro)), adapter.DaroLoss(ClippedLoss()), gbs=8)
    assert result["all_mb_metrics"]["difficulty/skipped"] == [skipped]
    assert (daro.step.algorithm.weights.tolist() == [1.0] * 5) == bool(skipped)


def test_evaluation_is_the_policys_own_and_so_is_all_else():
    daro, policy = adapter.Daro(K, read_options("")), Trained()
    wrapped = daro.wrap(policy)
    assert wrapped.train({}, None, eval_mode=True, gbs=3, timer=1) == {"evaluated": True}
    assert policy.calls == [{"eval_mode": True, "gbs": 3, "timer": 1}] and wrapped.cfg is policy.cfg


def test_the_state_lies_above_the_weights_and_is_taken_over(tmp_path):
    daro, policy = adapter.Daro(K, read_options("")), Trained()
    daro.wrap(policy).train(batch_of(scored(daro)), adapter.DaroLoss(ClippedLoss()))
    weights = tmp_path / "step_1" / "policy" / "weights"
    daro.wrap(policy).save_checkpoint(str(weights), "optimizer", tokenizer=None)
    assert policy.calls[-1] == (str(weights), ("optimizer",), {"tokenizer": None})
    other = adapter.Daro(K, read_options(""))
    other.resume(None)
    assert other.step.steps == 0
    other.resume(tmp_path / "step_1")
    assert other.step.state_dict() == daro.step.state_dict() and other.step.steps == 1
    with pytest.raises(CheckpointError, match="start_fresh"):
        other.resume(tmp_path)
    adapter.Daro(K, read_options("start_fresh=true")).resume(str(tmp_path))


def test_what_the_loss_does_not_get_or_cannot_do_is_refused():
    with pytest.raises(AlgorithmError, match="daro_bin, daro_coefficient"):
        adapter.DaroLoss(ClippedLoss())(torch.zeros(1, 2), {}, torch.ones(()), torch.ones(()))
    sequences = SimpleNamespace(loss_type=SimpleNamespace(value="sequence_level"))
    with pytest.raises(ConfigError, match=r"loss_fn\.token_level_loss"):
        adapter.DaroLoss(sequences)
    adapter.DaroLoss(SimpleNamespace(loss_type=SimpleNamespace(value="token_level")))
    with pytest.raises(ConfigError, match="magnitude: got 'token'"):
        adapter.Daro(K, read_options("daro.magnitude=token"))
    daro = adapter.Daro(K, read_options(""))
    with pytest.raises(ConfigError, match="ClippedLoss"):
        daro.wrap(Trained()).train(batch_of(scored(daro)), ClippedLoss())


def test_install_reads_k_and_the_version(nemo):
    with pytest.raises(ConfigError, match=r"NeMo-RL 0\.7\.0.*_create_advantage_estimator"):
        del nemo._create_advantage_estimator
        adapter.install(config("models"))
    nemo._create_advantage_estimator = None
    with pytest.raises(ConfigError, match="token_level_loss"):
        adapter.install(config("models", loss_fn={"token_level_loss": False}))
    assert nemo._create_advantage_estimator is None
    assert adapter.install(config("mappings")).step.rollouts_per_prompt == K
