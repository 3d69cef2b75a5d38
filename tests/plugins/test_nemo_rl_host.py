"""The adapter inside NeMo-RL's own GRPO script and trainer, and around its loss; see nemo_rl_run.py.

Needs a checkout of NeMo-RL, named by MEGATRON_DARO_NEMO_RL, and what it imports (transformers below 5.12, scipy,
soundfile, torchdata, ray); else skipped.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import rollout_batches as batches
import torch
from algo_reference import AdamWeight
from host_ranks import unlike

from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError
from megatron_daro.plugins import nemo_rl as adapter

K, VOCAB = batches.K, batches.VOCAB
TRACKERS = ("mlflow", "swanlab", "wandb", "pynvml", "prometheus_client", "matplotlib", "matplotlib.pyplot")


@pytest.fixture(scope="module")
def host():
    """NeMo-RL's loss module and data dictionary; experiment trackers it imports are empty."""
    if not os.environ.get("MEGATRON_DARO_NEMO_RL"):
        pytest.skip("needs a checkout of NeMo-RL named by MEGATRON_DARO_NEMO_RL")
    sys.path.insert(0, os.environ["MEGATRON_DARO_NEMO_RL"])
    for name in (name for name in TRACKERS if name.split(".")[0] not in sys.modules and not _found(name)):
        module = MagicMock()
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)
    try:
        from nemo_rl.algorithms.loss import loss_functions
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    except (ImportError, AssertionError) as error:
        pytest.skip(f"NeMo-RL cannot be imported here: {error}")
    return SimpleNamespace(losses=loss_functions, dictionary=BatchedDataDict)


