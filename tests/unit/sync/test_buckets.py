"""Weight buckets: what goes in comes out, in order, within the limit, without copies on the way out."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_daro.errors import SyncError
from megatron_daro.sync.buckets import bucketize

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TENSORS = st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(DTYPES)), max_size=12)


@settings(max_examples=80, deadline=None)
@given(specs=TENSORS, bucket_bytes=st.integers(1, 4000))
def test_round_trip_within_the_limit_also_through_a_pickle(specs, bucket_bytes):
    generator = torch.Generator().manual_seed(0)
    sent = [(f"t{i}", torch.randn(s, generator=generator).to(d)) for i, (s, d) in enumerate(specs)]
    buckets = list(bucketize(iter(sent), bucket_bytes))
    for way in (lambda b: b, lambda b: pickle.loads(pickle.dumps(b))):
        received = [pair for bucket in buckets for pair in way(bucket).tensors()]
        assert [name for name, _ in received] == [name for name, _ in sent]
        for (_, got), (_, expected) in zip(received, sent, strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)
    for bucket in buckets:
        assert len(bucket.data) <= bucket_bytes or len(bucket.names) == 1
        assert len(bucket.names) > 0


def test_buckets_are_filled_as_far_as_they_go():
    sent = [(f"t{i}", torch.full((16,), float(i))) for i in range(10)]  # 64 bytes each, no padding
    assert [len(b.names) for b in bucketize(sent, 192)] == [3, 3, 3, 1]
    assert [len(b.data) for b in bucketize(sent, 192)] == [192, 192, 192, 64]


@pytest.mark.parametrize("copy_all", [False, True])
@pytest.mark.parametrize(("limit", "lengths"), [(192, [2, 3, 1]), (64, [1, 1, 2, 1, 1]), (384, [6])])
def test_tensors_that_a_server_takes_in_one_call_only_are_not_parted(limit, lengths, copy_all):
    """DeepSeek-V3's, whose loader in SGLang drops one that comes without the other."""
    pair = [f"model.layers.1.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    sent = [(name, torch.full((16,), float(i))) for i, name in enumerate(["a", "b", *pair, "c", "d"])]
    buckets = list(bucketize(sent, limit, copy_all=copy_all))
    assert [len(bucket.names) for bucket in buckets] == lengths
    received = [named for bucket in buckets for named in bucket.tensors()]
    assert [name for name, _ in received] == [name for name, _ in sent]
    assert all(torch.equal(got, tensor) for (_, got), (_, tensor) in zip(received, sent, strict=True))


def test_the_stream_may_reuse_its_memory_and_is_read_one_bucket_ahead_at_most():
    scratch, asked = torch.empty(16), []

    def stream():
        for i in range(6):
            asked.append(i)
            yield f"t{i}", scratch.fill_(float(i))

    buckets = bucketize(stream(), 128)
    first = next(buckets)
    assert asked == [0, 1, 2]
    values = [t[0].item() for b in [first, *buckets] for _, t in b.tensors()]
    assert values == [0, 1, 2, 3, 4, 5]


def test_strided_tensors_are_packed_by_value():
    tensor = torch.arange(12.0).view(3, 4).t()
    [(name, got)] = next(bucketize([("t", tensor)], 1)).tensors()
    assert name == "t" and torch.equal(got, tensor)


def test_tensors_share_memory_with_the_bucket_and_may_lie_in_read_only_memory():
    bucket = next(bucketize([("a", torch.ones(3)), ("b", torch.ones(2))], 1000))
    views = dict(bucket.tensors())
    bucket.data[:] = 0
    assert views["a"].sum() == 0 and views["b"].sum() == 0
    beside: list[pickle.PickleBuffer] = []
    text = pickle.dumps(bucket, protocol=5, buffer_callback=beside.append)
    assert len(beside) == 1, "the bytes travel beside the pickle"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = pickle.loads(text, buffers=[bytes(beside[0].raw())])  # as they lie in an object store
        assert dict(copy.tensors())["a"].shape == (3,)


def test_refusals():
    with pytest.raises(SyncError, match="bucket_bytes"):
        list(bucketize([], 0))
    with pytest.raises(SyncError, match="int64"):
        list(bucketize([("t", torch.ones(1, dtype=torch.int64))], 10))
    good = next(bucketize([("t", torch.ones(4))], 100))
    with pytest.raises(SyncError):
        list(replace(good, data=good.data[:-1]).tensors())
    with pytest.raises(SyncError):
        list(replace(good, shapes=((3,),)).tensors())
    with pytest.raises(SyncError):
        list(replace(good, names=("t", "u")).tensors())
    with pytest.raises(SyncError, match="object"):
        list(replace(good, dtype="object").tensors())


def streamed(sizes):
    """(name, tensor) of float32, each of its own number."""
    return [(str(i), torch.full((size,), float(i))) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [[4] * 7, [4, 4, 9, 4, 4], [9, 4, 4, 4], [4, 20, 9, 30, 1]])
def test_reused_buffers_hold_a_bucket_and_the_one_before_it(sizes):
    stream, before, seen = streamed(sizes), None, []
    for bucket in bucketize(iter(stream), 16, reuse=True):
        for held in filter(None, (before, bucket)):
            for name, tensor in held.tensors():
                assert torch.equal(tensor, stream[int(name)][1]), f"{name} was overwritten while it was in use"
        seen += bucket.names
        before = bucket
    assert seen == [name for name, _ in stream]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_tensor_larger_than_a_bucket_is_not_copied(reuse):
    stream = streamed([2, 9, 3])
    buckets = list(bucketize(iter(stream), 16, reuse=reuse))
    assert [bucket.names for bucket in buckets] == [("0",), ("1",), ("2",)]
    places = [(bucket.data.data_ptr(), tensor.data_ptr()) for bucket, (_, tensor) in zip(buckets, stream, strict=True)]
    assert [mine == theirs for mine, theirs in places] == [False, True, False]


def test_a_larger_tensor_that_is_not_contiguous_is_sent_row_by_row():
    turned = torch.arange(20.0).view(4, 5).T
    (bucket,) = bucketize(iter([("w", turned)]), 16)
    ((name, tensor),) = bucket.tensors()
    assert name == "w" and torch.equal(tensor, turned) and bucket.data.nbytes == 80
