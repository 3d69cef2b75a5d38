"""DARO on ROLL's driver: `python -m megatron_daro.plugins.roll_driver --config_path DIR --config_name NAME`.

Place in the data flow: starts ROLL's RLVR pipeline as its examples/start_rlvr_pipeline.py does, with DARO's advantages
around `compute_advantage`, which sees whole groups: it writes advantages, and the bin of each sample as a column that
travels to the workers (`roll.py`).
Refuses: options that give other advantages, filter by the loss, or average otherwise; lists all of them at once.

Shape letters: B samples of a batch, S - 1 positions of log-probs.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import whole_groups
from megatron_daro.plugins.options import read_options

logger = logging.getLogger(__name__)

MODULE = "megatron_daro.plugins.roll_driver"
TESTED = "8eb27cc2"
"""The commit of ROLL that the tests run."""
WORKER = "megatron_daro.plugins.roll.DaroActorWorker"
BINS = "daro_bins"
"""Column [B, S - 1], each row one number: the bin of the sample's group; 0 where it has no signal."""

FIXED: dict[str, object] = {
    "adv_estimator": "grpo",
    "loss_agg_mode": "token-mean",
    "importance_sampling": "token",
    "whiten_advantages": False,
    "whiten_rewards": False,
    "advantage_clip": None,
    "reward_clip": None,
    "add_token_level_kl": False,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "use_opd": False,
    "is_pure_opd": False,
}
"""Options of ROLL that have one value with DARO."""


class Data(Protocol):
    """ROLL's DataProto, as far as it is read here."""

    batch: MutableMapping[str, Tensor]


class WorkerOptions(Protocol):
    """ROLL's options of a worker."""

    worker_cls: str | None
    strategy_args: object


class PipelineOptions(Protocol):
    """ROLL's options of a pipeline; those of FIXED beside it."""

    actor_train: WorkerOptions
    actor_infer: WorkerOptions


def check_options(config: PipelineOptions) -> None:
    """Raise ConfigError with every option of ROLL that DARO does not go with."""
    problems = []
    for name, wanted in FIXED.items():
        got = getattr(config, name, wanted)
        if got != wanted:
            shown = "null" if wanted is None else str(wanted).lower() if isinstance(wanted, bool) else wanted
            problems.append(f"{name}: got {got!r}, allowed with DARO is {shown}")
    if config.actor_train.worker_cls != WORKER:
        problems.append(f"actor_train.worker_cls: got {config.actor_train.worker_cls!r}, allowed is {WORKER}")
    strategy = getattr(config.actor_train.strategy_args, "strategy_name", None)
    if strategy != "megatron_train":
        problems.append(f"actor_train.strategy_args.strategy_name: got {strategy!r}, allowed is megatron_train")
    if not getattr(config.actor_train, "apply_loss_scale", True):
        problems.append("actor_train.apply_loss_scale: got False, allowed with DARO is true")
    correction = getattr(config, "train_infer_correction", None)
    if getattr(correction, "filters", None) and not getattr(config, "enable_old_logprobs_recompute", False):
        problems.append(
            "train_infer_correction.filters: given without enable_old_logprobs_recompute, allowed with it: the tokens "
            "must be known before the loss"
        )
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"ROLL's options do not go with DARO:\n{lines}")


def daro_advantages(data: Data, response_mask: Tensor, rollouts_per_prompt: int) -> None:
    """Write advantages and bins of whole groups into a batch.

    Args:
        data: with "scores" [B], the verdicts, and "prompt_id" [B].
        response_mask: [B, S - 1], trained tokens.
        rollouts_per_prompt: K.

    Raises:
        AlgorithmError: scores are no verdicts, or groups are not of K.
    """
    options = read_options()
    scores_B = data.batch["scores"].detach().to("cpu", torch.float64).flatten()
    group_B = torch.unique(data.batch["prompt_id"].cpu().flatten(), return_inverse=True)[1]
    whole_B, size = whole_groups(group_B)
    if size != rollouts_per_prompt:
        raise AlgorithmError(
            f"groups: got {size} answers each, allowed are num_return_sequences = {rollouts_per_prompt}: repeated "
            "prompts in one batch, or rollouts were filtered"
        )
    advantages_B, bins_B = torch.zeros_like(scores_B), torch.zeros(len(scores_B), dtype=torch.int64)
    correct_B, algorithm = options.verdicts(scores_B), options.algorithm(rollouts_per_prompt)
    advantages_B[whole_B] = algorithm.advantages(scores_B[whole_B], group_B[whole_B])
    bins_B[whole_B] = pass_rate_bins(correct_B[whole_B], group_B[whole_B], rollouts_per_prompt)
    advantages = advantages_B.to(response_mask.device)[:, None].float() * response_mask
    data.batch["advantages"] = data.batch["raw_advantages"] = advantages
    data.batch[BINS] = bins_B.to(response_mask.device)[:, None].expand(response_mask.shape).clone()


def with_daro(compute_advantage: Callable[..., Data]) -> Callable[..., Data]:
    """Return ROLL's compute_advantage with DARO's advantages in the place of its own."""

    @functools.wraps(compute_advantage)
    def compute(*arguments: Data, **options: object) -> Data:
        data = compute_advantage(*arguments, **options)
        config, mask = options["pipeline_config"], options["response_mask"]
        assert isinstance(mask, Tensor)
        count: int = config.actor_infer.generating_args.num_return_sequences  # type: ignore[attr-defined]
        daro_advantages(data, mask, count)
        return data

    return compute


def main() -> None:
    """Start ROLL's RLVR pipeline with DARO."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="ROLL's RLVR pipeline with DARO")
    parser.add_argument("--config_path", default="config", help="folder of the configuration")
    parser.add_argument("--config_name", required=True, help="its file, without .yaml")
    given = parser.parse_args()

    from dacite import from_dict
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from roll.distributed.scheduler.initialize import init
    from roll.pipeline.rlvr import rlvr_pipeline
    from roll.pipeline.rlvr.rlvr_config import RLVRConfig

    with initialize_config_dir(config_dir=str(Path(given.config_path).resolve()), job_name="app", version_base=None):
        tree = OmegaConf.to_container(compose(config_name=given.config_name), resolve=True)
    config = from_dict(data_class=RLVRConfig, data=tree)
    check_options(config)
    rlvr_pipeline.compute_advantage = with_daro(rlvr_pipeline.compute_advantage)
    init()
    rlvr_pipeline.RLVRPipeline(pipeline_config=config).run()


if __name__ == "__main__":
    main()
