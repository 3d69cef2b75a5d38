"""benchmarks/shard_model.py: the arithmetic of its model, and how near its predictions were in the recorded run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ours = ("shard_model", "sync_model", "bucket_receivers", "bucket_calls", "sglang_servers")
    import shard_model

    yield shard_model
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture
def recorded():
    return json.loads((ROOT / "benchmarks" / "results" / "shard_model.json").read_text())


def test_one_piece_is_summed_while_the_one_before_is_placed(model):
    mib = model.MIB
    parts = {"open": model.Piece(((1, 0.5),), 1.0), "wire": model.Piece(((mib, 2.0), (3 * mib, 6.0)), 1.5)}
    parts |= {"sum": model.Piece(((mib, 1.0), (3 * mib, 3.0)), 1.0)}
    parts |= {"place": model.Piece(((mib, 1.5), (3 * mib, 4.5)), 1.0)}
    # 0.5, 2 to sum the first, 3 times 4 on the wire, twice 3 to place and sum, 3 to place the last.
    assert model.predicted_s(2 * mib, 6 * mib, parts, 2) == pytest.approx(0.5 + 2 + 12 + 6 + 3)
    assert model.predicted_s(2 * mib, 6 * mib, parts, 1) == pytest.approx(0.5 + 2 + 12 + 2 * 5 + 3)
    assert model.predicted_s(2 * mib, 2 * mib, parts, 2) == pytest.approx(0.5 + 2 + 4 + 3)


def test_what_was_predicted_was_so_within_a_fifth(model, recorded):
    assert {row["piece_mib"] * model.MIB for row in recorded["syncs"]}.isdisjoint(model.FITTED)
    assert {row["receivers"] for row in recorded["syncs"]} == {1, 2, 3}
    for row in recorded["syncs"]:
        assert 0.8 <= row["predicted_s"] / row["measured_s"] <= 1.25
        parts = {name: model.Piece(**fields) for name, fields in recorded["pieces"][str(row["receivers"])].items()}
        again = model.predicted_s(row["piece_mib"] * model.MIB, row["model_mib"] * model.MIB, parts, recorded["cores"])
        assert again == pytest.approx(row["predicted_s"]), "of the pieces that stand beside it"
