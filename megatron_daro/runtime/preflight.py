"""Everything before the first process of a run: prepares a start or a resume, and tries all that can fail.

Where a run starts, from prompts or from a recording (never that of its own directory):

    without --resume                 at step 0, in a directory that holds no run
    --resume, there is a checkpoint  at it, if the restart audit accepts that; what came after it is written again
    --resume, there is none          at step 0; all is written again

A configuration, model, data or recording that does not match the checkpoint is rejected, and config.yaml stays as it
was; otherwise config.yaml is written. RUN/restarts.txt says what a restart changes, and which change was rejected.
`train --dry-run` calls the same functions as a start, reads only the first and last rows of training files (all rows if
these are refused), writes nothing, and starts no process of the run. Classes that the configuration names are imported
here; what the run makes in worker processes is made once in such a process, which then ends.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_daro import durable
from megatron_daro.checkpoints import check_format, find_latest_valid, read_provenance, set_newer_aside
from megatron_daro.config import Config, to_yaml, yaml_text
from megatron_daro.config.base import filled
from megatron_daro.config.hardware import hardware_of
from megatron_daro.config.megatron_options import gpu_defaults
from megatron_daro.config.model_shape import CRITIC_HEADS, read_model_shape
from megatron_daro.config.rules.lora import served_config
from megatron_daro.config.sections import RewardSection
from megatron_daro.convert.weights_check import check_weights
from megatron_daro.deadlines import Deadlines
from megatron_daro.engine.own import own_engine_class
from megatron_daro.engine.sglang.interpreter import check_environments
from megatron_daro.environments.own import try_environment
from megatron_daro.errors import ConfigError, DataError, EngineError, RefusedError, RewardError, WorkerError
from megatron_daro.observe import logs
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.factory import own_verifier_class
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.protocol import Notices
from megatron_daro.rollout.replay import ReplaySource
from megatron_daro.runtime import restart_audit, run_directory
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.inputs import read_inputs
from megatron_daro.runtime.provenance import provenance
from megatron_daro.runtime.run_algorithm import algorithm_of, algorithm_remarks
from megatron_daro.runtime.run_directory import LOCK_FILE, require_usable

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Start:
    """provenance: what the run is made of. checkpoint, state: where it goes on; None and empty for a start from the
    beginning.

    begins_again: an earlier start reached no checkpoint, so what it wrote is discarded and written again.
    """

    provenance: Mapping[str, Any]
    checkpoint: Path | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    begins_again: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state.get("step", 0))


def with_template_date(config: Config, *, resume: bool) -> Config:
    """Return the configuration with the date that chat templates take for today: the one that is set, else that of the
    resumed run, else today's. With another date the prompts would be others."""
    if config.data.template_date is not None:
        return config
    saved, date = filled(config.trainer.run_dir) / CONFIG_FILE, datetime.date.today()
    if resume and saved.is_file():
        values = yaml_text.parse(saved.read_text(encoding="utf-8"), str(saved)).value
        of_run = values.get("data", {}).get("template_date") if isinstance(values, dict) else None
        date = datetime.date.fromisoformat(of_run) if of_run else date
    return config.model_copy(update={"data": config.data.model_copy(update={"template_date": date})})


def begin(run: RunContext, *, resume: bool, replay: Path | None, width: int) -> Start:
    """Find where to start, report what a restart changes, and write config.yaml.

    Args:
        run: its directory is owned by this process.
        resume: go on from the newest whole checkpoint, if there is one.
        replay: the run whose recording is trained on; None: the run generates.
        width: columns of the terminal, for the table of changes.

    Raises:
        CheckpointError: no checkpoint is whole or of this format, or the checkpoint belongs to another run:
            restarts.txt says why.
    """
    run_dir, progress = run.run_dir, run.progress
    made_of = provenance(run.config, replay)
    start = Start(made_of)
    newest = find_latest_valid(run_dir, progress) if resume else None
    if newest:
        audit = compared(*newest, made_of, progress)
        if audit:
            restart_audit.record(run_dir, audit.text())
            for line in audit.text(width).splitlines():
                progress.notice(line)
            audit.raise_refused()
        set_newer_aside(newest[0])
        start = Start(made_of, *newest)
    elif resume:
        progress.notice(f"{run_dir} has no checkpoint yet: starting from step 0; what it recorded is written again")
        start = Start(made_of, begins_again=True)
    durable.replace(run_dir / CONFIG_FILE, to_yaml(run.config))
    return start


def compared(
    checkpoint: Path, state: Mapping[str, Any], provenance: Mapping[str, Any], notices: Notices
) -> restart_audit.Audit | None:
    """Return what differs between a checkpoint's run and this one; None, with a warning, if the checkpoint does not
    describe its run. Raises CheckpointError: it is of another format."""
    check_format(checkpoint, state)
    saved = read_provenance(checkpoint)
    if saved is None:
        notices.warn(f"{checkpoint} does not say what its run was made of, so changes since then are not known")
        return None
    return restart_audit.audit(checkpoint, saved, provenance)


