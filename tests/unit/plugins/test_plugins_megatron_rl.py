"""The hooks around Megatron-LM's RL script, with stand-ins that keep tests/contract/hosts/megatron_rl.toml."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_daro.errors import AlgorithmError, CheckpointError, ConfigError
from megatron_daro.plugins import megatron_rl as adapter
from megatron_daro.plugins import megatron_rl as session_module

K, LONG = 4, 12
REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]


def options(**changes):
    base = {"grpo_kl_beta": 0.0, "rl_invented_later": False, "rl_training_cuda_graphs": False}
    base |= {"perform_rl_step": True, "calculate_per_token_loss": True, "rl_use_sequence_packing": True}
    return SimpleNamespace(**{**base, "grpo_group_size": K, **changes})


def rl_options(parser):
    """Some of Megatron-LM's own options of RL."""
    parser.add_argument("--grpo-group-size", type=int, default=2)
    parser.add_argument("--grpo-kl-beta", type=float, default=0.001)
    parser.add_argument("--rl-invented-later", action="store_true")
    parser.add_argument("--rl-training-cuda-graphs", action="store_true")
    return parser


def host_loss(current_logprobs, old_logprobs, advantages, seq_starts, seq_lengths, kl_beta=0.0, entropy_weight=0.0):
    """Token losses of a packed bin, as calculate_grpo_loss makes them; first of its results."""
    packed = torch.zeros_like(current_logprobs)
    for value, start, length in zip(advantages, seq_starts, seq_lengths, strict=False):
        packed[0, start : start + length - 1] = value.item()
    ratio = (current_logprobs - old_logprobs).exp()
    loss = -torch.min(ratio * packed, ratio.clamp(0.8, 1.2) * packed)
    return loss + kl_beta * ratio - entropy_weight * ratio, ratio


class Iterator:
    """Hands out numbers of bins, as RerunDataIterator does."""

    def __init__(self, items):
        self.items = items

    def __next__(self):
        return next(self.items)


