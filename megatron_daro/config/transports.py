"""Weight transports, from the policy's ranks to an engine: what each needs, and what it cannot be combined with.

Whatever depends on the transport looks it up in the table below: the rules of the configuration, the placement of
processes, the start of a server and its vetting. To add a transport that sends Hugging Face tensors, change five files:

* this one: a name and a row
* config/sections.py: a sentence at `engine.sglang.sync`, and options of its own (docs/configuration.md is generated
  from both)
* its sender: a new file in sync/, and a line in `SENDERS` (sync/senders.py)
* the servers' end: a line in `RECEIVING` (engine/sglang/receiving.py), and a subclass of `Receiving` if its servers
  must be told something else; the sender does not see the configuration, so this class puts what the sender must know
  into `SendPlan.details`

Some transports need more:

* a line in `EXPORTS` (runtime/weight_export.py), unless one rank of each pipeline stage sends to all servers, one stage
  after another (`TrainWorker.relay`, which sends by host, passes on only handles of GPU memory)
* a rule, if no field of `Transport` says what it cannot be combined with (config/rules/engine.py, `transport`)
* a loader, if SGLang by itself cannot load what arrives (sync/in_server/)
* for a package that both ends need: a search for it in engine/sglang/upstream_names.py, and a refusal of runs without
  it in engine/sglang/interpreter.py

The planner (workshop/plan/times.py) assumes a broadcast for every transport but adapters.

With `shards` all ranks send at once: each sends its own parameters, in Megatron's layout, by a plan made from both
layouts (runtime/shard_export.py); code that checks `shard_plan` needs this plan or the layout of the servers. A variant
of `shards` over another network layer would be a value of `engine.sglang.shards_over`. With `disk` nothing is sent: the
servers' end asks for `WeightFiles`, which the ranks write as they write RUN/hf (sync/files.py), and then has the
servers read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

SGLangTransport = Literal["distributed", "shards", "disk", "tensor", "adapters"]
"""The transports to SGLang servers: the values of `engine.sglang.sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Facts about one transport, for rules, placement and the start. Of an update, the transport's class in `RECEIVING`
    decides what servers are told, and its line in `EXPORTS` which ranks send, and when.

    calls: calls that a server must offer for it, beside those that every run needs.
    only_sglang: the only SGLang version whose parameters are known; empty: any version that offers the calls.
    loader: what servers load buckets with that SGLang cannot load itself: `module.function` of sync/in_server/. They
        are started with it; the sender has to name it in each of its calls, as sync/shard_sender.py does.
    options: options of engine.sglang that only this transport reads.
    collective: both ends are ranks of one communicator, so they need the same NCCL.
    shard_plan: each rank of the policy sends what it holds to those server ranks that need it, by a plan made from both
        layouts.
    maps_memory: ranks pass handles of GPU memory, within a host, to servers that see the ranks' GPUs.
    checkpoint: servers read an HF checkpoint once it is complete.
    no_shared_gpus: why it cannot be used if ranks and servers share GPUs; empty if it can.
    adapters: only the adapters of section `lora` are sent, all in one call and under a new name, which later requests
        give; so servers need not pause.
    no_fp8_blocks: why it cannot carry fp8 blocks; empty if it can.
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
"""Transports by name. `ray` goes to the embedded engines, through the object store."""


def sglang_transports(where: Callable[[Transport], bool]) -> str:
    """Return the values of `engine.sglang.sync` whose transports satisfy `where`, joined by "or", for messages."""
    return " or ".join(name for name in get_args(SGLangTransport) if where(TRANSPORTS[name]))
