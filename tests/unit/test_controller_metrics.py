"""The numbers in the line of a step, and the names under which its parts are timed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rollout"))

from loop_fakes import make_stack, run_stack

from megatron_daro.observe.metrics import read_metrics


def test_throughput_is_tokens_over_the_time_that_training_took(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 2})
    tokens, build = [], stack.parts.build

    def built(groups, step):
        columns = build(groups, step)
        tokens.append(len(columns.tokens_T))
        return columns

    times = iter([{}, {"timing/train_s": 2.0}, {}])
    stack.phases.collect = lambda: next(times)
    stack.controller._parts = replace(stack.parts, build=built)
    run_stack(stack)
    first, second = read_metrics(tmp_path)
    assert first["throughput/train_tokens_per_s"] == tokens[0] / 2.0
    assert "throughput/train_tokens_per_s" not in second


def test_a_step_has_the_numbers_of_books_samples_and_policy(tmp_path):
    stack = make_stack(tmp_path, trainer={"steps": 1})
    run_stack(stack)
    (line,) = read_metrics(tmp_path)
    books = {f"rollout/groups_{state}" for state in ("admitted", "trained", "filtered", "dropped", "outstanding")}
    others = {"rollout/retries", "rollout/late_refused", "rollout/steps_skipped", "loss/policy", "sync/bytes"}
    assert books | others | {"accuracy/mean", "rollout/epoch", "rollout/generated_tokens"} <= set(line)
    assert line["rollout/groups_trained"] == 3.0 and line["rollout/retries"] == line["rollout/late_refused"] == 0.0
    assert line["throughput/rollout_tokens_per_s"] > 0 and line["rollout/generated_tokens"] > 0


def test_each_part_of_a_step_is_timed_under_its_name(tmp_path):
    names = []

    class Timed:
        @contextmanager
        def measure(self, name):
            names.append(name)
            yield

        def collect(self):
            return {}

    stack = make_stack(tmp_path, trainer={"steps": 1})
    stack.controller._parts = replace(stack.parts, phases=Timed())
    run_stack(stack)
    assert names == ["rollout", "build", "logprob", "train", "sync", "write", "checkpoint", "checkpoint"]
