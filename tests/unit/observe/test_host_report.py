"""The report of what verl, slime or NeMo-RL logged with DARO, from files that their own loggers' writers make."""

from __future__ import annotations

import json

import pytest

from megatron_daro.cli import main
from megatron_daro.errors import ConfigError, DataError
from megatron_daro.workshop.report.host_metrics import HOSTS, load_host_run

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


@pytest.mark.parametrize("host", HOSTS)
def test_a_hosts_metrics_become_the_report(tmp_path, host, capsys):
    write_run(tmp_path, host)
    run = load_host_run(tmp_path, host)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5]
    assert run.rollouts_per_prompt == K
    assert run.values("difficulty/weight/2") == pytest.approx([1 + 0.2 * i for i in range(STEPS)])
    assert run.values("reward/mean") == pytest.approx([0.1 * i for i in range(STEPS)])
    assert run.values("own/metric") == [7.0] * STEPS
    assert main(["report", str(tmp_path), "--from", host]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Difficulty: pass-rate bins" in page
    assert "own/metric" in page


def test_verls_tensorboard_folder_is_read_too(tmp_path):
    write_events(tmp_path, [(i + 1, metrics(i)) for i in range(STEPS)])
    write_events(tmp_path, [(STEPS, metrics(1))])  # started again: the later value counts
    run = load_host_run(tmp_path, "verl")
    assert len(run.rows) == STEPS
    assert run.rows[-1]["difficulty/weight/1"] == pytest.approx(1.1)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no metrics of verl here, .*trainer\.logger="):
        load_host_run(tmp_path, "verl")
    with pytest.raises(DataError, match=r"--use-tensorboard"):
        load_host_run(tmp_path, "slime")
    (tmp_path / "run-1.wandb").write_bytes(b"")
    with pytest.raises(DataError, match=r"W&B's own files.*logger\.tensorboard_enabled"):
        load_host_run(tmp_path, "nemo-rl")
    with pytest.raises(ConfigError, match="allowed are verl, slime, nemo-rl"):
        load_host_run(tmp_path, "roll")


def test_a_run_without_daro_is_named(tmp_path):
    write_lines(tmp_path / "a.jsonl", [(1, {"actor/lr": 1.0, "critic/score/mean": 0.5})])
    with pytest.raises(DataError, match=r"2 metrics of verl .* DARO was not on"):
        load_host_run(tmp_path, "verl")


def test_several_runs_are_not_mixed(tmp_path):
    write_lines(tmp_path / "a.jsonl", [(1, metrics(0))])
    write_lines(tmp_path / "b.jsonl", [(1, metrics(0))])
    (tmp_path / "rollouts.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(DataError, match=r"2 runs \(a\.jsonl, b\.jsonl\)"):
        load_host_run(tmp_path, "verl")
    for name in ("exp_001", "exp_002"):
        write_events(tmp_path / name, [(1, {f"train/{k}": v for k, v in metrics(0).items()})])
    with pytest.raises(DataError, match=r"2 runs \(exp_001, exp_002\)"):
        load_host_run(tmp_path, "nemo-rl")


def test_folders_that_share_no_metric_are_one_run(tmp_path):
    """NeMo-RL's hyperparameters have a folder of their own; so has each process of slime without an experiment name."""
    write_run(tmp_path / "a", "nemo-rl")
    write_events(tmp_path / "a" / "tensorboard" / "1795397784.8", [])
    assert len(load_host_run(tmp_path / "a", "nemo-rl").rows) == STEPS
    write_events(tmp_path / "b" / "train", [(step, metrics(step)) for step in range(6)])
    rollouts = [(i, {"rollout/raw_reward": 0.1 * i, "perf/rollout_time": 3.0}) for i in range(3)]
    write_events(tmp_path / "b" / "rollouts", [*rollouts, (1, {"eval/aime": 0.5})])
    run = load_host_run(tmp_path / "b", "slime")
    # Two optimizer steps for each rollout, which are numbered by rollouts: they stand at the second.
    assert [row.get("reward/mean") for row in run.rows] == pytest.approx([None, 0, None, 0.1, None, 0.2])
    assert run.rows[3]["eval/aime"] == 0.5
    write_events(tmp_path / "b" / "again", [(0, {"rollout/raw_reward": 0.1})])
    with pytest.raises(DataError, match="3 runs"):
        load_host_run(tmp_path / "b", "slime")


def test_slimes_rollouts_that_are_numbered_by_optimizer_steps_stay(tmp_path):
    """As with --wandb-always-use-train-step."""
    rows = [(step, metrics(step) | ({"rollout/raw_reward": 0.1 * step} if step % 2 == 0 else {})) for step in range(6)]
    write_events(tmp_path, rows)
    rewards = [row.get("reward/mean") for row in load_host_run(tmp_path, "slime").rows]
    assert rewards == pytest.approx([0, None, 0.2, None, 0.4, None])


def test_a_torn_last_line_is_left_out_and_another_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    write_lines(path, [(1, metrics(0)), (2, metrics(1))])
    whole = path.read_text()
    path.write_text(whole + '{"step": 3, "da')
    assert len(load_host_run(tmp_path, "verl").rows) == 2
    path.write_text(whole.replace('{"step": 2', '{"stp": 2'))
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a line"):
        load_host_run(tmp_path, "verl")
