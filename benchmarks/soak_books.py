"""What must hold after a run under faults: whole books, no group twice or lost, and no answer of wrong weights.

Place in the data flow: sglang_soak.py hands over the run directory, with the weights of every version under versions/
beside what every run has. Each recorded token's log-prob is computed again with transformers, from the weights of the
version that the rollout names: an answer of stale or half-replaced weights would differ. It refuses to pass if weights
of neighbouring versions could not be told apart that way.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megatron_daro.observe.metrics import read_metrics
from megatron_daro.rollout.recorder import read_step, recorded_steps
from megatron_daro.types import Rollout

LOGPROB_LIMIT = 1e-4
_STATES = ("trained", "filtered", "dropped", "outstanding")


def check_books(run_dir: Path, steps: int, outstanding: Collection[int]) -> tuple[dict[str, Any], list[str]]:
    """Books and group ids of a run. outstanding: ids at its end. Returns what was counted, and problems."""
    lines: list[dict[str, Any]] = [dict(line) for line in read_metrics(run_dir) if (line["step"] or 0) > 0]
    problems = []
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl has {len(lines)} steps, not each of 1 to {steps} once")
    for line in lines:
        admitted, parts = line["rollout/groups_admitted"], [line[f"rollout/groups_{state}"] for state in _STATES]
        if admitted != sum(parts):
            problems.append(f"step {line['step']}: {admitted} groups admitted, but {parts} ({', '.join(_STATES)})")
    times: Counter[int] = Counter()
    used: Counter[str] = Counter()
    for step in recorded_steps(run_dir):
        for group, outcome in read_step(run_dir, step):
            times[group.group_id] += 1
            used[outcome] += 1
    twice = sorted(group_id for group_id, count in times.items() if count > 1)
    if twice:
        problems.append(f"groups recorded twice: {twice[:10]}")
    newest = max([*times, *outstanding], default=-1)
    lost = sorted(set(range(newest + 1)) - set(times) - set(outstanding))
    if lost:
        problems.append(f"groups neither recorded nor outstanding: {lost[:10]}")
    last = {state: int(lines[-1][f"rollout/groups_{state}"]) for state in ("admitted", *_STATES)} if lines else {}
    return {"last_step": last, "recorded": dict(used), "twice": len(twice), "lost": len(lost)}, problems


def check_weights(run_dir: Path, temperature: float) -> tuple[dict[str, Any], list[str]]:
    """Every recorded log-prob against the weights of its version. Returns the differences, and problems."""
    logging.disable_progress_bar()
    rollouts: dict[int, list[Rollout]] = defaultdict(list)
    for step in recorded_steps(run_dir):
        for group, _ in read_step(run_dir, step):
            for rollout in group.rollouts:
                for version in {version for version, _ in rollout.version_spans}:
                    rollouts[version].append(rollout)
    own, neighbours, worst, tokens = [], [], (0.0, -1), 0
    for version in sorted(rollouts):
        difference, count = _largest_difference(run_dir, version, version, rollouts[version], temperature)
        own.append(difference)
        tokens += count
        worst = max(worst, (difference, version))
        for other in (version - 1, version + 1):
            if version and (run_dir / "versions" / f"{other:06d}").is_dir():
                neighbours.append(_largest_difference(run_dir, other, version, rollouts[version], temperature)[0])
    if not neighbours:
        return {"versions": len(own), "tokens": tokens}, ["no two versions of weights were used: nothing was checked"]
    result = {
        "versions": len(own),
        "tokens": tokens,
        "largest_difference": worst[0],
        "to_neighbouring_versions": {"least": min(neighbours), "median": statistics.median(neighbours)},
    }
    problems = []
    if not worst[0] < LOGPROB_LIMIT:
        problems.append(f"version {worst[1]}: a log-prob differs by {worst[0]:.3g} from its weights' own")
    if statistics.median(neighbours) < 10 * LOGPROB_LIMIT:
        problems.append("weights of neighbouring versions are too alike for this check to mean anything")
    return result, problems


def _largest_difference(
    run_dir: Path, weights: int, version: int, rollouts: Sequence[Rollout], temperature: float
) -> tuple[float, int]:
    """Of the tokens of `version` among these rollouts, under the weights of another version: and how many they are."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "versions" / f"{weights:06d}", dtype=torch.float32)
    largest, count = 0.0, 0
    for rollout in rollouts:
        mask = np.concatenate([np.full(length, told == version) for told, length in rollout.version_spans])
        difference = np.abs(_logprobs(model, rollout, temperature) - rollout.logprobs)[mask]
        largest, count = max(largest, float(difference.max(initial=0.0))), count + int(mask.sum())
    return largest, count


def _logprobs(model: Any, rollout: Rollout, temperature: float) -> np.ndarray:
    """float32 [R]."""
    tokens = torch.from_numpy(rollout.tokens.astype(np.int64))
    with torch.inference_mode():
        logprobs = (model(tokens[None]).logits[0].float() / temperature).log_softmax(-1)
    first = rollout.prompt_length
    return logprobs[torch.arange(first - 1, len(tokens) - 1), tokens[first:]].numpy()
