"""DARO in one file and one process: the readable reference of what `megatron-daro train` does.

    python examples/minimal_loop.py examples/quickstart/config.yaml trainer.steps=20
    python examples/minimal_loop.py --replay runs/quickstart --steps 5

Reads the same configuration. Plain torch and transformers do the sampling and the training; `megatron_daro.algo` has
the formulas. The second form trains on the rollouts that a real run recorded, and compares losses per pass-rate bin,
DARO weights, gradient norms and the rest with that run's metrics.jsonl; it ends with exit code 1 if they differ.

Left out: what makes it fast or safe (parallelism, packing, sampling ahead, asking for more groups than are missing,
checkpoints, verifier processes), and the limit of a prompt's length. Refuses other options that change what is trained
and are not implemented here.
Letters: N samples, M samples of one forward pass, S positions, V vocabulary, K rollouts per prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_daro.algo.difficulty import pass_rate_bins, token_counts
from megatron_daro.algo.surrogate import clipped_token_loss
from megatron_daro.algo.weighting import Daro, make_algorithm
from megatron_daro.config import Config, resolve
from megatron_daro.errors import ConfigError, DaroError
from megatron_daro.rollout.recorder import read_step, recorded_steps

MARKER = "####"
ROWS = 64
TOLERANCE = 1e-4
PLAIN = """algorithm.name=daro algorithm.kl.coefficient=0.0 algorithm.entropy_coefficient=0.0 rollout.top_p=1.0
algorithm.overlong.kind=none algorithm.correction.kind=none algorithm.old_logprobs=forward data.prompt_template=plain
actor.optimizer.schedule=constant trainer.minibatches_per_batch=1 trainer.epochs_per_batch=1 reward.verifier=exact
rollout.stop=() rollout.stop_token_ids=() environments=() environment.kind=single_turn data.order=epochs lora.rank=0
algorithm.filter=auto algorithm.length_reward.weight=0.0 algorithm.repetition_penalty=0.0 algorithm.turn_rewards=False
algorithm.trust_region=clip algorithm.distill.urls=() rollout.segment_tokens=None rollout.repetition.tokens=None
data.pass_rates=None data.shuffle=True model.megatron_weights=None actor.precision=fp32
reward.options={} data.format=auto data.problem_field=None data.answer_field=None"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: token ids, log-probs of the response tokens when it was sampled, its group, and the verdict."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    group: int
    correct: bool
    reward: float


