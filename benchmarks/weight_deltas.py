"""How many weights does an optimizer step change, and in how few bytes can the change be sent?

    OMP_NUM_THREADS=1 python benchmarks/weight_deltas.py runs/smollm2-base --json    # 25 minutes of CPU, 3.5 GB

GRPO on the short problems of examples/smollm2 with the model that its run.sh makes: answers are sampled, verified and
trained on, AdamW with fp32 master weights; arithmetic is fp32 throughout. After steps in which Adam's averages settle,
each step's bf16 export is compared bit by bit with those of 1, 2, 4 and 8 steps before. What changed is packed as the
gaps between positions and the differences of the bit patterns (modulo 2**16, so exact), both by zstd, unpacked again
and compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

SPANS = (1, 2, 4, 8)
_RESULTS = Path(__file__).parent / "results" / "weight_deltas.json"
_MOST_TOKENS, _TEMPERATURE = 8, 1.0
_PART = 2**23
"""Elements that are compared at once."""


def main() -> None:
    """Train at each learning rate from the same weights; print a line for each span, and write them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("base", type=Path, help="directory with model/ and train.jsonl (examples/smollm2/run.sh)")
    options.add_argument("--rates", type=float, nargs="+", default=[1e-6, 5e-6, 1e-5, 4e-5])
    options.add_argument("--settle", type=int, default=8, help="steps before the first that is measured")
    options.add_argument("--steps", type=int, default=8, help="steps that are measured")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--rollouts", type=int, default=8)
    options.add_argument("--json", action="store_true", help=f"write {_RESULTS.name}")
    given = options.parse_args()
    rows = [row for rate in given.rates for row in measured(given, rate)]
    if given.json:
        _RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def measured(given: argparse.Namespace, rate: float) -> list[dict[str, float]]:
    """Return a row for each span at one learning rate, and print it."""
    torch.manual_seed(0)
    run = ShortProblems(given.base, rate, given.prompts, given.rollouts)
    found: dict[int, list[dict[str, float]]] = {span: [] for span in SPANS}
    with tempfile.TemporaryDirectory() as scratch:
        kept: dict[int, Path] = {}
        for step in range(given.settle + given.steps + 1):
            if step >= given.settle:
                bits, at = run.exported(), step - given.settle
                for span in SPANS:
                    if at and at % span == 0:
                        old = np.load(kept[at - span], mmap_mode="r")
                        found[span].append(compare(old, bits, run.table_elements))
                kept[at] = Path(scratch) / f"{at}.npy"
                np.save(kept[at], bits)
                for past in [past for past in kept if past < at - max(SPANS)]:
                    kept.pop(past).unlink()
            if step < given.settle + given.steps:
                reward = run.train()
                print(f"# learning rate {rate:g}, step {step + 1}: accuracy {reward:.2f}", flush=True)
    rows = []
    for span, cases in found.items():
        if cases:
            means = {name: float(np.mean([case[name] for case in cases])) for name in cases[0]}
            rows.append({"learning_rate": rate, "steps": span, "compared": len(cases), **means})
            print(json.dumps(rows[-1]), flush=True)
    return rows


