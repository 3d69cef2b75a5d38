"""No text raises out of a verifier or the pool, and none makes the calling thread slow."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hostile_texts
import pytest
from answer_classes import RIGHT, WRONG
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.errors import RewardError
from megatron_daro.reward import ScreenLimits, VerifierSpec
from megatron_daro.reward.base import Job
from megatron_daro.reward.factory import verifier_of
from megatron_daro.reward.math import MathVerifier
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Verdict

SPECS = [VerifierSpec(name, strict=strict) for name in ("math", "integer", "exact") for strict in (True, False)]
PIECES = ["\\boxed{", "}", "{", "%", "\\%", "(", ")", "[", "]", "^", "_", "!", "=", "<", ",", ";", " ", "\n", "$", "\\"]
PIECES += [
    "1",
    "23",
    "0.",
    "1,000",
    "x",
    "A",
    "e5",
    "\\frac",
    "\\sqrt",
    "\\sum",
    "\\text{",
    "\\pm",
    "\\overline{3}",
    "|",
]
PIECES += ["\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "&", "\\left", "\\right", " or ", "\\cup", "½", "²", "\ud800"]
PIECES += ["\x00", "\u2028", "İ", "٣", "Answer:", "answer ", "#### "]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map("".join) | st.text(max_size=60)
REPEATED = st.builds(lambda piece, count: piece * count, st.sampled_from(PIECES), st.integers(0, 3000))
KNOWN = st.sampled_from([text for pairs in (RIGHT | WRONG).values() for pair in pairs for text in pair])


@given(TEXTS | REPEATED | KNOWN, TEXTS | REPEATED | KNOWN, st.booleans())
@settings(max_examples=600, deadline=None)
def test_screening_any_text_gives_a_verdict_or_a_job(answer: str, gold: str, boxed: bool) -> None:
    text = f"\\boxed{{{answer}}}" if boxed else answer
    for spec in SPECS:
        screened = verifier_of(spec).screen(text, gold, gold)
        assert isinstance(screened, Job) or (screened.reason and (screened.correct is (screened.reason == "match")))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(VerifierSpec(refuse_restated=True), workers=1, timeout_s=60) as running:
        yield running


@pytest.mark.parametrize("count", [991, 999, 5000])
def test_many_percent_signs_are_an_answer_like_any_other(pool: RewardPool, count: int) -> None:
    (verdict,) = pool.score([(f"\\boxed{{1{'%' * count}}}", "1")])
    assert not verdict.correct
    assert pool.counters["failures"] == 0


def test_the_pool_hands_the_statement_on(pool: RewardPool) -> None:
    pair = ("\\boxed{99^2+99+1}", "9901")
    assert [v.reason for v in pool.score([(*pair, "What is $99^2+99+1$?"), pair])] == ["restated", "match"]


def test_a_fault_inside_a_worker_is_a_verdict_and_the_worker_goes_on(pool: RewardPool) -> None:
    pids, before = pool.worker_pids, pool.counters["failures"]
    assert pool._ask_all([{"kind": "judge", "answer": 5, "gold": "5", "statement": ""}]) == [
        {"correct": False, "reason": "verifier_failed"}
    ]
    assert pool.counters["failures"] == before + 1
    assert pool.worker_pids == pids


@given(KNOWN)
@settings(deadline=None)
def test_every_text_matches_itself(text: str) -> None:
    screened = MathVerifier(VerifierSpec()).screen(f"\\boxed{{{text}}}", text)
    assert screened == Verdict(True, 1.0, "match")


@pytest.mark.parametrize("error", [RecursionError, MemoryError, ValueError, IndexError])
def test_a_fault_of_the_verifier_is_a_verdict_and_counted(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    def fails(*args: object) -> None:
        raise error("a fault of ours")

    with RewardPool("integer", workers=0) as pool:
        monkeypatch.setattr(pool._verifier, "screen", fails)
        assert pool.score([("Answer: 5", "5")] * 2) == [Verdict(False, 0.0, "verifier_failed")] * 2
        assert pool.counters["failures"] == 2


@pytest.mark.parametrize(("texts", "judged"), [(4000, 80), pytest.param(200_000, 2000, marks=pytest.mark.heavy)])
def test_no_hostile_text_makes_a_verifier_fail(texts: int, judged: int) -> None:
    rng = random.Random(11)
    pairs = [hostile_texts.pair(rng) for _ in range(texts)]
    reasons: Counter[str] = Counter()
    verifiers = [verifier_of(VerifierSpec(name, strict=False)) for name in ("math", "integer", "exact")]
    for text, gold in pairs:
        for verifier in verifiers:
            screened = verifier.screen(text, gold, gold)
            reasons["(open)" if isinstance(screened, Job) else screened.reason] += 1
    with RewardPool(VerifierSpec("math", refuse_restated=True), workers=1, timeout_s=60) as pool:
        reasons.update(verdict.reason for verdict in pool.score([(text, gold, gold) for text, gold in pairs[:judged]]))
        assert pool.counters["failures"] == pool.counters["crashes"] == 0
    assert sum(reasons.values()) == 3 * texts + judged
    assert {"match", "no_match", "unevaluated", "too_long", "(open)"} <= set(reasons)


SHAPES = """
import sys
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.factory import verifier_of

SIZE = 2_000_000
pieces = ["answer ", "Answer: ", "answer" + " " * 50, "\\\\boxed{", "\\\\boxed ", "\\\\boxed", "{", "}", "%"]
pieces += ["#", "1,", "\\n", "\\\\", "9", "\\u0130", "a", "(", "^", "!", "1 ", "= ", "\\\\text{", "$"]
texts = [piece * (SIZE // len(piece)) for piece in pieces]
texts += ["\\\\boxed{" + text + "}" for text in texts] + ["\\\\boxed" + " " * SIZE + "{5}", "Answer:" + " " * SIZE]
for name in ("math", "integer", "exact"):
    verifier = verifier_of(VerifierSpec(name, strict=False))
    for text in texts:
        verifier.screen(text, "5", text)
        verifier.screen("\\\\boxed{5} Answer: 5 #### 5", text, "")
print("done")
"""


def test_two_million_characters_of_any_shape_are_screened() -> None:
    # Linear: seconds. A quadratic search for the last "answer" takes six minutes.
    command = [sys.executable, "-c", SHAPES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("size", [1001, 20_000])
def test_what_is_longer_than_the_quick_look_is_decided_in_a_worker(size: int) -> None:
    verifier = MathVerifier(VerifierSpec(limits=ScreenLimits(max_chars=10**6, max_digits=10**6)))
    assert isinstance(verifier.screen("\\boxed{" + "1" * size + "}", "5"), Job)
    assert isinstance(verifier.screen("\\boxed{5}", "1" * size), Job)


def test_a_closed_pool_is_the_callers_fault_and_raises() -> None:
    pool = RewardPool("math", workers=1)
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.score([("\\boxed{5}", "5")])
