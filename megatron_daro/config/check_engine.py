"""Checks of the engine: its options, SGLang servers and how weights reach them, replayed experts, seeds."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_daro.config.base import filled
from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_shape import ModelShape
from megatron_daro.config.problems import Problem
from megatron_daro.config.sections import Config

_NUMPY_SEEDS = 2**32


def engine(config: Config, hardware: Hardware) -> Iterator[Problem]:
    """Options of an engine belong to the engine that runs, and fit each other."""
    section, sglang = config.engine, config.engine.sglang
    if section.options and not section.is_own:
        got, allowed = f"{', '.join(section.options)} with engine.kind {section.kind}", "options of module:Class only"
        yield Problem("engine.options", got, allowed, "remove them", also=("engine.kind",))
    reserved = sorted({"model_path", "replicas", "seed"} & set(section.options))
    if reserved:
        got, allowed = ", ".join(reserved), "other names: the run fills these in"
        yield Problem("engine.options", got, allowed, "set engine.replicas and engine.seed")
    if section.kind != "sglang":
        given = [name for name, value in sglang if value != getattr(type(sglang)(), name)]
        if given:
            got = f"{', '.join(given)} with engine.kind {section.kind}, which would not use them"
            fix = "set engine.kind=sglang or remove them"
            yield Problem("engine.sglang", got, "options only with engine.kind sglang", fix, also=("engine.kind",))
        return
    field = "engine.sglang"
    started = [name for name in ("python", "arguments", "env") if getattr(sglang, name)]
    if sglang.urls and started:
        got = f"{len(sglang.urls)} servers that run already, and {', '.join(started)} for servers to be started"
        also = tuple(f"{field}.{name}" for name in started)
        yield Problem(f"{field}.urls", got, "one or the other", f"remove {field}.{started[0]}", also=also)
    for index, url in enumerate(sglang.urls):
        if not _has_port(url):
            yield Problem(f"{field}.urls.{index}", repr(url), "a port from 1 to 65535, or none", "correct the port")
    if len(set(sglang.urls)) < len(sglang.urls):
        yield Problem(f"{field}.urls", "a URL twice", "each server once", "remove the repetition")
    if sglang.sync == "tensor" and (hardware.kind != "gpu" or sglang.urls):
        got = "tensor " + ("with servers that run elsewhere" if sglang.urls else "on a machine without a GPU")
        allowed = "tensor for servers of this job on GPUs of the same host; else distributed or disk"
        yield Problem(f"{field}.sync", got, allowed, f"set {field}.sync=distributed", also=(f"{field}.urls",))
    if sglang.sync == "shards":
        yield from _shards(config)
    yield from _server_nodes(config)
    if sglang.shards_over != "tcp" and sglang.sync != "shards":
        got = f"{sglang.shards_over} with sync {sglang.sync}"
        yield Problem(f"{field}.shards_over", got, "only with sync shards", f"set {field}.sync=shards or remove it")
    if sglang.sync_dir and sglang.sync != "disk":
        got = f"{str(sglang.sync_dir)!r} with sync {sglang.sync}"
        yield Problem(f"{field}.sync_dir", got, "only with sync disk", f"set {field}.sync=disk or remove it")


def _has_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _shards(config: Config) -> Iterator[Problem]:
    """Yield what keeps weights from going from shards to shards, beside layouts that sync/shard_layouts.py refuses."""
    sglang, field = config.engine.sglang, "engine.sglang.sync"
    fix = f"set {field}=distributed"
    if sglang.urls:
        allowed = "shards with servers that the run starts: they need its loader"
        yield Problem(field, "shards with servers that run already", allowed, fix, also=("engine.sglang.urls",))
    if sglang.fp8_blocks:
        allowed = "shards with servers in bf16: blocks of 128 x 128 reach over shards"
        yield Problem(field, "shards with fp8 blocks", allowed, fix, also=("engine.sglang.fp8_blocks",))


def _server_nodes(config: Config) -> Iterator[Problem]:
    """Yield what keeps a server from being spread over several nodes."""
    sglang, field = config.engine.sglang, "engine.sglang.nodes"
    if sglang.nodes == 1:
        return
    if sglang.tensor_parallel % sglang.nodes:
        got = f"{sglang.nodes} with tensor_parallel {sglang.tensor_parallel}"
        fix, also = f"set engine.sglang.tensor_parallel={sglang.nodes}, or more", ("engine.sglang.tensor_parallel",)
        yield Problem(field, got, "a divisor of engine.sglang.tensor_parallel", fix, also=also)
    if sglang.sync == "tensor":
        got, fix = f"{sglang.nodes} with sync tensor", "set engine.sglang.sync=distributed"
        yield Problem(field, got, "1: memory is handed over inside a node only", fix, also=("engine.sglang.sync",))
    if sglang.urls:
        got = f"{sglang.nodes} with servers that run already"
        yield Problem(field, got, "1: they are spread as they were started", "remove it", also=("engine.sglang.urls",))
    if config.engine.colocate:
        got, fix = f"{sglang.nodes} with engine.colocate", "remove it, or set engine.colocate=false"
        yield Problem(field, got, "1: a server shares the GPUs of ranks of one node", fix, also=("engine.colocate",))


def routing_replay(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """There are experts, an engine that tells which it chose, and a router that can be told."""
    field = "actor.routing_replay"
    if not config.actor.routing_replay:
        return
    if config.engine.kind != "sglang":
        got, allowed = (
            f"true with engine.kind {config.engine.kind}",
            "true with SGLang, which tells the experts it chose",
        )
        yield Problem(field, got, allowed, "set engine.kind=sglang, or remove it", also=("engine.kind",))
    if shape and not shape.experts:
        yield Problem(field, "true, but the model has no experts", "false", "remove it", also=("model.path",))
    if config.actor.megatron.get("moe_router_fusion"):
        fused, allowed = "actor.megatron.moe_router_fusion", "false: the fused router chooses by itself"
        yield Problem(fused, "true with routing_replay", allowed, "remove one of them", also=(field,))


def server_seeds(config: Config) -> Iterator[Problem]:
    """Each server has a seed of its own, which it hands to numpy."""
    section = config.engine
    if section.kind == "sglang" and not section.sglang.urls and filled(section.seed) + section.replicas > _NUMPY_SEEDS:
        fix = f"set engine.seed to a number up to {_NUMPY_SEEDS - section.replicas}"
        allowed = f"seeds of {section.replicas} SGLang servers, one after the other, below 2^32"
        yield Problem("engine.seed", str(section.seed), allowed, fix, also=("engine.kind", "engine.replicas"))
