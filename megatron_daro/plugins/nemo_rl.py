"""DARO inside NeMo-RL: wrappers of its advantage estimator, policy and loss, for a launcher such as
examples/plugins/nemo_rl/run_grpo_daro.py.

On the driver, `DaroAdvantages` sees whole groups and notes their bins, and `DaroPolicy.train` sees the whole batch,
counts tokens per bin and gives each sample its coefficient. In the workers, `DaroLoss` calls NeMo-RL's ClippedPGLossFn,
which is homogeneous of degree one in the advantages, so A' = A w_k N / N_k makes its token mean the weighted sum. The
loss sums per bin come back to the driver as metrics. No collective call is needed.
Refuses: sequence-level losses, more than one optimizer step per call of train, the synchronous trainer's data plane,
which hides the batch.

    daro = nemo_rl.install(master_config)        # before grpo_train
    policy = daro.wrap(policy)                   # what setup returned
    loss_fn = nemo_rl.DaroLoss(loss_fn)
    daro.resume(checkpointer.get_latest_checkpoint_path())

Under NeMo-RL's single controller (main branch) the batch stays in the data plane, whose columns are fixed. There the
loss, which is sent to the workers at the start of each step, carries the coefficient of each bin, and a sample's bin is
written into the advantage of its first position, which no loss reads (loss_functions.py:385). `in_single_controller`
adds both to what NeMo-RL's set-up returns.

Shape letters: B samples of the batch, S tokens of the longest.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.config.problems import Problem
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import STATE_FILE, DifficultyStep, consecutive_groups, resume, save_state
from megatron_daro.plugins.host import ANY, Host
from megatron_daro.plugins.options import PluginSection, read_options

HOST = Host("NeMo-RL", "nemo_rl", ("0.6.0", "0.7.0", "main at 7ea279abf"))
NAMES = (
    "nemo_rl.algorithms.grpo:grpo_train",
    "nemo_rl.algorithms.grpo:async_grpo_train",
    "nemo_rl.algorithms.grpo:_create_advantage_estimator",
    "nemo_rl.algorithms.loss.loss_functions:ClippedPGLossFn",
)
"""What this module takes from NeMo-RL."""
_FREE_GRPO = """
    num_prompts_per_batch num_generations_per_prompt max_num_epochs max_num_steps max_rollout_turns normalize_rewards
    advantage_clip_low advantage_clip_high use_leave_one_out_baseline val_period val_start_at val_batch_size
    val_at_start val_at_end max_val_samples val_num_generations_per_prompt stop_at_validation_metric
    stop_at_validation_threshold skip_reference_policy_logprobs_calculation seed async_grpo overlong_filtering
    use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier reward_shaping reward_scaling
    calculate_advantages_on_gpu seq_logprob_error_threshold invalid_tool_call_advantage malformed_thinking_advantage
    adv_estimator deduplicate_multimodal_data debug_payload_metrics
"""
_FREE_LOSS = """
    reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value ratio_clip_min
    ratio_clip_max ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction
    truncated_importance_sampling_ratio truncated_importance_sampling_type truncated_importance_sampling_ratio_min
    sequence_level_importance_ratios disable_ppo_ratio force_on_policy_ratio use_cispo
"""
_SECTIONS: dict[str, dict[str, object]] = {
    "grpo": dict.fromkeys(_FREE_GRPO.split(), ANY),
    "grpo.adv_estimator": {
        "name": ("grpo",),
        "normalize_rewards": (True,),
        "use_leave_one_out_baseline": (False,),
        "minus_baseline": (True,),
    },
    "grpo.async_grpo": {"enabled": (False,)},
    "loss_fn": dict.fromkeys(_FREE_LOSS.split(), ANY)
    | {"token_level_loss": (True,), "use_kl_in_reward": (False,), "positive_example_nll_weight": (0,)},
    "data_plane": {"enabled": (False,)},
}
"""Section of NeMo-RL's configuration -> option -> ANY, or the values that go with DARO."""
_FREE_WHERE_OFF = ("grpo.async_grpo", "data_plane")
"""Of these sections only `enabled` is read."""
_FREE_ASYNC = """
    sampler rollout_failure stall_watchdog generation_fleet_health generation_router max_inflight_prompts
    recompute_kv_cache_after_weight_updates max_buffered_rollouts diagnostics
"""

