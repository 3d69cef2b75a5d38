"""PPO through the command line: both models in the checkpoints, a resumed run bit for bit, refusals by name."""

import cli_runs
import pytest
from cli_runs import assert_same_run, checkpoint, metric_lines, run_cli, trained
from transformers import AutoModelForSequenceClassification

PPO = [
    "algorithm.name=ppo",
    "algorithm.options.gae_lambda=0.95",
    "algorithm.options.critic_lambda=1.0",
    "algorithm.critic.learning_rate=1e-3",
    "algorithm.critic.value_clip=0.5",
    "algorithm.critic.pretrain_steps=1",
    "trainer.minibatches_per_batch=2",
    "trainer.epochs_per_batch=2",
    "trainer.save_every_steps=4",
]


@pytest.mark.heavy  # the state itself: tests/parallel/test_critic.py
@pytest.mark.timeout(900)
def test_a_resumed_run_and_a_replay_are_the_unbroken_one_bit_for_bit(tiny, tmp_path):
    def train(run, *options):
        trained(["train", tiny.config, *PPO, f"trainer.run_dir={tmp_path / run}", *options], tmp_path / f"{run}.log")
        return tmp_path / run

    whole = train("whole", "trainer.steps=8")
    train("resumed", "trainer.steps=4")
    pickles = frozenset({"common.pt", "critic/common.pt", "manifest.json"})
    resumed = train("resumed", "trainer.steps=8", "--resume", "algorithm.critic.offload=true")
    assert_same_run(resumed, whole, range(1, 9), but=pickles)
    replayed = train("replayed", "trainer.steps=8", "--replay", whole)
    keys = ("loss/policy", "loss/grad_norm", "ratio/mean", "critic/loss", "critic/grad_norm", "rollout/epoch")
    found = [[[line[key] for key in keys] for line in metric_lines(run, range(1, 9))] for run in (replayed, whole)]
    assert found[0] == found[1]
    critics = [checkpoint(run, 8).glob("**/critic/common.pt") for run in (resumed, whole)]
    (one,), (other,) = (list(found) for found in critics)
    assert cli_runs._scalars(one.parent) == cli_runs._scalars(other.parent)
    assert len(list(one.parent.glob("shard_*.safetensors"))) == 2
    lines = metric_lines(whole, range(1, 9))
    assert [line["optimizer/learning_rate"] > 0 for line in lines] == [False, *[True] * 7]
    assert all(line["critic/learning_rate"] == pytest.approx(1e-3) for line in lines)
    assert lines[0]["critic/value_mean"] == lines[1]["critic/value_mean"] == 0.0, "the head says 0 until it is trained"
    assert all(line["critic/value_mean"] == 0.0 for line in lines[:4]) and lines[4]["critic/value_mean"] != 0.0
    assert [abs(line["ratio/mean"] - 1) < 1e-6 for line in lines[:4]] == [True, True, False, False]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_daros_weights_move_on_ppos_losses(tiny, tmp_path):
    options = ["algorithm.name=daro_ppo", "algorithm.options.gae_lambda=0.95", "algorithm.critic.learning_rate=1e-3"]
    run, options = tmp_path / "run", [*options, "trainer.export_critic=true"]
    trained(["train", tiny.config, *options, "trainer.steps=2", f"trainer.run_dir={run}"], tmp_path / "log")
    critic, report = AutoModelForSequenceClassification.from_pretrained(run / "hf_critic", output_loading_info=True)
    assert not any(report.values()) and critic.num_labels == 1 and bool(critic.score.weight.any())
    assert not (run / "hf").exists()
    lines = metric_lines(run, range(1, 3))
    assert all(line["critic/loss"] > 0 for line in lines)
    assert lines[0]["difficulty/weight/1"] == 1.0 != lines[1]["difficulty/weight/1"], "the first step moved it"


@pytest.mark.heavy
def test_a_checkpoint_of_another_algorithm_is_refused_before_the_start(tiny, tmp_path):
    options = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_every_steps=1"]
    trained(["train", tiny.config, "algorithm.name=grpo", "trainer.steps=1", *options], tmp_path / "first.log")
    finished = run_cli(["train", tiny.config, "algorithm.name=ppo", *options, "--resume"], tmp_path / "second.log")
    assert finished.code != 0
    assert "algorithm.name" in finished.stderr and "a critic or none; export the weights" in finished.stderr