class Trainer:
    """The policy, its optimizer and DARO's weights; `step` is one optimizer step."""

    def __init__(self, config: Config) -> None:
        self.config, self.optimizer_steps, self.size = config, 0, config.rollout.rollouts_per_prompt
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        embedding: Any = self.model.get_input_embeddings()
        embedding.padding_idx = None  # else a pad token in an answer would get no gradient
        rollout = config.rollout
        sizes: dict[str, Any] = {"rollouts_per_prompt": self.size, "max_response_tokens": rollout.max_response_tokens}
        self.algorithm = make_algorithm(**config.algorithm.arguments(**sizes))
        assert isinstance(self.algorithm, Daro)  # `PLAIN` refuses the others
        self.weights = self.algorithm.difficulty
        section = config.actor.optimizer
        decayed = {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": section.weight_decay}
        others = {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decayed, others], betas=section.betas, eps=section.eps)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step of the policy, then one of the weights. Return metrics under the run's keys."""
        section = self.config.actor.optimizer
        groups_N, rewards_N = torch.tensor([s.group for s in samples]), torch.tensor([s.reward for s in samples])
        bins_N = pass_rate_bins(torch.tensor([s.correct for s in samples]), groups_N, self.size)
        advantages_N = self.algorithm.advantages(rewards_N, groups_N)
        counts = token_counts(bins_N, torch.tensor([len(s.response) for s in samples]), self.size)
        # From the totals of the whole step, so the split into forward passes below cannot change the result.
        coefficients_N = self.weights.coefficients(counts)[bins_N]
        sums: dict[str, Any] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        sums |= {name: torch.zeros(self.size + 1, dtype=torch.float64) for name in ("loss", "abs_loss", "advantage")}
        self.optimizer.zero_grad()
        for rows in torch.arange(len(samples)).split(ROWS):
            columns = token_columns([samples[i] for i in rows.tolist()])
            self._backward(columns, bins_N[rows], advantages_N[rows], coefficients_N[rows], sums)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), section.grad_clip or math.inf))
        self.optimizer_steps += 1
        rate = section.learning_rate * min(1.0, self.optimizer_steps / max(section.warmup_steps, 1))
        decayed, others = self.optimizer.param_groups
        decayed["lr"] = others["lr"] = rate
        self.optimizer.step()
        metrics = self._metrics(counts, sums) | {"loss/grad_norm": norm, "optimizer/learning_rate": rate}
        self.weights.update(sums["loss"], counts, sums["abs_loss"], advantage_sums=sums["advantage"])
        return metrics | {"difficulty/clamped": float(self.weights.clamped)}

    def _backward(
        self, columns: Mapping[str, Tensor], bins_M: Tensor, advantages_M: Tensor, coefficients_M: Tensor, sums: Any
    ) -> None:
        """Run forward and backward of some samples, and add to `sums` what is reported."""
        algorithm, mask_MS = self.config.algorithm, columns["mask"]
        logits_MSV = self.model(columns["tokens"], attention_mask=columns["attention"]).logits[:, :-1].float()
        all_MSV = torch.log_softmax(logits_MSV / self.config.rollout.temperature, dim=-1)
        logprobs_MS = all_MSV.gather(2, columns["tokens"][:, 1:, None])[..., 0]
        clip = (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
        # One step per batch: the old policy is the current one, and the ratio is 1.
        old_MS, advantages_MS = logprobs_MS.detach(), advantages_M[:, None]
        losses_MS = clipped_token_loss(logprobs_MS, old_MS, advantages_MS, *clip, mask=mask_MS).double()
        loss = (coefficients_M * losses_MS.sum(1)).sum()
        loss.backward()
        with torch.no_grad():
            entropy_MS = -(all_MSV.exp() * all_MSV).sum(-1)
            sums["policy"] += loss
            sums["loss"].index_add_(0, bins_M, losses_MS.sum(1))
            sums["abs_loss"].index_add_(0, bins_M, losses_MS.abs().sum(1))
            sums["advantage"].index_add_(0, bins_M, advantages_M.abs().double() * mask_MS.sum(1))
            sums["entropy"] += torch.where(mask_MS, entropy_MS, 0).double().sum()
            sums["mismatch"] += torch.where(mask_MS, logprobs_MS - columns["sampled"], 0).abs().double().sum()

    def _metrics(self, counts: Tensor, sums: Mapping[str, Tensor]) -> dict[str, float]:
        tokens, inner = float(counts.sum()), range(1, self.size)
        metrics = {
            "loss/policy": float(sums["policy"]),
            "loss/total": float(sums["policy"]) + self.weights.barrier(counts),
            "policy/entropy": float(sums["entropy"]) / tokens,
            "mismatch/logprob_abs_mean": float(sums["mismatch"]) / tokens,
        }
        metrics |= {f"difficulty/tokens/{k}": float(n) for k, n in enumerate(counts)}
        metrics |= {f"difficulty/loss/{k}": float(sums["loss"][k] / counts[k]) for k in inner if counts[k]}
        return metrics | {f"difficulty/weight/{k}": float(self.weights.weights[k]) for k in inner}


def token_columns(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return samples as rows, padded at the end. `mask` and `sampled` [M, S-1] are of the token a position predicts."""
    tokens = [torch.tensor(s.prompt + s.response) for s in samples]
    attention = [torch.ones_like(row) for row in tokens]
    mask = [torch.tensor([False] * (len(s.prompt) - 1) + [True] * len(s.response)) for s in samples]
    sampled = [torch.tensor([0.0] * (len(s.prompt) - 1) + s.logprobs) for s in samples]
    columns = {"tokens": tokens, "attention": attention, "mask": mask, "sampled": sampled}
    return {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[list[int]], *, limit: int, temperature: float, stop: int, noise: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Return one answer per prompt: (token ids with the stop token, log-probs). Temperature 0 is greedy."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[stop] * (width - len(p)) + p for p in prompts])  # padded in front; never looked at
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    running, past = list(range(len(prompts))), None
    for _ in range(limit):
        out = model(tokens, attention_mask=attention, position_ids=positions, past_key_values=past, use_cache=True)
        past = out.past_key_values
        logprobs = torch.log_softmax(out.logits[:, -1].float() / (temperature or 1.0), dim=-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=noise) if temperature else logprobs.argmax(1)[:, None]
        values = logprobs.gather(1, chosen)[:, 0].tolist()
        for row in running:
            answers[row][0].append(int(chosen[row]))
            answers[row][1].append(values[row])
        running = [row for row in running if answers[row][0][-1] != stop]
        if not running:
            break
        tokens, positions = chosen, positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(chosen)], dim=1)
    return answers


class Asker:
    """Asks the policy problems and judges its answers."""

    def __init__(self, config: Config, model: Any) -> None:
        self.config, self.model = config, model
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.noise, self.groups = torch.Generator().manual_seed(config.trainer.seed), 0

    def ask(self, problems: Sequence[Mapping[str, str]], rollouts: int, temperature: float) -> list[list[Sample]]:
        """Return `rollouts` answers to each problem."""
        rows = [problem for problem in problems for _ in range(rollouts)]
        texts = [self.config.data.template.replace("{prompt}", row["problem"]) for row in rows]
        prompts = self.tokenizer(texts)["input_ids"]
        limit, stop = self.config.rollout.max_response_tokens, self.tokenizer.eos_token_id
        answers = generate(self.model, prompts, limit=limit, temperature=temperature, stop=stop, noise=self.noise)
        samples: list[Sample] = []
        rewards = (self.config.reward.incorrect_reward, self.config.reward.correct_reward)
        for row, prompt, answer in zip(rows, prompts, answers, strict=True):
            text = str(self.tokenizer.decode(answer[0], skip_special_tokens=True))
            correct = MARKER in text and text.rsplit(MARKER, 1)[1].strip() == row["answer"]
            group = self.groups + len(samples) // rollouts
            samples.append(Sample(prompt, *answer, group, correct, rewards[correct]))
        self.groups += len(problems)
        return [samples[i : i + rollouts] for i in range(0, len(samples), rollouts)]

    def batch(self, stream: Iterator[Mapping[str, str]]) -> tuple[list[Sample], float]:
        """Return groups with 0 < pass rate < 1, refilled up to a full batch, and the accuracy of all samples."""
        section, kept, seen = self.config.rollout, [], []
        missing = section.prompts_requested
        for _ in range(section.max_refill_rounds + 1):
            problems = list(islice(stream, missing))
            for group in self.ask(problems, section.rollouts_per_prompt, section.temperature) if problems else ():
                seen += group
                kept += group if len({sample.correct for sample in group}) == 2 else []
            missing = max(0, section.prompts_per_batch - len(kept) // section.rollouts_per_prompt)
        return kept[: section.batch_rollouts], sum(s.correct for s in seen) / len(seen)

    def evaluate(self) -> dict[str, float]:
        """Return the accuracy on every held-out set, and by category."""
        found: dict[str, list[bool]] = defaultdict(list)
        for held_out in self.config.data.eval:
            problems = read_json_lines(held_out.path)[: held_out.max_prompts]
            name = f"eval/{held_out.name}/accuracy"
            for problem, (sample,) in zip(problems, self.ask(problems, 1, held_out.temperature), strict=True):
                found[name].append(sample.correct)
                found[f"{name}/{problem.get('category', 'all')}"].append(sample.correct)
        return {name: sum(outcomes) / len(outcomes) for name, outcomes in sorted(found.items())}


def read_json_lines(*paths: Path) -> list[dict[str, Any]]:
    """Return the objects in the lines of some files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def train(config: Config) -> int:
    """Sample, train, repeat; print held-out accuracy at both ends and every `eval_every_steps`. Return 0."""
    trainer = Trainer(config)
    asker = Asker(config, trainer.model)
    problems, rng = read_json_lines(*config.data.train), random.Random(config.trainer.seed)
    stream = (problem for _ in count() for problem in rng.sample(problems, len(problems)))  # endless, always shuffled
    print(json.dumps({"step": 0, **asker.evaluate()}), flush=True)
    for step in range(1, config.trainer.steps + 1):
        began = time.monotonic()
        samples, accuracy = asker.batch(stream)
        if not samples:
            continue  # no group with both right and wrong answers
        metrics = trainer.step(samples)
        weights = " ".join(f"{metrics[f'difficulty/weight/{k}']:.2f}" for k in range(1, trainer.size))
        numbers = f"{len(samples) // trainer.size} groups, loss {metrics['loss/policy']:+.4f}, weights {weights}"
        print(f"step {step}: accuracy {accuracy:.3f}, {numbers}, {time.monotonic() - began:.2f} s", flush=True)
        every = config.trainer.eval_every_steps
        if step == config.trainer.steps or (every and step % every == 0):
            print(json.dumps({"step": step, **asker.evaluate()}), flush=True)
    return 0


def replay(run: Path, config: Config, steps: int) -> int:
    """Train on the recorded rollouts of the first steps. Return 0 if all metrics equal the recorded ones, else 1."""
    trainer, worst = Trainer(config), 0.0
    recorded = {int(line["step"]): line for line in read_json_lines(run / "metrics.jsonl")}
    for step in recorded_steps(run)[:steps]:
        samples = []
        for group, used in read_step(run, step):
            for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True) if used == "trained" else ():
                tokens, n, logprobs = rollout.tokens.tolist(), rollout.prompt_length, rollout.logprobs.tolist()
                samples.append(
                    Sample(tokens[:n], tokens[n:], logprobs, group.group_id, verdict.correct, verdict.reward)
                )
        metrics = trainer.step(samples)
        theirs = {name: float(recorded[step].get(name, math.nan)) for name in metrics}
        apart = {name: abs(metrics[name] - value) / max(1.0, abs(value)) for name, value in theirs.items()}
        key = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        worst = math.inf if math.isnan(apart[key]) else max(worst, apart[key])
        print(f"step {step}: {len(apart)} metrics compared, largest difference {apart[key]:.1e} in {key}", flush=True)
    print(f"largest difference {worst:.1e}; {'agree' if worst <= TOLERANCE else 'DIFFER'} (allowed {TOLERANCE})")
    return 0 if worst <= TOLERANCE else 1


def check_supported(config: Config) -> None:
    """Raise ConfigError for options that change the result and are not implemented here."""
    options = [option.split("=") for option in PLAIN.split()]
    wrong = [f"{path}={want}" for path, want in options if str(attrgetter(path)(config)) != want]
    if wrong:
        raise ConfigError(f"minimal_loop.py does only {' '.join(wrong)}; set that, or use `megatron-daro train`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(description="DARO in one file and one process.")
    parser.add_argument("config", nargs="?", type=Path, help="YAML file; with --replay that of the run by default")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="options that replace those of the file")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="train on recorded rollouts, and compare")
    parser.add_argument("--steps", type=int, default=5, help="recorded steps to compare")
    options = parser.parse_args(arguments)
    path = options.config or (options.replay and options.replay / "config.yaml")
    if path is None:
        parser.error("give a configuration file, or --replay RUN")
    try:
        config = resolve(path, options.overrides)
        check_supported(config)
        return replay(options.replay, config, options.steps) if options.replay else train(config)
    except DaroError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
