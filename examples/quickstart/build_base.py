"""Builds the quickstart's base model: a small Qwen2, pretrained on worked sums by the Megatron actor itself.

Supervised training needs no loss of its own: with every advantage 1 and the current log-probs in place of the old ones,
the clipped surrogate's gradient is that of the mean negative log-likelihood (ratio 1, d ratio = d logprob).

Place in the data flow: settings -> OUT/model (an ordinary Hugging Face checkpoint), OUT/train.jsonl and
OUT/held_out.jsonl. The number of steps is fixed, not the time, so equal settings give the same model. Does not build
again what is there with the same settings; a folder with other settings is replaced.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import problems
import tokenizer

from megatron_daro.ports import reserve_port

SETTINGS_FILE = "settings.json"
_SOURCES = ("build_base.py", "problems.py", "tokenizer.py")


@dataclass(frozen=True, slots=True)
class BaseSettings:
    """Everything the base model depends on.

    shares: weight of each number of digits in the texts; training_shares: in the problems for reinforcement learning,
    of which there are training_draws, repeats included (there are few sums of one digit).
    batch: texts per step. The model's sizes are those of Qwen2's config.json; positions: tokens of the longest text.
    """

    seed: int = 0
    steps: int = 700
    batch: int = 96
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    hidden: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 256
    positions: int = 128
    shares: dict[int, float] = field(default_factory=lambda: {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 2.0})
    slips: problems.Slips = field(
        default_factory=lambda: problems.Slips(forget=0.5, digit=0.02, skip=0.02, repeat=0.04)
    )
    training_draws: int = 2048
    training_shares: dict[int, float] = field(default_factory=lambda: {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 3.0})

    def fingerprint(self) -> str:
        """Return a hash that changes with any setting and with the code that makes the data and the model."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        return hashlib.sha256(content + b"".join(path.read_bytes() for path in self.sources())).hexdigest()

    def sources(self) -> list[Path]:
        """Return the files whose code decides what is built."""
        return [Path(__file__).parent / name for name in _SOURCES]

    def held_out(self) -> frozenset[Any]:
        """Return the keys of the problems that no text may be about."""
        return frozenset(problem.key for problem in problems.held_out_problems(self.seed))

    @property
    def vocabulary(self) -> tokenizer.Characters:
        """The tokens of the model and its texts."""
        return tokenizer.SUMS

    def samples(self, step: int, held_out: frozenset[Any]) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the samples of one step: ids of the prompt, ids after it, and 1 for each of these that is learnt."""
        encode, end = self.vocabulary.encode, self.vocabulary.ids["<eos>"]
        rows = []
        for problem, answer in self.texts(step, held_out):
            behind = [*encode(answer), end]
            rows.append(([self.vocabulary.ids["<bos>"], *encode(problem)], behind, [1] * len(behind)))
        return rows

    def texts(self, step: int, held_out: frozenset[Any]) -> list[tuple[str, str]]:
        """Return the (problem, answer) texts of one step."""
        rng = random.Random(f"texts {self.seed} {step}")
        texts: list[tuple[str, str]] = []
        while len(texts) < self.batch:
            problem = problems.draw(rng, self.shares)
            if problem.key not in held_out:
                texts.append((problem.text, problems.worked_answer(problem, rng, self.slips)))
        return texts

    def write_data(self, directory: Path) -> None:
        """Write train.jsonl and held_out.jsonl."""
        held_out = problems.held_out_problems(self.seed)
        problems.write_problems(directory / "held_out.jsonl", held_out)
        training = problems.training_problems(self.seed, self.training_draws, self.training_shares, held_out)
        problems.write_problems(directory / "train.jsonl", training)


def supervised_batch(settings: BaseSettings, step: int, held_out: frozenset[Any]) -> Any:
    """Return the texts of one step as a StepBatch of independent samples with advantage 1."""
    from megatron_daro.types import StepBatch

    rows = settings.samples(step, held_out)
    num, responses = len(rows), sum(len(behind) for _, behind, _ in rows)
    return StepBatch(
        tokens_T=np.concatenate([np.array(prompt + behind, dtype=np.int32) for prompt, behind, _ in rows]),
        lengths_N=np.array([len(prompt) + len(behind) for prompt, behind, _ in rows], dtype=np.int64),
        prompt_lengths_N=np.array([len(prompt) for prompt, _, _ in rows], dtype=np.int64),
        loss_mask_R=np.concatenate([np.array(mask, dtype=np.uint8) for _, _, mask in rows]),
        rollout_logprobs_R=np.zeros(responses, dtype=np.float32),
        rewards_N=np.ones(num, dtype=np.float32),
        correct_N=np.ones(num, dtype=np.uint8),
        bins_N=np.zeros(num, dtype=np.int64),
        group_ids_N=np.arange(num, dtype=np.int64),
        advantages_N=np.ones(num, dtype=np.float32),
        truncated_N=np.zeros(num, dtype=np.uint8),
        rollouts_per_prompt=2,
    )


def write_random_model(directory: Path, settings: BaseSettings) -> None:
    """Write a Qwen2 checkpoint with random weights, and the tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = settings.vocabulary.ids
    config = Qwen2Config(
        vocab_size=len(ids),
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        intermediate_size=settings.ffn,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=False,
        pad_token_id=ids["<pad>"],
        bos_token_id=ids["<bos>"],
        eos_token_id=ids["<eos>"],
    )
    torch.manual_seed(settings.seed)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    settings.vocabulary.write(directory)


