"""DARO inside NeMo-RL 0.6: its own loss with reweighted advantages, around its own policy, from its own launcher.

Place in the data flow, all of it on the driver but the loss: `DaroAdvantages` sees whole groups and notes their bins;
`DaroPolicy.train` sees the whole batch, counts tokens per bin and hands each sample its coefficient; `DaroLoss`, in the
workers, calls NeMo-RL's ClippedPGLossFn, which is homogeneous of degree one in the advantages, so A' = A w_k N / N_k
makes its token mean the weighted sum; the loss sums per bin come back as metrics. No collective call is needed.
Refuses: sequence-level losses, more than one optimizer step a call, the data plane, which hides the batch.

    daro = nemo_rl.install(grpo, rollouts_per_prompt=8)        # before grpo.setup
    policy = daro.wrap(policy)                                 # what setup returned
    loss_fn = nemo_rl.DaroLoss(loss_fn)
    daro.resume(checkpointer.get_latest_checkpoint_path())

Shape letters: B samples of the batch, S tokens of the longest.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import STATE_FILE, DifficultyStep, load_state, save_state, whole_groups
from megatron_daro.plugins.options import PluginSection, read_options

logger = logging.getLogger(__name__)

BIN, COEFFICIENT = "daro_bin", "daro_coefficient"
"""Columns [B] that travel with the batch."""
_SUM, _TOKENS = "daro/loss_sum", "daro/loss_tokens"

Batch = MutableMapping[str, Any]
HostLoss = Callable[[Tensor, Batch, Tensor, Tensor], tuple[Tensor, dict[str, Any]]]


class Policy(Protocol):
    """What is called of NeMo-RL's policy."""

    cfg: Mapping[str, Any]

    def train(self, data: Batch, loss_fn: object, **options: object) -> dict[str, Any]:
        """One or more optimizer steps."""

    def save_checkpoint(self, weights_path: str, *arguments: object, **options: object) -> None:
        """Write a checkpoint."""


class DaroLoss:
    """NeMo-RL's clipped loss with DARO's weight on each sample; picklable, since it is sent to the workers."""

    def __init__(self, host: HostLoss) -> None:
        """Take a ClippedPGLossFn.

        Raises:
            ConfigError: it averages over sequences.
        """
        if getattr(getattr(host, "loss_type", None), "value", "token_level") != "token_level":
            raise ConfigError("loss_fn.token_level_loss: got False, allowed with DARO is True: set it")
        self.host = host
        self.loss_type, self.input_type = getattr(host, "loss_type", None), getattr(host, "input_type", None)

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return (loss, metrics) of a micro-batch, as NeMo-RL's losses do, and the unweighted loss sums per bin.

        Raises:
            AlgorithmError: the columns of `DaroPolicy.train` did not arrive.
        """
        missing = [name for name in (BIN, COEFFICIENT) if name not in data]
        if missing:
            raise AlgorithmError(
                f"batch: {', '.join(missing)} missing, allowed is a batch that DaroPolicy.train hands on: wrap the "
                "policy with install(...).wrap(policy), and do not use the data plane"
            )
        advantages, bins_B = data["advantages"], data[BIN].to(next_token_logprobs.device)
        rest = (global_valid_seqs, global_valid_toks)

        def host_loss(factor_B: Tensor) -> tuple[Tensor, dict[str, Any]]:
            reweighted = copy.copy(data)
            reweighted["advantages"] = advantages * factor_B[:, None].to(advantages)
            return self.host(next_token_logprobs, reweighted, *rest)

        loss, metrics = host_loss(data[COEFFICIENT].to(advantages.device, torch.float64) * global_valid_toks)
        mask_BS = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        with torch.no_grad():
            nothing = float(host_loss(torch.zeros(len(bins_B)))[0])  # what does not depend on advantages: KL
            for k in bins_B.unique().tolist():
                mine_B = (bins_B == k).to(torch.float64)
                own = float(host_loss(mine_B)[0]) - nothing
                metrics[f"{_SUM}/{k}"] = own * float(global_valid_toks)
                metrics[f"{_TOKENS}/{k}"] = float((mask_BS * mine_B[:, None].to(mask_BS)).sum())
        return loss, metrics


class Daro:
    """What the driver holds: DARO's state and the bins of the batch that was last scored."""

    def __init__(self, rollouts_per_prompt: int, options: PluginSection) -> None:
        """Start with weights of 1.

        Raises:
            ConfigError: magnitude "token", whose sums the host's loss does not give.
        """
        if options.daro.magnitude == "token":
            raise ConfigError("daro.magnitude: got 'token', allowed in NeMo-RL are abs and signed: change it")
        self.options = options
        self.step = DifficultyStep(options.algorithm(rollouts_per_prompt))
        self.bins_B: Tensor | None = None
        logger.warning("DARO is on: %d bins, weights %s", rollouts_per_prompt + 1, self.step.algorithm.weights)

    def wrap(self, policy: Policy) -> DaroPolicy:
        """Return the policy with DARO around its training."""
        return DaroPolicy(policy, self)

    def resume(self, checkpoint: str | Path | None) -> None:
        """Take over the state of a checkpoint of `DaroPolicy.save_checkpoint`, if there is a checkpoint.

        Raises:
            CheckpointError: the state is missing (without start_fresh), torn, or of another K.
        """
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_FILE
        if not (self.options.start_fresh and not path.exists()):
            load_state(self.step, path)


