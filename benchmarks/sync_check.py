"""Does the check after a weight sync see a server that kept its weights, and does it accuse nobody else?

    OMP_NUM_THREADS=1 python benchmarks/sync_check.py --json      # 200 syncs in each precision; 4 minutes

A real SGLang server, and a model of 4 million weights that transformers computes as the policy and AdamW steps in fp32
(policy and server round it to bf16 where asked to). Before every second sync the server is given the weights of the
step before once more, as if it had skipped the update; the check must see that by log-probs alone, and the server's
checksums must, too. Then it gets the right ones, and must not be accused. Exit code 1 if either ever fails.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import sglang_servers
import torch
from sglang_pool import ModelWeights
from transformers import AutoModelForCausalLM

from megatron_daro.config.sections import SGLangSection
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.probe import probe_text
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.errors import EngineError
from megatron_daro.sync.check import CheckResult, UpdateCheck
from megatron_daro.sync.plan import SendPlan

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_arguments() -> argparse.Namespace:
    parser = sglang_servers.arguments_of(__doc__)
    parser.add_argument("--syncs", type=int, default=200, help="of each precision; half as many are skipped first")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    return parser.parse_args()


class Policy:
    """The model in fp32 under an optimizer, and as it is sent."""

    def __init__(self, model: Path, dtype: str, learning_rate: float) -> None:
        self.master = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.sent = AutoModelForCausalLM.from_pretrained(model, dtype=PRECISIONS[dtype])
        self.before = copy.deepcopy(self.sent)
        self._optimizer = torch.optim.AdamW(self.master.parameters(), lr=learning_rate, weight_decay=0.0)
        self._random = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """One optimizer step; `before` has the weights of before."""
        batch = torch.randint(0, SHAPE["vocab_size"], (2, 64), generator=self._random)
        self._optimizer.zero_grad()
        self.master(batch, labels=batch).loss.backward()
        self._optimizer.step()
        self.before.load_state_dict(self.sent.state_dict())
        self.sent.load_state_dict(self.master.state_dict())


class Trial:
    """One server, one precision."""

    def __init__(self, policy: Policy, engine: SGLangEngine) -> None:
        self._policy, self._engine = policy, engine
        self._right, self._kept = ModelWeights(policy.sent), ModelWeights(policy.before)
        self._check = UpdateCheck()
        self._last: Any = None
        self.rows: list[dict[str, Any]] = []

    async def run(self, syncs: int) -> None:
        """All syncs, every second one after a skipped one. The first has nothing before it."""
        for version in range(syncs + 1):
            row: dict[str, Any] = {"version": version}
            if version:
                self._policy.step()
            if version % 2:
                row |= await self._skipped(version)
            outcome, by_checksums, answers = await self._synced(version, self._right, self._check)
            reasons = [outcome.rejected.get("server 0", ""), by_checksums]
            row |= {"accused": "; ".join(filter(None, reasons)), "verified": bool(outcome.verified)}
            if self._last is not None:
                row["nat"] = {name: _rms(answers[name] - self._last[name]) for name in ("policy", "server")}
                row["nat"]["apart"] = _rms(answers["policy"] - answers["server"])
            self._last = answers
            self.rows.append(row)
        for weights in (self._right, self._kept):
            weights.close()

    async def _skipped(self, version: int) -> dict[str, Any]:
        """The server gets the weights of before under the new version."""
        outcome, by_checksums, _ = await self._synced(version, self._kept, copy.deepcopy(self._check))
        reason = outcome.rejected.get("server 0", "")
        return {"caught": "it kept its weights" in reason, "caught_by_checksums": bool(by_checksums)}

    async def _synced(
        self, version: int, sent: ModelWeights, check: UpdateCheck
    ) -> tuple[CheckResult, str, dict[str, Any]]:
        """An update as WeightSync makes it, but nobody is given up. Returns what the log-probs say, what the checksums
        say, and (policy's, server's) log-probs of the given text."""
        (server,) = self._engine.fleet.servers
        update = self._engine.begin_update(version)
        assert update is not None
        plan = await update.prepare()
        assert isinstance(plan, SendPlan), server.reason
        digests = self._right.digests(plan)
        report = await sent.export(plan)
        if report.failures:
            raise SystemExit(f"the weights were not sent: {report.failures}")
        await update.install(replace(report, digests={}))
        by_checksums = ""
        try:
            await update.receiving.compare_checksums(server, digests)
        except EngineError as error:
            by_checksums = str(error)
        answers = {name: replace(answer, verified=False) for name, answer in (await update.probe()).items()}
        (answer,) = answers.values()
        fixed_R, sampled_R = await self._right.logprobs_of([answer.fixed, answer.sampled], temperature=1.0)
        outcome = check.judge(answers, {"server 0": (fixed_R, sampled_R)}, digests)
        await update.accept()
        return outcome, by_checksums, {"policy": fixed_R, "server": answer.fixed.logprobs}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


async def measure(arguments: argparse.Namespace, dtype: str, directory: Path) -> list[dict[str, Any]]:
    """All rows of one precision."""
    model = directory / dtype
    sglang_servers.save_model(model, SHAPE, dtype)
    handle = sglang_servers.server(
        sglang_servers.require(arguments.python), model, directory / f"{dtype}.log", dtype=dtype,
        max_total_tokens=4096, max_running_requests=8,
    )  # fmt: skip
    engine = SGLangEngine(
        {"server 0": handle},
        SGLangSection(start_timeout_s=900, stall_timeout_s=600, sync_timeout_s=300, max_restarts=0),
        Expected(model, "qwen2", 512, 1024),
        asker=DirectAsker(lambda ids: ""),
        warn=print,
        run_dir=directory,
        seed=0,
        temperature=1.0,
        probe_tokens=probe_text(SHAPE["vocab_size"], longest=512),
    )
    trial = Trial(Policy(model, dtype, arguments.learning_rate), engine)
    await engine.start()
    try:
        await trial.run(arguments.syncs)
    finally:
        await engine.close()
    return trial.rows


def summarized(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and how far log-probs moved."""
    skipped = [row for row in rows if "caught" in row]
    moved = [row["nat"] for row in rows if "nat" in row]
    return {
        "syncs": len(rows) - 1,
        "accused": [row for row in rows if row["accused"]],
        "verified_by_logprobs": sum(row["verified"] for row in rows),
        "skipped": len(skipped),
        "caught_by_logprobs": sum(row["caught"] for row in skipped),
        "caught_by_checksums": sum(row["caught_by_checksums"] for row in skipped),
        "step_rms_nat": {
            name: [float(q) for q in np.quantile([m[name] for m in moved], (0.0, 0.5, 1.0))] for name in moved[0]
        },
    }


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"setup": {**sglang_servers.setup_of(arguments), "shape": SHAPE}}
    problems = []
    with tempfile.TemporaryDirectory(prefix="sync_check_") as name:
        for dtype in PRECISIONS:
            result[dtype] = counts = summarized(asyncio.run(measure(arguments, dtype, Path(name))))
            print(dtype, counts, flush=True)
            if counts["accused"]:
                problems.append(f"{dtype}: accused in {len(counts['accused'])} of {counts['syncs']} syncs")
            for way in ("caught_by_logprobs", "caught_by_checksums"):
                problems += harness.at_least(f"{dtype}: {way} of skipped updates", counts[way], counts["skipped"])
    harness.conclude("sync_check", result, problems, write=arguments.json)


if __name__ == "__main__":
    main()
