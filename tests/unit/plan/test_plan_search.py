"""The search: choices that the trainer accepts, the best of all, and reasons for what is out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from published_configs import GLM_45_AIR, GPT_OSS_120B, QWEN3_5_27B, QWEN3_5_35B_A3B

from megatron_daro.config import Config
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.model_shape import ExpertShape, read_model_shape, text_part
from megatron_daro.config.rules.layout import division
from megatron_daro.config.sections import SHARED_FRACTION
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.gpus import GPUS
from megatron_daro.workshop.plan.layout import ModelLayout, model_layouts
from megatron_daro.workshop.plan.memory import (
    HEADROOM,
    SERVER_RESERVE_BYTES,
    kv_bytes_per_token,
    server_memory,
    static_bytes,
    trainer_memory,
)
from megatron_daro.workshop.plan.search import search
from megatron_daro.workshop.plan.tables import options_of
from megatron_daro.workshop.plan.times import Constants, generation_s, micro_batches_of, sync_s, train_times
from megatron_daro.workshop.plan.workload import workload_of

QWEN_32B = {
    "model_type": "qwen2",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
H100 = GPUS["h100-80g"]


def workload(**rollout: object):
    sizes = {"prompts_per_batch": 512, "rollouts_per_prompt": 16, "max_response_tokens": 8192, **rollout}
    made = Config.model_validate({"model": {"path": "x"}, "data": {"train": ("x",)}, "rollout": sizes})
    return workload_of(made, read_model_shape(QWEN_32B))


def test_every_choice_fits_and_uses_no_more_gpus_than_there_are():
    asked = workload()
    plan = search(asked, H100, 128)
    assert len(plan.choices) == 5
    for choice in plan.choices:
        layout = choice.trainers.layout
        assert choice.gpus <= 128
        assert choice.trainers.memory.total <= HEADROOM * H100.memory_bytes
        assert asked.shape.layers % layout.pipeline == 0 and asked.shape.kv_heads % layout.tensor == 0
        assert layout.micro_batch_tokens >= asked.longest
        assert choice.step >= max(choice.trainers.times.total, choice.servers.generation)


@pytest.mark.parametrize("config", [GLM_45_AIR, GPT_OSS_120B, text_part(QWEN3_5_27B), text_part(QWEN3_5_35B_A3B)])
def test_every_layout_is_one_that_the_trainer_accepts(config):
    shape = read_model_shape(config)
    layouts = model_layouts(replace(workload(), shape=shape, fp8="blockwise", longest=9000), H100, 64)
    for layout in {(x.tensor, x.pipeline, x.context, x.expert): x for x in layouts}.values():
        sizes = {"tensor_parallel": layout.tensor, "pipeline_parallel": layout.pipeline}
        sizes |= {"context_parallel": layout.context, "expert_parallel": layout.expert, "data_parallel": layout.expert}
        actor = ActorSection(**sizes, precision="fp8", fp8_recipe="blockwise")
        assert list(division(actor, shape)) == []
        assert layout.micro_batch_tokens % actor.pack_multiples[1] == 0


def test_the_first_choice_is_within_a_fiftieth_of_the_best():
    plan = search(workload(), H100, 128, best=50)
    assert plan.choices[0].expected <= 1.021 * min(choice.expected for choice in plan.choices)


def test_staleness_overlaps_both_sides():
    alternating = search(workload(max_staleness=0), H100, 128).choices[0]
    overlapped = search(workload(max_staleness=1), H100, 128).choices[0]
    assert overlapped.step < alternating.step
    times = overlapped.trainers.times.total
    assert overlapped.step == pytest.approx(
        max(times, overlapped.servers.generation) + overlapped.sync + overlapped.fixed
    )


def test_more_gpus_are_never_slower():
    steps = [search(workload(), H100, gpus).choices[0].step for gpus in (64, 128, 256, 1024)]
    assert all(fewer > more * 0.98 for fewer, more in pairwise(steps))


def test_what_does_not_fit_says_which_part_and_what_would():
    with pytest.raises(ConfigError, match=r"8 GPUs of a100-40g.*rollout\.max_response_tokens"):
        search(workload(), GPUS["a100-40g"], 8)


def test_samples_of_an_update_are_a_multiple_of_the_replicas():
    plan = search(workload(), H100, 128, best=50)
    assert all(512 * 16 % choice.trainers.data == 0 for choice in plan.choices)


def test_recomputation_trades_time_for_memory():
    asked, known = workload(), Constants()
    kept, again = (ModelLayout(4, 2, 2, recompute, 16384) for recompute in ("none", "full"))
    memories = [trainer_memory(asked, layout, shards=8, micro_batches=9) for layout in (kept, again)]
    times = [train_times(asked, layout, 4, H100, known) for layout in (kept, again)]
    assert memories[1].activations < 0.3 * memories[0].activations
    assert times[1].compute == pytest.approx(4 / 3 * times[0].compute, rel=0.01)


def test_a_critic_takes_time_as_it_has_parameters():
    """In training, and in the pass for its values."""
    asked, layout, known = replace(workload(), extra_passes=1), ModelLayout(4, 2, 2, "none", 16384), Constants()
    half = replace(asked.shape, layers=asked.shape.layers // 2)
    alone, equal, small = (
        train_times(replace(asked, critic=critic, extra_passes=1 + (critic is not None)), layout, 4, H100, known)
        for critic in (None, asked.shape, half)
    )
    assert equal.train == pytest.approx(2 * alone.train) and equal.logprobs == pytest.approx(2 * alone.logprobs)
    assert small.train == pytest.approx(1.5 * alone.train, rel=0.02)
    assert small.logprobs == pytest.approx(1.5 * alone.logprobs, rel=0.02)
    often = train_times(replace(asked, epochs=3), layout, 4, H100, known)
    assert often.train == pytest.approx(3 * alone.train) and often.logprobs == alone.logprobs


def test_models_that_take_turns_take_time_to_move():
    """Four times a batch with one step: weights and optimizer state of both, once also the critic's gradients."""
    asked, layout, known = replace(workload(), minibatches=1), ModelLayout(4, 2, 2, "none", 16384), Constants()
    asked = replace(asked, critic=asked.shape, extra_passes=1)
    stay, move = (train_times(replace(asked, critic_offload=offload), layout, 4, H100, known) for offload in (0, 1))
    own, its = (static_bytes(asked, layout.cut, 0, 4 * layout.context, critic=critic) for critic in (False, True))
    moved = 4 * (own[0] + own[2] + its[0] + its[2]) + 2 * its[1]
    assert stay.turns == 0 and move.turns == pytest.approx(moved / (1e9 * known.host_gb_s), rel=1e-6)
    assert move.total - stay.total == pytest.approx(move.turns)


