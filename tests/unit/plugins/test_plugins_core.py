"""The core of the adapters against the slow reference, over ranks and uneven micro-batches; and what it refuses."""

from __future__ import annotations

import itertools
import json
import math

import algo_reference as reference
import pytest
import torch
from plugin_ranks import Ranks, run_processes

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import AlgorithmError, CheckpointError
from megatron_daro.plugins.core import (
    DifficultyStep,
    SampleSums,
    bins_of_pass_rates,
    consecutive_groups,
    resume,
    save_state,
)
from megatron_daro.plugins.options import read_options

K = 4


def alone(vector):
    return vector


def new_step(k=K, **options):
    return DifficultyStep(make_algorithm("daro", rollouts_per_prompt=k, max_response_tokens=1, **options))


def split(samples, num_ranks, num_micro_batches):
    """Uneven parts: [rank][micro-batch] -> sample numbers; the last rank has the fewest."""
    order = list(range(len(samples)))
    cuts = [round(len(order) * (i / num_ranks) ** 0.5) for i in range(num_ranks + 1)]
    ranks = [order[a:b] for a, b in itertools.pairwise(cuts)]
    return [[mine[i::num_micro_batches] for i in range(num_micro_batches)] for mine in ranks]


def rank_step(step, samples, micro_batches, reduce, **end):
    """One optimizer step of one rank: ({sample: gradient by its log-probs}, metrics)."""
    bins = pass_rate_bins(
        torch.tensor([s.correct for s in samples]), torch.tensor([s.group for s in samples]), step.rollouts_per_prompt
    )
    advantages = step.algorithm.advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64), torch.tensor([s.group for s in samples])
    )
    mine = [i for micro_batch in micro_batches for i in micro_batch]
    step.begin(bins[mine], torch.tensor([len(samples[i].tokens) for i in mine], dtype=torch.int64), reduce)
    gradients = {}
    for micro_batch in micro_batches:
        logprobs = [
            torch.tensor([t[0] for t in samples[i].tokens], dtype=torch.float64, requires_grad=True)
            for i in micro_batch
        ]
        losses = [
            clipped_token_loss(
                logprob, torch.tensor([t[1] for t in samples[i].tokens], dtype=torch.float64), advantages[i]
            )
            for logprob, i in zip(logprobs, micro_batch, strict=True)
        ]
        sums = SampleSums.of_list(losses, [torch.ones(len(samples[i].tokens)) for i in micro_batch])
        weighed = step.weigh(sums, bins[micro_batch])
        if logprobs:
            weighed.backward()
        gradients |= {i: logprob.grad for i, logprob in zip(micro_batch, logprobs, strict=True)}
    return gradients, step.end(reduce, **end)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 1), (2, 3), (3, 5)])
def test_gradients_and_weights_are_the_reference_whatever_the_split(num_ranks, num_micro_batches):
    steps, expected = [new_step() for _ in range(num_ranks)], [reference.AdamWeight() for _ in range(K + 1)]
    for seed in range(3):
        samples = reference.random_step(seed, num_groups=7, k=K)
        weights = [w.w for w in expected]
        loss, gradients, sums = reference.step_loss("daro", samples, K, 1, weights)
        ranks, parts = Ranks(num_ranks), split(samples, num_ranks, num_micro_batches)
        results = ranks.run(
            lambda rank, s=samples, parts=parts, ranks=ranks: rank_step(steps[rank], s, parts[rank], ranks.reduce)
        )
        found = {i: gradient for own, _ in results for i, gradient in own.items()}
        for i, row in enumerate(gradients):
            if row:
                torch.testing.assert_close(found[i], torch.tensor(row, dtype=torch.float64), rtol=1e-5, atol=1e-9)
        bins = reference.bins(samples)
        for _, metrics in results:
            assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
            for k in range(1, K):
                tokens = sum(len(s.tokens) for s, b in zip(samples, bins, strict=True) if b == k)
                assert metrics[f"difficulty/tokens/{k}"] == tokens
                assert metrics[f"difficulty/groups/{k}"] == bins.count(k) / K
                assert metrics[f"difficulty/weight/{k}"] == pytest.approx(weights[k], rel=1e-9)
        for k in range(1, K):
            tokens = sum(len(s.tokens) for s, b in zip(samples, bins, strict=True) if b == k)
            if tokens:
                expected[k].update(abs(sums[k] / tokens))
        for step in steps:
            torch.testing.assert_close(
                step.algorithm.weights[1:K], torch.tensor([w.w for w in expected[1:K]], dtype=torch.float64)
            )


