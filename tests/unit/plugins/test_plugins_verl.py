"""The adapter of verl with stand-ins for verl's modules: its estimator, loss, probe, worker, and what it refuses.

The real ones run in tests/plugins/test_verl_host.py, where verl is installed.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError
from megatron_daro.plugins.options import VARIABLE

K, NAME = 4, "megatron_daro.plugins.verl"


@dataclass
class AlgoConfig:
    adv_estimator: str = "gae"
    norm_adv_by_std_in_grpo: bool = True
    use_pf_ppo: bool = False
    later_option: float = 0.5


@dataclass
class Actor:
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.5
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.25
    kl_loss_type: str = "k1"
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    use_prefix_grouper: bool = False
    rollout_n: int = K
    policy_loss: dict = field(default_factory=dict)
    global_batch_info: dict = field(default_factory=dict)
    later_option: float = 0.5

    def get(self, name, default=None):
        return getattr(self, name, default)


def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, **others):
    """verl/trainer/ppo/core_algos.py: `loss = masked_sum(loss_mat, loss_mask) / batch_num_tokens * dp_size`."""
    assert loss_agg_mode == "token-mean"
    return torch.where(loss_mask.bool(), loss_mat, 0.0).sum() / batch_num_tokens * dp_size


def vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
    """As compute_policy_loss_vanilla: clipped, and clipped again where advantages are negative."""
    ratio = torch.exp(log_prob - old_log_prob)
    low, high = (config.clip_ratio if c is None else c for c in (config.clip_ratio_low, config.clip_ratio_high))
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses)
    losses = losses if rollout_is_weights is None else losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


class TrainingWorker:
    def __init__(self, strategy="fsdp", norm=1.0, **engine):
        self.calls, self.engine_config = [], SimpleNamespace(strategy=strategy, **engine)
        self.engine = SimpleNamespace(optimizer_step=lambda: norm, get_data_parallel_group=lambda: None)

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def train_batch(self, data):
        found = self.loss_fn(model_output={"log_probs": data["now"]}, data=data, dp_group=None)
        found[0].backward()
        self.engine.optimizer_step()
        return None if data.get("quiet") else {"metrics": dict(found[1])}

    def save_checkpoint(self, local_path, *arguments, **options):
        self.calls.append(("save", local_path, arguments, options))
        return "saved"

    def load_checkpoint(self, local_path, *arguments, **options):
        self.calls.append(("load", local_path, arguments, options))
        return "loaded"


def ppo_loss(config, model_output, data, dp_group=None):
    return model_output["log_probs"].sum() * 7, {"actor/ppo_kl": 0.125, "actor/pg_loss": "verl's"}


class RayWorkerGroup:
    """verl/single_controller/ray/base.py: `func_generator` ends in execute_all, which is execute_all_async; `workers`
    are Ray's handles. Colocated workers are in the process's `worker_dict`."""

    def __init__(self, *processes):
        self.workers = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=partial(call, p))) for p in processes]

    def execute_all_async(self, method_name, *arguments):
        return f"{method_name} by verl"


def call(process, function):
    """Ray's `__ray_call__`: `return fn(self, *args)`; its result is an object for `ray.get`."""
    if isinstance(process, Exception):
        return process
    return function(SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(actor=process)}))


ESTIMATORS = {}


def compute_advantage(data, adv_estimator="daro", num_repeat=None):
    """As verl's: `num_repeat` is not handed to estimators."""
    return ESTIMATORS[adv_estimator](**data)


