"""NeMo-RL's GRPO examples with DARO: runs the script with the functions it trains by wrapped, and nothing of it copied.

Refuses a script that trains by something else, before it is run.

python examples/plugins/nemo_rl/run_grpo_daro.py NEMO_RL/examples/run_grpo.py --config ... key=value ...
python examples/plugins/nemo_rl/run_grpo_daro.py NEMO_RL/examples/run_grpo_single_controller.py --config ...
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_daro.errors import ConfigError
from megatron_daro.plugins import nemo_rl as daro_plugin
from megatron_daro.plugins.options import read_options


def with_daro(grpo: Any) -> dict[str, Callable[..., Any]]:
    """Let NeMo-RL train with DARO; refuse what does not go with it.

    Args:
        grpo: the module `nemo_rl.algorithms.grpo`, whose functions are replaced.

    Returns:
        The functions that bring DARO into a training, by name; each has `ran` once it was called.
    """
    grpo.setup, grpo.grpo_train = _checked(grpo.setup), _trained(grpo.grpo_train)
    grpo.async_grpo_train = _checked(grpo.async_grpo_train)  # its option is refused
    with contextlib.suppress(ModuleNotFoundError):  # before 0.7 there is no data plane
        sync: Any = importlib.import_module("nemo_rl.algorithms.grpo_sync")
        sync.grpo_train_sync = _checked(sync.grpo_train_sync)  # so is that of the data plane
    try:
        single: Any = importlib.import_module("nemo_rl.algorithms.single_controller_utils")
    except ModuleNotFoundError:  # nor a single controller
        return {"grpo_train": grpo.grpo_train}
    single.setup_single_controller = _set_up(single.setup_single_controller)
    return {"grpo_train": grpo.grpo_train, "setup_single_controller": single.setup_single_controller}


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Check the options first: before a set-up that takes minutes, and in trainers that DARO does not wrap."""

    @functools.wraps(own)
    def checked(*arguments: Any, **options: Any) -> Any:
        values = inspect.signature(own).bind(*arguments, **options).arguments
        daro_plugin.check_options(values["master_config"], read_options())
        return own(*arguments, **options)

    return checked


def _trained(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def grpo_train(*arguments: Any, **options: Any) -> Any:
        grpo_train.ran = True  # type: ignore[attr-defined]
        given = inspect.signature(own).bind(*arguments, **options)
        values = given.arguments
        daro = daro_plugin.install(values["master_config"])
        daro.resume(values["checkpointer"].get_latest_checkpoint_path())
        values["policy"], values["loss_fn"] = daro.wrap(values["policy"]), daro_plugin.DaroLoss(values["loss_fn"])
        return own(*given.args, **given.kwargs)

    return grpo_train


def _set_up(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the single controller's set-up, so that trainer and advantages are DARO's."""

    @functools.wraps(own)
    def setup_single_controller(*arguments: Any, **options: Any) -> Any:
        setup_single_controller.ran = True  # type: ignore[attr-defined]
        config = inspect.signature(own).bind(*arguments, **options).arguments["master_config"]
        daro_plugin.check_options(config, read_options(), single_controller=True)  # before minutes of set-up
        actor_args, timing = own(*arguments, **options)
        return daro_plugin.in_single_controller(config, actor_args), timing

    return setup_single_controller


def main() -> None:
    """Run the script that is the first argument with the others."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    from nemo_rl.algorithms import grpo

    wrapped = with_daro(grpo)
    sys.argv = sys.argv[1:]
    names = runpy.run_path(sys.argv[0], run_name="looked_at")  # what it imports, without its main
    if not any(function in names.values() for function in wrapped.values()):
        raise ConfigError(
            f"script: {sys.argv[0]} does not import {' or '.join(wrapped)}, so DARO would not be in its training; "
            "allowed are run_grpo.py, run_grpo_single_controller.py and others that train by them"
        )
    runpy.run_path(sys.argv[0], run_name="__main__")
    if not any(getattr(function, "ran", False) for function in wrapped.values()):
        wanted = " or ".join(wrapped)
        raise ConfigError(f"script: {sys.argv[0]} ended without a call of {wanted}: nothing was trained with DARO")


if __name__ == "__main__":
    main()
