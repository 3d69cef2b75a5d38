"""Algorithms with a state, through the command line: a resumed run and a replay end in the state of the whole run.

Two of them: one that keeps statistics of batches, one that learns weights. The state of each: tests/parallel.
"""

import json

import pytest
from cli_runs import assert_same_run, checkpoint, metric_lines, trained
from lab_names import CONFIGURED, ENVIRONMENT

pytestmark = pytest.mark.heavy  # the state itself: tests/parallel/test_algorithm_states.py

ALGORITHMS = {
    "ha_dw": ["algorithm.name=ha_dw", "algorithm.options.window=2"],
    "daro_by_length": [
        f"algorithm.name={CONFIGURED['daro_cells']}",
        "algorithm.options.length_edges=[4,8]",
        "algorithm.options.half_life=2",
    ],
}
STEPS = range(1, 5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_resume_and_replay_end_in_the_state_of_the_whole_run(tiny, tmp_path, name):
    def train(run, *options):
        everything = [*ALGORITHMS[name], f"trainer.run_dir={tmp_path / run}", "trainer.save_every_steps=2", *options]
        trained(["train", tiny.config, *everything], tmp_path / f"{run}.log", ENVIRONMENT)
        return tmp_path / run

    whole = train("whole", "trainer.steps=4")
    assert state_of(whole, 4) != state_of(whole, 2)
    train("resumed", "trainer.steps=2")
    assert_same_run(train("resumed", "trainer.steps=4", "--resume"), whole, STEPS)
    replay = train("replay", "trainer.steps=4", "--replay", str(whole))
    assert state_of(replay, 4) == state_of(whole, 4)
    losses = [[line["loss/policy"] for line in metric_lines(run, STEPS)] for run in (replay, whole)]
    assert losses[0] == losses[1]


def state_of(run, step):
    """The algorithm's state in a checkpoint."""
    (path,) = checkpoint(run, step).rglob("algorithm.json")
    return json.loads(path.read_text())
