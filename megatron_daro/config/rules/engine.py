"""Rules of `engine`: its options, servers, how weights reach them, sharing GPUs with ranks, and servers in fp8.

With `engine.colocate` servers and ranks take turns on the same GPUs: no option may make both compute at once, the
transport must work between two processes of one GPU, and servers and ranks must cover the same GPUs.

SGLang 0.5.23 has two ways to compute with the policy's weights in fp8. With `load_format: flash_rl` it casts the bf16
weights of every update, but only for dense Qwen2 and Qwen3 models; without `flash_rl` a server that quantized its
parameters at its start has lost their loaders, and the first update fails. With `fp8_blocks` the policy sends blocks
with their scales, for any family. Quantized servers that could not take the policy's updates are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_daro.config.base import changed, filled
from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_shape import ModelShape, read_json
from megatron_daro.config.nccl_environment import nccl_of_both_ends
from megatron_daro.config.precision import FP8_BLOCK
from megatron_daro.config.problems import Problem, show, wrong
from megatron_daro.config.sections import Config
from megatron_daro.config.transports import TRANSPORTS, sglang_transports

_ARGUMENTS, _BLOCKS, _SYNC = "engine.sglang.arguments", "engine.sglang.fp8_blocks", "engine.sglang.sync"
_NUMPY_SEEDS = 2**32
_FLASH_RL = "{quantization: fp8, load_format: flash_rl}"
_FLASH_RL_FAMILIES = ("qwen2", "qwen3")
_OF_BLOCKS = ("quantization", "load_format", "json_model_override_args")
_PACKS_SCALES = 10.0
"""From this compute capability on SGLang rounds scales to powers of two and packs them, so that no update fits."""


def engine(config: Config) -> Iterator[Problem]:
    """Yield options of an own engine that the run fills in itself."""
    if reserved := sorted({"model_path", "replicas", "seed"} & set(config.engine.options)):
        allowed, fix = "other names: the run fills these in", "set engine.replicas and engine.seed"
        yield wrong(config, "engine.options", allowed, fix, got=", ".join(reserved))


def servers(config: Config) -> Iterator[Problem]:
    """Yield why SGLang servers could not be started, or not be reached."""
    sglang, replicas = config.engine.sglang, config.engine.replicas
    if config.engine.kind != "sglang":
        return
    started = [name for name in ("python", "arguments", "env") if getattr(sglang, name)]
    if sglang.urls and started:
        got = f"{len(sglang.urls)} servers that run already, and {', '.join(started)} for servers to be started"
        fix, beside = f"remove engine.sglang.{started[0]}", " ".join(f"engine.sglang.{name}" for name in started)
        yield wrong(config, "engine.sglang.urls", "one or the other", fix, beside=beside, got=got)
    if not sglang.urls and filled(config.engine.seed) + replicas > _NUMPY_SEEDS:
        allowed = f"seeds of {replicas} servers, one after the other, below 2^32: numpy takes no larger ones"
        fix = f"set engine.seed to a number up to {_NUMPY_SEEDS - replicas}"
        yield wrong(config, "engine.seed", allowed, fix, beside="engine.kind engine.replicas")
    if sglang.nodes > 1:
        yield from _servers_over_nodes(config)


def _servers_over_nodes(config: Config) -> Iterator[Problem]:
    sglang, field = config.engine.sglang, "engine.sglang.nodes"
    if config.engine.colocate:
        allowed, fix = "1: a server shares the GPUs of ranks of one node", "remove it, or set engine.colocate=false"
        yield wrong(config, field, allowed, fix, beside="engine.colocate")
        return
    if sglang.urls:
        allowed = "1: servers that run already are spread as they were started"
        yield wrong(config, field, allowed, "remove it", beside="engine.sglang.urls")
    if sglang.tensor_parallel % sglang.nodes:
        fix = f"set engine.sglang.tensor_parallel={sglang.nodes}, or more"
        allowed = "a divisor of engine.sglang.tensor_parallel"
        yield wrong(config, field, allowed, fix, beside="engine.sglang.tensor_parallel")
    if sglang.transport.maps_memory:
        allowed, fix = "1: memory is handed over inside a node only", f"set {_SYNC}=distributed"
        yield wrong(config, field, allowed, fix, beside=_SYNC)


def transport(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Yield why the policy's weights could not go to the servers by this transport."""
    sglang, way, broadcast = config.engine.sglang, config.engine.sglang.transport, f"set {_SYNC}=distributed"
    if config.engine.kind != "sglang":
        return
    if way.maps_memory and (hardware.kind == "cpu" or sglang.urls):
        allowed = f"{sglang.sync} for servers of this job on GPUs of the same host"
        got = f"{sglang.sync} " + ("with servers that run elsewhere" if sglang.urls else "on a machine without a GPU")
        yield wrong(config, _SYNC, allowed, broadcast, beside="engine.sglang.urls", got=got)
    if way.loader and sglang.urls:
        allowed = f"{sglang.sync} with servers that the run starts: they need its loader"
        yield wrong(config, _SYNC, allowed, broadcast, beside="engine.sglang.urls")
    for name in changed(sglang):
        ways = [sync for sync, other in TRANSPORTS.items() if name in other.options]
        if ways and sglang.sync not in ways:
            fix = f"set {_SYNC}={ways[0]} or remove it"
            yield wrong(config, f"engine.sglang.{name}", f"only with sync {' or '.join(ways)}", fix, beside=_SYNC)
    if way.collective and not sglang.urls:
        yield from _gpu_memory_of_both_ends(config)


