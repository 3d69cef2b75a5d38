"""Gaps of upstream that are bridged: warnings, tables of angles, messages between stages, groups and moments of an
optimizer."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_daro.actor import compat
from megatron_daro.actor.compat import allocate_optimizer_state


def test_upstream_is_quiet_for_a_while():
    logger = logging.getLogger("megatron.core")
    level = logger.level
    try:
        logger.setLevel(logging.INFO)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises(KeyError), compat.quiet():
                assert logger.level == logging.ERROR
                warnings.warn("deprecated", stacklevel=1)
                raise KeyError
        assert not seen and logger.level == logging.INFO
    finally:
        logger.setLevel(level)


def test_packs_of_all_lengths_share_few_tables_of_angles():
    rotary = SimpleNamespace(get_rotary_seq_len=lambda longest, **_: longest)
    compat.bound_rotary_tables(rotary)
    lengths = (1, 1024, 1025, 2048, 2049, 40_000)
    assert [rotary.get_rotary_seq_len(n, packed=True) for n in lengths] == [1025, 1025, 2049, 2049, 4097, 65_537]


def test_a_model_that_is_gone_is_kept_by_its_table_of_angles_until_that_is_forgotten():
    rotary = compat.RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=SimpleNamespace(size=lambda: 1))
    rotary(16)
    alive = weakref.ref(rotary)
    del rotary
    gc.collect()
    assert alive() is not None, "upstream keeps it no more: compat.forget_rotary_tables can go"
    compat.forget_rotary_tables()
    gc.collect()
    assert alive() is None


def messages(activations, gradients):
    found = compat.PipelineMessages.__new__(compat.PipelineMessages)
    found._activations, found._gradients, found._hidden = iter(activations), iter(gradients), 8
    return found


def test_shapes_between_stages_are_those_of_the_micro_batches_and_a_message_too_few_is_seen():
    told = messages([5, 6], [7])
    assert told._communicate_shapes(None, None, True, False) == ([5, 1, 8], [0, 0, 0])
    assert told._communicate_shapes(None, None, False, True) == ([0, 0, 0], [7, 1, 8])
    with pytest.raises(RuntimeError, match=r"^1 messages between pipeline stages were not received; the schedule is"):
        told.check_received(forward_only=False)
    told.check_received(forward_only=False)
    messages([], [7]).check_received(forward_only=True)
    with pytest.raises(RuntimeError, match=r"^3 messages"):
        messages([1, 2], [7]).check_received(forward_only=False)


def test_a_saved_group_is_found_by_what_it_is():
    """Not by a rate that another run has: upstream's identifiers are taken from this run's group."""
    alike = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    others = [key for key in compat.param_group_identifier_keys if key not in alike] or ["max_lr"]
    own = {**alike, **dict.fromkeys(others, 0.1), "lr": 0.3}
    other = {**own, "wd_mult": 0.0, **dict.fromkeys(others, 0.7)}
    saved = {**alike, **dict.fromkeys(others, 0.5), "lr": 0.9}
    nested = {"param_groups": [dict(saved)], "chained": {"optimizer": {"param_groups": [dict(saved)]}}, "x": 1}
    assert list(compat._param_groups(nested)) == [saved, saved] and list(compat._param_groups(3)) == []
    compat._identify(saved, [other, own])
    known = [key for key in others if key in compat.param_group_identifier_keys]
    assert all(saved[key] == 0.1 for key in known) and saved["lr"] == 0.9
    stranger = {**saved, "lr_mult": 2.0}
    compat._identify(stranger, [other, own])
    assert stranger == {**saved, "lr_mult": 2.0}


class LikeFusedAdam(torch.optim.Optimizer):
    """Moments come with the first step, which is counted in the group: transformer_engine 2.20.2,
    pytorch/optimizers/fused_adam.py: `if "step" in group`, `if len(state) == 0: self.initialize_state(p, ...)`."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})


def test_moments_of_zeros_before_the_first_step_and_nothing_after_it():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
    fused, adam = LikeFusedAdam(parameters[:1]), torch.optim.AdamW(parameters[1:])
    optimizer = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=fused), SimpleNamespace(optimizer=adam), SimpleNamespace()]
    )
    allocate_optimizer_state(optimizer)
    assert {name: value.tolist() for name, value in fused.state[parameters[0]].items()} == {
        "exp_avg": [0, 0, 0],
        "exp_avg_sq": [0, 0, 0],
    }
    assert adam.state[parameters[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    fused.state[parameters[0]]["exp_avg"] += 1
    allocate_optimizer_state(optimizer)
    assert fused.state[parameters[0]]["exp_avg"].tolist() == [1, 1, 1]
