"""Sync of a 0.5-billion-parameter bf16 model to two SGLang servers against a bare broadcast of the same bytes; of
adapters alone against the whole weights.

    OMP_NUM_THREADS=1 python benchmarks/sglang_sync.py --rounds 9 --json      # about 3 minutes on 2 cores, 13 GiB
    OMP_NUM_THREADS=1 python benchmarks/sglang_sync.py --sync shards --rounds 9 --json    # from shards to shards
    OMP_NUM_THREADS=1 python benchmarks/sglang_sync.py --sync adapters --rounds 9 --json    # against `distributed`

The shape is that of Qwen2 0.5B with random weights. A Megatron actor (one rank, a Ray actor, with gradients and
optimizer) sends to two CPU servers over gloo. The bare side is torch.distributed.broadcast over gloo, in buckets of the
same size, from one plain process to two others that do nothing with them. Both take turns; medians are compared.
Two times are taken of ours: "send" is gathering, broadcasting and loading (a server answers when it has loaded a
bucket), without the making of the group, which the first update does; "update" is the whole transaction, from pause to
the comparison of log-probs, where each server scores 64 tokens and samples 16. The goal of twice the bare time (1.3
times from shards to shards, where each server gets its own copy over TCP) is for "send"; that of the exporting
process's peak extra memory is two buckets.
Adapters (rank 8, of all matrices) go to two servers that keep their base, and the other side is the same policy's
merged weights, broadcast to two more servers; the goals are a quarter of the time of "send", a tenth of the bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import harness
import ray
import sglang_servers
import torch
import torch.distributed as dist
from harness import PeakMemory

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config import Config
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.config.lora import LoraSection, peft_config
from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.config.sections import DataSection, ModelSection, SGLangSection, TrainerSection
from megatron_daro.config.transports import TRANSPORTS
from megatron_daro.engine.sglang.adapters import lora_arguments
from megatron_daro.engine.sglang.asking import DirectAsker
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.probe import probe_text
from megatron_daro.engine.sglang.update import CPU_BUCKET_MIB, ServerUpdate
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.observe.phases import Phases
from megatron_daro.observe.progress import Progress
from megatron_daro.runtime import parts
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.policy_group import PolicyGroup
from megatron_daro.sync.publish import WeightSync

TIME_GOAL, MEMORY_GOAL, BYTES_GOAL = {"distributed": 2.0, "shards": 1.3, "adapters": 0.25}, 2.0, 0.1
# Pages of the allocator, of messages and of the forward pass of 16 tokens: what two buckets may be exceeded by.
_MEMORY_MARGIN = 16 * 2**20
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_LIMIT_S = 600.0
_LORA = LoraSection(rank=8)


def parse_arguments() -> argparse.Namespace:
    parser = sglang_servers.arguments_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--bucket-mib", type=int, default=CPU_BUCKET_MIB)
    parser.add_argument("--sync", default="distributed", choices=tuple(TIME_GOAL))
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="of the model")
    return parser.parse_args()


class Bare:
    """Three plain processes; the first broadcasts to the others when told."""

    def __init__(self, sizes: Sequence[int], directory: Path) -> None:
        """Args: sizes: bytes of each bucket."""
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in range(3):
            ours, theirs = context.Pipe()
            arguments = (rank, list(sizes), f"file://{directory / 'ranks'}", theirs)
            self._processes.append(context.Process(target=_bare_rank, args=arguments, daemon=True))
            self._pipes.append(ours)
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            self._received(pipe)

    def run(self) -> float:
        """Seconds of one broadcast of all buckets, from a barrier to a barrier."""
        for pipe in self._pipes:
            pipe.send("go")
        return max(self._received(pipe) for pipe in self._pipes)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def _received(self, pipe: Any) -> float:
        if not pipe.poll(_LIMIT_S):
            raise SystemExit(f"a process of the bare broadcast did not answer within {_LIMIT_S:g} s")
        return pipe.recv()


def _bare_rank(rank: int, sizes: list[int], init_method: str, pipe: Any) -> None:
    """A process of the bare side. The sender has all buckets, as the actor has all weights; receivers reuse one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=3)
    room = torch.ones(sum(sizes) if rank == 0 else max(sizes), dtype=torch.uint8)
    starts = [sum(sizes[:i]) if rank == 0 else 0 for i in range(len(sizes))]
    buckets = [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    pipe.send(0.0)
    while pipe.recv() == "go":
        dist.barrier()
        started = time.perf_counter()
        for bucket in buckets:
            dist.broadcast(bucket, 0)
        dist.barrier()
        pipe.send(time.perf_counter() - started)


class PhaseTimes:
    """Seconds of each phase of the engine's updates, and of the sending between them."""

    def __init__(self, policy: PolicyGroup) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        phase, export, seconds = ServerUpdate._phase, policy.export, self.seconds

        async def timed_phase(self: ServerUpdate, name: str, work: Any) -> None:
            started = time.perf_counter()
            await phase(self, name, work)
            seconds[name].append(time.perf_counter() - started)

        async def timed_export(plan: Any) -> Any:
            started = time.perf_counter()
            report = await export(plan)
            seconds["send"].append(time.perf_counter() - started)
            return report

        ServerUpdate._phase = timed_phase  # type: ignore[method-assign]
        policy.export = timed_export  # type: ignore[method-assign]


def make_engine(arguments: argparse.Namespace, sync: Any, model: Path, directory: Path) -> SGLangEngine:
    """Two servers, not started."""
    adapter = peft_config(_LORA, read_model_shape(model), str(model)) if TRANSPORTS[sync].adapters else {}
    handles = {
        f"server {i}": sglang_servers.server(
            sglang_servers.require(arguments.python),
            model,
            directory / f"{sync}_{i}.log",
            seed=i,
            loader=TRANSPORTS[sync].loader,
            dtype="bfloat16",
            max_total_tokens=1024,
            max_running_requests=4,
            **(lora_arguments(adapter, on_cpu=True) if adapter else {}),
        )
        for i in range(2)
    }
    options = SGLangSection(
        sync=sync,
        arguments={"device": "cpu"},
        bucket_mib=arguments.bucket_mib,
        start_timeout_s=900,
        stall_timeout_s=300,
        sync_timeout_s=300,
        max_restarts=0,
    )
    return SGLangEngine(
        handles,
        options,
        Expected(model, "qwen2", 64, 128, adapter=adapter),
        asker=DirectAsker(lambda ids: ""),
        warn=print,
        run_dir=directory,
        seed=0,
        temperature=1.0,
        probe_tokens=probe_text(16_384, longest=64),
    )


async def make_policy(model: Path, lora: LoraSection) -> PolicyGroup:
    """One rank with everything that training needs."""
    config = Config(
        model=ModelSection(path=model),
        data=DataSection(train=(model,)),
        actor=ActorSection(precision="bf16"),
        trainer=TrainerSection(seed=0, run_dir=model.parent / "run"),
    )
    progress = Progress(total_steps=1, rollouts_per_prompt=2, mode="off")
    settings = PolicySettings(
        model, rollouts_per_prompt=2, max_response_tokens=64, temperature=1.0, total_steps=1, lora=lora
    )
    run = RunContext.of(config, progress, Phases())
    placement = parts.placement(run, engines=False)
    await placement.start()
    return PolicyGroup(run, settings, AlgorithmSection(), placement)


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Raw numbers of all rounds."""
    model = directory / "model"
    parameters = make_model(arguments, model)
    engine, policy = make_engine(arguments, arguments.sync, model, directory), await make_policy(model, LoraSection())
    bare = None
    try:
        await asyncio.gather(engine.start(), policy.start())
        memory = memory_of(policy)
        sync = WeightSync(policy, engine)
        first = await one_update(sync, 0, memory)  # joins the group
        copies = 2 if arguments.sync == "shards" else 1
        if first["bytes"] != copies * 2 * parameters:
            raise SystemExit(f"{first['bytes']} bytes were sent; {copies} x {2 * parameters} are the model")
        bare = Bare(bucket_sizes(model, arguments.bucket_mib * 2**20), directory)
        bare.run()
        phases, rounds = PhaseTimes(policy), []
        for number in range(1, arguments.rounds + 1):
            bare_s = bare.run()
            rounds.append(await one_update(sync, number, memory) | {"bare_s": bare_s})
    finally:
        with suppress(Exception):
            await engine.close()
        await policy.close()
        if bare:
            bare.close()
    return {"parameters": parameters, "first": first, "rounds": rounds, "phases": dict(phases.seconds)}


async def measure_adapters(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Numbers of all turns of adapters, and of the same policy's merged weights."""
    model = directory / "model"
    parameters = make_model(arguments, model)
    engines = {sync: make_engine(arguments, sync, model, directory) for sync in ("adapters", "distributed")}
    policy, rounds = await make_policy(model, _LORA), defaultdict(list)
    try:
        await asyncio.gather(policy.start(), *(engine.start() for engine in engines.values()))
        memory, syncs = memory_of(policy), {name: WeightSync(policy, engine) for name, engine in engines.items()}
        for version, (name, counts) in enumerate(harness.turns(syncs, arguments.rounds)):
            update = await one_update(syncs[name], version, memory)
            if counts:
                rounds[name].append(update)
    finally:
        with suppress(Exception):
            await asyncio.gather(*(engine.close() for engine in engines.values()))
        await policy.close()
    return {"parameters": parameters, "rounds": dict(rounds)}


def make_model(arguments: argparse.Namespace, model: Path) -> int:
    """Write the model of both sides. Returns its number of parameters."""
    return sglang_servers.save_model(model, {**SHAPE, "num_hidden_layers": arguments.layers}, "bfloat16")


def memory_of(policy: PolicyGroup) -> PeakMemory:
    """Of the one rank."""
    (worker,) = policy.ranks.workers.values()
    return PeakMemory(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))