@pytest.fixture(scope="module")
def adapter():
    """The adapter, imported over the stand-ins."""
    core = {"agg_loss": agg_loss, "get_policy_loss_fn": {"vanilla": vanilla}.__getitem__}
    core["kl_penalty"] = lambda logprob, ref_logprob, kl_penalty: (logprob - ref_logprob) * (kl_penalty == "k1")
    core["register_adv_est"] = lambda name: lambda function: ESTIMATORS.setdefault(name, function)
    contents = {
        "verl.trainer.ppo.core_algos": core,
        "verl.trainer.config": {"AlgoConfig": AlgoConfig},
        "verl.utils.tensordict_utils": {"get": lambda tree, name: tree[name]},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "verl.utils.metric": {"AggregationType": SimpleNamespace(SUM="sum"), "Metric": SimpleNamespace},
        "verl.workers.engine_workers": {
            "TrainingWorker": TrainingWorker,
            "ActorRolloutRefWorker": type(
                "ActorRolloutRefWorker", (), {"actor_worker_cls": TrainingWorker, "update_actor": None}
            ),
        },
        "verl.workers.utils.losses": {"ppo_loss": ppo_loss},
        "verl.workers.utils.padding": {"no_padding_2_padding": lambda values, data: values},
        "verl.trainer.ppo.ray_trainer": {"compute_advantage": compute_advantage},
        "verl.single_controller.ray": {"RayWorkerGroup": type("RayWorkerGroup", (RayWorkerGroup,), {})},
    }
    names = {name.rsplit(".", depth)[0] for name in contents for depth in range(name.count(".") + 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, NAME, raising=False)
        for name in names:
            module = ModuleType(name)
            vars(module).update(contents.get(name, {}), __path__=[])
            patch.setitem(sys.modules, name, module)
        sys.modules["verl"].__version__ = "0.9.1"
        imported = importlib.import_module(NAME)
        yield imported
        sys.modules.pop(NAME)
        ESTIMATORS.clear()


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)


class Batch(dict):
    """What is used of tensordict's TensorDict."""

    def select(self, *names):
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self):
        return Batch({name: torch.nested.to_padded_tensor(v, 0.0) if v.is_nested else v for name, v in self.items()})


def test_the_import_puts_the_worker_and_the_estimator_in_place(adapter):
    assert adapter.ActorRolloutRefWorker.actor_worker_cls is adapter.DaroTrainingWorker
    assert {"daro": adapter.daro_advantage} == ESTIMATORS


def estimate(adapter, rewards, uids, mask=None, config=None, repeat=None):
    rewards_BR = torch.zeros(len(rewards), 3)
    rewards_BR[:, 1] = torch.tensor(rewards)
    mask_BR = torch.ones(len(rewards), 3, dtype=torch.int64) if mask is None else torch.tensor(mask)
    data = {"token_level_rewards": rewards_BR, "response_mask": mask_BR, "index": uids, "config": config}
    return adapter.ray_trainer.compute_advantage(data, num_repeat=repeat)


RIGHT, UIDS = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0], list("abababab")


def test_advantages_are_of_whole_groups_and_pass_rates_travel_as_returns(adapter):
    mask = [[1, 1, 0]] * 8
    advantages, returns = estimate(adapter, RIGHT, UIDS, mask)
    root3 = 3**0.5  # a: 1, 1, 0, 0 right; b: 0, 0, 1, 1
    assert advantages[:, 0].tolist() == pytest.approx([1, -1, 1, -1, -1, 1, -1, 1], abs=1e-5)
    assert advantages[:, 1].tolist() == advantages[:, 0].tolist() and not advantages[:, 2].any()
    assert returns.shape == (8, 3) and set(returns.flatten().tolist()) == {1024.5}
    quarter = estimate(adapter, [1.0, 0.0, 0.0, 0.0], "aaaa")
    assert set(quarter[1].flatten().tolist()) == {1024.25} and quarter[0][0, 0] == pytest.approx(root3, rel=1e-5)


def test_a_short_group_and_one_without_a_trained_token_carry_no_signal(adapter, caplog):
    uids = ["short", "short", *"aaaa", *"bbbb", *["filler"] * 6]
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, *[1.0] * 4, *[0.0] * 6]
    mask = [[1, 1, 1]] * 10 + [[0, 0, 0]] * 6
    with caplog.at_level(logging.WARNING):
        advantages, returns = estimate(adapter, rewards, uids, mask)
    assert "1 of 3 groups" in caplog.text
    assert (
        not advantages[:2].any()
        and returns[:, 0].tolist() == [1024.0] * 2 + [1024.25] * 4 + [1025.0] * 4 + [1024.0] * 6
    )


