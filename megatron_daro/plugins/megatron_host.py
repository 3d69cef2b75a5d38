"""What the adapters of Megatron hosts share: sums over Megatron's ranks, and DARO's state beside its checkpoints.

An adapter calls `keep_state` once, before the checkpoint is loaded. The state is a file in the checkpoint's folder; it
is saved and loaded even with --no-save-optim and --no-load-optim.
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_daro.config.problems import Problem, show
from megatron_daro.plugins.core import STATE_FILE, DifficultyStep, Reduce, over_group, resume, save_state

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file beside the folders of its checkpoints; it names the newest one."""

Session = Callable[[], tuple[DifficultyStep, bool]]
"""Returns the state of this process, and whether a checkpoint without a state may be resumed."""


class Options(Protocol):
    """The options of Megatron that are read here."""

    save: str
    load: str | None
    finetune: bool


class Checkpointing(Protocol):
    """A module of a host that looks `save_checkpoint`, `load_checkpoint` and `get_args` up in its own namespace."""

    get_args: Callable[[], Options]
    _daro: Session


def keep_state(module: Checkpointing, session: Session) -> None:
    """Save and load the state of `session` with a host's checkpoints; a module is wrapped only once.

    The wrapped `load_checkpoint` raises CheckpointError where training is resumed from a checkpoint without a state,
    or with a state that does not fit. A model alone (--finetune, a release, a Hugging Face folder) needs no state.
    """
    if getattr(module, "_daro", None) is None:
        names = module.__dict__
        names["save_checkpoint"] = _saves(module, names["save_checkpoint"])
        names["load_checkpoint"] = _loads(module, names["load_checkpoint"])
    module.__dict__["_daro"] = session


def _saves(module: Checkpointing, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def save_checkpoint(iteration: int, *arguments: object, **named: object) -> object:
        result = own(iteration, *arguments, **named)
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_state(module._daro()[0], Path(module.get_args().save) / f"iter_{iteration:07d}" / STATE_FILE)
        return result

    return save_checkpoint


def _loads(module: Checkpointing, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def load_checkpoint(
        model: object, optimizer: object, opt_param_scheduler: object, *arguments: object, **named: object
    ) -> tuple[int, object]:
        result: tuple[int, object] = own(model, optimizer, opt_param_scheduler, *arguments, **named)
        if opt_param_scheduler is None:  # weights of a reference model
            return result
        folder = resumed_folder(module.get_args(), result[0])
        if folder is None:
            logger.warning("DARO: no training was resumed; weights start at 1")
        else:
            step, start_fresh = module._daro()
            resume(step, folder / STATE_FILE, start_fresh=start_fresh)
        return result

    return load_checkpoint


def resumed_folder(args: Options, iteration: int) -> Path | None:
    """Return the folder of the checkpoint that training resumes from; None where only a model was loaded.

    Args:
        args: Megatron's options after it loaded.
        iteration: as `load_checkpoint` returned it.
    """
    if args.load is None or args.finetune:
        return None
    load = Path(args.load)
    if re.fullmatch(r"iter_\d{7}", load.name):
        return load
    if not (load / TRACKER).is_file():
        return None
    if (load / TRACKER).read_text(encoding="utf-8").strip() == "release" and not getattr(args, "ckpt_step", None):
        return None
    return load / f"iter_{iteration:07d}"


def checkpoint_problems(args: object) -> list[Problem]:
    """Return problems of Megatron's options: a kind of checkpoint that DARO's state would not be in."""
    kind = getattr(args, "non_persistent_ckpt_type", None)
    if kind is None:
        return []
    return [Problem("--non-persistent-ckpt-type", show(kind), "none: DARO's state is not in those", "remove it")]


class _Optional(argparse.ArgumentParser):
    """A parser without required options: an empty command line gives the defaults."""

    def add_argument(self, *names: str, **named: object) -> argparse.Action:  # type: ignore[override]
        return super().add_argument(*names, **{key: value for key, value in named.items() if key != "required"})  # type: ignore[arg-type]


def defaults_of(add_options: Callable[[argparse.ArgumentParser], object]) -> dict[str, object]:
    """Return the options that a function of the host adds to a parser, and their defaults."""
    parser = _Optional(allow_abbrev=False)
    add_options(parser)
    return vars(parser.parse_known_args([])[0])


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def over_data(*, with_context: bool) -> Reduce:
    """Return a `Reduce` over data-parallel ranks.

    Args:
        with_context: also over context-parallel ranks; needed where each of them holds its own part of a sample.
    """
    from megatron.core import mpu

    return over_group(mpu.get_data_parallel_group(with_context_parallel=with_context), _device())


def over_data_and_stages(*, with_context: bool) -> Reduce:
    """Return a `Reduce` over data-parallel ranks, then over pipeline stages, of which only the last has losses."""
    from megatron.core import mpu

    data = over_data(with_context=with_context)
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return data
    stages = over_group(mpu.get_pipeline_model_parallel_group(), _device())
    return lambda vector: stages(data(vector))