class ShortProblems:
    """A policy that is trained on short problems whose answer ends with the line."""

    def __init__(self, base: Path, rate: float, prompts: int, rollouts: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
        self._tokenizer = Tokenizer.from_file(str(base / "model" / "tokenizer.json"))
        self._rows = [json.loads(line) for line in (base / "train.jsonl").read_text().splitlines()]
        self._order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(0)).tolist()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, weight_decay=0.0, foreach=False)
        self._prompts, self._rollouts = prompts, rollouts

    @property
    def table_elements(self) -> int:
        """Return the elements of the table of embeddings, which is the output layer too."""
        return int(self._model.get_input_embeddings().weight.numel())

    def train(self) -> float:
        """Make one optimizer step of prompts * rollouts answers; return the mean reward."""
        rewards, trained = [], 0
        self._optimizer.zero_grad()
        for row in self._next_rows():
            tokens, prompt = self._sampled(row["problem"])
            right = torch.tensor([float(self._text(line, prompt) == row["answer"]) for line in tokens])
            rewards.append(float(right.mean()))
            if right.std() > 0:
                self._backward(tokens, prompt, (right - right.mean()) / right.std())
                trained += 1
        if trained:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
        return float(np.mean(rewards))

    def exported(self) -> np.ndarray:
        """Return the bits of the bf16 weights, uint16 [parameters]; the table of embeddings comes first."""
        parts = [self._model.get_input_embeddings().weight]
        parts += [p for p in self._model.parameters() if p is not parts[0]]
        return np.concatenate([p.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).ravel() for p in parts])

    def _next_rows(self) -> Iterator[dict[str, str]]:
        for _ in range(self._prompts):
            yield self._rows[self._order.pop()]

    @torch.no_grad()
    def _sampled(self, problem: str) -> tuple[torch.Tensor, int]:
        """Return tokens [rollouts, prompt + answer], and the length of the prompt."""
        prompt = torch.tensor(self._tokenizer.encode(problem, add_special_tokens=False).ids)
        tokens, cache = prompt.repeat(self._rollouts, 1), None
        for _ in range(_MOST_TOKENS):
            out = self._model(tokens if cache is None else tokens[:, -1:], past_key_values=cache, logits_to_keep=1)
            cache = out.past_key_values
            chances = torch.softmax(out.logits[:, -1] / _TEMPERATURE, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens, len(prompt)

    def _text(self, tokens: torch.Tensor, prompt: int) -> str:
        return self._tokenizer.decode(tokens[prompt:].tolist()).split("\n")[0].strip()

    def _backward(self, tokens: torch.Tensor, prompt: int, advantages: torch.Tensor) -> None:
        """Add the gradient of one group: tokens up to the end of the line count."""
        logits = self._model(tokens[:, :-1], logits_to_keep=_MOST_TOKENS).logits / _TEMPERATURE
        answer = tokens[:, prompt:]
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, answer[..., None])[..., 0]
        ends = torch.tensor([["\n" in self._tokenizer.decode([t]) for t in line] for line in answer.tolist()])
        counts = (ends.cumsum(1) - ends.int() == 0).float()
        (-(advantages[:, None] * logprobs * counts).sum() / (counts.sum() * self._prompts)).backward()


def compare(old: np.ndarray, new: np.ndarray, table: int) -> dict[str, float]:
    """Return shares of changed elements, and bytes for each byte of the export. old, new: uint16 [parameters]."""
    sums: dict[str, float] = {}
    for start in range(0, len(new), _PART):
        for name, number in _compare_part(old[start : start + _PART], new[start : start + _PART]).items():
            sums[name] = sums.get(name, 0.0) + number
    outside = sum(int((old[i : i + _PART] != new[i : i + _PART]).sum()) for i in range(table, len(new), _PART))
    return {
        "changed": sums["changed"] / len(new),
        "changed_outside_table": outside / (len(new) - table),
        "by_one_ulp": sums["by_one_ulp"] / max(sums["changed"], 1),
        "plain": 6 * sums["changed"] / new.nbytes,
        "packed": (sums["gaps"] + sums["values"]) / new.nbytes,
        "packed_gaps": sums["gaps"] / new.nbytes,
        "all_by_zstd": sums["all"] / new.nbytes,
        "pack_gb_per_cpu_s": new.nbytes / 1e9 / sums["seconds"],
    }


def _compare_part(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Return elements and bytes of one part. Raises AssertionError: what was packed cannot be unpacked."""
    started = time.process_time()
    places = np.flatnonzero(old != new)
    coded, values = _as_bytes(np.diff(places, prepend=-1) - 1), new[places] - old[places]
    packed_gaps, packed_values = _zstd(coded), _zstd(values.view(np.uint8))
    seconds = time.process_time() - started
    again, gaps = np.array(old), _from_bytes(packed_gaps, len(coded))
    again[np.cumsum(gaps + 1) - 1] += _unzstd(packed_values, 2 * len(values)).view(np.uint16)
    if not np.array_equal(again, new):
        raise AssertionError("what was unpacked differs from what was packed")
    return {
        "changed": len(places),
        "by_one_ulp": int((np.abs(values.view(np.int16)) == 1).sum()),
        "gaps": len(packed_gaps),
        "values": len(packed_values),
        "all": len(_zstd(new.view(np.uint8))),
        "seconds": seconds,
    }


def _as_bytes(gaps: np.ndarray) -> np.ndarray:
    """Write each gap as base-255 digits, 255 for each whole 255: one byte for most."""
    long, rest = np.divmod(gaps, 255)
    out = np.full(int(long.sum()) + len(gaps), 255, np.uint8)
    out[np.cumsum(long + 1) - 1] = rest
    return out


def _from_bytes(packed: bytes, size: int) -> np.ndarray:
    coded = _unzstd(packed, size)
    ends = np.flatnonzero(coded != 255)
    return 255 * (np.diff(ends, prepend=-1) - 1) + coded[ends]


def _zstd(values: np.ndarray) -> bytes:
    return pa.Codec("zstd", compression_level=1).compress(values.tobytes(), asbytes=True)


def _unzstd(packed: bytes, size: int) -> np.ndarray:
    return np.frombuffer(pa.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True), np.uint8)


if __name__ == "__main__":
    main()
