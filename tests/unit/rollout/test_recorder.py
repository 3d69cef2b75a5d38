"""Recorded rollouts come back bit for bit; damaged files are named."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from loop_fakes import K, make_rollout

from megatron_daro.errors import DataError
from megatron_daro.rollout.recorder import (
    Recorder,
    group_from_json,
    group_to_json,
    read_groups,
    read_step,
    recorded_steps,
)
from megatron_daro.types import Group, Prompt, Verdict

GROUP_KEYS = {"group_id", "prompt_id", "prompt", "answer", "source", "attempt", "prompt_tokens", "rollouts", "used"}
ROLLOUT_KEYS = {
    "index",
    "attempt",
    "text",
    "tokens",
    "logprobs",
    "correct",
    "reward",
    "reason",
    "finish_reason",
    "weight_version",
    "version_spans",
    "length",
}


def make_group(group_id=5, correct=(True, False, True, False), prompt=None) -> Group:
    prompt = prompt or Prompt(f"p{group_id}", "4", "unit", text="2+2?", tokens=(7, 8, 9))
    rollouts = tuple(make_rollout(group_id, 0, i, prompt, version=3) for i in range(len(correct)))
    return Group(group_id, prompt, rollouts, tuple(Verdict(c, float(c), "match") for c in correct))


def same(a: Group, b: Group) -> bool:
    def plain(group: Group):
        rollouts = [
            tuple(
                (v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for v in (getattr(r, n) for n in r.__slots__)
            )
            for r in group.rollouts
        ]
        return group.group_id, group.prompt, rollouts, group.verdicts

    return plain(a) == plain(b)


@given(
    logprobs=arrays(np.float32, st.integers(1, 30), elements=st.floats(width=32, allow_nan=False)),
    text=st.text(),
    answer=st.text(st.characters(exclude_categories=[])),
    reward=st.floats(allow_nan=False),
    mask_seed=st.integers(0, 3),
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
)
def test_round_trip_is_exact(logprobs, text, answer, reward, mask_seed, spans):
    prompt = Prompt("p", answer, "unit", messages=({"role": "user", "content": text},), tokens=(1, 2))
    mask = (np.arange(len(logprobs)) % 4 >= mask_seed).astype(np.uint8)
    rollout = replace(
        make_rollout(9, 2, 0, prompt, version=4, length=len(logprobs)),
        logprobs=logprobs,
        text=text,
        loss_mask=mask,
        version_spans=tuple(spans),
    )
    group = Group(9, prompt, (rollout,), (Verdict(True, reward, "match"),))
    back, used = group_from_json(json.loads(json.dumps(group_to_json(group, "filtered"))))
    assert used == "filtered"
    assert same(group, back)


def test_keys_are_the_contract():
    record = group_to_json(make_group(), "trained")
    assert set(record) == GROUP_KEYS
    assert all(set(rollout) == ROLLOUT_KEYS for rollout in record["rollouts"])
    assert record["prompt"] == "2+2?" and record["prompt_tokens"] == [7, 8, 9]
    assert len(record["rollouts"][0]["tokens"]) == record["rollouts"][0]["length"]


def test_order_and_outcomes_come_back(tmp_path):
    trained, filtered, dropped = [make_group(4), make_group(2)], [make_group(3)], [make_group(1)]
    path = Recorder(tmp_path).write_step(20, {"trained": trained, "filtered": filtered, "dropped": dropped})
    assert path == tmp_path / "rollouts" / "step_000020.jsonl.zst"
    back = read_step(tmp_path, 20)
    assert [used for _, used in back] == ["trained", "trained", "filtered", "dropped"]
    assert all(same(a, b) for a, (b, _) in zip([*trained, *filtered, *dropped], back, strict=True))
    text = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).decode()
    assert len(text.splitlines()) == 4


def test_an_incomplete_group_can_be_recorded(tmp_path):
    empty = Group(8, make_group().prompt, (), ())
    Recorder(tmp_path).write_step(1, {"dropped": [empty]})
    assert same(read_step(tmp_path, 1)[0][0], empty)


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "line", "length"])
def test_damage_is_named(tmp_path, damage):
    path = Recorder(tmp_path).write_step(1, {"trained": [make_group(i) for i in range(20)]})
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "flip":
        path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    elif damage == "missing":
        path.unlink()
    else:
        record = group_to_json(make_group(), "trained")
        if damage == "length":
            record["rollouts"][2]["logprobs"].pop()
        else:
            del record["answer"]
        good = json.dumps(group_to_json(make_group(), "trained"))
        path.write_bytes(zstandard.compress(f"{good}\n{json.dumps(record)}\n".encode()))
    with pytest.raises(DataError, match="step_000001.jsonl.zst: " + ("line 2" if damage in ("line", "length") else "")):
        read_step(tmp_path, 1)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    recorder = Recorder(tmp_path)
    path = recorder.write_step(1, {"trained": [make_group(1)]})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match=r"could not be written: .*File too large"):
            recorder.write_step(1, {"trained": [make_group(i) for i in range(20)]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_truncate_keeps_steps_up_to_the_checkpoint(tmp_path):
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3, 1000000):
        recorder.write_step(step, {"trained": [make_group(step)]})
    (tmp_path / "rollouts" / "step_000004.jsonl.zst.tmp").write_bytes(b"half")
    assert recorder.truncate_after(2) == 2
    assert recorded_steps(tmp_path) == [1, 2]
    assert len(list((tmp_path / "rollouts").iterdir())) == 2


def test_failed_batches_keep_nan(tmp_path):
    group = make_group()
    bad = replace(group.rollouts[0], logprobs=np.full_like(group.rollouts[0].logprobs, np.nan))
    path = Recorder(tmp_path).write_failed(7, [replace(group, rollouts=(bad, *group.rollouts[1:]))])
    assert path == tmp_path / "failed" / "step_000007.jsonl.zst"
    assert np.isnan(read_groups(path)[0][0].rollouts[0].logprobs).all()
    assert len(group.rollouts) == K
