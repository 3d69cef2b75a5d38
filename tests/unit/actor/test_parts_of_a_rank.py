"""Memory that leaves and comes back, groups and seeds, gaps of upstream, and what a CPU does for a GPU."""

from __future__ import annotations

import logging
import math
import warnings
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import policy_tasks
import pytest
import torch
from single_rank import policy_of
from small_models import random_batch

from megatron_daro.actor import compat, device, host_memory, parallel, shards, step
from megatron_daro.actor.parallel import Layout
from megatron_daro.errors import CheckpointError, ConfigError
from megatron_daro.types import KINDS_OF_MEMORY

pytestmark = pytest.mark.usefixtures("world")
GRPO = {"name": "grpo"}


def ranks(monkeypatch, module, **numbers):
    """Megatron's answers to who this rank is."""
    for name, number in numbers.items():
        monkeypatch.setattr(module.parallel_state, f"get_{name}", lambda number=number: number)


ROWS = [[0, 1, 2], list(range(3, 24))]


def rates(policy, number, first=1):
    batch = random_batch()
    results = [policy.train_step(batch, ROWS, step=n) for n in range(first, first + number)]
    return [result.metrics["optimizer/learning_rate"] for result in results]


def test_what_leaves_is_counted_and_comes_back(model):
    policy = policy_of(model, GRPO)
    rates(policy, 1)
    memory, before = policy._memory, policy_tasks.everything(policy)
    whole = memory.left_behind()
    move = memory.offload(("weights", "gradients"))
    assert memory.away == {"weights", "gradients"} and move.left == memory.left_behind() == whole - move.moved > 0
    assert 0 <= move.seconds < 60 and move.others == 0
    assert memory.offload(("weights",)).moved == 0, "it is away already"
    with pytest.raises(RuntimeError, match=r"^weights: on the host while servers have the device$"):
        policy.logprobs(random_batch(), ROWS)
    back = memory.onload(KINDS_OF_MEMORY)
    assert (back.moved, back.left, memory.away) == (move.moved, whole, frozenset()) and memory.onload(
        ("weights",)
    ).moved == 0
    after = policy_tasks.everything(policy)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    gradients = [buffer.grad_data for chunk in policy.train_state.chunks for buffer in chunk.buffers]
    assert gradients and not any(gradient.any() for gradient in gradients)
    gradients[0].fill_(3.0)
    memory.offload(("gradients",), keep_gradients=True)
    memory.onload(("gradients",))
    assert (gradients[0] == 3.0).all() and memory.device.type == "cpu"


@pytest.mark.parametrize(("pinned", "lengths"), [(True, [10, 64, 64]), (False, [10, 64, 26])])
def test_pinned_memory_is_taken_in_whole_blocks(monkeypatch, pinned, lengths):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 64)
    first = torch.empty(10, dtype=torch.uint8)
    blocks = host_memory.extended([first], 100, pinned=pinned)
    assert [len(block) for block in blocks] == lengths and blocks[0] is first and blocks[1].dtype == torch.uint8
    assert host_memory.extended(blocks, 100, pinned=pinned) is blocks and len(blocks) == 3


def test_pieces_fill_blocks_one_after_the_other():
    storages = [torch.arange(size, dtype=torch.uint8).untyped_storage() for size in (5, 3, 0, 4)]
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in (2, 6, 6)]
    lengths = []
    for piece, held in host_memory.pieces_of(storages, blocks):
        held.copy_(piece)
        lengths.append(len(piece))
    assert lengths == [2, 3, 3, 4] and [b.tolist() for b in blocks] == [
        [0, 1], [2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0]
    ]  # fmt: skip
    assert list(host_memory.pieces_of(storages, [])) == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(data=2), r"TP 1 x PP 1 x CP 1 x DP 2 = 2 processes, but 1 were started; change actor\.\*_parallel"),
        (
            Layout(expert=2),
            r"expert groups of ETP x EP = 2 processes do not divide the 1 processes of a pipeline",
        ),
        (Layout(virtual_pipeline=2), r"2 virtual stages on a pipeline of one stage"),
    ],
)
def test_a_layout_that_is_not_this_world_is_refused(layout, words):
    with pytest.raises(ConfigError, match=words):
        parallel.build_groups(layout, seed=1)


