"""What the planner prints and writes of a plan that is given: every cell, every field, every line."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from test_plan_numbers import GPU, WORKLOAD

from megatron_daro.errors import ConfigError
from megatron_daro.sync.shard_plan import Balance
from megatron_daro.workshop.plan.layout import ModelLayout
from megatron_daro.workshop.plan.memory import Memory
from megatron_daro.workshop.plan.search import Choice, Plan, Refusals, Servers, Trainers, describe
from megatron_daro.workshop.plan.shard_sync import SyncRow, sync_table
from megatron_daro.workshop.plan.tables import Bill, as_record, options_of, view, write_options
from megatron_daro.workshop.plan.times import TrainTimes

GIB = 2**30


def choice(layout: ModelLayout, data: int, servers: Servers, seconds: float) -> Choice:
    memory = Memory(weights=10 * GIB, optimizer=5 * GIB, kv_cache=2.5 * GIB)
    times = TrainTimes(compute=seconds, communication=3.0, bubble=2.0, logprobs=4.0, turns=1.0)
    return Choice(Trainers(layout, data, 7, memory, times), servers, 5.0, 6.0, 0, 8.0, error=1.25)


FIRST = choice(ModelLayout(2, 3, 1, "none", 4096), 4, Servers(8, 1, 2, Memory(weights=GIB), 30.0), 20.0)
SECOND = choice(ModelLayout(1, 2, 4, "full", 8192, 16, 5), 2, Servers(16, 2, 1, Memory(weights=GIB), 31.0), 100.0)
THIRD = choice(ModelLayout(4, 1, 1, "none", 4096), 4, Servers(8, 1, 2, Memory(weights=GIB), 30.0), 30.0)


def plan() -> Plan:
    refusals = Refusals()
    for reason, need, words in (("few", 1, "a"), ("many", 3, "far"), ("many", 2, "near"), ("many", 2, "as near")):
        refusals.add(reason, need, words)
    return Plan((FIRST, SECOND, THIRD), refusals, 123)


def printed(what: object) -> list[str]:
    """Lines without the frame of their table, and one space for several."""
    return [" ".join(re.sub("[│┃]", " ", line).split()) for line in drawn(what)]


def drawn(what: object) -> list[str]:
    console = Console(width=260, file=io.StringIO())
    console.print(what)
    return console.file.getvalue().splitlines()


def test_a_step_has_all_its_parts():
    assert FIRST.trainers.times.train == 26 and FIRST.trainers.times.total == 30
    assert (FIRST.step, SECOND.step) == (30 + 30 + 5 + 6 + 8, 110 + 31 + 5 + 6 + 8)
    assert replace(SECOND, staleness=1).step == 110 + 5 + 6 + 8
    assert (FIRST.trainers.gpus, FIRST.servers.gpus, FIRST.gpus) == (24, 16, 40)
    assert replace(SECOND, shared=True).gpus == SECOND.trainers.gpus == 16


def test_the_page_has_a_row_for_each_choice_its_memory_and_what_is_out():
    workload = replace(WORKLOAD, response_Q=np.full(4, 500.0), staleness=1)
    lines = printed(view(plan(), workload, GPU, Bill(batches=90, price=2.0)))
    text = "\n".join(lines)
    assert lines[0] == "512 answers a batch, mean 500 tokens (prompt 300, longest sample 3072), staleness 1, invented"
    assert "1 2 3 1 1 4 1 none 4096 24 GPUs 2 x 8 79 (63 to 99) 30.0 4.0 26.0 2.0 3.0 5.0 130 79 158" in lines
    assert "2 1 2 5 4 2 16 full 8192 16 GPUs 1 x 16 160 (128 to 200) 31.0 4.0 106.0 2.0 3.0 5.0 80 128 256" in lines
    assert "TP PP VPP CP DP EP recompute tokens train servers step s generate log-probs train s of it bubble" in text
    assert "within a factor of 1.25; 1 of the other 2 choices are within it of the first" in text
    assert drawn(view(plan(), workload, GPU, Bill(9)))[0][:3] == "512"
    assert "GiB of a GPU's 59" in lines
    assert (
        "1 trainer 10.0 5.0 2.5 17.5" in lines and "server 1.0 1.0" in lines and "2 trainer 10.0 5.0 2.5 17.5" in lines
    )
    assert "on weights gradients optimizer critic activations logits buffers fp8 margin kv cache reserve sum" in lines
    assert lines[-3:] == ["123 layouts were looked at; out are:", "3: many (nearest: near)", "1: few (nearest: a)"]


def test_without_a_price_there_is_no_cost():
    with_price, without = ("\n".join(printed(view(plan(), WORKLOAD, GPU, Bill(9, p)))) for p in (0.0, None))
    assert "GPU-hours cost" in with_price and "GPU-hours" in without and "cost" not in without


def test_the_record_has_the_same_in_plain_values():
    record = as_record(plan(), replace(WORKLOAD, response_Q=np.full(4, 500.0)), GPU, Bill(90, 2.0))
    assert record["gpu"]["name"] == "invented" and record["tokens_per_batch"] == 512 * 800 and record["layouts"] == 123
    assert record["refused"] == {"few": {"layouts": 1, "nearest": "a"}, "many": {"layouts": 3, "nearest": "near"}}
    first, *others = record["choices"]
    assert len(others) == 2
    assert first["options"] == options_of(FIRST) and first["gpus"] == {"train": 24, "generate": 16}
    assert first["micro_batches"] == 7
    assert first["trainer_memory"]["optimizer"] == 5 * GIB and first["server_memory"]["weights"] == GIB
    assert first["seconds"] == {
        "step": 79.0,
        "step_low": 79 / 1.25,
        "step_high": 79 * 1.25,
        "generation": 30.0,
        "compute": 20.0,
        "communication": 3.0,
        "bubble": 2.0,
        "logprobs": 4.0,
        "turns": 1.0,
        "sync": 5.0,
        "offload": 8.0,
        "fixed": 6.0,
    }
    assert first["tokens_per_s"] == 512 * 800 / 79 and first["tokens_per_s_per_gpu"] == pytest.approx(
        512 * 800 / 79 / 40
    )
    assert first["gpu_hours"] == pytest.approx(90 * 79 * 40 / 3600) and first["cost"] == 2 * first["gpu_hours"]
    assert as_record(plan(), WORKLOAD, GPU, Bill(9))["choices"][0]["cost"] is None


def test_options_make_the_choice_and_name_experts_and_nodes_only_where_there_are_some():
    plain = {
        "actor.tensor_parallel": 2,
        "actor.pipeline_parallel": 3,
        "actor.virtual_pipeline_parallel": 1,
        "actor.context_parallel": 1,
        "actor.data_parallel": 4,
        "actor.sequence_parallel": True,
        "actor.recompute": "none",
        "actor.micro_batch_tokens": 4096,
        "engine.kind": "sglang",
        "engine.replicas": 2,
        "engine.sglang.tensor_parallel": 8,
    }
    assert options_of(FIRST) == plain
    more = {"actor.expert_parallel": 16, "actor.expert_tensor_parallel": 1, "engine.sglang.nodes": 2}
    found = options_of(SECOND)
    assert {name: found[name] for name in found.keys() - plain.keys()} == more
    assert found["actor.sequence_parallel"] is False and found["engine.replicas"] == 1


def test_a_layout_is_described_by_what_is_not_one():
    assert describe(FIRST.trainers.layout) == "TP 2 PP 3 CP 1 recompute none, 4096 tokens"
    assert describe(SECOND.trainers.layout) == "TP 1 PP 2 VPP 5 CP 4 EP 16 recompute full, 8192 tokens"


def test_a_recipe_keeps_its_long_lines_and_no_second_file_stays(tmp_path):
    recipe = tmp_path / "run.yaml"
    long = "a: '" + "x " * 200 + "y'\nactor:\nlist:\n  - 1\n"
    recipe.write_text(long)
    write_options(recipe, {"actor.recompute": "full", "actor.optimizer.learning_rate": 1.0})
    assert recipe.read_text() == long.replace(
        "actor:\n", "actor:\n  recompute: full\n  optimizer:\n    learning_rate: 1.0\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    with pytest.raises(ConfigError, match=r"run.yaml: got list: \[1\]; allowed: options below list; fix: list.x=2"):
        write_options(recipe, {"list.x": 2})


def test_rows_of_a_sync_from_shards_to_shards():
    balance = Balance(sent=(5_000_000_000, 3_000_000_000), received=(1_500_000_000, 500_000_000), links=3, floor=4.5e9)
    rows = [SyncRow("recipe", "1 2 1 1 1 1 to 2 x 2", balance, 0.08), SyncRow("1", "sizes", refused="no such")]
    assert [row.record() for row in rows] == [
        {
            "layout": "recipe",
            "sent_bytes": [5_000_000_000, 3_000_000_000],
            "received_bytes": [1_500_000_000, 500_000_000],
            "links": 3,
            "busiest_sender_over_mean": 1.25,
            "least_possible_over_mean": 1.125,
            "seconds_at_least": 0.08,
        },
        {"layout": "1", "refused": "no such"},
    ]
    lines = printed(sync_table(rows))
    assert lines[0].startswith("Weights from shards to shards (engine.sglang.sync=shards): bytes of one sync")
    assert "recipe 1 2 1 1 1 1 to 2 x 2 2 4.00 1.250 1.125 8 1.50 3 0.08" in lines and "1 sizes no such" in lines
    header = (
        "TP PP VPP CP DP EP to servers senders GB each busiest / mean least possible receivers GB each, at most links s"
    )
    assert header in lines
    assert any("│  1.250 │" in re.sub(" {6,}", "  ", line) for line in drawn(sync_table(rows))), "numbers stand right"
    assert drawn(sync_table(rows))[0][:7] == "Weights"