@pytest.mark.parametrize(
    ("sizes", "repeat", "match"),
    [
        ((4, 2, 2), None, "got 2 of 3 "),
        ((4, 8), 4, "largest with 8"),
        ((4, 4), 8, "got 2 of 2 "),
    ],
)
def test_groups_of_other_sizes_than_rollout_n_are_refused(adapter, sizes, repeat, match):
    uids = [number for number, size in enumerate(sizes) for _ in range(size)]
    with pytest.raises(AlgorithmError, match=match):
        estimate(adapter, [0.0] * len(uids), uids, repeat=repeat)


def test_half_of_the_groups_may_be_short(adapter, caplog):
    estimate(adapter, [0.0] * 6, list("aaaabb"))
    assert "1 of 2 groups" in caplog.text


@pytest.mark.parametrize("kind", [dict, lambda values: AlgoConfig(**values)])
def test_options_of_the_algorithm_that_change_the_advantages_are_refused(adapter, monkeypatch, kind):
    def check(**values):
        estimate(adapter, RIGHT, UIDS, config=kind({"adv_estimator": "daro", **values}))

    check(norm_adv_by_std_in_grpo=True, use_pf_ppo=False, later_option=0.5)
    for name, value in (("norm_adv_by_std_in_grpo", False), ("use_pf_ppo", True), ("later_option", 0.6)):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name}: got"):
            check(**{name: value})
    monkeypatch.setenv(VARIABLE, "std=none")
    check(norm_adv_by_std_in_grpo=False)


def micro_batch(**changed):
    """Two samples of bins 1 and 2 and one of bin 0, four tokens each, one of the second's not trained."""
    now = torch.tensor([[-1.0, -1.2, -0.9, -1.0], [-1.0, -2.5, -1.0, -0.2], [-1.0] * 4], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]])
    return Batch(
        {
            "now": now,
            "old_log_probs": torch.full((3, 4), -1.0),
            "advantages": torch.tensor([1.5, -0.5, 0.0])[:, None] * mask,
            "returns": torch.tensor([0.25, 0.5, 0.0])[:, None].expand(3, 4) + 1024.0,
            "response_mask": mask,
            "dp_size": 2,
            "batch_num_tokens": 11,
            "global_batch_size": 3,
            **changed,
        }
    )


def expected(batch, weights, low=0.2, high=0.2, dual=3.0, importance=1.0):
    """dp_size * the sum over the bins of w_k / N_k * token losses."""
    ratio = torch.exp(batch["now"].detach() - batch["old_log_probs"]).double()
    advantages = batch["advantages"].double()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual), losses) * importance
    sums = (losses * batch["response_mask"]).sum(1)
    return 2 * float(weights[1] / 4 * sums[0] + weights[2] / 3 * sums[1])


def opened(adapter, words="", steps=1, bins=(1, 2, 0)):
    step = adapter.DifficultyStep(adapter.read_options(words).algorithm(K))
    step.first_here = steps == 0
    step.begin(torch.tensor(bins), torch.tensor([4, 3, 4]), lambda vector: vector)
    return step


def loss_of(adapter, batch, config=None, step=None, **output):
    step = opened(adapter) if step is None else step
    return adapter.daro_loss(config or Actor(), {"log_probs": batch["now"], **output}, batch, step=step)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_loss_is_the_weighted_sum_at_verls_scale(adapter, steps):
    batch, config = (
        micro_batch(),
        Actor(clip_ratio_high=0.4, clip_ratio_low=0.1, clip_ratio_c=5.0, loss_scale_factor=3.0),
    )
    loss, metrics = loss_of(adapter, batch, config, opened(adapter, steps=steps))
    assert float(loss.detach()) == pytest.approx(expected(batch, [1.0] * 5, 0.1, 0.4, 5.0), rel=1e-5)
    assert loss.requires_grad and metrics["actor/ppo_kl"] == 0.125
    assert (
        float(metrics["actor/pg_loss"].value) == float(loss.detach()) and metrics["actor/pg_loss"].aggregation == "sum"
    )
    assert not metrics["actor/pg_loss"].value.requires_grad
    assert config.global_batch_info == {
        "dp_size": 2,
        "batch_num_tokens": 11,
        "global_batch_size": 3,
        "loss_scale_factor": 3.0,
    }


