"""A model of about 100,000 weights that has learnt to speak to the three environments of examples/environments.

`2+3=` is answered with a call, and after its output with a digit that is right every second time; `wD=` with a word of
two letters; `fD=` with a function of a random factor.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_task
import yaml

SYMBOLS = ["<pad>", "<bos>", "<eos>", *"0123456789=+*:;<>()-~,. abcdefghijklmnopqrstuvwxyz", "####"]
LETTERS = "ab"
FENCE = {"begin": "<", "end": ">"}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "python_tool:PythonTool": {**FENCE, "verifier": "exact", "shown": "{output};", "limits": {"output_bytes": 8}},
    "word_game:WordGame": {"guesses": 3, "shown": "{marks};"},
    "code_tests:CodeTests": {**FENCE, "shown": "no;", "tries": 2},
}


@dataclass(frozen=True)
class TinyTools:
    """Where the files are."""

    directory: Path

    def options(self, kind: str) -> list[str]:
        """Options of a run with that environment."""
        name = kind.partition(":")[0]
        return [
            f"environment={json.dumps({'kind': kind, 'options': ENVIRONMENTS[kind], 'workers': 1})}",
            f"data.train=[{self.directory / name}.jsonl]",
        ]


def build(directory: Path) -> TinyTools:
    """Write model, tokenizer, problems and tiny.yaml."""
    import word_game

    for name, problems in {
        "python_tool": [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)],
        "word_game": [
            {"problem": f"w{i}=", "answer": one["answer"]}
            for i, one in enumerate(word_game.problems(10, 0, LETTERS, 2))
        ],
        "code_tests": [
            {"problem": f"f{d}=", "answer": json.dumps({"function": "f", "cases": [[[2], 2 * d], [[5], 5 * d]]})}
            for d in (1, 2, 3)
        ],
    }.items():
        lines = [json.dumps({"id": f"{name}-{i}", **problem}) for i, problem in enumerate(problems)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tiny_task.save_tokenizer(directory / "base", SYMBOLS)
    _pretrain(directory / "base")
    (directory / "tools.yaml").write_text(yaml.safe_dump(_config(directory)))
    return TinyTools(directory)


def _config(directory: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(directory / "base")},
        "data": {"prompt_template": "plain", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_batch": 3, "rollouts_per_prompt": 4, "max_response_tokens": 80},
        "algorithm": {"filter": "none"},
        "actor": {"tensor_parallel": 1, "precision": "fp32", "micro_batch_tokens": 512},
        "engine": {"replicas": 1, "embedded": {"batch_size": 32, "threads": 1}},
        "reward": {"verifier": "exact", "workers": 1},
        "trainer": {"steps": 3, "save_every_steps": 0},
        "observe": {"tensorboard": False},
    }


def _texts(rng: random.Random) -> list[list[tuple[str, bool]]]:
    """Conversations as pairs of text and whether the model says it."""
    a, b = rng.randint(1, 4), rng.randint(1, 4)
    digit = a + b + rng.randint(0, 1)
    word = ["".join(rng.choices(LETTERS, k=2)) for _ in range(2)]
    factors = [rng.randint(1, 3) for _ in range(2)]
    return [
        [(f"{a}+{b}=", False), (f"<print({a}+{b})>", True), (f"{a + b};", False), (f"####{digit}", True)],
        [
            (f"w{rng.randint(0, 9)}=", False),
            (word[0], True),
            (rng.choice("+-~") + rng.choice("+-~") + ";", False),
            (word[1], True),
        ],
        [
            (f"f{rng.randint(1, 3)}=", False),
            (f"<f=lambda x:{factors[0]}*x>", True),
            ("no;", False),
            (f"<f=lambda x:{factors[1]}*x>", True),
        ],
    ]


def _pretrain(directory: Path, steps: int = 250) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=len(SYMBOLS), max_position_embeddings=128, tie_word_embeddings=False,
        eos_token_id=tiny_task.END, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=5e-3), random.Random(0)
    for _ in range(steps):
        rows = [row for _ in range(8) for row in _texts(rng)]
        encoded = [_encoded(row) for row in rows]
        longest = max(len(ids) for ids, _ in encoded)
        inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in encoded])
        labels = torch.tensor([said + [-100] * (longest - len(said)) for _, said in encoded])
        optimizer.zero_grad()
        model(inputs, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)


def _encoded(row: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for text, said in row:
        first, *rest = text.split("####")
        new = [SYMBOLS.index(c) for c in first]
        for part in rest:
            new += [SYMBOLS.index("####"), *(SYMBOLS.index(c) for c in part)]
        new += [tiny_task.END] if said else []
        ids += new
        labels += new if said else [-100] * len(new)
    return ids, labels
