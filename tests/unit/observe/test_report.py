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
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_run import HOSTILE_TEXTS, write_rollouts, write_synthetic_run

from megatron_daro.errors import DataError
from megatron_daro.observe import MetricsLog, read_metrics
from megatron_daro.rollout.recorder import RecordedUpdate, Recorder, read_groups
from megatron_daro.types import Verdict
from megatron_daro.workshop.report import report as report_page
from megatron_daro.workshop.report.report import write_report


class Parsed(HTMLParser):
    """What a browser's parser would see: elements with attributes, the text of scripts, and the visible text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.visible = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.visible += data

    @property
    def figures(self) -> list[dict]:
        return json.loads(self.scripts[0], parse_constant=pytest.fail)


def _report(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    return text, Parsed(text)


def _titles(text):
    return re.findall(r"<figure><h3>(.*?)</h3>", text)


def _figure(text, parsed, title):
    return parsed.figures[_titles(text).index(title)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_synthetic_run(tmp_path_factory.mktemp("runs") / "syn<b>run", steps=200, hostile=True)


@pytest.fixture(scope="module")
def report(run):
    return _report(run)


def test_every_plot_the_product_promises_is_there(report):
    assert _titles(report[0]) == [
        "Accuracy",
        "Reward",
        "Evaluation by difficulty",
        "Loss L_k by pass rate",
        "Weight w_k by pass rate",
        "Token share by pass rate",
        "Group share by pass rate",
        "Measured against predicted L_k",
        "Weighted loss |w_k L_k| by pass rate",
        "Length against pass rate",
        "Weights at a clamp",
        "Response length",
        "Truncated responses",
        "Losses",
        "Gradient norm",
        "Learning rate",
        "Clip fractions",
        "Entropy",
        "Mismatch of rollout and training log-probabilities",
        "KL estimates",
        "Staleness",
        "Group ledger",
        "Time per phase",
        "Throughput",
    ]


def test_every_plot_has_axis_titles_and_an_explanation(report):
    text, parsed = report
    for figure in parsed.figures:
        for axis in ("xaxis", "yaxis"):
            assert figure["layout"][axis]["title"]["text"], figure["id"]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == len(parsed.figures)
    assert min(len(c) for c in captions) > 60


def test_the_page_needs_no_network(report):
    text, parsed = report
    assert [e for e in parsed.elements if {"src", "href", "srcset", "data"} & set(e[1])] == []
    assert text.count("plotly.js v") == 1, "plotly.js stands in the page once"
    assert 4_000_000 < len(text) < 7_000_000


def test_the_policy_allows_exactly_the_scripts_of_the_page(report):
    policy = next(a["content"] for tag, a in report[1].elements if a.get("http-equiv") == "Content-Security-Policy")
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in report[1].scripts[1:]]
    assert policy.split("script-src ")[1].split() == [f"'sha256-{h}'" for h in hashes]
    assert policy.startswith("default-src 'none';")


def test_heat_maps_hold_the_recorded_numbers(run, report):
    rows = [r for r in read_metrics(run) if r["step"] > 0]
    loss = _figure(*report, "Loss L_k by pass rate")["data"][0]
    assert loss["y"] == [1, 2, 3, 4, 5, 6, 7], "bins 0 and K carry no signal"
    assert loss["x"] == [r["step"] for r in rows]
    for k in loss["y"]:
        expected = [r.get(f"difficulty/loss/{k}") for r in rows]
        assert [v is None for v in loss["z"][k - 1]] == [v is None for v in expected]
        assert [v for v in loss["z"][k - 1] if v is not None] == pytest.approx(
            [v for v in expected if v is not None], rel=1e-4
        )
    assert (loss["colorscale"], loss["zmid"], loss["zmin"]) == ("@diverging", 0, -loss["zmax"])

    weight = _figure(*report, "Weight w_k by pass rate")["data"][0]
    assert weight["z"][2][100] == pytest.approx(math.log2(rows[100]["difficulty/weight/3"]), rel=1e-3)
    assert weight["customdata"][2][100] == pytest.approx(rows[100]["difficulty/weight/3"], rel=1e-4)


@pytest.mark.parametrize(
    ("title", "family"), [("Token share by pass rate", "tokens"), ("Group share by pass rate", "groups")]
)
def test_shares_of_a_step_add_up_to_one(run, report, title, family):
    share = _figure(*report, title)["data"][0]
    assert share["colorscale"] == "@sequential" and share["y"] == list(range(9))
    for column in zip(*share["z"], strict=True):
        assert sum(column) == pytest.approx(1, abs=1e-4)
    row = next(r for r in read_metrics(run) if r["step"] == 1)
    total = sum(row[f"difficulty/{family}/{k}"] for k in range(9))
    assert share["z"][5][0] == pytest.approx(row[f"difficulty/{family}/5"] / total, rel=1e-4)


def test_measured_and_predicted_loss_are_means_over_a_quarter(run, report):
    rows = [r for r in read_metrics(run) if r["step"] > 150]
    traces = {t["name"]: t for t in _figure(*report, "Measured against predicted L_k")["data"]}
    for name, family in (("measured, last quarter", "loss"), ("predicted, last quarter", "predicted_loss")):
        values = [r[f"difficulty/{family}/4"] for r in rows if f"difficulty/{family}/4" in r]
        assert traces[name]["y"][3] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_length_against_pass_rate_is_tokens_per_rollout(run, report):
    rows = [r for r in read_metrics(run) if 0 < r["step"] <= 50]
    trace = _figure(*report, "Length against pass rate")["data"][0]
    tokens = sum(r["difficulty/tokens/2"] for r in rows)
    groups = sum(r["difficulty/groups/2"] for r in rows)
    assert trace["x"] == [1, 2, 3, 4, 5, 6, 7]
    assert trace["y"][1] == pytest.approx(tokens / groups / 8, rel=0.05), "the same tokens, averaged in another order"
    rights = [r["difficulty/length_right/2"] for r in rows if "difficulty/length_right/2" in r]
    wrongs = [r["difficulty/length_wrong/2"] for r in rows if "difficulty/length_wrong/2" in r]
    mean = (2 * sum(rights) + 6 * sum(wrongs)) / len(rights) / 8
    assert trace["y"][1] == pytest.approx(mean, rel=1e-4)


def test_length_against_pass_rate_falls_back_to_token_counts(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"difficulty/tokens/0": 80, "difficulty/groups/0": 2, "difficulty/groups/4": 1})
    text, parsed = _report(tmp_path)
    trace = _figure(text, parsed, "Length against pass rate")["data"][0]
    assert (trace["x"], trace["y"]) == ([0], [10.0])


def test_right_and_wrong_lengths_over_time_weigh_bins_by_their_answers(tmp_path):
    metrics = {f"difficulty/groups/{k}": g for k, g in enumerate([5, 2, 0, 1, 9])}
    metrics |= {"difficulty/length_right/1": 10, "difficulty/length_right/3": 40}
    metrics |= {"difficulty/length_wrong/1": 100, "difficulty/length_wrong/3": 20, "response/length_mean": 50}
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, metrics)
    text, parsed = _report(tmp_path)
    traces = {t["name"].split(",")[0]: t["y"] for t in _figure(text, parsed, "Response length")["data"]}
    # Two groups of bin 1 and one of bin 3, K = 4: right 2 x 1 and 1 x 3 answers, wrong 2 x 3 and 1 x 1.
    assert traces["right"] == [pytest.approx((2 * 10 + 3 * 40) / 5)]
    assert traces["wrong"] == [pytest.approx((6 * 100 + 1 * 20) / 7, rel=1e-4)]


def test_the_headline_says_before_and_after(run, report):
    rows = read_metrics(run)
    accuracies = [r["eval/arithmetic/accuracy/4"] for r in rows if "eval/arithmetic/accuracy/4" in r]
    table = re.search(r"<td>arithmetic</td><td>4</td>(.*?)</tr>", report[0])[1]
    first, last = accuracies[0], accuracies[-1]
    assert re.findall(r">([^<>]+)<", table) == [f"{first:.1%}", f"{last:.1%}", f"{(last - first) * 100:+.1f}"]
    assert "200 of 200 optimizer steps" in report[1].visible
    assert "going on" not in report[1].visible


def test_samples_show_one_right_and_one_wrong_answer_of_first_middle_and_last_steps(report):
    text = report[0]
    assert re.findall(r"<h3>Step (\d+)</h3>", text) == ["1", "100", "200"]
    samples = re.findall(r'<details class="sample">.*?</details>', text, re.S)
    assert len(samples) == 9
    mixed = [s for s in samples if not re.search(r"pass rate (0/8|8/8)", s)]
    assert len(mixed) >= 6
    assert all(s.count('class="badge right"') == s.count('class="badge wrong"') == 1 for s in mixed)


def test_text_from_a_model_adds_no_element_no_attribute_and_no_control_character(run, report):
    text, parsed = report
    plain = write_synthetic_run(run.parent / "plain", steps=200)
    calm = Parsed(write_report(plain).read_text(encoding="utf-8"))
    kinds = {tag for tag, _ in parsed.elements}
    assert kinds == {tag for tag, _ in calm.elements}
    assert "img" not in kinds and kinds.isdisjoint({"b onerror", "a", "iframe"})
    assert [a for _, a in parsed.elements if any(name.startswith("on") for name in a)] == []
    assert len(parsed.scripts) == 3
    page_text = text.replace(parsed.scripts[1], "")
    assert {c for c in page_text if ord(c) < 32} == {"\n"}
    assert not set(page_text) & set("\x7f\u202e\u2028\ud800")
    assert "\\x1b[31mred" in parsed.visible and HOSTILE_TEXTS[1] in parsed.visible


def test_hostile_metric_names_and_configuration_stay_text(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.5, f"eval/a/accuracy/{HOSTILE_TEXTS[0]}": 0.5, "\x1b[31mred": 1.0})
    (tmp_path / "config.yaml").write_text(f"note: |\n  {HOSTILE_TEXTS[0]}\n  \x1b]0;owned\x07\n")
    text, parsed = _report(tmp_path)
    assert len(parsed.scripts) == 3
    assert {tag for tag, _ in parsed.elements}.isdisjoint({"img", "a", "iframe"})
    assert {c for c in text.replace(parsed.scripts[1], "") if ord(c) < 32} == {"\n"}
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
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    page = Parsed(done.stdout)
    root = next(a for tag, a in page.elements if tag == "html")
    assert root.get("data-drawn") == str(len(report[1].figures))
    drawn = [a for tag, a in page.elements if "js-plotly-plot" in (a.get("class") or "")]
    assert len(drawn) == len(report[1].figures)
    title = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    assert title == "syn&lt;b&gt;run · daro", "no script of a model's answer changed the title"


def test_a_critics_values_and_advantages_are_means_over_a_quarter(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 9):
            by_bin = {f"critic/{n}/{k}": 10.0 * k + step for n in ("value", "target", "advantage") for k in (0, 2)}
            tenths = {f"critic/value_{side}/{i}": i + step for side in ("right", "wrong") for i in (0, 9)}
            fit = {"critic/value_mean": 0.0, "critic/explained_variance": 0.1 * step, "difficulty/groups/2": 1}
            log.write(step, by_bin | tenths | fit)
    text, parsed = _report(tmp_path)
    assert "<h2>Critic</h2>" in text
    explained, values, positions, advantages = (
        {t["name"]: (t["x"], t["y"]) for t in _figure(text, parsed, title)["data"]}
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


def test_a_run_without_a_critic_has_no_section_of_one(report):
    text, parsed = report
    assert "<h2>Critic</h2>" not in text and "values by position" not in parsed.visible


def test_a_run_with_few_metrics_drops_sections_and_says_so(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.25})
    text, parsed = _report(tmp_path)
    assert _titles(text) == ["Accuracy"]
    assert parsed.figures[0]["data"][0]["y"] == [0.25]
    for name in ("Time: throughput", "Groups: group ledger", "loss by pass rate", "sample rollouts"):
        assert name in parsed.visible
    assert "<h2>Time</h2>" not in text


@pytest.mark.parametrize(
    "metrics", [{}, {"accuracy/mean": math.nan}, {"difficulty/loss/0": 1.0, "difficulty/weight/2": 0.0}]
)
def test_a_run_of_almost_nothing_still_has_a_report(tmp_path, metrics):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, metrics)
    assert "1 optimizer steps" in _report(tmp_path)[1].visible


def test_a_run_before_its_first_step(tmp_path):
    MetricsLog(tmp_path, tensorboard=False).close()
    assert "No optimizer step has been recorded yet" in _report(tmp_path)[1].visible


def test_a_run_that_is_still_going_with_a_torn_last_line(tmp_path):
    write_synthetic_run(tmp_path, steps=30)
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("steps: 30", "steps: 90"))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    before = path.read_bytes()
    text, parsed = _report(tmp_path)
    assert "29 of 90 optimizer steps (going on or stopped early)" in parsed.visible
    assert _figure(text, parsed, "Gradient norm")["data"][0]["x"][-1] == 29
    assert path.read_bytes() == before, "a report changes nothing in the run"


@pytest.mark.parametrize("damage", [b"", b"no Parquet at all", None])
def test_a_damaged_rollout_file_is_named_and_the_rest_shown(tmp_path, damage):
    write_synthetic_run(tmp_path, steps=20)
    path = tmp_path / "rollouts/step_000010.parquet"
    path.write_bytes(path.read_bytes()[:300] if damage is None else damage)
    text, parsed = _report(tmp_path)
    assert re.findall(r"<h3>Step (\d+)</h3>", text) == ["1", "20"]
    assert "sample rollouts of step 10: step_000010.parquet is damaged" in parsed.visible


def test_rollouts_of_another_shape_do_not_stop_the_report(tmp_path):
    write_synthetic_run(tmp_path, steps=3)
    pq.write_table(pa.table({"group_id": [1]}), tmp_path / "rollouts/step_000003.parquet")
    text, parsed = _report(tmp_path)
    assert re.findall(r"<h3>Step (\d+)</h3>", text) == ["1"]
    assert "step_000003.parquet is damaged (it has no columns used, prompt_id" in parsed.visible


def test_of_a_long_file_the_beginning_is_read(tmp_path, monkeypatch):
    write_synthetic_run(tmp_path, steps=1)
    assert _report(tmp_path)[0].count('<details class="sample">') == 3
    monkeypatch.setattr(report_page, "_MOST_BYTES", 1)
    monkeypatch.setattr(report_page, "_ROWS_AT_ONCE", 8)
    assert _report(tmp_path)[0].count('<details class="sample">') == 1


def test_a_step_of_a_later_epoch_is_shown_by_the_groups_of_an_earlier_one(tmp_path):
    MetricsLog(tmp_path, tensorboard=False).close()
    write_rollouts(tmp_path, 1, 4, 0.0, np.random.default_rng(0))
    Recorder(tmp_path).write_step(2, {}, RecordedUpdate(2, 1, 2, (100, 101), True))
    samples, notes = report_page.load_samples(tmp_path)
    assert [one.step for one in samples] == [1] and not notes


def test_a_skipped_batch_is_shown_with_its_verdicts_before_any_step(tmp_path):
    MetricsLog(tmp_path, tensorboard=False).close()
    rng = np.random.default_rng(0)
    path = write_rollouts(tmp_path, 1, 4, -99.0, rng)
    groups = [replace(g, verdicts=(Verdict(False, -1.0, "no_answer"), *g.verdicts[1:])) for g, _ in read_groups(path)]
    path.unlink()
    Recorder(tmp_path).write_skipped(1, {"filtered": groups})
    text, parsed = _report(tmp_path)
    assert "No optimizer step has been recorded yet. The newest batch was skipped" in parsed.visible
    assert "Skipped before step 1" in parsed.visible and "Verdicts: no_match 18, no_answer 6" in parsed.visible
    assert text.count("pass rate 0/4 · filtered") == 3
    assert text.count("<small>verdict no_answer") == text.count("<small>verdict no_match") == 3


def test_a_long_run_is_averaged_and_says_so(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log._append = lambda line, step: log._file.write(line)  # fsync of 4,000 lines tests the disk, not the report
        for step in range(1, 4001):
            log.write(step, {"accuracy/mean": step / 4000, "difficulty/weight/1": 1.0, "difficulty/groups/2": 1})
    text, parsed = _report(tmp_path)
    trace = _figure(text, parsed, "Accuracy")["data"][0]
    assert len(trace["x"]) == 1334 and trace["x"][0] == 3
    assert trace["y"][0] == pytest.approx(2 / 4000)
    assert "plots show means of 3 steps" in parsed.visible


def test_the_configuration_is_shown_without_secrets_and_escaped(tmp_path):
    write_synthetic_run(tmp_path, steps=2)
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("observe:\n  wandb_api_key: hunter2\n  note: '<script>x</script>'\n")
    text, parsed = _report(tmp_path)
    assert "hunter2" not in text and "wandb_api_key: (hidden)" in parsed.visible
    assert "note: '<script>x</script>'" in parsed.visible and "magnitude: abs" in parsed.visible


@pytest.mark.parametrize("content", ["a: [", "- 1", "", "rollout: 3\ntrainer: {steps: many}\nalgorithm: {name: [1]}"])
def test_a_strange_configuration_is_shown_as_text(tmp_path, content):
    write_synthetic_run(tmp_path, steps=2, with_rollouts=False)
    (tmp_path / "config.yaml").write_text(content)
    text, parsed = _report(tmp_path)
    assert content in parsed.visible
    assert "1/8" in json.dumps(_figure(text, parsed, "Loss L_k by pass rate"))


def test_no_run_here_is_an_error_that_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match=r"trainer\.run_dir"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_report_goes_where_it_is_told_and_a_failure_leaves_nothing(tmp_path):
    run = write_synthetic_run(tmp_path / "run", steps=2)
    assert write_report(run, tmp_path / "new/folder/x.html") == tmp_path / "new/folder/x.html"
    (tmp_path / "taken").mkdir()
    with pytest.raises(DataError, match="taken"):
        write_report(run, tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []
    assert not (run / "report.html").exists()


def test_a_conversation_is_shown_with_what_the_model_said_apart():
    from megatron_daro.workshop.report.report import _rollout_values

    row = {"reason": "match", "reward": 1.0, "length": 5, "finish_reason": "stop", "weight_version": 3}
    row |= {"correct": True, "text": "x", "logprobs": [-1.0, -3.0, 0.0, 0.0, -2.0]}
    assert {"5 tokens", "mean log-prob -1.200"} <= {*_rollout_values(row)["facts"]}
    row["turns"] = [{"observed": 0, "generated": 2}, {"observed": 2, "generated": 1}]
    facts = _rollout_values(row)["facts"]
    assert {"2 turns", "3 tokens generated", "2 observed", "mean log-prob -2.000"} <= {*facts}
    row |= {"turns": row["turns"][:1], "length": 2}
    assert {"1 turn", "2 tokens generated", "0 observed"} <= {*_rollout_values(row)["facts"]}


def test_a_conversation_is_shown_turn_by_turn_with_a_shade_for_each_token_of_the_model():
    from megatron_daro.workshop.report.conversations import conversation_values

    letters = {1: "4", 2: "<eos>", 3: "no", 5: "\x05", 6: "\x06"}

    def decode(ids):  # 5 and 6 are the halves of one character
        text = "".join(letters[i] for i in ids).replace("\x05\x06", "\u20ac")
        return text.replace("\x05", "\ufffd").replace("\x06", "\ufffd")

    row = {"tokens": [1, 2, 3, 3, 5, 6], "logprobs": [-0.05, -0.7, 0.0, 0.0, -0.2, -5.0]}
    row["turns"] = [{"observed": 0, "generated": 2}, {"observed": 2, "generated": 2}]
    row["reports"] = [
        {"reward": 0.5, "tool_calls": 2, "tool_errors": 1, "seconds": 0.25},
        {"reward": 0.0, "tool_calls": 0, "tool_errors": 0, "seconds": 0.001},
    ]
    first, shown, last = conversation_values(row, decode)
    assert first["pieces"] == [("4", 0, "p = 0.951"), ("<eos>", 2, "p = 0.497")]
    assert first["facts"] == [
        "2 tokens",
        "mean log-prob -0.375",
        "tool calls 2, 1 in vain",
        "reward 0.5",
        "250.0 ms in the environment",
    ]
    assert (shown["said"], shown["pieces"], shown["facts"]) == (False, [("nono", None, "")], ["2 tokens"])
    assert last["pieces"] == [("\u20ac", 4, "p = 0.00674")]  # the least likely of its tokens


def test_the_page_of_a_run_with_conversations_has_their_turns_and_escapes_what_was_said(tmp_path, monkeypatch):
    from megatron_daro.rollout.recorder import Recorder
    from megatron_daro.types import Group, Prompt, Rollout, TurnReport, Verdict

    def rollout(index):
        tokens, mask = np.array([9, 1, 2, 3, 4], np.int32), np.array([1, 1, 0, 1], np.uint8)
        columns = tokens, 1, mask, np.array([-0.01, -3.0, 0, -9.0], np.float32), "stop", 1, "text"
        return Rollout(
            "p", 0, 0, index, *columns, turns=((0, 2), (1, 1)), reports=(TurnReport(tool_calls=1), TurnReport())
        )

    verdicts = (Verdict(True, 1.0, "match", (("form", 0.5),)), Verdict(False, 0.0, "no_match"))
    group = Group(0, Prompt("p", "1", "s", text="?", tokens=(9,)), (rollout(0), rollout(1)), verdicts)
    Recorder(tmp_path).write_step(1, {"trained": [group]}, RecordedUpdate(1, 1, 1, (0,), True))
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.5})
    text, parsed = _report(tmp_path)
    assert "tokens of conversations one by one" in parsed.visible and '<ol class="turns">' not in text
    monkeypatch.setattr(
        "megatron_daro.workshop.report.report.decoder", lambda model: (lambda ids: "<b>" * len(ids), "")
    )
    text, parsed = _report(tmp_path)
    assert text.count('<ol class="turns">') == 2 and text.count('<li class="seen">') == 2
    for shade, probability in (("p0", "0.99"), ("p3", "0.0498"), ("p4", "0.000123")):
        assert f'<span class="{shade}" title="p = {probability}">&lt;b&gt;</span>' in text
    assert "form 0.5" in parsed.visible and "rollouts that have it" in parsed.visible
