"""Orders that look at difficulty: what is drawn when, exact resume, refusals; and the pass rates of files."""

import json
import math
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.config.sections import CurriculumSection, PrioritisedSection
from megatron_daro.data.formats import PassRate, pass_rate_of
from megatron_daro.data.orders import Curriculum, Prioritised
from megatron_daro.data.prompts import load_problems
from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.types import Group, Prompt, Verdict


def prompts(num):
    return [Prompt(id=f"p{i}", answer=str(i), source="test", text=f"{i}?", tokens=(i, 1)) for i in range(num)]


def ids(taken):
    return [int(p.id[1:]) for p in taken]


def group(prompt, right, k=4):
    verdicts = tuple(Verdict(i < right, float(i < right), "") for i in range(k))
    return Group(0, prompt, (), verdicts)


def curriculum(num=10, ramp=20, start=0.2, seed=0):
    rates = {f"p{i}": (i * 7 % num) / num for i in range(num)}
    return Curriculum(prompts(num), rates, CurriculumSection(start=start), seed=seed, ramp=ramp)


def prioritised(num=10, seed=0, rates=None, **options):
    return Prioritised(prompts(num), rates or {}, PrioritisedSection(**options), seed=seed)


def act(source, sizes, seed=3):
    """Draw batches and report them back, right answers depending on the prompt and the place; what was drawn."""
    drawn = []
    for place, size in enumerate(sizes):
        taken = source.next(size)
        drawn += ids(taken)
        source.observe([group(p, (int(p.id[1:]) * 5 + place + seed) % 5) for p in taken])
    return drawn


MAKERS = {"curriculum": curriculum, "prioritised": prioritised}


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40, deadline=None)
@given(before=st.lists(st.integers(0, 9), max_size=6), after=st.lists(st.integers(0, 9), max_size=6))
def test_resume_goes_on_exactly(kind, before, after):
    unbroken, resumed = MAKERS[kind](seed=5), MAKERS[kind](seed=5)
    act(unbroken, before)
    unbroken.next(3)  # a batch under way
    resumed.next(2)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert act(resumed, after) == act(unbroken, after) and resumed.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("kind", MAKERS)
def test_two_calls_give_what_one_gives(kind):
    one, two = MAKERS[kind](), MAKERS[kind]()
    assert ids(one.next(3)) + ids(one.next(4)) == ids(two.next(7)) and one.drawn == two.drawn == 7


@pytest.mark.parametrize("kind", MAKERS)
def test_other_data_settings_and_torn_states_are_refused(kind):
    make = MAKERS[kind]
    source = make()
    source.next(4)
    state = source.state_dict()
    other = Prioritised(prompts(10), {}, PrioritisedSection(floor=0.3), seed=0)
    other = curriculum(start=0.3) if kind == "curriculum" else other
    for wrong, said in (
        (make(num=11), "num_prompts"),
        (make(seed=1), "seed"),
        (other, "settings"),
        (MAKERS["curriculum" if kind == "prioritised" else "prioritised"](), "order"),
    ):
        before = wrong.state_dict()
        with pytest.raises(CheckpointError, match=said):
            wrong.load_state_dict(state)
        assert wrong.state_dict() == before
    for change in (
        {"drawn": -1},
        {"columns": {}},
        {"columns": dict.fromkeys(state["columns"], "AA==")},
        {"columns": dict.fromkeys(state["columns"], "!")},
        *([{"ramp": 0}] if kind == "curriculum" else []),
    ):
        with pytest.raises(CheckpointError):
            make().load_state_dict(state | change)
    with pytest.raises(CheckpointError):
        make().load_state_dict({k: v for k, v in state.items() if k != "drawn"})


def test_a_curriculum_opens_from_easy_to_hard():
    source = curriculum(num=100, ramp=200, start=0.1, seed=1)
    ease = {int(p): rank for rank, p in enumerate(sorted(range(100), key=lambda i: -(i * 7 % 100)))}
    opened, ranks = [], []
    for _ in range(250):
        opened.append(source.open)
        ranks.append(ease[ids(source.next(1))[0]])
        assert ranks[-1] < opened[-1]
    assert opened[0] == 10 and opened[100] == 55 and opened[200:] == [100] * 50 and opened == sorted(opened)
    assert sum(ranks[:50]) / 50 < 25 < sum(ranks[150:200]) / 50


def test_a_curriculum_keeps_its_ramp_when_a_run_goes_on_with_other_steps():
    unbroken, resumed = curriculum(ramp=20), curriculum(ramp=90)
    unbroken.next(7)
    resumed.load_state_dict(unbroken.state_dict())
    assert ids(resumed.next(30)) == ids(unbroken.next(30)) and resumed.open == unbroken.open


def test_a_curriculum_draws_the_least_drawn():
    source = curriculum(num=10, start=1.0)
    for _ in range(4):
        assert sorted(ids(source.next(10))) == list(range(10))
    first = curriculum(num=10, start=0.2, ramp=1000)
    assert sorted(Counter(ids(first.next(8))).values()) == [4, 4]


def test_a_curriculum_needs_every_pass_rate():
    with pytest.raises(DataError, match=r"2 of 4 .*curate"):
        Curriculum(prompts(4), {"p0": 1.0, "p3": 0.0}, CurriculumSection(), seed=0, ramp=10)


