"""The cursor: each prompt once per epoch, exact resume, refusal of other data."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.data.orders import Epochs
from megatron_daro.errors import CheckpointError, DataError
from megatron_daro.types import Prompt


def prompts(num: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", answer=str(i), source="test", text=f"{i}?", tokens=(i, 1)) for i in range(num)]


def ids(taken) -> list[str]:
    return [p.id for p in taken]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 2**40),
    st.booleans(),
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
)
def test_resume_goes_on_exactly(num, seed, shuffle, before, after):
    unbroken = Epochs(prompts(num), seed=seed, shuffle=shuffle)
    for n in before:
        unbroken.next(n)
    state = json.loads(json.dumps(unbroken.state_dict()))
    resumed = Epochs(prompts(num), seed=seed, shuffle=shuffle)
    resumed.next(3)
    resumed.load_state_dict(state)
    assert resumed.drawn == unbroken.drawn == sum(before)
    assert [ids(resumed.next(n)) for n in after] == [ids(unbroken.next(n)) for n in after]
    assert resumed.state_dict() == unbroken.state_dict()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 100), st.booleans(), st.lists(st.integers(0, 7), max_size=12))
def test_every_epoch_has_every_prompt_once_however_it_is_cut(num, seed, shuffle, cuts):
    source = Epochs(prompts(num), seed=seed, shuffle=shuffle)
    taken = [p.id for n in cuts for p in source.next(n)]
    assert taken == ids(Epochs(prompts(num), seed=seed, shuffle=shuffle).next(sum(cuts)))
    for start in range(0, len(taken) - num + 1, num):
        assert sorted(taken[start : start + num]) == sorted(ids(prompts(num)))
    assert source.state_dict()["epoch"] == sum(cuts) // num


def test_order_is_fixed_for_ever():
    # Written down once: another order would make old checkpoints resume with other prompts.
    source = Epochs(prompts(8), seed=7)
    assert ids(source.next(8)) == ["p6", "p3", "p4", "p0", "p2", "p7", "p5", "p1"]
    assert ids(source.next(8)) == ["p1", "p3", "p2", "p7", "p4", "p5", "p0", "p6"]


def test_shuffle_differs_by_epoch_and_seed():
    source = Epochs(prompts(50), seed=1)
    first, second = ids(source.next(50)), ids(source.next(50))
    assert first != second and first != ids(prompts(50))
    assert ids(Epochs(prompts(50), seed=2).next(50)) != first
    assert ids(Epochs(prompts(50), shuffle=False).next(50)) == ids(prompts(50))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Epochs(prompts(9), seed=1), "num_prompts"),
        (Epochs(prompts(8)[::-1], seed=1), "fingerprint"),
        (Epochs([replace(p, tokens=(2,)) for p in prompts(8)], seed=1), "fingerprint"),
        (Epochs([replace(p, answer="0") for p in prompts(8)], seed=1), "fingerprint"),
        (Epochs(prompts(8), seed=2), "seed"),
        (Epochs(prompts(8), seed=1, shuffle=False), "shuffle"),
    ],
)
def test_other_data_is_refused_and_nothing_changes(other, words):
    source = Epochs(prompts(8), seed=1)
    source.next(5)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=words):
        other.load_state_dict(source.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize("edit", [{"position": 8}, {"position": -1}, {"epoch": "1"}, {"epoch": -1}, {"extra": 1}])
def test_torn_state_is_refused(edit):
    source = Epochs(prompts(8), seed=1)
    with pytest.raises(CheckpointError, match=next(iter(edit))):
        source.load_state_dict(source.state_dict() | edit)


def test_refusals():
    with pytest.raises(DataError):
        Epochs([])
    with pytest.raises(DataError, match="seed"):
        Epochs(prompts(1), seed=-1)
    with pytest.raises(DataError, match="-1"):
        Epochs(prompts(1)).next(-1)