def test_the_bubble_grows_with_stages_and_shrinks_with_micro_batches():
    asked, known = workload(), Constants()
    bubbles = [train_times(asked, ModelLayout(1, p, 1, "full", 9216), 2, H100, known).bubble for p in (1, 2, 4)]
    assert bubbles[0] == 0 < bubbles[1]
    wide = train_times(asked, ModelLayout(1, 4, 1, "full", 9216), 16, H100, known)
    narrow = train_times(asked, ModelLayout(1, 4, 1, "full", 9216), 2, H100, known)
    assert wide.bubble / wide.compute > narrow.bubble / narrow.compute


def test_parts_of_a_stage_divide_the_bubble_and_cost_messages():
    asked, known = workload(), Constants()
    one = ModelLayout(1, 8, 1, "full", 9216)
    times = [train_times(asked, replace(one, virtual=n), 8, H100, known) for n in (1, 2, 4)]
    shares = [(t.bubble / (t.compute + t.communication)) for t in times]
    assert shares[0] / shares[1] == pytest.approx(2, rel=0.02) and shares[0] / shares[2] == pytest.approx(4, rel=0.02)
    assert times[0].communication < times[1].communication < times[2].communication
    assert times[0].compute == times[1].compute


def test_micro_batches_that_only_fill_up_the_schedule_cost_their_time():
    asked, known = workload(prompts_per_batch=32, rollouts_per_prompt=8), Constants()
    one = ModelLayout(1, 16, 1, "full", 9216)
    plain, parted = (train_times(asked, replace(one, virtual=n), 64, H100, known) for n in (1, 2))
    assert micro_batches_of(asked, one, 64) < 16
    assert parted.compute == pytest.approx(16 / micro_batches_of(asked, one, 64) * plain.compute, rel=0.01)


