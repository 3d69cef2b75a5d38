"""Servers and ranks on the same GPUs in turns (engine.colocate): what has to hold for it.

Place in the data flow: called by checks.py. Refuses what would have both compute at once, transports that cannot join
two processes of one GPU, and pieces whose GPUs would not match.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config

_FIELD = "engine.colocate"
_RECORDED = "a graph is recorded with addresses, and tensors have others when they come back from the host"
_FIXED_ADDRESSES = {
    "nccl_ub": "memory that NCCL registered cannot be given back",
    **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _RECORDED),
}


def colocation(config: Config) -> Iterator[Problem]:
    """Yield each thing that keeps servers and ranks from taking turns."""
    if not config.engine.colocate:
        return
    sglang = config.engine.sglang
    if config.engine.kind != "sglang" or sglang.urls:
        got = "true with " + ("servers that run already" if sglang.urls else f"engine.kind {config.engine.kind}")
        fix, also = "set engine.kind=sglang without urls, or remove it", ("engine.kind", "engine.sglang.urls")
        yield Problem(_FIELD, got, "true with SGLang servers that the run starts", fix, also=also)
        return
    if sglang.sync == "distributed":
        got = "distributed with engine.colocate, where a rank and a server's rank share a GPU"
        allowed = "tensor or disk: NCCL takes no two processes of one GPU into a group"
        yield Problem("engine.sglang.sync", got, allowed, "set engine.sglang.sync=tensor", also=(_FIELD,))
    if config.rollout.max_staleness > 0:
        got = f"{config.rollout.max_staleness} with engine.colocate"
        allowed = "0: nothing is generated while a batch is trained"
        yield Problem("rollout.max_staleness", got, allowed, "set rollout.max_staleness=0", also=(_FIELD,))
    yield from _arguments(config)
    yield from _sizes(config)


def _arguments(config: Config) -> Iterator[Problem]:
    """Yield options of SGLang and Megatron under which memory cannot be given back."""
    given = config.engine.sglang.named_arguments
    field = "engine.sglang.arguments"
    if given.get("quantization") is not None:
        allowed = "servers in bf16: what a quantized one keeps beside its weights would be lost with its memory"
        fix = "remove quantization and load_format"
        yield Problem(field, "quantization with engine.colocate", allowed, fix, also=(_FIELD,))
    if given.get("enable_memory_saver") is False:
        allowed = "true or unset with engine.colocate: without it a server keeps its memory"
        fix = "remove enable_memory_saver"
        yield Problem(field, "enable_memory_saver: false", allowed, fix, also=(_FIELD,))
    for name, why in _FIXED_ADDRESSES.items():
        value = config.actor.megatron.get(name)
        if value not in (None, False, "none"):
            got, allowed = f"{show(value)} with engine.colocate", f"nothing: {why}"
            yield Problem(f"actor.megatron.{name}", got, allowed, "remove it", also=(_FIELD,))


def _sizes(config: Config) -> Iterator[Problem]:
    """Every GPU has one rank of the actor and one of a server, and pieces fit into each other."""
    ranks, size, servers = config.actor.world_size, config.engine.sglang.tensor_parallel, config.engine.replicas
    group = config.actor.tensor_parallel
    if size % group and group % size:
        got = f"{size}, with an actor.tensor_parallel of {group}"
        allowed = (
            "a divisor or a multiple of it with engine.colocate, so that a server's GPUs are those of whole groups"
        )
        fix = f"set engine.sglang.tensor_parallel={group}"
        yield Problem("engine.sglang.tensor_parallel", got, allowed, fix, also=(_FIELD, "actor.tensor_parallel"))
    elif ranks % size:
        got = f"{size}, which does not divide the {ranks} ranks of the actor"
        fix = f"set engine.sglang.tensor_parallel={group}"
        yield Problem(
            "engine.sglang.tensor_parallel", got, f"a divisor of {ranks} with engine.colocate", fix, also=(_FIELD,)
        )
    elif servers * size != ranks:
        got = f"{servers} x {size} GPUs, with {ranks} ranks of the actor on the same GPUs"
        allowed = f"{ranks // size} with engine.colocate, one server's rank for each rank of the actor"
        fix = f"set engine.replicas={ranks // size}"
        yield Problem("engine.replicas", got, allowed, fix, also=(_FIELD, "engine.sglang.tensor_parallel"))
