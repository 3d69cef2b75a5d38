"""Tasks of the package verifiers, its own code in a worker process: what is trained, and what fails.

Skipped without the package: bash tests/verifiers_hub.sh
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_forms import assert_exact, run, tokenizer

from megatron_daro.config import EnvironmentSection
from megatron_daro.environments.agents import CommandAgents

pytest.importorskip("verifiers", reason="the package verifiers is not here: bash tests/verifiers_hub.sh installs it")
RUNTIME = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


def held(tokens, monkeypatch, digit, says, weights=None, **options):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]]))
    section = {"kind": "verifiers:hub_digits", "options": RUNTIME, "workers": 1, "reward_weights": weights or {}}
    running = CommandAgents(EnvironmentSection(**section))
    weights = {"reward_weights": weights} if weights else {}
    return run(tokens, running, says, answer=digit, indices=(0,), **weights, **options)


def test_its_rewards_are_named_and_weighted_as_it_says_or_as_the_run_does(tokens, monkeypatch):
    says = iter(["x", "3", "3"]).__next__
    [rollout], engine, _, _ = held(tokens, monkeypatch, "3", lambda read, request: says())
    assert_exact([rollout], engine)
    assert (rollout.verdict.correct, rollout.verdict.reward, len(rollout.turns)) == (True, 1.0, 2)
    assert dict(rollout.verdict.rewards) == {"repeats": 1.0, "turns": 0.0}
    own = {"repeats": 0.5, "turns": 2.0}
    [rollout], _, _, _ = held(tokens, monkeypatch, "3", lambda read, request: says(), own)
    assert (rollout.verdict.correct, rollout.verdict.reward) == (True, 2.5)


def test_what_it_raises_costs_the_rollout_and_want_of_room_is_wrong(tokens, monkeypatch):
    [rollout], _, counts, progress = held(tokens, monkeypatch, "7", lambda read, request: "x")
    assert rollout.finish_reason == "abort" and counts["environment/failed/crash"] == 1
    assert "no seven" in progress.messages[0]
    [rollout], _, _, _ = held(tokens, monkeypatch, "3", lambda read, request: "xxxx", room=40)
    assert rollout.finish_reason == "length" and rollout.verdict.reason == "out_of_room"
