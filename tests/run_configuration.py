"""A configuration that has only what none may lack, and the sections that a test is about; and the context of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from megatron_daro.config import Config
from megatron_daro.deadlines import Deadlines
from megatron_daro.observe.phases import Phases
from megatron_daro.runtime.context import RunContext


def configured(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": ("t",)}, **sections})


def run_context(*, warn=print, run_dir=Path("run"), deadlines=None, trainer=(), **sections) -> RunContext:
    """The context of a run that writes nowhere unless run_dir is of the test. warn: is told what a person is."""
    progress = SimpleNamespace(notice=print, warn=warn, stage=lambda name, text="": None)
    config = configured(trainer={"run_dir": run_dir, **dict(trainer)}, **sections)
    return RunContext(config, progress, Phases(), deadlines or Deadlines())
