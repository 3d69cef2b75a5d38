"""Weight transports, from the policy's ranks to an engine: what each needs, and what it does not go with.

What depends on the transport in a run asks its row: the rules of the configuration, the placement of processes, the
start of a server and its vetting. Another one, to which ranks give Hugging Face tensors, is five files:

* here, a row and a name
* config/sections.py: a sentence at `engine.sglang.sync`, and the options of its own (docs/configuration.md is made of
  both)
* its sender: a file in sync/, and a line in `SENDERS` (sync/senders.py)
* its servers' end: a line in `RECEIVING` (engine/sglang/receiving.py), and a class where its servers are told other
  things than those of `Receiving`; what the sender must know, which sees no configuration, it puts into
  `SendPlan.details`

Some need more: a line in `EXPORTS` (runtime/weight_export.py) where it is not one rank of each pipeline stage that
sends to all servers, one stage after the other (by host, `TrainWorker.relay` passes on handles of GPU memory and
nothing else); a rule where no fact of a row says what it does not go with (config/rules/engine.py, `transport`); a
loader where SGLang cannot load what arrives by itself (sync/in_server/); and for a package that both ends need,
engine/sglang/upstream_names.py looks for it, and engine/sglang/interpreter.py refuses a run without it. The planner
(workshop/plan/times.py) reckons a broadcast for all but adapters.

By `shards` all ranks send at once: each its own parameters, as Megatron has them, by a plan made of both layouts
(runtime/shard_export.py); what asks for `shard_plan` needs that plan or the layout of servers. A second one of its
kind, with another wire, would be a value of `engine.sglang.shards_over`. By `disk` nothing is sent: the servers' end
asks for `WeightFiles`, which the ranks write as they write RUN/hf (sync/files.py), and has the servers read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

SGLangTransport = Literal["distributed", "shards", "disk", "tensor", "adapters"]
"""Those to SGLang servers: the values of `engine.sglang.sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What is true of one transport, for rules, placement and the start. An update asks none of this: what servers are
    told is in the transport's class in `RECEIVING`, and who sends when in its line of `EXPORTS`.

    calls: that a server must have for it, beside those that every run needs.
    only_sglang: the one version whose parameters are known; empty: any that has the calls.
    loader: that servers are started with, to load what SGLang cannot load itself: `module.function` of sync/in_server/.
    options: of engine.sglang that are for this transport alone.
    collective: both ends are ranks of one group, so they need one NCCL.
    shard_plan: each rank of the policy sends what it holds to those ranks of servers that need it, by a plan made of
        both layouts.
    maps_memory: handles of GPU memory are handed over, inside a host, to servers that see the GPUs of its ranks.
    checkpoint: servers read an HF checkpoint when all of it is there.
    no_shared_gpus: why it cannot serve where a rank and a server share a GPU; empty where it can.
    adapters: the adapters of section `lora` go, and no weights: all in one call, under a name of their own which
        requests then give, so that servers go on with what they are doing.
    no_fp8_blocks: why it cannot carry blocks of fp8; empty where it can.
    """

    calls: tuple[str, ...] = ()
    only_sglang: tuple[int, ...] = ()
    loader: str = ""
    options: tuple[str, ...] = ()
    collective: bool = False
    shard_plan: bool = False
    maps_memory: bool = False
    checkpoint: bool = False
    no_shared_gpus: str = ""
    adapters: bool = False
    no_fp8_blocks: str = ""


TRANSPORTS: Mapping[str, Transport] = {
    "distributed": Transport(
        calls=(
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
        ),
        collective=True,
        no_shared_gpus="NCCL takes no two processes of one GPU into a group",
    ),
    "shards": Transport(
        calls=("/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update"),
        only_sglang=(0, 5, 23),  # whose parameters sync/shard_layouts.py describes
        loader="megatron_daro_shards.receive",
        options=("shards_over",),
        shard_plan=True,
        no_shared_gpus="TCP and RDMA are for other hosts",
        no_fp8_blocks="blocks of 128 x 128 reach over shards",
    ),
    "disk": Transport(
        calls=("/update_weights_from_disk",),
        options=("sync_dir",),
        checkpoint=True,
        no_fp8_blocks="files are written in bf16",
    ),
    "tensor": Transport(calls=("/update_weights_from_tensor",), maps_memory=True),
    "adapters": Transport(
        calls=("/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
        adapters=True,
        no_shared_gpus="a server would lose its base model's weights with its memory",
        no_fp8_blocks="servers keep the weights of the model's files",
    ),
    "ray": Transport(),
}
"""By name. `ray` goes to the embedded engines: through the object store."""


def sglang_transports(where: Callable[[Transport], bool]) -> str:
    """Name the values of `engine.sglang.sync` for which this holds, for messages."""
    return " or ".join(name for name in get_args(SGLangTransport) if where(TRANSPORTS[name]))
