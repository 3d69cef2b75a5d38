"""Which layouts, splits and servers the planner looks at, what it refuses in which words, how it orders the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_plan_numbers import CONSTANTS, DENSE, EXPERTS, GPU, MIXED, WORKLOAD

from megatron_daro.config import Config
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.plan.layout import (
    ModelLayout,
    active_parameters,
    buffer_elements,
    checkpoint_bytes,
    counts,
    expert_sizes,
    in_parts,
    model_layouts,
    padded_vocabulary,
    server_sizes,
    sizes,
)
from megatron_daro.workshop.plan.memory import server_memory
from megatron_daro.workshop.plan.search import Refusals, _Fleets, search, splits
from megatron_daro.workshop.plan.times import step_error, weight_bytes
from megatron_daro.workshop.plan.workload import (
    Practice,
    Workload,
    least_budget,
    quantiles,
    recorded_quantiles,
    workload_of,
)


def test_sizes_are_those_that_divide_the_model_within_a_node():
    shape, one = replace(DENSE, layers=6), replace(DENSE, heads=32, kv_heads=16, ffn=48)
    assert list(sizes(shape, GPU, 2)) == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert {tensor for tensor, _, _ in sizes(one, GPU, 64)} == {1, 2, 4, 8}
    assert {pipeline for _, pipeline, _ in sizes(shape, GPU, 64)} == {1, 2, 3, 6}
    assert {context for *_, context in sizes(shape, GPU, 64)} == {1, 2, 4, 8}
    odd = replace(MIXED, ffn=7)
    assert {tensor for tensor, _, _ in sizes(odd, GPU, 64)} == {1}, "one layer is dense"
    every = replace(odd, experts=replace(MIXED.experts, dense_layers=()))
    assert {tensor for tensor, _, _ in sizes(every, GPU, 64)} == {1, 2, 4}


def test_each_layout_is_there_with_both_recomputations_and_four_budgets():
    found = list(model_layouts(replace(WORKLOAD, longest=1001), GPU, 2))
    assert len(found) == 4 * 8
    assert {layout.micro_batch_tokens for layout in found if layout.ranks == 1} == {1001, 2002, 4004, 8008}
    assert {layout.micro_batch_tokens for layout in found if layout.context == 2} == {1004, 2008, 4016, 8032}
    assert {layout.micro_batch_tokens for layout in found if layout.tensor == 2} == {1002, 2004, 4008, 8016}
    assert {layout.recompute for layout in found} == {"none", "full"}


def test_experts_lie_on_a_divisor_or_a_multiple_of_tp():
    assert expert_sizes(DENSE, 4) == [1]
    assert expert_sizes(MIXED, 1) == [1, 2, 4, 8, 16, 32]
    assert expert_sizes(MIXED, 3) == []
    assert expert_sizes(replace(MIXED, experts=replace(MIXED.experts, number=192)), 4) == [1, 2, 4, 8, 16, 32, 64]
    assert expert_sizes(replace(MIXED, experts=replace(MIXED.experts, ffn=6)), 4) == [2, 4, 8, 16, 32]


def test_stages_are_cut_into_two_to_eight_parts_of_whole_layers():
    def parts(layers, pipeline):
        return [
            layout.virtual for layout in in_parts(replace(DENSE, layers=layers), ModelLayout(1, pipeline, 1, "none", 1))
        ]

    assert parts(48, 2) == [2, 3, 4, 6, 8] and parts(48, 1) == [] and parts(18, 2) == [3]


def test_servers_are_powers_of_two_in_a_node_and_two_or_four_whole_nodes():
    assert server_sizes(replace(DENSE, heads=32), GPU) == [(1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 4)]
    assert server_sizes(replace(DENSE, heads=12), GPU) == [(1, 1), (2, 1), (4, 1)]
    assert server_sizes(replace(DENSE, heads=12), GPU, 3) == [(3, 3), (6, 3), (12, 3)]


def test_parameters_of_a_rank_and_of_a_checkpoint():
    assert [padded_vocabulary(50_001, tensor) for tensor in (1, 3, 32)] == [50_016, 50_016, 50_016]
    assert padded_vocabulary(48, 1) == 48 and padded_vocabulary(49, 32) == 64 and padded_vocabulary(90, 3) == 96
    small = replace(DENSE, layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=3, vocab=16)
    layer = 8 + 8 * 16 + 8 * 8 + 8 + 16 + 4 + 4 + 2 * 3 * 8 + 3 * 8
    whole = ModelLayout(1, 1, 1, "none", 1).cut
    assert counts(small, whole, 0) == (2 * 16 * 8 + layer + 8, 0)
    assert counts(replace(small, tie=True), whole, 0) == (16 * 8 + layer + 8, 0)
    assert checkpoint_bytes(small, 2) == 14 * sum(counts(small, whole, 0))
    assert checkpoint_bytes(small, 4) == 12 * sum(counts(small, whole, 0))
    mixed = replace(MIXED, vocab=50_016)
    assert checkpoint_bytes(mixed, 2) == 14 * mixed.num_parameters, "whole experts, and all of them"
    assert active_parameters(small) + 16 * 8 == small.num_active_parameters
    assert active_parameters(replace(small, tie=True)) == replace(small, tie=True).num_active_parameters
    # Ten of the twelve parameters are padded to 64 elements each, and all of them to 128 for each rank's share.
    padded = 64 * (2 * 2 + 1 + 2 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1)
    assert buffer_elements(small, whole, 0, shards=1, expert_shards=1) == -(-padded // 128) * 128
    assert buffer_elements(small, whole, 0, shards=3, expert_shards=1) == -(-padded // 384) * 384
    assert buffer_elements(small, whole, 0, shards=0, expert_shards=1) == sum(counts(small, whole, 0))


def test_weights_of_experts_are_counted_by_themselves():
    rest, experts = weight_bytes(MIXED, 2)
    assert experts == 2 * 11 * 32 * 3 * 1024 * 512 and rest + experts == 2 * MIXED.num_parameters
    assert weight_bytes(DENSE, 4) == (4 * DENSE.num_parameters, 0)


def test_splits_are_single_gpus_below_two_nodes_and_few_where_there_are_many():
    assert splits(15, 8) == list(range(1, 15)) and splits(24, 8) == [8, 16] and splits(2, 8) == [1]
    assert splits(49 * 8, 8) == list(range(8, 49 * 8, 8))
    large = splits(100 * 8, 8)
    every = list(range(8, 800, 8))
    assert large == sorted({every[int(i * 99 / 48)] for i in range(48)} | {8, 16, 32, 64, 128, 256, 512})


def test_refusals_keep_the_words_of_the_least_need():
    refusals = Refusals()
    for need, words in ((2, "first"), (2, "equal"), (3, "more"), (1, "least")):
        refusals.add("why", need, words)
        assert refusals.nearest["why"][1] == ("least" if need == 1 else "first")
    assert refusals.counts == {"why": 4}


CHEAP = replace(WORKLOAD, shape=replace(DENSE, layers=6))
SEARCHES: dict[str, tuple[Workload, int, int]] = {
    "apart": (CHEAP, 5500, 12),
    "between nodes": (CHEAP, 5500, 24),
    "experts": (replace(EXPERTS, staleness=1, samples=500), 9000, 12),
    "shared": (replace(CHEAP, colocated=True, server_fraction=0.57), 11500, 8),
    "few samples": (replace(CHEAP, samples=6), 60000, 6),
}
"""What is searched for, MiB of a GPU, GPUs."""
FOUND = {
    "apart": (
        384,
        [(1, 1, 1, 1, 1, 4, 1, 8, 20.134), (2, 1, 1, 1, 1, 2, 1, 8, 20.29), (1, 1, 1, 2, 1, 2, 1, 8, 20.297)],
        {
            "out of memory, mostly reserve": (
                80,
                "TP 2 PP 1 CP 1 recompute none, 6144 tokens DP 1 needs 5 GiB of 5; reserve alone 2",
            ),
            "out of memory, mostly activations": (
                18,
                "TP 1 PP 6 CP 1 recompute none, 12288 tokens DP 1 needs 6 GiB of 5; activations alone 3",
            ),
            "samples of an update are no multiple of the replicas (DP)": (112, "256 samples, DP 3"),
        },
    ),
    "between nodes": (
        280,
        [(1, 1, 1, 1, 1, 16, 1, 8, 18.807), (1, 1, 1, 1, 1, 8, 1, 16, 18.965), (1, 1, 1, 2, 1, 8, 1, 8, 18.814)],
        {
            "out of memory, mostly reserve": (
                39,
                "TP 2 PP 2 VPP 3 CP 2 recompute none, 12288 tokens DP 2 needs 5 GiB of 5; reserve alone 3",
            ),
            "out of memory, mostly activations": (
                6,
                "TP 1 PP 1 CP 1 recompute none, 12288 tokens DP 16 needs 7 GiB of 5; activations alone 3",
            ),
        },
    ),
    "experts": (
        2496,
        [(1, 2, 1, 1, 2, 2, 1, 8, 23.903), (1, 1, 1, 2, 4, 2, 1, 8, 23.907), (2, 1, 1, 1, 4, 2, 1, 8, 23.926)],
        {
            "out of memory, mostly optimizer": (
                58,
                "TP 1 PP 3 VPP 2 CP 1 recompute full, 12288 tokens DP 1 needs 9 GiB of 8; optimizer alone 3",
            ),
            "groups of experts (ETP x EP) do not divide TP x CP x DP": (
                1528,
                "TP 1 PP 1 CP 1 EP 2 recompute none, 3072 tokens DP 1",
            ),
            "out of memory, mostly activations": (
                112,
                "TP 4 PP 2 VPP 6 CP 1 recompute none, 12288 tokens DP 1 needs 8 GiB of 8; activations alone 3",
            ),
            "samples of an update are no multiple of the replicas (DP)": (240, "250 samples, DP 3"),
            "out of memory, mostly reserve": (
                164,
                "TP 1 PP 2 CP 2 recompute none, 6144 tokens DP 1 needs 8 GiB of 8; reserve alone 3",
            ),
            "out of memory, mostly gradients": (
                8,
                "TP 1 PP 1 CP 1 recompute full, 3072 tokens DP 5 needs 9 GiB of 8; gradients alone 3",
            ),
        },
    ),
    "shared": (
        120,
        [(2, 1, 1, 1, 1, 4, 1, 8, 19.346), (1, 2, 1, 1, 1, 4, 1, 8, 19.592), (2, 1, 1, 2, 1, 2, 1, 8, 19.361)],
        {
            "no room for both weights and the cache at the end of an update": (
                32,
                "TP 1 PP 1 CP 1 recompute none, 3072 tokens: weights of 0 GiB beside 6",
            ),
            "out of memory, mostly activations": (
                2,
                "TP 1 PP 2 VPP 3 CP 1 recompute none, 12288 tokens DP 4 needs 7 GiB of 7; activations alone 3",
            ),
            "out of memory, mostly reserve": (
                3,
                "TP 2 PP 2 VPP 3 CP 1 recompute none, 24576 tokens DP 2 needs 7 GiB of 7; reserve alone 3",
            ),
        },
    ),
    "few samples": (
        136,
        [(1, 1, 1, 1, 1, 1, 1, 5, 20.602), (2, 1, 1, 1, 1, 1, 1, 4, 22.648), (1, 1, 1, 2, 1, 1, 1, 4, 22.649)],
        {
            "samples of an update are no multiple of the replicas (DP)": (32, "3 samples, DP 2"),
            "an update has 3 samples, fewer than replicas (DP)": (16, "DP 4"),
        },
    ),
}
"""Layouts that were looked at; TP, PP, VPP, CP, EP, DP, servers of how many GPUs, expected seconds; refusals."""


def found(workload, gpu, gpus, best=3):
    plan = search(workload, gpu, gpus, constants=CONSTANTS, best=best)
    rows = []
    for choice in plan.choices:
        layout, servers = choice.trainers.layout, choice.servers
        rows.append(
            (
                layout.tensor,
                layout.pipeline,
                layout.virtual,
                layout.context,
                layout.expert,
                choice.trainers.data,
                servers.tensor,
                servers.replicas,
                round(choice.expected, 3),
            )
        )
    return (
        plan.looked_at,
        rows,
        {reason: (count, plan.refusals.nearest[reason][1]) for reason, count in plan.refusals.counts.items()},
    )


@pytest.mark.parametrize("case", SEARCHES)
def test_a_search_finds_these_choices_and_refuses_with_these_words(case):
    workload, mib, gpus = SEARCHES[case]
    assert found(workload, GPU.model_copy(update={"memory_mib": mib}), gpus) == FOUND[case]


def test_where_nothing_fits_the_three_commonest_reasons_are_named():
    small = GPU.model_copy(update={"memory_mib": 4500})
    with pytest.raises(ConfigError) as raised:
        search(CHEAP, small, 4, constants=CONSTANTS)
    assert str(raised.value) == (
        "no layout of this model fits 4 GPUs of invented: out of memory, mostly reserve (33 layouts, nearest: TP 2 "
        "PP 1 CP 1 recompute full, 3072 tokens DP 1 needs 4 GiB of 4; reserve alone 2); out of memory, mostly "
        "activations (7 layouts, nearest: TP 1 PP 2 CP 1 recompute none, 12288 tokens DP 1 needs 7 GiB of 4; "
        "activations alone 3); servers without room for KV cache (1 layouts, nearest: a server of 1 GPUs: weights "
        "0 GiB a GPU leave too little for KV cache). Training alone takes about 1 of them for weights, gradients and "
        "optimizer; fix: more GPUs, GPUs with more memory, or shorter sequences (rollout.max_response_tokens)"
    )
    with pytest.raises(
        ConfigError, match=r"fits 1 GPUs of invented: one GPU cannot train and generate. Training alone"
    ):
        search(CHEAP, GPU, 1)
    with pytest.raises(ConfigError, match="takes about 1603 of them"):
        search(CHEAP, GPU.model_copy(update={"memory_mib": 2}), 2)


def test_a_server_needs_room_for_four_of_the_longest_samples():
    gpu, token = GPU.model_copy(update={"memory_mib": 12_000}), 2 * 12 * 4 * 80 * 2
    longest = int(server_memory(WORKLOAD, gpu, 1).kv_cache / (4 * token))
    for more, wanted in ((0, 1), (1, 2)):
        refusals = Refusals()
        fleets = _Fleets(replace(WORKLOAD, longest=longest + more), gpu, CONSTANTS, refusals)
        assert min(tensor for tensor, *_ in fleets._sizes) == wanted
        assert list(refusals.counts) == ["servers without room for KV cache"] * more
        assert (fleets.best(1) is None) == bool(more)


def test_the_error_is_that_of_the_kind_of_model_or_of_a_recorded_run():
    known = replace(CONSTANTS, generation_factor=1.0, training_factor=1.0)
    errors = (known.step_error, known.expert_step_error, known.run_error)
    assert [step_error(workload, known) for workload in (WORKLOAD, EXPERTS)] == list(errors[:2])
    for changed in ({"generation_factor": 1.1}, {"training_factor": 0.9}):
        assert step_error(EXPERTS, replace(known, **changed)) == errors[2]


def config(**sections):
    base = {"model": {"path": "x"}, "data": {"train": ("x",), "max_prompt_tokens": 700}}
    rollout = {"prompts_per_step": 10, "rollouts_per_prompt": 4, "max_response_tokens": 2000, "oversampling": 1.25}
    return Config.model_validate(base | {"rollout": rollout} | sections)


def test_a_plain_recipe_asks_for():
    asked = workload_of(config(engine={"kind": "sglang"}), DENSE)
    assert (asked.samples, asked.generated, asked.updates, asked.staleness, asked.prompts_shared) == (40, 52, 1, 0, 4)
    assert (asked.mean_prompt, asked.longest, asked.dtype_bytes, asked.epochs) == (256.0, 2700, 2, 1)
    assert asked.mean_response == pytest.approx(600, abs=0.5) and asked.response_Q.max() <= 2000
    assert (asked.bucket_bytes, asked.critic, asked.critic_offload, asked.extra_passes) == (2**28, None, False, 0)
    assert (asked.server_fraction, asked.server_nodes, asked.colocated) == (None, None, False)
    assert not (asked.fp8 or asked.servers_fp8 or asked.cache_fp8 or asked.recomputed)
    assert asked.practice == Practice() and asked.distributed_optimizer
    assert (asked.chunk_tokens, asked.chunk_vocab) == (None, None)


def test_options_of_a_recipe_are_in_what_it_asks_for():
    arguments = {"kv_cache_dtype": "fp8_e4m3", "mem_fraction_static": 0.7}
    servers = {"nodes": 2, "tensor_parallel": 4, "bucket_mib": 32, "fp8_blocks": True, "arguments": arguments}
    megatron = {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]}
    options = config(
        engine={"kind": "sglang", "colocate": True, "sglang": servers},
        actor={
            "precision": "fp8",
            "logprob_chunk_tokens": 12,
            "logprob_chunk_vocab": 34,
            "megatron": megatron,
            "optimizer": {"distributed": False},
        },
        algorithm={"name": "ppo", "critic": {"offload": True}},
        trainer={"updates_per_batch": 4, "epochs_per_batch": 3},
    )
    asked = workload_of(options, DENSE, mean_prompt=700, response_Q=np.array([5.0, 10.0]))
    assert (asked.fp8, asked.servers_fp8, asked.cache_fp8, asked.colocated) == (True,) * 4
    assert (asked.server_fraction, asked.server_nodes, asked.bucket_bytes) == (0.7, 2, 32 * 2**20)
    assert (asked.critic, asked.critic_offload, asked.updates, asked.epochs) == (DENSE, True, 4, 3)
    assert (asked.chunk_tokens, asked.chunk_vocab, asked.distributed_optimizer) == (12, 34, False)
    assert (asked.recomputed, asked.mean_prompt) == ({"moe", "mlp"}, 700.0)
    assert asked.extra_passes == len(options.algorithm.passes(("values",))) > len(options.algorithm.passes())
    assert (asked.mean_response, asked.tokens) == (7.5, 40 * 707.5)
    whole = workload_of(config(actor={"precision": "fp32"}, engine={"kind": "sglang", "colocate": True}), DENSE)
    assert whole.dtype_bytes == 4 and whole.server_fraction == 0.6
    assert workload_of(config(algorithm={"name": "ppo"}), DENSE).critic_offload is False


@pytest.mark.parametrize("mean", [0, 2000])
def test_a_mean_answer_is_above_nothing_and_below_the_longest(mean):
    with pytest.raises(ConfigError, match=rf"--mean-response: got {mean} tokens; .* below .*max_response_tokens 2000"):
        workload_of(config(), DENSE, mean_response=mean)
    recorded = workload_of(config(), DENSE, mean_response=mean, response_Q=np.array([7.0]))
    assert recorded.mean_response == 7


def test_a_mean_prompt_is_above_nothing_and_at_most_the_longest():
    with pytest.raises(ConfigError, match=r"--mean-prompt: got 0 tokens"):
        workload_of(config(), DENSE, mean_prompt=0)
    assert workload_of(config(), DENSE, mean_prompt=0.5).mean_prompt == 0.5


def test_lengths_are_spread_as_asked_and_those_of_a_run_are_its_own():
    even, spread = quantiles(100, 0.0, 1000), quantiles(100, 0.5, 10_000)
    assert even == pytest.approx(np.full(256, 100.0)) and len(spread) == 256
    assert np.log(spread).std() == pytest.approx(0.5, rel=0.01) and spread.mean() == pytest.approx(100)
    assert np.log(workload_of(config(), DENSE, mean_response=20).response_Q).std() == pytest.approx(0.8, rel=0.03)
    assert quantiles(1.0, 2.0, 1000).min() == 1
    assert recorded_quantiles(np.arange(257)) == pytest.approx(256 * (np.arange(256) + 0.5) / 256)


def test_a_budget_takes_the_longest_sample_in_whole_multiples():
    assert [least_budget(WORKLOAD, multiple) for multiple in (1, 1000, 1536, 3073)] == [3072, 4000, 3072, 3073]
