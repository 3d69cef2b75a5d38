"""DARO inside Megatron-LM's own RL script: `torchrun ... -m megatron_daro.plugins.megatron_rl train_rl.py OPTIONS`.

Megatron-LM has no hooks, but its script and its loop look functions up in modules, and `install` wraps these functions.
Options are checked when they are parsed; `calculate_grpo_advantages` sees whole groups; `prepare_data_for_update` tells
which rollout each row of the batch belongs to; around `train_step` tokens are counted before and weights updated after
an optimizer step; `calculate_grpo_loss` gets A w_k N / N_k instead of the advantages A. Megatron's loss is homogeneous
of degree one in the advantages, so its sum over tokens, divided by N as --calculate-per-token-loss does, is the
weighted sum. Clipping, KL, entropy and importance correction stay Megatron's own. The state lies beside its
checkpoints.
Refuses: a loss without the per-token flag, unpacked batches (their advantages are rounded to bf16 and their rows are
not known), rewards that are not verdicts, groups of another size than --grpo-group-size.

Scale: N is the sum of the token counts that Megatron's loss_func returns, at least 1 for each micro-batch. Each
context-parallel rank computes the loss of whole sequences, so sums run over data-parallel ranks alone.

`Session` holds what one process knows about a collection of rollouts and the open optimizer step. It knows the layout
of Megatron's packed bins, but none of the modules that `install` changes. A packed bin holds several sequences; the
bins of advantages and weights are pass rates.

Shape letters: G groups, K rollouts per prompt, P log-probs of a packed bin, M sequences of a bin, R rows of the batch,
N rollouts of the collection.
"""

from __future__ import annotations

import functools
import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.algo.difficulty import pass_rate_bins
from megatron_daro.config.problems import Problem
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import DifficultyStep, SampleSums
from megatron_daro.plugins.host import ANY, Host
from megatron_daro.plugins.megatron_host import (
    checkpoint_problems,
    defaults_of,
    keep_state,
    over_data,
    over_data_and_stages,
)
from megatron_daro.plugins.options import PluginSection, read_options

logger = logging.getLogger(__name__)

HOST = Host("Megatron-LM", "megatron.core", ("0.19.0", "main at d98e8a64d"))
TESTED = " and ".join(HOST.tested)
"""The versions of Megatron-LM whose functions the tests run."""
_PROBE_TOLERANCE = 1e-3


@dataclass(slots=True, eq=False)
class PackedBin:
    """A packed bin that the script loaded.

    rows_M: int64 [M], the batch row of each sequence. spans: start and end of each sequence's log-probs. mask_P: bool
    [P], true for trained tokens.
    """

    index: int
    rows_M: Tensor
    spans: list[tuple[int, int]]
    mask_P: Tensor

    @property
    def lengths_M(self) -> Tensor:
        """Trained tokens of each sequence, int64 [M]."""
        counts = [int(self.mask_P[start:end].sum()) for start, end in self.spans]
        return torch.tensor(counts, dtype=torch.int64)

    def token_losses(self, losses_P: Tensor) -> SampleSums:
        """Return the sums per sequence of token losses [P]."""
        rows = [losses_P[start:end] for start, end in self.spans]
        return SampleSums.of_list(rows, [self.mask_P[start:end].to(losses_P.device) for start, end in self.spans])


