"""The trained policy as RUN/hf, a Hugging Face directory that transformers, vLLM and SGLang load.

A finished run, or the resume of one -> `PolicyGroup.export` (the writer of `sync: disk`) ->
RUN/hf, whole or not at all. `ORIGIN_FILE` in it says of which step it is. It refuses to replace what it did not write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_daro.config.sections import TrainerSection
from megatron_daro.errors import ConfigError, SyncError
from megatron_daro.rollout.protocol import Notices
from megatron_daro.sync.plan import ORIGIN_FILE, SendPlan

if TYPE_CHECKING:
    from megatron_daro.runtime.policy_group import PolicyGroup

_FILE_BYTES = 2 * 1000**3
"""Limit of a file. A rank holds two of them in host memory while it writes."""
_UNKNOWN = -1


def writer(
    section: TrainerSection, policy: PolicyGroup, notices: Notices
) -> Callable[[int], Coroutine[Any, Any, None]] | None:
    """Return what exports the policy at the end of a run, given its number of steps; None where it is not asked for."""
    return partial(write, policy, section.hf_dir, notices) if section.export_hf else None


async def write(policy: PolicyGroup, directory: Path, notices: Notices, step: int) -> None:
    """Write the policy's weights as they are now, unless the directory has those of this step.

    Args:
        policy: all of its ranks are there. directory: RUN/hf. notices: told when it is written.
        step: optimizer steps that the weights have.

    Raises:
        SyncError: the disk refused, or something else has that name; the directory is as it was.
    """
    found = exported_step(directory)
    if found == step:
        return
    if found == _UNKNOWN:
        raise SyncError(_no_export(directory))
    plan = SendPlan(
        transport="disk",
        targets=(),
        bucket_bytes=_FILE_BYTES,
        timeout_s=0.0,  # nobody is called
        directory=directory,
        remedy="the run is finished and its checkpoint is whole: free space, or make the directory writable; then "
        "--resume with the same options writes the model",
        step=step,
    )
    async with policy.hold():
        report = await policy.export(plan)
    notices.notice(f"wrote the model of step {step} to {directory}: {report.num_bytes / 1e6:,.1f} MB")


def is_due(section: TrainerSection, step: int) -> bool:
    """Whether a run that has all of its steps still lacks its export."""
    return section.export_hf and exported_step(section.hf_dir) != step


def exported_step(directory: Path) -> int | None:
    """Return the step that an export is of; None where there is none, -1 for something else of that name."""
    try:
        return int(json.loads((directory / ORIGIN_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return _UNKNOWN if directory.exists() else None


def require_replaceable(section: TrainerSection) -> None:
    """Raise ConfigError where the export would replace something that is no export."""
    if section.export_hf and exported_step(section.hf_dir) == _UNKNOWN:
        raise ConfigError(_no_export(section.hf_dir))


def remove_rest(section: TrainerSection) -> None:
    """Remove what an export that did not come to its end has left; call when nobody writes any more."""
    for name in ("partial", "replaced"):
        shutil.rmtree(section.hf_dir.with_name(f".{section.hf_dir.name}.{name}"), ignore_errors=True)


def _no_export(directory: Path) -> str:
    return (
        f"trainer.export_hf: got true, but {directory} is there and is no export of a run (it has no {ORIGIN_FILE}); "
        "allowed: nothing, or an earlier export; fix: move it away, or set trainer.export_hf=false"
    )
