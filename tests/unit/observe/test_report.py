"""The HTML report: what its plots hold, what it survives, and that text from a model stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_of_report import Page, report_of
from synthetic_run import HOSTILE_TEXTS, write_rollouts, write_synthetic_run

from megatron_daro.cli import main
from megatron_daro.observe import MetricsLog, read_metrics
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder, read_groups
from megatron_daro.types import Group, Prompt, Rollout, TurnReport, Verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_synthetic_run(tmp_path_factory.mktemp("runs") / "syn<b>run", steps=200, hostile=True)


@pytest.fixture(scope="module")
def report(run):
    return report_of(run)


def test_the_page_needs_no_network(report):
    assert [e for e in report.elements if {"src", "href", "srcset", "data"} & set(e[1])] == []
    assert report.scripts[1].count("plotly.js v") == 1 and len(report.text) < 3_000_000


def test_the_policy_allows_exactly_the_scripts_of_the_page(report):
    policy = next(a["content"] for tag, a in report.elements if a.get("http-equiv") == "Content-Security-Policy")
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in report.scripts[1:]]
    assert policy.split("script-src ")[1].split() == [f"'sha256-{h}'" for h in hashes]
    assert policy.startswith("default-src 'none';")


def test_heat_maps_hold_the_recorded_numbers(run, report):
    rows = [r for r in read_metrics(run) if r["step"] > 0]
    loss = report.figures["Loss L_k by pass rate"]["data"][0]
    assert loss["y"] == [1, 2, 3, 4, 5, 6, 7], "bins 0 and K carry no signal"
    assert loss["x"] == [r["step"] for r in rows]
    for k in loss["y"]:
        expected = [r.get(f"difficulty/loss/{k}") for r in rows]
        assert [v is None for v in loss["z"][k - 1]] == [v is None for v in expected]
        assert [v for v in loss["z"][k - 1] if v is not None] == pytest.approx(
            [v for v in expected if v is not None], rel=1e-4
        )
    weight = report.figures["Weight w_k by pass rate"]["data"][0]
    assert weight["z"][2][100] == pytest.approx(math.log2(rows[100]["difficulty/weight/3"]), rel=1e-3)
    assert weight["customdata"][2][100] == pytest.approx(rows[100]["difficulty/weight/3"], rel=1e-4)


@pytest.mark.parametrize(
    ("title", "family"), [("Token share by pass rate", "tokens"), ("Group share by pass rate", "groups")]
)
def test_shares_of_a_step_add_up_to_one(run, report, title, family):
    share = report.figures[title]["data"][0]
    for column in zip(*share["z"], strict=True):
        assert sum(column) == pytest.approx(1, abs=1e-4)
    row = next(r for r in read_metrics(run) if r["step"] == 1)
    total = sum(row[f"difficulty/{family}/{k}"] for k in range(9))
    assert share["z"][5][0] == pytest.approx(row[f"difficulty/{family}/5"] / total, rel=1e-4)


def test_measured_and_predicted_loss_are_means_over_a_quarter(run, report):
    rows = [r for r in read_metrics(run) if r["step"] > 150]
    traces = report.traces("Measured against predicted L_k")
    for name, family in (("measured, last quarter", "loss"), ("predicted, last quarter", "predicted_loss")):
        values = [r[f"difficulty/{family}/4"] for r in rows if f"difficulty/{family}/4" in r]
        assert traces[name][1][3] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_length_against_pass_rate_is_tokens_per_rollout(run, report):
    rows = [r for r in read_metrics(run) if 0 < r["step"] <= 50]
    trace = report.figures["Length against pass rate"]["data"][0]
    rights = [r["difficulty/length_right/2"] for r in rows if "difficulty/length_right/2" in r]
    wrongs = [r["difficulty/length_wrong/2"] for r in rows if "difficulty/length_wrong/2" in r]
    mean = (2 * sum(rights) + 6 * sum(wrongs)) / len(rights) / 8
    assert trace["x"] == [1, 2, 3, 4, 5, 6, 7] and trace["y"][1] == pytest.approx(mean, rel=1e-4)


def test_right_and_wrong_lengths_over_time_weigh_bins_by_their_answers(tmp_path):
    metrics = {f"difficulty/groups/{k}": g for k, g in enumerate([5, 2, 0, 1, 9])}
    metrics |= {"difficulty/length_right/1": 10, "difficulty/length_right/3": 40}
    metrics |= {"difficulty/length_wrong/1": 100, "difficulty/length_wrong/3": 20, "response/length_mean": 50}
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, metrics)
    figure = report_of(tmp_path).figures["Response length"]
    traces = {trace["name"].split(",")[0]: trace["y"] for trace in figure["data"]}
    # Two groups of bin 1 and one of bin 3, K = 4: right 2 x 1 and 1 x 3 answers, wrong 2 x 3 and 1 x 1.
    assert traces["right"] == [pytest.approx((2 * 10 + 3 * 40) / 5)]
    assert traces["wrong"] == [pytest.approx((6 * 100 + 1 * 20) / 7, rel=1e-4)]


def test_the_headline_says_before_and_after(run, report):
    accuracies = [r[key] for r in read_metrics(run) if (key := "eval/arithmetic/accuracy/4") in r]
    first, last = accuracies[0], accuracies[-1]
    for fact in (f"{first:.1%}", f"{last:.1%}", f"{(last - first) * 100:+.1f}", "200 of 200"):
        assert fact in report.visible
    assert "going on" not in report.visible


def test_answers_of_the_first_middle_and_last_step_are_shown(report):
    assert report.steps_with_samples == ["1", "100", "200"]


def test_text_from_a_model_adds_no_element_no_attribute_and_no_control_character(run, report):
    calm = report_of(write_synthetic_run(run.parent / "plain", steps=200))
    assert {tag for tag, _ in report.elements} == {tag for tag, _ in calm.elements}
    assert [a for _, a in report.elements if any(name.startswith("on") for name in a)] == []
    assert len(report.scripts) == len(calm.scripts)
    page_text = report.text.replace(report.packed, "")
    assert {c for c in page_text if ord(c) < 32} == {"\n"}
    assert not set(page_text) & set("\x7f\u202e\u2028\ud800")
    assert "\\x1b[31mred" in report.visible and HOSTILE_TEXTS[1] in report.visible


def test_hostile_metric_names_and_configuration_stay_text(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.5, f"eval/a/accuracy/{HOSTILE_TEXTS[0]}": 0.5, "\x1b[31mred": 1.0})
    (tmp_path / "config.yaml").write_text(f"note: |\n  {HOSTILE_TEXTS[0]}\n  \x1b]0;owned\x07\n")
    parsed = report_of(tmp_path)
    assert len(parsed.scripts) == 3
    assert {tag for tag, _ in parsed.elements}.isdisjoint({"img", "a", "iframe"})
    assert {c for c in parsed.text.replace(parsed.packed, "") if ord(c) < 32} == {"\n"}
    assert "\\x1b]0;owned\\x07" in parsed.visible and "\\x1b[31mred" in parsed.visible


def _chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    return pytest.skip("no Chromium here: the page was not opened in a browser")


def test_a_browser_draws_every_plot_and_runs_nothing_else(run, report, tmp_path):
    path = run / "report.html"
    command = [_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    (tmp_path / "drawn.html").write_text(done.stdout)
    drawn = [a for tag, a in Page(tmp_path / "drawn.html").elements if "js-plotly-plot" in (a.get("class") or "")]
    assert len(drawn) == len(report.figures) > 20
    title = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    assert title == "syn&lt;b&gt;run · daro", "no script of a model's answer changed the title"


def test_a_critics_values_and_advantages_are_means_over_a_quarter(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 9):
            by_bin = {f"critic/{n}/{k}": 10.0 * k + step for n in ("value", "target", "advantage") for k in (0, 2)}
            tenths = {f"critic/value_{side}/{i}": i + step for side in ("right", "wrong") for i in (0, 9)}
            fit = {"critic/value_mean": 0.0, "critic/explained_variance": 0.1 * step, "difficulty/groups/2": 1}
            log.write(step, by_bin | tenths | fit)
    page = report_of(tmp_path)
    explained, values, positions, advantages = (
        page.traces(title)
        for title in (
            "Explained variance of the values",
            "Value by pass rate",
            "Value by position in the answer",
            "Advantage by pass rate",
        )
    )
    assert explained["explained variance"][1] == pytest.approx([0.1 * step for step in range(1, 9)])
    assert values["value, first quarter"] == values["target, first quarter"] == ([0, 2], [1.5, 21.5])
    assert positions["wrong answers, last quarter"] == ([0, 9], [7.5, 16.5])
    assert advantages == {"mean, first quarter": ([0, 2], [1.5, 21.5]), "mean, last quarter": ([0, 2], [7.5, 27.5])}


def test_a_run_with_few_metrics_names_what_was_not_recorded(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.25})
    page = report_of(tmp_path)
    assert list(page.figures) == ["Accuracy"] and page.figures["Accuracy"]["data"][0]["y"] == [0.25]
    for name in ("throughput", "group ledger", "loss by pass rate", "sample rollouts"):
        assert name in page.visible


@pytest.mark.parametrize(
    "metrics", [{}, {"accuracy/mean": math.nan}, {"difficulty/loss/0": 1.0, "difficulty/weight/2": 0.0}, None]
)
def test_a_run_of_almost_nothing_still_has_a_report(tmp_path, metrics):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        if metrics is not None:
            log.write(1, metrics)
    assert ("1 optimizer steps" in report_of(tmp_path).visible) == (metrics is not None)


def test_a_run_that_is_still_going_with_a_torn_last_line(tmp_path):
    write_synthetic_run(tmp_path, steps=30)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("steps: 30", "steps: 90"))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    before = path.read_bytes()
    page = report_of(tmp_path)
    assert "29 of 90" in page.visible and page.figures["Gradient norm"]["data"][0]["x"][-1] == 29
    assert path.read_bytes() == before, "a report changes nothing in the run"


@pytest.mark.parametrize("damage", [b"", None])
def test_a_damaged_rollout_file_is_named_and_the_rest_shown(tmp_path, damage):
    write_synthetic_run(tmp_path, steps=20)
    path = tmp_path / "rollouts/step_000010.parquet"
    path.write_bytes(path.read_bytes()[:300] if damage is None else damage)
    page = report_of(tmp_path)
    assert page.steps_with_samples == ["1", "20"] and "step_000010.parquet" in page.visible


def test_rollouts_of_another_shape_do_not_stop_the_report(tmp_path):
    write_synthetic_run(tmp_path, steps=3)
    pq.write_table(pa.table({"group_id": [1]}), tmp_path / "rollouts/step_000003.parquet")
    page = report_of(tmp_path)
    assert page.steps_with_samples == ["1"] and "step_000003.parquet" in page.visible


def test_a_step_of_a_later_epoch_is_shown_by_the_groups_of_an_earlier_one(tmp_path):
    MetricsLog(tmp_path, tensorboard=False).close()
    write_rollouts(tmp_path, 1, 4, 0.0, np.random.default_rng(0))
    Recorder(tmp_path).write_step(2, {}, RecordedMiniBatch(2, 1, 2, (100, 101), True))
    assert report_of(tmp_path).steps_with_samples == ["1"]


def test_a_skipped_batch_is_shown_with_its_verdicts_before_any_step(tmp_path):
    MetricsLog(tmp_path, tensorboard=False).close()
    rng = np.random.default_rng(0)
    path = write_rollouts(tmp_path, 1, 4, -99.0, rng)
    groups = [replace(g, verdicts=(Verdict(False, -1.0, "no_answer"), *g.verdicts[1:])) for g, _ in read_groups(path)]
    path.unlink()
    Recorder(tmp_path).write_untrainable(1, {"filtered": groups})
    page = report_of(tmp_path)
    assert "no_match 18" in page.visible and "no_answer 6" in page.visible and "0/4" in page.visible


def test_a_long_run_is_averaged_and_says_so(tmp_path):
    rows = [{"step": step, "accuracy/mean": step / 4000, "difficulty/groups/2": 1} for step in range(1, 4001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report_of(tmp_path)
    trace = page.figures["Accuracy"]["data"][0]
    assert len(trace["x"]) == 1334 and trace["x"][0] == 3 and trace["y"][0] == pytest.approx(2 / 4000)
    assert "means of 3 steps" in page.visible


def test_the_configuration_is_shown_without_secrets_and_escaped(tmp_path):
    write_synthetic_run(tmp_path, steps=2)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("observe:\n  wandb_api_key: hunter2\n  note: '<script>x</script>'\n")
    page = report_of(tmp_path)
    assert "hunter2" not in page.text and "wandb_api_key" in page.visible
    assert "note: '<script>x</script>'" in page.visible and "magnitude: abs" in page.visible


@pytest.mark.parametrize("content", ["a: [", "- 1", "", "rollout: 3\ntrainer: {steps: many}\nalgorithm: {name: [1]}"])
def test_a_strange_configuration_is_shown_as_text(tmp_path, content):
    write_synthetic_run(tmp_path, steps=2, with_rollouts=False)
    (tmp_path / "config.yaml").write_text(content)
    assert content in report_of(tmp_path).visible


def test_no_run_here_is_an_error_and_leaves_nothing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "trainer.run_dir" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_report_goes_where_it_is_told_and_a_failure_leaves_nothing(tmp_path, capsys):
    run, place = write_synthetic_run(tmp_path / "run", steps=2), tmp_path / "new/folder/x.html"
    assert main(["report", str(run), "--output", str(place)]) == 0
    assert str(place) in capsys.readouterr().out and place.exists()
    (tmp_path / "taken").mkdir()
    assert main(["report", str(run), "--output", str(tmp_path / "taken")]) == 1
    assert "taken" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "run", "taken"] and not (run / "report.html").exists()


def test_sequences_of_an_agent_are_a_tree_by_the_tokens_that_they_have_in_common(tmp_path, capsys):
    """In the report and in `analyze`, of the rollout that has most of them."""
    first, second, third = (
        [9, 3, 4],
        [9, 3, 5, 6],
        [9, 3, 5, 6, 7, 8],
    )  # the second rewrote the first, the third goes on
    tokens = np.array([*first, *second, *third], np.int32)
    mask = np.array([1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], np.uint8)
    reports = TurnReport(tool_calls=2, seconds=1.5), TurnReport(), TurnReport()
    columns = tokens, 1, mask, -mask.astype(np.float32), "stop", 1, "text"
    turns = (0, 2), (3, 1), (5, 1)
    one = Rollout("p", 0, 0, 0, *columns, turns=turns, reports=reports, contexts=(3, 4, 6))
    plain = replace(one, index=1, turns=((0, 2), (10, 0)), reports=reports[:1], contexts=())
    verdicts = Verdict(True, 1.0, "match"), Verdict(False, 0.0, "no_match")
    group = Group(0, Prompt("p", "1", "s", text="?", tokens=(9,)), (one, plain), verdicts)
    Recorder(tmp_path).write_step(1, {"trained": [group]}, RecordedMiniBatch(1, 1, 1, (0,), True))
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.5})
    page = report_of(tmp_path)
    for words in (
        "sequence 1 · 1 request · 0 tokens observed, 2 generated · tool calls 2, 0 in vain · 1.50 s in the environment",
        "sequence 2, from token 2 of sequence 1 · 1 request · 3 tokens observed, 1 generated",
        "sequence 3, from token 4 of sequence 2 · 1 request · 5 tokens observed, 1 generated",
    ):
        assert words in page.visible
    depths = [attributes["style"] for tag, attributes in page.elements if "margin-left" in attributes.get("style", "")]
    assert depths == ["margin-left:0.0em", "margin-left:1.5em", "margin-left:3.0em"]
    capsys.readouterr()
    assert main(["analyze", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "step_000001.parquet, group 0, rollout 0, right" in printed
    assert [len(line) - len(line.lstrip()) for line in printed.splitlines() if "sequence" in line[:12]] == [0, 2, 4]


def test_turns_of_conversations_are_shown_with_probabilities_and_what_was_said_is_escaped(tmp_path):
    """Tokens are shown one by one where the run's model is here; `<evil>` is one of its tokens."""
    import tiny_task

    tiny_task.save_tokenizer(tmp_path / "model", [*tiny_task.SYMBOLS, "<evil>"])
    markup = len(tiny_task.SYMBOLS)

    def rollout(index):
        tokens, mask = np.array([3, markup, 4, 5, markup], np.int32), np.array([1, 1, 0, 1], np.uint8)
        columns = tokens, 1, mask, np.array([-0.01, -3.0, 0, -9.0], np.float32), "stop", 1, "text"
        reports = TurnReport(tool_calls=1), TurnReport()
        return Rollout("p", 0, 0, index, *columns, turns=((0, 2), (1, 1)), reports=reports)

    verdicts = (Verdict(True, 1.0, "match", (("form", 0.5),)), Verdict(False, 0.0, "no_match"))
    group = Group(0, Prompt("p", "1", "s", text="?", tokens=(9,)), (rollout(0), rollout(1)), verdicts)
    Recorder(tmp_path).write_step(1, {"trained": [group]}, RecordedMiniBatch(1, 1, 1, (0,), True))
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.5})
    page = report_of(tmp_path)
    assert "2 turns" in page.visible and "form 0.5" in page.visible and "p = 0.99" not in page.text
    (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    page = report_of(tmp_path)
    for probability in ("0.99", "0.0498", "0.000123"):
        assert f"p = {probability}" in page.text
    assert page.text.count("p = 0.99") == 2
    assert "<evil>" in page.visible and "evil" not in {tag for tag, _ in page.elements}