@dataclass(slots=True, eq=False)
class Session:
    """DARO in this process."""

    step: DifficultyStep
    options: PluginSection
    per_turn: bool = False
    """Whether Megatron wants an advantage for each turn, as its newest release does, instead of each rollout."""
    bins_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    advantages_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    scored: tuple[Tensor, Tensor] | None = None
    """Bins and advantages of the rollouts that were last scored, in order; int64 and float64."""
    current: PackedBin | None = None
    divisor: float = 0.0
    seen: dict[int, tuple[SampleSums, Tensor]] = field(default_factory=dict)
    """Loss sums and pass-rate bins of each packed bin in the open step; a rerun of a packed bin replaces them."""

    def score(self, rewards: Sequence[Sequence[float]], num_turns: Sequence[Sequence[int]]) -> list[float]:
        """Return the advantages of the rollouts (or turns), group after group, in place of calculate_grpo_advantages.

        Args:
            rewards: [G][K]. num_turns: [G][K], 0 for a rollout that failed: its group carries no signal.

        Raises:
            AlgorithmError: rewards are not verdicts, or a group does not have K rollouts.
        """
        size, groups = self.step.rollouts_per_prompt, len(rewards)
        wrong = next((len(group) for group in rewards if len(group) != size), None)
        if wrong is not None:
            raise AlgorithmError(f"groups: got one of {wrong} answers, allowed are --grpo-group-size = {size}")
        rewards_N = torch.tensor([float(r) for group in rewards for r in group], dtype=torch.float64)
        group_N = torch.arange(groups).repeat_interleave(size)
        whole_N = torch.tensor([all(t > 0 for t in turns) for turns in num_turns]).repeat_interleave(size)
        bins_N = torch.zeros(len(rewards_N), dtype=torch.int64)
        advantages_N = torch.zeros_like(rewards_N)
        if bool(whole_N.any()):
            _, numbers_N = torch.unique(group_N[whole_N], return_inverse=True)
            correct_N = self.options.verdicts(rewards_N[whole_N])
            bins_N[whole_N] = pass_rate_bins(correct_N, numbers_N, size)
            advantages_N[whole_N] = self.step.algorithm.advantages(rewards_N[whole_N], numbers_N)
        if not bool(whole_N.all()):
            logger.warning(
                "DARO: %d of %d groups have failed rollouts and carry no signal", int((~whole_N).sum()) // size, groups
            )
        self.scored = bins_N, advantages_N
        if not self.per_turn:
            return advantages_N.tolist()
        turns_N = torch.tensor([int(t) for turns in num_turns for t in turns])
        return advantages_N.repeat_interleave(turns_N).tolist()

    def take_rows(self, rollouts_of_rows: Sequence[int], num_rollouts: int) -> None:
        """Keep bins and advantages of the rows of a batch.

        Args:
            rollouts_of_rows: the number of each row's rollout. num_rollouts: in the whole collection.

        Raises:
            AlgorithmError: the number of rollouts that were scored is not num_rollouts.
        """
        if self.scored is None or len(self.scored[0]) != num_rollouts:
            got = "none" if self.scored is None else str(len(self.scored[0]))
            raise AlgorithmError(
                f"pass rates: {got} were scored for {num_rollouts} rollouts, allowed is one for each: "
                f"calculate_grpo_advantages was not called, or rollouts were filtered; tested with Megatron-LM {TESTED}"
            )
        bins_N, advantages_N = self.scored
        rows = torch.tensor(list(rollouts_of_rows), dtype=torch.int64)
        self.bins_R, self.advantages_R, self.scored = bins_N[rows], advantages_N[rows], None

    def begin(self, bins: Sequence[PackedBin]) -> None:
        """Count the tokens of an optimizer step that will run these packed bins on this rank."""
        rows = torch.cat([b.rows_M for b in bins]) if bins else torch.zeros(0, dtype=torch.int64)
        lengths = torch.cat([b.lengths_M for b in bins]) if bins else rows
        real, reduce = rows < len(self.bins_R), over_data(with_context=False)
        self.step.begin(self._bins(rows[real]), lengths[real], reduce)
        own = float(sum(max(int(b.mask_P.sum()), 1) for b in bins))
        self.divisor = float(reduce(torch.tensor([own], dtype=torch.float64)))
        self.seen = {}

    def _bins(self, rows: Tensor) -> Tensor:
        """Return the bins of rows; numbers past the last row are padding, which trains nothing."""
        return torch.cat([self.bins_R, torch.zeros(1, dtype=torch.int64)])[rows.clamp(max=len(self.bins_R))]

    def _advantages(self, rows: Tensor) -> Tensor:
        return torch.cat([self.advantages_R, torch.zeros(1, dtype=torch.float64)])[rows.clamp(max=len(self.bins_R))]

    def reweighted(self, sent_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, factors w_k N / N_k (both float64 [M]) and pass-rate bins of the current packed bin.

        Args:
            sent_M: the advantages that the script loaded, rounded to the model's precision.

        Raises:
            AlgorithmError: no bin was loaded, or its advantages are not those of its rows.
        """
        if self.current is None:
            raise AlgorithmError("packed data: none was loaded, allowed is a run with --rl-use-sequence-packing")
        advantages_M, bins_M = self._advantages(self.current.rows_M), self._bins(self.current.rows_M)
        sent_M = sent_M.detach().to("cpu", torch.float64).flatten()
        if sent_M.shape != advantages_M.shape or not torch.allclose(sent_M, advantages_M, rtol=0.01, atol=0.01):
            raise AlgorithmError(
                f"advantages: rows {self.current.rows_M.tolist()} came with {_rounded(sent_M)}, their pass rates give "
                f"{_rounded(advantages_M)}, allowed are equal ones: rows were reordered, or advantages changed after "
                f"they were scored; tested with Megatron-LM {TESTED}"
            )
        ones_M = torch.ones(len(bins_M), dtype=torch.float64)
        factors_M = self.step.algorithm.bin_coefficients(bins_M, ones_M, self.step.totals).double() * self.divisor
        return advantages_M, factors_M, bins_M

    def end(self, *, applied: bool) -> dict[str, float]:
        """Close the step; metrics under the names of docs/metrics.md."""
        for sums, bins_M in self.seen.values():
            self.step.weigh(sums, bins_M)
        return self.step.end(over_data_and_stages(with_context=False), applied=applied)


def _rounded(values_M: Tensor) -> list[float]:
    return [round(float(value), 3) for value in values_M]


def probe(plain: SampleSums, weighed: SampleSums, factors_M: Tensor) -> None:
    """Check in the first step that multiplying advantages by a factor multiplies the loss by it."""
    wanted_M, got_M = plain.losses_M.cpu() * factors_M, weighed.losses_M.cpu()
    size_M = plain.abs_losses_M.cpu() * factors_M + 1e-12
    if not bool(((wanted_M - got_M).abs() <= _PROBE_TOLERANCE * size_M).all()):
        raise AlgorithmError(
            f"loss of the first step: with reweighted advantages Megatron's own loss gives {got_M.tolist()}, wanted is "
            f"{wanted_M.tolist()}, allowed is a difference of {_PROBE_TOLERANCE:g}: this version of Megatron-LM scales "
            f"or clips otherwise; use {TESTED}"
        )


MODULE = "megatron_daro.plugins.megatron_rl"
FUNCTIONS = {
    "rl_utils": (
        *("calculate_grpo_advantages", "prepare_data_for_update", "load_packed_data_by_index", "calculate_grpo_loss"),
        "get_rl_runtime_state",
    ),
    "training": ("train_step", "get_num_microbatches", "save_checkpoint", "load_checkpoint", "get_args"),
    "arguments": ("parse_and_validate_args", "_add_rl_args"),
}
"""What is looked up in megatron.rl.rl_utils, megatron.training.training and megatron.training.arguments."""
ROW_LAYOUTS = {"_is_collapsible_rollout": False, "PAD_TURN_UNIT": True}
"""A name that one version of megatron.rl.rl_utils has -> whether each turn is a row of the batch there; otherwise a
rollout whose turns continue one another is one row."""
NEEDED: dict[str, tuple[object, ...]] = {
    "perform_rl_step": (True,),
    "calculate_per_token_loss": (True,),
    "rl_use_sequence_packing": (True,),
    "virtual_pipeline_model_parallel_size": (None, 1),
}
_FREE = """
    rl_prompts_per_eval grpo_prompts_per_batch grpo_group_size rl_generation_lag rl_max_inflight_requests
    rl_submission_granularity rl_consumption_granularity rl_durable_rollout_bank rl_rollout_bank_dir
    rl_rollout_bank_max_bytes grpo_iterations grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta
    grpo_entropy_term_weight grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
    rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference rl_kv_cache_management_mode
    rl_persist_cuda_graphs rl_partial_rollouts rl_inference_logprobs_is_correction
    rl_importance_sampling_truncation_coef rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo
    rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size
    rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
    rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle refit_method
    rl_verify_model_weights_swap rl_skip_bos_token rl_profile rl_profile_dir rl_inference_parsers
"""
"""Options of Megatron-LM's RL that may have any value with DARO."""


class Arguments(Protocol):
    """The options of Megatron-LM that are read here."""

    grpo_group_size: int
    calculate_per_token_loss: bool
    rl_use_sequence_packing: bool
    perform_rl_step: bool
    context_parallel_size: int


class Namespace(Protocol):
    """A module of Megatron-LM, or a stand-in for it, whose functions are replaced."""

    __dict__: dict[str, object]


_session: Session | None = None


def session() -> Session:
    """Return this process's session.

    Raises:
        ConfigError: Megatron's options were not parsed through `install`.
    """
    if _session is None:
        raise ConfigError(
            f"DARO: Megatron-LM's options were not seen, allowed is a start as torchrun ... -m {MODULE} train_rl.py "
            "OPTIONS: start it so"
        )
    return _session


def start(args: Arguments, *, per_turn: bool = False, defaults: Mapping[str, object] = MappingProxyType({})) -> Session:
    """Check Megatron-LM's options and make the state.

    Args:
        args: its parsed options.
        per_turn: see ROW_LAYOUTS.
        defaults: of its RL options.

    Raises:
        ConfigError: lists every option that does not go with DARO.
    """
    global _session
    options, problems = read_options(), checkpoint_problems(args)
    if per_turn and int(getattr(args, "context_parallel_size", None) or 1) > 1:
        fix = "remove it, or use Megatron-LM's main branch"
        problems.append(Problem("--context-parallel-size", str(args.context_parallel_size), "1 in this version", fix))
    given = {name: getattr(args, name, None) for name in (*defaults, *NEEDED)}
    HOST.check(
        {name.replace("_", "-"): value for name, value in given.items()},
        {name.replace("_", "-"): values for name, values in {**dict.fromkeys(_FREE.split(), ANY), **NEEDED}.items()},
        defaults={name.replace("_", "-"): value for name, value in defaults.items()},
        options=options,
        prefix="--",
        further=problems,
    )
    step = DifficultyStep(options.algorithm(args.grpo_group_size))
    _session = Session(step, options, per_turn)
    HOST.announce(step, options)
    return _session


def _loaded(bin_index: int, columns: Sequence[object]) -> PackedBin:
    """Return the columns of `load_packed_data_by_index` that DARO reads."""
    mask, starts, lengths, rows = columns[3], columns[7], columns[8], columns[9]
    assert isinstance(mask, Tensor) and isinstance(starts, Sequence)
    assert isinstance(lengths, Sequence) and isinstance(rows, Sequence)
    mask_P = mask[0].detach().cpu() > 0
    # The log-prob of a token lies one place before the token, so a sequence has one log-prob fewer than tokens.
    spans = [(int(s), min(int(s) + int(n) - 1, len(mask_P))) for s, n in zip(starts, lengths, strict=False)]
    return PackedBin(bin_index, torch.tensor([int(r) for r in rows], dtype=torch.int64), spans, mask_P)


def install(rl_utils: Namespace, training: Namespace, arguments: Namespace) -> None:
    """Wrap functions of three modules of Megatron-LM with DARO; call it once per process, before the script runs.

    Args:
        rl_utils: megatron.rl.rl_utils. training: megatron.training.training. arguments: megatron.training.arguments.

    Raises:
        ConfigError: lists every function that this version lacks. Nothing is changed then.
    """
    modules = {"rl_utils": rl_utils, "training": training, "arguments": arguments}
    missing = [
        f"megatron.{'rl' if place == 'rl_utils' else 'training'}.{place}.{name}"
        for place, names in FUNCTIONS.items()
        for name in names
        if not hasattr(modules[place], name)
    ]
    layouts = [per_turn for name, per_turn in ROW_LAYOUTS.items() if hasattr(rl_utils, name)]
    if len(layouts) != 1:
        missing.append(f"one of megatron.rl.rl_utils.{' and '.join(ROW_LAYOUTS)}")
    if missing:
        raise ConfigError(
            f"{HOST.name} {HOST.version} does not have {', '.join(missing)}, which DARO's adapter needs; allowed are "
            f"{TESTED}: use one of them, or a megatron-daro for this one"
        )
    _wrap(arguments, "parse_and_validate_args", functools.partial(_parse, arguments, layouts[0]))
    _wrap(rl_utils, "calculate_grpo_advantages", lambda own, rewards, num_turns: session().score(rewards, num_turns))
    _wrap(rl_utils, "prepare_data_for_update", functools.partial(_prepare, rl_utils))
    _wrap(rl_utils, "load_packed_data_by_index", _load)
    _wrap(rl_utils, "calculate_grpo_loss", _loss)
    _wrap(training, "train_step", functools.partial(_train_step, rl_utils, training))
    keep_state(training, lambda: (session().step, session().options.start_fresh))  # type: ignore[arg-type]


def _wrap(module: Namespace, name: str, around: Callable[..., object]) -> None:
    """Replace a function by `around`, whose first argument is the function."""
    own = getattr(module, name)
    setattr(module, name, functools.wraps(own)(functools.partial(around, own)))


def _parse(
    arguments: Namespace, per_turn: bool, own: Callable[..., Arguments], *given: object, **options: object
) -> Arguments:
    args = own(*given, **options)
    start(args, per_turn=per_turn, defaults=defaults_of(arguments._add_rl_args))  # type: ignore[attr-defined]
    return args


def _prepare(rl_utils: Namespace, own: Callable[..., object], *arguments: object, **options: object) -> object:
    """Make Megatron's rows and note the rollout of each: one row for a rollout whose turns join, else one per turn."""
    rollouts = options.get("rollouts", arguments[2] if len(arguments) > 2 else None)
    assert isinstance(rollouts, Sequence)
    result = own(*arguments, **options)
    flat = [rollout for group in rollouts for rollout in group]
    joins: Callable[[object], bool] = getattr(rl_utils, "_is_collapsible_rollout", lambda rollout: False)
    rows = [
        number
        for number, rollout in enumerate(flat)
        for _ in range(1 if rollout.trajectory and joins(rollout) else len(rollout.trajectory))
    ]
    session().take_rows(rows, len(flat))
    return result


def _load(own: Callable[..., Sequence[object]], bin_index: int, *arguments: object, **options: object) -> object:
    columns = own(bin_index, *arguments, **options)
    session().current = _loaded(int(bin_index), columns)
    return columns


def _loss(own: Callable[..., Sequence[Tensor]], **given: object) -> Sequence[Tensor]:
    """Return Megatron's token losses with reweighted advantages, and note the losses with unweighted ones."""
    state, sent_M = session(), given["advantages"]
    assert isinstance(sent_M, Tensor)
    advantages_M, factors_M, bins_M = state.reweighted(sent_M)
    assert state.current is not None  # checked
    device = given["current_logprobs"].device  # type: ignore[attr-defined]
    result = own(**{**given, "advantages": (advantages_M * factors_M).to(device)})
    with torch.no_grad():
        alone = {**given, "kl_beta": 0.0, "entropy_weight": 0.0}
        plain_P = own(**{**alone, "advantages": advantages_M.to(device)})[0][0]
        sums = state.current.token_losses(plain_P)
        if state.step.first_here:
            weighed_P = own(**{**alone, "advantages": (advantages_M * factors_M).to(device)})[0][0]
            probe(sums, state.current.token_losses(weighed_P), factors_M)
    state.seen[state.current.index] = sums, bins_M
    return result


def _train_step(
    rl_utils: Namespace,
    training: Namespace,
    own: Callable[..., tuple[object, ...]],
    forward_step_func: object,
    data_iterator: Iterator[Sequence[Tensor]],
    *arguments: object,
    **options: object,
) -> tuple[object, ...]:
    """Take one optimizer step of Megatron's loop, after counting the tokens of all its micro-batches."""
    state = session()
    number: int = training.get_num_microbatches()  # type: ignore[attr-defined]
    items = [next(data_iterator) for _ in range(number)]
    if hasattr(data_iterator, "advance"):
        data_iterator.advance()  # it keeps what it handed out until `advance` says that the step was good
    context = rl_utils.get_rl_runtime_state().packing_context  # type: ignore[attr-defined]
    if context is None:
        raise AlgorithmError("packed data: none was made, allowed is a run with --rl-use-sequence-packing")
    load: Callable[..., Sequence[object]] = rl_utils.load_packed_data_by_index  # type: ignore[attr-defined]
    bins = [_loaded(int(item[0].item()), load(int(item[0].item()), context, False)) for item in items]
    state.begin(bins)
    state.current = None
    replay = type(data_iterator)(iter(items))  # type: ignore[call-arg]
    result = own(forward_step_func, replay, *arguments, **options)
    if result[3]:  # Megatron is about to exit and has updated nothing
        return result
    metrics = state.end(applied=not result[1])
    report = result[0]
    if isinstance(report, dict) and report:
        device = next(iter(report.values())).device
        report.update({name: torch.tensor(value, device=device) for name, value in metrics.items()})
    return result


def main(words: Sequence[str]) -> None:
    """Run Megatron-LM's script with DARO: its path, then its options.

    Raises:
        ConfigError: no script is given, or Megatron-LM cannot be imported.
    """
    if not words or not Path(words[0]).is_file():
        raise ConfigError(
            f"script: got {words[:1]}, allowed is Megatron-LM's train_rl.py, then its options: give it first"
        )
    script = Path(words[0]).resolve()
    sys.path.insert(0, str(script.parent))
    try:
        names = ("megatron.rl.rl_utils", "megatron.training.training", "megatron.training.arguments")
        install(*(importlib.import_module(name) for name in names))
    except ImportError as error:
        raise ConfigError(
            f"Megatron-LM: {error}; allowed is a checkout with the requirements of its RL example, in whose root "
            f"{script.name} lies"
        ) from error
    sys.argv = [str(script), *words[1:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    # Through the import system: the script's hooks and this module must share one session.
    importlib.import_module(MODULE).main(sys.argv[1:])
