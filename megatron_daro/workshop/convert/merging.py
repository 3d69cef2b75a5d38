"""`megatron-daro convert --merge`: adds an adapter (LoRA, in PEFT's files) to a Hugging Face checkpoint.

W + scale * B A is added in fp32 and rounded to W's dtype, as in the merged weights that engines get. The adapter and
one file's tensors are in memory. Refuses adapters that are more than plain LoRA, and those of another model. The target
appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_daro.config.lora import CONFIG_FILE, PEFT_PREFIX, WEIGHTS_FILE, LoraSection, differing
from megatron_daro.convert.hf_files import HFCheckpoint, write_hf_checkpoint
from megatron_daro.errors import ModelError
from megatron_daro.workshop.convert.partial import replaceable


def merge(adapter: Path, base: Path, out: Path, *, max_shard_bytes: int) -> int:
    """Write base with the adapter added, and return how many matrices it changed.

    Args:
        adapter: PEFT's folder. base: Hugging Face directory. out: not there yet, or empty. max_shard_bytes: most in a
            file.

    Raises:
        ModelError: the adapter cannot be read, is more than LoRA, or of another model. ConfigError: `out` cannot be
            written.
    """
    try:
        content = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
        factors = load_file(adapter / WEIGHTS_FILE)
        section = LoraSection(rank=content["r"], alpha=content["lora_alpha"], rslora=content.get("use_rslora", False))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"--merge: {adapter} has no adapter of PEFT's that can be read: {error}") from error
    if more := [f"{name} {content[name]!r}" for name, _ in differing(section, content)]:
        raise ModelError(f"--merge: {adapter} has {', '.join(more)}; allowed: LoRA with one rank and nothing else")
    num_factors = len(factors)
    checkpoint = HFCheckpoint(base, as_stored=True)
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        if "quantization_config" in config:
            raise ModelError(
                f"--merge: the weights of {base} are quantized; allowed: fp32, fp16, bf16; convert them to bf16 first "
                "(docs/models.md)"
            )
        write_hf_checkpoint(
            replaceable(out),
            _merged(checkpoint, factors, section.scale, adapter),
            config,
            base,
            max_shard_bytes=max_shard_bytes,
        )
    finally:
        checkpoint.close()
    return num_factors // 2


def _merged(
    checkpoint: HFCheckpoint, factors: dict[str, Tensor], scale: float, adapter: Path
) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.names():
        weight, stem = checkpoint.tensor(name), PEFT_PREFIX + name.removesuffix("weight")
        a, b = (factors.pop(f"{stem}lora_{letter}.weight", None) for letter in "AB")
        if a is not None and b is not None:
            if (b.shape[0], a.shape[1]) != tuple(weight.shape):
                raise ModelError(
                    f"--merge: {name} is {tuple(weight.shape)}, of {adapter} {b.shape[0], a.shape[1]}; name its base"
                )
            weight = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
        yield name, weight
    if factors:
        raise ModelError(
            f"--merge: {min(factors)} of {adapter} is of no matrix of {checkpoint.directory}; name its base"
        )
