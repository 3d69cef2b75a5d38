"""DARO inside slime: hook functions that its command line names. `python -m megatron_daro.plugins.slime --flags`.

Place in the data flow, each a hook of slime: `reward_post_process` (rollout manager) makes advantages of whole groups;
`megatron_init` (each train rank) makes the state and puts it into checkpoints; `rollout_data_postprocess` gives each
sample its bin, in `returns`, which slime's policy loss does not use; `before_train_step` counts tokens over ranks and
arms the update after optimizer.step; `loss` is the loss of a micro-batch.
Refuses: flags that contradict (critic, other estimators, whitening, per-rank filters), groups that are not whole and
in order, rewards that were shaped before anybody knew the verdict, and ranks whose advantages do not fit their bins.

Scale: slime divides what `loss` returns by the step's rollouts (default) or by its tokens, sum of max(mask, 1), with
--calculate-per-token-loss, and undoes every other factor itself; so the loss is X times that number. Each
context-parallel rank holds its own part of a sample, so loss sums run over DP x CP and counts over DP.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import DifficultyStep, SampleSums
from megatron_daro.plugins.megatron_host import carry, over_data, over_data_and_stages
from megatron_daro.plugins.options import read_options
from megatron_daro.plugins.slime_rollouts import (
    Arguments,
    Plan,
    RolloutData,
    bins_and_advantages,
    plans_of,
    reward_post_process,
)

__all__ = ["before_train_step", "loss", "megatron_init", "reward_post_process", "rollout_data_postprocess"]

logger = logging.getLogger(__name__)

MODULE = "megatron_daro.plugins.slime"
TESTED = "624b824a8"
"""The commit of slime that the tests run."""
HOOKS = {
    "custom_reward_post_process_path": "reward_post_process",
    "custom_megatron_init_path": "megatron_init",
    "rollout_data_postprocess_path": "rollout_data_postprocess",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
    "custom_loss_function_path": "loss",
}
"""Option of slime -> function of this module."""


@dataclass(slots=True, eq=False)
class Session:
    """DARO in this train process."""

    step: DifficultyStep
    start_fresh: bool = False
    plans: list[Plan] = field(default_factory=list)
    divisor: float = 0.0
    """What slime will divide the loss of the open step by."""
    armed: object = None
    """The optimizer whose `step` was wrapped."""
    where: tuple[int, int] = (0, 0)
    """Rollout and step of the open step."""


_session: Session | None = None


def session() -> Session:
    """Return this process's session.

    Raises:
        ConfigError: `megatron_init` did not run.
    """
    if _session is None:
        raise ConfigError(
            "custom_megatron_init_path: the hook megatron_daro.plugins.slime.megatron_init did not run here, "
            f"allowed is a start with every flag of `python -m {MODULE} --flags`; add them"
        )
    return _session


def megatron_init(args: Arguments) -> None:
    """slime's hook before model, optimizer and checkpoint are made: checks the flags, makes the state.

    Raises:
        ConfigError: lists every flag that is missing or contradicts.
    """
    global _session
    check_flags(args)
    options = read_options()
    step = DifficultyStep(options.algorithm(args.n_samples_per_prompt))
    _session = Session(step, start_fresh=options.start_fresh)
    carry(lambda: (session().step, session().start_fresh))
    logger.warning("DARO is on: %d bins, weights %s", args.n_samples_per_prompt + 1, step.algorithm.weights)


def check_flags(args: Arguments) -> None:
    """Raise ConfigError with every flag of slime that is missing or contradicts DARO."""
    problems = []
    for option, function in HOOKS.items():
        wanted, got = f"{MODULE}.{function}", getattr(args, option, None)
        if got != wanted:
            problems.append(f"--{option.replace('_', '-')}: got {got}, allowed is {wanted}")
    fixed = {"loss_type": "custom_loss", "advantage_estimator": "grpo", "kl_coef": 0}
    fixed |= dict.fromkeys(
        ("use_critic", "normalize_advantages", "use_opsm", "use_opd", "recompute_loss_function"), False
    )
    for option, wanted_value in fixed.items():
        if getattr(args, option, wanted_value) != wanted_value:
            flag = option.replace("_", "-")
            problems.append(f"--{flag}: got {getattr(args, option)!r}, allowed with DARO is {wanted_value!r}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"slime's flags do not go with DARO (python -m {MODULE} --flags prints them):\n{lines}")


def rollout_data_postprocess(args: Arguments, rollout_id: int, rollout_data: RolloutData) -> None:
    """slime's hook before training on a rollout: bins into `returns`, and what each optimizer step will hold.

    Raises:
        AlgorithmError: raw rewards or their places are missing, or the advantages are not those of the bins.
    """
    missing = [key for key in ("raw_reward", "partition", "micro_batch_indices") if key not in rollout_data]
    if missing:
        raise AlgorithmError(
            f"rollout data: {', '.join(missing)} missing, allowed is what slime's own rollout manager hands out; a "
            "custom_convert_samples_to_train_data_path must keep them"
        )
    rewards_N = torch.tensor([float(r) for r in rollout_data["raw_reward"]], dtype=torch.float64)
    bins_N, advantages_N = bins_and_advantages(args, rewards_N)
    mine = torch.as_tensor(list(rollout_data["partition"]), dtype=torch.int64)
    sent = torch.tensor([float(r) for r in rollout_data["rewards"]], dtype=torch.float64)
    if not torch.allclose(sent, advantages_N[mine], rtol=1e-4, atol=1e-4):
        worst = int((sent - advantages_N[mine]).abs().argmax())
        raise AlgorithmError(
            f"advantages: sample {int(mine[worst])} has {float(sent[worst]):g}, its group's raw rewards give "
            f"{float(advantages_N[mine][worst]):g}, allowed are equal ones: samples were reordered, or their raw "
            "rewards overwritten (metadata['raw_reward']) after reward_post_process"
        )
    bins_n = bins_N[mine]
    if "advantages" in rollout_data:
        advantages = rollout_data["advantages"]
        rollout_data["returns"] = [torch.full_like(a, float(k)) for a, k in zip(advantages, bins_n, strict=True)]
    lengths_n = torch.tensor([int(mask.sum()) for mask in rollout_data["loss_masks"]], dtype=torch.int64)
    session().plans = plans_of(rollout_data, bins_n, lengths_n)


def before_train_step(
    args: Arguments, rollout_id: int, step_id: int, model: object, optimizer: object, opt_param_scheduler: object
) -> None:
    """slime's hook before each optimizer step: counts over ranks, and an update of the weights after it."""
    own = session()
    if step_id >= len(own.plans):
        raise AlgorithmError(
            f"optimizer step {step_id} of rollout {rollout_id}: {len(own.plans)} were planned, allowed is one plan per "
            "step: the hook rollout_data_postprocess did not run"
        )
    plan, over_ranks = own.plans[step_id], over_data(with_context=False)
    own.step.begin(plan.bins_N, plan.lengths_N, over_ranks)
    tokens = over_ranks(torch.tensor([float(plan.floored_tokens)], dtype=torch.float64))
    own.divisor = float(tokens) if args.calculate_per_token_loss else float(plan.rollouts)
    own.where = (rollout_id, rollout_id * len(own.plans) + step_id)
    if own.armed is not optimizer:
        _update_after(args, optimizer, own)


