"""What the planner learns from a recorded run, and the simulation of many GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_daro.config import resolve
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import GPUS
from megatron_daro.workshop.plan.history import fitted, predicted_step, read_history
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.scaling import Failures, doublings, simulate, stops_at, write_plot
from megatron_daro.workshop.plan.times import Constants, generation_s, sync_s, train_times
from megatron_daro.workshop.plan.workload import workload_of

pytestmark = pytest.mark.slow

H100 = GPUS["h100-80g"]
SHAPE = read_model_shape(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    }
)
RECIPE = {
    "model": {"path": "not-here"},
    "data": {"train": ["x"], "max_prompt_tokens": 512},
    "rollout": {"prompts_per_batch": 64, "rollouts_per_prompt": 8, "max_response_tokens": 4096},
    "actor": {"tensor_parallel": 2, "data_parallel": 4, "micro_batch_tokens": 8192},
    "engine": {"kind": "sglang", "replicas": 4, "sglang": {"tensor_parallel": 2}},
}
LAYOUT = ModelLayout(2, 1, 1, "none", 8192)


def config_of(directory, **changed):
    file, names = directory / "config.yaml", {**RECIPE, **changed}
    file.write_text(yaml.safe_dump({name: {**RECIPE.get(name, {}), **changed.get(name, {})} for name in names}))
    return resolve(file)


def recorded(directory, truth: Constants, *, noise: float = 0.05):
    """A run whose times are those of the model with other constants than the assumed ones, and noise."""
    rng = np.random.default_rng(0)
    config = config_of(directory)
    (directory / "rollouts").mkdir()
    lengths = np.minimum(rng.lognormal(6.5, 0.7, 2048), 4096).astype(np.int32)
    table = pa.table({"length": lengths, "prompt_tokens": [[1] * 100] * len(lengths)})
    pq.write_table(table, directory / "rollouts" / "step_000001.parquet")
    workload = workload_of(
        config, SHAPE, mean_prompt=100, response_Q=np.quantile(lengths, (np.arange(256) + 0.5) / 256)
    )
    rows = []
    for step in range(1, 30):
        rollout, train = (
            seconds * rng.lognormal(0, noise)
            for seconds in (
                generation_s(workload, 2, 4, H100, truth),
                train_times(workload, LAYOUT, 4, H100, truth).total,
            )
        )
        times = {"rollout_s": rollout, "train_s": train, "sync_s": 2.0, "step_s": rollout + train + 2.0 + 1.5}
        rows.append({"step": step, **{f"timing/{name}": value for name, value in times.items()}})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workload


TRUTH = replace(Constants(), matrices=0.3, decoding=0.35, decode_step_s=0.012, layer_s=2e-3)


def test_a_run_teaches_lengths_and_factors(tmp_path):
    workload = recorded(tmp_path, TRUTH)
    history = read_history(tmp_path)
    constants = fitted(history, SHAPE, H100)
    assert history.mean_prompt == 100 and history.steps == 28
    assert generation_s(workload, 2, 4, H100, constants) == pytest.approx(history.rollout)
    assert train_times(workload, LAYOUT, 4, H100, constants).total == pytest.approx(history.train)
    assert sync_s(workload, LAYOUT, H100, constants) == pytest.approx(2.0)
    assert constants.fixed_s == pytest.approx(1.5, abs=0.5)


@pytest.mark.parametrize("changed", [{"replicas": 2}, {"replicas": 8}, {"data": 2}, {"data": 8}, {"prompts": 128}])
def test_other_splits_are_predicted_within_15_percent(tmp_path, changed):
    recorded(tmp_path, TRUTH)
    constants = fitted(read_history(tmp_path), SHAPE, H100)
    config = config_of(tmp_path, rollout={"prompts_per_batch": changed.get("prompts", 64)})
    workload = read_history(tmp_path).workload(config, SHAPE)
    replicas, data = changed.get("replicas", 4), changed.get("data", 4)

    def step(known: Constants) -> float:
        return generation_s(workload, 2, replicas, H100, known) + train_times(workload, LAYOUT, data, H100, known).total

    assert step(constants) == pytest.approx(step(TRUTH), rel=0.15)


def test_a_run_without_steps_teaches_nothing(tmp_path):
    config_of(tmp_path)
    with pytest.raises(ConfigError, match="--from"):
        read_history(tmp_path)


def asked():
    from megatron_daro.config import Config

    return workload_of(Config.model_validate_json(json.dumps({**RECIPE, "model": {"path": "x"}})), SHAPE)


def test_a_fixed_batch_stops_to_scale_and_says_why():
    sizes = simulate(asked(), H100, doublings(64, 2048), Failures(mtbf_hours=1e12), steps=100)
    assert all(less.step > more.step * 0.98 for less, more in pairwise(sizes))
    end = stops_at(sizes)
    assert end is not None and end.gpus < 2048


def test_failures_cost_more_the_more_gpus_there_are_and_the_rarer_checkpoints():
    few, many = (simulate(asked(), H100, [n], Failures(mtbf_hours=100), steps=1000)[0] for n in (64, 1024))
    assert 0 < few.parts["failures"] < many.parts["failures"]
    rare = simulate(asked(), H100, [1024], Failures(mtbf_hours=100, save_every=200), steps=1000)[0]
    assert rare.parts["failures"] > many.parts["failures"] and rare.tokens_per_s < many.tokens_per_s


def test_the_same_seed_gives_the_same_simulation():
    first, second = (simulate(asked(), H100, [64], Failures(mtbf_hours=2000), steps=100) for _ in range(2))
    assert first == second


def test_the_plot_is_one_page(tmp_path):
    write_plot(simulate(asked(), H100, [8, 16], Failures(), steps=50), tmp_path / "p.html", "a title")
    text = (tmp_path / "p.html").read_text()
    assert "a title" in text and 'src="http' not in text


def test_a_step_of_another_configuration_is_that_of_its_own_layout(tmp_path):
    recorded(tmp_path, TRUTH)
    history = read_history(tmp_path)
    known = fitted(history, SHAPE, H100)
    again = predicted_step(history, history.config, SHAPE, H100, known)
    assert again == pytest.approx(history.step, rel=0.02)
    stale = config_of(tmp_path, rollout={"max_staleness": 1}, algorithm={"correction": {"kind": "tis"}})
    shorter = predicted_step(history, stale, SHAPE, H100, known)
    assert again - shorter == pytest.approx(min(history.rollout, history.train), rel=0.02)


def written(directory, rows, files):
    """A run of given metrics and given lengths of a file each."""
    config_of(directory)
    (directory / "rollouts").mkdir()
    for number, (lengths, prompts) in enumerate(files, 1):
        table = pa.table(
            {"length": pa.array(lengths, pa.float32()), "prompt_tokens": pa.array(prompts, pa.list_(pa.int32()))}
        )
        pq.write_table(table, directory / "rollouts" / f"step_{number:06d}.parquet")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_history_has_medians_of_the_steps_after_the_first_and_every_answer_with_a_length(tmp_path):
    names = ("rollout_s", "train_s", "logprob_s", "sync_s", "step_s")
    seconds = [(900, 900, 900, 900, 900), (10, 20, 3, 1, 50), (12, 22, 5, 2, 60), (11, 60, 4, 4, 55)]
    rows = [
        {"step": step, **{f"timing/{name}": value for name, value in zip(names, row, strict=True)}}
        for step, row in enumerate(seconds, 1)
    ]
    rows = [{"step": 0, "timing/step_s": 1e6}, *rows, {"step": 5}]
    files = [([10, np.nan, 5000], [[1] * 4, None, [1] * 6]), ([], []), ([30], [[1] * 8])]
    history = read_history(written(tmp_path, rows, files))
    assert (history.rollout, history.train, history.logprob, history.sync, history.step) == (11, 22, 4, 2, 55)
    assert history.steps == 3 and history.mean_prompt == 6 and list(history.lengths) == [10, 5000, 30]
    workload = history.workload(history.config, SHAPE)
    assert workload.response_Q.max() <= 4096 and workload.mean_prompt == 6


@pytest.mark.parametrize(("steps", "files"), [(2, 0), (1, 1)])
def test_a_history_needs_steps_and_lengths(tmp_path, steps, files):
    rows = [{"step": step, "timing/step_s": 1.0} for step in range(1, steps + 1)]
    with pytest.raises(ConfigError, match="--from"):
        read_history(written(tmp_path, rows, [([1], [[1]])] * files))
