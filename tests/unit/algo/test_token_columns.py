"""Advantages per token: what a class must say, which passes it costs, and the view along the sequence."""

from __future__ import annotations

import pytest
import torch

from megatron_daro.algo.token_columns import COLUMN_NAMES, TokenColumns
from megatron_daro.algo.weighting import Grpo, make_algorithm
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.errors import AlgorithmError


class Whole(Grpo):
    name = "whole"
    token_columns = ("ref_logprobs",)

    def token_advantages(self, tokens):
        return tokens.columns["ref_logprobs"]


class Unknown(Whole):
    token_columns = ("ref_logprobs", "entropies")


class OneName(Whole):
    token_columns = "ref_logprobs"


class NoTargets(Whole):
    token_columns = ("values",)


class NoMethod(Grpo):
    name = "no_method"
    token_columns = ()


class NoColumns(Whole):
    token_columns = None


class OtherArguments(Whole):
    def token_advantages(self, tokens, gamma):
        return gamma


def build(cls):
    return make_algorithm(f"{__name__}:{cls.__name__}", rollouts_per_prompt=4, max_response_tokens=8)


def test_a_class_with_columns_and_method_is_taken():
    assert build(Whole).token_columns == ("ref_logprobs",)
    assert make_algorithm("daro", rollouts_per_prompt=4, max_response_tokens=8).token_columns is None


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Unknown, r"Unknown\.token_columns: got 'entropies'"),
        (OneName, r"OneName\.token_columns: got 'ref_logprobs'"),
        (NoMethod, "NoMethod .*token_advantages"),
        (NoColumns, "NoColumns .*token_columns"),
        (NoTargets, "NoTargets .*value_targets"),
        (OtherArguments, "token_advantages: .*'gamma'"),
    ],
)
def test_what_would_never_be_called_or_computed_is_refused_before_a_start(cls, message):
    with pytest.raises(AlgorithmError, match=message):
        build(cls)


def test_the_passes_of_a_batch():
    forward, recompute = AlgorithmSection(old_logprobs="forward"), AlgorithmSection(old_logprobs="recompute")
    rollout, kl = AlgorithmSection(old_logprobs="rollout"), AlgorithmSection(kl={"coefficient": 0.1})
    assert forward.passes() == ()
    assert recompute.passes() == ("old_logprobs",)
    assert kl.passes() == forward.passes(("ref_logprobs",)) == ("ref_logprobs",)
    assert kl.passes(("old_logprobs",)) == recompute.passes(("ref_logprobs",)) == ("old_logprobs", "ref_logprobs")
    in_reward = AlgorithmSection(kl={"coefficient": 0.1, "place": "reward"})
    assert in_reward.passes() == ("old_logprobs", "ref_logprobs")
    assert rollout.passes(("old_logprobs",)) == (), "the engine's own take their place"
    assert forward.passes(("rollout_logprobs",)) == ()
    assert set(recompute.passes(COLUMN_NAMES)) == set(COLUMN_NAMES) - {"rollout_logprobs"}


@pytest.mark.parametrize("lengths", [[3, 1, 4], [1], [0, 2], [0]])
def test_rows_along_the_sequence_and_back(lengths):
    lengths_N = torch.tensor(lengths)
    values_R = torch.arange(1.0, sum(lengths) + 1)
    zeros_N = torch.zeros(len(lengths))
    tokens = TokenColumns(
        values_R > 0, {}, lengths_N, zeros_N, zeros_N, zeros_N, zeros_N, zeros_N, lambda values: values
    )
    rows_NS = tokens.by_sample(values_R)
    assert rows_NS.shape == (len(lengths), max(lengths))
    parts = values_R.split(lengths)
    for row_S, part, length in zip(rows_NS, parts, lengths, strict=True):
        assert torch.equal(row_S[:length], part)
        assert not row_S[length:].any()
    assert torch.equal(tokens.end_to_end(rows_NS), values_R)
    want_R = torch.tensor([float(n) for n, length in enumerate(lengths) for _ in range(length)])
    assert torch.equal(tokens.per_token(torch.arange(float(len(lengths)))), want_R)