def _found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def clipped(host, **options):
    config = host.losses.ClippedPGLossConfig(**{"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, **options})
    return host.losses.ClippedPGLossFn(config)


def train_data(host, whole):
    """What grpo_train hands to policy.train, but for the advantages."""
    length = max(len(s.prompt) + len(s.response) for s in whole)

    def column(values, dtype):
        return torch.stack([torch.tensor(v + [0] * (length - len(v)), dtype=dtype) for v in values])

    old = column([[0.0] * len(s.prompt) + s.old for s in whole], torch.float64)
    return host.dictionary(
        {
            "input_ids": column([s.prompt + s.response for s in whole], torch.int64),
            "input_lengths": torch.tensor([len(s.prompt) + len(s.response) for s in whole]),
            "generation_logprobs": old.clone(),
            "prev_logprobs": old,
            "reference_policy_logprobs": old - 0.1,
            "token_mask": column([[0] * len(s.prompt) + s.mask for s in whole], torch.float64),
            "sample_mask": torch.ones(len(whole), dtype=torch.float64),
        }
    )


class Policy:
    """Shards rows over ranks, splits them unevenly, sums losses, steps; metrics as NeMo-RL gathers them."""

    def __init__(self, ranks, rows):
        self.cfg, self.ranks = {"train_global_batch_size": rows}, ranks
        self.table = batches.start_table().requires_grad_()
        self.gradients, self.saved = [], []

    def train(self, data, loss_fn, **options):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        tokens, found = mask.sum(), {}
        self.table.grad = None
        for rank in range(self.ranks):
            rows = list(range(rank, len(mask), self.ranks))
            for part in (rows[:1], rows[1:5], rows[5:]):
                micro_batch = data.select_indices(part)
                ids = micro_batch["input_ids"]
                logprobs = torch.log_softmax(self.table[ids[:, :-1]], -1).gather(-1, ids[:, 1:, None])[..., 0]
                loss, metrics = loss_fn(logprobs, micro_batch, torch.tensor(len(mask)), tokens)
                loss.backward()
                for name, value in metrics.items():
                    found.setdefault(name, []).append(value)
        self.gradients.append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= batches.LEARNING_RATE * self.table.grad
        return {"all_mb_metrics": found, "grad_norm": self.table.grad.norm()}

    def save_checkpoint(self, weights_path, **options):
        self.saved.append(weights_path)


def config_of(**changes):
    """As NeMo-RL 0.6 hands it out; 0.7 and later have models with the same names."""
    sections = {"grpo": {"num_generations_per_prompt": K, "use_leave_one_out_baseline": False}, "loss_fn": {}}
    for path, value in changes.items():
        section, option = path.split("__", 1)
        sections.setdefault(section, {})[option] = value
    return sections


def start(host, ranks, **options):
    daro = adapter.Daro(K, adapter.read_options())
    policy = Policy(ranks, batches.GROUPS * K)
    return adapter.DaroAdvantages(daro), daro, policy, adapter.DaroLoss(clipped(host, **options))


def one_step(host, estimator, wrapped, loss_fn, whole):
    data = train_data(host, whole)
    mask = data["token_mask"] * data["sample_mask"][:, None]
    data["advantages"] = estimator.compute_advantage(
        prompt_ids=torch.tensor([[s.group, 1] for s in whole]),
        rewards=torch.tensor([s.reward for s in whole], dtype=torch.float64),
        mask=mask,
        repeated_batch=None,
    )
    return wrapped.train(data, loss_fn, timer=None)


@pytest.mark.parametrize("kl", [0.0, 0.5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_and_weights_are_the_reference(host, ranks, kl):
    estimator, daro, policy, loss_fn = start(host, ranks, reference_policy_kl_penalty=kl)
    wrapped = daro.wrap(policy)
    for seed in range(3):
        whole, table = batches.samples(seed), policy.table.detach().clone().requires_grad_()
        weights = daro.step.algorithm.weights.tolist()
        losses = batches.reference(table, whole, whole, weights)
        result = one_step(host, estimator, wrapped, loss_fn, whole)
        metrics = {name: values[0] for name, values in result["all_mb_metrics"].items() if "/" in name}
        for k in range(1, K):
            if metrics[f"difficulty/tokens/{k}"]:
                assert metrics[f"difficulty/loss/{k}"] == pytest.approx(losses[k], rel=1e-4, abs=1e-5)
            assert metrics[f"difficulty/weight/{k}"] == weights[k]
        if not kl:
            gap = (policy.gradients[-1] - table.grad).abs().max() / table.grad.abs().max()
            assert float(gap) < 1e-5
    assert daro.step.algorithm.weights[2] != 1


def test_a_resumed_run_has_the_same_state(host, tmp_path):
    estimator, daro, policy, loss_fn = start(host, 1)
    one_step(host, estimator, daro.wrap(policy), loss_fn, batches.samples(0))
    daro.wrap(policy).save_checkpoint(str(tmp_path / "policy" / "weights"))
    _, resumed, _, _ = start(host, 1)
    resumed.resume(tmp_path)
    assert resumed.step.state_dict() == daro.step.state_dict()
    with pytest.raises(CheckpointError, match=r"daro\.json"):
        resumed.resume(tmp_path / "elsewhere")


def test_columns_that_do_not_arrive_stop_the_run(host):
    """The bug that shipped there: rewards never reached the loss, which was inert in silence."""
    _, _, policy, loss_fn = start(host, 1)
    data = train_data(host, batches.samples(0))
    data["advantages"] = torch.zeros_like(data["token_mask"])
    with pytest.raises(AlgorithmError, match="daro_bin, daro_coefficient"):
        policy.train(data, loss_fn)
    with pytest.raises(AlgorithmError, match="pass rates"):
        start(host, 1)[1].wrap(policy).train(data, loss_fn)


def test_what_does_not_go_with_daro_is_refused(host, monkeypatch):
    estimator, daro, policy, loss_fn = start(host, 1)
    policy.cfg["train_global_batch_size"] = 8
    with pytest.raises(ConfigError, match="train_global_batch_size: got 8"):
        one_step(host, estimator, daro.wrap(policy), loss_fn, batches.samples(0))
    with pytest.raises(ConfigError, match="loss_fn"):
        one_step(host, estimator, daro.wrap(policy), clipped(host), batches.samples(0))
    monkeypatch.setenv("MEGATRON_DARO_OPTIONS", "daro.magnitude=token")
    with pytest.raises(ConfigError, match="magnitude"):
        start(host, 1)


def test_the_loss_keeps_the_hosts_attributes(host):
    """NeMo-RL reads them of the loss it is given: for KL beside top-p, and for fused log-probs."""
    loss_fn = pickle.loads(pickle.dumps(adapter.DaroLoss(clipped(host, reference_policy_kl_penalty=0.5))))
    assert loss_fn.reference_policy_kl_penalty == 0.5
    assert loss_fn.loss_type == loss_fn.host.loss_type and loss_fn.input_type == loss_fn.host.input_type
    loss_fn.host.use_fused_linear_logprobs = True
    assert loss_fn.use_fused_linear_logprobs
    assert not hasattr(loss_fn, "something_else")


def test_repeated_prompts_are_groups_of_their_own_and_reordered_rows_are_refused(host):
    estimator, daro, _, _ = start(host, 1)
    prompts, rewards = torch.zeros(2 * K, 3), torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    estimator.compute_advantage(prompt_ids=prompts, rewards=rewards, mask=torch.ones(2 * K, 5))
    assert daro.bins_B.tolist() == [1] * K + [3] * K
    with pytest.raises(AlgorithmError, match="group 0"):
        estimator.compute_advantage(
            prompt_ids=torch.arange(2 * K)[:, None] % 2, rewards=rewards, mask=torch.ones(2 * K, 5)
        )


@pytest.mark.parametrize("program", ["nemo_rl_run.py", "nemo_rl_single_controller_run.py"])
def test_the_real_script_trains_three_steps_with_the_reference_gradient(tmp_path, program):
    """Each of NeMo-RL's scripts through the launcher; a checkpoint without the optimizer's state has DARO's."""
    found = run_script(program, tmp_path)
    assert found["refused"] == ""
    weights, worst = [AdamWeight() for _ in range(K + 1)], 0.0
    for step in range(3):
        table, whole = found["tables"][step].double().requires_grad_(), batches.samples(step)
        for sample in whole:  # every answer's token is trained here, and the old policy is the step's own
            context = [sample.prompt[-1], *sample.response[:-1]]
            sample.mask = [1] * len(sample.response)
            with torch.no_grad():
                picked = torch.log_softmax(table[context], -1).gather(-1, torch.tensor(sample.response)[:, None])
            sample.old = picked[:, 0].tolist()
        bin_losses = batches.reference(table, whole, whole, [weight.w for weight in weights])
        worst = max(worst, unlike(found["gradients"][step], table.grad))
        for k in set(batches.bins_of(whole, whole)) - {0, K}:
            weights[k].update(abs(bin_losses[k]))
    assert worst < 1e-5, worst
    print(f"largest error of 3 steps: {worst:.1e}")
    logged = [values for prefix, _, values in found["metrics"] if prefix == "train" and "difficulty/weight/2" in values]
    assert len(logged) == 3
    assert json.loads((tmp_path / "checkpoints" / "step_3" / "daro.json").read_text())["steps"] == 3


def test_a_single_controller_that_trains_parts_of_a_step_is_refused(tmp_path):
    """The tokens of each pass rate are not known when the first part is trained."""
    found = run_script("nemo_rl_single_controller_run.py", tmp_path, "async_rl.min_groups_for_streaming_train=2")
    assert "async_rl.min_groups_for_streaming_train: got 2; allowed: 6" in found["refused"]
    assert not found["tables"]


def run_script(program, out, *overrides):
    if not os.environ.get("MEGATRON_DARO_NEMO_RL"):
        pytest.skip("needs a checkout of NeMo-RL named by MEGATRON_DARO_NEMO_RL")
    here = Path(__file__).parent
    command = [sys.executable, "-W", "ignore", str(here / program), str(out), *overrides]
    paths = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return torch.load(out / "found.pt", weights_only=False)
