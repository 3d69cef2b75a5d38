"""The pool of killable verifier workers: scores pairs in order, within limits, without one answer harming another.

(rollout text, gold) -> screened in this process -> worker processes (worker_pool/) -> Verdict.
This process is the driver, or an actor of Ray (runtime/node_pools.py). Refuses to start with limits that cannot work,
and to score after close. A timed-out, oversized or crashing answer is a Verdict (`timeout`, `memory`,
`crash`), never an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from megatron_daro.errors import RewardError
from megatron_daro.reward.base import Job, VerifierSpec
from megatron_daro.reward.factory import Judge, verifier_of
from megatron_daro.types import Verdict
from megatron_daro.worker_pool.pool import WorkerPool
from megatron_daro.worker_pool.process import Program

if TYPE_CHECKING:
    from megatron_daro.config.sections import RewardSection


class RewardPool(WorkerPool):
    """Scores answers in worker processes. A context manager; usable from several threads at once."""

    def __init__(
        self, verifier: VerifierSpec | str = "math", workers: int = 2, timeout_s: float = 5.0, memory_mib: int = 512
    ) -> None:
        """
        Args:
            verifier: spec, or name for a spec with its defaults.
            workers: processes. `integer` and `exact`, whose work is linear, start none: 0 will do for them.
            timeout_s: for one answer, seconds; the worker is killed and replaced after it.
            memory_mib: resident memory of one worker, MiB, interpreter and sympy (about 80) included.

        Raises: RewardError for values that cannot work.
        """
        self._spec = VerifierSpec(verifier) if isinstance(verifier, str) else verifier
        self._verifier = verifier_of(self._spec)
        least = int(self._needs_workers())
        if workers < least:
            raise RewardError(
                f"reward.workers: got {workers} with verifier {self._spec.name!r}, allowed {least} or more; set "
                "workers to the number of free cores"
            )
        program = Program(
            "megatron_daro.reward.worker",
            asdict(self._spec),
            "reward",
            "reward",
            "the math verifier alone needs about 80",
            RewardError,
        )
        super().__init__(program, workers, timeout_s, memory_mib)

    @classmethod
    def from_section(cls, section: RewardSection) -> RewardPool:
        """Return the pool of the configuration's reward section."""
        return cls(VerifierSpec.of_section(section), section.workers, section.timeout_s, section.memory_mib)

    def score(self, pairs: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """Return the verdicts of (answer text, gold) or (answer text, gold, statement) tuples, in their order.

        Args:
            pairs: what is not text gives the reason `not_text` or `gold_not_text`. No text raises: a fault of the
                verifier itself is the reason `verifier_failed`. The statement is the problem's own text.

        Returns: one verdict per pair.
        Raises: RewardError when the pool is closed, its workers no longer start or are far too few, or a user's class
            does not do what its Protocol says.
        """
        screened, jobs = self._screened(pairs)
        return self._verdicts(screened, dict(zip(jobs, self._ask_all(list(jobs.values())), strict=True)))

    async def score_async(self, pairs: Sequence[tuple[Any, ...]]) -> list[Verdict]:
        """Score like `score`, without blocking the event loop, or a thread while workers judge."""
        screened, jobs = await asyncio.to_thread(self._screened, pairs)
        return self._verdicts(screened, dict(zip(jobs, await self.ask_each(list(jobs.values())), strict=True)))

    def check_golds(self, golds: Sequence[Any]) -> dict[int, str]:
        """Return which golds are unusable or can only be matched literally, to be reported before a run.

        Returns: index -> `gold_empty`, `gold_not_text`, `gold_unparsed` (or why none could say, such as `timeout`).
        """
        self.start()
        problems: dict[int, str] = {}
        if not self._needs_workers():
            problem_of = {i: self._verifier.gold_problem(gold) for i, gold in enumerate(golds)}
            return {i: problem for i, problem in problem_of.items() if problem}
        problems |= {i: "gold_not_text" for i, gold in enumerate(golds) if not isinstance(gold, str)}
        open_golds = [i for i in range(len(golds)) if i not in problems]
        replies = self._ask_all([{"kind": "gold", "gold": golds[i]} for i in open_golds])
        problems |= {i: r["reason"] for i, r in zip(open_golds, replies, strict=True) if r["reason"] != "usable"}
        return dict(sorted(problems.items()))

    def _screened(self, pairs: Sequence[tuple[Any, ...]]) -> tuple[list[Verdict | Job], dict[Job, dict[str, Any]]]:
        """Return the verdict or job of each pair, in order, and the request of each distinct job."""
        self.start()
        screened = [self._screen(*pair) for pair in pairs]
        return screened, {item: {"kind": "judge", **asdict(item)} for item in screened if isinstance(item, Job)}

    def _verdicts(self, screened: Sequence[Verdict | Job], replies: Mapping[Job, dict[str, Any]]) -> list[Verdict]:
        return [item if isinstance(item, Verdict) else self._verdict(replies[item]) for item in screened]

    def _screen(self, answer_text: Any, gold: Any, statement: str = "") -> Verdict | Job:
        try:
            return self._verifier.screen(answer_text, gold, statement)
        except Exception:  # the border of the verifier: one answer must not end a run; the record has the reason
            return self._spec.verdict(False, "verifier_failed")

    def _needs_workers(self) -> bool:
        return isinstance(self._verifier, Judge)

    def _verdict(self, reply: dict[str, Any]) -> Verdict:
        verdict = self._spec.verdict(reply.get("correct") is True, str(reply["reason"]))
        return replace(verdict, reward=reply["reward"]) if "reward" in reply else verdict
