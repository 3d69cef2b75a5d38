"""Experts of a step's answers: which are kept, and that they are settled before its line is written."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import make_rollout, make_stack, run_stack

from megatron_daro.controller import Controller
from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.sampled_batch import Update
from megatron_daro.routed_experts import Part, StoredExperts
from megatron_daro.types import Group, Prompt, Verdict


def routed(group_id) -> Group:
    prompt = Prompt("p", "4", "unit", tokens=(1, 2))
    experts = StoredExperts((Part(f"{group_id}.npy", 0, 1),), (4, 1, 1))
    one = replace(make_rollout(group_id, 0, 0, prompt, 0, length=2), routed_experts=experts)
    return Group(group_id, prompt, (one, replace(one, routed_experts=None)), (Verdict(True, 1.0, ""),) * 2)


@pytest.mark.parametrize("recorded", [True, False])
def test_experts_are_kept_of_what_a_record_names_or_a_later_epoch_trains(tmp_path, recorded):
    stack = make_stack(tmp_path)
    settled = []
    parts = stack.parts if recorded else replace(stack.parts, recorder=None)
    controller = Controller(stack.section, parts, max_staleness=0)
    update = Update(1, 0, (routed(1), routed(2)), 1, again=frozenset({2}), filtered=(routed(3),), dropped=(routed(4),))
    controller._settle_experts(SimpleNamespace(settle=settled.append), update)
    kept = {i: (routed(i).rollouts[0].routed_experts, None) for i in ((1, 2) if recorded else (2,))}
    assert settled == [{1: (), 2: (), 3: (), 4: ()} | kept]


def test_experts_of_a_step_are_settled_before_its_line_is_written(tmp_path, noted):
    stack = make_stack(tmp_path, deadlines=noted, trainer={"steps": 1})
    lines = []
    folder = SimpleNamespace(settle=lambda groups: lines.append((sorted(groups), read_metrics(tmp_path))))
    stack.controller._parts = replace(stack.parts, experts=folder)
    run_stack(stack)
    ((groups, written),) = lines
    assert len(groups) >= 3 and written == [] and ("write", "experts of step 1") in noted.waits