async def one_update(sync: WeightSync, version: int, memory: PeakMemory) -> dict[str, float]:
    """One update of both servers. Raises SystemExit unless both took it."""
    memory.reset()
    started = time.perf_counter()
    metrics = await sync.publish(version)
    seconds = time.perf_counter() - started
    if metrics["sync/servers"] != 2:
        raise SystemExit(f"only {metrics['sync/servers']:g} servers took the weights of version {version}")
    return {
        "update_s": seconds,
        "send_s": metrics["timing/sync_send_s"],
        "bytes": metrics["sync/bytes"],
        "extra_bytes": memory.extra_bytes(),
    }


def bucket_sizes(model: Path, limit: int) -> list[int]:
    """Bytes of the buckets as the sender makes them, if tensors came in the order of the file."""
    from safetensors import safe_open

    sizes: list[int] = []
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dictionary)
            nbytes = file.get_tensor(name).nbytes
            if sizes and sizes[-1] + nbytes <= limit:
                sizes[-1] += nbytes
            else:
                sizes.append(nbytes)
    return sizes


def summarized(arguments: argparse.Namespace, raw: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios."""
    medians = {key: median(r[key] for r in raw["rounds"]) for key in ("bare_s", "send_s", "update_s")}
    bucket = arguments.bucket_mib * 2**20
    extra = max(r["extra_bytes"] for r in [raw["first"], *raw["rounds"]])
    return {
        "setup": {**sglang_servers.setup_of(arguments), "parameters": raw["parameters"]},
        **medians,
        "send_ratio": medians["send_s"] / medians["bare_s"],
        "update_ratio": medians["update_s"] / medians["bare_s"],
        "bucket_bytes": bucket,
        "peak_extra_bytes": extra,
        "peak_extra_buckets": extra / bucket,
        "phases_s": {name: median(values) for name, values in raw["phases"].items()},
        "first": raw["first"],
        "turns": raw["rounds"],
    }


def summarized_adapters(arguments: argparse.Namespace, raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, and those of the ratios of neighbours."""
    sides = {name: harness.medians(turns) for name, turns in raw["rounds"].items()}
    both = [raw["rounds"][name] for name in ("adapters", "distributed")]
    ratios = {
        f"{key}_ratio": harness.median_of_ratios(*([turn[key] for turn in side] for side in both))
        for key in ("bytes", "send_s", "update_s")
    }
    setup = {**sglang_servers.setup_of(arguments), "parameters": raw["parameters"], "rank": _LORA.rank}
    return {"setup": setup, **sides, **ratios, "turns": raw["rounds"]}


def show(result: dict[str, Any]) -> None:
    """The tables."""
    names = {"bare_s": "bare broadcast", "send_s": "send and load", "update_s": "whole update"}
    rows = {name: [result[key], result[key] / result["bare_s"]] for key, name in names.items()}
    title = f"{result['setup']['parameters']:,} parameters in bf16"
    harness.table(title, ("seconds, median", "of bare"), rows)
    phases = {name: [seconds] for name, seconds in result["phases_s"].items()}
    harness.table("phases of the update", ("seconds, median",), phases)
    print(f"peak extra memory of the exporting process: {result['peak_extra_bytes'] / 2**20:.0f} MiB")


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the bare side's processes have it too
    with_adapters = arguments.sync == "adapters"
    run, summary = (measure_adapters, summarized_adapters) if with_adapters else (measure, summarized)
    with tempfile.TemporaryDirectory(prefix="sglang_sync_") as name, cluster(1):
        result = summary(arguments, asyncio.run(run(arguments, Path(name))))
    if with_adapters:
        columns = ("bytes", "send_s", "update_s")
        rows = {name: [result[name][column] for column in columns] for name in ("adapters", "distributed")}
        harness.table("medians of a sync to two servers", columns, rows)
        problems = harness.at_most("bytes over the whole weights'", result["bytes_ratio"], BYTES_GOAL)
        problems += harness.at_most("send over the whole weights'", result["send_s_ratio"], TIME_GOAL["adapters"])
        print(f"update over the whole weights': {result['update_s_ratio']:.3g}")
        harness.conclude("sglang_sync_adapters", result, problems, write=arguments.json)
        return
    show(result)
    problems = harness.at_most("send over the bare broadcast", result["send_ratio"], TIME_GOAL[arguments.sync])
    most = MEMORY_GOAL + _MEMORY_MARGIN / result["bucket_bytes"]
    problems += harness.at_most("peak extra memory, buckets", result["peak_extra_buckets"], most)
    name = "sglang_sync" if arguments.sync == "distributed" else f"sglang_sync_{arguments.sync}"
    harness.conclude(name, result, problems, write=arguments.json)


if __name__ == "__main__":
    main()
