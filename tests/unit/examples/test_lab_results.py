"""The lab's statistics by hand, its command, and its page."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import arms
import contrasts
import findings
import lab
import psutil
import pytest
import results
import smollm2_findings
from results import Interval, Job, Outcome

from megatron_daro.errors import ConfigError, DataError

pytestmark = pytest.mark.slow


def outcome(arm, seed, accuracies, *, purpose="compare", rate=0.1, ended="", world="skewed", answers=10):
    """A run with an evaluation every ten steps."""
    records = [
        {
            "step": 10 * i,
            "answers": answers * i,
            "accuracy": a,
            "bands": [a],
            "pass_at": [a],
            "weights": [],
            "clamped": 0,
        }
        for i, a in enumerate(accuracies)
    ]
    return Outcome(Job("closed", world, arm, purpose, seed, rate), records, ended)


def test_steps_are_counted_between_evaluations_by_straight_line():
    run = outcome("daro", 0, [0.2, 0.4, 0.3, 0.6], answers=50)
    assert [run.steps_to(0.3), run.steps_to(0.3, "answers"), run.steps_to(0.5)] == pytest.approx([5.0, 25.0, 80 / 3])
    assert run.steps_to(0.1) == 0.0 and run.steps_to(0.7) == math.inf


def test_p_values_and_their_correction():
    """Student's t against its tables (9 degrees: 2.262 is 5 %, 3.250 is 1 %); Benjamini-Hochberg by hand."""
    unit = [sign * math.sqrt(0.9) for sign in (1, -1) * 5]  # their standard deviation is 1
    for t, p in ((2.262, 0.05), (3.250, 0.01)):
        assert results.p_value([value + t / math.sqrt(10) for value in unit]) == pytest.approx(p, rel=2e-3)
    assert results.benjamini_hochberg([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])


def test_accuracy_is_averaged_over_tokens_up_to_where_the_first_of_two_ends():
    def run(accuracies, tokens):
        records = [{"accuracy": a, "tokens": t} for a, t in zip(accuracies, tokens, strict=True)]
        return Outcome(Job("smollm2", "smollm2", "daro", "compare", 0, 0.1), records, "")

    short, long = run([0.2, 0.4, 0.6], [0, 100, 300]), run([0.2, 0.4, 1.0], [0, 200, 400])
    assert short.mean_accuracy(300, "tokens") == pytest.approx((0.3 * 100 + 0.5 * 200) / 300)
    assert long.mean_accuracy(300, "tokens") == pytest.approx((0.3 * 200 + 0.55 * 100) / 300)
    found = results.difference_over_tokens({0: long, 1: short}, {0: short, 2: short})
    assert found.mean == pytest.approx((0.3 * 200 + 0.55 * 100 - 0.3 * 100 - 0.5 * 200) / 300)
    ended = Outcome(short.job, short.records, "diverged")
    assert math.isnan(results.difference_over_tokens({0: ended}, {0: short}).mean)


def test_intervals_are_those_of_students_t():
    found = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    reach = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.high - 3.0, 3.0 - found.low) == pytest.approx((3.0, reach, reach))
    alone = Interval.of([2.0])
    assert alone.mean == 2.0 and math.isnan(alone.low)
    assert math.isnan(Interval.of([1.0, math.nan]).mean)


def test_differences_and_ratios_are_taken_seed_by_seed():
    baseline = {s: outcome("grpo", s, [0.2, 0.3, 0.4 + s / 10]) for s in (0, 1)}
    faster = {s: outcome("daro", s, [0.2, 0.4 + s / 10, 0.6]) for s in (0, 1)}
    assert results.difference(faster, baseline).mean == pytest.approx((0.2 + 0.1) / 2)
    assert results.ratios_to_baseline(faster, baseline) == pytest.approx([0.5, 0.5])
    assert results.ratios_to_baseline(baseline, baseline) == [1.0, 1.0]


