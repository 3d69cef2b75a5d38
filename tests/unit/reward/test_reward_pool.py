"""RewardPool in ordinary use: order, screening, deduplication, threads, gold check, settings, in-process mode."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import RewardError
from megatron_daro.reward import VerifierSpec, build_verifier
from megatron_daro.reward.base import Job
from megatron_daro.reward.pool import RewardPool
from megatron_daro.reward.worker import answer_all
from megatron_daro.types import Verdict
from megatron_daro.worker_pool.child import EXIT_MEMORY, serve
from megatron_daro.worker_pool.pool import longest_wait_s

PAIRS = [
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("\\boxed{7}", "7"),
    ("\\boxed{x^2}", "x^3"),
    (None, "7"),
    ("\\boxed{[2,5]}", "2 \\le x \\le 5"),
    ("no box 7", "7"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool("math", workers=2, timeout_s=30) as running:
        yield running


def test_verdicts_equal_those_of_the_verifier_in_order(pool: RewardPool) -> None:
    verifier = build_verifier("math")
    pairs = PAIRS * 5
    assert pool.score(pairs) == [verifier.verify(answer, gold) for answer, gold in pairs]  # type: ignore[arg-type]
    assert pool.score([]) == []


def test_cheap_answers_need_no_worker_and_equal_ones_are_judged_once(pool: RewardPool) -> None:
    before = pool.counters
    pool.score([("\\boxed{7}", "7"), ("\\boxed{8}", "7"), ("nothing", "7")])
    pool.score([("\\boxed{\\sin(y)+1}", "y")] * 6)
    after = pool.counters
    assert after["screened"] - before["screened"] == 3
    assert after["judged"] - before["judged"] == 1
    assert after["deduplicated"] - before["deduplicated"] == 5


def test_several_threads_at_once_get_their_own_verdicts(pool: RewardPool) -> None:
    results: dict[int, list[Verdict]] = {}

    def score(index: int) -> None:
        results[index] = pool.score([(f"\\boxed{{x+{index}}}", "x+2"), (f"\\boxed{{y-{index}}}", "y-3")])

    threads = [threading.Thread(target=score, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: [v.correct for v in r] for i, r in results.items()} == {i: [i == 2, i == 3] for i in range(6)}


def test_score_async_leaves_the_event_loop_free(pool: RewardPool) -> None:
    async def both() -> tuple[list[Verdict], list[Verdict]]:
        return await asyncio.gather(pool.score_async(PAIRS[:1]), pool.score_async(PAIRS[2:3]))

    first, second = asyncio.run(both())
    assert (first[0].correct, second[0].correct) == (True, False)


def test_golds_that_cannot_be_used_are_listed(pool: RewardPool) -> None:
    golds = ["\\frac{1}{2}", "", None, "\\text{east}", "x + + / ) 3", "4.5e33"]
    assert pool.check_golds(golds) == {1: "gold_empty", 2: "gold_not_text", 4: "gold_unparsed"}


def test_text_that_would_break_a_line_protocol(pool: RewardPool) -> None:
    answers = [
        "\\boxed{x\n+\r\n1}",
        "\\boxed{x\u2028+1}",
        "\\boxed{\ud800}",
        '\\boxed{"}\n{"reason": "match"}',
        "\\boxed{\0}",
    ]
    verdicts = pool.score([(answer, "1+x") for answer in answers])
    assert [v.correct for v in verdicts] == [True, True, False, False, False]


def test_settings_come_from_a_section_and_cheap_verifiers_start_no_process() -> None:
    children = set(psutil.Process().children(recursive=True))
    section = RewardSection(verifier="integer", incorrect_reward=-1.0)
    with RewardPool.from_section(section) as pool:
        assert pool.score([("Answer: 7", "7"), ("Answer: 8", "7")]) == [
            Verdict(True, 1.0, "match"),
            Verdict(False, -1.0, "no_match"),
        ]
        assert pool.worker_pids == ()
        assert pool.check_golds(["7", "x"]) == {1: "gold_unparsed"}
        assert set(psutil.Process().children(recursive=True)) <= children


def test_zero_workers_with_a_marker() -> None:
    with RewardPool(VerifierSpec("exact", marker="#"), workers=0) as pool:
        assert [v.correct for v in pool.score([("1+2#3", "3"), ("1+2#4", "3")])] == [True, False]


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"workers": -1}, {"timeout_s": 0.0}, {"memory_mib": 0}, {"verifier": "maths"}]
)
def test_settings_that_cannot_work_are_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(RewardError, match="allowed"):
        RewardPool(**{"verifier": "math", **wrong})  # type: ignore[arg-type]


def test_the_longest_wait_grows_with_what_each_worker_has_to_do():
    alone = longest_wait_s(0, 1, 5.0)
    assert longest_wait_s(100, 1, 5.0) == pytest.approx(51 * alone)  # 102 rounds in the place of 2
    assert longest_wait_s(100, 4, 5.0) == pytest.approx(13.5 * alone)
    assert longest_wait_s(0, 0, 5.0) == alone  # in the driver's own process


def test_a_worker_ends_after_an_answer_that_was_too_large_for_it() -> None:
    class Hungry:
        def judge(self, job: Job) -> Verdict:
            if job.answer == "large":
                raise MemoryError
            return Verdict(True, 1.0, "match")

    answers = ("small", "large", "small")
    requests = [{"kind": "judge", "answer": answer, "gold": "1", "statement": ""} for answer in answers]
    lines, replies = io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in requests)), io.BytesIO()
    status = serve(partial(answer_all, Hungry()), lines, replies, timeout_s=60, memory_mib=100_000)  # type: ignore[arg-type]
    said = [json.loads(line)["reason"] for line in replies.getvalue().splitlines()]
    assert (status, said) == (EXIT_MEMORY, ["match", "memory"])


def test_the_workers_are_there_as_soon_as_the_pool_is_entered() -> None:
    with RewardPool("math", workers=1) as own:
        assert len(own.worker_pids) == 1
        own.start()
        assert len(own.worker_pids) == 1