class Host:
    """Two packed bins of one rank, 12 rollouts and a padding row; train_step runs the loss of every bin."""

    def __init__(self, per_turn=False, loss=host_loss):
        generator = torch.Generator().manual_seed(0)
        self.rows = [[0, 5, 9, 2], [7, 4, 12], [1, 3], [6, 8, 10, 11]]
        self.lengths = [[3, 3, 3, 3], [4, 3, 0], [6, 5], [3, 3, 3, 3]]
        self.starts = [[sum(n[:i]) for i in range(len(n) + 1)] for n in self.lengths]
        self.masks = (torch.rand(4, LONG - 1, generator=generator) > 0.2).float()
        for mask, lengths in zip(self.masks, self.lengths, strict=True):
            ends = torch.tensor([sum(lengths[: i + 1]) - 1 for i in range(len(lengths))])
            mask[[e for e in ends.tolist() if e < LONG - 1]] = 0
            mask[sum(lengths) :] = 0
        self.logprobs = (-2 + torch.rand(4, LONG - 1, generator=generator)).requires_grad_()
        self.old = -2 + 0.5 * torch.rand(4, LONG - 1, generator=generator)
        self.advantages = torch.zeros(13)
        self.kl_beta, self.passes, self.exits, self.skipped = 0.0, 1, False, 0
        self.rl_utils = SimpleNamespace(
            calculate_grpo_advantages=None,
            prepare_data_for_update=lambda **given: "prepared",
            load_packed_data_by_index=self.load,
            calculate_grpo_loss=loss,
            get_rl_runtime_state=lambda: SimpleNamespace(packing_context=self),
        )
        if per_turn:  # Megatron-LM core_v0.19.0
            self.rl_utils.PAD_TURN_UNIT = (None, -1)
        else:
            self.rl_utils._is_collapsible_rollout = lambda rollout: len(rollout.trajectory) == 1
        self.rl_utils.calculate_grpo_advantages = lambda rewards, num_turns: None
        self.args = SimpleNamespace(save=None, load=None, finetune=False)
        self.training = SimpleNamespace(
            train_step=self.train_step,
            get_num_microbatches=lambda: 2,
            save_checkpoint=lambda iteration, *given: None,
            load_checkpoint=lambda *given: (7, 0),
            get_args=lambda: self.args,
        )
        self.arguments = SimpleNamespace(parse_and_validate_args=options, _add_rl_args=rl_options)
        adapter.install(self.rl_utils, self.training, self.arguments)

    def load(self, bin_idx, packing_context, logprobs_is_correction):
        rows = self.rows[bin_idx]
        sent = self.advantages[rows].bfloat16()
        mask = self.masks[bin_idx : bin_idx + 1]
        return (None, sent, None, mask, None, None, None, self.starts[bin_idx], self.lengths[bin_idx], rows, None)

    def score(self, rewards=REWARDS, failed=()):
        turns = [[0 if (g, i) in failed else 1 for i in range(K)] for g in range(len(rewards))]
        found = self.rl_utils.calculate_grpo_advantages(rewards, turns)
        self.advantages = torch.tensor([*found, 0.0])
        rollouts = [[SimpleNamespace(trajectory=["turn"] * t) for t in group] for group in turns]
        assert self.rl_utils.prepare_data_for_update(rollouts=rollouts) == "prepared"

    def train_step(self, forward_step_func, data_iterator, model, optimizer):
        total, tokens = 0.0, 0
        numbers = [int(next(data_iterator)[0].item()) for _ in range(2)]
        for i in numbers * self.passes:
            found = self.rl_utils.load_packed_data_by_index(i, self, False)
            losses = self.rl_utils.calculate_grpo_loss(
                current_logprobs=self.logprobs[i : i + 1],
                old_logprobs=self.old[i : i + 1],
                advantages=found[1],
                seq_starts=found[7],
                seq_lengths=found[8],
                kl_beta=self.kl_beta,
                entropy_weight=0.0,
            )
            total = total + (losses[0] * found[3]).sum()
            tokens += max(int(found[3].sum()), 1)
        if not self.exits:
            (total / tokens).backward()
        return {"lm loss": torch.zeros(())}, self.skipped, False, self.exits, 0, 1.0, 0, 0

    def step(self, *bins):
        items = iter([(torch.tensor(i),) for i in bins])
        self.logprobs.grad = None
        return self.training.train_step(None, Iterator(items), None, None)[0]

    def reference(self, bins, weights):
        """The gradient of docs/algorithms.md, and L_k."""
        wanted = torch.zeros_like(self.logprobs, dtype=torch.float64)
        tokens, sums = [0] * (K + 1), [0.0] * (K + 1)
        found = []
        for b in bins:
            for row, start, length in zip(self.rows[b], self.starts[b], self.lengths[b], strict=False):
                if row < 12:
                    found += [(b, t, row) for t in range(start, start + length - 1) if self.masks[b, t]]
        k_of = lambda row: int(sum(REWARDS[row // K]))
        for _, _, row in found:
            tokens[k_of(row)] += 1
        for b, t, row in found:
            k, mu = k_of(row), k_of(row) / K
            a = (REWARDS[row // K][row % K] - mu) / ((mu * (1 - mu)) ** 0.5 + 1e-6)
            p = self.logprobs[b, t].detach().double().requires_grad_()
            ratio = (p - self.old[b, t]).exp()
            term = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
            sums[k] += float(term.detach())
            (weights[k] / tokens[k] * term).backward()
            wanted[b, t] = p.grad
        return wanted, [s / t if t else 0.0 for s, t in zip(sums, tokens, strict=True)]


@pytest.fixture
def host(monkeypatch):

    def alone(*, with_context: bool):
        """Sums over data-parallel ranks alone: each context-parallel rank has the sums of whole samples here."""
        assert not with_context
        return lambda vector: vector

    monkeypatch.setattr(session_module, "over_data", alone)
    monkeypatch.setattr(session_module, "over_data_and_stages", alone)
    found = Host()
    found.arguments.parse_and_validate_args()
    return found


def test_gradients_and_metrics_are_the_reference(host):
    host.score()
    for bins in ((0, 1), (2, 3)):
        weights = [1.0, *adapter.session().step.algorithm.weights.tolist()[1:K], 1.0]
        report = host.step(*bins)
        wanted, losses = host.reference(bins, weights)
        got = torch.nan_to_num(host.logprobs.grad).double()
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-5
        for k in range(1, K):
            if report[f"difficulty/tokens/{k}"]:
                assert float(report[f"difficulty/loss/{k}"]) == pytest.approx(losses[k], rel=1e-4, abs=1e-6)
            assert float(report[f"difficulty/weight/{k}"]) == pytest.approx(weights[k])
    assert adapter.session().step.steps == 2
    assert adapter.session().step.algorithm.weights[2] != 1


def test_a_bin_that_is_run_twice_counts_once(host):
    host.score()
    host.passes = 2
    host.step(0, 1)
    assert adapter.session().step.steps == 1


def test_the_state_lies_beside_the_checkpoint(host, tmp_path):
    """Whatever of the optimizer is saved and loaded, as the scheduler's absence here."""
    host.score()
    host.step(0, 1)
    host.args.save = host.args.load = str(tmp_path)
    host.training.save_checkpoint(7, None, None, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    saved = adapter.session().step.state_dict()
    host.arguments.parse_and_validate_args()
    host.training.load_checkpoint(None, None, None)  # the weights of a reference model
    assert adapter.session().step.steps == 0
    host.training.load_checkpoint(None, None, "scheduler")
    assert adapter.session().step.state_dict() == saved
    host.arguments.parse_and_validate_args(grpo_group_size=2 * K)
    with pytest.raises(CheckpointError, match="rollouts_per_prompt"):
        host.training.load_checkpoint(None, None, "scheduler")
    (tmp_path / "iter_0000007" / "daro.json").unlink()
    with pytest.raises(CheckpointError, match=r"daro\.json"):
        host.training.load_checkpoint(None, None, "scheduler")


@pytest.mark.parametrize(("tracker", "finetune"), [("7", True), ("release", False), (None, False)])
def test_a_model_alone_needs_no_state(host, tmp_path, tracker, finetune):
    host.args.load, host.args.finetune = str(tmp_path), finetune
    if tracker:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    host.training.load_checkpoint(None, None, "scheduler")
    assert adapter.session().step.steps == 0


def test_an_exit_leaves_the_weights_alone(host):
    host.score()
    host.exits = True
    host.step(0, 1)
    assert adapter.session().step.steps == 0


def test_a_failed_rollout_takes_its_group_out(host):
    found = host.rl_utils.calculate_grpo_advantages(REWARDS, [[1] * K, [1, 0, 1, 1], [1] * K])
    assert [value != 0 for value in found] == [True] * K + [False] * K + [True] * K


def test_rows_follow_turns_that_stand_alone(host):
    host.rl_utils.calculate_grpo_advantages(REWARDS, [[1] * K] * 3)
    rollouts = [
        [SimpleNamespace(trajectory=["t"] * (2 if (g, i) == (0, 1) else 1)) for i in range(K)] for g in range(3)
    ]
    host.rl_utils.prepare_data_for_update(rollouts=rollouts)
    assert adapter.session().bins_R.tolist() == [1] * (K + 1) + [3] * K + [2] * K


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        ({"rl_use_sequence_packing": False}, "--rl-use-sequence-packing"),
        ({"perform_rl_step": False}, "--perform-rl-step"),
        ({"virtual_pipeline_model_parallel_size": 2}, "--virtual-pipeline"),
        ({"rl_training_cuda_graphs": True}, "--rl-training-cuda-graphs"),
        ({"rl_invented_later": True}, "--rl-invented-later"),
        ({"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type"),
    ],
)
def test_options_that_do_not_go_with_daro_are_named(host, changes, flag):
    with pytest.raises(ConfigError, match=flag):
        host.arguments.parse_and_validate_args(**changes)


def test_one_part_of_a_stage_is_no_interleaving(host):
    for size in (None, 1):
        host.arguments.parse_and_validate_args(virtual_pipeline_model_parallel_size=size)


def test_rewards_that_never_arrive_stop_the_run(host):
    with pytest.raises(AlgorithmError, match="12"):
        host.rl_utils.prepare_data_for_update(rollouts=[[SimpleNamespace(trajectory=["t"])] * K] * 3)
    with pytest.raises(AlgorithmError, match="grpo-group-size"):
        host.score([[1.0, 0.0]])
    with pytest.raises(AlgorithmError, match="correct_above"):
        host.score([[0.3, 0.0, 1.0, 1.0]])


def test_advantages_of_other_rows_stop_the_run(host):
    host.score()
    host.advantages = host.advantages.roll(1)
    with pytest.raises(AlgorithmError):
        host.step(0, 1)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_loss_that_is_not_homogeneous_stops_the_run(host, tmp_path, resumes):
    host.score()
    host.step(0, 1)
    host.args.save = str(tmp_path)
    host.training.save_checkpoint(7, None, None, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    other = Host(loss=lambda **given: tuple(x + 1 for x in host_loss(**given)))
    other.arguments.parse_and_validate_args()
    if resumes:
        other.args.load = str(tmp_path)
        other.training.load_checkpoint(None, None, "scheduler")
    other.score()
    with pytest.raises(AlgorithmError, match="loss of the first step"):
        other.step(0, 1)


@pytest.mark.parametrize("words", [[], ["--no-script"]])
def test_a_start_without_the_script_is_refused(words):
    with pytest.raises(ConfigError, match=r"train_rl\.py"):
        adapter.main(words)


def test_a_version_without_a_function_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"megatron\.training\.arguments\.parse_and_validate_args"):
        adapter.install(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
    modules = {place: SimpleNamespace(**dict.fromkeys(names)) for place, names in adapter.FUNCTIONS.items()}
    with pytest.raises(ConfigError, match=r"_is_collapsible_rollout.*PAD_TURN_UNIT"):
        adapter.install(**modules)


def test_the_newest_release_has_a_row_for_each_turn(host):
    """Megatron-LM core_v0.19.0: calculate_grpo_advantages returns one value for each turn."""
    release = Host(per_turn=True)
    with pytest.raises(ConfigError, match="--context-parallel-size"):
        release.arguments.parse_and_validate_args(context_parallel_size=2)
    release.arguments.parse_and_validate_args()
    turns = [[2, 1, 1, 1], [1] * K, [1] * K]
    found = release.rl_utils.calculate_grpo_advantages(REWARDS, turns)
    assert len(found) == 13
    assert found[0] == found[1] == pytest.approx(-3 * found[2])
    assert found[0] > 1
    release.rl_utils.prepare_data_for_update(
        rollouts=[[SimpleNamespace(trajectory=["t"] * t) for t in group] for group in turns]
    )
    assert adapter.session().bins_R.tolist() == [1] * (K + 1) + [3] * K + [2] * K


def test_the_script_runs_with_its_own_words_and_folder_after_the_hooks_are_in(monkeypatch, tmp_path):
    script, given = tmp_path / "train_rl.py", []
    script.write_text(
        "import sys, megatron.rl.rl_utils as rl\nrl.seen = (__name__, sys.argv, sys.path[0], rl.installed)\n"
    )
    names = ("megatron.rl.rl_utils", "megatron.training.training", "megatron.training.arguments")
    modules = [ModuleType(name) for name in names]
    rl, parent, top = modules[0], ModuleType("megatron.rl"), ModuleType("megatron")
    parent.rl_utils, top.rl, rl.installed = rl, parent, False
    for module in (*modules, parent, top):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(adapter, "install", lambda *found: given.append(found) or setattr(rl, "installed", True))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    adapter.main([str(script), "--lr", "1e-6"])
    assert given == [tuple(modules)]
    assert rl.seen == ("__main__", [str(script), "--lr", "1e-6"], str(tmp_path), True)
    monkeypatch.setitem(sys.modules, names[1], None)
    with pytest.raises(ConfigError, match="Megatron-LM"):
        adapter.main([str(script)])


def test_a_step_keeps_what_the_host_reports_and_moves_its_iterator_on(host):
    moved = []

    class Advancing(Iterator):
        def advance(self):
            moved.append(1)

    host.score()
    result = host.training.train_step(None, Advancing(iter([(torch.tensor(0),), (torch.tensor(1),)])), None, None)
    assert moved == [1] and result[0]["lm loss"] == 0 and "difficulty/weight/2" in result[0] and result[5] == 1.0


def test_without_packed_data_the_run_stops(host):
    host.score()
    host.rl_utils.get_rl_runtime_state = lambda: SimpleNamespace(packing_context=None)
    with pytest.raises(AlgorithmError, match="--rl-use-sequence-packing"):
        host.step(0, 1)


@pytest.mark.parametrize(("skipped", "taken"), [(0, True), (1, False)])
def test_weights_move_where_megatron_skipped_no_iteration(host, skipped, taken):
    host.score()
    host.skipped = skipped
    report = host.step(0, 1)
    assert float(report["difficulty/skipped"]) == float(not taken)
    assert (adapter.session().step.algorithm.weights.tolist() == [1.0] * 5) == (not taken)