class DaroAdvantages:
    """In the place of NeMo-RL's advantage estimator: group-normalised advantages; notes each sample's bin."""

    def __init__(self, daro: Daro) -> None:
        """Take the driver's state."""
        self._daro = daro

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **others: object) -> Tensor:
        """Return advantages [B, S].

        Args:
            prompt_ids: [B] or [B, P], equal rows are one prompt. rewards: [B]. mask: [B, S]. others: not used.

        Raises:
            AlgorithmError: rewards are no verdicts, or most groups are incomplete.
        """
        group_B = torch.unique(prompt_ids, dim=0, return_inverse=True)[1].flatten()
        whole_B, size = whole_groups(group_B)
        algorithm = self._daro.step.algorithm
        if size != algorithm.rollouts_per_prompt:
            raise AlgorithmError(
                f"groups: got {size} answers each, allowed are num_generations_per_prompt = "
                f"{algorithm.rollouts_per_prompt}: repeated prompts in one batch, or another number of generations"
            )
        advantages_B, bins_B = torch.zeros_like(rewards), torch.zeros(len(rewards), dtype=torch.int64)
        advantages_B[whole_B] = algorithm.advantages(rewards[whole_B], group_B[whole_B]).to(rewards.dtype)
        correct_B = self._daro.options.verdicts(rewards)
        bins_B[whole_B] = pass_rate_bins(correct_B[whole_B], group_B[whole_B], size)
        self._daro.bins_B = bins_B
        return advantages_B[:, None].expand(mask.shape)


