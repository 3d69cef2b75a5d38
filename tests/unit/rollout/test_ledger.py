"""The books of the groups, against a plain model under random events."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.errors import CheckpointError, EngineError
from megatron_daro.rollout.ledger import OUTCOMES, Ledger

EVENTS = st.lists(
    st.tuples(st.sampled_from(["admit", "retry", "finish", "answer", "save"]), st.integers(0, 30), st.integers(0, 3)),
    max_size=60,
)


@given(EVENTS)
def test_every_group_is_in_exactly_one_state(events):
    ledger, state_of, attempt_of, refused = Ledger(), {}, {}, 0
    for kind, number, detail in events:
        if kind == "admit":
            for group_id in ledger.admit(detail):
                assert group_id not in state_of
                state_of[group_id], attempt_of[group_id] = "outstanding", 0
        elif kind == "save":
            ledger, saved = Ledger(), json.loads(json.dumps(ledger.state_dict()))
            ledger.load_state_dict(saved)
        elif number in state_of:
            if kind == "answer" and detail <= attempt_of[number]:
                valid = state_of[number] == "outstanding" and detail == attempt_of[number]
                assert ledger.accepts(number, detail) == valid
                refused += not valid
            elif state_of[number] == "outstanding" and kind == "retry":
                attempt_of[number] = ledger.retry(number)
            elif state_of[number] == "outstanding" and kind == "finish":
                state_of[number] = OUTCOMES[detail % 3]
                ledger.finish([number], OUTCOMES[detail % 3])
        counts = ledger.counts()
        states = list(state_of.values())
        assert counts == {"admitted": len(states)} | {s: states.count(s) for s in (*OUTCOMES, "outstanding")}
        assert ledger.late_refused == refused
        assert ledger.outstanding == tuple(i for i, s in state_of.items() if s == "outstanding")


def test_invented_answers_are_errors_and_late_ones_are_counted():
    ledger = Ledger()
    ledger.admit(1)
    with pytest.raises(EngineError, match="group 1 attempt 0"):
        ledger.accepts(1, 0)
    with pytest.raises(EngineError, match="attempt 1"):
        ledger.accepts(0, 1)
    assert ledger.late_refused == 0
    ledger.retry(0)
    assert not ledger.accepts(0, 0) and ledger.accepts(0, 1)
    assert (ledger.late_refused, ledger.retries) == (1, 1)


def test_a_state_that_does_not_add_up_is_refused():
    ledger = Ledger()
    ledger.admit(3)
    ledger.finish([0], "trained")
    state = ledger.state_dict()
    state["finished"] = {"trained": 2, "filtered": 0, "dropped": 0}
    with pytest.raises(CheckpointError, match=r"3 .* 2 "):
        Ledger().load_state_dict(state)


@pytest.mark.parametrize("group_id", [-1, 2])
def test_a_state_with_a_group_that_was_never_admitted_is_refused(group_id):
    ledger = Ledger()
    ledger.admit(2)
    state = ledger.state_dict()
    state["outstanding"] = [[0, 0], [group_id, 0]]
    with pytest.raises(CheckpointError, match="ledger"):
        Ledger().load_state_dict(state)