def test_sizes_of_a_layout():
    layout = Layout(tensor=2, pipeline=3, context=5, data=7, expert=4)
    assert (layout.world_size, layout.expert_tensor_size, layout.expert_group_size) == (210, 1, 4)
    assert Layout(tensor=2, expert=4, expert_tensor=2).expert_group_size == 8
    assert Layout(tensor=2).expert_tensor_size == 2


def test_a_collective_call_ends_with_an_error_after_the_limit_and_the_seed_is_the_runs():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
    for seed in (5, 6):
        parallel.seed_everything(seed)
        assert torch.initial_seed() != 1 and get_cuda_rng_tracker().get_states()
        first = torch.rand(2), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        parallel.seed_everything(seed)
        assert torch.equal(torch.rand(2), first[0])
        assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], first[1])
    parallel.seed_everything(7)
    assert not torch.equal(torch.rand(2), first[0])


def test_who_a_rank_is(monkeypatch):
    numbers = {"pipeline_model": 3, "tensor_model": 4, "expert_model": 5, "expert_tensor": 6}
    ranks(monkeypatch, parallel, **{f"{name}_parallel_rank": number for name, number in numbers.items()})
    ranks(monkeypatch, parallel, data_parallel_rank=7)
    assert parallel.weights_key() == (3, 4, 5, 6)
    assert (parallel.data_parallel_rank(), parallel.pipeline_parallel_rank()) == (7, 3)


@pytest.mark.parametrize(
    ("tensor", "context", "last", "answers"),
    [(0, 0, True, True), (1, 0, True, False), (0, 1, True, False), (0, 0, False, False)],
)
def test_one_rank_answers_for_a_shard(monkeypatch, tensor, context, last, answers):
    ranks(monkeypatch, parallel, tensor_model_parallel_rank=tensor, context_parallel_rank=context)
    monkeypatch.setattr(parallel.parallel_state, "is_pipeline_last_stage", lambda: last)
    assert parallel.answers_for_shard() is answers


def test_upstream_is_quiet_for_a_while():
    logger = logging.getLogger("megatron.core")
    level = logger.level
    try:
        logger.setLevel(logging.INFO)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises(KeyError), compat.quiet():
                assert logger.level == logging.ERROR
                warnings.warn("deprecated", stacklevel=1)
                raise KeyError
        assert not seen and logger.level == logging.INFO
    finally:
        logger.setLevel(level)


def test_packs_of_all_lengths_share_few_tables_of_angles():
    rotary = SimpleNamespace(get_rotary_seq_len=lambda longest, **_: longest)
    compat.bound_rotary_tables(rotary)
    lengths = (1, 1024, 1025, 2048, 2049, 40_000)
    assert [rotary.get_rotary_seq_len(n, packed=True) for n in lengths] == [1025, 1025, 2049, 2049, 4097, 65_537]


def messages(activations, gradients):
    found = compat.PipelineMessages.__new__(compat.PipelineMessages)
    found._activations, found._gradients, found._hidden = iter(activations), iter(gradients), 8
    return found


def test_shapes_between_stages_are_those_of_the_micro_batches_and_a_message_too_few_is_seen():
    told = messages([5, 6], [7])
    assert told._communicate_shapes(None, None, True, False) == ([5, 1, 8], [0, 0, 0])
    assert told._communicate_shapes(None, None, False, True) == ([0, 0, 0], [7, 1, 8])
    with pytest.raises(RuntimeError, match=r"^1 messages between pipeline stages were not received; the schedule is"):
        told.check_received(forward_only=False)
    told.check_received(forward_only=False)
    messages([], [7]).check_received(forward_only=True)
    with pytest.raises(RuntimeError, match=r"^3 messages"):
        messages([1, 2], [7]).check_received(forward_only=False)


