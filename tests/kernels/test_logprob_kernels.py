"""The Triton kernels of the log-probs against plain log_softmax in fp64 and the path of plain torch, interpreted.

`bash tests/triton_kernels.sh` installs Triton in a folder of its own and runs this file: in the environment of the
other tests its presence would change what upstream imports.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: bash tests/triton_kernels.sh", allow_module_level=True)

from megatron_daro.actor import logprob_kernels as kernels
from megatron_daro.actor.logprobs import vocab_parallel_logprobs
from megatron_daro.errors import ConfigError

T, V, VP, D = 37, 150, 153, 40  # three columns of padding; no size is a multiple of a tile
SMALL = kernels.TileShape(rows=16, columns=32, depth=16, columns_per_part=64)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    torch.manual_seed(20)
    monkeypatch.setattr(kernels, "tile_shape", lambda dtype: SMALL)


def make_case(dtype, scale=1.0):
    hidden = (torch.randn(T, D, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(VP, D, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,))


def plain(hidden, weight, labels, temperature):
    logits = (hidden.double() @ weight.double().t())[:, :V] / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    return distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(outputs, inputs):
    ramp = torch.linspace(-1.0, 2.0, len(outputs[0]), dtype=outputs[0].dtype)
    return torch.autograd.grad((outputs[0] * ramp).sum() + (outputs[1] * ramp.flip(0) * 0.7).sum(), inputs)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def by(kernel, hidden, weight, labels, **options):
    chunks = {"chunk_tokens": 20, "chunk_vocab": 70}
    return vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, kernel=kernel, **chunks, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients_are_those_of_log_softmax_and_of_the_torch_path(dtype, temperature):
    hidden, weight, labels = make_case(dtype)
    exact = plain(hidden, weight, labels, temperature)
    got, torchs = (by(kernel, hidden, weight, labels, temperature=temperature) for kernel in ("triton", "torch"))
    for ours, want, theirs in zip(got, exact, torchs, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - want).abs().max() < 1e-5 and (ours - theirs).abs().max() < 4e-6
    narrow = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    of_exact, of_torch = gradients(exact, (hidden, weight)), gradients(torchs, (hidden, weight))
    for ours, want, theirs in zip(gradients(got, (hidden, weight)), of_exact, of_torch, strict=True):
        assert relative(ours, want) < narrow and relative(ours, theirs) < narrow / 2


def test_without_entropy_and_with_no_gradient_of_it():
    hidden, weight, labels = make_case(torch.float32)
    for options in ({"with_entropy": False}, {}):
        logprobs = by("triton", hidden, weight, labels, **options)[0]
        want = by("torch", hidden, weight, labels, **options)[0]
        pairs = [torch.autograd.grad(values.square().sum(), (hidden, weight)) for values in (logprobs, want)]
        assert all(relative(ours, theirs) < 1e-5 for ours, theirs in zip(*pairs, strict=True))


@pytest.mark.parametrize("cut", [0, 1, 64, 100, 150])
def test_columns_of_two_ranks_give_the_statistics_and_gradients_of_one(cut):
    hidden, weight, labels = (x.detach() for x in make_case(torch.float32))
    weight = weight[:V]
    whole = kernels.statistics(hidden, weight, labels, first_id=0, temperature=0.8)
    halves = [
        kernels.statistics(hidden, part, labels, first_id=start, temperature=0.8)
        for part, start in ((weight[:cut], 0), (weight[cut:], cut))
    ]
    largest = torch.maximum(halves[0][0], halves[1][0])
    shrinks = [(half[0] - largest).exp() for half in halves]
    total = sum(half[1] * shrink for half, shrink in zip(halves, shrinks, strict=True))
    torch.testing.assert_close(largest, whole[0])
    torch.testing.assert_close(total, whole[1])
    torch.testing.assert_close(halves[0][3] + halves[1][3], whole[3])
    given = {
        "max_C": whole[0], "log_sum_C": whole[1].log(), "label_grad_C": torch.linspace(-1, 1, T),
        "offset_C": torch.linspace(2, -1, T), "slope_C": torch.linspace(0, 3, T), "temperature": 0.8,
    }  # fmt: skip
    together = kernels.logit_gradients(hidden, weight, labels, first_id=0, **given)
    apart = [
        kernels.logit_gradients(hidden, part, labels, first_id=start, **given)
        for part, start in ((weight[:cut], 0), (weight[cut:], cut))
    ]
    torch.testing.assert_close(torch.cat(apart, dim=1), together)


def test_large_logits_do_not_cancel():
    hidden, weight, labels = make_case(torch.float32, scale=3000.0)
    got, exact = by("triton", hidden, weight, labels), plain(hidden, weight, labels, 1.0)
    assert exact[0].min() < -3000
    assert all(torch.isfinite(values).all() for values in got)
    assert relative(got[0], exact[0]) < 1e-5 and (got[1].double() - exact[1]).abs().max() < 1e-2


def test_a_nan_is_seen_in_its_row_only():
    hidden, weight, labels = (x.detach() for x in make_case(torch.float32))
    hidden[5, 3] = float("nan")
    for values in by("triton", hidden, weight, labels):
        assert values.isnan().nonzero().flatten().tolist() == [5]


def test_no_tokens_and_rows_that_are_not_contiguous():
    hidden, weight, labels = make_case(torch.float32)
    empty = by("triton", hidden[:0], weight, labels[:0])
    assert [len(values) for values in empty] == [0, 0]
    assert all((g == 0).all() for g in torch.autograd.grad(empty[0].sum(), (hidden, weight)))
    wide = torch.randn(T, 2 * D)
    for ours, theirs in zip(*(by(k, wide[:, ::2], weight, labels) for k in ("triton", "torch")), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fp64_is_refused():
    hidden, weight, labels = make_case(torch.float64)
    with pytest.raises(ConfigError, match=r"triton with torch.float64.*logprob_kernel=torch"):
        by("triton", hidden, weight, labels)
