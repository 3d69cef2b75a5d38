"""Chunked log-probabilities and entropy equal the plain log_softmax, in values and gradients, one rank."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_daro.actor import logprobs as logprobs_module
from megatron_daro.actor.logprobs import vocab_parallel_logprobs
from megatron_daro.config.actor import LOGPROB_TILES
from megatron_daro.errors import ConfigError, DataError

T, V, VP, D = 37, 50, 53, 16  # three columns of padding


@pytest.fixture(autouse=True, params=["kept", "recomputed"])
def logits(request, monkeypatch) -> str:
    """Logits of the forward pass wait for the backward pass, or are computed there once more."""
    torch.manual_seed(20)
    if request.param == "recomputed":
        monkeypatch.setattr(logprobs_module, "KEPT_LOGITS_BYTES", 0)
    return request.param


def make_case(dtype: torch.dtype, num_tokens: int = T, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    hidden = (torch.randn(num_tokens, D, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = torch.randn(VP, D, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (num_tokens,))


def plain(hidden, weight, labels, *, vocab_size=V, temperature=1.0):
    """The textbook way, in fp64, independent of the code under test."""
    logits = (hidden.double() @ weight.double().t())[:, :vocab_size] / temperature
    all_logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, labels.unsqueeze(1)).squeeze(1), entropy


def gradients(outputs, hidden, weight):
    """Gradients of a loss that weighs every position of both outputs differently."""
    logprobs, entropy = outputs
    ramp = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)
    return torch.autograd.grad((logprobs * ramp).sum() + (entropy * ramp.flip(0) * 0.7).sum(), (hidden, weight))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_plain_log_softmax(dtype, tolerance, temperature):
    hidden, weight, labels = make_case(dtype)
    want = plain(hidden, weight, labels, temperature=temperature)
    got = vocab_parallel_logprobs(
        hidden, weight, labels, vocab_size=V, temperature=temperature, chunk_tokens=8, chunk_vocab=16
    )
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= tolerance
    for ours, theirs in zip(gradients(got, hidden, weight), gradients(want, hidden, weight), strict=True):
        assert relative(ours, theirs) <= tolerance


def test_gradcheck():
    hidden, weight, labels = make_case(torch.float64, num_tokens=5)

    def run(h, w):
        return vocab_parallel_logprobs(h, w, labels, vocab_size=V, temperature=0.8, chunk_tokens=2, chunk_vocab=20)

    assert torch.autograd.gradcheck(run, (hidden, weight))


@pytest.mark.parametrize(
    ("chunk_tokens", "chunk_vocab"), [(1, 1), (7, 13), (36, 49), (37, 50), (1000, 1000), (5, None)]
)
def test_chunk_sizes_change_nothing(chunk_tokens, chunk_vocab):
    """37 tokens and 50 columns: most of these leave an uneven last chunk, one of them a single token and column."""
    hidden, weight, labels = make_case(torch.float64)
    want = plain(hidden, weight, labels)
    got = vocab_parallel_logprobs(
        hidden, weight, labels, vocab_size=V, chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(got, hidden, weight), gradients(want, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_hidden_states_of_another_stride():
    _, weight, labels = make_case(torch.float64)
    wide = torch.randn(T, 2 * D, dtype=torch.float64).requires_grad_()
    got = vocab_parallel_logprobs(wide[:, ::2], weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    want = plain(wide[:, ::2], weight, labels)
    for ours, theirs in zip(gradients(got, wide, weight), gradients(want, wide, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_no_tokens():
    hidden, weight, labels = make_case(torch.float32, num_tokens=0)
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V)
    assert logprobs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert grads[0].shape == (0, D)
    assert torch.equal(grads[1], torch.zeros(VP, D))


def test_padded_columns_have_no_probability_and_no_gradient():
    hidden, weight, labels = make_case(torch.float32)
    with torch.no_grad():
        weight[V:] = 100.0  # would win every softmax if it counted
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    for ours, theirs in zip(got, plain(hidden, weight, labels), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-5)
    _, weight_grad = gradients(got, hidden, weight)
    assert torch.equal(weight_grad[V:], torch.zeros(VP - V, D))
    assert (weight_grad[:V].abs().sum(1) > 0).all()


def test_without_vocab_size_every_column_counts():
    hidden, weight, labels = make_case(torch.float64)
    got = vocab_parallel_logprobs(hidden, weight, labels, chunk_vocab=16)
    for ours, theirs in zip(got, plain(hidden, weight, labels, vocab_size=VP), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_bf16_is_exact_up_to_its_inputs():
    """Sums and softmax are fp32, so only the rounding of the gradients to bf16 (2**-8 relative) is left."""
    hidden, weight, labels = make_case(torch.bfloat16)
    want = plain(hidden, weight, labels)
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() <= 1e-5
    exact = gradients(want, hidden, weight)
    for ours, theirs in zip(gradients(got, hidden, weight), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, theirs) <= 2**-8


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_logits_stay_finite(sign):
    """Logits of +-1e4: one column far above, one far below, the rest near zero."""
    hidden = torch.zeros(6, D)
    hidden[:, 0] = sign * 1e4
    hidden.requires_grad_()
    weight = torch.randn(VP, D) * 1e-4
    weight[3, 0], weight[40, 0] = 1.0, -1.0
    weight.requires_grad_()
    labels = torch.tensor([3, 40, 0, 3, 40, 49])
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=4, chunk_vocab=16)
    want = plain(hidden, weight, labels)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-5)
    for grad in gradients(got, hidden, weight):
        assert torch.isfinite(grad).all()


def test_entropy_survives_a_large_common_offset():
    """All logits near 1e4: the entropy is taken about the maximum, so the offset does not eat its digits."""
    hidden = torch.full((4, D), 1.0)
    weight = torch.full((V, D), 1e4 / D)
    _, entropy = vocab_parallel_logprobs(hidden, weight, torch.zeros(4, dtype=torch.long), chunk_vocab=16)
    torch.testing.assert_close(entropy, torch.full((4,), V).log(), rtol=0, atol=1e-5)


def test_nan_is_not_hidden():
    hidden, weight, labels = make_case(torch.float32)
    broken = hidden.detach().clone()
    broken[5] = float("nan")
    logprobs, entropy = vocab_parallel_logprobs(broken, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [index == 5 for index in range(T)]


@pytest.mark.parametrize("which", [0, 1])
def test_loss_over_one_output_only(which):
    hidden, weight, labels = make_case(torch.float64)
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)[which]
    want = plain(hidden, weight, labels)[which]
    pairs = zip(
        torch.autograd.grad((got**2).sum(), (hidden, weight)),
        torch.autograd.grad((want**2).sum(), (hidden, weight)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert relative(ours, theirs) <= 1e-12


def test_without_entropy():
    hidden, weight, labels = make_case(torch.float64)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16, with_entropy=False
    )
    want, _ = plain(hidden, weight, labels)
    assert not entropy.requires_grad
    assert torch.equal(entropy, torch.zeros(T, dtype=torch.float64))
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(logprobs.sum(), (hidden, weight)),
        torch.autograd.grad(want.sum(), (hidden, weight)),
        strict=True,
    ):
        assert relative(ours, theirs) <= 1e-12


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_needed_gradient_is_computed(frozen):
    hidden, weight, labels = make_case(torch.float64)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    leaf = weight if frozen == "hidden" else hidden
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    want = plain(hidden, weight, labels)
    (ours,) = torch.autograd.grad(sum(o.sum() for o in got), (leaf,))
    (theirs,) = torch.autograd.grad(sum(o.sum() for o in want), (leaf,))
    assert relative(ours, theirs) <= 1e-12


class AllocationRecorder(TorchDispatchMode):
    """Largest storage any operation returned, in numbers, and how many matrix products ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("grad", [False, True])
