"""What real Megatron modules take, as JSON lines: run in a process of its own by test_plan_memory.py.

static: parameters of a rank's modules on the meta device, in a fake process group. optimizer: bytes of weights,
gradients and optimizer state of a small policy. activations: peak of live bytes of a forward and backward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))
from live_bytes import LiveBytes

from megatron_daro.actor import device, lora, model, parallel
from megatron_daro.actor.compat import HiddenStateGPTModel, ValueModel, allocate_optimizer_state
from megatron_daro.actor.forward import OutputSettings, position_logprobs
from megatron_daro.actor.optimizer import build_optimizer
from megatron_daro.actor.parallel import Layout
from megatron_daro.config.actor import OptimizerSection
from megatron_daro.config.lora import LoraSection
from megatron_daro.config.model_shape import read_model_shape

device.prepare()
from megatron.core import parallel_state  # noqa: E402 - after the redirection to the CPU


def in_layout(layout: Layout, rank: int, work: Callable[[], Any]) -> Any:
    """What `work` returns as this rank of a fake world."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    parallel.build_groups(layout, seed=0)
    # The optimizer asks for gloo groups, which are not made in a fake world; it only looks at their size here.
    for name in [name for name, value in vars(parallel_state).items() if name.endswith("_GLOO") and value is None]:
        setattr(parallel_state, name, getattr(parallel_state, name.removesuffix("_GLOO")))
    try:
        return work()
    finally:
        parallel.shutdown()


def static(
    config: str | dict[str, Any],
    tensor: int,
    pipeline: int,
    stage: int,
    expert: int = 1,
    virtual: int = 1,
    critic: bool = False,
) -> int:
    """Parameters of the first rank of a stage; nothing is allocated."""
    data = max(expert // tensor, 1)
    cut = {"expert": expert, "expert_tensor": 1} if expert > 1 else {}
    layout, shape = Layout(tensor, pipeline, 1, data, **cut, virtual_pipeline=virtual), read_model_shape(config)

    def count() -> int:
        real = device.current
        device.current = lambda: torch.device("meta")
        try:
            with torch.device("meta"):
                parts = model.build_model(
                    shape,
                    model.transformer_config(shape, layout, dtype="bf16", sequence_parallel=tensor > 1),
                    kind=ValueModel if critic else HiddenStateGPTModel,
                )
        finally:
            device.current = real
        trained = (p for made in parts for p in made.parameters() if p.requires_grad)
        return sum(parameter.numel() for parameter in trained)

    return in_layout(layout, stage * tensor * data, count)


def optimizer(
    config: dict[str, Any],
    tensor: int,
    data: int,
    dtype: str,
    distributed: bool,
    expert: int = 1,
    adapters: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer of rank 0; shards of the parameters' last rank may be smaller."""
    cut = {"expert": expert, "expert_tensor": 1} if expert > 1 else {}
    layout, shape = Layout(tensor=tensor, data=data, **cut), read_model_shape(config)

    def count() -> dict[str, int]:
        transformer = model.transformer_config(shape, layout, dtype=dtype, sequence_parallel=tensor > 1)
        chunks = model.build_model(shape, transformer)
        if adapters:
            lora.attach(chunks, shape, LoraSection(**adapters), seed=0)
        (wrapped,) = model.wrap_data_parallel(chunks, transformer, distributed_optimizer=distributed, options={})
        made = build_optimizer([wrapped], OptimizerSection(distributed=distributed), dtype=dtype, options={})
        allocate_optimizer_state(made)
        storages = {
            p.data.untyped_storage().data_ptr(): p.data.untyped_storage().nbytes() for p in wrapped.parameters()
        }
        gradients = sum(
            buffer.grad_data.untyped_storage().nbytes()
            for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]
        )
        state = 0
        for part in getattr(made, "chained_optimizers", [made]):
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    moments = part.optimizer.state[main]
                    state += sum(moments[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
                    own = main.untyped_storage().data_ptr() not in storages
                    state += main.nbytes if own else 0
        return {"weights": sum(storages.values()), "gradients": gradients, "optimizer": state}

    return in_layout(layout, 0, count)


def activations(
    config: dict[str, Any],
    tensor: int,
    dtype: str,
    recompute: str,
    tokens: int,
    chunk: int,
    modules: Sequence[str] = (),
    adapters: dict[str, Any] | None = None,
) -> int:
    """Peak of live bytes beside weights and gradients, log-probs included."""
    from megatron.core.packed_seq_params import PackedSeqParams

    layout, shape, sequences = Layout(tensor=tensor), read_model_shape(config), 4
    selective = {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}

    def measure() -> int:
        transformer = model.transformer_config(
            shape, layout, dtype=dtype, sequence_parallel=tensor > 1, recompute=recompute, options=selective
        )
        (inner,) = model.build_model(shape, transformer)
        if adapters:
            lora.attach([inner], shape, LoraSection(**adapters), seed=0)
        (wrapped,) = model.wrap_data_parallel([inner], transformer, distributed_optimizer=False, options={})
        for parameter in inner.parameters():
            parameter.data.normal_(std=0.02)
        each = tokens // sequences
        bounds = torch.arange(0, tokens + 1, each, dtype=torch.int32)
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=each, max_seqlen_kv=each)
        ids = torch.randint(0, shape.vocab, (tokens,))
        known = [
            *inner.parameters(),
            *(buffer.grad_data for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]),
        ]
        with LiveBytes(known) as live:
            hidden = wrapped(ids[None], torch.arange(each).repeat(sequences)[None], None, packed_seq_params=packed)
            logprobs, _ = position_logprobs(
                inner, hidden, ids, torch.arange(tokens), OutputSettings(shape.vocab, 1.0, chunk)
            )
            logprobs.sum().backward()
        return live.peak

    return in_layout(layout, 0, measure)


if __name__ == "__main__":
    for line in sys.stdin:
        what, arguments = json.loads(line)
        found = {"static": static, "optimizer": optimizer, "activations": activations}[what](**arguments)
        print(json.dumps({"found": found}), flush=True)
