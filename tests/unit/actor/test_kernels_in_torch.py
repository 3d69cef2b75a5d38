"""The arithmetic of the Triton kernels, program by program in torch, against plain log_softmax in fp64."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import triton_in_torch

import megatron_daro.actor
from megatron_daro.actor import logprobs as logprobs_module
from megatron_daro.actor.logprobs import vocab_parallel_logprobs
from megatron_daro.errors import ConfigError

T, V, VP, D = 21, 70, 73, 24  # three columns of padding; no size is a multiple of a tile


@pytest.fixture
def kernels(monkeypatch):
    """The module, with tiles smaller than the operands; one that another test has imported is back afterwards."""
    torch.manual_seed(20)
    for name, module in triton_in_torch.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "megatron_daro.actor.logprob_kernels", raising=False)
    monkeypatch.delattr(megatron_daro.actor, "logprob_kernels", raising=False)
    found = importlib.import_module("megatron_daro.actor.logprob_kernels")
    small = found.TileShape(rows=16, columns=16, depth=16, columns_per_part=32)
    found.shape_of_tiles = found.tile_shape
    monkeypatch.setattr(found, "tile_shape", lambda dtype: small)
    yield found
    del sys.modules["megatron_daro.actor.logprob_kernels"]
    del megatron_daro.actor.logprob_kernels


def make_case(dtype=torch.float32, scale=1.0):
    hidden = (torch.randn(T, D, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(VP, D, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,))


def plain(hidden, weight, labels, temperature=1.0):
    logits = (hidden.double() @ weight.double().t())[:, :V] / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    return distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def by_kernels(hidden, weight, labels, **options):
    chunks = {"chunk_tokens": 17, "chunk_vocab": 40}
    return vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, kernel="triton", **chunks, **options)


def gradients(outputs, inputs):
    ramp = torch.linspace(-1.0, 2.0, len(outputs[0]), dtype=outputs[0].dtype)
    return torch.autograd.grad((outputs[0] * ramp).sum() + (outputs[1] * ramp.flip(0) * 0.7).sum(), inputs)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("dtype", "temperature", "narrow"), [(torch.float32, 0.6, 1e-5), (torch.bfloat16, 1.0, 1e-2)])
def test_values_and_gradients_are_those_of_log_softmax(kernels, dtype, temperature, narrow):
    hidden, weight, labels = make_case(dtype)
    exact = plain(hidden, weight, labels, temperature)
    got = by_kernels(hidden, weight, labels, temperature=temperature)
    for ours, want in zip(got, exact, strict=True):
        assert ours.dtype == torch.float32 and (ours.double() - want).abs().max() < 1e-5
    for ours, want in zip(gradients(got, (hidden, weight)), gradients(exact, (hidden, weight)), strict=True):
        assert ours.dtype == dtype and relative(ours, want) < narrow


@pytest.mark.parametrize("options", [{"with_entropy": False}, {}])
def test_gradients_without_one_of_the_entropy(kernels, options):
    hidden, weight, labels = make_case()
    got, want = by_kernels(hidden, weight, labels, **options)[0], plain(hidden, weight, labels)[0]
    pairs = [torch.autograd.grad(values.square().sum(), (hidden, weight)) for values in (got, want)]
    assert all(relative(ours, theirs) < 1e-5 for ours, theirs in zip(*pairs, strict=True))


@pytest.mark.parametrize("cut", [0, 1, 32, 50])
def test_columns_of_two_ranks_give_the_statistics_and_gradients_of_one(kernels, cut):
    hidden, weight, labels = (x.detach() for x in make_case())
    parts = [(weight[:cut].clone(), 0), (weight[cut:V].clone(), cut)]
    max_T, sum_T, _, target_T = kernels.statistics(hidden, weight[:V].clone(), labels, first_id=0, temperature=0.8)
    logits = hidden @ weight[:V].t() / 0.8
    torch.testing.assert_close(max_T, logits.amax(1))
    torch.testing.assert_close(target_T, logits.gather(1, labels[:, None])[:, 0])
    halves = [kernels.statistics(hidden, own, labels, first_id=first, temperature=0.8) for own, first in parts]
    if cut == 0:
        assert [values.unique().tolist() for values in halves[0]] == [[pytest.approx(-1e30)], [0], [0], [0]]
    torch.testing.assert_close(sum(half[1] * (half[0] - max_T).exp() for half in halves), sum_T)
    torch.testing.assert_close(halves[0][3] + halves[1][3], target_T)
    given = {
        "max_C": max_T, "log_sum_C": sum_T.log(), "label_grad_C": torch.linspace(-1, 1, T),
        "offset_C": torch.linspace(2, -1, T), "slope_C": torch.linspace(0, 3, T), "temperature": 0.8,
    }  # fmt: skip
    apart = [kernels.logit_gradients(hidden, own, labels, first_id=first, **given) for own, first in parts]
    log_p = logits.log_softmax(1)
    wanted = log_p.exp() * (given["offset_C"][:, None] + given["slope_C"][:, None] * log_p)
    wanted[torch.arange(T), labels] += given["label_grad_C"]
    torch.testing.assert_close(torch.cat(apart, dim=1), wanted)


def test_large_logits_do_not_cancel(kernels):
    hidden, weight, labels = make_case(scale=3000.0)
    got, exact = by_kernels(hidden, weight, labels), plain(hidden, weight, labels)
    assert exact[0].min() < -3000 and all(torch.isfinite(values).all() for values in got)
    assert relative(got[0], exact[0]) < 1e-5 and (got[1].double() - exact[1]).abs().max() < 1e-2


def test_a_nan_is_seen_in_its_row_only(kernels):
    hidden, weight, labels = (x.detach() for x in make_case())
    hidden[5, 3] = float("nan")
    for values in by_kernels(hidden, weight, labels):
        assert values.isnan().nonzero().flatten().tolist() == [5]


def test_no_tokens_and_rows_that_are_not_contiguous(kernels):
    hidden, weight, labels = make_case()
    empty = by_kernels(hidden[:0], weight, labels[:0])
    assert [len(values) for values in empty] == [0, 0]
    assert all((g == 0).all() for g in torch.autograd.grad(empty[0].sum(), (hidden, weight)))
    wide = torch.randn(T, 2 * D)
    for ours, want in zip(by_kernels(wide[:, ::2], weight, labels), plain(wide[:, ::2], weight, labels), strict=True):
        assert (ours - want).abs().max() < 1e-5


def test_fp64_and_a_cpu_without_the_interpreter_are_refused(kernels, monkeypatch):
    hidden, weight, labels = make_case(torch.float64)
    with pytest.raises(ConfigError, match=r"triton with torch.float64"):
        by_kernels(hidden, weight, labels)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"triton on a CPU"):
        by_kernels(*make_case())


def test_a_kernel_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(logprobs_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"triton, .*installed"):
        by_kernels(*make_case())
    hidden, weight, labels = make_case()
    with pytest.raises(ConfigError, match=r"kernel: got 'cuda'"):
        vocab_parallel_logprobs(hidden, weight, labels, kernel="cuda")
