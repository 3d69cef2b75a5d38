"""Scores from kept answers: votes, difficulty, files; what is missing or impossible is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from answering import SeededEngine, digits, scored
from pydantic import ValidationError

from megatron_daro.errors import DataError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.evaluate import identity, results
from megatron_daro.workshop.evaluate.tables import summary_text
from megatron_daro.workshop.evaluate.votes import Sample, votes_of


def test_scores_follow_from_the_answers(tmp_path):
    sets = [digits(samples=8), digits("unlabelled", samples=4, level=False)]
    found = scored(tmp_path, *sets)
    summary = results.summarise(found, sets, (1, 4), seed=0)
    results.write(tmp_path, summary, found)
    table = pq.read_table(tmp_path / "problems.parquet").to_pylist()
    for name, samples in (("digits", 8), ("unlabelled", 4)):
        rows = [row for row in table if row["set"] == name]
        assert [row["samples"] for row in rows] == [samples] * 10
        rate = sum(row["correct"] for row in rows) / (10 * samples)
        metrics = summary["sets"][name]["metrics"]
        assert metrics[f"avg@{samples}"]["mean"] == pytest.approx(rate) == metrics["pass@1"]["mean"]
        assert metrics["pass@4"]["mean"] >= rate and metrics["pass@4"]["low"] <= metrics["pass@4"]["high"]
    # "0" is always right, and the digits are harder the larger they are.
    assert table[0]["correct"] == 8 and table[0]["majority"] == "0" and table[0]["majority_right"] == 1.0
    by_level = summary["sets"]["digits"]["by_level"]
    assert [(row["by"], row["level"], row["problems"]) for row in by_level] == [("level", "0", 5), ("level", "1", 5)]
    assert by_level[0]["accuracy"] > by_level[1]["accuracy"]
    measured = summary["sets"]["unlabelled"]["by_level"]
    assert {row["by"] for row in measured} == {"pass rate"} and sum(row["problems"] for row in measured) == 10
    assert summary["mean"]["pass@1"]["mean"] == pytest.approx(
        sum(summary["sets"][name]["metrics"]["pass@1"]["mean"] for name in ("digits", "unlabelled")) / 2
    )
    assert "avg@8" not in summary["mean"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    text = summary_text(summary)
    assert "pass@4" in text and "unlabelled" in text and f"{by_level[0]['accuracy']:.1%}" in text


def test_templates_are_compared_and_never_averaged(tmp_path):
    sets = [digits("a.none", samples=4, template="none"), digits("a.r1", samples=4, template="r1")]
    sets += [digits("b.none", samples=2, template="none")]
    summary = results.summarise(scored(tmp_path, *sets), sets, (1,), seed=0)
    of_sets, templates = summary["sets"], summary["templates"]
    assert not summary["mean"] and list(templates) == ["none", "r1"]
    rates = [of_sets[name]["metrics"]["pass@1"]["mean"] for name in ("a.none", "b.none")]
    assert templates["none"]["metrics"]["pass@1"]["mean"] == pytest.approx(sum(rates) / 2)
    assert templates["r1"]["metrics"]["pass@1"] == of_sets["a.r1"]["metrics"]["pass@1"]
    assert templates["r1"]["behaviour"]["without_answer"] == 1.0  # no tags, so nothing is verified


def test_how_answers_end_and_reflect(tmp_path):
    class Said(SeededEngine):
        """Of four answers: a plain one, one that reflects, one that runs on with code, one without an answer."""

        def rollout(self, request, index):
            one, d = super().rollout(request, index), request.prompt.answer
            text = [f"#### {d}", f"Let me Double-Check. #### {d}", f"```python\n1\n``` #### {d}", "reconsider"][index]
            cut = "length" if d == "0" else "repetition"
            return replace(one, text=text, finish_reason=cut if index == 2 else "stop")

    held_out = digits(samples=4)
    found = scored(tmp_path, held_out, engine=Said())
    assert results.summarise(found, [held_out], (1,), seed=0)["sets"]["digits"]["behaviour"] == {
        "answered": 0.5, "ran_on": 0.25, "cut_off": 0.0, "without_answer": 0.25, "code": 0.25, "reflecting": 0.5,
        "reflecting_problems": 1.0, "accuracy_reflecting": 0.5, "accuracy_others": 1.0,
    }  # fmt: skip


def test_missing_answers_are_no_score(tmp_path):
    with pytest.raises(DataError, match="10 of 40"):
        scored(tmp_path, digits(samples=4), engine=SeededEngine(aborted=(2,)))


def test_k_beyond_the_samples_is_refused():
    results.check_k([digits(samples=4).section], (1, 4))
    with pytest.raises(DataError, match=r"--k: got 8.*digits"):
        results.check_k([digits(samples=4).section], (4, 8))
    with pytest.raises(ValidationError):
        digits(samples=0)


def test_equal_answers_in_other_notation_vote_together():
    halves = [Sample("\\frac12", False), Sample("0.5", False), Sample("3", False), Sample(None, False)]
    right = [Sample("7", True), Sample("\\frac{14}{2}", True)]
    with RewardPool("math", workers=1) as pool:
        one, two = asyncio.run(votes_of([halves + right, halves], pool, verifier="math"))
        plain = asyncio.run(votes_of([halves], pool, verifier="exact"))
    assert one.classes == (0, 0, 1, -1, 2, 2) and one.right == 2 and one.answers == ("\\frac12", "3", "7")
    assert two.classes == (0, 0, 1, -1) and two.right is None
    assert plain[0].classes == (0, 1, 2, -1)


def sets_of(**changes):
    return {"digits": {"file": "ab", "template": "chat", "samples": 4, **changes}}


def test_a_directory_takes_one_evaluation(tmp_path):
    first = {"weights": {"files": {"model.safetensors": "1"}}, "tokenizer": {"tokenizer.json": "2"}, "sets": sets_of()}
    identity.check_or_write(tmp_path, {**first, "notes": {"model": "a"}})
    more = {**first, "sets": sets_of(samples=8) | {"other": {"file": "cd"}}, "notes": {"model": "b"}}
    identity.check_or_write(tmp_path, more)
    assert identity.read(tmp_path)["sets"].keys() == {"digits", "other"}
    identity.check_or_write(tmp_path, first)
    assert identity.read(tmp_path)["sets"].keys() == {"digits", "other"}
    for changes, named in (
        ({"tokenizer": {"tokenizer.json": "3"}}, "tokenizer.json"),
        ({"weights": {"files": {"model.safetensors": "9"}}}, "model.safetensors"),
        ({"sets": sets_of(template="r1")}, "digits template"),
    ):
        with pytest.raises(DataError, match=named):
            identity.check_or_write(tmp_path, {**first, **changes})
    with pytest.raises(DataError, match="nowhere"):
        identity.read(tmp_path / "nowhere")
