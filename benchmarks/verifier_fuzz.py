"""Hostile texts through the verifiers: no exception, none over its limit. Prints how many met which end.

Texts are grown from the pairs of answers that the tests know by inserting, repeating, cutting and splicing pieces of
LaTeX, Unicode and noise; each is scored against a gold of the same making by the `math` pool, and screened by the other
verifiers. Deterministic per seed. Usage: python benchmarks/verifier_fuzz.py [--texts 1000000] [--seed 0] [--judged 1].
Exit status 1 when a verifier failed on a text. The slowest texts and those that cost a worker are printed.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit" / "reward"))  # the classes of answers of the tests are the corpus

from answer_classes import RIGHT, WRONG  # noqa: E402

from megatron_daro.reward.base import Job, StagedVerifier, VerifierSpec  # noqa: E402
from megatron_daro.reward.factory import verifier_of  # noqa: E402
from megatron_daro.reward.pool import RewardPool  # noqa: E402
from megatron_daro.types import Verdict  # noqa: E402

CORPUS = sorted({text for pairs in (*RIGHT.values(), *WRONG.values()) for pair in pairs for text in pair})
LATEX = r"""
\\ \boxed{ \fbox{ \frac \frac{ \sqrt \sqrt[3]{ \sum_{k=1}^{n} \int_0^1 \lim_{x\to0} \binom{ \text{ \mathrm{ \left(
\right) \left\{ \right\} \cup \cap \in \leq \geq \neq \infty \pm \mp \cdot \times \div \% \circ \overline{ \bar{ \vec{
\pi \theta \sin \log_2 \arcsin \lfloor \rfloor \mod \approx \ldots \quad \, \! \text{\ or\ } e10 1,000 0. 999999999
^{99} !! ** // Answer: #### \begin{pmatrix} \end{pmatrix} \begin{cases} \end{cases} \begin{array}{c} \end{array} ½ ² ₁
√ ∞ ≤ ∑ ٣ İ ５ 😀
"""
PIECES = [*"{}[]()^_!=<>,;:%$&|'./+-*~ 0123456789abcdeinxyzABKTX\n\t\\\x00\ud800\u2028\u202e", *LATEX.split()]
PIECES += [" or ", " and ", " cm", "10 000"]
SLOWEST = 5
BATCH = 5000


@dataclass
class Timed:
    """A verifier that notes how long it holds the calling thread, CPU seconds."""

    inner: StagedVerifier
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def screen(self, answer_text: Any, gold: Any, statement: str = "") -> Verdict | Job:
        begin = time.thread_time()
        screened = self.inner.screen(answer_text, gold, statement)
        entry = (time.thread_time() - begin, repr((answer_text, gold))[:200])
        (heapq.heappush if len(self.slowest) < SLOWEST else heapq.heappushpop)(self.slowest, entry)
        return screened

    def judge(self, job: Job) -> Verdict:
        return self.inner.judge(job)

    def gold_problem(self, gold: Any) -> str | None:
        return self.inner.gold_problem(gold)


def mutated(rng: random.Random, text: str) -> str:
    """A text a few steps away from another."""
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(6)
        if kind <= 1:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 2:
            text = text[:at] + text[at + rng.randrange(1, 6) :]
        elif kind == 3:
            text = text[:at] + rng.choice(PIECES) * rng.choice((2, 3, 8, 40, 1100)) + text[at:]
        elif kind == 4:
            other = rng.choice(CORPUS)
            text = text[:at] + other[rng.randrange(len(other) + 1) :]
        else:
            end = rng.randrange(at, len(text) + 1)
            text = text[:at] + text[at:end] * rng.choice((2, 3, 10)) + text[end:]
    return text[:5000]


def pair(rng: random.Random) -> tuple[str, str]:
    """(answer text, gold): mostly boxed, mostly of related making, sometimes noise."""
    gold = rng.choice(CORPUS)
    answer = mutated(rng, gold if rng.random() < 0.5 else rng.choice(CORPUS))
    if rng.random() < 0.1:
        answer = "".join(rng.choice(PIECES) for _ in range(rng.randrange(40)))
    if rng.random() < 0.1:
        gold = mutated(rng, gold)
    box = rng.random()
    text = f"so \\boxed{{{answer}}}" if box < 0.9 else f"Answer: {answer}" if box < 0.95 else answer
    return text, gold


def fuzz(num_texts: int, seed: int, workers: int, timeout_s: float, judged: float) -> dict[str, Any]:
    """Scores that many texts: reasons, the pool's counters, the slowest screens and the texts that cost a worker.

    judged: share of the texts that also go to the workers where the screen leaves them open; the rest is screened only.
    Raises: whatever a verifier lets through, that is, a fault.
    """
    rng = random.Random(seed)
    reasons: Counter[str] = Counter()
    costly: list[tuple[str, str]] = []
    others = [verifier_of(VerifierSpec(name, strict=False)) for name in ("integer", "exact")]
    with RewardPool(VerifierSpec("math", refuse_restated=True), workers, timeout_s) as pool:
        timed = Timed(pool._verifier)
        pool._verifier = timed  # type: ignore[assignment]
        for start in range(0, num_texts, BATCH):
            pairs = [pair(rng) for _ in range(min(BATCH, num_texts - start))]
            whole, rest = pairs[: round(judged * len(pairs))], pairs[round(judged * len(pairs)) :]
            verdicts = pool.score([(text, gold, gold) for text, gold in whole])
            screened = [pool._screen(text, gold, gold) for text, gold in rest]
            reasons.update("(open)" if isinstance(one, Job) else one.reason for one in screened)
            reasons.update(verdict.reason for verdict in verdicts)
            costs = ("timeout", "memory", "crash", "unreached", "verifier_failed")
            costly += [
                (v.reason, repr(p))
                for v, p in zip(verdicts, whole, strict=True)
                if v.reason in costs and len(costly) < 200
            ]
            for text, gold in pairs:
                for other in others:
                    verdict = other.screen(text, gold)
                    assert isinstance(verdict, Verdict) and verdict.reason
        counters = pool.counters
    slowest = [(round(1000 * seconds, 2), text) for seconds, text in sorted(timed.slowest, reverse=True)]
    return {"reasons": dict(reasons.most_common()), "counters": counters, "slowest_ms": slowest, "costly": costly}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--judged", type=float, default=1.0, help="share of the texts that goes to the workers")
    parser.add_argument("--timeout", type=float, default=5.0)
    args = parser.parse_args()
    begin = time.perf_counter()
    found = fuzz(args.texts, args.seed, args.workers, args.timeout, args.judged)
    print(f"{args.texts} texts, seed {args.seed}, {time.perf_counter() - begin:.0f} s")
    print("reasons:", found["reasons"])
    print("counters:", found["counters"])
    for entry in (*found["slowest_ms"], *found["costly"]):
        print(*entry)
    return 1 if found["counters"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