_ASK_S = 10.0
ENDS = 100
"""Rows that a dry run reads at each end of a training file."""


def dry_run(config: Config, *, resume: bool, replay: Path | None) -> list[str]:
    """Try everything that can be tried before the first process of a run.

    Args:
        config: checked. resume, replay: as for the start.

    Returns:
        What was found, one line each.

    Raises:
        DaroError: the error with which the start would end.
    """
    config, lines = with_template_date(config, resume=resume), _Lines()
    for remark in algorithm_remarks(config, algorithm_of(config), generates=replay is None):
        lines.warn(remark)
    _tell_gpu_defaults(config, lines)
    elsewhere = config.cluster.gpus_per_node is not None
    check_start(config, resume=resume, replay=replay, elsewhere=elsewhere)
    if replay is None and elsewhere:
        _try_for_other_nodes(config, lines)
    if replay:
        ReplaySource(
            replay,
            section=config.trainer,
            rollouts_per_prompt=config.rollout.rollouts_per_prompt,
            deadlines=Deadlines(),
        )
        lines.notice(f"replay: {replay}")
    else:
        _read_inputs(config, lines)
    if resume:
        _compare_with_checkpoint(config, replay, lines)
    return list(lines)


def _tell_gpu_defaults(config: Config, lines: _Lines) -> None:
    """Report which Megatron options are added for ranks on GPUs."""
    actor = config.actor
    shape = read_model_shape(config.model.path)
    on_engine = actor.precision != "fp32" and not shape.local_layers
    if chosen := gpu_defaults(actor, experts=shape.experts is not None, transformer_engine=on_engine):
        named = ", ".join(f"{name}={str(value).lower()}" for name, value in chosen.items())
        lines.notice(f"on GPUs actor.megatron has {named} as well, unless it says otherwise")


def _try_for_other_nodes(config: Config, found: _Lines) -> None:
    """Report what environments and servers lack here: a login node need not have what the cluster's nodes have."""
    tries = [("the environment was", partial(try_environment, one)) for one in config.all_environments if one.has_turns]
    if config.engine.kind == "sglang":
        tries.append(("the servers were", partial(_try_servers, config)))
    for what, attempt in tries:
        try:
            attempt()
        except (ConfigError, EngineError) as error:
            words = " ".join(str(error).split())
            found.warn(f"{what} not checked: this machine is none of `cluster`, whose nodes must pass. {words}")


def _read_inputs(config: Config, lines: _Lines) -> None:
    inputs = _Lines()
    try:
        read_inputs(config, inputs, ends=ENDS)
        lines += [f"the first and last {ENDS} rows of training files were read", *inputs]
    except DataError:
        # These rows alone may be wrong in a way that the whole file is not.
        read_inputs(config, lines)


def _compare_with_checkpoint(config: Config, replay: Path | None, lines: _Lines) -> None:
    newest = find_latest_valid(filled(config.trainer.run_dir), lines)
    audit = compared(*newest, provenance(config, replay), lines) if newest else None
    if audit:
        audit.raise_refused()
        lines += audit.text().splitlines()


def check_start(config: Config, *, resume: bool, replay: Path | None, elsewhere: bool = False) -> None:
    """Refuse what a start refuses before it reads training files or writes anything.

    Args:
        config: checked.
        resume: whether the run directory must be there; else it must hold no run.
        replay: the run whose recording is trained on; None: an engine generates.
        elsewhere: the run is for other machines; only these can tell whether environments and servers work.

    Raises:
        ConfigError: a field that cannot work here. CheckpointError: another process uses the run directory, or
            Megatron weights do not fit.
        EngineError: a server that runs already does not answer. ModelError: weights that do not fit config.json, or
            `sync: shards` between layouts without a plan.
    """
    run_dir, generates = filled(config.trainer.run_dir), replay is None
    if replay and replay.resolve() == run_dir.resolve():
        raise ConfigError(
            f"--replay: got {str(replay)!r}, which is trainer.run_dir, so this run would write over its recording; "
            "allowed: a run in another directory; fix: set another trainer.run_dir, or name the other run"
        )
    require_usable(run_dir, resume=resume)
    run_directory.require_replaceable_export(config.trainer)
    _look_at_weights(config)
    if generates and config.engine.is_own:
        own_engine_class(config.engine.kind, {"model_path": config.model.path, **config.engine.own_arguments})
    if generates:
        VerifierSpec.of_section(config.reward)
    if generates and config.reward.is_own:
        _make_own_verifier(config.reward)
    for section in config.all_environments if generates and not elsewhere else ():
        if section.has_turns:
            try_environment(section)
    if generates and config.engine.kind == "sglang":
        if not elsewhere:
            _try_servers(config)
        if config.engine.sglang.transport.shard_plan:
            _plan_shards(config)
    if _megatron_looks_at_options(config):
        from megatron_daro.actor.translation import check_megatron_options

        check_megatron_options(config.actor, read_model_shape(config.model.path))