def test_importance_weights_entropy_and_kl_are_those_of_verl(adapter):
    weights = torch.tensor([[0.5], [2.0], [1.0]]).expand(3, 4)
    batch = micro_batch(rollout_is_weights=weights, ref_log_prob=torch.full((3, 4), -1.5))
    plain = expected(batch, [1.0] * 5, importance=weights.double())
    assert float(loss_of(adapter, batch, step=opened(adapter, steps=0))[0]) == pytest.approx(plain, rel=1e-5)
    entropy = torch.full((3, 4), 2.0)
    with_entropy = loss_of(adapter, batch, entropy=entropy)[0]
    assert float(with_entropy) == pytest.approx(plain - 0.5 * 2.0 * 11 / 11 * 2, rel=1e-5)
    kl = ((batch["now"].detach() + 1.5) * batch["response_mask"]).sum() / 11 * 2
    assert float(loss_of(adapter, batch, Actor(use_kl_loss=True))[0]) == pytest.approx(
        plain + 0.25 * float(kl), rel=1e-5
    )


def test_without_gradients_the_loss_is_verls_own(adapter):
    with torch.no_grad():
        loss, metrics = loss_of(adapter, micro_batch())
    assert float(loss) == pytest.approx(7 * float(micro_batch()["now"].sum())) and metrics["actor/pg_loss"] == "verl's"


def test_the_first_step_is_compared_with_verls_own_loss(adapter, monkeypatch):
    halved = lambda name: lambda **given: (0.5 * vanilla(**given)[0], {})
    monkeypatch.setattr(adapter, "get_policy_loss_fn", halved)
    loss_of(adapter, micro_batch())
    with pytest.raises(AlgorithmError, match="loss of the first step"):
        loss_of(adapter, micro_batch(), step=opened(adapter, steps=0))


def worker(adapter, monkeypatch, words="daro.learning_rate=0.1", **made):
    monkeypatch.setenv(VARIABLE, words)
    made = adapter.DaroTrainingWorker(**made)
    made.set_loss_fn(partial(ppo_loss, config=Actor()))
    return made


def test_a_step_of_the_worker_counts_trains_and_learns(adapter, monkeypatch, caplog):
    one = worker(adapter, monkeypatch)
    assert "DARO is on: verl 0.9.1," in caplog.text and one.daro.rollouts_per_prompt == K
    batch = micro_batch()
    metrics = one.train_batch(batch)["metrics"]
    assert (
        metrics["difficulty/tokens/1"] == 4
        and metrics["difficulty/tokens/2"] == 3
        and metrics["difficulty/skipped"] == 0
    )
    assert metrics["loss/policy"] == pytest.approx(expected(batch, [1.0] * 5) / 2, rel=1e-5)
    assert one.daro.algorithm.weights[1] != 1 and one.daro.steps == 1
    assert one.train_batch(micro_batch(quiet=True)) is None and one.daro.steps == 2


@pytest.mark.parametrize(("norm", "skipped"), [(float("nan"), 1), (torch.tensor(float("inf")), 1), (None, 0), (2.0, 0)])
def test_weights_move_only_where_the_optimizer_took_the_step(adapter, monkeypatch, norm, skipped):
    one = worker(adapter, monkeypatch, norm=norm)
    assert one.train_batch(micro_batch())["metrics"]["difficulty/skipped"] == skipped
    assert (one.daro.algorithm.weights.tolist() == [1.0] * 5) == bool(skipped)


def test_where_nobody_asked_for_it_a_marked_batch_switches_it_on(adapter):
    one = adapter.DaroTrainingWorker()
    one.set_loss_fn(partial(ppo_loss, config=Actor()))
    plain = Batch({name: value for name, value in micro_batch().items() if name != "returns"})
    assert one.train_batch(plain)["metrics"]["actor/pg_loss"] == "verl's" and one.daro is None
    assert "loss/policy" in one.train_batch(micro_batch())["metrics"] and one.daro is not None