def _update_after(args: Arguments, optimizer: object, own: Session) -> None:
    """Wrap `optimizer.step`: the weights move after each step that was taken."""
    take_step: Callable[[], tuple[bool, object, object]] = optimizer.step  # type: ignore[attr-defined]

    @functools.wraps(take_step)
    def step() -> tuple[bool, object, object]:
        result = take_step()
        metrics = own.step.end(over_data_and_stages(with_context=True), applied=bool(result[0]))
        _report(args, metrics, own.where[1])
        return result

    optimizer.step = step  # type: ignore[attr-defined]
    own.armed = optimizer


def _report(args: Arguments, metrics: Mapping[str, float], step: int) -> None:
    """Hand the metrics to slime's own logger, on the rank that logs."""
    from slime.backends.megatron_utils.initialize import is_megatron_main_rank
    from slime.observability import logging_utils

    if is_megatron_main_rank():
        logging_utils.log(args, {**metrics, "train/step": step}, step_key="train/step")


def loss(
    args: Arguments,
    batch: Mapping[str, Sequence[Tensor]],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's hook: the loss of a micro-batch on the last pipeline stage, and what it reports.

    Args:
        args: slime's options.
        batch: the micro-batch: lists with one entry per sample.
        logits: [1, T, V over tensor-parallel ranks], float32.
        sum_of_sample_mean: slime's reduction, used for its entropy and KL terms as slime uses it.
    """
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs

    own = session()
    found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )[1]
    log_probs = found["log_probs"]
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    old = old or [values.detach() for values in log_probs]
    losses, clipped = _token_losses(args, batch, log_probs, old)
    masks = _local_masks(batch)
    bins_M = torch.tensor([int(values[0]) if values.numel() else 0 for values in batch["returns"]])
    weighed = own.step.weigh(SampleSums.of_list(losses, masks), bins_M)
    total = (own.divisor * weighed).to(logits.dtype)
    report = {"pg_loss": total.detach(), "pg_clipfrac": sum_of_sample_mean(clipped).detach()}
    entropy = sum_of_sample_mean(torch.cat(found["entropy"]))
    report["entropy_loss"] = entropy.detach()
    total = total - args.entropy_coef * entropy
    if args.use_kl_loss:
        kl = _kl(args, batch, log_probs, sum_of_sample_mean)
        report["kl_loss"] = kl.detach()
        total = total + args.kl_loss_coef * kl
    if not sum(values.numel() for values in log_probs):
        total = total + 0 * logits.sum()  # a rank without tokens must still take part in the backward pass
    return total, {"loss": total.detach(), **report}


def _token_losses(
    args: Arguments, batch: Mapping[str, Sequence[Tensor]], log_probs: Sequence[Tensor], old: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Return slime's own clipped losses of each sample's tokens, corrected where --use-tis says so; and what clips."""
    from slime.backends.megatron_utils.loss import vanilla_tis_function
    from slime.utils.misc import load_function
    from slime.utils.ppo_utils import compute_policy_loss

    lengths = [values.numel() for values in log_probs]
    log_ratio = torch.cat(list(old)) - torch.cat(list(log_probs))
    advantages = torch.cat(list(batch["advantages"]))
    losses, clipped = compute_policy_loss(log_ratio, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    if args.use_tis:
        path = getattr(args, "custom_tis_function_path", None)
        correct = load_function(path) if path else vanilla_tis_function
        losses, kept, _ = correct(
            args=args,
            pg_loss=losses,
            train_log_probs=batch.get("log_probs") or [values.detach() for values in log_probs],
            rollout_log_probs=batch["rollout_log_probs"],
            loss_masks=batch["loss_masks"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )
        # A token that the correction rejects has no loss; it stays in the denominators, as in slime's own loss.
        losses = losses * torch.cat(_local_masks({**batch, "loss_masks": kept}))
    return list(losses.split(lengths)), clipped


def _kl(
    args: Arguments,
    batch: Mapping[str, Sequence[Tensor]],
    log_probs: Sequence[Tensor],
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> Tensor:
    from slime.utils.ppo_utils import compute_approx_kl

    reference = torch.cat(list(batch["ref_log_probs"]))
    return sum_of_sample_mean(compute_approx_kl(torch.cat(list(log_probs)), reference, kl_loss_type=args.kl_loss_type))


def _local_masks(batch: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
    """Return the part of each sample's mask whose log-probs this context-parallel rank holds."""
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import get_logits_and_tokens_offset_with_cp

    if mpu.get_context_parallel_world_size() == 1:
        return list(batch["loss_masks"])
    found = []
    columns = (batch["loss_masks"], batch["total_lengths"], batch["response_lengths"])
    for mask, total, response in zip(*columns, strict=True):
        offsets = get_logits_and_tokens_offset_with_cp(total, response)[3]
        prompt = total - response
        found.append(torch.cat([mask[max(a - prompt, 0) : max(b - prompt, 0)] for a, b in offsets]))
    return found


def flags() -> list[str]:
    """Return the flags to add to a working command line of slime."""
    lines = [f"--{option.replace('_', '-')} {MODULE}.{name}" for option, name in HOOKS.items()]
    return ["--advantage-estimator grpo", "--loss-type custom_loss", *lines]


def main() -> None:
    """Print the flags."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="DARO inside slime")
    parser.add_argument("--flags", action="store_true", help="print what to add to slime's command line")
    if parser.parse_args().flags:
        print(" \\\n".join(flags()))
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
