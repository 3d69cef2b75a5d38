"""NeMo-RL's options and launcher, with stand-ins for its modules: what is refused, and when."""

from __future__ import annotations

import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, ConfigError
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
    ("section", "option", "value", "match"),
    [
        ("data_plane", "enabled", True, "data_plane.enabled: got true; allowed: false"),
        ("grpo", "adv_estimator", {"name": "gdpo"}, "grpo.adv_estimator.name: got 'gdpo'; allowed: 'grpo'"),
        ("grpo", "async_grpo", {"enabled": True, "max_trajectory_age_steps": 2}, "grpo.async_grpo.enabled: got true"),
        ("grpo", "use_leave_one_out_baseline", True, "use_leave_one_out_baseline: got true; allowed: false"),
        ("grpo", "token_bonus", 0.5, "grpo.token_bonus: got 0.5; allowed: off: DARO does not know"),
        ("loss_fn", "use_kl_in_reward", True, "loss_fn.use_kl_in_reward: got true"),
        ("loss_fn", "positive_example_nll_weight", 0.1, "loss_fn.positive_example_nll_weight: got 0.1"),
        ("loss_fn", "token_level_loss", False, "loss_fn.token_level_loss: got false"),
    ],
)
def test_options_that_daro_does_not_go_with_are_refused(kind, section, option, value, match):
    adapter.check_options(config(kind), read_options(""))
    with pytest.raises(ConfigError, match=match):
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


@pytest.mark.parametrize(("of_config", "of_call", "match"), [(8, None, "got 8 for a batch of 4"), (4, 8, "got 8 for")])
def test_a_batch_of_several_optimizer_steps_is_refused(of_config, of_call, match):
    daro, loss = adapter.Daro(K, read_options("")), object.__new__(adapter.DaroLoss)
    data = {"token_mask": torch.ones(4, 3), "sample_mask": torch.ones(4)}
    with pytest.raises(ConfigError, match=match):
        daro.wrap(SimpleNamespace(cfg={"train_global_batch_size": of_config})).train(data, loss, gbs=of_call)
    for size, given in ((4, None), (8, 4)):
        with pytest.raises(AlgorithmError, match="pass rates"):
            daro.wrap(SimpleNamespace(cfg={"train_global_batch_size": size})).train(data, loss, gbs=given)


def test_what_nemo_rl_reads_of_its_own_loss_is_there_also_in_the_workers():
    loss = adapter.DaroLoss(SimpleNamespace(reference_policy_kl_penalty=0.5))
    for one in (loss, pickle.loads(pickle.dumps(loss))):
        assert one.reference_policy_kl_penalty == 0.5