def test_a_checkpoint_has_the_state_beside_verls_own(adapter, monkeypatch, tmp_path):
    barriers = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append(1))
    one = worker(adapter, monkeypatch)
    one.train_batch(micro_batch())
    assert one.save_checkpoint(str(tmp_path), 7, keep=2) == "saved" and len(barriers) == 1
    assert one.calls == [("save", str(tmp_path), (7,), {"keep": 2})]
    other = worker(adapter, monkeypatch)
    assert other.load_checkpoint(str(tmp_path), 1, strict=True) == "loaded"
    assert other.daro.state_dict() == one.daro.state_dict()
    assert other.calls == [("load", str(tmp_path), (1,), {"strict": True})]
    assert other.load_checkpoint(None) == "loaded" and other.daro.steps == 1
    late = adapter.DaroTrainingWorker()
    late.load_checkpoint(str(tmp_path))
    late.set_loss_fn(partial(ppo_loss, config=Actor()))
    assert late.daro.state_dict() == one.daro.state_dict(), "what was loaded before is taken over at the start"
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    one.save_checkpoint(str(tmp_path / "second"))
    assert not (tmp_path / "second").exists() and len(barriers) == 2
    with pytest.raises(CheckpointError, match="start_fresh"):
        other.load_checkpoint(str(tmp_path / "second"))
    fresh = worker(adapter, monkeypatch, "start_fresh=true")
    assert fresh.load_checkpoint(str(tmp_path / "second")) == "loaded" and fresh.daro.steps == 0
    monkeypatch.delenv(VARIABLE)
    off = adapter.DaroTrainingWorker()
    assert off.save_checkpoint(str(tmp_path / "third")) == "saved" and not (tmp_path / "third").exists()


def test_a_batch_without_pass_rates_or_with_some_is_refused(adapter, monkeypatch):
    one, returns = worker(adapter, monkeypatch), micro_batch()["returns"]
    for batch in (
        Batch({n: v for n, v in micro_batch().items() if n != "returns"}),
        micro_batch(returns=returns - 1024),
    ):
        with pytest.raises(AlgorithmError, match="adv_estimator=daro"):
            one.train_batch(batch)
    with pytest.raises(AlgorithmError, match="1 of 3 samples"):
        one.train_batch(micro_batch(returns=torch.cat([returns[:1], returns[1:2] - 1024, returns[2:]])))


def test_rows_may_be_jagged(adapter, monkeypatch):
    whole, one = micro_batch(), worker(adapter, monkeypatch)
    lengths = (4, 2, 0)
    rows = {
        name: torch.nested.as_nested_tensor(
            [v[:n] for v, n in zip(whole[name], lengths, strict=True)], layout=torch.jagged
        )
        for name in ("returns", "response_mask")
    }
    metrics = one.train_batch(micro_batch(**rows, batch_num_tokens=6))["metrics"]
    assert [metrics[f"difficulty/tokens/{k}"] for k in range(3)] == [0, 4, 2]


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        (VARIABLE, "", True),
        ("VERL_USE_EXTERNAL_MODULES", f"mine,{NAME}", True),
        ("VERL_USE_EXTERNAL_MODULES", f"mine,{NAME}x", False),
    ],
)
def test_the_variable_or_the_name_of_the_module_asks_for_it(adapter, monkeypatch, variable, value, wanted):
    monkeypatch.setenv(variable, value)
    one = adapter.DaroTrainingWorker()
    one.set_loss_fn(partial(ppo_loss, config=Actor()))
    assert (one.daro is not None) is wanted


def start(adapter, monkeypatch, loss_fn, **engine):
    monkeypatch.setenv(VARIABLE, "")
    adapter.DaroTrainingWorker(**engine).set_loss_fn(loss_fn)


class RayError(Exception):
    """What ray.get raises where the worker could not run the function."""


def got(answer):
    if isinstance(answer, RayError):
        raise answer
    return answer


