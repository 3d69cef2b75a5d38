"""Whole runs of `megatron-daro` on the real stack: Ray, Megatron over gloo, embedded engine, verifier processes."""

import ipaddress
import json
import signal

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from cli_runs import assert_same_run, checkpoint, digests, metric_lines, signalled, trained
from documented_metrics import is_documented
from exported_model import assert_is_model_of
from transformers import AutoModelForCausalLM

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step

STEPS = range(1, 9)
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
TRAIN_PART = ("loss/", "ratio/", "policy/", "mismatch/", "difficulty/weight/", "difficulty/loss/", "optimizer/")


def test_run_directory_has_everything_the_contract_names(reference):
    assert yaml.safe_load((reference / "config.yaml").read_text())["trainer"]["steps"] == 8
    assert (reference / "checkpoints" / "latest").read_text().strip() == "step_000008"
    for step in (2, 4, 6, 8):
        files = {path.name for path in checkpoint(reference, step).iterdir()}
        assert {"state.json", "manifest.json"} <= files
        assert json.loads((checkpoint(reference, step) / "state.json").read_text())["step"] == step
    assert list((reference / "tensorboard").glob("events.out.tfevents.*"))
    for step in STEPS:
        groups = read_step(reference, step)
        assert sum(used == "trained" for _, used in groups) == 4
        columns = pq.read_schema(reference / "rollouts" / f"step_{step:06d}.parquet").names
        assert {"tokens", "logprobs", "loss_mask", "version_spans"} <= set(columns)


def test_metrics_have_the_keys_of_the_contract(reference):
    lines = read_metrics(reference)
    assert [line["step"] for line in lines] == [0, *STEPS]
    assert {key for line in lines for key in line if not is_documented(key)} == set()
    for line in lines[1:]:
        assert set(line) >= REQUIRED, REQUIRED - set(line)
        assert all(line[f"difficulty/groups/{k}"] is not None for k in range(5))
        assert line["observe/nonfinite_values"] == 0
    assert lines[3]["timing/checkpoint_s"] > 0  # the save after step 2; no such phase was measured before
    assert [line["step"] for line in lines if "eval/digits/accuracy" in line] == [0, 4, 8]


def test_every_admitted_group_is_accounted_for(reference):
    lines = read_metrics(reference)[1:]
    for line in lines:
        parts = [line[f"rollout/groups_{name}"] for name in ("trained", "filtered", "dropped", "outstanding")]
        assert line["rollout/groups_admitted"] == sum(parts)
    assert lines[-1]["rollout/groups_trained"] == 4 * 8
    assert lines[-1]["rollout/groups_filtered"] > 0
    recorded = [used for step in STEPS for _, used in read_step(reference, step)]
    assert recorded.count("filtered") == lines[-1]["rollout/groups_filtered"]


def test_weights_change_and_difficulty_weights_learn(reference):
    lines = read_metrics(reference)[1:]
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert any(line[f"difficulty/weight/{k}"] != 1.0 for line in lines for k in (1, 2, 3))
    assert digests(checkpoint(reference, 6)) != digests(checkpoint(reference, 8))


def test_report_of_the_run_can_be_written(reference, tmp_path):
    trained(["report", reference, "--output", tmp_path / "report.html"], tmp_path / "log")
    html = (tmp_path / "report.html").read_text()
    assert "step_000008" in html or "Plotly" in html
    assert not (reference / "report.html").exists()


@pytest.fixture(scope="module")
def half_run(tiny, tmp_path_factory):
    """The reference's first four steps, in a run directory of its own."""
    directory = tmp_path_factory.mktemp("half")
    options = [f"trainer.run_dir={directory / 'run'}", "trainer.eval_every_steps=4", "trainer.steps=4"]
    finished = trained(["train", tiny.config, *options, "trainer.export_hf=true"], directory / "log")
    assert finished.stdout.splitlines()[-2].startswith(f"model: {directory / 'run' / 'hf'}, a Hugging Face directory")
    start = finished.stdout.partition("step 1/")[0]
    waits = ["loading torch", "reading the data", "starting Ray", "ranks load the model", "the engine takes its first"]
    waits += ["evaluation before the first step", "step 1: rollout and training"]
    assert sorted(waits, key=start.find) == waits and all(wait in start for wait in waits), "no silence before step 1"
    return directory / "run"


@pytest.mark.heavy
def test_same_seed_twice_is_the_same_run(half_run, reference):
    # common.pt has the length of the learning-rate schedule, 4 steps here; the manifest has the hash of common.pt.
    assert_same_run(half_run, reference, range(1, 5), but=frozenset({"common.pt", "manifest.json"}))