BIN, COEFFICIENT = "daro_bin", "daro_coefficient"
"""Columns [B] that travel with the batch."""
_SUM, _TOKENS = "daro/loss_sum", "daro/loss_tokens"

Batch = MutableMapping[str, Any]
HostLoss = Callable[[Tensor, Batch, Tensor, Tensor], tuple[Tensor, dict[str, Any]]]


class Policy(Protocol):
    """The part of NeMo-RL's policy that is used here."""

    cfg: Mapping[str, Any]

    def train(self, data: Batch, loss_fn: object, **options: object) -> dict[str, Any]:
        """Take one or more optimizer steps."""

    def save_checkpoint(self, weights_path: str, *arguments: object, **options: object) -> None:
        """Write a checkpoint."""


class DaroLoss:
    """NeMo-RL's clipped loss with DARO's weight on each sample; picklable, since it is sent to the workers."""

    def __init__(self, host: HostLoss, factors_K: Tensor | None = None) -> None:
        """Take a ClippedPGLossFn.

        Args:
            host: NeMo-RL's loss.
            factors_K: float64 [K+1], the factor of each bin, under the single controller: a sample's bin is then in the
                advantage of its first position. None: bin and coefficient are columns of the batch.

        Raises:
            ConfigError: it averages over sequences.
        """
        if getattr(getattr(host, "loss_type", None), "value", "token_level") != "token_level":
            raise ConfigError("loss_fn.token_level_loss: got False, allowed with DARO is True: set it")
        self.host, self.factors_K = host, factors_K

    @property
    def metric_normalizations(self) -> dict[str, object]:
        """What the host divides each metric by after a step that ran in parts; the sums per bin are not divided."""
        of_host: dict[str, object] = getattr(self.host, "metric_normalizations", {})
        if self.factors_K is None:
            return of_host
        nothing = importlib.import_module("nemo_rl.algorithms.loss.interfaces").MetricNormalizer.NONE
        return of_host | {f"{name}/{k}": nothing for name in (_SUM, _TOKENS) for k in range(len(self.factors_K))}

    def __getattr__(self, name: str) -> object:
        """Return what NeMo-RL reads from its own loss: types, the KL penalty, whether log-probs are fused."""
        if name == "host" or name.startswith("__"):  # during unpickling there is no host yet
            raise AttributeError(name)
        return getattr(self.host, name)

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return (loss, metrics) of a micro-batch, as NeMo-RL's losses do, and the unweighted loss sums per bin.

        Raises:
            AlgorithmError: the columns of `DaroPolicy.train` did not arrive.
        """
        bins_B, factors_B = self._bins_and_factors(data, float(global_valid_toks))
        bins_B = bins_B.to(next_token_logprobs.device)
        advantages, rest = data["advantages"], (global_valid_seqs, global_valid_toks)

        def host_loss(factor_B: Tensor) -> tuple[Tensor, dict[str, Any]]:
            reweighted = copy.copy(data)
            reweighted["advantages"] = advantages * factor_B[:, None].to(advantages)
            return self.host(next_token_logprobs, reweighted, *rest)

        loss, metrics = host_loss(factors_B.to(advantages.device))
        mask_BS = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        with torch.no_grad():
            nothing = float(host_loss(torch.zeros(len(bins_B)))[0])  # the part that does not depend on advantages: KL
            for k in bins_B.unique().tolist():
                mine_B = (bins_B == k).to(torch.float64)
                own = float(host_loss(mine_B)[0]) - nothing
                metrics[f"{_SUM}/{k}"] = own * float(global_valid_toks)
                metrics[f"{_TOKENS}/{k}"] = float((mask_BS * mine_B[:, None].to(mask_BS)).sum())
        return loss, metrics

    def _bins_and_factors(self, data: Batch, tokens: float) -> tuple[Tensor, Tensor]:
        """Return the bin of each sample, int64 [B], and the factor of its advantages, float64 [B]."""
        if self.factors_K is not None:
            bins_B = data["advantages"][:, 0].round().to("cpu", torch.int64)
            return bins_B, self.factors_K[bins_B]
        missing = [name for name in (BIN, COEFFICIENT) if name not in data]
        if missing:
            raise AlgorithmError(
                f"batch: {', '.join(missing)} missing, allowed is a batch that DaroPolicy.train hands on: wrap the "
                "policy with install(...).wrap(policy), and do not use the data plane"
            )
        return data[BIN], data[COEFFICIENT].to(torch.float64) * tokens


class Daro:
    """DARO on the driver: its state, and the bins of the batch that was last scored."""

    def __init__(self, rollouts_per_prompt: int, options: PluginSection) -> None:
        """Start with weights of 1.

        Raises:
            ConfigError: magnitude is "token", whose sums the host's loss does not return.
        """
        if options.daro.magnitude == "token":
            raise ConfigError("daro.magnitude: got 'token', allowed in NeMo-RL are abs and signed: change it")
        self.options = options
        self.step = DifficultyStep(options.algorithm(rollouts_per_prompt))
        self.bins_B: Tensor | None = None
        HOST.announce(self.step, options)

    def wrap(self, policy: Policy) -> DaroPolicy:
        """Return the policy with DARO around its training."""
        return DaroPolicy(policy, self)

    def coefficients(self) -> Tensor:
        """Return the coefficient of each bin's token losses in the open step, float64 [K+1]."""
        bins = torch.arange(self.step.rollouts_per_prompt + 1)
        return self.step.algorithm.bin_coefficients(bins, torch.ones_like(bins), self.step.totals)

    def learn(self, result: dict[str, Any]) -> None:
        """Replace the sums per bin in a step's results by DARO's metrics, and update the weights.

        Raises:
            AlgorithmError: the losses saw other tokens than were counted.
        """
        metrics, bins = result["all_mb_metrics"], range(self.step.rollouts_per_prompt + 1)
        sums, tokens = (
            torch.tensor([sum(metrics.pop(f"{name}/{k}", [])) for k in bins], dtype=torch.float64)
            for name in (_SUM, _TOKENS)
        )
        self.step.note(sums, sums.abs(), tokens, float(sums @ self.coefficients()))
        norm = result.get("grad_norm")
        applied = norm is None or math.isfinite(float(torch.as_tensor(norm).flatten()[0]))
        metrics |= {name: [value] for name, value in self.step.end(lambda vector: vector, applied=applied).items()}

    def resume(self, checkpoint: str | Path | None) -> None:
        """Load the state from a checkpoint of `DaroPolicy.save_checkpoint`; None: there is no checkpoint.

        Raises:
            CheckpointError: the state is missing (without start_fresh), torn, or of another K.
        """
        if checkpoint is not None:
            resume(self.step, Path(checkpoint) / STATE_FILE, start_fresh=self.options.start_fresh)


