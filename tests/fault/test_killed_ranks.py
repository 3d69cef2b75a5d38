"""kill -9 of a rank at every phase of a step: it is replaced, and the run's record is that of an unbroken one.

Of two or four ranks some kill themselves as planned (killed_ranks.py). Metrics, rollouts and checkpoints must be those
of a run in which nobody died, bit for bit; at most one step may be repeated, and nothing may outlive the run.
"""

from __future__ import annotations

import json
import os
import re

import pytest
from cli_runs import assert_same_run, checkpoint, digests, last_step, metric_lines, trained, with_dying_ranks
from sglang_pool import cpu_servers

from megatron_daro.observe.metrics import read_metrics

HEALS = "trainer.replace_lost_ranks=true"
AS_REFERENCE = ["trainer.eval_every_steps=4", "observe.tensorboard=true"]
LARGE = [
    "trainer.steps=5",
    "actor.data_parallel=2",
    "algorithm.old_logprobs=recompute",
    "algorithm.kl.coefficient=0.1",
    "trainer.save_every_steps=2",
]


def run_with_deaths(tiny, run_dir, log, plan, options):
    arguments = ["train", tiny.config, f"trainer.run_dir={run_dir}", HEALS, *options]
    with with_dying_ranks(arguments, log, plan) as run:
        finished = run.finish()
        assert run.left_behind() == []
    wanted = {".".join(death.split(":")[:3]) for death in plan.split(",")}
    happened = {path.name for path in run.fired.iterdir() if not path.name.startswith("count.")}
    return finished, wanted, happened


def repeated_steps(finished):
    return [int(n) for n in re.findall(r"was replaced in [\d.]+ s; steps repeated: (\d+)", plain(finished))]


def plain(finished):
    return re.sub(r"\s+", " ", finished.stdout + finished.stderr)


