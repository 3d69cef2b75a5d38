"""benchmarks/sync_model.py and shard_model.py: the arithmetic of their models, and how near their predictions were in
the recorded runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_daro.config import resolve
from megatron_daro.workshop.plan.gpus import find_gpu
from megatron_daro.workshop.plan.times import Constants

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ours = ("shard_model", "sync_model", "bucket_receivers", "bucket_calls", "sglang_servers", "plan_published")
    import sync_model

    yield sync_model
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def shard_model(model):
    import shard_model

    return shard_model


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@pytest.fixture
def recorded():
    return results("sync_model")


@pytest.mark.parametrize(
    ("chains", "crowded", "seconds"),
    [
        ([[(2.0, 1.0), (3.0, 2.0)]], 9.0, 5.0),  # alone nothing is in the way
        ([[(2.0, 1.0)], [(3.0, 1.0)]], 1.0, 3.0),
        (
            [[(2.0, 2.0)], [(1.0, 1.0)]],
            1.0,
            2.5,
        ),  # 1.5 times as long for 1 s of both, then 1 s of one
        ([[(2.0, 2.0)], [(1.0, 1.0)]], 2.0, 4.0),
        ([[(2.0, 1.0)], []], 3.0, 2.0),
        ([[(3.0, 3.0)]], 1.0, 4.5),
    ],
)
def test_what_runs_together_shares_the_cores(model, chains, crowded, seconds):
    assert model.together_s(chains, 2, crowded) == pytest.approx(seconds)


def test_crowding_is_what_the_two_that_it_was_learned_from_need(model):
    both = ((1.0, 1.0), (5.0, 1.5))
    crowded = model.crowding(6.5, both, 2)
    assert crowded > 1 and model.together_s([[part] for part in both], 2, crowded) == pytest.approx(6.5)
    assert model.crowding(5.0, both, 2) == 1.0


def test_a_sync_is_its_first_packing_and_then_stages_in_which_the_next_bucket_is_packed(model):
    mib = model.MIB
    piece = {name: model.Piece(((1 * mib, s), (3 * mib, 3 * s)), 1.0) for name, s in [("pack", 1), ("broadcast", 4)]}
    piece |= {"load": model.Piece(((1 * mib, 0.5), (3 * mib, 1.5)), 2.0), "calls": model.Piece(((1, 0.25),), 1.0)}
    piece["new pages"] = model.Piece(((1 * mib, 2.0), (3 * mib, 6.0)), 1.0)
    # Packed 2 + 4 s at first; each stage 0.25 + 8 + 1 s; the second bucket's 6 s and the third's 2 s lie within.
    assert model.predicted_s([2 * mib] * 3, piece, 2, 1.0) == pytest.approx(6 + 3 * 9.25)
    assert model.predicted_s([2 * mib] * 3, piece, 1, 1.0) == pytest.approx(6 + 3 * (8.25 + 2) + 6 + 2)


def test_what_was_predicted_was_so_within_a_fifth(model, recorded):
    assert {row["bucket_mib"] * model.MIB for row in recorded["syncs"]}.isdisjoint(model.FITTED)
    assert {row["receivers"] for row in recorded["syncs"]} == {1, 2, 3}
    for row in recorded["syncs"]:
        assert 0.8 <= row["predicted_s"] / row["measured_s"] <= 1.25
        pieces = dict(recorded["pieces"][str(row["receivers"])])
        crowded = pieces.pop("crowded")
        parts = {name: model.Piece(**fields) for name, fields in pieces.items()}
        sizes = [row["bucket_mib"] * model.MIB] * (row["model_mib"] // row["bucket_mib"])
        again = model.predicted_s(sizes, parts, recorded["cores"], crowded)
        assert again == pytest.approx(row["predicted_s"]), "of the pieces that stand beside it"


def test_all_recipes_are_in_the_recorded_run(recorded):
    recipes = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml"))
    assert [row["recipe"] for row in recorded["recipes"]] == recipes


def test_the_parts_of_a_recipe_come_from_its_bytes_and_the_data_sheet(model):
    import plan_published

    recipe, shape = resolve(ROOT / "examples/recipes/qwen2.5-math-7b.yaml"), plan_published.MODELS["qwen2.5-7b"]
    gpu, calls = find_gpu("h100-80g"), model.Calls(own_s=1e-3, answer_s=5e-3)
    parts = model.broadcast_parts(recipe, shape, gpu, calls, 256 * model.MIB)
    count = -(-2 * shape.num_parameters // (256 * model.MIB))
    sent = 2 * shape.num_parameters / 50e9
    assert parts["buckets"] == count and parts["wire"] == pytest.approx(sent) and parts["gather"] == 0
    assert parts["pack"] == pytest.approx(4 * shape.num_parameters / 3350e9)
    assert parts["load"] == pytest.approx(parts["pack"] / recipe.engine.sglang.tensor_parallel)
    assert parts["own calls"] == pytest.approx(count * 1e-3 * recipe.engine.replicas)
    sent += count * Constants().network_latency_s
    first = parts["pack"] / count + 2e-3 + 5e-3
    assert parts["total"] == pytest.approx(first + max(count * 7e-3, sent + parts["load"]))
    assert parts["in turn"] == pytest.approx(first + count * 7e-3 + sent)
    near = resolve(ROOT / "examples/recipes/qwen2.5-math-1.5b.yaml")
    assert model.broadcast_parts(near, shape, gpu, calls, 256 * model.MIB)["wire"] == pytest.approx(
        2 * shape.num_parameters / 450e9
    )


def test_one_piece_of_shards_is_summed_while_the_one_before_is_placed(shard_model):
    mib = shard_model.MIB
    parts = {"open": shard_model.Piece(((1, 0.5),), 1.0), "wire": shard_model.Piece(((mib, 2.0), (3 * mib, 6.0)), 1.5)}
    parts |= {"sum": shard_model.Piece(((mib, 1.0), (3 * mib, 3.0)), 1.0)}
    parts |= {"place": shard_model.Piece(((mib, 1.5), (3 * mib, 4.5)), 1.0)}
    # 0.5, 2 to sum the first, 3 times 4 on the wire, twice 3 to place and sum, 3 to place the last.
    assert shard_model.predicted_s(2 * mib, 6 * mib, parts, 2) == pytest.approx(0.5 + 2 + 12 + 6 + 3)
    assert shard_model.predicted_s(2 * mib, 6 * mib, parts, 1) == pytest.approx(0.5 + 2 + 12 + 2 * 5 + 3)
    assert shard_model.predicted_s(2 * mib, 2 * mib, parts, 2) == pytest.approx(0.5 + 2 + 4 + 3)


def test_what_was_predicted_of_shards_was_so_within_a_fifth(shard_model):
    recorded, mib = results("shard_model"), shard_model.MIB
    assert {row["piece_mib"] * mib for row in recorded["syncs"]}.isdisjoint(shard_model.FITTED)
    assert {row["receivers"] for row in recorded["syncs"]} == {1, 2, 3}
    for row in recorded["syncs"]:
        assert 0.8 <= row["predicted_s"] / row["measured_s"] <= 1.25
        pieces = recorded["pieces"][str(row["receivers"])]
        parts = {name: shard_model.Piece(**fields) for name, fields in pieces.items()}
        sizes = row["piece_mib"] * mib, row["model_mib"] * mib
        again = shard_model.predicted_s(*sizes, parts, recorded["cores"])
        assert again == pytest.approx(row["predicted_s"]), "of the pieces that stand beside it"
