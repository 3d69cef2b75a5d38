"""The policy's methods with storages of two colours: nothing mixes device and host, NCCL is given nothing of the host,
and the host waits for the device at known places only."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import policy_tasks
import pytest
import torch
from small_models import save_model
from stored_experts import stored
from test_experts import layouts
from test_gradients_exact import layouts as dense_layouts
from test_loss_terms import algorithm_of, batch_with_reference
from test_routing_replay import experts_of_batch
from two_colours import watched

from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.send import as_blocks
from megatron_daro.types import KINDS_OF_MEMORY


def life(
    layout: Any, path: Path, batch: Any, algorithm: dict[str, Any], save_to: Path, plant: str = "", **options: Any
) -> Any:
    """On a rank: a pass, two steps, the reference, an export, memory away and back, a checkpoint, another step."""
    with watched() as found, planted(plant):
        policy = policy_tasks.build_policy(path, layout, algorithm, **options)
        mine = batch.select(policy_tasks.my_rows(len(batch), layout))
        rows, reads = policy_tasks.uneven_split(len(mine), 2), {}

        def noted(name: str) -> None:
            reads[name] = dict(found.reads)
            found.reads.clear()

        policy.logprobs(mine, rows)
        noted("log-probs")
        for step in (1, 2):
            assert not policy.train_step(mine, rows, step=step).skipped
            noted("step")
        if algorithm.get("kl"):
            policy.reference_logprobs(mine, rows)
            noted("reference pass")
        with found.inside():
            blocks = as_blocks(policy.export(), ["model.layers.{layer}.mlp.gate_proj.weight"], 1 << 14, [])
            for bucket in bucketize(blocks, 1 << 14, reuse=True):
                assert found.colours.of(bucket.data) == "device"
        noted("export")
        policy.train_state.optimizer.zero_grad()
        policy.offload(KINDS_OF_MEMORY)
        policy.onload(KINDS_OF_MEMORY)
        noted("memory")
        place = save_to / "checkpoint"
        place.mkdir(exist_ok=True)
        policy.save(place)
        policy.load(place)
        noted("checkpoint")
        policy.train_step(mine, rows, step=3)
        noted("step")
        assert found.operations > 1000
    return reads


class planted:  # noqa: N801  (read as a statement)
    """A fault in the loss of a micro-batch, or in the reduction of a step's sums, on this rank."""

    def __init__(self, kind: str) -> None:
        from megatron_daro.actor import step

        original = step.StepLoss.micro_batch
        reduce = step.handed_to_all_stages

        def micro_batch(self: Any, model: Any, packed: Any, hidden_T1D: Any) -> Any:
            if kind == "item":
                hidden_T1D.sum().item()
            if kind == "cpu":
                hidden_T1D.detach().cpu()
            if kind == "mixed":
                hidden_T1D = hidden_T1D * torch.ones(len(hidden_T1D), 1, 1)
            if kind == "mixed in the backward pass":
                hidden_T1D.register_hook(lambda gradient: gradient * torch.ones(len(gradient), 1, 1))
            return original(self, model, packed, hidden_T1D)

        def handed(values: Any, *arguments: Any) -> Any:
            return reduce(torch.zeros(3), *arguments) if kind == "group" else reduce(values, *arguments)

        self._patches = [
            mock.patch.object(step.StepLoss, "micro_batch", micro_batch),
            mock.patch.object(step, "handed_to_all_stages", handed),
        ]

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for family in ("qwen2", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        save_model(family, found[family])
    return found


LAYERS = {
    "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd",  # has a kernel there
    "megatron_daro/actor/model.py:forward",  # attention of the local layers
    "megatron_daro/actor/model.py:packed_causal_attention",
    "megatron/core/transformer/moe/moe_utils.py:permute",  # actor.megatron.moe_permute_fusion has a kernel
    "megatron/core/transformer/moe/moe_utils.py:unpermute",
    "megatron/core/transformer/moe/moe_utils.py:sort_chunks_by_idxs",
    "megatron/core/transformer/moe/experts.py:forward",  # of experts that run one after the other
    "megatron/core/transformer/moe/token_dispatcher.py:preprocess",  # counts of tokens for all_to_all
    "megatron/core/tensor_parallel/mappings.py:forward",  # which the test of the CPU has not moved to the host before
    "megatron/core/tensor_parallel/mappings.py:backward",
}
"""Where layers wait that a GPU runs with Transformer Engine's kernels, or as upstream must."""
STEP = {
    ("to the host", "megatron_daro/actor/step.py:global_totals"): 1,
    ("to the host", "megatron_daro/actor/step.py:reduce"): 2,
    ("tolist", "megatron_daro/actor/step.py:reduce"): 2,
    ("__float__", "megatron_daro/actor/step.py:reduce"): 1,
    ("item", "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32"): 1,
    ("item", "megatron_daro/actor/optimizer.py:_finite_everywhere"): 1,
}
"""Of a whole step, whatever the number of its micro-batches; the norm for each part of the optimizer."""
PASS = {("to the host", "megatron_daro/data/packing.py:collect_responses"): 2}
"""Of each micro-batch, when all of them are done."""
CONTEXT = {("to the host", "megatron_daro/actor/forward.py:_join_context"): 1}
"""Of a whole pass with context parallelism."""
MICRO_BATCHES = 2
SAVE = {"megatron_daro/actor/checkpoint.py", "megatron/core/dist_checkpointing/"}
"""A checkpoint's ranks tell each other, as objects, what each of them has."""


def unexpected(reads: dict[str, dict[tuple[str, str], int]]) -> list[str]:
    """Reads of the device that nobody allowed, or more of them."""
    passes = {key: count * MICRO_BATCHES for key, count in PASS.items()} | CONTEXT
    allowed = {"step": STEP, "log-probs": passes, "reference pass": passes, "export": {}, "memory": {}}
    found = []
    for part, counts in reads.items():
        for (what, where), count in counts.items():
            if where in LAYERS or (part == "checkpoint" and where.startswith(tuple(SAVE))):
                continue
            most = allowed.get(part, {}).get((what, where), 0)
            if count > most:
                found.append(f"{part}: {what} in {where}, {count} times, allowed: {most}")
    return found


CASES = [
    ("qwen2", "single", "all", {"precision": "bf16"}),
    ("qwen3_moe", "single", "all_gspo", {"routing_replay": True}),
    pytest.param("qwen2", "tp2", "all_gspo", {"precision": "bf16"}, marks=pytest.mark.heavy),
    pytest.param("qwen2", "cp2", "all_gspo", {}, marks=pytest.mark.heavy),
    pytest.param("qwen2", "pp2_vpp2", "all", {"recompute": "full"}, marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("family", "layout", "terms", "options"), CASES)
def test_a_policy_keeps_device_and_host_apart(rank_pool, models, tmp_path, family, layout, terms, options):
    batch = batch_with_reference()
    if options.get("routing_replay"):
        batch = replace(batch, routed_experts_N=stored(experts_of_batch(batch), batch.lengths_N, tmp_path))
    found = rank_pool.run(
        life,
        (layouts() | dense_layouts())[layout],
        path=models[family],
        batch=batch,
        algorithm=algorithm_of(terms),
        save_to=tmp_path,
        **options,
    )
    for reads in found:
        assert not unexpected(reads), unexpected(reads)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("item", "step: item in megatron_daro/actor/forward.py:<lambda>, 2 times"),
        ("cpu", "step: to the host in megatron_daro/actor/forward.py:<lambda>, 2 times"),
        ("mixed", r"aten.mul.Tensor in megatron_daro/actor/forward.py:<lambda> mixes tensors of device and host"),
        ("mixed in the backward pass", r"aten.mul.Tensor in megatron/core.* mixes tensors of device and host"),
        (
            "group",
            r"allreduce_ in megatron_daro/actor/step.py:handed_to_all_stages is given tensors of the host",
        ),
    ],
)
def test_a_planted_fault_is_found(rank_pool, models, tmp_path, plant, words):
    def run() -> list[Any]:
        return rank_pool.run(
            life,
            layouts()["single"],
            path=models["qwen2"],
            batch=batch_with_reference(),
            algorithm=algorithm_of("all"),
            save_to=tmp_path,
            plant=plant,
        )

    if plant in ("item", "cpu"):
        assert any(re.match(words, line) for line in unexpected(run()[0])), unexpected(run()[0])
        return
    with pytest.raises(AssertionError, match=words):
        run()