def test_the_driver_lets_no_worker_without_daro_train_its_batch(adapter, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=got, exceptions=SimpleNamespace(RayError=RayError)))
    ours, plain = object.__new__(adapter.DaroTrainingWorker), TrainingWorker()
    gone = RayError("ray::WorkerDict\nModuleNotFoundError: No module named 'megatron_daro'")

    def update(*processes):
        return adapter.RayWorkerGroup(*processes).execute_all_async("actor_rollout_update_actor", "batch")

    estimate(adapter, RIGHT, UIDS)
    assert "by verl" in adapter.RayWorkerGroup(plain).execute_all_async("critic_update_critic", "batch")
    assert "by verl" in update(ours, ours) and "on all 2 workers" in caplog.text
    for processes, named in (((ours, plain), "worker 1 of .* has verl's own loss"), ((gone,), "No module named")):
        with pytest.raises(ConfigError, match=named):
            update(*processes)
    group = adapter.RayWorkerGroup(ours)

    def elsewhere(function):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, "daro.learning_rate=0.5")
            return call(ours, function)

    group.workers[0].__ray_call__.remote = elsewhere
    with pytest.raises(ConfigError, match=r"learning_rate.*the driver"):
        group.execute_all_async("update_actor", "batch")


def test_options_of_the_actor_that_daro_does_not_go_with_are_refused_together(adapter, monkeypatch):
    config = Actor(
        policy_loss={"loss_mode": "gspo"},
        loss_agg_mode="seq-mean-token-mean",
        use_prefix_grouper=True,
        later_option=0.75,
    )
    with pytest.raises(ConfigError) as raised:
        start(adapter, monkeypatch, partial(ppo_loss, config=config), dynamic_context_parallel=True)
    for option in ("policy_loss.loss_mode", "loss_agg_mode", "use_prefix_grouper", "later_option"):
        assert f"actor.{option}: got" in str(raised.value)
    assert "dynamic_context_parallel" in str(raised.value)
    good = Actor(policy_loss={"loss_mode": "vanilla"}, clip_ratio_c=9.0)
    start(adapter, monkeypatch, partial(ppo_loss, config=good), dynamic_context_parallel=False)


@pytest.mark.parametrize("loss_fn", [partial(vanilla, config=Actor()), partial(ppo_loss), ppo_loss])
def test_another_loss_than_ppo_loss_is_refused(adapter, monkeypatch, loss_fn):
    with pytest.raises(ConfigError, match="loss function: got"):
        start(adapter, monkeypatch, loss_fn)


@pytest.mark.parametrize(
    ("strategy", "stages", "summed"), [("fsdp", 2, False), ("megatron", 1, False), ("megatron", 2, True)]
)
def test_only_megatrons_pipeline_stages_are_summed_over(adapter, monkeypatch, strategy, stages, summed):
    state = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: stages, get_pipeline_model_parallel_group=lambda: "stages"
    )
    groups = []
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    monkeypatch.setattr(adapter, "over_group", lambda group, device: lambda v: groups.append(group) or v)
    worker(adapter, monkeypatch, strategy=strategy).train_batch(micro_batch())
    assert ("stages" in groups) is summed and None in groups, "data-parallel ranks, then stages"


def test_what_verls_loader_of_plugins_keeps_to_itself_is_logged(adapter, monkeypatch, caplog):
    """verl/__init__.py: `except Exception as _e: logging.getLogger(__name__).debug("Failed to load plugin ...")`."""
    (value,) = set(re.findall(r'"megatron_daro=([\w.]+)"', (Path(__file__).parents[3] / "setup.py").read_text()))
    monkeypatch.setitem(sys.modules, NAME, adapter)
    monkeypatch.delitem(sys.modules, value, raising=False)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.delattr(sys.modules["verl.trainer.ppo.ray_trainer"], "compute_advantage")
    with pytest.raises(ConfigError), caplog.at_level(logging.WARNING):
        EntryPoint("megatron_daro", value, "verl.plugins").load()
    assert "DARO is off" in caplog.text and "compute_advantage" in caplog.text