def test_a_saved_group_is_found_by_what_it_is():
    """Not by a rate that another run has: upstream's identifiers are taken from this run's group."""
    alike = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    others = [key for key in compat.param_group_identifier_keys if key not in alike] or ["max_lr"]
    own = {**alike, **dict.fromkeys(others, 0.1), "lr": 0.3}
    other = {**own, "wd_mult": 0.0, **dict.fromkeys(others, 0.7)}
    saved = {**alike, **dict.fromkeys(others, 0.5), "lr": 0.9}
    nested = {"param_groups": [dict(saved)], "chained": {"optimizer": {"param_groups": [dict(saved)]}}, "x": 1}
    assert list(compat._param_groups(nested)) == [saved, saved] and list(compat._param_groups(3)) == []
    compat._identify(saved, [other, own])
    known = [key for key in others if key in compat.param_group_identifier_keys]
    assert all(saved[key] == 0.1 for key in known) and saved["lr"] == 0.9
    stranger = {**saved, "lr_mult": 2.0}
    compat._identify(stranger, [other, own])
    assert stranger == {**saved, "lr_mult": 2.0}


def test_unequal_parts_are_gathered_from_all_ranks():
    """As rank 0 of two: torch's own gets tensors of one shape."""
    own, other = torch.arange(6.0).view(2, 3), torch.arange(9.0).view(3, 3) + 10

    def original(tensors, tensor, group=None):
        assert group == "g" and {t.shape for t in [*tensors, tensor]} == {(3, 3)} and not tensor[2].any()
        tensors[0].copy_(tensor), tensors[1].copy_(other)
        return "done"

    parts = [torch.zeros(2, 3), torch.zeros(3, 3)]
    assert device._uneven_all_gather(original)(parts, own, group="g") == "done"
    assert torch.equal(parts[0], own) and torch.equal(parts[1], other)
    equal = [torch.zeros(2, 3)]
    assert device._uneven_all_gather(lambda tensors, tensor: tensors is equal and tensor is own)(equal, own) is True


