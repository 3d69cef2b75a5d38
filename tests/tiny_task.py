"""The smallest task that trains for real: a character tokenizer, a Qwen2 of about 20,000 weights, and digits to echo.

Used by tests/e2e and tests/fault. The prompt is "d=" and the right answer is "####d"; the base model has learnt to
answer d or d+1 with equal chance, so most groups have a pass rate between 0 and 1 and training has something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

K = 4
DIGITS = "0123456789"
_MARK = "####"
SYMBOLS = ["<pad>", "<bos>", "<eos>", *DIGITS, "=", _MARK]
END = 2


@dataclass(frozen=True)
class TinyTask:
    """Where the files are. `config` leaves trainer.run_dir open."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "base"

    @property
    def train(self) -> Path:
        return self.directory / "train.jsonl"

    @property
    def config(self) -> Path:
        return self.directory / "tiny.yaml"

    def write_config(self, path: Path, changes: dict[str, Any]) -> Path:
        """The configuration with whole sections merged over, as another file."""
        content = yaml.safe_load(self.config.read_text())
        for section, values in changes.items():
            content[section] = {**content.get(section, {}), **values}
        path.write_text(yaml.safe_dump(content))
        return path


def build(directory: Path) -> TinyTask:
    """Writes model, tokenizer, problems and configuration."""
    task = TinyTask(directory)
    _write_problems(task.train, [f"{d}=" for d in DIGITS])
    _write_problems(directory / "held_out.jsonl", [f"{d}=" for d in DIGITS])
    save_tokenizer(task.model, SYMBOLS)
    pretrain(task.model)
    task.config.write_text(yaml.safe_dump(_config(directory)))
    return task


def _config(directory: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(directory / "base")},
        "data": {
            "train": [str(directory / "train.jsonl")],
            "prompt_template": "plain",
            "max_prompt_tokens": 4,
            "eval": [{"name": "digits", "path": str(directory / "held_out.jsonl")}],
        },
        "rollout": {"prompts_per_batch": 4, "rollouts_per_prompt": K, "max_response_tokens": 4},
        "actor": {
            "tensor_parallel": 2,
            "precision": "fp32",
            "micro_batch_tokens": 64,
            "optimizer": {"learning_rate": 1.0e-3},
        },
        "engine": {"replicas": 1, "embedded": {"batch_size": 32, "threads": 1}},
        "reward": {"verifier": "exact", "workers": 1},
        "trainer": {"steps": 8, "save_every_steps": 2, "keep_checkpoints": 4},
        "observe": {"tensorboard": False},
    }


def _write_problems(path: Path, problems: list[str]) -> None:
    path.write_text("".join(json.dumps({"problem": p, "answer": p[:-1]}) + "\n" for p in problems))


def save_tokenizer(directory: Path, symbols: Sequence[str]) -> None:
    """One token a symbol; the first three are padding, begin and end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{_MARK}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(directory)


def pretrain(directory: Path, steps: int = 150, family: str = "Qwen2Config", **changes: Any) -> None:
    """Supervised steps on d -> d or d+1, every one on all pairs."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2} | changes
    config = getattr(transformers, family)(
        num_attention_heads=4, vocab_size=len(SYMBOLS), max_position_embeddings=32,
        tie_word_embeddings=False, eos_token_id=END, bos_token_id=1, pad_token_id=0, **sizes,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    symbol = {s: i for i, s in enumerate(SYMBOLS)}
    rows = [
        [symbol[d], symbol["="], symbol[_MARK], symbol[DIGITS[(int(d) + shift) % 10]], END]
        for d in DIGITS
        for shift in (0, 1)
    ]
    inputs = torch.tensor(rows)
    labels = inputs.clone()
    labels[:, :2] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
