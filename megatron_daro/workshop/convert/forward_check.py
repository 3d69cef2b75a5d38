"""The same tokens through transformers and through Megatron, each from its own checkpoint: do the logits agree?

The last step of `megatron-daro convert --verify`. Runs in this process as a world of one rank, in fp32: transformers on
the CPU, Megatron on the GPU if there is one. If memory is too small, it says so and does not try.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_daro.actor import device, parallel
from megatron_daro.actor.compat import HiddenStateGPTModel, quiet
from megatron_daro.actor.model import build_model, transformer_config
from megatron_daro.actor.weights import load_hf_weights
from megatron_daro.config.model_shape import ModelShape, quantization, read_json, read_model_shape
from megatron_daro.convert.hf_files import HFCheckpoint
from megatron_daro.convert.megatron_weights import MegatronWeights
from megatron_daro.errors import CheckpointError

device.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.packed_seq_params import PackedSeqParams

_TOKENS = 64
_BYTES_PER_PARAMETER = 10  # two models in fp32, read one after the other, and a margin
TOLERANCE = 1e-4


def compare_logits(hf: Path, megatron: Path, cast: str | None = None) -> str:
    """Return a sentence: the largest difference of the logits, or why they were not compared.

    Args:
        hf: checkpoint directory that transformers loads. megatron: Megatron checkpoint of the same weights.
        cast: dtype, by torch's name, that one of the two was cast to; the weights of both are rounded to it first.

    Raises:
        CheckpointError: they differ by more than `TOLERANCE` times the largest logit, or they are not finite.
    """
    if method := quantization(read_json(hf / "config.json")):
        return f"forward pass not compared: {hf} is in {method}; convert it back and verify that"
    shape = read_model_shape(hf)
    needed, free = _BYTES_PER_PARAMETER * shape.num_parameters, psutil.virtual_memory().available
    if needed > free:
        return f"forward pass not compared: it needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    tokens = torch.randint(shape.vocab, (_TOKENS,), generator=torch.Generator().manual_seed(0))
    rounding = getattr(torch, cast) if cast else torch.float32
    expected_TV = _transformers_logits(hf, tokens, rounding)
    if not expected_TV.isfinite().all():
        raise CheckpointError(_why_not_finite(hf))
    actual_TV = _megatron_logits(megatron, shape, tokens, rounding)
    difference, scale = float((actual_TV - expected_TV).abs().max()), float(expected_TV.abs().max())
    if not difference <= TOLERANCE * max(scale, 1.0):
        raise CheckpointError(
            f"the logits of {megatron} and {hf} differ by {difference:.3g} (largest logit {scale:.3g}); the conversion "
            "moved every byte as planned, so the model of config.json is not what Megatron computes. Please report it"
        )
    return (
        f"forward pass: logits of {_TOKENS} tokens differ by at most {difference:.1e} (largest logit {scale:.3g}), fp32"
    )


def _why_not_finite(hf: Path) -> str:
    """Name the first tensor with NaN or infinity, if there is one."""
    with HFCheckpoint(hf) as tensors:
        wrong = next((name for name in tensors if not tensors[name].isfinite().all()), None)
    if wrong is None:
        return f"the logits of transformers for {hf} are not finite in fp32, though all weights are: is it the model?"
    return (
        f"{wrong} holds NaN or infinity, so the logits of {hf} are not finite in transformers either; the conversion "
        "copied the values as they are. Take another checkpoint, or convert without --verify"
    )


def _round(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round every parameter to a dtype, except those without gradient, which a conversion does not cast."""
    for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
        parameter.data.copy_(parameter.data.to(dtype))


def _hidden(model: HiddenStateGPTModel, tokens_T: Tensor) -> Tensor:
    number = len(tokens_T)
    bounds = torch.tensor([0, number], dtype=torch.int32, device=tokens_T.device)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=number, max_seqlen_kv=number
    )
    positions_T = torch.arange(number, device=tokens_T.device)
    return model(tokens_T[None], positions_T[None], None, packed_seq_params=packed)


def _transformers_logits(hf: Path, tokens: Tensor, rounding: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    _round(model, rounding)
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def _megatron_logits(megatron: Path, shape: ModelShape, tokens: Tensor, rounding: torch.dtype) -> Tensor:
    target = device.current()
    with quiet():
        return _logits(megatron, shape, tokens.to(target), rounding)


def _logits(megatron: Path, shape: ModelShape, tokens_T: Tensor, rounding: torch.dtype) -> Tensor:
    """Return Megatron's logits, in a world of this rank alone unless there is a world already."""
    owns_world = not dist.is_initialized()
    if owns_world:
        backend = "nccl" if tokens_T.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel.build_groups(parallel.Layout(), seed=0)
        (model,) = build_model(shape, transformer_config(shape, parallel.Layout(), dtype="fp32"))
        model.eval()
        with MegatronWeights(megatron, shape) as weights:
            load_hf_weights([model], shape, weights)
        _round(model, rounding)
        with torch.no_grad():
            hidden_T1D = _hidden(model, tokens_T)
            return (hidden_T1D[:, 0] @ model.output_weight().T)[:, : shape.vocab].cpu()
    finally:
        if owns_world:
            parallel.shutdown()
