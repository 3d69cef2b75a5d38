"""No text raises out of a verifier or the pool, and none makes the calling thread slow."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import hostile_texts
import pytest

from megatron_daro.errors import RewardError
from megatron_daro.reward import VerifierSpec
from megatron_daro.reward.base import Job
from megatron_daro.reward.factory import verifier_of
from megatron_daro.reward.pool import RewardPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool("math", workers=1, timeout_s=60) as running:
        yield running


@pytest.mark.parametrize("count", [999, 5000])
def test_many_percent_signs_are_an_answer_like_any_other(pool: RewardPool, count: int) -> None:
    (verdict,) = pool.score([(f"\\boxed{{1{'%' * count}}}", "1")])
    assert not verdict.correct and verdict.reason != "verifier_failed"


def test_a_chain_of_two_equal_equations_is_an_answer_like_any_other(pool: RewardPool) -> None:
    (verdict,) = pool.score([("\\boxed{AB iii== AB iii== BA}", "AB = BA")])
    assert not verdict.correct and verdict.reason != "verifier_failed"


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
    with RewardPool("math", workers=1, timeout_s=60) as pool:
        reasons.update(verdict.reason for verdict in pool.score([(text, gold, gold) for text, gold in pairs[:judged]]))
        assert pool.counters["crashes"] == 0
    assert sum(reasons.values()) == 3 * texts + judged
    assert {"match", "no_match", "unevaluated", "too_long", "(open)"} <= set(reasons)
    assert "verifier_failed" not in reasons


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


def test_a_closed_pool_is_the_callers_fault_and_raises() -> None:
    pool = RewardPool("math", workers=1)
    pool.close()
    with pytest.raises(RewardError):
        pool.score([("\\boxed{5}", "5")])