@pytest.mark.parametrize("normalizer", ["batch", "shared"])
def test_one_denominator_for_all_bins_is_that_of_the_step_and_not_of_a_rank(normalizer):
    """As the host's user asks for it. Weights are learnt over the bin's own tokens with shared, over all with batch."""
    steps = [DifficultyStep(read_options(f"daro.normalizer={normalizer}").algorithm(K)) for _ in range(2)]
    expected = [reference.AdamWeight() for _ in range(K + 1)]
    for seed in range(2):
        samples = reference.random_step(seed, num_groups=7, k=K)
        _, gradients, sums = reference.step_loss("daro", samples, K, 1, [w.w for w in expected])
        bins = reference.bins(samples)
        tokens = [sum(len(s.tokens) for s, b in zip(samples, bins, strict=True) if b == k) for k in range(K + 1)]
        ranks, parts = Ranks(2), split(samples, 2, 3)
        results = ranks.run(
            lambda rank, s=samples, parts=parts, ranks=ranks: rank_step(steps[rank], s, parts[rank], ranks.reduce)
        )
        found = {i: gradient for own, _ in results for i, gradient in own.items()}
        for i, row in enumerate(gradients):
            if row:  # of the reference: w_k / N_k
                wanted = torch.tensor(row, dtype=torch.float64) * tokens[bins[i]] / sum(tokens[1:K])
                torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=1e-9)
        for k in range(1, K):
            if tokens[k]:
                expected[k].update(abs(sums[k] / (tokens[k] if normalizer == "shared" else sum(tokens[1:K]))))
    wanted = torch.tensor([w.w for w in expected[1:K]], dtype=torch.float64)
    assert wanted.unique().numel() == K - 1
    for step in steps:
        torch.testing.assert_close(step.algorithm.weights[1:K], wanted)


def test_a_denominator_per_micro_batch_would_be_seen():
    """The bug that shipped elsewhere: begin for every micro-batch inflates the gradient by their number."""
    samples = reference.random_step(0, num_groups=7, k=K)
    _, gradients, _ = reference.step_loss("daro", samples, K, 1, [1.0] * (K + 1))
    step, bins, total = new_step(), torch.tensor(reference.bins(samples)), 0.0
    for part in split(samples, 1, 3)[0]:
        step.begin(bins[part], torch.tensor([len(samples[i].tokens) for i in part]), alone)
        ones = torch.tensor([float(len(samples[i].tokens)) for i in part], dtype=torch.float64)
        total += float(step.weigh(SampleSums(ones, ones, ones), bins[part]))
    present = len({b for b, s in zip(bins.tolist(), samples, strict=True) if s.tokens and 0 < b < K})
    assert total > 1.5 * present, "a mean of ones over each bin is one; per micro-batch it is one for each of them"
    assert any(any(row) for row in gradients)


def test_tokens_that_the_loss_did_not_see_stop_the_run():
    step = new_step()
    step.begin(torch.tensor([1, 2]), torch.tensor([3, 4]), alone)
    three = torch.tensor([3.0], dtype=torch.float64)
    step.weigh(SampleSums(three, three, three), torch.tensor([1]))
    with pytest.raises(AlgorithmError, match=r"\[0, 3, 4, 0, 0\].*\[0, 3, 0, 0, 0\]"):
        step.end(alone)


def test_a_loss_without_a_step_is_refused():
    ones = torch.ones(1, dtype=torch.float64)
    with pytest.raises(AlgorithmError):
        new_step().weigh(SampleSums(ones, ones, ones), torch.tensor([1]))


