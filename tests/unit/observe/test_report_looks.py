"""What a reader's eye meets in a report: numbers that differ, charts in which something happens, names instead of
hashes."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from page_of_report import Page, report_of
from synthetic_run import write_synthetic_run

from megatron_daro.observe import MetricsLog

SUMS = [f"eval/set_{i}/accuracy" for i in range(9)]


@pytest.fixture
def run(tmp_path):
    """Thirty steps in which some things happen and others do not."""
    phases = [f"timing/phase_{i}_s" for i in range(12)]
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 31):
            metrics = {"accuracy/mean": step / 100, "response/truncated_fraction": step % 4 / 500}
            metrics |= {"optimizer/learning_rate": 2e-4, "difficulty/clamped": 0.0, "rollout/staleness_mean": 0.0}
            metrics |= {name: 0.1 + i + step / 100 for i, name in enumerate(phases)} | {"timing/step_s": 99.0}
            log.write(step, metrics | {"timing/logprob_s": 0.0})
    (tmp_path / "config.yaml").write_text("model: {path: models/of-a-test}\nalgorithm: {name: daro}\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_text("2026-03-04 05:06:07,891 INFO driver (1): begun\n")
    return tmp_path


def test_a_chart_in_which_nothing_happens_is_a_line_of_text(run):
    page = report_of(run)
    assert {"Accuracy", "Truncated responses"} <= page.figures.keys()
    assert page.figures.keys().isdisjoint({"Learning rate", "Weights at a clamp", "Staleness"})
    assert "Learning rate: learning rate 0.0002" in page.visible and "Staleness: mean staleness 0" in page.visible


def test_a_single_step_is_still_drawn(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"accuracy/mean": 0.0})
    assert "Accuracy" in report_of(tmp_path).figures


def test_the_top_says_which_model_and_when(run):
    assert re.search(r"30 optimizer steps.* models/of-a-test .*2026-03-04 05:06", report_of(run).visible)


def test_no_two_series_look_alike(run):
    with MetricsLog(run, tensorboard=False) as log:
        log.write(31, {f"eval/sums/accuracy/digits_{i}": i / 20 for i in range(15)})
        log.write(32, {f"eval/sums/accuracy/digits_{i}": i / 30 for i in range(15)} | {"eval/sums/accuracy": 0.5})
    page = report_of(run)
    for title, least in (("Time per phase", 9), ("Evaluation by difficulty", 15)):
        traces = page.figures[title]["data"]
        looks = {(trace["line"]["color"], trace["line"].get("dash"), trace.get("mode")) for trace in traces}
        assert len(looks) == len(traces) >= least, title
    assert "logprob" not in page.traces("Time per phase"), "a phase that took no time"


@pytest.mark.parametrize("sets", range(9))
def test_no_card_stands_alone_in_its_row(tmp_path, sets):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in (1, 2):
            named = {"accuracy/mean": 0.5, "response/length_mean": 5.0, "timing/step_s": 1.0}
            log.write(step, named | dict.fromkeys(SUMS[:sets], step / 10))
    text = report_of(tmp_path).text
    cards, columns = text.count('<div class="card">'), int(re.search(r"--columns: (\d+)", text)[1])
    assert columns <= 6 and (cards <= columns or cards % columns != 1), f"{cards} cards in {columns} columns"


def test_samples_are_headed_by_their_problems(tmp_path):
    run = write_synthetic_run(tmp_path, steps=3)
    headings = re.findall(r"<summary><b>(.*?)</b>", report_of(run).text)
    assert any(re.match(r"What is \d+ \+ \d+\?", heading) for heading in headings)
    assert not any(heading.startswith("arithmetic/") for heading in headings)


def test_ticks_of_small_shares_differ(run, tmp_path):
    if not (browser := shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")):
        pytest.skip("no Chromium here: the page was not opened in a browser")
    report_of(run)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, (run / "report.html").as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    (tmp_path / "drawn.html").write_text(done.stdout)
    titles = list(Page(run / "report.html").figures)
    for number, title in enumerate(titles):
        plot = done.stdout.partition(f'id="plot-{number}"')[2].partition("</figure>")[0]
        ticks = re.findall(r'<g class="ytick"><text[^>]*>(.*?)</text>', plot)
        assert len(set(ticks)) == len(ticks) > 0, (title, ticks)
