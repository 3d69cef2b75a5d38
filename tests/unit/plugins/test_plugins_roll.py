"""ROLL's worker and driver with stand-ins for ROLL that keep tests/contract/hosts/roll.toml."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError
from megatron_daro.plugins import roll_driver

K, ROWS, POSITIONS = 4, 12, 7
SCORES = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


class Data:
    """DataProto: tensors and meta_info."""

    def __init__(self, batch, meta_info=None):
        self.batch, self.meta_info = batch, meta_info or {}


class ActorWorker:
    """ROLL's actor: its loss is a token mean over the whole step; `slope` breaks its homogeneity."""

    slope, divides_by = 0.0, 1.0

    def initialize(self, pipeline_config):
        self.pipeline_config, self.worker_name = pipeline_config, "actor_train-0"
        self.strategy = Strategy(self)

    def loss_func(self, data, output_tensor):
        logprobs = self.strategy.op_compute_log_probs(logits=output_tensor)
        ratio, advantages = (logprobs - data.batch["old_log_probs"]).exp(), data.batch["advantages"]
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss + self.slope * ratio * advantages.square()
        module = sys.modules["roll.pipeline.rlvr.actor_worker"]
        tokens, mask = data.meta_info["batch_num_tokens"] * self.divides_by, data.batch["final_response_mask"]
        options = {"loss_mask": mask, "loss_agg_mode": "token-mean", "batch_num_tokens": tokens}
        weighted = module.agg_loss(loss_mat=loss, weights=torch.ones(len(mask)), **options)
        module.agg_loss(loss_mat=loss, **options)
        return weighted, {"actor/weighted_pg_loss@sum": weighted.item()}

    def do_checkpoint(self, global_step, is_last_step=None):
        return "saved"


class Strategy:
    """Counts tokens and runs the loss of micro-batches of three rows; log-probs overwrite what they are made of."""

    def __init__(self, worker):
        self.drop = None

    def op_compute_log_probs(self, logits):
        found = logits * 1.0
        logits.data.fill_(float("nan"))
        return found

    op_compute_entropy = op_compute_log_probs

    def train_step(self, batch, loss_func):
        tokens = batch.batch["final_response_mask"].sum()
        self.logprobs = (-2 + torch.rand(ROWS, POSITIONS, generator=torch.Generator().manual_seed(1))).requires_grad_()
        for start in range(0, ROWS, 3):
            part = {name: column[start : start + 3] for name, column in batch.batch.items()}
            if self.drop == start:
                part["final_response_mask"] = torch.zeros_like(part["final_response_mask"])
            loss, _ = loss_func(Data(part, {"batch_num_tokens": tokens}), self.logprobs[start : start + 3] * 1.0)
            loss.backward()
        return {"actor_train/grad_norm": 1.0}


@pytest.fixture
def roll(monkeypatch):
    """The adapter, imported over stand-ins."""
    names = [
        "roll",
        "roll.distributed",
        "roll.distributed.scheduler",
        "roll.pipeline",
        "roll.pipeline.rlvr",
        "roll.utils",
    ]
    parts = ["scheduler.decorator", "scheduler.protocol"]
    names += [f"roll.distributed.{part}" for part in parts]
    names += ["roll.pipeline.rlvr.actor_worker", "roll.utils.checkpoint_manager"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    modules["roll.pipeline.rlvr"].actor_worker = worker = modules["roll.pipeline.rlvr.actor_worker"]
    worker.ActorWorker = type("ActorWorker", (ActorWorker,), {})
    worker.agg_loss = lambda loss_mat, loss_mask, loss_agg_mode, batch_num_tokens, weights=None: (
        (loss_mat * (1 if weights is None else weights[:, None])).sum() / batch_num_tokens
    )
    modules["roll.distributed.scheduler.decorator"].register = lambda dispatch_mode: lambda function: function
    modules["roll.distributed.scheduler.decorator"].Dispatch = SimpleNamespace(ONE_TO_ALL=0)
    modules["roll.distributed.scheduler.protocol"].DataProto = Data
    modules["roll.utils.checkpoint_manager"].download_model = lambda path: path
    modules["roll.utils.checkpoint_manager"].get_latest_ckpt = lambda config: config["latest"]
    monkeypatch.delitem(sys.modules, "megatron_daro.plugins.roll", raising=False)
    adapter = importlib.import_module("megatron_daro.plugins.roll")
    alone = lambda **named: lambda vector: vector
    monkeypatch.setattr(adapter, "over_data", alone)
    monkeypatch.setattr(adapter, "over_data_and_stages", alone)
    monkeypatch.setattr(adapter.dist, "get_rank", lambda: 0)
    yield adapter
    sys.modules.pop("megatron_daro.plugins.roll", None)


def options(tmp_path, **changes):
    actor = SimpleNamespace(
        worker_cls=roll_driver.WORKER, strategy_args=SimpleNamespace(strategy_name="megatron_train")
    )
    sizes = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=K))
    base = {**roll_driver.FIXED, "actor_train": actor, "actor_infer": sizes, "output_dir": str(tmp_path)}
    return SimpleNamespace(**{**base, "resume_from_checkpoint": False, "checkpoint_config": None, **changes})