@pytest.mark.parametrize("broken", ["not applied", "not finite"])
def test_weights_stay_where_they_were_without_an_update(broken):
    step = new_step()
    step.begin(torch.tensor([1]), torch.tensor([2]), alone)
    value = torch.tensor([math.nan if broken == "not finite" else 5.0], dtype=torch.float64)
    step.weigh(SampleSums(value, value, torch.tensor([2.0], dtype=torch.float64)), torch.tensor([1]))
    metrics = step.end(alone, applied=broken == "not finite")
    assert metrics["difficulty/skipped"] == 1
    assert step.algorithm.weights.tolist() == [1.0] * (K + 1)


def test_nan_in_a_bin_without_signal_reaches_no_gradient():
    step = new_step()
    step.begin(torch.tensor([0, 1]), torch.tensor([1, 1]), alone)
    losses = torch.tensor([math.nan, 2.0], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, dtype=torch.float64)
    weighed = step.weigh(SampleSums(losses, ones, ones), torch.tensor([0, 1]))
    weighed.backward()
    assert float(weighed.detach()) == 2.0
    assert losses.grad.tolist() == [0.0, 1.0]


def test_rows_and_lists_sum_alike_and_masked_nan_is_nothing():
    losses = torch.tensor([[1.0, -2.0, math.nan], [4.0, math.nan, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    rows = SampleSums.of_rows(losses, mask)
    ragged = SampleSums.of_list([losses[0, :2], losses[1, :1]], [mask[0, :2], mask[1, :1]])
    for sums in (rows, ragged):
        assert sums.losses_M.tolist() == [-1.0, 4.0]
        assert sums.abs_losses_M.tolist() == [3.0, 4.0]
        assert sums.lengths_M.tolist() == [2.0, 1.0]
    assert len(SampleSums.of_list([], []).losses_M) == 0


@pytest.mark.parametrize(
    ("k", "dtype"),
    [*((k, torch.float32) for k in (2, 3, 7, 16, 64, 1000)), *((k, torch.bfloat16) for k in (2, 3, 7, 16, 24))],
)
def test_pass_rates_come_back_as_bins(k, dtype):
    bins = torch.arange(k + 1)
    assert bins_of_pass_rates((bins / k).to(dtype), k).tolist() == bins.tolist()


@pytest.mark.parametrize("value", [0.3, -0.25, 1.25, math.nan])
def test_what_is_no_pass_rate_is_refused(value):
    with pytest.raises(AlgorithmError, match=f"got {value:g}"):
        bins_of_pass_rates(torch.tensor([0.5, value]), K)


def taught(**options):
    step = new_step(**options)
    for seed in range(3):
        samples = reference.random_step(seed, num_groups=7, k=step.rollouts_per_prompt)
        rank_step(step, samples, [list(range(len(samples)))], alone)
    return step


def test_a_resumed_run_goes_on_exactly(tmp_path):
    step, resumed = taught(), new_step()
    save_state(step, tmp_path / "deep" / "daro.json")
    resume(resumed, tmp_path / "deep" / "daro.json", start_fresh=False)
    assert resumed.state_dict() == step.state_dict()
    assert resumed.steps == 3
    samples = reference.random_step(9, num_groups=7, k=K)
    for one in (step, resumed):
        rank_step(one, samples, [list(range(len(samples)))], alone)
    assert resumed.state_dict() == step.state_dict()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["daro.json"], "nothing half-written is left"


def test_a_state_of_another_k_is_refused_and_changes_nothing(tmp_path):
    save_state(taught(), tmp_path / "daro.json")
    other = new_step(k=8)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="rollouts_per_prompt"):
        resume(other, tmp_path / "daro.json", start_fresh=False)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", '{"format": 2, "steps": 1}', '{"format": 1, "steps": 1.5}', '{"format": 1, "steps": 3}'],
)
def test_a_missing_or_torn_state_is_refused_and_changes_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "daro.json").write_text(content)
    step = new_step()
    with pytest.raises(CheckpointError, match="daro.json" if content is None else None):
        resume(step, tmp_path / "daro.json", start_fresh=False)
    assert step.state_dict() == new_step().state_dict()


def resumed_on(folder, start_fresh):
    """What a rank takes over from its own node's folder: (steps, weights), or the error."""
    step = new_step()
    try:
        resume(step, folder / "daro.json", start_fresh=start_fresh)
    except CheckpointError as error:
        return str(error)
    return step.steps, step.algorithm.weights.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("start_fresh", "of_other"), [(False, 0), (True, 0), (False, 3), (False, 4), (True, None)])
