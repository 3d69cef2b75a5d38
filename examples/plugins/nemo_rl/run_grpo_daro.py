"""NeMo-RL's GRPO example with DARO: runs its script with `setup` and `grpo_train` wrapped, and nothing of it copied.

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
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