def pretrain(rank: int, processes: int, address: str, start: Path, target: Path, settings: BaseSettings) -> None:
    """Run one data-parallel rank of the pretraining; rank 0 writes the checkpoint and reports."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    from megatron_daro.actor import parallel
    from megatron_daro.actor.policy import MegatronPolicy
    from megatron_daro.actor.settings import PolicySettings
    from megatron_daro.config import AlgorithmSection
    from megatron_daro.config.actor import ActorSection, OptimizerSection
    from megatron_daro.convert.hf_files import write_hf_checkpoint

    layout = parallel.Layout(data=processes)
    parallel.initialize(layout, rank=rank, init_method=address, seed=settings.seed, timeout_s=120)
    optimizer = OptimizerSection(learning_rate=settings.learning_rate, warmup_steps=settings.warmup_steps)
    actor = ActorSection(data_parallel=processes, precision="fp32", optimizer=optimizer)
    policy = MegatronPolicy(
        PolicySettings(start, 2, max_response_tokens=settings.positions, temperature=1.0, total_steps=settings.steps),
        actor,
        AlgorithmSection(name="grpo"),
    )
    held_out = settings.held_out()
    began = time.monotonic()
    for step in range(1, settings.steps + 1):
        shard = supervised_batch(settings, step, held_out).select(range(rank, settings.batch, processes))
        result = policy.train_step(shard, [range(len(shard))], step=step)
        if rank == 0 and (step % max(1, settings.steps // 5) == 0 or step == 1):
            # The rollout log-probs of these batches are 0, so the mean difference to them is the loss per token.
            loss = result.metrics["mismatch/logprob_abs_mean"]
            print(f"    step {step}/{settings.steps}: loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    weights = ((name, tensor.clone()) for name, tensor in policy.export())
    if rank == 0:
        write_hf_checkpoint(target, weights, json.loads((start / "config.json").read_text()), start)
    parallel.shutdown()


def build(target: Path, settings: BaseSettings, processes: int) -> bool:
    """Build into `target` unless it is there already. Return whether something was built.

    All files are made in a folder beside it that is renamed to it at the end, so a build that is interrupted, or runs
    twice at once, never leaves half a model behind.
    """
    if _fingerprint_in(target) == settings.fingerprint():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        start, made = Path(scratch) / "random", Path(scratch) / "made"
        made.mkdir()
        write_random_model(start, settings)
        _run_ranks(processes, start, made / "model", settings)
        settings.write_data(made)
        content = {"fingerprint": settings.fingerprint(), **dataclasses.asdict(settings)}
        (made / SETTINGS_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return True


def _fingerprint_in(target: Path) -> str | None:
    """Return the fingerprint in a folder; None if it has no complete settings file."""
    try:
        return json.loads((target / SETTINGS_FILE).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_ranks(processes: int, start: Path, target: Path, settings: BaseSettings) -> None:
    import torch.multiprocessing

    with reserve_port("127.0.0.1") as reserved:
        arguments = (processes, f"tcp://127.0.0.1:{reserved.port}", start, target, settings)
        torch.multiprocessing.spawn(pretrain, arguments, nprocs=processes)


def main(defaults: BaseSettings, output: Path) -> None:
    """Run the command line: build with `defaults` into `output`, unless told otherwise."""
    parser = argparse.ArgumentParser(description=f"Builds a small base model for {output.name.removesuffix('-base')}.")
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="data-parallel ranks")
    arguments = parser.parse_args()
    settings = dataclasses.replace(defaults, steps=arguments.steps)
    if not build(arguments.output, settings, arguments.processes):
        print(f"    {arguments.output} is there already, with the same settings")


if __name__ == "__main__":
    main(BaseSettings(), Path("runs/quickstart-base"))