def test_ranks_with_a_folder_on_each_node_take_over_one_state(tmp_path, start_fresh, of_other):
    """The file is written by one rank: the second node has none (0), the same, or that of another step."""
    folders, steps = [tmp_path / "node_a", tmp_path / "node_b"], taught()
    if of_other is not None:
        save_state(steps, folders[1] / "daro.json")
    if of_other:
        steps.steps = of_other
        save_state(steps, folders[0] / "daro.json")
    found = run_processes(resumed_on, tmp_path / "store", *((folder, start_fresh) for folder in folders))
    if of_other == 4:
        assert all("different contents on different nodes" in error and "on rank 1" in error for error in found)
    else:
        assert (
            found[0]
            == found[1]
            == ((0, [1.0] * (K + 1)) if of_other is None else (3, steps.algorithm.weights.tolist()))
        )


def test_the_first_step_of_a_process_says_that_daro_is_in_force(caplog):
    step = new_step()
    for seed in range(2):
        samples = reference.random_step(seed, num_groups=7, k=K)
        rank_step(step, samples, [list(range(len(samples)))], alone)
    (line,) = (record.getMessage() for record in caplog.records if "in force" in record.getMessage())
    assert "optimizer step 1" in line and "1/4 to 3/4" in line


def test_only_an_algorithm_with_difficulty_weights():
    with pytest.raises(AlgorithmError, match="daro"):
        DifficultyStep(make_algorithm("grpo", rollouts_per_prompt=K, max_response_tokens=1))


def test_groups_are_k_rows_of_one_prompt():
    prompts = torch.tensor([[1, 2]] * K + [[1, 2]] * K)
    assert consecutive_groups(prompts, K, "n").tolist() == [0] * K + [1] * K, "two groups may have one prompt"
    with pytest.raises(AlgorithmError, match="got 7"):
        consecutive_groups(prompts[:7], K, "n")
    prompts[6, 1] = 3
    with pytest.raises(AlgorithmError, match="group 1"):
        consecutive_groups(prompts, K, "n")


def test_metrics_are_of_the_step_before_the_weights_move():
    step = new_step()
    step.begin(torch.tensor([1, 1, 2, 4]), torch.tensor([2, 1, 4, 5]), alone)
    step.note(
        *(torch.tensor([0.0, n, 2 * n, 0.0, 0.0], dtype=torch.float64) for n in (6.0, 9.0)),
        torch.tensor([0.0, 3, 4, 0, 5], dtype=torch.float64),
        2.5,
    )
    metrics = step.end(alone)
    groups = {"difficulty/groups/1": 0.5, "difficulty/groups/2": 0.25, "difficulty/groups/4": 0.25}
    tokens = {"difficulty/tokens/1": 3, "difficulty/tokens/2": 4, "difficulty/tokens/4": 5}
    losses = {"difficulty/loss/1": 2.0, "difficulty/loss/2": 3.0, "difficulty/loss/4": 0.0}
    none = {f"difficulty/{what}/{k}": 0.0 for what in ("groups", "tokens") for k in (0, 3)}
    weights = {f"difficulty/weight/{k}": 1.0 for k in (1, 2, 3)}
    assert metrics.pop("loss/total") == 2.5, "weights of 1 add nothing"
    assert metrics == {
        **groups,
        **tokens,
        **losses,
        **none,
        **weights,
        "loss/policy": 2.5,
        "difficulty/clamped": 0.0,
        "difficulty/skipped": 0.0,
    }
    assert step.steps == 1
    totals = step.begin(torch.tensor([1, 2]), torch.tensor([3, 4]), alone)
    extra = step.algorithm.extra_loss(totals)
    step.note(*torch.zeros(2, K + 1), totals.tokens_per_bin, 0.5)
    assert step.end(alone)["loss/total"] == pytest.approx(0.5 + extra) and abs(extra) > 1e-3


def test_the_file_of_a_saved_state(tmp_path):
    step = taught()
    save_state(step, tmp_path / "daro.json")
    assert json.loads((tmp_path / "daro.json").read_text()) == {
        "format": 1,
        "steps": 3,
        "algorithm": step.algorithm.state_dict(),
    }