def _look_at_weights(config: Config) -> None:
    """Compare the headers of the weights that a run begins with to config.json. Raises ModelError, or CheckpointError
    for Megatron weights."""
    shape, critic = read_model_shape(config.model.path), config.algorithm.critic.path
    if config.model.megatron_weights is None:
        check_weights(config.model.path, shape)
    else:
        from megatron_daro.convert.megatron_weights import MegatronWeights

        MegatronWeights(config.model.megatron_weights, shape).close()
    if critic is not None:
        check_weights(critic, read_model_shape(critic, CRITIC_HEADS), critic=True)


def _plan_shards(config: Config) -> None:
    """Check that there is a plan from the policy's layout to the servers'. Raises ModelError: there is none."""
    from megatron_daro.engine.sglang.engine import layout_of_servers
    from megatron_daro.runtime.shard_export import trainer_layout
    from megatron_daro.sync.shard_plan import ShardPlan

    shape = read_model_shape(config.model.path)
    trainer = trainer_layout(shape, config.actor, fused_norms=True, grouped_experts=True)
    ShardPlan(shape, trainer, layout_of_servers(config.engine.sglang, config.model.path), 1)


def _make_own_verifier(section: RewardSection) -> None:
    """Make the user's verifier once, in a worker process like the run's. Raises ConfigError."""
    own_verifier_class(section.verifier, section.options)
    try:
        with RewardPool.from_section(section.model_copy(update={"workers": 1})):
            pass
    except RewardError as error:
        raise ConfigError(str(error)) from error


def _try_servers(config: Config) -> None:
    """Check the servers' environment, and query servers that run already. Raises ConfigError, EngineError."""
    check_environments(config.engine.sglang)
    if config.engine.sglang.urls:
        asyncio.run(_ask_servers(config))


async def _ask_servers(config: Config) -> None:
    """Refuse servers that do not answer, are not SGLang servers, or cannot take the adapters; accept those that are
    still starting. Raises EngineError for the first."""
    from megatron_daro.engine.sglang.adapters import unfit_for
    from megatron_daro.engine.sglang.client import SGLangClient, UnreachableError
    from megatron_daro.engine.sglang.starting import still_starts, unusable

    adapter = served_config(config)

    async def ask(url: str) -> None:
        async with SGLangClient(url) as client:
            try:
                facts = await client.facts(timeout_s=_ASK_S)
                if adapter and (reasons := unfit_for(adapter, facts)):
                    raise EngineError(f"engine.sglang.urls: {url} cannot be used: {reasons[0]}")
            except UnreachableError as error:
                if not still_starts(error):
                    raise unusable(url, error) from None
            except RefusedError as error:
                raise unusable(url, error) from None

    await asyncio.gather(*map(ask, config.engine.sglang.urls))


def _megatron_looks_at_options(config: Config) -> bool:
    """Whether Megatron options are set and the ranks will be on this machine; another machine may have what the options
    need."""
    return bool(config.actor.megatron) and not os.environ.get("RAY_ADDRESS") and hardware_of(config.cluster) is None


@contextmanager
def taken_back_if_it_fails(run_dir: Path) -> Iterator[None]:
    """If an error ends the block before anything happened in the run directory, empty it, and remove it if the block
    made it.

    Logs of servers and anything trained stay, and so does everything in a directory that was not empty before, or after
    the failure of a process, whose message names its log.
    """
    created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    was_empty = bool(created) or not any(run_dir.iterdir())
    try:
        yield
    except WorkerError:
        raise
    except BaseException:
        if was_empty and run_dir.is_dir() and not any(_says_something(run_dir, path) for path in run_dir.rglob("*")):
            for path in run_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            with suppress(OSError):
                for path in created:
                    path.rmdir()
        raise


def _says_something(run_dir: Path, path: Path) -> bool:
    """Whether a file is more than what every start writes first: configuration, lock, header of the events, and logs
    without an error that the start's own error does not tell."""
    if not path.is_file() or not path.stat().st_size:
        return False
    folder = path.relative_to(run_dir).parts[0]
    if folder == logs.FOLDER and not path.name.startswith("server_"):
        return path.name != logs.file_name("driver") and b" ERROR " in path.read_bytes()
    return not (path.parent == run_dir and path.name in (CONFIG_FILE, LOCK_FILE)) and folder != "tensorboard"


class _Lines(list[str]):
    """Collects notices and warnings as lines."""

    def notice(self, message: str) -> None:
        self.append(message)

    def warn(self, message: str) -> None:
        self.append(f"warning: {message}")
