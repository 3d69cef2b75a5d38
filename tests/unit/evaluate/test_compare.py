"""Two evaluations compared: numbers by hand, a test that errs as often as it says, a page that shows and escapes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from answering import digits, evaluated

from megatron_daro.cli import main
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import DataError
from megatron_daro.workshop.evaluate.compare import compare, sign_flip_p

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\"'&"


def rates(out: Path) -> dict[str, float]:
    import pyarrow.parquet as pq

    return {
        row["problem"]: row["correct"] / row["samples"] for row in pq.read_table(out / "problems.parquet").to_pylist()
    }


def test_differences_are_those_of_the_problems(tmp_path):
    one, two = (evaluated(tmp_path / name, digits(), seed=seed) for seed, name in enumerate("ab"))
    found = compare(one, two)
    a, b = rates(one), rates(two)
    avg, maj = found.lines
    assert (avg.set, avg.metric, avg.problems) == ("digits", "avg", 10) and maj.metric == "maj"
    assert avg.a == pytest.approx(np.mean(list(a.values()))) and avg.b == pytest.approx(np.mean(list(b.values())))
    assert avg.won == sum(b[key] > a[key] for key in a) > 0 and avg.lost == sum(b[key] < a[key] for key in a) > 0
    assert avg.low <= avg.difference <= avg.high and 0 < avg.p <= 1
    (remark,) = found.remarks
    assert "seed" in remark
    swapped = compare(two, one).lines[0]
    assert (swapped.difference, swapped.p, swapped.won) == (pytest.approx(-avg.difference), avg.p, avg.lost)
    same = compare(one, one).lines[0]
    assert (same.difference, same.low, same.high, same.p, same.won, same.lost) == (0, 0, 0, 1, 0, 0)


def test_only_common_problems_count_and_the_others_are_said(tmp_path):
    some = digits()
    one = evaluated(tmp_path / "a", digits(), digits("more"), seed=0)
    two = evaluated(tmp_path / "b", HeldOut(some.section, some.prompts[:6]), seed=1)
    found = compare(one, two)
    assert [line.problems for line in found.lines] == [6, 6]
    assert "14 problems" in found.remarks[0] and str(one) in found.remarks[0]
    other = evaluated(tmp_path / "c", digits("other"), seed=0)
    with pytest.raises(DataError, match=r"digits, more.*other"):
        compare(one, other)
    (other / "problems.parquet").unlink()
    with pytest.raises(DataError, match=str(other)):
        compare(one, other)


def test_the_permutation_test_counts_every_flip_of_a_few():
    values = np.array([0.5, 0.25, -0.125, 0.0, 0.5])
    observed = abs(values.mean())
    flips = [abs(np.mean(values * signs)) for signs in product((1, -1), repeat=5)]
    assert sign_flip_p([values], seed=0) == pytest.approx(np.mean([flip >= observed - 1e-12 for flip in flips]))
    assert sign_flip_p([np.zeros(5)], seed=0) == 1.0
    # Two sets: the statistic is the mean of the sets' means, so the small set weighs as much as the large one.
    small, large = np.array([1.0, 0.5]), np.array([0.25, -0.25, 0.25])
    observed = abs(small.mean() + large.mean())
    flips = [abs(np.mean(small * signs[:2]) + np.mean(large * signs[2:])) for signs in product((1, -1), repeat=5)]
    assert sign_flip_p([small, large], seed=0) == pytest.approx(np.mean([flip >= observed - 1e-12 for flip in flips]))


def test_the_permutation_test_errs_as_often_as_it_says():
    rng = np.random.default_rng(0)
    ps = [sign_flip_p([rng.normal(size=30)], seed=trial) for trial in range(100)]
    assert 0.01 <= np.mean(np.array(ps) < 0.1) <= 0.2
    assert sign_flip_p([rng.normal(1.0, 1.0, 60)], seed=0) < 0.001


def test_the_page_shows_problems_with_both_answers_and_escapes_every_text(tmp_path):
    def evil(held_out):
        prompts = tuple(
            replace(p, text=f"{EVIL} {p.id} \ud800", category=EVIL, alternatives=(EVIL,)) for p in held_out.prompts
        )
        return HeldOut(held_out.section, prompts)

    one = evaluated(tmp_path / "a<b>", evil(digits()), seed=0)
    two = evaluated(tmp_path / "b", evil(digits()), seed=1, tail=f"\n{EVIL}")
    found = compare(one, two)
    assert main(["eval", "--compare", str(one), str(two), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 3  # the figures, plotly and the page's own
    assert "onerror=alert(2)>" not in page and "\x1b" not in page and "<title>A a&lt;b&gt;" in page
    assert page.count('<details class="sample">') == found.lines[0].won + found.lines[0].lost
    (figures,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    points = json.loads(figures)[0]["data"][1]
    assert sum(int(text.split()[0]) for text in points["text"]) == 10


def test_a_set_of_one_problem_weighs_as_much_as_one_of_four():
    """Weighed by their sizes the two would cancel, and every flip would be as large: p = 1."""
    one, four = np.array([0.5]), np.array([-0.25, -0.25, 0.5, -0.25])
    sums = [abs(one @ signs[:1] + (four @ signs[1:]) / 4) for signs in product((1, -1), repeat=5)]
    p = np.mean([value >= 0.5 - 0.25 / 4 - 1e-12 for value in sums])
    assert sign_flip_p([one, four], seed=0) == pytest.approx(p) == 0.75
