"""Places, buckets, files and nodes of a rehearsal against Megatron's groups and the model's own numbers."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from aiohttp.test_utils import make_mocked_request
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from megatron_daro.actor import parallel
from megatron_daro.actor.parallel import Layout
from megatron_daro.actor.settings import PolicySettings
from megatron_daro.actor.weights import exports_weights, sends_for_stage
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.check_training import part_layers
from megatron_daro.config.hardware import Demand
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.engine.sglang.client import _facts
from megatron_daro.errors import ConfigError
from megatron_daro.runtime.cluster import Placement
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.runtime.workers import Place, TrainWorker
from megatron_daro.workshop.rehearse import loop
from megatron_daro.workshop.rehearse.canned_server import Bodies, CannedAnswers, CannedServer, canned_fleet
from megatron_daro.workshop.rehearse.loop import _part_tensors, checkpoint_plan, place_of, stage_plans
from megatron_daro.workshop.rehearse.setting import _first_fit, node_map
from megatron_daro.workshop.rehearse.thin_ranks import Loss, ThinPolicyGroup, ThinRanks

CONFIGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "configs"


@pytest.fixture
def shape():
    if not CONFIGS.is_dir():
        pytest.skip(f"needs the model configurations in {CONFIGS}")
    return lambda name: read_model_shape(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, 2, 2),
        Layout(tensor=2, data=8, expert=8, expert_tensor=1),
        Layout(1, 2, 1, 4, 4),
        Layout(4, 1, 1, 2),
        Layout(tensor=2, pipeline=2, data=2, virtual_pipeline=2),
    ],
    ids=str,
)
def test_places_are_those_of_megatrons_groups(layout):
    for rank in range(layout.world_size):
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        try:
            parallel.build_groups(layout, seed=1)
            place = place_of(rank, layout)
            assert (place.data_parallel, place.stage) == (
                parallel.data_parallel_rank(),
                parallel.pipeline_parallel_rank(),
            )
            assert (place.exports, place.sends) == (exports_weights(), sends_for_stage())
            assert place.answers == parallel.answers_for_shard()
        finally:
            parallel.shutdown()


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (0, Place(data_parallel=0, stage=0, exports=True, sends=True, answers=False)),
        (1, Place(data_parallel=0, stage=0, exports=True, sends=False, answers=False)),
        (2, Place(data_parallel=0, stage=0, exports=False, sends=False, answers=False)),
        (5, Place(data_parallel=1, stage=0, exports=False, sends=False, answers=False)),
        (8, Place(data_parallel=0, stage=1, exports=True, sends=True, answers=True)),
        (12, Place(data_parallel=1, stage=1, exports=False, sends=False, answers=True)),
        (14, Place(data_parallel=1, stage=1, exports=False, sends=False, answers=False)),
    ],
)
def test_the_place_of_a_rank(rank, place):
    assert loop.place_of(rank, Layout(tensor=2, pipeline=2, context=2, data=2)) == place


@pytest.mark.shared
def test_the_stages_send_every_tensor_once_in_buckets_of_the_limit(shape):
    llama = shape("Llama-3.3-70B")
    limit = 256 * 2**20
    plans = stage_plans(llama, part_layers(80, 4, 1, {}), limit, 2)
    assert sum(plan.num_bytes for plan in plans) == 2 * llama.num_parameters
    assert all(plan.buckets * max(limit, plan.largest_bucket) >= plan.num_bytes for plan in plans)
    assert dataclasses.replace(plans[1], stage=2) == plans[2]
    assert plans[0].largest_bucket == 2 * llama.vocab * llama.hidden > limit  # a larger tensor has a bucket of its own
    whole = stage_plans(llama, [[range(80)]], limit, 2)
    assert whole[0].num_bytes == 2 * llama.num_parameters
    parted = stage_plans(llama, part_layers(80, 4, 5, {}), limit, 2)
    assert [(p.stage, p.tensors, p.num_bytes) for p in parted] == [(p.stage, p.tensors, p.num_bytes) for p in plans]


@pytest.mark.shared
def test_the_parts_of_a_stage_send_their_own_layers(shape):
    llama = shape("Llama-3.1-8B")
    names = [
        [name for name, _ in _part_tensors(llama, own, is_first, is_last, torch.bfloat16)]
        for own, is_first, is_last in ((range(4), True, False), (range(28, 32), False, True))
    ]
    assert names[0][0] == "model.embed_tokens.weight" and "lm_head.weight" not in names[0]
    assert "lm_head.weight" in names[1] and "model.norm.weight" in names[1]
    layers = [sorted({int(n.split(".")[2]) for n in part if ".layers." in n}) for part in names]
    assert layers == [[0, 1, 2, 3], [28, 29, 30, 31]]


@pytest.mark.shared
@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_has_each_parameter_and_its_state_once(shape, distributed):
    for name, layout in {
        "Llama-3.1-8B": Layout(tensor=1, pipeline=2, data=4, virtual_pipeline=4),
        "Qwen3-30B-A3B": Layout(tensor=1, data=8, expert=8, expert_tensor=1),
    }.items():
        model = shape(name)
        plan = checkpoint_plan(model, layout, 2, distributed=distributed)
        assert plan.files == layout.world_size
        assert plan.total == pytest.approx(14 * model.num_parameters, rel=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_files_of_a_checkpoint_hold_weights_once_and_state_by_owner(monkeypatch, distributed, dtype_bytes):
    """1000 other parameters and 100 of experts on each rank of a stage; two stages of four ranks, experts over two."""
    monkeypatch.setattr(loop, "counts", lambda shape, cut, stage: (1000 * (stage + 1), 100))
    layout = Layout(tensor=1, pipeline=2, data=4, expert=2)
    plan = loop.checkpoint_plan(None, layout, dtype_bytes, distributed=distributed)  # type: ignore[arg-type]
    state, sizes = {2: 12, 4: 8}[dtype_bytes], []
    for rank in range(8):
        rest, place = 1000 * (rank // 4 + 1), rank % 4
        first, experts = place < 1, place < 2
        saved = dtype_bytes * (rest * first + 100 * experts)
        saved += state * (rest / 4 + 100 / 2) if distributed else state * (rest * first + 100 * experts)
        sizes.append(saved)
    assert plan == loop.CheckpointPlan(8, min(sizes), max(sizes), sum(sizes))


def test_a_tensor_parallel_group_is_on_one_node_and_too_few_nodes_are_refused():
    actor = ActorSection(tensor_parallel=4, pipeline_parallel=2, data_parallel=4)
    demand = Demand(8, 4, servers=4, server_size=8, noun="server")
    nodes = node_map(demand, actor, 9, 8)
    assert all(len({nodes.ranks[rank] for rank in range(start, start + 4)}) == 1 for start in range(0, 32, 4))
    assert all(len(nodes.ranks_of(node)) == 8 for node in range(4)) and nodes.servers == ((4,), (5,), (6,), (7,))
    assert nodes.idle == 1
    # Both stages of a replica are next to each other.
    assert nodes.ranks[0] == nodes.ranks[16]
    with pytest.raises(ConfigError, match="no room for"):
        node_map(demand, actor, 7, 8)


def test_a_piece_without_room_is_a_sentence():
    with pytest.raises(ConfigError, match=r"2 nodes of 4 GPUs have no room for a piece of 3; fix: raise --nodes"):
        _first_fit([3, 3, 3], 2, 4)
    assert _first_fit([2, 2, 3, 1], 2, 4) == [0, 0, 1, 1]


def test_a_server_in_parts_goes_with_either_of_its_nodes():
    demand = Demand(1, 8, servers=2, server_size=16, server_nodes=2, noun="server")
    nodes = node_map(demand, ActorSection(tensor_parallel=8), 6, 8)
    assert nodes.servers == ((1, 2), (3, 4)) and nodes.used == [0, 1, 2, 3, 4]
    assert [nodes.servers_of(node) for node in range(6)] == [[], [0], [0], [1], [1], []]


def test_a_canned_answer_has_the_samples_and_the_version_asked_for():
    canned = CannedAnswers(lengths=[[20, 40]], ordinary=(50, 90), endings=[[1, 2], [3, 2]], vocabulary=100, delay_s=2.0)
    wait, body = Bodies(canned).next(3, "17", streams=False)
    answers = json.loads(body)
    assert wait == 2.0 and [len(answer["output_ids"]) for answer in answers] == [20, 40, 20]
    assert [answer["output_ids"][-2] for answer in answers] == [1, 3, 1]
    assert {answer["meta_info"]["weight_versions"][0]["version"] for answer in answers} == {"17"}


def test_a_canned_stream_has_the_same_answers():
    canned = CannedAnswers(lengths=[[20, 40]], ordinary=(50, 90), endings=[[1, 2], [3, 2]], vocabulary=100)
    _, whole = Bodies(canned).next(3, "17", streams=False)
    _, stream = Bodies(canned).next(3, "17", streams=True)
    *events, end, rest = stream.split(b"\n\n")
    events = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert (end, rest) == (b"data: [DONE]", b"")
    assert [event["index"] for event in events] == [0, 1, 2, 0, 1, 2]
    assert [event["meta_info"]["finish_reason"] for event in events[:3]] == [None] * 3
    assert [{k: v for k, v in event.items() if k != "index"} for event in events[3:]] == json.loads(whole)


def test_canned_servers_end_with_the_block():
    canned = CannedAnswers(lengths=[[20]], ordinary=(50, 90), endings=[[1]], vocabulary=100)
    with canned_fleet(1, [], canned) as fleet:
        (process,) = fleet._processes
        assert process.poll() is None
    assert process.poll() is not None


def test_a_canned_server_says_of_itself_what_the_engine_asks():
    canned = CannedAnswers(
        [[4]], (50, 90), [[1, 2]], vocabulary=100, device="cuda", dtype="bfloat16", tensor_parallel=8
    )
    server = CannedServer(canned, Bodies(canned))
    answer = asyncio.run(server.answer(make_mocked_request("GET", "/server_info")))
    facts = _facts(json.loads(answer.text), {})
    assert (facts.device, facts.dtype, facts.tensor_parallel) == ("cuda", "bfloat16", 8)
    assert facts.has_tokenizer, "recipes whose answers end at texts are rehearsed too"


async def _most_at_once(canned):
    """How many of four requests one server works on at a time."""
    running = most = 0

    class Counted(Bodies):
        def next(self, samples, version, *, streams):
            nonlocal running, most
            running += 1
            most = max(most, running)
            return super().next(samples, version, streams=streams)

    async def asked():
        nonlocal running
        await server._generate({"input_ids": [[1]], "sampling_params": [{"max_new_tokens": 500}]})
        running -= 1

    server = CannedServer(canned, Counted(canned))
    await asyncio.gather(*(asked() for _ in range(4)))
    return most


@pytest.mark.parametrize(("concurrency", "most"), [(0, 4), (2, 2)])
def test_a_canned_server_works_on_as_many_requests_as_it_has_room_for(concurrency, most):
    canned = CannedAnswers([[4]], (50, 90), [[1, 2]], vocabulary=100, delay_s=0.01, concurrency=concurrency)
    assert asyncio.run(_most_at_once(canned)) == most


def test_a_node_is_lost_in_the_step_that_was_asked_for(tmp_path, monkeypatch):
    async def trained(self, batch, step):
        return step

    monkeypatch.setattr(PolicyGroup, "train", trained)
    Qwen2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    ).save_pretrained(tmp_path)
    actor, losses = ActorSection(), []
    settings = PolicySettings(tmp_path, 4, 32, 1.0, total_steps=3)
    algorithm, placement = AlgorithmSection(name="grpo"), Placement.of_actor(actor)
    group = ThinPolicyGroup(settings, actor, algorithm, seed=1, updates_per_batch=1, placement=placement)
    group.rehearse(
        [], None, None, Loss(node=3, step=2), on_begin=lambda: None, on_loss=lambda: losses.append(group.lost_at)
    )
    seen = []
    for step in (1, 2, 3):
        assert asyncio.run(group.train(None, step)) == step
        seen.append(len(losses))
    assert seen == [0, 1, 1] and losses[0] > 0


def test_thin_ranks_take_the_calls_that_ranks_take():
    """A call that only real ranks know ends every rehearsal at its first weight sync."""
    # What replaces starting, placing, loading and moving ranks is the group's; `ready` is the host's own.
    real = TrainWorker.__ray_metadata__.modified_class
    for name in ("train", "run_pass", "score", "export", "start_save", "finish_save", "sentinel"):
        taken, given = (list(inspect.signature(getattr(kind, name)).parameters.values()) for kind in (ThinRanks, real))
        assert [p.name for p in taken[2:]] == [p.name for p in given[1:]], name  # self, rank; self
        assert [p.kind for p in taken[2:]] == [p.kind for p in given[1:]], name
        assert [p.default for p in taken[2:]] == [p.default for p in given[1:]], name