def test_the_rate_with_the_best_mean_wins_and_one_that_diverges_is_out():
    tuned = [
        outcome("grpo", 1000, [0.2, 0.5], purpose="tune", rate=0.1),
        outcome("grpo", 1001, [0.2, 0.3], purpose="tune", rate=0.1),
        outcome("grpo", 1000, [0.2, 0.45], purpose="tune", rate=0.2),
        outcome("grpo", 1001, [0.2, 0.45], purpose="tune", rate=0.2),
        outcome("grpo", 1000, [0.2, 0.9], purpose="tune", rate=0.4),
        outcome("grpo", 1001, [0.2], purpose="tune", rate=0.4, ended="diverged after step 3"),
        outcome("dapo", 1000, [0.2], purpose="tune", rate=0.4, ended="diverged"),
        outcome("dapo", 1000, [0.2], purpose="tune", rate=0.2, ended="diverged"),
    ]
    assert results.best_rates(tuned) == {("skewed", "grpo"): 0.2, ("skewed", "dapo"): 0.2}


def test_arms_that_diverge_are_rows_that_say_so():
    arms = {
        "grpo": {0: outcome("grpo", 0, [0.2, 0.4])},
        "daro": {0: outcome("daro", 0, [0.2], ended="diverged after step 0: the gradient is not finite")},
        "dapo": {0: outcome("dapo", 0, [0.2, 0.1])},
    }
    rows = {row[0]: row for row in findings.table(arms, [0.1, 0.2])}
    assert rows["daro"][1] == "1 of 1 diverged" and rows["daro"][3] == "diverged"
    assert rows["dapo"][1] == "1 of 1 worse than before training" and rows["grpo"][1:3] == ["", "<0.1"]
    assert findings.verdict("skewed", arms) == ["skewed", *["-"] * 6]


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ([0.2, 0.5, 0.6], "reached"),
        ([0.2, 0.3, 0.42], "not fast enough"),
        ([0.2, 0.41, 0.41], "fast, but worse than the rival"),
        ([0.2, 0.3, 0.3], "missed"),
    ],
)
def test_the_goal_is_speed_and_not_being_worse_than_the_best_rival(curve, said):
    shift = {0: 0.0, 1: 0.001}
    arms = {
        "grpo": {s: outcome("grpo", s, [0.2, 0.3, 0.4 + d]) for s, d in shift.items()},
        "dapo": {s: outcome("dapo", s, [0.2, 0.3, 0.42 + d]) for s, d in shift.items()},
        "daro": {s: outcome("daro", s, [*curve[:2], curve[2] + d]) for s, d in shift.items()},
    }
    assert findings.verdict("skewed", arms)[-1] == said


def test_a_learning_rate_alone_is_shown_beside_the_arms_and_is_no_rival():
    arms = {
        "grpo": {0: outcome("grpo", 0, [0.2, 0.3, 0.4])},
        "grpo@0.2": {0: outcome("grpo@0.2", 0, [0.2, 0.4, 0.45])},
        "daro": {0: outcome("daro", 0, [0.2, 0.4, 0.43])},
    }
    row = findings.verdict("skewed", arms)
    assert row[2:5] == ["0.50 [0.50, 0.50] (daro)", "0.50 [0.50, 0.50] (grpo@0.2)", "grpo"]
    tuned = [outcome("grpo", 1000, [0.2, rate], purpose="tune", rate=rate) for rate in (0.02, 0.04, 0.08)]
    jobs = lab.Plan(("grpo",), ("skewed",), 2).comparison(tuned)
    assert [(j.arm, j.learning_rate, j.seed) for j in jobs] == [
        ("grpo", 0.08, 0), ("grpo", 0.08, 1),
        ("grpo@0.02", 0.02, 0), ("grpo@0.02", 0.02, 1), ("grpo@0.04", 0.04, 0), ("grpo@0.04", 0.04, 1),
    ]  # fmt: skip


def test_fresh_seeds_at_the_rates_of_an_earlier_search(quick, tmp_path, monkeypatch):
    earlier, options = quick
    ran = []
    monkeypatch.setattr(lab, "run_job", lambda job, *_: ran.append(job) or outcome(job.arm, job.seed, [0.2, 0.4]))
    more = ["--first-seed", "7", "--rates", str(earlier), "--out", str(tmp_path / "out")]
    assert lab.main([*options[:-2], *more]) == 0
    assert {(job.purpose, job.seed) for job in ran} == {("compare", 7), ("compare", 8)}
    best = results.best_rates(results.read(earlier)[0])
    assert {job.learning_rate for job in ran if job.arm == "daro"} == {best["skewed", "daro"]}