def test_the_exported_model_is_the_policy_of_the_last_checkpoint(half_run, reference):
    """Two tensor-parallel ranks wrote it. The engine sampled the next step of the same run with these weights."""
    assert_is_model_of(half_run / "hf", checkpoint(half_run, 4))
    names = ["config.json", "generation_config.json", "megatron_daro.json", "model.safetensors"]
    assert sorted(path.name for path in (half_run / "hf").iterdir()) == [*names, *TOKENIZER]
    model = AutoModelForCausalLM.from_pretrained(half_run / "hf", dtype="auto")
    rollouts = [rollout for group, _ in read_step(reference, 5) for rollout in group.rollouts]
    assert rollouts and {rollout.weight_version for rollout in rollouts} == {4}
    for rollout in rollouts:
        tokens_S = torch.as_tensor(rollout.tokens).long()
        with torch.no_grad():
            logprobs_S = model(tokens_S[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens_S[1:, None])[:, 0]
        # 1e-5: the engine computes a batch of other shape.
        assert logprobs_S[rollout.prompt_length - 1 :].numpy() == pytest.approx(rollout.logprobs, abs=1e-5)


@pytest.mark.heavy
def test_resume_after_a_whole_run_continues_bit_for_bit(tiny, half_run, reference, tmp_path):
    options = [f"trainer.run_dir={half_run}", "trainer.eval_every_steps=4", "trainer.steps=8", "trainer.export_hf=true"]
    finished = trained(["train", tiny.config, *options, "--resume"], tmp_path / "log")
    assert "resumed from" in finished.stdout and "step_000004" in finished.stdout
    assert_same_run(half_run, reference, STEPS)
    assert_is_model_of(half_run / "hf", checkpoint(half_run, 8))  # in the place of that of step 4
    assert [path for path in half_run.iterdir() if path.name.startswith(".")] == []


def train_part(run_dir):
    return [{k: v for k, v in line.items() if k.startswith(TRAIN_PART)} for line in metric_lines(run_dir, STEPS)]


def test_replay_repeats_the_train_part_exactly(tiny, reference, tmp_path):
    options = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_every_steps=0"]
    trained(["train", tiny.config, *options, "--replay", reference], tmp_path / "log")
    assert len(train_part(reference)) == 8 and all("loss/policy" in line for line in train_part(reference))
    assert train_part(tmp_path / "run") == train_part(reference)
    weights = {k: v for k, v in digests(checkpoint(reference, 8)).items() if k.startswith("shard_")}
    assert weights and weights.items() <= digests(checkpoint(tmp_path / "run", 8)).items()


@pytest.mark.heavy  # losses and gradients of layouts: tests/parallel/test_gradients_exact.py
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["actor.tensor_parallel=1", "actor.pipeline_parallel=2"], id="pp2"),
        pytest.param(["actor.tensor_parallel=1", "actor.data_parallel=2"], id="dp2"),
    ],
)
def test_other_layouts_have_the_same_losses_on_the_same_rollouts(tiny, reference, tmp_path, layout):
    options = [f"trainer.run_dir={tmp_path / 'run'}", "trainer.save_every_steps=0", *layout]
    trained(["train", tiny.config, *options, "--replay", reference], tmp_path / "log")
    found = metric_lines(tmp_path / "run", STEPS)
    wanted = metric_lines(reference, STEPS)
    assert len(found) == len(wanted) == 8
    for mine, theirs in zip(found, wanted, strict=True):
        # 1e-5: fp32 sums in another order, over eight optimizer steps.
        for key in ("loss/policy", "loss/total", "policy/entropy", "mismatch/kl"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-5), (key, mine["step"])
        assert mine["loss/grad_norm"] == pytest.approx(theirs["loss/grad_norm"], rel=1e-4)


@pytest.mark.heavy
def test_two_minibatches_per_batch(tiny, tmp_path):
    run_dir = tmp_path / "run"
    options = [f"trainer.run_dir={run_dir}", "trainer.minibatches_per_batch=2", "trainer.save_every_steps=0"]
    trained(["train", tiny.config, *options], tmp_path / "log")
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(STEPS)
    assert lines[-1]["rollout/groups_trained"] == 2 * 8
    # The first step of a batch is on-policy; the second sees weights that have moved since its rollouts.
    assert all(line["ratio/mean"] == pytest.approx(1.0, abs=1e-6) for line in lines[0::2])
    assert all(line["ratio/mean"] != pytest.approx(1.0, abs=1e-6) for line in lines[1::2])
    versions = {r.weight_version for step in STEPS for group, _ in read_step(run_dir, step) for r in group.rollouts}
    assert versions == {0, 2, 4, 6}


