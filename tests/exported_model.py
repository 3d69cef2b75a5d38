"""Compares RUN/hf with a checkpoint of the tiny task (tiny_task.py), without the code that exports and converts.

Used by tests/e2e and tests/fault. The pieces of the checkpoint are put together by their offsets and cut into Hugging
Face tensors by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

HEAD_DIM, QUERY_HEADS_PER_GROUP, LAYERS, SYMBOLS = 8, 2, 2, 15


def assert_is_model_of(hf_dir: Path, checkpoint: Path) -> None:
    """The directory loads, and its weights are those of the checkpoint bit for bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(hf_dir).encode("7=") == [10, 13]
    found = AutoModelForCausalLM.from_pretrained(hf_dir, dtype="auto").state_dict()
    wanted = _hf_tensors(_global_tensors(checkpoint))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
    assert json.loads((hf_dir / "megatron_daro.json").read_text()) == {"step": int(checkpoint.name.split("_")[1])}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.contiguous().numpy().tobytes()


def _global_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The model's tensors as Megatron sees them over all ranks, layers stacked."""
    tensors: dict[str, Tensor] = {}
    files = {path.name: load_file(path) for path in checkpoint.glob("shard_*.safetensors")}
    for key, file, name, offset, shape, global_shape in json.loads((checkpoint / "index.json").read_text())["shards"]:
        if not key.startswith("optimizer.") and "_extra_state" not in key:
            whole = tensors.setdefault(key, torch.full(global_shape, float("nan")))
            whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))] = files[file][name]
    return tensors


def _hf_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"][:SYMBOLS],
        "model.norm.weight": tensors["decoder.final_layernorm.weight"],
        "lm_head.weight": tensors["output_layer.weight"][:SYMBOLS],
    }
    for layer in range(LAYERS):
        of = {key.removeprefix("decoder.layers."): t[layer] for key, t in tensors.items() if ".layers." in key}
        gate, up = of["mlp.linear_fc1.weight"].chunk(2)
        parts = {
            "input_layernorm.weight": of["self_attention.linear_qkv.layer_norm_weight"],
            "post_attention_layernorm.weight": of["mlp.linear_fc1.layer_norm_weight"],
            "self_attn.o_proj.weight": of["self_attention.linear_proj.weight"],
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": of["mlp.linear_fc2.weight"],
        }
        for kind in ("weight", "bias"):
            # For each key-value group: the rows of its query heads, then those of its key and its value.
            grouped = of[f"self_attention.linear_qkv.{kind}"].split(HEAD_DIM * (QUERY_HEADS_PER_GROUP + 2))
            cut = [rows.split([HEAD_DIM * QUERY_HEADS_PER_GROUP, HEAD_DIM, HEAD_DIM]) for rows in grouped]
            parts |= {
                f"self_attn.{n}_proj.{kind}": torch.cat(c) for n, c in zip("qkv", zip(*cut, strict=True), strict=True)
            }
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found