def test_unequal_parts_are_summed_over_ranks(monkeypatch):
    """As rank 1 of two, the other of which has the same numbers."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda whole, group: whole.mul_(2))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    output, parts = torch.zeros(3), [torch.arange(2.0), torch.arange(3.0) + 5]
    assert device._uneven_reduce_scatter(None)(output, parts, group="g") is None
    assert output.tolist() == [10, 12, 14]
    equal = [torch.zeros(3)]
    assert device._uneven_reduce_scatter(lambda out, parts: parts is equal and out is output)(output, equal) is True


def test_what_is_sent_keeps_its_memory_when_the_tensor_loses_it(monkeypatch):
    from torch.distributed import distributed_c10d

    sent = []
    monkeypatch.setattr(torch.distributed, "isend", None)
    monkeypatch.setattr(distributed_c10d, "isend", lambda tensor, *args, **kwargs: sent.append((tensor, args, kwargs)))
    device._redirect_sends()
    assert torch.distributed.isend is distributed_c10d.isend
    numbers = torch.arange(4.0)
    torch.distributed.isend(numbers, 1, tag=3)
    numbers.data = torch.empty(1)
    ((tensor, *arguments),) = sent
    assert tensor.tolist() == [0, 1, 2, 3] and arguments == [(1,), {"tag": 3}]


def test_counts_of_tokens_are_on_the_host_already():
    counts = torch.tensor([1, 2])
    assert device._on_host(counts) is counts and device._on_host(None, as_numpy=True) is None
    assert isinstance(device._on_host(counts, as_numpy=True), np.ndarray)


@pytest.mark.parametrize(
    ("gpu", "installed", "found"), [(False, True, False), (True, True, True), (True, False, False)]
)
def test_transformer_engine_is_used_where_it_and_a_gpu_are(monkeypatch, gpu, installed, found):
    import sys

    modules = SimpleNamespace(pytorch=object()), object()
    for name, module in zip(("transformer_engine", "transformer_engine.pytorch"), modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert device.has_transformer_engine() is found


def test_readers_get_the_same_memory_under_another_storage():
    tensor, elsewhere = torch.arange(3.0, requires_grad=True), torch.empty(1, device="meta")
    shown = device.shown(tensor)
    assert shown.data_ptr() == tensor.data_ptr() and not shown.requires_grad
    assert shown.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    assert device.shown(elsewhere) is elsewhere
    assert math.isfinite(float(shown.sum()))


def test_on_a_gpu_memory_is_that_of_the_process_and_goes_back_to_the_driver(monkeypatch):
    called = []
    for name in ("ipc_collect", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 100))
    memory = host_memory.HostMemory()
    memory._where = torch.device("cuda", 0)
    move = memory.offload(("weights",))
    assert (move.moved, move.left, move.others) == (0, 7, 60) and called == [
        "synchronize",
        "ipc_collect",
        "empty_cache",
    ]
    back = memory.onload(("weights",))
    assert (back.moved, back.left, back.others, called[3:]) == (0, 7, 60, ["synchronize"])


def test_pinned_memory_is_kept_for_the_next_time(monkeypatch):
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 64)
    memory = host_memory.HostMemory()
    assert memory._host_blocks("weights", 10) is not memory._host_blocks("weights", 10)
    memory._where = torch.device("cuda", 0)
    first = memory._host_blocks("weights", 10)
    assert memory._host_blocks("weights", 100) is first and len(first) == 2
    assert memory._host_blocks("optimizer", 10) is not first


def test_passes_on_a_gpu_are_timed_by_its_events(monkeypatch):
    recorded = []
    made = SimpleNamespace(record=lambda: recorded.append(1))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: made if enable_timing else None)
    monkeypatch.setattr(device, "prepare", lambda: torch.device("cuda", 0))
    own = step.OwnTime()
    own._mark()
    assert own._marks == [made] and recorded == [1]


def test_a_box_of_a_stacked_tensor_is_one_of_the_whole():
    tensor = SimpleNamespace(prepend_axis_num=1, global_offset=(5, 10, 20), global_shape=(8, 40, 50))
    assert shards._global(tensor, (1, 2), (3, 4)) == ((5, 11, 22), (1, 3, 4), (8, 40, 50))


@pytest.mark.parametrize(("replica", "main"), [((0, 0, 3), True), ((0, 1, 0), False), ((1, 0, 0), False)])
def test_data_parallel_ranks_have_runs_of_their_own(replica, main):
    assert shards._is_main(SimpleNamespace(replica_id=replica)) is main


def test_a_part_that_is_no_run_of_a_parameter_is_named():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    fine = ShardedTensor.from_rank_offsets("a", torch.zeros(3, 4))
    assert [at for at, _ in shards._places({"a": fine})[fine.data]] == [0]
    across = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4).t())
    with pytest.raises(
        CheckpointError, match=r"^w: a part of it is no run of its elements; its optimizer state is not"
    ):
        shards._places({"w": across})


def test_optimizers_that_are_chained_are_saved_by_number():
    called = []
    parts = [SimpleNamespace(state_dict=lambda n=n: {"optimizer": n}) for n in range(2)]
    chained = SimpleNamespace(chained_optimizers=parts, _synchronize_steps=lambda: called.append(1))
    kind = {"param_state_sharding_type": "fully_reshardable"}
    assert shards.common_state(chained) == {0: {"optimizer": 0, **kind}, 1: {"optimizer": 1, **kind}} and called == [1]
    assert shards.common_state(parts[1]) == {"optimizer": 1, **kind}