def test_parts_are_proposed_where_the_bubble_is_long():
    asked = workload(prompts_per_batch=128, rollouts_per_prompt=8)
    shape = replace(asked.shape, hidden=12288, heads=96, ffn=49152, layers=96)  # only deep pipelines hold it
    plan = search(replace(asked, shape=shape), H100, 1024, best=50)
    parted = [choice for choice in plan.choices if choice.trainers.layout.virtual > 1]
    assert parted
    for choice in parted:
        layout = choice.trainers.layout
        assert 96 % (layout.pipeline * layout.virtual) == 0 and layout.pipeline > 1
        assert options_of(choice)["actor.virtual_pipeline_parallel"] == layout.virtual


def test_the_longest_answer_bounds_generation_however_many_servers():
    asked, known = workload(), Constants()
    many = [generation_s(asked, 8, n, H100, known) for n in (1, 8, 64, 4096)]
    assert all(fewer > more for fewer, more in pairwise(many))
    weights = asked.shape.num_parameters * 2 / 8 / (H100.memory_gb_s * 1e9 * known.decoding)
    assert many[-1] > asked.response_Q.max() * weights


def test_a_token_of_the_longest_answer_is_a_step_and_one_of_the_prompt_is_none():
    asked, slow = replace(workload(), mean_prompt=3000.0), Constants(decode_step_s=1e6)
    steps = generation_s(asked, 8, 4096, H100, slow) / slow.generation_factor / slow.decode_step_s
    assert steps == pytest.approx(asked.response_Q.max(), rel=1e-4)


def test_a_tail_costs_more_than_its_mean():
    asked = workload()
    even = replace(asked, response_Q=np.full(256, asked.mean_response))
    assert generation_s(asked, 8, 64, H100, Constants()) > 1.5 * generation_s(even, 8, 64, H100, Constants())


def test_an_impossible_mean_is_refused():
    made = Config.model_validate({"model": {"path": "x"}, "data": {"train": ("x",), "max_prompt_tokens": 512}})
    with pytest.raises(ConfigError, match="--mean-response: got 9000"):
        workload_of(made, read_model_shape(QWEN_32B), mean_response=9000)
    with pytest.raises(ConfigError, match=r"--mean-prompt: got 9000 .*data\.max_prompt_tokens"):
        workload_of(made, read_model_shape(QWEN_32B), mean_prompt=9000)


def with_engine(**engine: object):
    options = {"kind": "sglang", **engine}
    made = Config.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train": ("x",)},
            "rollout": {"prompts_per_batch": 64, "rollouts_per_prompt": 16, "max_response_tokens": 4096},
            "engine": options,
        }
    )
    return workload_of(made, read_model_shape(QWEN_32B))


def test_servers_that_share_the_ranks_gpus_have_all_of_them_in_turns():
    apart, shared = with_engine(), with_engine(colocate=True)
    plan = search(shared, H100, 32)
    for choice in plan.choices:
        sizes = sorted((choice.trainers.layout.tensor, choice.servers.tensor))
        assert choice.trainers.gpus == choice.servers.gpus == choice.gpus == 32 and sizes[1] % sizes[0] == 0
        both = choice.trainers.memory.weights + SHARED_FRACTION * H100.memory_bytes
        kept = HEADROOM * H100.memory_bytes - SERVER_RESERVE_BYTES
        assert choice.trainers.memory.total <= kept and both <= kept
        assert choice.servers.memory.weights + choice.servers.memory.kv_cache <= 0.6001 * H100.memory_bytes
        state = choice.trainers.memory.weights + choice.trainers.memory.optimizer
        assert choice.offload == pytest.approx(2 * state / 25e9) and choice.step > choice.offload + choice.sync
    assert search(apart, H100, 32).choices[0].offload == 0
    assert options_of(plan.choices[0])["engine.replicas"] * plan.choices[0].servers.tensor == 32