def answers(mask, **changes):
    """What ROLL's pipeline hands to compute_advantage: groups of K rows, numbered by row (rlvr_pipeline.py, `run`)."""
    scores = torch.tensor(SCORES[: len(mask)])
    groups = scores.view(-1, K)
    normalised = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)  # ROLL's reward_norm
    columns = {
        "scores": scores,
        "response_level_rewards": normalised.flatten(),
        "prompt_id": torch.arange(len(mask)),
        "prompts": (torch.arange(len(mask)) // K * 10)[:, None].expand(-1, 3),
        "final_response_mask": mask,
    }
    return Data({**columns, **changes})


def batch(config):
    """One batch after the driver's advantages, shuffled then as ROLL's batch_balance does; masks with holes."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(ROWS, POSITIONS, generator=generator) > 0.3).long()
    old = -2 + 0.5 * torch.rand(ROWS, POSITIONS, generator=generator)
    compute = roll_driver.with_daro(lambda data, **options: data)
    data = compute(data=answers(mask, old_log_probs=old), response_mask=mask, pipeline_config=config)
    order = torch.randperm(ROWS, generator=generator)
    return Data({name: column[order] for name, column in data.batch.items()})


def reference(data, logprobs, weights):
    """The gradient of docs/algorithms.md."""
    prompts = data.batch["prompts"][:, 0].tolist()
    bins = [sum(s for s, p in zip(data.batch["scores"], prompts, strict=True) if p == q) for q in prompts]
    bins, leaf = torch.tensor(bins).long(), logprobs.detach().double().requires_grad_()
    mu = bins / K
    advantages = (data.batch["scores"] - mu) / ((mu * (1 - mu)).sqrt() + 1e-6)
    ratio = (leaf - data.batch["old_log_probs"]).exp()
    terms = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    mask = data.batch["final_response_mask"]
    tokens = torch.bincount(bins, mask.sum(1).double(), minlength=K + 1)
    ((weights / tokens.clamp(min=1))[bins][:, None] * terms * mask).sum().backward()
    return leaf.grad


def test_gradients_are_the_reference_and_the_state_survives(roll, tmp_path):
    config = options(tmp_path)
    worker = roll.DaroActorWorker()
    worker.initialize(config)
    for _ in range(3):
        weights, data = worker.daro.algorithm.weights.clone(), batch(config)
        metrics = worker.strategy.train_step(batch=data, loss_func=worker.loss_func)
        wanted = reference(data, worker.strategy.logprobs, weights)
        got = worker.strategy.logprobs.grad.double()
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5
        assert metrics["difficulty/weight/2"] == weights[2]
    assert worker.daro.algorithm.weights[2] != 1
    assert worker.do_checkpoint(3) == "saved"
    saved = tmp_path / "actor_train-0" / "checkpoint-3"
    for wanted in (str(saved), True):
        again = roll.DaroActorWorker()
        again.initialize(options(tmp_path, resume_from_checkpoint=wanted, checkpoint_config={"latest": str(saved)}))
        assert again.daro.state_dict() == worker.daro.state_dict()
    with pytest.raises(CheckpointError, match="rollouts_per_prompt"):
        sizes = SimpleNamespace(generating_args=SimpleNamespace(num_return_sequences=8))
        again.initialize(options(tmp_path, resume_from_checkpoint=str(saved), actor_infer=sizes))


@pytest.mark.parametrize(
    "change", [{"slope": 0.5}, {"divides_by": 2.0}], ids=["not-homogeneous", "another-number-of-tokens"]
)
def test_a_loss_that_scales_otherwise_stops_the_first_step(roll, tmp_path, change):
    config = options(tmp_path)
    worker = roll.DaroActorWorker()
    worker.initialize(config)
    for name, value in change.items():
        setattr(worker, name, value)
    with pytest.raises(AlgorithmError, match="loss"):
        worker.strategy.train_step(batch=batch(config), loss_func=worker.loss_func)


def test_what_does_not_arrive_stops_the_run(roll, tmp_path):
    config = options(tmp_path)
    worker = roll.DaroActorWorker()
    worker.initialize(config)
    data = batch(config)
    del data.batch[roll_driver.BINS]
    with pytest.raises(AlgorithmError, match="daro_bins"):
        worker.strategy.train_step(batch=data, loss_func=worker.loss_func)
    worker = roll.DaroActorWorker()
    worker.initialize(config)
    worker.strategy.drop = 3
    with pytest.raises(AlgorithmError, match="tokens"):
        worker.strategy.train_step(batch=batch(config), loss_func=worker.loss_func)


def test_every_option_that_does_not_go_with_daro_is_named_at_once(tmp_path):
    wrong = options(tmp_path, adv_estimator="gae", loss_agg_mode="seq-mean-token-mean", advantage_clip=2.0)
    strategy = SimpleNamespace(strategy_name="fsdp2_train")
    wrong.actor_train = SimpleNamespace(worker_cls=None, strategy_args=strategy, mtp_training_mode="joint")
    with pytest.raises(ConfigError) as caught:
        roll_driver.check_options(wrong)
    for name in (
        "adv_estimator",
        "loss_agg_mode",
        "advantage_clip",
        "worker_cls",
        "strategy_name",
        "mtp_training_mode",
    ):
        assert name in str(caught.value)
    roll_driver.check_options(options(tmp_path))


def test_an_option_of_roll_that_is_not_known_must_be_off(tmp_path, monkeypatch):
    wrong = options(tmp_path, entropy_reward_coef=0.5)
    with pytest.raises(ConfigError, match=r"entropy_reward_coef: got 0\.5"):
        roll_driver.check_options(wrong)
    monkeypatch.setenv("MEGATRON_DARO_OPTIONS", "allow_host_options=[entropy_reward_coef]")
    roll_driver.check_options(wrong)


@pytest.mark.parametrize(
    ("rows", "changes", "match"),
    [
        (8, {"prompts": torch.arange(8)[:, None]}, "group 0"),
        (7, {"response_level_rewards": torch.zeros(7)}, "got 7"),
        (8, {"scores": torch.full((8,), 0.5), "response_level_rewards": torch.zeros(8)}, "correct_above"),
        (8, {"response_level_rewards": torch.tensor([1.4, -0.6, -0.5, -0.3] * 2)}, "response_level_rewards"),
    ],
    ids=["not-one-prompt", "no-multiple", "no-verdicts", "shaped-rewards"],
)
def test_groups_verdicts_and_rewards_are_checked_on_the_driver(rows, changes, match):
    mask = torch.ones(rows, POSITIONS)
    if rows % K:
        columns = {"scores": torch.zeros(rows), "prompts": torch.zeros(rows, 3), **changes}
        data = Data(columns)
    else:
        data = answers(mask, **changes)
    with pytest.raises(AlgorithmError, match=match):
        roll_driver.daro_advantages(data, mask, K)


def test_a_version_of_roll_without_a_name_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "roll", ModuleType("roll"))
    with pytest.raises(ConfigError) as caught:
        roll_driver.install()
    assert "RLVRPipeline" in str(caught.value) and "0.3.0" in str(caught.value)


def test_advantages_and_bins_are_written_for_the_trained_tokens(tmp_path):
    mask = torch.ones(8, POSITIONS)
    mask[0, 2:] = 0
    compute = roll_driver.with_daro(lambda **given: given["data"])
    data = compute(data=answers(mask), response_mask=mask, pipeline_config=options(tmp_path))
    root3 = 3**0.5
    assert data.batch["advantages"][:, 1].tolist() == pytest.approx(
        [root3, *[-1 / root3] * 3, *[1 / root3] * 3, -root3], rel=1e-5
    )
    assert not data.batch["advantages"][0, 2:].any() and data.batch["raw_advantages"] is data.batch["advantages"]
    assert data.batch["advantages"].dtype == torch.float32
    assert data.batch[roll_driver.BINS].tolist() == [[1] * POSITIONS] * 4 + [[3] * POSITIONS] * 4


def test_normalised_rewards_may_be_rounded_and_a_group_that_is_not_is_refused():
    mask = torch.ones(8, POSITIONS)
    good = answers(mask).batch["response_level_rewards"]
    roll_driver.daro_advantages(answers(mask, response_level_rewards=good + 0.01), mask, K)
    far = good.clone()
    far[5] -= 0.05
    with pytest.raises(AlgorithmError, match="group 1"):
        roll_driver.daro_advantages(answers(mask, response_level_rewards=far), mask, K)


@pytest.mark.parametrize(("recompute", "refused"), [(False, True), (True, False)])
def test_a_filter_of_tokens_needs_old_log_probs_that_are_recomputed(tmp_path, recompute, refused):
    correction = SimpleNamespace(filters=["ratio"])
    config = options(tmp_path, train_infer_correction=correction, enable_old_logprobs_recompute=recompute)
    if refused:
        with pytest.raises(ConfigError, match=r"train_infer_correction\.filters"):
            roll_driver.check_options(config)
    else:
        roll_driver.check_options(config)
    config.actor_train.apply_loss_scale = False
    with pytest.raises(ConfigError, match=r"actor_train\.apply_loss_scale"):
        roll_driver.check_options(config)


def test_the_driver_starts_rolls_pipeline_with_daro(monkeypatch, tmp_path):
    """As examples/start_rlvr_pipeline.py: compose, from_dict, init, RLVRPipeline(pipeline_config=...).run()."""
    events = []

    class Composed:
        def __init__(self, config_dir, job_name, version_base):
            events.append((config_dir, version_base))

        def __enter__(self):
            return self

        def __exit__(self, *failure):
            events.append("left")

    class Pipeline:
        def __init__(self, pipeline_config):
            events.append(pipeline_config)

        def run(self):
            events.append("run")

    config = options(tmp_path)
    own = lambda data, **given: data
    contents = {
        "roll.pipeline.rlvr.rlvr_config": {"RLVRConfig": "class"},
        "roll.pipeline.rlvr.rlvr_pipeline": {"RLVRPipeline": Pipeline, "compute_advantage": own},
        "roll.distributed.scheduler.initialize": {"init": lambda: events.append("init")},
        "dacite": {"from_dict": lambda data_class, data: config if (data_class, data) == ("class", "tree") else None},
        "hydra": {"compose": lambda config_name: config_name, "initialize_config_dir": Composed},
        "omegaconf": {
            "OmegaConf": SimpleNamespace(to_container=lambda c, resolve: {("grpo", True): "tree"}[c, resolve])
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["roll_driver", "--config_path", "here", "--config_name", "grpo"])
    roll_driver.main()
    assert events == [(str(tmp_path / "here"), None), "left", "init", config, "run"]
    installed = sys.modules["roll.pipeline.rlvr.rlvr_pipeline"].compute_advantage
    assert installed.__wrapped__ is own
    config.adv_estimator = "gae"
    events.clear()
    with pytest.raises(ConfigError, match="adv_estimator"):
        roll_driver.main()
    assert "init" not in events


def test_a_loss_without_the_one_average_is_of_another_version(roll, tmp_path):
    config = options(tmp_path)
    worker = roll.DaroActorWorker()
    worker.initialize(config)
    for number in (0, 2):
        host = sys.modules["roll.pipeline.rlvr.actor_worker"].ActorWorker
        plain = ActorWorker.loss_func

        def loss_func(self, data, output_tensor, number=number, plain=plain):
            module = sys.modules["roll.pipeline.rlvr.actor_worker"]
            mask = data.batch["final_response_mask"]
            for _ in range(number):
                module.agg_loss(
                    loss_mat=output_tensor, loss_mask=mask, loss_agg_mode="", batch_num_tokens=1, weights=mask[:, 0]
                )
            return output_tensor.sum(), {}

        host.loss_func = loss_func
        with pytest.raises(AlgorithmError, match=f"{number} averages"):
            worker.strategy.train_step(batch=batch(config), loss_func=worker.loss_func)


def test_the_state_is_written_by_the_first_rank_and_looked_for_only_on_a_resume(roll, tmp_path, monkeypatch):
    worker = roll.DaroActorWorker()
    worker.initialize(options(tmp_path, resume_from_checkpoint=True, checkpoint_config={"latest": None}))
    assert worker.daro.steps == 0
    monkeypatch.setattr(roll.dist, "get_rank", lambda: 1)
    assert worker.do_checkpoint(5) == "saved" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("adv_estimator", "grpo", "gae"),
        ("loss_agg_mode", "token-mean", "seq-mean-token-mean"),
        ("importance_sampling", "token", "seq"),
        ("gamma", 1, 0.99),
        ("gamma", 1, 2),
        *((name, None, 2.0) for name in ("advantage_clip", "reward_clip")),
        *((name, False, True) for name in ("whiten_advantages", "whiten_rewards", "add_token_level_kl", "use_opd")),
        *((name, False, True) for name in ("difficulty_loss_weight", "length_loss_weight", "is_pure_opd")),
    ],
)
def test_options_that_have_one_value_with_daro(tmp_path, option, right, wrong):
    roll_driver.check_options(options(tmp_path, **{option: right}))
    with pytest.raises(ConfigError, match=f"{option}: got"):
        roll_driver.check_options(options(tmp_path, **{option: wrong}))
