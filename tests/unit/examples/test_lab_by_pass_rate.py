"""What the lab says of training at each pass rate: by hand, from metrics to the page and the tables of the docs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import by_pass_rate
import findings
import lab
import page
import pytest
import results
import smollm2_findings
import tiny_run
from results import Job, Outcome

MODEL = "smollm2"


def line(step, groups, *, trained, dropped, weights=None, losses=None, filtered=True):
    """A line of metrics of groups of four answers, 2 tokens if right and 3 if wrong."""
    row = {"step": step, "loss/total": 0.1, "policy/entropy": 1.0 / step}
    row |= {"rollout/groups_trained": trained, "rollout/groups_dropped": dropped}
    for k, count in enumerate(groups):
        row[f"difficulty/groups/{k}"] = count
        row[f"difficulty/tokens/{k}"] = 0 if filtered and k in (0, 4) else count * (2 * k + 3 * (4 - k))
        if 0 < k < 4 and count:
            row |= {f"difficulty/length_right/{k}": 2.0, f"difficulty/length_wrong/{k}": 3.0}
            row[f"difficulty/loss/{k}"] = row[f"difficulty/predicted_loss/{k}"] = (losses or {}).get(k, 0.1)
        if weights and 0 < k < 4:
            row[f"difficulty/weight/{k}"] = weights[k]
    return row


def _where(out, job):
    return tiny_run.run_directory(out / job.world, job.arm, job.learning_rate, job.seed)


@pytest.fixture
def ran(tmp_path):
    """A lab's folder with a run of each of three arms, and their outcomes."""
    outcomes = []
    for arm, weights in (("dapo", None), ("daro_shared_half_life", {1: 2.0, 2: 1.0, 3: 0.5}), ("grpo", None)):
        job = Job(MODEL, MODEL, arm, "compare", 0, 4e-5)
        folder = _where(tmp_path, job)
        folder.mkdir(parents=True)
        rows = [
            {"step": 0, "eval/numbers/accuracy": 0.2},
            line(1, [3, 1, 0, 1, 1], trained=2, dropped=1, weights=weights, losses={1: -0.3, 3: 0.1}),
            line(2, [0, 0, 2, 0, 4], trained=4, dropped=1, weights=weights),
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        records = [
            {"step": n, "answers": 8 * n, "tokens": 20 * n, "accuracy": 0.2 + n / 10, "bands": [0.2] * 13}
            | {"pass_at": [0.2], "weights": [1.0, 2.0, 1.0, 0.5, 1.0] if weights else [], "clamped": 0}
            for n in (0, 1, 2)
        ]
        outcomes.append(Outcome(job, records, ""))
    return tmp_path, outcomes


def test_steps_are_read_with_groups_that_were_left_over(ran):
    folder, outcomes = ran
    first, second = by_pass_rate.read_run(_where(folder, outcomes[1].job))
    assert (first.step, first.kept, first.dropped, first.entropy) == (1, 2, 1, 1.0)
    assert (second.kept, second.dropped, second.weight) == (2, 0, [None, 2.0, 1.0, 0.5, None])
    assert first.sampled() == [3, 1.5, 0, 1.5, 1], "one more was usable: half of it at each pass rate that was trained"
    assert by_pass_rate.group_shares([first, second]) == pytest.approx([x / 13 for x in (3, 1.5, 2, 1.5, 5)])


def test_where_nothing_is_filtered_the_groups_left_over_change_no_share(tmp_path):
    row = line(1, [2, 1, 0, 1, 4], trained=8, dropped=6, filtered=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    [step] = by_pass_rate.read_run(tmp_path)
    assert sum(step.sampled()) == 14 and by_pass_rate.group_shares([step]) == pytest.approx(
        [0.25, 0.125, 0, 0.125, 0.5]
    )


def test_pass_at_k_is_that_of_draws_without_replacement(ran):
    folder, outcomes = ran
    steps = by_pass_rate.read_run(_where(folder, outcomes[0].job))
    # 1, 2 and 3 right of four: two draws miss with 3/6, 1/6 and 0
    assert by_pass_rate.pass_at(steps[1:], 2) == pytest.approx((2 * (1 - 1 / 6) + 4) / 6)
    assert by_pass_rate.pass_at(steps[:1], 1) == pytest.approx((1.5 / 4 + 1.5 * 3 / 4 + 1) / 7)


def test_the_share_of_the_loss_has_weights_tokens_and_no_sign(ran):
    folder, outcomes = ran
    found = [by_pass_rate.read_run(_where(folder, o.job))[:1] for o in outcomes[:2]]
    # 11 and 9 tokens, |L| 0.3 and 0.1
    assert by_pass_rate.loss_shares("dapo", found[0])[1] == pytest.approx(3.3 / (3.3 + 0.9))
    assert by_pass_rate.loss_shares("daro_shared_half_life", found[1])[1] == pytest.approx(6.6 / (6.6 + 0.45))
    assert by_pass_rate.loss_shares("daro", found[1])[1] == pytest.approx(0.6 / (0.6 + 0.05)), (
        "no tokens: each bin's own"
    )
    assert by_pass_rate.divides_by_bin("daro") and not by_pass_rate.divides_by_bin("daro_shared")
    assert math.isnan(by_pass_rate.loss_shares("dapo", [_still()])[1])


def _still():
    nothing = [None] * 5
    return by_pass_rate.Step(1, 1.0, 0, 0, [0.0] * 5, [0.0] * 5, nothing, nothing, nothing, nothing, nothing)


def test_lengths_are_means_over_groups(ran):
    folder, outcomes = ran
    steps = by_pass_rate.read_run(_where(folder, outcomes[0].job))
    assert [by_pass_rate.mean_length(steps, 3, verdict) for verdict in ("right", "wrong")] == [2.0, 3.0]
    assert math.isnan(by_pass_rate.mean_length(steps[1:], 3, "right"))
    assert by_pass_rate.largest_error({"dapo": {0: steps}}) == 0.0


def test_steps_go_into_a_file_beside_the_results_and_onto_the_page(ran, tmp_path, capsys):
    folder, outcomes = ran
    results.write(folder, outcomes, {})
    by_pass_rate.write(folder, outcomes)
    read = by_pass_rate.read(folder)[MODEL]
    assert list(read) == ["dapo", "daro_shared_half_life", "grpo"] and [s.step for s in read["dapo"][0]] == [1, 2]
    more = tmp_path / "more"
    more.mkdir()
    by_pass_rate.write(more, [], beside=folder)
    assert by_pass_rate.read(more) == by_pass_rate.read(folder), "an arm that is there stays"
    shown = page.write_page(folder, tmp_path / "lab.html").read_text()
    assert "Share of the loss by pass rate: daro_shared_half_life" in shown and "pass@k of new problems" in shown
    (tmp_path / "page.md").write_text("before\n<!-- smollm2 findings -->\n<!-- end of smollm2 findings -->\nafter\n")
    assert smollm2_findings.main([str(folder), "--docs", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    assert "dapo, last quarter" in text and text.startswith("before") and text.endswith("after\n")


def test_the_page_of_the_docs_has_the_tables_of_the_results():
    root = Path(smollm2_findings.__file__).resolve().parents[2]
    folder = root / "examples/lab/results/smollm2"
    tables, outcomes, _ = findings.compared_worlds(folder)
    wanted = smollm2_findings.report(outcomes, tables[MODEL], by_pass_rate.read(folder)[MODEL])
    _, _, rest = (root / "docs/lab_smollm2.md").read_text().partition(smollm2_findings.MARKS[0] + "\n")
    assert rest.partition(smollm2_findings.MARKS[1])[0] == wanted


def test_without_run_directories_there_is_no_file_and_no_plot(tmp_path):
    outcomes = [Outcome(Job("closed", "skewed", "grpo", "compare", 0, 0.1), [], "")]
    by_pass_rate.write(tmp_path, outcomes)
    assert by_pass_rate.read(tmp_path) == {} and not list(tmp_path.iterdir())
    assert "by_pass_rate" in lab.run_lab.__code__.co_names
