"""RewardPool in ordinary use: order, screening, deduplication, threads, gold check, settings, in-process mode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import psutil
import pytest

from megatron_daro.config.sections import RewardSection
from megatron_daro.errors import ConfigError, RewardError
from megatron_daro.reward import build_verifier
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import Verdict

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
    before = pool.counters["answered"]
    pool.score([("\\boxed{7}", "7"), ("\\boxed{8}", "7"), ("nothing", "7")])
    pool.score([("\\boxed{\\sin(y)+1}", "y")] * 6)
    assert pool.counters["answered"] - before == 1


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
        assert pool.check_golds(["7", "x"]) == {1: "gold_unparsed"}
        assert set(psutil.Process().children(recursive=True)) <= children


def test_form_and_marker_of_a_section_decide() -> None:
    for strict, unmarked in ((True, False), (False, True)):
        section = RewardSection(verifier="exact", options={"strict": strict, "marker": "#"}, correct_reward=2.0)
        with RewardPool.from_section(section) as pool:
            verdicts = pool.score([("1+2#3", "3"), ("1+2#4", "3"), ("3", "3")])
        assert [v.correct for v in verdicts] == [True, False, unmarked] and verdicts[0].reward == 2.0


@pytest.mark.parametrize(
    ("verifier", "options", "allowed"),
    [
        ("math", {"marker": "#"}, "strict, after_thinking"),
        ("exact", {"markers": "#"}, "strict, after_thinking, marker; did you mean marker"),
        ("exact", {"marker": 3}, "text"),
        ("math", {"strict": "no"}, "true or false"),
    ],
)
def test_an_option_that_the_verifier_does_not_take_is_refused(verifier, options, allowed) -> None:
    (option,) = options
    with pytest.raises(ConfigError, match=rf"reward\.options\.{option}: got .*allowed .*{allowed}.*; fix: "):
        RewardPool.from_section(RewardSection(verifier=verifier, options=options))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"workers": 0}, "workers"),
        ({"workers": -1, "verifier": "exact"}, "workers"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"memory_mib": 0}, "memory_mib"),
        ({"verifier": "maths"}, "maths"),
        ({"verifier": "toy_verifier:LastDigit", "workers": 0}, "toy_verifier:LastDigit"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(RewardError, match=name):
        RewardPool(**{"verifier": "math", **wrong})  # type: ignore[arg-type]