class DaroAdvantages:
    """Replacement of NeMo-RL's advantage estimator: makes group-normalised advantages and notes each sample's bin."""

    def __init__(self, daro: Daro) -> None:
        """Take the driver's state."""
        self._daro = daro

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **others: object) -> Tensor:
        """Return advantages [B, S].

        Args:
            prompt_ids: [B, P], with K consecutive rows of each prompt. rewards: [B]. mask: [B, S]. others: not used.

        Raises:
            AlgorithmError: rewards are not verdicts, or K consecutive rows are not of one prompt.
        """
        algorithm, size = self._daro.step.algorithm, self._daro.step.rollouts_per_prompt
        group_B = consecutive_groups(prompt_ids, size, "grpo.num_generations_per_prompt")
        advantages_B = algorithm.advantages(rewards, group_B).to(rewards.dtype)
        bins_B = pass_rate_bins(self._daro.options.verdicts(rewards), group_B, size)
        self._daro.bins_B = bins_B
        return advantages_B[:, None].expand(mask.shape)


class DaroPolicy:
    """NeMo-RL's policy, but `train` counts tokens before the step and updates DARO's weights after it."""

    def __init__(self, policy: Policy, daro: Daro) -> None:
        """Take what `grpo.setup` returned."""
        self._policy, self._daro = policy, daro

    def __getattr__(self, name: str) -> object:
        """Return the policy's own attribute."""
        return getattr(self._policy, name)

    def train(
        self, data: Batch, loss_fn: object, eval_mode: bool = False, gbs: int | None = None, **options: object
    ) -> dict[str, Any]:
        """Take one optimizer step, and add the metrics of docs/metrics.md to its results, as lists of one number.

        Raises:
            AlgorithmError: bins of this batch are unknown, or the losses saw other tokens than were counted.
            ConfigError: more than one optimizer step per call, or a loss other than DaroLoss.
        """
        if eval_mode:
            return self._policy.train(data, loss_fn, eval_mode=True, gbs=gbs, **options)
        daro, mask_BS = self._daro, data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        self._check(mask_BS, loss_fn, gbs)
        assert daro.bins_B is not None  # checked
        lengths_B = mask_BS.sum(1).round().to(torch.int64)
        totals = daro.step.begin(daro.bins_B, lengths_B, lambda vector: vector)
        data[BIN] = daro.bins_B
        data[COEFFICIENT] = daro.step.algorithm.bin_coefficients(daro.bins_B, lengths_B, totals)
        daro.bins_B = None
        result = self._policy.train(data, loss_fn, gbs=gbs, **options)
        daro.learn(result)
        return result

    def _check(self, mask_BS: Tensor, loss_fn: object, gbs: int | None) -> None:
        if not isinstance(loss_fn, DaroLoss):
            raise ConfigError(f"loss_fn: got {type(loss_fn).__name__}, allowed is DaroLoss(loss_fn): wrap it")
        size = gbs or self._policy.cfg["train_global_batch_size"]
        if size != len(mask_BS):
            raise ConfigError(
                f"policy.train_global_batch_size: got {size} for a batch of {len(mask_BS)}, allowed is one optimizer "
                "step a batch: set it to num_prompts_per_batch * num_generations_per_prompt"
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


class SingleControllerAdvantages(DaroAdvantages):
    """For the single controller: begins the step with its whole batch, and sends each sample's bin along."""

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **others: object) -> Tensor:
        """See `DaroAdvantages.compute_advantage`; the first position of each row holds its bin.

        Raises:
            AlgorithmError: a part of this step's batch was already scored.
        """
        daro = self._daro
        if daro.step.open:
            raise AlgorithmError(
                "batch: got the groups of one step in several parts, allowed with DARO is one part, since the tokens "
                "of each pass rate must be known first: set async_rl.min_groups_for_streaming_train to "
                "grpo.num_prompts_per_batch"
            )
        advantages = super().compute_advantage(prompt_ids, rewards, mask, **others).clone()
        assert daro.bins_B is not None  # just set
        advantages[:, 0] = daro.bins_B
        daro.step.begin(daro.bins_B, mask[:, 1:].sum(1).round(), lambda vector: vector)
        return advantages