def test_a_server_is_spread_over_nodes_where_it_is_asked_for_or_one_node_is_too_small():
    spread = search(with_engine(sglang={"nodes": 2, "tensor_parallel": 4}), H100, 32)
    options = options_of(spread.choices[0])
    assert options["engine.sglang.nodes"] == 2 and options["engine.sglang.tensor_parallel"] % 2 == 0
    assert "engine.sglang.nodes" not in options_of(search(with_engine(), H100, 32).choices[0])
    large = replace(with_engine(), shape=replace(with_engine().shape, hidden=16384, heads=128, ffn=53248, layers=120))
    servers = search(large, H100, 512).choices[0].servers
    assert servers.nodes > 1 and servers.tensor == servers.nodes * H100.gpus_per_node
    same = H100.model_copy(update={"linked_gpus": 72})
    far, near = (generation_s(large, 16, 4, gpu, Constants()) for gpu in (H100, same))
    assert far > 1.05 * near, "reductions between nodes take longer than those of one rack"


def test_fp8_servers_hold_and_read_half_of_what_bf16_ones_do():
    plain, blocks = with_engine(), with_engine(sglang={"fp8_blocks": True})
    flash = with_engine(sglang={"arguments": {"quantization": "fp8", "load-format": "flash_rl"}})
    cached = with_engine(sglang={"arguments": {"kv-cache-dtype": "fp8_e5m2"}})
    table = 2 * 2 * 152064 * 5120
    bf16 = server_memory(plain, H100, 4)
    for fp8 in (blocks, flash):
        memory = server_memory(fp8, H100, 4)
        assert memory.weights * 4 - table == pytest.approx((bf16.weights * 4 - table) / 2)
        assert memory.kv_cache > bf16.kv_cache
        assert generation_s(fp8, 4, 4, H100, Constants()) < 0.9 * generation_s(plain, 4, 4, H100, Constants())
    assert kv_bytes_per_token(cached, 4) * 2 == kv_bytes_per_token(plain, 4)


def test_a_step_has_an_interval_and_sides_that_may_both_be_late_are_expected_to_be():
    choice = search(workload(max_staleness=1), H100, 128).choices[0]
    assert choice.error == Constants().step_error and choice.expected > choice.step
    even = replace(choice, servers=replace(choice.servers, generation=choice.trainers.times.total))
    uneven = replace(choice, servers=replace(choice.servers, generation=choice.trainers.times.total / 10))
    assert even.step == uneven.step and even.expected > 1.05 * uneven.expected
    assert uneven.expected == pytest.approx(uneven.step, rel=1e-6)
    alone = replace(choice, batches_ahead=0)
    assert alone.expected == alone.step


def test_one_rack_of_72_exchanges_tokens_over_its_links():
    shape = replace(workload().shape, experts=ExpertShape(128, 8, 1536, True, ()))
    asked, layout = replace(workload(), shape=shape), ModelLayout(1, 2, 1, "full", 9216, expert=32)
    trays = GPUS["gb200-186g"].model_copy(update={"linked_gpus": 0})
    apart, joined = (train_times(asked, layout, 32, gpu, Constants()) for gpu in (trays, GPUS["gb200-186g"]))
    assert apart.communication > 5 * joined.communication and apart.compute == joined.compute


def test_a_sync_gathers_before_it_sends_and_every_server_takes_all_of_it_in():
    asked, known = workload(), Constants()
    whole = 2 * asked.shape.num_parameters / (H100.network_gb_s * 1e9 * known.sync_links)
    alone, deep = (sync_s(asked, ModelLayout(1, p, 1, "full", 9216), H100, known) for p in (1, 8))
    assert whole < deep < alone < 1.2 * whole + known.sync_start_s
    cut = sync_s(asked, ModelLayout(8, 1, 1, "full", 9216), H100, known)
    assert cut - alone == pytest.approx(2 * asked.shape.num_parameters * 7 / 8 / (450e9 * known.sync_links), rel=0.01)
    assert sync_s(asked, ModelLayout(1, 1, 1, "full", 9216), H100, known, near=True) < alone / 3