def test_further_arms_beside_results_that_stay_as_they_are(quick, tmp_path):
    earlier, options = quick
    out = tmp_path / "out"
    more = ["--arms", "grpo,ppo", "--rates", str(earlier), "--beside", str(earlier), "--out", str(out)]
    assert lab.main([*options[:-4], *more]) == 0
    (before, _), (after, note) = results.read(earlier), results.read(out)
    assert after[: len(before)] == before
    assert {o.job.arm for o in after[len(before) :]} == {"ppo"} and "--arms grpo,ppo" in note["command"]
    assert json.loads(note["dials"])["skewed"]["steps"] == 20


def test_what_is_written_is_read(tmp_path):
    ran = [outcome("grpo", 0, [0.123456789, 0.4]), outcome("daro", 1000, [0.2, 0.5], purpose="tune", ended="diverged")]
    results.write(tmp_path, ran, {"command": "me"})
    found, note = results.read(tmp_path)
    assert note["command"] == "me" and [o.job for o in found] == [o.job for o in ran]
    assert [r["accuracy"] for r in found[0].records] == [0.1235, 0.4] and found[0].records[-1]["bands"] == [0.4]
    assert len(found[1].records) == 1 and found[1].ended == "diverged"
    with pytest.raises(DataError, match="nothing"):
        results.read(tmp_path / "nothing")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick lab of two arms in one process."""
    out = tmp_path_factory.mktemp("lab") / "out"
    options = ["--quick", "--processes", "1", "--worlds", "skewed", "--arms", "grpo,daro", "--out", str(out)]
    assert lab.main(options) == 0
    return out, options


def test_a_quick_lab_leaves_results_and_a_page(quick):
    out, _ = quick
    found, note = results.read(out)
    assert {o.job.arm for o in found} == {"grpo", "daro"} and json.loads(note["dials"])["skewed"]["steps"] == 20
    compared = results.compared(found, "skewed")
    assert {arm: sorted(runs) for arm, runs in compared.items()} == {"grpo": [0, 1], "daro": [0, 1]}
    page = (out / "lab.html").read_text()
    assert "Weights of daro" in page and "Weights of grpo" not in page and "Accuracy by difficulty" in page
    assert page.count('class="plot"') == 5


def test_a_lab_that_is_repeated_runs_nothing_and_writes_the_same(quick, monkeypatch):
    out, options = quick
    before = {name: (out / name).read_bytes() for name in (results.CURVES, results.DETAILS, "lab.html")}
    monkeypatch.setattr(lab, "run_job", lambda *_: pytest.fail("it was run again"))
    assert lab.main(options) == 0
    assert {name: (out / name).read_bytes() for name in before} == before


def test_a_finished_run_is_used_only_while_its_dials_are_the_same(quick):
    out, _ = quick
    store, (_, plan) = lab.Store(out), lab.parse(["--quick"])
    job, dials = plan.tuning()[0], plan.dials("skewed")
    assert store.get(job, dials) is not None
    again = lab.run_job(job, dials, out)
    store.put(again, dials)
    assert lab.Store(out).get(job, dials) == again, "a run is the same whether it was read or has just ended"
    assert store.get(job, lab.dataclasses.replace(dials, wrong_length=1.0)) is None


def test_the_page_of_results_that_are_there(quick, tmp_path):
    out, _ = quick
    assert lab.main(["--page", str(out), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "lab.html").read_bytes() == (out / "lab.html").read_bytes()


def test_tuning_seeds_are_not_those_of_the_comparison_and_every_arm_has_the_same_budget():
    _, plan = lab.parse([])
    jobs = plan.tuning()
    budget = {(j.world, j.arm): 0 for j in jobs}
    for job in jobs:
        budget[job.world, job.arm] += 1
    single = [world for world in plan.worlds if len(lab.WORLDS[world].rates) == 1]
    for world in set(plan.worlds) - set(single):
        expected = len(lab.WORLDS[world].rates) * len(lab.WORLDS[world].tuning_seeds)
        assert {budget[world, arm] for arm in plan.arms_in(world)} == {expected}
    assert single == ["chains_ladder"] and not {job.world for job in jobs} & set(single)
    _, ladder = lab.parse(["--worlds", *single])
    found = {(job.arm, job.learning_rate) for job in ladder.comparison([])}
    assert found == {(arm, 2e-4) for arm in (arms.BASELINE, *arms.LADDER)}, "no search, so no control either"
    assert not {j.seed for j in jobs} & set(range(plan.seeds)) and plan.seeds == 5 and len(plan.arms) >= 11


def test_controls_asked_for_by_name_take_the_place_of_the_baselines():
    _, plan = lab.parse(["--arms", "dapo", "--worlds", "skewed", "--seeds", "2", "--controls", "dapo@0.08,grpo@0.04"])
    tuned = [outcome(arm, 1000, [0.1, 0.9], purpose="tune", rate=0.04) for arm in plan.arms]
    found = [(job.arm, job.seed, job.learning_rate) for job in plan.comparison(tuned)]
    own = [(arm, seed, 0.04) for arm in ("grpo", "dapo") for seed in (0, 1)]
    assert found == [*own, ("dapo@0.08", 0, 0.08), ("dapo@0.08", 1, 0.08)], "grpo@0.04 is grpo"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arms", "grpo,dapo", "--controls", "dapo@0.5"], "--controls: got dapo@0.5"),
        (["--arms", "grpo,dapo", "--controls", "grpo@0.05,daro@0.05"], "--controls: got daro@0.05"),
        (["--arms", "grpo,dapo", "--controls", "dapo@fast"], "--controls: got dapo@fast"),
        (["--arms", "grpo,gpro"], "--arms: got gpro"),
        (["--worlds", "flat"], "--worlds: got flat"),
        (["--seeds", "-1"], "--seeds, --processes: got -1"),
        (["--first-seed", "996"], "--first-seed: got 996"),
        (["--page", "nowhere"], "nowhere"),
    ],
)
def test_what_is_asked_wrongly_is_refused_before_anything_starts(options, words, tmp_path, capsys):
    assert lab.main([*options, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    with pytest.raises(ConfigError):
        lab.parse(["--arms", ","])


ROOT = Path(findings.__file__).resolve().parents[2]
RESULTS = ROOT / "examples/lab/results"


@pytest.mark.parametrize(
    ("page", "marks", "main", "folder", "option"),
    [
        ("docs/lab.md", contrasts.MARKS, contrasts.main, "", "--into"),
        ("examples/lab/comparison.md", findings.MARKS, findings.main, "", "--into"),
        ("examples/lab/comparison.md", findings.AGAINST_MARKS, findings.main, "fresh_seeds", "--against"),
        ("examples/lab/smollm2.md", smollm2_findings.MARKS, smollm2_findings.main, "smollm2", "--into"),
    ],
)
def test_the_pages_have_the_tables_of_the_results(page, marks, main, folder, option, tmp_path):
    text = (ROOT / page).read_text()
    before, _, rest = text.partition(marks[0] + "\n")
    copy = tmp_path / "page.md"
    copy.write_text(f"{before}{marks[0]}\n{marks[1]}{rest.partition(marks[1])[2]}")
    assert main([str(RESULTS / folder), option, str(copy)]) == 0
    assert copy.read_text() == text


def test_the_page_of_runs_with_a_language_model_has_kinds_of_problems_and_tokens(tmp_path):
    assert lab.main(["--page", str(RESULTS / "smollm2"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "lab.html").read_text()
    assert "Held-out accuracy by tokens generated" in page and "kind of problem" in page


@pytest.mark.slow
def test_workers_end_with_the_lab_when_it_is_terminated(tmp_path):
    command = [sys.executable, lab.__file__, "--arms", "grpo,daro", "--worlds", "skewed", "--processes", "2"]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen([*command, "--out", str(tmp_path / "out")], stdout=log, stderr=log)
    try:
        workers = _eventually(lambda: _busy_workers(running.pid), "two workers with a run each", tmp_path / "log")
        running.terminate()
        assert running.wait(60) == -signal.SIGTERM
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive, f"still there: {alive}"
    finally:
        running.kill()
        running.wait()


def _busy_workers(lab_pid: int) -> list[psutil.Process]:
    """The lab's workers, once there are two that have worked for two seconds."""
    children = psutil.Process(lab_pid).children()
    busy = [one for one in children if "spawn_main" in " ".join(one.cmdline()) and one.cpu_times().user > 2]
    return busy if len(busy) == 2 else []


def _eventually(look, what: str, log: Path):
    end = time.monotonic() + 120
    while not (found := look()):
        assert time.monotonic() < end, f"no {what}: {log.read_text()}"
        time.sleep(0.1)
    return found