class SingleControllerTrainer:
    """The single controller's trainer, but with DARO's weights in the loss of each step."""

    def __init__(self, trainer: Any, daro: Daro) -> None:
        """Take the trainer of NeMo-RL's set-up."""
        self._trainer, self._daro = trainer, daro

    def __getattr__(self, name: str) -> object:
        """Return the trainer's own attribute."""
        if name.startswith("_"):  # during unpickling there is no trainer yet
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def begin_train_step(self, loss_fn: HostLoss, *arguments: object, **options: object) -> None:
        """Begin the step with DARO's loss. Raises AlgorithmError where DARO did not make the advantages."""
        factors_K = self._daro.coefficients() * self._daro.step.totals.tokens
        self._trainer.begin_train_step(DaroLoss(loss_fn, factors_K), *arguments, **options)

    def finish_train_step(self) -> dict[str, Any]:
        """Finish the step, update the weights, and add the metrics of docs/metrics.md, as lists of one number."""
        result: dict[str, Any] = self._trainer.finish_train_step()
        self._daro.learn(result)
        return result

    def save_checkpoint(self, weights_path: str, *arguments: object, **options: object) -> None:
        """Save the trainer's checkpoint, and DARO's state in the folder above its weights."""
        self._trainer.save_checkpoint(weights_path, *arguments, **options)
        save_state(self._daro.step, Path(weights_path).parent.parent / STATE_FILE)


