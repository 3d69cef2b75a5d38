"""The policy's methods with storages of two colours: nothing mixes device and host, NCCL is given nothing of the host,
and the host waits for the device at known places only."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import policy_tasks
import pytest
import torch
from colour_limits import unexpected
from ranks import RankPool
from small_models import save_model
from stored_experts import stored
from test_experts import layouts
from test_gradients_exact import layouts as dense_layouts
from test_loss_terms import algorithm_of, batch_with_reference
from test_routing_replay import experts_of_batch
from two_colours import watched

from megatron_daro.sync.buckets import bucketize
from megatron_daro.sync.fp8_cast import as_blocks
from megatron_daro.types import KINDS_OF_MEMORY


def life(
    layout: Any, path: Path, batch: Any, algorithm: dict[str, Any], save_to: Path, plant: str = "", **options: Any
) -> Any:
    """On a rank: a pass, two steps, the reference, an export, memory away and back, a checkpoint, another step."""
    with watched() as found, planted(plant):
        policy = policy_tasks.build_policy(path, layout, algorithm, **options)
        mine = batch.select(policy_tasks.my_rows(len(batch), layout))
        rows = policy_tasks.uneven_split(len(mine), 2)
        policy.logprobs(mine, rows)
        for step in (1, 2):
            assert not policy.train_step(mine, rows, step=step).skipped
        if algorithm.get("kl"):
            policy.reference_logprobs(mine, rows)
        with found.inside("export"):
            blocks = as_blocks(policy.export(), ["model.layers.{layer}.mlp.gate_proj.weight"], 1 << 14, [])
            for bucket in bucketize(blocks, 1 << 14, reuse=True):
                assert found.colours.of(bucket.data) == "device"
        policy.train_state.optimizer.zero_grad()
        policy.offload(KINDS_OF_MEMORY)
        policy.onload(KINDS_OF_MEMORY)
        place = save_to / "checkpoint"
        place.mkdir(exist_ok=True)
        policy_tasks.save_policy(policy, place)
        policy.load(place)
        policy.train_step(mine, rows, step=3)
        assert found.operations > 1000
    return found.calls


class planted:  # noqa: N801  (read as a statement)
    """A fault in the loss of a micro-batch, or in the reduction of a step's sums, on this rank."""

    def __init__(self, kind: str) -> None:
        from megatron_daro.actor import loss

        original = loss.StepLoss.micro_batch
        reduce = loss.reduced_on_all_stages

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
            mock.patch.object(loss.StepLoss, "micro_batch", micro_batch),
            mock.patch.object(loss, "reduced_on_all_stages", handed),
        ]

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def planted_step(layout: Any, path: Path, batch: Any, plant: str) -> None:
    """On a rank: a step with a fault."""
    with planted(plant):
        policy = policy_tasks.build_policy(path, layout, algorithm_of("all"))
        policy.train_step(batch, policy_tasks.uneven_split(len(batch), 2), step=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for family in ("qwen2", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        save_model(family, found[family])
    return found


CASES = [
    ("qwen2", "single", "all", {"precision": "bf16"}),
    ("qwen2", "cp2", "all_gspo", {"recompute": "full"}),
    ("qwen3_moe", "tp2_ep2", "all_gspo", {"routing_replay": True}),
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
    for calls in found:
        assert not unexpected(calls), unexpected(calls)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        ("item", "train_step: item in megatron_daro/actor/forward.py:<lambda>, 2 times"),
        ("cpu", "train_step: to the host in megatron_daro/actor/forward.py:<lambda>, 2 times"),
        ("mixed", r"aten.mul.Tensor in megatron_daro/actor/forward.py:<lambda> mixes tensors of device and host"),
        ("mixed in the backward pass", r"aten.mul.Tensor in megatron/core.* mixes tensors of device and host"),
        (
            "group",
            r"allreduce_ in megatron_daro/actor/reductions.py:reduced_on_all_stages is given tensors of the host",
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


def test_a_coloured_pool_of_ranks_fails_a_task_that_makes_the_host_wait(models):
    arguments = {"path": models["qwen2"], "batch": batch_with_reference(), "plant": "item"}
    for coloured in (True, False):
        pool = RankPool(1, coloured=coloured)
        try:
            with pytest.raises(AssertionError, match=r"train_step: item in .*2 times") if coloured else nullcontext():
                pool.run(planted_step, layouts()["single"], **arguments)
        finally:
            pool.close()
