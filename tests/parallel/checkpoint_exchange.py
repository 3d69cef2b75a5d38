"""Trains the small model from or to a checkpoint, in the interpreter that runs this file.

Place in the data flow: test_other_megatron.py runs it with the interpreter of another Megatron-core.

    python checkpoint_exchange.py save|load MODEL_DIRECTORY CHECKPOINT LAYOUT distributed|plain OUT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-3, "warmup_steps": 3, "weight_decay": 0.01}
SEEDS = {"save": range(2), "load": range(2, 4), "whole": range(4)}


def trained(pool: Any, what: str, model: Path, checkpoint: Path, layout: str, optimizer: str) -> dict[str, np.ndarray]:
    """The parameters after the steps of `what`, by Hugging Face name."""
    import megatron_tasks
    from small_models import random_batch
    from test_gradients_exact import layouts

    where = {"save": {"save_to": checkpoint}, "load": {"load_from": checkpoint}, "whole": {}}[what]
    results = pool.run(
        megatron_tasks.train,
        layouts()[layout],
        path=model,
        batches=[random_batch(seed=seed) for seed in SEEDS[what]],
        num_micro_batches=2,
        algorithm={"name": "daro", "daro": {"learning_rate": 0.1}},
        optimizer={**OPTIMIZER, "distributed": optimizer == "distributed"},
        **where,
    )
    return {name: value for result in results for name, value in result["parameters"].items()}


def main(what: str, model: str, checkpoint: str, layout: str, optimizer: str, out: str) -> None:
    from ranks import RankPool

    pool = RankPool(2)
    try:
        parameters = trained(pool, what, Path(model), Path(checkpoint), layout, optimizer)
    finally:
        pool.close()
    from importlib.metadata import version

    np.savez(out, megatron=np.array(version("megatron-core")), **parameters)


if __name__ == "__main__":
    main(*sys.argv[1:])
