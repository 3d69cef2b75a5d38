"""NeMo-RL's GRPO example with DARO: runs its script with `setup` and `grpo_train` wrapped, and nothing of it copied.

Refuses a script that trains by something else, such as NeMo-RL's single controller, before it is run.

python examples/plugins/nemo_rl/run_grpo_daro.py NEMO_RL/examples/run_grpo.py --config ... key=value ...
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


def with_daro(grpo: Any) -> None:
    """Let NeMo-RL's synchronous training use DARO's advantages, loss and state; refuse what DARO does not go with.

    grpo: the module `nemo_rl.algorithms.grpo`, whose functions are replaced.
    """
    grpo.setup, grpo.grpo_train = _checked(grpo.setup), _trained(grpo.grpo_train)
    grpo.async_grpo_train = _checked(grpo.async_grpo_train)  # whose option is refused
    with contextlib.suppress(ModuleNotFoundError):  # before 0.7 there is no data plane
        sync: Any = importlib.import_module("nemo_rl.algorithms.grpo_sync")
        sync.grpo_train_sync = _checked(sync.grpo_train_sync)  # so is that of the data plane


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Check the options first: before a set-up that takes minutes, and in trainers that DARO is not in."""

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


def main() -> None:
    """Run the script that is the first argument with the others."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    from nemo_rl.algorithms import grpo

    with_daro(grpo)
    sys.argv = sys.argv[1:]
    names = runpy.run_path(sys.argv[0], run_name="looked_at")  # what it imports, without its main
    if grpo.grpo_train not in names.values():
        raise ConfigError(
            f"script: {sys.argv[0]} does not import grpo_train of nemo_rl.algorithms.grpo, so DARO would not be in its "
            "training; allowed are run_grpo.py and others that train by it. In the single controller the tokens of a "
            "pass rate are not known when a step's first part is trained: use run_grpo.py, or drop this launcher"
        )
    runpy.run_path(sys.argv[0], run_name="__main__")
    if not getattr(grpo.grpo_train, "ran", False):
        raise ConfigError(f"script: {sys.argv[0]} ended without a call of grpo_train: nothing was trained with DARO")


if __name__ == "__main__":
    main()
