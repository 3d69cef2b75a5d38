"""One rank of the oracle in this process: what the function is handed, what is traced, and what it may return."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_daro.errors import AlgorithmError
from megatron_daro.ports import reserve_port
from megatron_daro.workshop.check_loss.records import step_samples
from megatron_daro.workshop.check_loss.search import AXES, base, difference


@pytest.fixture(scope="module")
def rank():
    from megatron_daro.workshop.check_loss import rank

    return rank


@pytest.fixture(scope="module")
def alone(rank):
    """This process as the only rank; experts are there for whoever wants one."""
    rank.join(base(per_token=True))
    yield rank
    rank.shutdown()


def shipped(batch, step):
    from megatron_daro.workshop.check_loss.shipped import ppo

    return ppo(batch, step)


def run(rank, case, function=shipped):
    """(batches, step, traces, gradients) of a case of one process."""
    batches, steps, traces = [], [], []

    def seen(batch, step):
        batches.append(batch)
        steps.append(step)
        return function(batch, step)

    gradients = rank.run_case(case, seen, traces)
    assert all(step is steps[0] for step in steps)
    return batches, steps[0], traces, gradients


CASE = replace(AXES["masks with holes, micro-batches"], padding=2, masked=(4,))


def test_a_function_is_handed_the_columns_of_its_samples_end_to_end(alone):
    batches, _, traces, _ = run(alone, CASE)
    step, padded = step_samples(CASE), [False] * 2
    assert [batch.sample_ids_M.tolist() for batch in batches] == [[0, 1, 2, 3], [4], [5, 6, 7]]
    for number, (batch, trace) in enumerate(zip(batches, traces, strict=True)):
        ids = batch.sample_ids_M.tolist()
        columns = [step.columns[i] for i in ids]
        lengths = [len(column.labels_R) for column in columns]
        assert batch.mask_T.tolist() == [m for column in columns for m in column.mask_R.tolist()] + padded
        assert batch.old_logprobs_T.tolist() == [v for column in columns for v in column.old_R.tolist()] + [-2.0] * 2
        assert batch.ref_logprobs_T.tolist() == [v for column in columns for v in column.ref_R.tolist()] + [-2.0] * 2
        sequence = [i for i, length in enumerate(lengths) for _ in range(length)]
        assert batch.sequence_T.tolist() == [*sequence, 0, 0] and len(batch) == len(ids)
        of_sample = step.advantages_N[ids][batch.sequence_T]
        assert torch.equal(batch.advantages_T, of_sample)
        assert torch.equal(batch.rewards_T, step.rewards_N[ids][batch.sequence_T])
        assert (
            batch.lengths_M.tolist() == step.lengths_N[ids].tolist()
            and batch.bins_M.tolist() == step.bins_N[ids].tolist()
        )
        assert batch.logprobs_T.dtype == torch.float64 and bool((batch.logprobs_T < 0).all())
        assert (trace.data, trace.context, trace.tensor, trace.micro_batch) == (0, 0, 0, number)
        assert trace.samples_T.tolist() == [i for i, n in zip(ids, lengths, strict=True) for _ in range(n)] + [-1, -1]
        assert trace.positions_T.tolist() == [t for n in lengths for t in range(n)] + [-1, -1]
        assert (
            torch.equal(trace.mask_T, batch.mask_T) and trace.old_T.tolist()[:-2] == batch.old_logprobs_T.tolist()[:-2]
        )
        assert torch.equal(trace.advantages_T[:-2], of_sample[:-2]) and trace.advantages_T[-2:].tolist() == [-1.0, -1.0]
        assert trace.returned == float(batch.mask_T.sum()) and trace.types == ()
        assert torch.equal(trace.coefficients_T != 0, batch.mask_T & (trace.coefficients_T != 0))
    assert any(bool(trace.coefficients_T.any()) for trace in traces)


def test_a_step_is_known_whole_before_its_first_micro_batch(alone):
    case = replace(CASE, per_token=False)
    _, info, _, _ = run(alone, case)
    step, ids = step_samples(case), [0, 1, 2, 3, 4, 5, 6, 7]
    lengths = [len(step.columns[i].labels_R) for i in ids]
    assert info.rank_mask_T.tolist() == [m for i in ids for m in step.columns[i].mask_R.tolist()]
    for column, of_sample in ((info.rank_advantages_T, step.advantages_N), (info.rank_rewards_T, step.rewards_N)):
        assert column.tolist() == [float(of_sample[i]) for i, n in zip(ids, lengths, strict=True) for _ in range(n)]
    assert (info.num_micro_batches, info.tokens, info.samples) == (3, int(step.lengths_N.sum()), 8)
    tokens = [int(step.lengths_N[step.bins_N == k].sum()) for k in range(5)]
    assert info.tokens_per_bin.tolist() == tokens and info.rollouts_per_bin.tolist() == [0, 4, 4, 0, 0]
    assert (info.rollouts_per_prompt, info.calculate_per_token_loss) == (4, False)
    assert (info.data_parallel, info.context_parallel, info.tensor_parallel) == (1, 1, 1)


def test_what_a_case_says_of_its_columns_is_so(alone):
    poisoned, on_policy, whole = (
        run(alone, replace(CASE, **changes))[0][0]
        for changes in ({"poison": True}, {"on_policy": True}, {"whole": True})
    )
    for column in (poisoned.old_logprobs_T, poisoned.ref_logprobs_T):
        assert torch.equal(column.isnan(), ~poisoned.mask_T)
    assert torch.equal(on_policy.old_logprobs_T, on_policy.logprobs_T.detach())
    assert not on_policy.old_logprobs_T.requires_grad
    plain = run(alone, CASE)[0][0]
    assert torch.equal(whole.logprobs_T, plain.logprobs_T) and torch.equal(whole.mask_T, plain.mask_T)


@pytest.mark.parametrize("whole", [False, True])
def test_micro_batches_padding_and_whole_samples_change_no_gradient(alone, whole):
    from megatron_daro.workshop.check_loss.records import Outcome

    split, together = (Outcome(run(alone, case)[3]) for case in (replace(CASE, whole=whole), CASE.reference()))
    assert set(split.gradients) == {"embedding", "output"} and difference(split, together) < 1e-9


def test_a_shorter_type_is_noted_and_can_be_computed_in_float64(alone):
    def rounded(batch, step):
        low = batch.logprobs_T.to(torch.bfloat16)
        return (low * batch.advantages_T.to(torch.bfloat16) * batch.mask_T).sum(), {}

    def exact(batch, step):
        return (batch.logprobs_T * batch.advantages_T * batch.mask_T).sum(), {}

    case = replace(base(per_token=False), holes=CASE.holes)
    plain, precise, wanted = (
        run(alone, made, function)
        for made, function in ((case, rounded), (replace(case, precise=True), rounded), (case, exact))
    )
    assert plain[2][0].types == ("bfloat16",) and plain[2][0].returned is None and wanted[2][0].types == ()
    assert torch.allclose(precise[3]["output"], wanted[3]["output"], rtol=1e-12)
    assert not torch.allclose(plain[3]["output"], wanted[3]["output"], rtol=1e-4)


def test_what_megatron_takes_is_loss_alone_with_a_report_or_with_tokens(rank):
    loss = torch.ones(())
    assert rank._checked(loss) == (loss, {}) and rank._checked((loss, {"a": 1})) == (loss, {"a": 1})
    found = rank._checked((loss, 3, {"a": 1}))
    assert (found[0], int(found[1]), found[2]) == (loss, 3, {"a": 1}) and found[1].dtype == torch.int
    for wrong, name in (
        (1.0, "float"),
        ((loss,), "tuple"),
        ((1.0, {}), "tuple"),
        ((loss, 1, {}, 2), "tuple"),
        ([loss, {}], "list"),
    ):
        with pytest.raises(AlgorithmError, match=rf"returned {name}, allowed are loss, \(loss, report\)"):
            rank._checked(wrong)


def test_parameters_of_all_ranks_are_put_together(rank):
    one, two, three, four = (torch.full((1, 2), float(i)) for i in range(4))
    # Tensor ranks 0 and 1 of the first stage, then of the last.
    parts = [{"embedding": one}, {"embedding": two}, {"output": three}, {"output": four}]
    case = replace(AXES["tensor and pipeline parallel"])
    assert {name: rows[:, 0].tolist() for name, rows in rank.joined(case, parts).items()} == {
        "embedding": [0.0],
        "output": [2.0, 3.0],
    }
    single = [{"embedding": one, "output": two, "experts": three}]
    assert torch.equal(rank.joined(replace(base(per_token=True), expert=1), single)["experts"], three)
    spread = [{"embedding": one, "output": two, f"experts {i}": rows} for i, rows in ((1, four), (0, three))]
    assert rank.joined(AXES["expert parallel"], spread)["experts"][:, 0].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_under_torchrun_the_first_rank_prints_how_far_gradients_are_off(rank, monkeypatch, capsys, factor):
    def function(batch, step):
        share, *rest = shipped(batch, step)
        return (share * (factor if step.num_micro_batches > 1 else 1.0), *rest)

    rank.shutdown()
    with reserve_port("127.0.0.1") as port:
        environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.port)}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
    rank.under_torchrun(AXES["micro-batches"], function)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "largest difference" in line]
    assert [line[0] for line in lines] == ["embedding:", "output:"]
    for line in lines:
        off, size = float(line[3].strip(",")), float(line[5])
        assert off == pytest.approx((factor - 1) * size, rel=0.01, abs=1e-9) and size > 0
    assert not torch.distributed.is_initialized()
