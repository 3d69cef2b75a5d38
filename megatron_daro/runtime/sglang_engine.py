"""The SGLang engine of a run, made from its configuration: servers (ray_servers.py) and answer workers
(answer_workers.py).

Before any server starts, interpreters, packages and argument names that cannot work are rejected with the field that is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from megatron_daro.config.base import filled
from megatron_daro.config.model_shape import read_json, read_model_shape
from megatron_daro.config.rules.lora import served_config
from megatron_daro.config.sections import Config
from megatron_daro.engine.sglang import fp8_blocks
from megatron_daro.engine.sglang.adapters import lora_arguments
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.engine.sglang.interpreter import check_environments, interpreter
from megatron_daro.engine.sglang.probe import probe_text
from megatron_daro.engine.sglang.servers import ExternalServer, LaunchOptions, ServerHandle
from megatron_daro.engine.sglang.vetting import Expected
from megatron_daro.observe import logs
from megatron_daro.runtime.answer_workers import AnswerWorkers
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.ray_servers import RayServer


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """How the trainer's tokenizer reads text, the number of its tokens, and whether answers end at texts."""

    encode: Callable[[str], list[int]]
    vocabulary: int
    stops: bool = False


def sglang_engine(run: RunContext, tokenizer: TokenizerFacts, placement: Placement) -> SGLangEngine:
    """Return the engine of a run, with its servers and answer workers; start nothing, but check the interpreters.

    Args:
        tokenizer: the trainer's. placement: where servers go.

    Raises:
        ConfigError: an interpreter without what it needs, or arguments that its SGLang does not know. ModelError: as in
            `SGLangEngine`.
    """
    config, options = run.config, run.config.engine.sglang
    check_environments(options)
    rollout, model_path = config.rollout, config.model.path.absolute()
    model = read_json(model_path / "config.json")
    expected = Expected(
        model_path=model_path,
        model_type=model["model_type"],
        longest_prompt=config.data.max_prompt_tokens,
        longest=config.data.max_prompt_tokens + rollout.max_response_tokens,
        encode=tokenizer.encode,
        vocabulary=model.get("vocab_size"),
        shares_gpus=placement.shares_gpus,
        reads_text=tokenizer.stops,
        adapter=served_config(config),
    )
    return SGLangEngine(
        _handles(run, placement, reads_text=tokenizer.stops),
        options,
        expected,
        asker=AnswerWorkers(run),
        warn=run.progress.warn,
        loads=partial(run.progress.stage, "engine"),
        run_dir=run.run_dir,
        seed=filled(config.engine.seed),
        temperature=rollout.temperature,
        probe_tokens=probe_text(
            min(tokenizer.vocabulary, model.get("vocab_size") or tokenizer.vocabulary),
            longest=config.data.max_prompt_tokens,
        ),
    )


def _handles(run: RunContext, placement: Placement, *, reads_text: bool) -> Mapping[str, ServerHandle]:
    config, options = run.config, run.config.engine.sglang
    if options.urls:
        return {f"server {i} ({url})": ExternalServer(url) for i, url in enumerate(options.urls)}
    # The engine speaks in token ids: without a tokenizer a server starts sooner and does less per answer.
    arguments = {"dtype": config.actor.torch_dtype, "skip_tokenizer_init": not reads_text, **options.named_arguments}
    if config.actor.routing_replay:
        arguments = {"enable_return_routed_experts": True, **arguments}
    if options.fp8_blocks:
        arguments |= fp8_blocks.fp8_arguments()
    if adapter := served_config(config):
        arguments = {**lora_arguments(adapter, on_cpu=arguments.get("device") == "cpu"), **arguments}
    if config.model.trust_remote_code:
        arguments = {"trust_remote_code": True, **arguments}
    first = LaunchOptions(
        python=interpreter(options),
        model_path=config.model.path.absolute(),
        tensor_parallel=options.tensor_parallel,
        seed=filled(config.engine.seed),
        arguments=arguments,
        env=options.env,
        log_path=run.log_dir,
        parts=options.nodes,
        maps_memory=options.transport.maps_memory,
        loader=options.transport.loader,
    )
    return {
        f"server {i}": RayServer(
            _parts(first, i),
            partial(placement.server, i),
            partial(placement.gpus_of_server, i),
            run.deadlines.workers_start,
        )
        for i in range(config.engine.replicas)
    }


def _parts(common: LaunchOptions, number: int) -> list[LaunchOptions]:
    """Return the options of each process of a server. common: those of all servers; log_path: the folder of logs."""
    names = [f"server {number}", *(f"server {number} part {part}" for part in range(1, common.parts))]
    seed = common.seed + number  # equal seeds would give equal answers to equal prompts
    return [
        replace(common, seed=seed, part=part, log_path=common.log_path / logs.file_name(name))
        for part, name in enumerate(names)
    ]


def routed_experts_shape(config: Config) -> tuple[int, int] | None:
    """Return (layers, experts per token) if the engine is to report which experts it chose; else None."""
    shape = read_model_shape(config.model.path) if config.actor.routing_replay else None
    return (shape.layers, shape.experts.chosen) if shape and shape.experts else None
