"""What the adapters of Megatron hosts share: the state beside checkpoints, sums over ranks, defaults of a parser."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import CheckpointError
from megatron_daro.plugins import megatron_host as host
from megatron_daro.plugins.core import DifficultyStep, resume

K = 4


def new_step(steps=0):
    step = DifficultyStep(make_algorithm("daro", rollouts_per_prompt=K, max_response_tokens=1))
    step.steps = steps
    return step


class Module:
    """A host's module with its own functions of checkpoints, which write down their calls."""

    def __init__(self, **options):
        calls = self.calls = []
        base = {"save": "", "load": None, "finetune": False}
        vars(self).update(
            get_args=lambda: SimpleNamespace(**{**base, **options}),
            save_checkpoint=lambda *given, **named: calls.append(("save", given, named)) or "saved",
            load_checkpoint=lambda *given, **named: calls.append(("load", given, named)) or (7, "extra"),
        )


def kept(step, start_fresh=False, **options):
    module = Module(**options)
    host.keep_state(module, lambda: (step, start_fresh))
    return module


def test_a_saved_checkpoint_has_the_state_in_its_folder(tmp_path, monkeypatch):
    module, step = kept(new_step(3), save=str(tmp_path)), new_step()
    assert module.save_checkpoint(12, "model", key=1) == "saved"
    assert module.calls == [("save", (12, "model"), {"key": 1})]
    resume(step, tmp_path / "iter_0000012" / "daro.json", start_fresh=False)
    assert step.steps == 3
    monkeypatch.setattr(host.dist, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(host.dist, "get_rank", lambda rank=rank: rank)
        module.save_checkpoint(13)
        assert (tmp_path / "iter_0000013").exists() == (rank == 0), "only the first rank writes"


def test_a_resumed_checkpoint_brings_its_state(tmp_path, caplog):
    saved = kept(new_step(3), save=str(tmp_path))
    saved.save_checkpoint(7)
    (tmp_path / host.TRACKER).write_text("7\n")
    step = new_step()
    module = kept(step, load=str(tmp_path))
    assert module.load_checkpoint("model", None, None) == (7, "extra") and step.steps == 0, "a reference model"
    assert module.load_checkpoint("model", "optimizer", "scheduler", 1, strict=True) == (7, "extra")
    assert step.steps == 3 and module.calls[-1] == ("load", ("model", "optimizer", "scheduler", 1), {"strict": True})
    alone = kept(new_step())
    alone.load_checkpoint("model", "optimizer", "scheduler")
    assert caplog.records, "weights that start at 1 are said"


def test_a_checkpoint_without_a_state_is_resumed_by_order_only(tmp_path):
    (tmp_path / host.TRACKER).write_text("7")
    with pytest.raises(CheckpointError, match=r"iter_0000007.daro\.json"):
        kept(new_step(), load=str(tmp_path)).load_checkpoint(1, 2, 3)
    kept(new_step(), True, load=str(tmp_path)).load_checkpoint(1, 2, 3)


def test_a_module_is_wrapped_once_and_keeps_the_newest_session(tmp_path):
    module = kept(new_step(1), save=str(tmp_path))
    before = module.save_checkpoint, module.load_checkpoint
    step = new_step(5)
    host.keep_state(module, lambda: (step, False))
    assert (module.save_checkpoint, module.load_checkpoint) == before
    module.save_checkpoint(1)
    resume(found := new_step(), tmp_path / "iter_0000001" / "daro.json", start_fresh=False)
    assert found.steps == 5


@pytest.mark.parametrize(
    ("name", "tracker", "options", "wanted"),
    [
        ("run", "9", {}, "iter_0000009"),
        ("run", " 9\n", {"finetune": True}, None),
        ("run", None, {}, None),
        ("run", "release\n", {}, None),
        ("run", "release", {"ckpt_step": 9}, "iter_0000009"),
        ("iter_0000003", None, {}, ""),
        ("iter_3", None, {}, None),
        ("iter_00000031", None, {}, None),
    ],
)
def test_the_folder_of_a_resumed_run(tmp_path, name, tracker, options, wanted):
    load = tmp_path / name
    load.mkdir()
    if tracker is not None:
        (load / host.TRACKER).write_text(tracker)
    args = SimpleNamespace(**{"load": str(load), "finetune": False, **options})
    assert host.resumed_folder(args, 9) == (None if wanted is None else load / wanted)
    assert host.resumed_folder(SimpleNamespace(load=None, finetune=False), 9) is None


def test_checkpoints_that_are_not_files_are_refused():
    assert host.checkpoint_problems(SimpleNamespace()) == []
    (problem,) = host.checkpoint_problems(SimpleNamespace(non_persistent_ckpt_type="local"))
    assert str(problem).startswith("--non-persistent-ckpt-type: got 'local'")


def test_defaults_are_those_of_options_that_are_required_too():
    def add(parser):
        parser.add_argument("--lr", type=float, required=True)
        parser.add_argument("--steps", type=int, default=3)

    assert host.defaults_of(add) == {"lr": None, "steps": 3}


@pytest.fixture
def ranks(monkeypatch):
    """Megatron's groups by name; a sum over one multiplies by its length and is written down."""
    found = SimpleNamespace(summed=[], stages=1)
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda with_context_parallel: "data and context" if with_context_parallel else "data",
        get_pipeline_model_parallel_world_size=lambda: found.stages,
        get_pipeline_model_parallel_group=lambda: "stages",
    )

    def all_reduce(tensor, group):
        found.summed.append(group)
        tensor.mul_(len(group))

    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(mpu=mpu))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return found


def test_sums_run_over_data_and_where_there_are_several_over_stages(ranks):
    ones = torch.ones(2, dtype=torch.float64)
    assert host.over_data(with_context=False)(ones).tolist() == [4, 4] and ones.tolist() == [1, 1]
    assert host.over_data(with_context=True)(ones).tolist() == [16, 16]
    assert host.over_data_and_stages(with_context=True)(ones).tolist() == [16, 16]
    ranks.stages = 2
    assert host.over_data_and_stages(with_context=False)(ones).tolist() == [24, 24]
    assert ranks.summed == ["data", "data and context", "data and context", "data", "stages"]