def test_at_most_one_chunk_of_logits_is_alive(grad, logits):
    """256 tokens x 4,096 columns, chunks of 32: no storage may hold more than one chunk (the gradients are smaller);
    three products a chunk where all of them are kept, else four."""
    num_tokens, num_columns, hidden_size, chunk = 256, 4096, 8, 32
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=grad)
    weight = torch.randn(num_columns, hidden_size, requires_grad=grad)
    labels = torch.randint(0, num_columns, (num_tokens,))
    with AllocationRecorder() as recorder:
        logprobs, entropy = vocab_parallel_logprobs(hidden, weight, labels, chunk_tokens=chunk)
        if grad:
            torch.autograd.backward(logprobs.sum() + entropy.sum())
    products = {"kept": 3, "recomputed": 4}[logits] if grad else 1
    assert recorder.products == (num_tokens // chunk) * (num_columns // LOGPROB_TILES["cpu"][1]) * products
    assert recorder.largest <= chunk * num_columns, "more than one chunk of logits was allocated at once"


def test_a_second_backward_pass_over_a_kept_graph_gives_the_same_gradients():
    hidden, weight, labels = make_case(torch.float32)
    outputs = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    loss = sum(output.sum() for output in outputs)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)


def test_recorder_sees_the_plain_way():
    """The recorder is no blind instrument: it reports the whole logits where they exist."""
    hidden, weight = torch.randn(256, 8), torch.randn(4096, 8)
    with AllocationRecorder() as recorder:
        torch.log_softmax(hidden @ weight.t(), dim=-1)
    assert recorder.largest == 256 * 4096


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": torch.full((T,), V)}, DataError, ["tokens", "50"]),
        ({"labels": torch.full((T,), -100)}, DataError, ["tokens", "-100"]),
        ({"labels": torch.zeros(T, dtype=torch.int32)}, DataError, ["labels", "int32"]),
        ({"labels": torch.zeros(T - 1, dtype=torch.long)}, DataError, ["label", "36"]),
        ({"weight": torch.randn(VP, D + 1)}, DataError, ["(53, 17)"]),
        ({"weight": torch.randn(VP, D, 1)}, DataError, ["(53, 16, 1)"]),
        ({"weight": torch.randn(VP, D).bfloat16()}, DataError, ["bfloat16"]),
        ({"vocab_size": VP + 1}, DataError, ["vocab_size", "54"]),
        ({"vocab_size": 0}, DataError, ["vocab_size: got 0"]),
        ({"vocab_start": 1}, DataError, ["vocab_start"]),
        ({"vocab_start": -1}, DataError, ["vocab_start: got -1"]),
        ({"temperature": float("inf")}, ConfigError, ["temperature", "inf"]),
        ({"temperature": 0.0}, ConfigError, ["temperature", "0.0"]),
        ({"chunk_tokens": 0}, ConfigError, ["chunk_tokens", "0"]),
        ({"chunk_vocab": 0}, ConfigError, ["chunk_vocab", "0"]),
    ],
)
def test_wrong_input_is_refused(change, error, words):
    hidden, weight, labels = make_case(torch.float32)
    options = {"labels": labels, "weight": weight, "vocab_size": V} | change
    with pytest.raises(error) as caught:
        vocab_parallel_logprobs(hidden, options.pop("weight"), options.pop("labels"), **options)
    for word in words:
        assert word in str(caught.value)


def test_the_first_and_the_last_token_of_the_vocabulary_are_labels():
    hidden, weight, labels = make_case(torch.float64)
    labels[:2] = torch.tensor([0, V - 1])
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V)[0]
    torch.testing.assert_close(got, plain(hidden, weight, labels)[0], rtol=0, atol=1e-12)
    whole = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=VP, temperature=1e-3)[0]
    torch.testing.assert_close(whole, plain(hidden, weight, labels, vocab_size=VP, temperature=1e-3)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: fp32 products of bf16 factors run only there")
def test_bf16_on_a_gpu():
    hidden, weight, labels = (tensor.detach().cuda() for tensor in make_case(torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    want = plain(hidden, weight, labels)
    got = vocab_parallel_logprobs(hidden, weight, labels, vocab_size=V, chunk_tokens=8, chunk_vocab=16)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4
    for ours, theirs in zip(
        torch.autograd.grad(sum(o.sum() for o in got), (hidden, weight)),
        torch.autograd.grad(sum(o.sum() for o in want), (hidden, weight)),
        strict=True,
    ):
        assert relative(ours, theirs) <= 2**-6