def test_priorities_follow_recent_failure():
    source = prioritised(num=10, floor=0.1)
    every = source.next(10)
    assert sorted(ids(every)) == list(range(10)), "no prompt twice in a batch while others are left"
    for _ in range(40):
        source.observe([group(p, 4 if ids([p])[0] < 5 else 0) for p in every])
    drawn: Counter[int] = Counter()
    for _ in range(3000):
        drawn[ids(source.next(1))[0]] += 1
        source.observe([])
    failed = sum(drawn[i] for i in range(5, 10)) / 3000
    assert abs(failed - 1 / 1.1) < 0.03  # five of priority 1, five of 0.1


@pytest.mark.parametrize(
    ("options", "rates", "right", "priority"),
    [
        ({"floor": 0.2}, (0.5, 0.0), (), 0.2 + 0.8 * 0.5),
        ({"by": "signal", "floor": 0.0}, (0.25, 0.5), (), 4 * 0.25 * 0.75),
        ({"by": "gaussian", "floor": 0.0}, (0.4, 0.5), (), math.exp(-0.5)),  # of width 0.1
        ({"by": "gaussian", "floor": 0.0}, (None, 0.5), (), 1.0),
        ({"by": "signal", "floor": 0.0}, (None, 0.5), (1,), 4 * 0.25 * 0.75),
        ({"floor": 0.0}, (None, 0.0), (2, 3), 0.5 * 0.5 + 0.5 * 0.25),
        (
            {"floor": 0.0},
            (0.0, 0.0),
            (4, 3),
            0.5 * (0.5 * 1 + 0.5 * 0) + 0.5 * 0.25,
        ),  # each observation counts half
    ],
)
def test_the_first_of_two_prompts_is_drawn_by_its_priority(options, rates, right, priority):
    """The second has priority 1. rates: None: no file has one. right: answers of four to the first, reported before."""
    known = {f"p{i}": rate for i, rate in enumerate(rates) if rate is not None}
    source = prioritised(2, rates=known, **options)
    for number in right:
        source.observe([group(prompts(1)[0], number)])
    first = 0
    for _ in range(2000):
        first += ids(source.next(1)) == [0]
        source.observe([])
    assert first / 2000 == pytest.approx(priority / (priority + 1), abs=0.03)


def test_with_a_floor_of_0_what_is_always_solved_comes_last():
    """Kimi k1.5's 1 - success rate: never while another is left, and in any order where no other is."""
    source = prioritised(num=10, floor=0.0, rates={f"p{i}": float(i < 7) for i in range(10)})
    for _ in range(40):
        assert set(ids(source.next(3))) == {7, 8, 9}
        source.observe([])
    assert sorted(ids(source.next(10))) == list(range(10))
    for _ in range(2000):  # until nothing of a failure is left
        source.observe([group(p, 4) for p in prompts(10)])
    assert sorted(ids(source.next(10))) == list(range(10)), "all are solved: any order, each once"
    firsts = set()
    for _ in range(60):
        firsts |= set(ids(source.next(1)))
        source.observe([])
    assert len(firsts) == 10


def test_a_batch_larger_than_the_data_takes_prompts_again():
    assert sorted(Counter(ids(prioritised(num=3).next(7))).values()) == [2, 2, 3]


def test_orders_are_fixed_for_ever():
    # Written down once: another order would make old checkpoints resume with other prompts.
    assert ids(curriculum().next(10)) == [4, 7, 7, 1, 1, 8, 4, 8, 5, 5]
    rates = {f"p{i}": 0.0 for i in range(10)}
    assert act(prioritised(rates=rates), [4, 4, 4]) == [8, 4, 1, 0, 3, 6, 4, 0, 6, 3, 2, 5]


@pytest.mark.parametrize("make", MAKERS.values())
def test_bad_calls(make):
    with pytest.raises(DataError, match="-1"):
        make().next(-1)
    with pytest.raises(DataError):
        make(num=0)


def test_pass_rates_of_files(tmp_path):
    rows = [
        {"problem": "a", "answer": "1", "pass_rate": 0.25, "pass_rate_samples": 8, "pass_rate_model": "m/x"},
        {"problem": "b", "answer": "1", "pass_rate": 1, "pass_rate_weights": "abc"},
        {"problem": "c", "answer": "1", "pass_rate": 1.5},
        {"problem": "d", "answer": "1", "pass_rate": "easy"},
        {"problem": "f", "answer": "1", "pass_rate": 10**400},
        {"problem": "e", "answer": "1"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, report = load_problems([path])
    assert report.pass_rates == {
        found[0].id: PassRate(0.25, 8, "m/x"),
        found[1].id: PassRate(1.0, weights="abc"),
    }
    assert pass_rate_of({"pass_rate": Decimal("0.25")}) == PassRate(0.25)  # a column of a Parquet file
    assert pass_rate_of({"pass_rate": True}) is pass_rate_of({"pass_rate": float("nan")}) is pass_rate_of(7) is None


@pytest.mark.parametrize(("kind", "column"), [("curriculum", "times"), ("prioritised", "failure")])
def test_a_column_of_another_length_is_refused_with_both(kind, column):
    state = MAKERS[kind]().state_dict()
    state["columns"][column] = "AAAAAAAAAAA="  # eight bytes, one number
    with pytest.raises(CheckpointError, match=f"{column} .*1 .*10"):
        MAKERS[kind]().load_state_dict(state)