class DaroPolicy:
    """NeMo-RL's policy; training counts tokens before and learns after. Everything else is the policy's own."""

    def __init__(self, policy: Policy, daro: Daro) -> None:
        """Take what `grpo.setup` returned."""
        self._policy, self._daro = policy, daro

    def __getattr__(self, name: str) -> object:
        """Hand on what is not of this class."""
        return getattr(self._policy, name)

    def train(
        self, data: Batch, loss_fn: object, eval_mode: bool = False, gbs: int | None = None, **options: object
    ) -> dict[str, Any]:
        """One optimizer step; the results gain the metrics of docs/metrics.md, as lists of one number.

        Raises:
            AlgorithmError: bins of this batch are unknown, or the losses saw other tokens than were counted.
            ConfigError: more than one optimizer step a call, or another loss than DaroLoss.
        """
        if eval_mode:
            return self._policy.train(data, loss_fn, eval_mode=True, gbs=gbs, **options)
        daro, mask_BS = self._daro, data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        self._check(mask_BS, loss_fn, gbs)
        assert daro.bins_B is not None  # checked
        lengths_B = mask_BS.sum(1).round().to(torch.int64)
        totals = daro.step.begin(daro.bins_B, lengths_B, lambda vector: vector)
        data[BIN] = daro.bins_B
        data[COEFFICIENT] = daro.step.algorithm.sample_coefficients(daro.bins_B, lengths_B, totals)
        daro.bins_B = None
        result = self._policy.train(data, loss_fn, gbs=gbs, **options)
        found = result["all_mb_metrics"]
        sums, tokens = (self._collected(found, name) for name in (_SUM, _TOKENS))
        weighed = float(sums @ self._per_bin(totals.tokens_per_bin))
        daro.step.note(sums, sums.abs(), tokens, weighed)
        norm = result.get("grad_norm")
        applied = norm is None or math.isfinite(float(torch.as_tensor(norm).flatten()[0]))
        metrics = daro.step.end(lambda vector: vector, applied=applied)
        found |= {name: [value] for name, value in metrics.items()}
        return result

    def _collected(self, found: dict[str, list[float]], name: str) -> Tensor:
        """Take a metric of each bin out of the results: the sum over micro-batches and ranks, float64 [K+1]."""
        bins = range(self._daro.step.rollouts_per_prompt + 1)
        return torch.tensor([sum(found.pop(f"{name}/{k}", [])) for k in bins], dtype=torch.float64)

    def _per_bin(self, tokens_per_bin: Tensor) -> Tensor:
        """Return the coefficient of each bin, float64 [K+1]."""
        step = self._daro.step
        bins = torch.arange(len(tokens_per_bin))
        return step.algorithm.sample_coefficients(bins, torch.ones_like(bins), step.totals)

    def _check(self, mask_BS: Tensor, loss_fn: object, gbs: int | None) -> None:
        if not isinstance(loss_fn, DaroLoss):
            raise ConfigError(f"loss_fn: got {type(loss_fn).__name__}, allowed is DaroLoss(loss_fn): wrap it")
        size = gbs or self._policy.cfg["train_global_batch_size"]
        if size != len(mask_BS):
            raise ConfigError(
                f"policy.train_global_batch_size: got {size} for a batch of {len(mask_BS)}, allowed is one optimizer "
                "step a batch: set it to num_prompts_per_step * num_generations_per_prompt"
            )
        if self._daro.bins_B is None or len(self._daro.bins_B) != len(mask_BS):
            raise AlgorithmError(
                "pass rates: those of this batch are unknown, allowed is a batch whose advantages DaroAdvantages made: "
                "call install before grpo_train, and filter no samples in between"
            )

    def save_checkpoint(self, weights_path: str, *arguments: object, **options: object) -> None:
        """Save the policy's checkpoint, and DARO's state in the folder above its weights."""
        self._policy.save_checkpoint(weights_path, *arguments, **options)
        save_state(self._daro.step, Path(weights_path).parent.parent / STATE_FILE)


def install(grpo: ModuleType, rollouts_per_prompt: int) -> Daro:
    """Put DARO's advantages into `nemo_rl.algorithms.grpo`, and return what wraps the policy.

    Args:
        grpo: the module.
        rollouts_per_prompt: grpo.num_generations_per_prompt.

    Raises:
        ConfigError: the module has no _create_advantage_estimator: another version.
    """
    if not hasattr(grpo, "_create_advantage_estimator"):
        raise ConfigError(
            "nemo_rl.algorithms.grpo has no _create_advantage_estimator, allowed is NeMo-RL at commit 7ea279abf or near"
        )
    daro = Daro(rollouts_per_prompt, read_options())
    grpo._create_advantage_estimator = lambda master_config: DaroAdvantages(daro)  # type: ignore[attr-defined]
    return daro
