"""Sample rollouts for the report: some groups of the first, middle and last recorded step, right and wrong answers.

Place in the data flow: RUN/rollouts/step_*.jsonl.zst -> `Sample`s -> HTML. What is in the files was written by a
model: it is data, cut to a length and escaped. A file that is torn or huge is skipped and named; the report still
comes out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from megatron_daro.observe.escape import safe_text

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl\.zst")
_GROUPS_PER_STEP = 3
_MOST_LINES = 256
_MOST_BYTES = 64 << 20
_PROMPT_CHARACTERS = 2000
_ANSWER_CHARACTERS = 6000


@dataclass(frozen=True)
class Sample:
    """One group of one step, with the rollouts chosen from it."""

    step: int
    group: Mapping[str, Any]
    shown: list[Mapping[str, Any]]


def load_samples(run_dir: Path) -> tuple[list[Sample], list[str]]:
    """Samples in step order, and a line for everything that had to be left out.

    Args:
        run_dir: the run directory.
    """
    files = sorted((int(m[1]), p) for p in (run_dir / "rollouts").glob("*") if (m := _STEP_FILE.fullmatch(p.name)))
    if not files:
        return [], ["sample rollouts (rollouts/step_*.jsonl.zst; observe.save_rollouts writes them)"]
    chosen = sorted({0, len(files) // 2, len(files) - 1})
    samples: list[Sample] = []
    notes: list[str] = []
    for step, path in (files[i] for i in chosen):
        try:
            groups = [g for g in _read(path) if _well_formed(g)]
        except (OSError, ValueError, zstandard.ZstdError) as error:
            notes.append(
                f"sample rollouts of step {step}: {path.name} is damaged ({safe_text(error, 200, one_line=True)})"
            )
            continue
        samples += [Sample(step, g, _one_of_each(g["rollouts"])) for g in _pick(groups)]
    return samples, notes


def samples_html(samples: list[Sample]) -> str:
    """The samples as HTML; every piece of text in it is escaped."""
    parts = []
    last_step = None
    for sample in samples:
        if sample.step != last_step:
            parts.append(f"<h3>Step {sample.step}</h3>")
            last_step = sample.step
        parts.append(_sample_html(sample))
    return "\n".join(parts)


def _read(path: Path) -> list[Any]:
    """The first groups of a file. Raises ValueError or ZstdError when it is torn."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    content = bytearray()
    with path.open("rb") as file:
        # Small chunks: one of them can unpack to 32,000 times its size.
        while len(content) < _MOST_BYTES and (chunk := file.read(1024)):
            content += decoder.decompress(chunk)
    if len(content) < _MOST_BYTES and not decoder.eof:
        raise ValueError("it ends in the middle")
    lines = content.splitlines() if decoder.eof else content.splitlines()[:-1]
    return [json.loads(line) for line in lines[:_MOST_LINES]]


def _well_formed(group: Any) -> bool:
    if not isinstance(group, dict) or not isinstance(group.get("rollouts"), list):
        return False
    return bool(group["rollouts"]) and all(isinstance(r, dict) for r in group["rollouts"])


def _pick(groups: list[Any]) -> list[Any]:
    """Groups with both verdicts first, since they are the ones that train; spread over the pass rates."""
    mixed = [g for g in groups if 0 < _correct(g) < len(g["rollouts"])]
    mixed.sort(key=lambda g: _correct(g) / len(g["rollouts"]))
    count = min(_GROUPS_PER_STEP, len(mixed))
    spread = [mixed[round(i * (len(mixed) - 1) / max(1, count - 1))] for i in range(count)]
    rest = [g for g in groups if g not in mixed]
    return spread + rest[: _GROUPS_PER_STEP - count]


def _correct(group: Mapping[str, Any]) -> int:
    return sum(bool(r.get("correct")) for r in group["rollouts"])


def _one_of_each(rollouts: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    right = [r for r in rollouts if r.get("correct")][:1]
    wrong = [r for r in rollouts if not r.get("correct")][:1]
    return right + wrong


def _sample_html(sample: Sample) -> str:
    group = sample.group
    correct, total = _correct(group), len(group["rollouts"])
    used = f" · {_text(group['used'], 40)}" if "used" in group else ""
    name = _text(group.get("prompt_id", "?"), 80)
    rollouts = "".join(_rollout_html(r) for r in sample.shown)
    return (
        f'<details class="sample"><summary><b>{name}</b> · pass rate {correct}/{total}'
        f"{used}</summary><h4>Prompt</h4><pre>{_text(group.get('prompt', ''), _PROMPT_CHARACTERS)}</pre>"
        f"<p>Reference answer: <code>{_text(group.get('answer', ''), 300)}</code></p>{rollouts}</details>"
    )


def _rollout_html(rollout: Mapping[str, Any]) -> str:
    correct = bool(rollout.get("correct"))
    badge = f'<span class="badge {"right" if correct else "wrong"}">{"✓ correct" if correct else "✗ incorrect"}</span>'
    facts = [
        f"verdict {rollout.get('reason', '?')}",
        f"reward {rollout.get('reward', '?')}",
        f"{rollout.get('length', '?')} tokens",
        f"finish {rollout.get('finish_reason', '?')}",
        f"weight version {rollout.get('weight_version', '?')}",
    ]
    confidence = _mean_logprob(rollout.get("logprobs"))
    if confidence is not None:
        facts.append(f"mean log-prob {confidence:.3f}")
    words = " · ".join(_text(f, 80) for f in facts)
    return f"<h4>{badge} <small>{words}</small></h4><pre>{_text(rollout.get('text', ''), _ANSWER_CHARACTERS)}</pre>"


def _mean_logprob(logprobs: Any) -> float | None:
    if not isinstance(logprobs, list) or not logprobs:
        return None
    numbers = [x for x in logprobs if isinstance(x, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _text(value: object, limit: int) -> str:
    return html.escape(safe_text(value, limit), quote=True)