def assert_same_steps(run_dir, reference, last):
    """Metrics, rollouts, and what ranks have in the last step's checkpoint, whose rest knows the run's length too."""
    assert metric_lines(run_dir) == metric_lines(reference, range(last + 1))
    for step in range(1, last + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        assert (run_dir / name).read_bytes() == (reference / name).read_bytes(), name
    found, expected = (digests(checkpoint(run, last)) for run in (run_dir, reference))
    assert found.keys() == expected.keys()
    shards = {name for name in expected if name.startswith("shard_")}
    assert len(shards) >= 2 and {name for name in shards if found[name] != expected[name]} == set()


@pytest.mark.slow
def test_a_rank_that_dies_in_a_step_is_replaced_and_nothing_else_shows(tiny, reference, tmp_path):
    """Of two tensor-parallel ranks: the other one has no replica of its weights."""
    options = [*AS_REFERENCE, "trainer.steps=4"]
    finished, wanted, happened = run_with_deaths(tiny, tmp_path / "run", tmp_path / "log", "optimizer:1:3", options)
    assert finished.code == 0, plain(finished)[-4000:]
    assert wanted == happened and repeated_steps(finished) == [0]
    assert_same_steps(tmp_path / "run", reference, 4)


@pytest.fixture(scope="module")
def unbroken(tiny, tmp_path_factory):
    """A run of four ranks in which nobody dies, and which takes no snapshots."""
    directory = tmp_path_factory.mktemp("unbroken")
    trained(["train", tiny.config, f"trainer.run_dir={directory / 'run'}", *LARGE], directory / "log")
    return directory / "run"


def assert_heals(tiny, unbroken, tmp_path, plan, options):
    """All planned deaths happen, nothing shows but their replacement; returns the steps that each repeated."""
    finished, wanted, happened = run_with_deaths(tiny, tmp_path / "run", tmp_path / "log", plan, options)
    assert finished.code == 0, plain(finished)[-4000:]
    assert wanted == happened
    repeated = repeated_steps(finished)
    assert repeated and max(repeated) <= 1
    assert_same_steps(tmp_path / "run", unbroken, 5)
    return repeated


IN_CI = {"backward:3:3", "save:2:1", "forward:0:2,forward:0:4"}
LONG = pytest.mark.skipif("MEGATRON_DARO_LONG" not in os.environ, reason="a minute each: MEGATRON_DARO_LONG=1 runs it")
DEATHS = [
    "idle:3:2",
    "old_logprobs:2:3",
    "ref_logprobs:0:2",
    "forward:1:3",
    "backward:3:3",
    "optimizer:0:2",
    "updated:2:3",
    "snapshot:1:4",
    "copy:3:3",
    "export:0:3",
    "save:2:1",
    "saved:1:1",
    "saved:0:2",
    "forward:0:2,forward:0:4",  # twice in a row: the second is in the step that is done again
    "forward:1:2,restore:2:1",  # while the first one is replaced
    "backward:1:2,backward:2:2",  # two at once, neither the peer of the other
    "optimizer:3:1:SIGSEGV",
]


@pytest.mark.heavy
@pytest.mark.parametrize("plan", [pytest.param(plan, marks=[] if plan in IN_CI else LONG) for plan in DEATHS])
def test_four_ranks_heal_wherever_one_dies(tiny, unbroken, tmp_path, plan):
    assert_heals(tiny, unbroken, tmp_path, plan, LARGE)


PLACES = [death for death in DEATHS if "," not in death and death.count(":") == 2]


@LONG
@pytest.mark.heavy
@pytest.mark.parametrize("how", ["SIGSEGV", "SIGSTOP"])
@pytest.mark.parametrize("place", PLACES)
def test_four_ranks_heal_however_one_dies(tiny, unbroken, tmp_path, place, how):
    """At each of the places above by two more signals; a process that is stopped is killed after a while."""
    assert_heals(tiny, unbroken, tmp_path, f"{place}:{how}", [*LARGE, "trainer.hung_rank_s=20"])


@pytest.mark.heavy
def test_a_rank_that_dies_while_shards_are_sent_is_replaced_and_servers_take_all_again(tiny, tmp_path):
    servers = json.dumps(cpu_servers(sync="shards", sync_timeout_s=60, stall_timeout_s=120))
    options = ["engine.kind=sglang", f"engine.sglang={servers}", "engine.replicas=1", "trainer.steps=3"]
    plan = "shards:1:2,shards:0:4"  # also the rank that calls the servers
    finished, wanted, happened = run_with_deaths(tiny, tmp_path / "run", tmp_path / "log", plan, options)
    assert finished.code == 0, plain(finished)[-4000:]
    repeated = repeated_steps(finished)  # 1 where the copy of the step was still on its way
    assert wanted == happened and len(repeated) == 2 and max(repeated) <= 1
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["engine/restarts"] == lines[-1]["engine/fenced"] == 0
    assert all(line["sync/servers"] == 1 for line in lines)


@pytest.mark.heavy
def test_a_rank_that_is_frozen_is_killed_and_replaced(tiny, unbroken, tmp_path):
    """Stopped in its forward pass, where the others wait for it in a collective call."""
    plan, options = "forward:1:3:SIGSTOP", [*LARGE, "trainer.hung_rank_s=20"]
    assert assert_heals(tiny, unbroken, tmp_path, plan, options) == [0]


@pytest.mark.heavy
def test_a_rank_and_its_peer_end_the_run_which_resumes(tiny, reference, tmp_path):
    plan = "forward:0:4,forward:1:4"
    finished, wanted, happened = run_with_deaths(tiny, tmp_path / "run", tmp_path / "log", plan, AS_REFERENCE)
    assert finished.code == 1 and wanted == happened
    assert "nobody has the state of that rank any more. --resume goes on from the newest" in finished.last_line
    assert last_step(tmp_path / "run") == 3
    options = [f"trainer.run_dir={tmp_path / 'run'}", *AS_REFERENCE, HEALS]
    trained(["train", tiny.config, *options, "--resume"], tmp_path / "again")
    assert_same_run(tmp_path / "run", reference, range(1, 9))


@pytest.mark.heavy
def test_a_rank_that_dies_again_and_again_ends_the_run(tiny, tmp_path):
    plan = ",".join(f"forward:1:{n}" for n in range(2, 6))
    options = [*AS_REFERENCE, "trainer.max_replacements=2"]
    finished, _, happened = run_with_deaths(tiny, tmp_path / "run", tmp_path / "log", plan, options)
    assert finished.code == 1 and len(happened) == 3
    assert "allowed: 2 (trainer.max_replacements)" in finished.last_line
