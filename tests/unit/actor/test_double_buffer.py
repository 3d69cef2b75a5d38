"""Snapshots never overwrite the one that must stay, whatever the order of takes, failures and commits."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.actor.double_buffer import DoubleBuffer


@given(st.lists(st.sampled_from(["torn", "whole", "counts"]), max_size=30))
def test_the_snapshot_that_counts_stays_whole(fates):
    buffer, counts = DoubleBuffer(), None
    for serial, fate in enumerate(fates, 1):
        slot = buffer.open(counts)
        assert slot.serial is None and counts in (None, *buffer.serials)
        if fate != "torn":
            slot.serial = serial
        counts = serial if fate == "counts" else counts
        assert buffer.whole(serial) is (None if fate == "torn" else slot)
        assert len(buffer.serials) <= 2


def test_the_only_slot_is_given_out_again():
    buffer = DoubleBuffer(1)
    buffer.open(None).serial = 1
    assert buffer.open(1) is buffer.open(1) and buffer.serials == ()
