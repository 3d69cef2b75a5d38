"""The report of what verl, slime or NeMo-RL logged with DARO, from files that their own loggers' writers make."""

from __future__ import annotations

import json

import pytest
from page_of_report import report_of

from megatron_daro.cli import main
from megatron_daro.workshop.report.host_metrics import HOSTS

K, STEPS = 4, 5


def metrics(step):
    found = {f"difficulty/weight/{k}": 1 + 0.1 * k * step for k in range(1, K)}
    found |= {f"difficulty/tokens/{k}": 100.0 * (k + 1) for k in range(K + 1)}
    found |= {f"difficulty/loss/{k}": 0.1 * k for k in range(1, K)}
    return found | {f"difficulty/groups/{k}": 2.0 for k in range(K + 1)} | {"loss/policy": -0.1 * step}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows))


def write_events(directory, rows):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(directory) as writer:
        for step, data in rows:
            for key, value in data.items():
                writer.add_scalar(key, value, step)


def write_run(directory, host):
    """As the host's logger does: its own names, its first step, its prefix."""
    reward = next(name for name, ours in HOSTS[host].names.items() if ours == "reward/mean")
    first, prefix = HOSTS[host].first_step, HOSTS[host].prefix
    rows = [
        (
            first + i,
            {f"{prefix}{key}": value for key, value in metrics(i).items()} | {reward: 0.1 * i, "own/metric": 7.0},
        )
        for i in range(STEPS)
    ]
    if host == "verl":
        write_lines(directory / "daro" / "run.jsonl", rows)
    else:
        write_events(directory / "tensorboard", rows)


def refused(directory, host, capsys, code=1):
    assert main(["report", str(directory), "--from", host]) == code
    return capsys.readouterr().err


def weights(page):
    """Of bin 2, and the steps at which they stand."""
    heat = page.figures["Weight w_k by pass rate"]["data"][0]
    row = heat["customdata"][heat["y"].index(2)]
    return heat["x"], row


@pytest.mark.parametrize("host", HOSTS)
def test_a_hosts_metrics_become_the_report(tmp_path, host):
    write_run(tmp_path, host)
    page = report_of(tmp_path, "--from", host)
    steps, found = weights(page)
    assert steps == [1, 2, 3, 4, 5] and found == pytest.approx([1 + 0.2 * i for i in range(STEPS)], rel=1e-3)
    ((_, rewards),) = page.traces("Reward").values()
    assert rewards == pytest.approx([0.1 * i for i in range(STEPS)], abs=1e-4)
    assert "own/metric" in page.visible


def test_verls_tensorboard_folder_is_read_too(tmp_path):
    write_events(tmp_path, [(i + 1, metrics(i)) for i in range(STEPS)])
    write_events(tmp_path, [(STEPS, metrics(1))])  # started again: the later value counts
    steps, found = weights(report_of(tmp_path, "--from", "verl"))
    assert len(steps) == STEPS and found[-1] == pytest.approx(1.2, rel=1e-3)


def test_what_is_missing_is_named_with_the_option_that_writes_it(tmp_path, capsys):
    assert "trainer.logger=" in refused(tmp_path, "verl", capsys)
    assert "--use-tensorboard" in refused(tmp_path, "slime", capsys)
    (tmp_path / "run-1.wandb").write_bytes(b"")
    assert "logger.tensorboard_enabled" in refused(tmp_path, "nemo-rl", capsys)
    assert "verl, slime, nemo-rl" in refused(tmp_path, "roll", capsys, code=2)


def test_a_run_without_daro_is_refused(tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", [(1, {"actor/lr": 1.0, "critic/score/mean": 0.5})])
    assert "DARO" in refused(tmp_path, "verl", capsys)


def test_several_runs_are_not_mixed(tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", [(1, metrics(0))])
    write_lines(tmp_path / "b.jsonl", [(1, metrics(0))])
    (tmp_path / "rollouts.jsonl").write_text('{"input": "x"}\n')
    assert "(a.jsonl, b.jsonl)" in refused(tmp_path, "verl", capsys)
    for name in ("exp_001", "exp_002"):
        write_events(tmp_path / name, [(1, {f"train/{k}": v for k, v in metrics(0).items()})])
    assert "(exp_001, exp_002)" in refused(tmp_path, "nemo-rl", capsys)


def test_folders_that_share_no_metric_are_one_run(tmp_path, capsys):
    """NeMo-RL's hyperparameters have a folder of their own; so has each process of slime without an experiment name."""
    write_run(tmp_path / "a", "nemo-rl")
    write_events(tmp_path / "a" / "tensorboard" / "1795397784.8", [])
    assert len(weights(report_of(tmp_path / "a", "--from", "nemo-rl"))[0]) == STEPS
    write_events(tmp_path / "b" / "train", [(step, metrics(step)) for step in range(6)])
    rollouts = [(i, {"rollout/raw_reward": 0.1 * i, "perf/rollout_time": 3.0}) for i in range(3)]
    write_events(tmp_path / "b" / "rollouts", [*rollouts, (1, {"eval/aime": 0.5})])
    ((steps, rewards),) = report_of(tmp_path / "b", "--from", "slime").traces("Reward").values()
    # Two optimizer steps for each rollout, which are numbered by rollouts: they stand at the second.
    assert by_step(steps, rewards) == {2: 0, 4: pytest.approx(0.1, rel=1e-3), 6: pytest.approx(0.2, rel=1e-3)}
    write_events(tmp_path / "b" / "again", [(0, {"rollout/raw_reward": 0.1})])
    assert "3 runs" in refused(tmp_path / "b", "slime", capsys)


def by_step(steps, values):
    return {step: value for step, value in zip(steps, values, strict=True) if value is not None}


def test_slimes_rollouts_that_are_numbered_by_optimizer_steps_stay(tmp_path):
    """As with --wandb-always-use-train-step."""
    rows = [(step, metrics(step) | ({"rollout/raw_reward": 0.1 * step} if step % 2 == 0 else {})) for step in range(6)]
    write_events(tmp_path, rows)
    ((steps, rewards),) = report_of(tmp_path, "--from", "slime").traces("Reward").values()
    assert by_step(steps, rewards) == {1: 0, 3: pytest.approx(0.2, rel=1e-3), 5: pytest.approx(0.4, rel=1e-3)}


def test_a_torn_last_line_is_left_out_and_another_is_named(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    write_lines(path, [(1, metrics(0)), (2, metrics(1))])
    whole = path.read_text()
    path.write_text(whole + '{"step": 3, "da')
    assert weights(report_of(tmp_path, "--from", "verl"))[0] == [1, 2]
    path.write_text(whole.replace('{"step": 2', '{"stp": 2'))
    assert "a.jsonl:2" in refused(tmp_path, "verl", capsys)