def _gpu_memory_of_both_ends(config: Config) -> Iterator[Problem]:
    """Yield options with which servers and ranks would pass GPU memory to other processes in different ways."""
    sglang, name = config.engine.sglang, "NCCL_CUMEM_ENABLE"
    of_ranks = nccl_of_both_ends(os.environ)[name]
    if sglang.env.get(name, of_ranks) != of_ranks:
        got, allowed = f"{name}: {sglang.env[name]!r}", "unset: both ends of a broadcast need the same"
        fix = f"remove it, and set {name}={sglang.env[name]} in the environment of the job"
        yield wrong(config, "engine.sglang.env", allowed, fix, got=got)
    if sglang.named_arguments.get("enable_symm_mem") and of_ranks != "1":
        allowed = f"unset, or {name}=1 for the whole job: with it SGLang sets {name}=1 in the servers"
        fix = f"remove it, or set {name}=1 in the environment of the job"
        yield wrong(config, _ARGUMENTS, allowed, fix, got=f"enable_symm_mem with sync {sglang.sync}")


def routing_replay(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield what routing replay lacks: a model with experts, an engine that reports its chosen experts, a router that
    takes them."""
    field = "actor.routing_replay"
    if not config.actor.routing_replay:
        return
    if config.engine.kind != "sglang":
        allowed = "true with SGLang, which tells the experts that it chose"
        yield wrong(config, field, allowed, "set engine.kind=sglang, or remove it", beside="engine.kind")
    if shape and not shape.experts:
        yield wrong(config, field, "false: the model has no experts", "remove it", beside="model.path")
    if config.actor.megatron.get("moe_router_fusion"):
        allowed = "false with routing_replay: the fused router chooses by itself"
        yield wrong(config, "actor.megatron.moe_router_fusion", allowed, "remove one of them", beside=field)


def colocate(config: Config) -> Iterator[Problem]:
    """Yield what keeps servers and ranks from taking turns on the same GPUs."""
    sglang, field = config.engine.sglang, "engine.colocate"
    if not config.engine.colocate:
        return
    if config.engine.kind != "sglang" or sglang.urls:
        allowed, fix = (
            "true with SGLang servers that the run starts",
            "set engine.kind=sglang without urls, or remove it",
        )
        yield wrong(config, field, allowed, fix, beside="engine.kind engine.sglang.urls")
        return
    if reason := sglang.transport.no_shared_gpus:
        ways = sglang_transports(lambda way: not way.no_shared_gpus)
        allowed = f"{ways} where a rank and a server share a GPU: {reason}"
        yield wrong(config, _SYNC, allowed, f"set {_SYNC}=tensor", beside=field)
    if config.rollout.max_staleness > 0:
        allowed = "0: nothing is generated while a batch is trained"
        yield wrong(config, "rollout.max_staleness", allowed, "set rollout.max_staleness=0", beside=field)
    if config.trainer.replace_lost_ranks:
        allowed, fix = (
            "false: a lost rank would come back to a GPU that servers have",
            "set trainer.replace_lost_ranks=false",
        )
        yield wrong(config, "trainer.replace_lost_ranks", allowed, fix, beside=field)
    if sglang.is_quantized:
        allowed = "servers in bf16: what a quantized one keeps beside its weights would be lost with its memory"
        if sglang.fp8_blocks:
            yield wrong(config, _BLOCKS, allowed, f"set {_BLOCKS}=false", beside=field)
        else:
            got, fix = "quantization with engine.colocate", "remove quantization and load_format"
            yield wrong(config, _ARGUMENTS, allowed, fix, beside=field, got=got)
    if sglang.named_arguments.get("enable_memory_saver") is False:
        allowed = "true or unset with engine.colocate: without it a server keeps its memory"
        got, fix = "enable_memory_saver: false", "remove enable_memory_saver"
        yield wrong(config, _ARGUMENTS, allowed, fix, beside=field, got=got)
    if config.actor.megatron.get("nccl_ub"):
        allowed = "nothing: memory that NCCL registered stays"
        yield wrong(config, "actor.megatron.nccl_ub", allowed, "remove it", beside=field)
    yield from _same_gpus(config)


def _same_gpus(config: Config) -> Iterator[Problem]:
    """Yield why some GPU would not have exactly one rank of the actor and one rank of a server."""
    ranks, group, size = config.actor.world_size, config.actor.tensor_parallel, config.engine.sglang.tensor_parallel
    field, fix = "engine.sglang.tensor_parallel", f"set engine.sglang.tensor_parallel={group}"
    if size % group and group % size:
        allowed = "a divisor or a multiple of actor.tensor_parallel: a server's GPUs are those of whole groups"
        yield wrong(config, field, allowed, fix, beside="engine.colocate actor.tensor_parallel")
    elif ranks % size:
        allowed = f"a divisor of the actor's {ranks} ranks"
        yield wrong(config, field, allowed, fix, beside="engine.colocate")
    elif config.engine.replicas * size != ranks:
        allowed = f"{ranks // size}: one server's rank for each of the actor's {ranks} ranks"
        fix = f"set engine.replicas={ranks // size}"
        yield wrong(config, "engine.replicas", allowed, fix, beside=f"engine.colocate {field}")


def rotary_base(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield a config.json from which SGLang would read another rotary embedding than transformers: SGLang reads
    `rope_theta` (10000 if it is missing) and `rope_scaling`, but not `rope_parameters` by layer type (0.5.23,
    srt/configs/olmo3.py)."""
    if config.engine.kind != "sglang" or shape is None or not shape.plain_windows:
        return
    if "rope_theta" not in read_json(config.model.path / "config.json"):
        got = f"{str(config.model.path)!r}, whose config.json has no rope_theta"
        fix = "write rope_theta and rope_scaling in place of rope_parameters, as they are published"
        yield wrong(config, "model.path", "the keys that SGLang reads", fix, beside="engine.kind", got=got)


def fp8_blocks(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """Yield why servers could not take the policy's weights as fp8 blocks."""
    sglang, off = config.engine.sglang, f"set {_BLOCKS}=false"
    if config.engine.kind != "sglang" or not sglang.fp8_blocks:
        return
    if given := " and ".join(name for name in _OF_BLOCKS if name in sglang.named_arguments):
        allowed = f"without {given} in {_ARGUMENTS}: servers are started for blocks"
        yield wrong(config, _BLOCKS, allowed, f"remove {given}, or {off}", beside=_ARGUMENTS)
    if reason := sglang.transport.no_fp8_blocks:
        ways = sglang_transports(lambda way: not way.no_fp8_blocks)
        yield wrong(config, _SYNC, f"{ways}: {reason}", off, beside=_BLOCKS)
    if config.actor.precision == "fp32":
        fix = f"set actor.precision=bf16, or {off}"
        yield wrong(config, _BLOCKS, "true with actor.precision bf16 or fp8", fix, beside="actor.precision")
    capability = hardware.capability
    if hardware.fp8 is False or (capability is not None and capability >= _PACKS_SCALES):
        allowed = "GPUs of compute capability 8.9 or 9.0; from 10 on SGLang 0.5.23 packs the scales and takes no update"
        yield wrong(config, _BLOCKS, allowed, off, got=f"true on {_gpu(hardware)}")
    if shape and shape.biases:
        got = f"true with a model of type {shape.family}"
        yield wrong(config, _BLOCKS, "false where all experts are one tensor", off, beside="model.path", got=got)
    elif shape and (uneven := _uneven(shape, sglang.tensor_parallel)):
        got = f"true with {', '.join(uneven)} on each of {sglang.tensor_parallel} ranks"
        fix = f"{off}, or a smaller engine.sglang.tensor_parallel"
        beside = "engine.sglang.tensor_parallel model.path"
        yield wrong(config, _BLOCKS, f"multiples of {FP8_BLOCK}", fix, beside=beside, got=got)


def _uneven(shape: ModelShape, ranks: int) -> list[str]:
    """Return the widths that SGLang cannot cut into blocks."""
    heads = {"query heads x head_dim": shape.heads, "key/value heads x head_dim": max(shape.kv_heads, ranks)}
    widths = {what: number * shape.head_dim / ranks for what, number in heads.items()}
    widths["hidden_size"] = float(shape.hidden)
    if not shape.experts or shape.experts.dense_layers:
        widths["intermediate_size"] = shape.ffn / ranks
    if shape.experts:
        widths["width of an expert"] = shape.experts.ffn / ranks
        widths["width of shared experts"] = shape.experts.shared_ffn / ranks
    return [f"{what} {width:g}" for what, width in widths.items() if width % FP8_BLOCK]


def flash_rl(config: Config, shape: ModelShape | None, hardware: Hardware) -> Iterator[Problem]:
    """Yield why servers that quantize each update themselves could not take the policy's updates."""
    sglang = config.engine.sglang
    quantization, load_format = (sglang.named_arguments.get(name) for name in ("quantization", "load_format"))
    asked = quantization is not None or load_format == "flash_rl"
    if config.engine.kind != "sglang" or sglang.fp8_blocks or not asked:
        return
    bf16 = "remove both: servers then compute in bf16"
    if (quantization, load_format) != ("fp8", "flash_rl"):
        got = f"quantization {show(quantization)} with load_format {show(load_format)}"
        allowed = f"{_FLASH_RL}, or neither: servers that quantize in another way cannot take the policy's weights"
        yield wrong(config, _ARGUMENTS, allowed, f"set {_ARGUMENTS}={_FLASH_RL}, or remove both", got=got)
        return
    if shape and shape.family not in _FLASH_RL_FAMILIES:
        got = f"{_FLASH_RL} with a model of type {shape.family}"
        allowed = f"models of type {' or '.join(_FLASH_RL_FAMILIES)}: SGLang quantizes the updates of no other"
        yield wrong(config, _ARGUMENTS, allowed, bf16, beside="model.path", got=got)
    if sglang.transport.checkpoint:
        allowed = f"no files with {_FLASH_RL}: weights from these would be quantized twice"
        yield wrong(config, _SYNC, allowed, f"set {_SYNC}=distributed", beside=_ARGUMENTS)
    if config.actor.precision == "fp32":
        allowed, fix = f"{_FLASH_RL} with actor.precision bf16 or fp8", "set actor.precision=bf16, or remove both"
        yield wrong(config, _ARGUMENTS, allowed, fix, beside="actor.precision")
    if hardware.fp8 is False:
        got = f"{_FLASH_RL} on {_gpu(hardware)}"
        yield wrong(config, _ARGUMENTS, "GPUs of compute capability 8.9 or newer", bf16, got=got)


def _gpu(hardware: Hardware) -> str:
    return "no GPU" if hardware.kind == "cpu" else f"a GPU of compute capability {hardware.capability:g}"