@pytest.mark.heavy
def test_answers_in_segments_and_their_replay(tiny, tmp_path):
    """Half of the longest answer in each batch; the second half is sampled by the next weights."""
    options = ["rollout.segment_tokens=2", "rollout.max_staleness=2", "algorithm.correction.kind=tis"]
    run, again = tmp_path / "run", tmp_path / "again"
    trained(["train", tiny.config, *options, f"trainer.run_dir={run}"], tmp_path / "log")
    trained(["train", tiny.config, *options, f"trainer.run_dir={again}", "--replay", run], tmp_path / "again.log")
    groups = [(step, group) for step in STEPS for group, used in read_step(run, step) if used == "trained"]
    spans = [(step, rollout.version_spans) for step, group in groups for rollout in group.rollouts]
    later = [(step, of_one) for step, of_one in spans if of_one[0][0] > 0]  # the first weights may give both
    assert later and all(tokens <= 2 for _, of_one in later for _, tokens in of_one)
    two = [of_one for _, of_one in later if len(of_one) == 2]
    assert two and all(second == first + 1 and tokens == 2 for (first, tokens), (second, _) in two)
    keys = ("loss/policy", "loss/grad_norm", "mismatch/logprob_abs_mean", "mismatch/corrected_fraction")
    found = [[[line[key] for key in keys] for line in metric_lines(one, STEPS)] for one in (run, again)]
    assert found[0] == found[1]
    assert metric_lines(run, STEPS)[-1]["rollout/groups_unfinished"] >= 0


def test_one_step_of_staleness_overlaps_and_only_loopback_is_listened_on(tiny, tmp_path):
    run_dir = tmp_path / "run"
    options = [f"trainer.run_dir={run_dir}", "rollout.max_staleness=1", "trainer.save_every_steps=0"]
    options += ["trainer.steps=4", "actor.tensor_parallel=1", "actor.pipeline_parallel=2"]
    with signalled(
        ["train", tiny.config, *options], tmp_path / "log",
        name="SIGSTOP", place="train", after_step=2, run_dir=run_dir,
    ) as run:  # fmt: skip
        run.wait_until(run.fired.exists, "stop in the middle of a step")
        listening = listeners(run.processes())
        assert run.named("ray::TrainWorker") and run.named("ray::EngineWorker")
        run.driver.send_signal(signal.SIGCONT)
        finished = run.finish()
        assert run.left_behind() == []
    assert finished.code == 0, finished.stderr
    assert listening, "Ray's own servers must show up here, or this looks in the wrong place"
    assert [f"{who} on {ip}" for who, ip in listening if not is_loopback(ip)] == []
    staleness = [line["rollout/staleness_mean"] for line in read_metrics(run_dir)]
    assert len(staleness) == 4
    assert staleness[0] == 0 and max(staleness) == 1.0


def is_loopback(ip):
    """Also for an IPv4 address in IPv6 clothes (::ffff:127.0.0.1)."""
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(processes):
    """(process name, address) of every listening TCP and every bound UDP socket."""
    found = []
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            unconnected = connection.status == psutil.CONN_LISTEN or (
                connection.status == psutil.CONN_NONE and not connection.raddr
            )
            if unconnected and connection.laddr:
                found.append(
                    (
                        " ".join(process.cmdline())[:120] + f" port {connection.laddr.port} {connection.type.name}",
                        connection.laddr.ip,
                    )
                )
    return found


def test_eval_of_a_checkpoint_is_what_training_measured(tiny, reference, tmp_path):
    out = tmp_path / "out"
    # The configuration is that of the run: nothing but the checkpoint is named.
    finished = trained(["eval", "--checkpoint", checkpoint(reference, 8), "--out", out], tmp_path / "log")
    measured = json.loads((out / "summary.json").read_text())["sets"]["digits"]["metrics"]["avg@1"]["mean"]
    assert measured == pytest.approx(read_metrics(reference)[-1]["eval/digits/accuracy"], abs=1e-4)
    assert "digits" in finished.stdout and (out / "model" / "config.json").exists()
    assert not list((out / "logs").glob("actor_*"))


REQUIRED = {
    "step", "accuracy/mean", "reward/mean", "response/length_mean", "response/truncated_fraction",
    "loss/policy", "loss/total", "loss/grad_norm", "ratio/clip_fraction_high", "ratio/clip_fraction_low",
    "policy/entropy", "mismatch/logprob_abs_mean", "mismatch/kl", "difficulty/clamped",
    "rollout/groups_admitted", "rollout/groups_trained", "rollout/groups_filtered", "rollout/groups_dropped",
    "rollout/groups_outstanding", "rollout/staleness_mean",
    *(f"timing/{phase}_s" for phase in ("rollout", "reward", "logprob", "train", "sync", "step")),
    "throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s",
}  # fmt: skip
