"""Says what parameters SGLang's own models have on each rank of a server. Run by the Python of its environment:

    python server_parameters.py WORK

WORK/cases.json is a list of {"model": directory with config.json, "arguments": of ServerArgs, "load": bool, or names}.
Every rank of every case is built in this process: SGLang knows its place from the published ranks, and its layers take
their share from that where no process group exists yet (srt/layers/linear.py, `_LogicalGroup`, 0.5.23). With "load" the
model's safetensors file is read by SGLang's own `load_weights`, over parameters full of ones, in one call or in one for
each of several lists of names; else the model stands on the meta device. Written are WORK/shapes.json,
[case][rank][name] -> shape, and WORK/CASE_RANK.safetensors.
"""

import contextlib
import importlib
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang.srt import runtime_context
from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers.config import get_config
from torch import nn

MODULES = {"deepseek_v3": "deepseek_v2", "qwen3_5_moe_text": "qwen3_5_text"}
"""Where models stand whose module has another name than their type."""

for kernel in ("sigmoid_mul", "qk_gemma_rmsnorm", "qk_gemma_rmsnorm_with_gate", "qkvzba_split_reshape_cat_contiguous"):
    # The module of Qwen3.5 asks for these on import; SGLang from PyPI has none for CPUs, and loading calls none.
    setattr(torch.ops.sgl_kernel, f"fused_{kernel}_cpu", None)


def group(rank: int, size: int) -> types.SimpleNamespace:
    """What layers read of a process group while they are built; nothing is ever sent."""
    first_last = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1}
    return types.SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=None, device_group=None, **first_last)


@contextlib.contextmanager
def rank_of_server(arguments: dict, rank: int):
    """Be this rank of a server."""
    server = ServerArgs(device="cpu", skip_tokenizer_init=True, **arguments)
    place = runtime_context.SpawnRanks(world_rank=rank)
    context = runtime_context.create_context(server, role="scheduler", ranks=place)
    with runtime_context.use_context(context):
        initialize_dp_attention_flags(server)
        initialize_moe_config()
        own = context.parallel
        groups = {
            "tp_group": group(own.tp_rank, own.tp_size),
            "attn_tp_group": group(own.attn_tp_rank, own.attn_tp_size),
            "moe_ep_group": group(own.moe_ep_rank, own.moe_ep_size),
            "moe_tp_group": group(own.moe_tp_rank, own.moe_tp_size),
            "pp_group": group(0, 1),
        }
        with own.override(**groups):
            yield


def built(directory: Path, load: bool | list[list[str]]) -> nn.Module:
    """The model of a directory on the rank that this process is."""
    config = get_config(str(directory), trust_remote_code=False)
    adjust_tp_num_heads_if_necessary(config, 1, is_post_update=True)  # of linear attention, as on a CPU
    module = importlib.import_module(f"sglang.srt.models.{MODULES.get(config.model_type, config.model_type)}")
    module.LogitsProcessor = lambda *_, **__: nn.Identity()  # has no parameters, and wants groups that can send
    kinds = {
        entry.__name__: entry
        for entry in (module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass])
    }
    with torch.device("cpu" if load else "meta"):
        model = kinds[config.architectures[0]](config)
    if load:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1)
            weights = load_file(directory / "model.safetensors")
            for names in [list(weights)] if load is True else load:
                model.load_weights(iter([(name, weights[name]) for name in names]))
    return model


def main() -> None:
    work = Path(sys.argv[1])
    shapes = []
    for number, case in enumerate(json.loads((work / "cases.json").read_text())):
        torch.set_default_dtype(torch.float32 if case["load"] else torch.bfloat16)
        shapes.append([])
        for rank in range(case["arguments"].get("tp_size", 1)):
            with rank_of_server({"model_path": case["model"], **case["arguments"]}, rank):
                model = built(Path(case["model"]), case["load"])
            parameters = dict(model.named_parameters())
            shapes[-1].append({name: list(parameter.shape) for name, parameter in parameters.items()})
            if case["load"]:
                values = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
                save_file(values, work / f"{number}_{rank}.safetensors")
    (work / "shapes.json").write_text(json.dumps(shapes))


if __name__ == "__main__":
    main()
