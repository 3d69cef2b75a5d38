"""DARO inside Megatron-LM's own RL script: `torchrun ... -m megatron_daro.plugins.megatron_rl train_rl.py OPTIONS`.

Megatron-LM has no hook, but its script and its loop look functions up in modules, and `install` puts DARO's around
them. Options are checked when they are parsed; `calculate_grpo_advantages` sees whole groups;
`prepare_data_for_update` says which rollout a row of the batch is of; `train_step` counts tokens before an optimizer
step and learns after it; `calculate_grpo_loss` gets advantages A w_k N / N_k. Megatron's loss is homogeneous of degree
one in them, so its sum over tokens, divided by N as --calculate-per-token-loss does, is the weighted sum. Clipping, KL,
entropy and importance correction stay Megatron's own. The state lies beside its checkpoints.
Refuses: a loss without the per-token flag, unpacked batches (their advantages are rounded to bf16 and their rows not
known), rewards that are no verdicts, another number of answers than --grpo-group-size.

Scale: N is the sum of the token counts that Megatron's loss_func returns, at least 1 for each micro-batch. Each
context-parallel rank computes the loss of whole sequences, so sums run over data-parallel ranks alone.

Shape letters: P log-probs of a packed bin, M sequences of a bin.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.config.problems import Problem
from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import DifficultyStep
from megatron_daro.plugins.host import ANY
from megatron_daro.plugins.megatron_host import checkpoint_problems, defaults_of, keep_state
from megatron_daro.plugins.megatron_rl_session import HOST, TESTED, PackedBin, Session, probe
from megatron_daro.plugins.options import read_options

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
"""A name of megatron.rl.rl_utils -> whether each turn is a row of the batch, and not each rollout whose turns follow
one another."""
NEEDED: dict[str, tuple[object, ...]] = {
    "perform_rl_step": (True,),
    "calculate_per_token_loss": (True,),
    "rl_use_sequence_packing": (True,),
    "virtual_pipeline_model_parallel_size": (None, 1),
}
_FREE = """
    rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag rl_max_inflight_requests
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
"""Options of Megatron-LM's RL that go with DARO whatever they say."""


class Arguments(Protocol):
    """What is read of Megatron-LM's options."""

    grpo_group_size: int
    calculate_per_token_loss: bool
    rl_use_sequence_packing: bool
    perform_rl_step: bool
    context_parallel_size: int


class Namespace(Protocol):
    """A module of Megatron-LM, or what stands in for it; functions of it are replaced."""

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
        args: as it parsed them.
        per_turn: see ROW_LAYOUTS.
        defaults: of its options of RL.

    Raises:
        ConfigError: lists every option that DARO does not go with.
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


def _loaded(bin_index: int, found: Sequence[object]) -> PackedBin:
    """Return what `load_packed_data_by_index` found, as far as DARO reads it."""
    mask, starts, lengths, rows = found[3], found[7], found[8], found[9]
    assert isinstance(mask, Tensor) and isinstance(starts, Sequence)
    assert isinstance(lengths, Sequence) and isinstance(rows, Sequence)
    mask_P = mask[0].detach().cpu() > 0
    # The log-prob of a token lies one place before it, so a sequence has one less than it has tokens.
    spans = [(int(s), min(int(s) + int(n) - 1, len(mask_P))) for s, n in zip(starts, lengths, strict=False)]
    return PackedBin(bin_index, torch.tensor([int(r) for r in rows], dtype=torch.int64), spans, mask_P)


def install(rl_utils: Namespace, training: Namespace, arguments: Namespace) -> None:
    """Put DARO around functions of three modules of Megatron-LM; once per process, before its script is run.

    Args:
        rl_utils: megatron.rl.rl_utils. training: megatron.training.training. arguments: megatron.training.arguments.

    Raises:
        ConfigError: names every function that is not there: another version. Nothing is changed then.
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
    """Megatron's rows, and which rollout each is of: one for a rollout, or one for each turn that stands alone."""
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
    found = own(bin_index, *arguments, **options)
    session().current = _loaded(int(bin_index), found)
    return found


def _loss(own: Callable[..., Sequence[Tensor]], **given: object) -> Sequence[Tensor]:
    """Megatron's token losses with reweighted advantages; notes its own losses with the advantages as they are."""
    state, sent_M = session(), given["advantages"]
    assert isinstance(sent_M, Tensor)
    advantages_M, factors_M, bins_M = state.reweighted(sent_M)
    assert state.current is not None  # checked
    device = given["current_logprobs"].device  # type: ignore[attr-defined]
    found = own(**{**given, "advantages": (advantages_M * factors_M).to(device)})
    with torch.no_grad():
        alone = {**given, "kl_beta": 0.0, "entropy_weight": 0.0}
        plain_P = own(**{**alone, "advantages": advantages_M.to(device)})[0][0]
        sums = state.current.token_losses(plain_P)
        if state.step.steps == 0:
            weighed_P = own(**{**alone, "advantages": (advantages_M * factors_M).to(device)})[0][0]
            probe(sums, state.current.token_losses(weighed_P), factors_M)
    state.seen[state.current.index] = sums, bins_M
    return found


def _train_step(
    rl_utils: Namespace,
    training: Namespace,
    own: Callable[..., tuple[object, ...]],
    forward_step_func: object,
    data_iterator: Iterator[Sequence[Tensor]],
    *arguments: object,
    **options: object,
) -> tuple[object, ...]:
    """One optimizer step of Megatron's loop, whose micro-batches are looked at before it begins."""
    state = session()
    number: int = training.get_num_microbatches()  # type: ignore[attr-defined]
    items = [next(data_iterator) for _ in range(number)]
    if hasattr(data_iterator, "advance"):
        data_iterator.advance()  # it keeps what it handed out until somebody says that the step was good
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
        ConfigError: no script, or Megatron-LM is not there.
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
