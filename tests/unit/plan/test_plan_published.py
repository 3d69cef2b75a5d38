"""The planner's times against the table of published ones, half of which nothing was learned from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_daro.workshop.plan.times import Constants

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_published

    yield plan_published
    del sys.modules["plan_published"]


def test_each_row_has_a_source_and_the_half_that_its_configuration_draws(published):
    rows = published.read_rows(planned=False)
    assert len(rows) > 390
    for row in rows:
        assert row["repo"] and row["path"] and len(row["commit"]) == 12 and float(row["value"]) > 0
        assert (row["id"], row["half"] or row["left_out"]) == (
            published.drawn(row)[0],
            row["left_out"] or published.drawn(row)[1],
        )
    halves = {row["id"]: row["half"] for row in rows if not row["left_out"]}
    assert 0.4 < list(halves.values()).count("test") / len(halves) < 0.6


def test_there_are_far_fewer_constants_than_rows_to_learn_them_from(published):
    learned = {row["id"] for row in published.read_rows() if row["half"] == "learn"}
    assert sum(map(len, published.FITTED.values())) < len(learned) / 2


def test_half_of_the_rows_that_nothing_was_learned_from_are_within_15_percent(published):
    rows = [row for row in published.read_rows() if row["half"] == "test"]
    errors = np.abs(np.expm1(published.log_ratios(rows, Constants())))
    assert np.median(errors) <= 0.15


def test_no_row_that_nothing_was_learned_from_is_beyond_a_factor_of_1_6(published):
    assert [(row["id"], ratio) for row, ratio in published.beyond(published.read_rows(), Constants())] == []


def test_layouts_that_are_published_for_the_same_model_and_gpus_are_in_the_published_order(published):
    both = published.pairs(published.read_rows(), Constants())
    assert len(both) >= 7 and all(agrees for *_, agrees in both)


def test_batches_that_are_made_at_once_share_the_reads_of_weights(published):
    """Eight times the answers on a server read the weights no more often, so they are done sooner than eight batches
    in turn, and no sooner than the cache and the arithmetic allow."""
    row, *_ = (row for row in published.read_rows() if row["staleness"] == "8")
    ours = published.workload_of(row), 2, 32, published.GPUS[row["gpu"]], Constants()
    one, eight = (published.generation_s(*ours, batches_at_once=number) for number in (1, 8))
    assert one / 8 < eight < one / 2


def test_tensors_that_are_sent_one_by_one_cost_a_walk_through_all_layers_each(published):
    rows = {row["model"]: row for row in published.read_rows() if row["repo"] == "verl-project/verl"}
    known, layout = Constants(), published.ModelLayout(1, 1, 1, "none", 4096)
    # Tensors under their Hugging Face names: Qwen2.5 has three biases, Qwen3's 128 experts three matrices each.
    for model, tensors in {"qwen2.5-7b": 28 * 12, "qwen3-30b-a3b": 48 * (9 + 3 * 128)}.items():
        workload, gpu = published.workload_of(rows[model]), published.GPUS[rows[model]["gpu"]]
        one_by_one, bucketed = (
            published.sync_s(workload, layout, gpu, known, buckets=buckets, pauses=False) for buckets in (False, True)
        )
        assert one_by_one - bucketed == pytest.approx(tensors * workload.shape.layers * known.walk_s)


def test_rows_whose_recipe_has_another_layout_say_nothing(published):
    left_out = [row for row in published.read_rows(planned=False) if "recipe of the release" in row["left_out"]]
    assert len(left_out) == 9 and not any(row["half"] for row in left_out)


def test_a_step_s_interval_is_what_nine_tenths_of_the_learned_steps_are_within(published):
    known = Constants()
    factors = {entry["group"]: entry["factor"] for entry in published.summary(published.read_rows(), known)}
    assert known.step_error == pytest.approx(factors["RL step, dense"], abs=0.01)
    assert known.expert_step_error == pytest.approx(factors["RL step, mixture of experts"], abs=0.01)


def test_the_page_has_the_tables_that_the_benchmark_writes(published):
    page = (ROOT / "benchmarks" / "results" / "plan_published.md").read_text()
    _, _, rest = page.partition(published.MARKS[0] + "\n")
    assert rest.partition(published.MARKS[1])[0] == published.text(published.read_rows(), Constants())


def test_a_fit_finds_constants_that_made_the_rows(published):
    """Rows whose values are those of other constants: the fit of the weight syncs finds these again."""
    known = Constants()
    truth = published.replace(known, sync_links=0.5, tensor_s=1e-4)
    rows = [row for row in published.read_rows() if row["kind"] == "sync"]
    made = [{**row, "value": str(published.planned(row, truth)), "half": "learn"} for row in rows]
    found = published.fit(made, known, ["sync"])
    assert np.abs(published.log_ratios(made, found)).max() < 0.05
    assert found.sync_links == pytest.approx(0.5, rel=0.1)
