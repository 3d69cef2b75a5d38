"""NeMo-RL's GRPO example with DARO: runs its script with `grpo_train` wrapped, and nothing of it copied.

python examples/plugins/nemo_rl/run_grpo_daro.py NEMO_RL/examples/run_grpo.py --config ... key=value ...
"""

from __future__ import annotations

import functools
import inspect
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_daro.plugins import nemo_rl as daro_plugin


def with_daro(grpo: ModuleType) -> None:
    """Let NeMo-RL's synchronous training use DARO's advantages, loss and state; refuse the other trainers."""
    own = grpo.grpo_train

    @functools.wraps(own)
    def grpo_train(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(own).bind(*arguments, **options)
        values = given.arguments
        daro = daro_plugin.install(grpo, values["master_config"].grpo.num_generations_per_prompt)
        daro.resume(values["checkpointer"].get_latest_checkpoint_path())
        values["policy"], values["loss_fn"] = daro.wrap(values["policy"]), daro_plugin.DaroLoss(values["loss_fn"])
        return own(*given.args, **given.kwargs)

    def refused(*arguments: Any, **options: Any) -> Any:
        raise SystemExit(
            "async_grpo.enabled: got true, allowed with DARO is false: batches must be whole on the driver"
        )

    grpo.grpo_train, grpo.async_grpo_train = grpo_train, refused


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