def check_options(master_config: object, options: PluginSection, *, single_controller: bool = False) -> None:
    """Refuse options of NeMo-RL that do not go with DARO, and those that DARO does not know.

    Args:
        master_config: a pydantic model or a mapping; so is each of its sections.
        options: of DARO.
        single_controller: whether the run uses NeMo-RL's single controller.

    Raises:
        ConfigError: lists every one of them.
    """
    problems: list[Problem] = []
    sections = _SECTIONS
    if single_controller:
        whole = _section(master_config, "grpo")[0].get("num_prompts_per_batch")
        of_parts = dict.fromkeys(_FREE_ASYNC.split(), ANY) | {"min_groups_for_streaming_train": (whole,)}
        sections = _SECTIONS | {"data_plane": {"enabled": (True,)}, "async_rl": of_parts}
    for name, allowed in sections.items():
        given, defaults = _section(master_config, name)
        if name == "grpo.adv_estimator" and not given:  # older configurations have these options in grpo
            above = _section(master_config, "grpo")[0]
            given = {key: above[key] for key in ("normalize_rewards", "use_leave_one_out_baseline") if key in above}
        if name in _FREE_WHERE_OFF:
            given = {key: value for key, value in given.items() if key == "enabled"}
        problems += HOST.problems(given, allowed, defaults=defaults, options=options, prefix=f"{name}.")
    if problems:
        raise HOST.refusal(problems)


def _section(config: object, path: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the values and the defaults of a section; both empty where there is no such section."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if config is None or isinstance(config, Mapping):
        return dict(config or {}), {}
    fields: Mapping[str, Any] = getattr(type(config), "model_fields", {})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return dict(config), defaults  # type: ignore[call-overload]


def install(master_config: object) -> Daro:
    """Put DARO's advantages into `nemo_rl.algorithms.grpo`, and return the object that wraps the policy.

    Args:
        master_config: NeMo-RL's configuration, as its trainers get it.

    Raises:
        ConfigError: this version lacks a name, or options do not go with DARO.
    """
    HOST.look_up(NAMES)
    daro = _daro_of(master_config)
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    grpo._create_advantage_estimator = lambda master_config: DaroAdvantages(daro)  # type: ignore[attr-defined]
    return daro


def in_single_controller(master_config: object, actor_args: Any) -> Any:
    """Return the single controller's arguments, with DARO's advantages and trainer in them.

    Args:
        master_config: the single controller's configuration.
        actor_args: NeMo-RL's SingleControllerActorArgs, as `setup_single_controller` returns it.

    Raises:
        ConfigError: options do not go with DARO, or the loss averages over sequences.
        CheckpointError: see `Daro.resume`.
    """
    daro = _daro_of(master_config, single_controller=True)
    daro.resume(actor_args.last_checkpoint_path)
    DaroLoss(actor_args.loss_fn)  # refused here, not on the workers
    return dataclasses.replace(
        actor_args,
        advantage_estimator=SingleControllerAdvantages(daro),
        trainer_handle=SingleControllerTrainer(actor_args.trainer_handle, daro),
    )


def _daro_of(master_config: object, *, single_controller: bool = False) -> Daro:
    options = read_options()
    check_options(master_config, options, single_controller=single_controller)
    count = _section(master_config, "grpo")[0]["num_generations_per_prompt"]
    assert isinstance(count, int)
    return Daro(count, options)
