"""Experts of an answer go from whoever asked the server to the ranks: the driver has their place only."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_daro import durable
from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.data.batch import build_step_batch
from megatron_daro.data.packing import pack
from megatron_daro.engine.sglang.replies import rollouts_of
from megatron_daro.errors import DataError
from megatron_daro.rollout.recorder import RecordedMiniBatch, Recorder, read_step
from megatron_daro.routed_experts import ExpertsFolder, Part, StoredExperts
from megatron_daro.types import Group, GroupRequest, Prompt, SamplingParams, Verdict

LAYERS, CHOSEN, K = 48, 8, 4
"""Of Qwen3-30B-A3B, which has 128 experts a layer."""


def answered(group_id: int, length: int, folder: ExpertsFolder) -> tuple[Group, list[np.ndarray]]:
    """A group as an answer worker returns it, and the experts that the server told, int32 [tokens - 1, ...] each."""
    prompt = Prompt("p", "1", "test", text="x", tokens=(5, 6, 7))
    sampling = SamplingParams(max_new_tokens=length, routed_experts=(LAYERS, CHOSEN))
    request = GroupRequest(group_id, 0, prompt, tuple(range(K)), sampling)
    rng = np.random.default_rng(group_id)
    told = [rng.integers(0, 128, (2 + length, LAYERS, CHOSEN), dtype=np.int32) for _ in range(K)]
    answers = [
        {
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-0.5, 9, None]] * length,
                "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            }
        }
        for experts in told
    ]
    rollouts = rollouts_of(request, answers, version=1, loaded=None, decode=str, experts=folder)
    return Group(group_id, prompt, rollouts, (Verdict(True, 1.0, ""), *[Verdict(False, 0.0, "")] * (K - 1))), told


def test_the_driver_has_their_place_only(tmp_path, monkeypatch):
    """All that the driver does with a batch, with 5 MB of experts: none of them pass, and the ranks get all."""
    length, folder = 400, ExpertsFolder(tmp_path)
    at_workers = [answered(i, length, folder) for i in range(2)]
    to_driver = pickle.dumps([group for group, _ in at_workers])
    read = []
    original = StoredExperts.read
    monkeypatch.setattr(StoredExperts, "read", lambda experts: read.append(experts) or original(experts))

    groups = pickle.loads(to_driver)
    Recorder(tmp_path).write_step(1, {"trained": groups}, RecordedMiniBatch(1, 1, 1, (0, 1), True))
    groups = [group for group, _ in read_step(tmp_path, 1)]
    batch = build_step_batch(groups, make_algorithm("grpo", rollouts_per_prompt=K, max_response_tokens=length))
    rows = [5, 0, 2, 7]
    to_rank = pickle.dumps(batch.select(rows))
    tokens, told = 2 * K * (length + 3), sum(experts.nbytes for _, group in at_workers for experts in group)
    assert not read and told > 4_900_000
    # A token has an id, and one of a response a log-prob, a mask and three letters of text.
    assert len(to_driver) < 16 * tokens and len(to_rank) < 16 * tokens
    assert (tmp_path / "rollouts" / "step_000001.parquet").stat().st_size < 16 * tokens

    packed = pack(pickle.loads(to_rank), [1, 3])
    want = [at_workers[0][1][0], at_workers[1][1][3]]  # rows 0 and 7
    unknown = np.full((1, LAYERS, CHOSEN), -1)
    np.testing.assert_array_equal(
        packed.routed_experts_TLK.numpy(), np.concatenate([part for experts in want for part in (experts, unknown)])
    )
    assert len(read) == 2, "those of the micro-batch, and no others"
    on_disk = sum(file.stat().st_size for file in folder.path.rglob("*.npy"))
    assert on_disk < told / 4 + 2 * K * 256, "one byte an expert"


@pytest.mark.parametrize(("most", "bytes_an_expert"), [(255, 1), (256, 2)])
def test_one_byte_where_the_number_of_experts_allows_it(tmp_path, most, bytes_an_expert):
    experts_TLK = np.array([[[0, most]], [[1, 2]]])
    stored = ExpertsFolder(tmp_path).store((1, 2, 3), experts_TLK, 3)
    assert np.load(stored.parts[0].path).itemsize == bytes_an_expert
    assert stored.read().tolist() == [[[0, most]], [[1, 2]], [[-1, -1]]]


def test_what_is_settled_keeps_what_a_record_names(tmp_path):
    folder, experts_TLK = ExpertsFolder(tmp_path), np.zeros((3, 1, 2))
    early, kept, dropped = (folder.store((group, 0, 0), experts_TLK, 4) for group in (1, 1, 2_000))
    waiting = folder.store((3, 0, 0), experts_TLK, 4)
    assert early.parts[0].path != kept.parts[0].path, "a second answer changes nothing of the first"
    folder.settle({1: (kept, None), 2_000: (), 77: ()})
    assert set(map(str, folder.path.rglob("*.npy"))) == {e.parts[0].path for e in (kept, waiting)}
    kept.read()
    with pytest.raises(DataError, match=r"\.npy"):
        dropped.read()


def test_what_is_not_theirs_is_refused(tmp_path):
    stored = ExpertsFolder(tmp_path).store((1, 0, 0), np.zeros((3, 4, 2)), 4)
    path = Path(stored.parts[0].path)
    with pytest.raises(DataError, match=r"\(3, 4, 2\).*5"):
        replace(stored, parts=(Part(str(path), 0, 5),), shape=(6, 4, 2)).read()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"\.npy"):
        stored.read()
    np.save(path, np.array([None]), allow_pickle=True)
    with pytest.raises(DataError, match=r"\.npy"):
        stored.read()


def test_a_disk_that_refuses_is_named(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(DataError, match="experts"):
        ExpertsFolder(tmp_path).store((1, 0, 0), np.zeros((3, 4, 2)), 4)
    assert not list(tmp_path.rglob("*.npy"))


def test_another_kind_of_number_is_another_file(tmp_path):
    stored = ExpertsFolder(tmp_path).store((1, 0, 0), np.zeros((3, 4, 2)), 4)
    np.save(stored.parts[0].path, np.zeros((3, 4, 2), np.int32))
    with pytest.raises(DataError, match="int32"):
        stored.read()
    np.save(stored.parts[0].path, np.zeros((3, 2, 4), np.uint8))
    with pytest.raises(DataError, match=r"\(3, 2, 4\)"):
        stored.read()
    np.save(stored.parts[0].path, np.ones((3, 4, 2), np.int16))
    assert stored.read().tolist() == [[[1, 1]] * 4] * 3 + [[[-1, -1]] * 4]


def test_parts_of_several_files_follow_each_other(tmp_path):
    numbers = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    paths = [str(tmp_path / name) for name in ("a.npy", "b.npy")]
    for path, add in zip(paths, (0, 10), strict=True):
        np.save(path, numbers + add)
    whole = StoredExperts((Part(paths[0], 1, 2), Part(paths[1], 0, 3)), (6, 1, 1))
    assert len(whole) == 6 and whole.read().ravel().tolist() == [1, 2, 10, 11, 12, -1]
    assert whole.longer(2).read().ravel().tolist() == [1, 2, 10, 11, 12, -1, -1, -1]
    assert [whole.cut(n).read().ravel().tolist() for n in (1, 3, 4)] == [[-1], [1, 2, -1], [1, 2, 10, -1]]
    assert whole.cut(3).parts == (Part(paths[0], 1, 2),)
    later = StoredExperts((Part(paths[1], 0, 1), Part(paths[0], 0, 4)), (6, 1, 1))
    known = StoredExperts((Part(paths[0], 3, 1), Part(paths[0], 2, 1)), (3, 1, 1))
    assert known.continued(later).read().ravel().tolist() == [3, 2, 1, 2, 3, -1]
    assert known.continued(later).parts[2:] == (Part(paths[0], 1, 3),)
