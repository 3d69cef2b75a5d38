"""DARO inside Megatron-LM's own RL script: `torchrun ... -m megatron_daro.plugins.megatron_rl train_rl.py OPTIONS`.

Megatron-LM has no hook, but its script and its loop look functions up in modules, and `install` puts DARO's around
them. Options are checked when they are parsed; `calculate_grpo_advantages` sees whole groups;
`prepare_data_for_update` says which rollout a row of the batch is of; `train_step` counts tokens before an optimizer
step and learns after it; `calculate_grpo_loss` gets advantages A w_k N / N_k. Megatron's loss is homogeneous of degree
one in them, so its sum over tokens, divided by N as --calculate-per-token-loss does, is the weighted sum. Clipping, KL,
entropy and importance correction stay Megatron's own. The state lies in its checkpoints.
Refuses: a loss without the per-token flag, unpacked batches (their advantages are rounded to bf16 and their rows not
known), rewards that are no verdicts, another number of answers than --grpo-group-size.

Scale: N is the sum of the token counts that Megatron's loss_func returns, at least 1 for each micro-batch. Each
context-parallel rank computes the loss of whole sequences, so sums run over data-parallel ranks alone.

Shape letters: P log-probs of a packed bin, M sequences of a bin.
"""

from __future__ import annotations

import functools
import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_daro.errors import AlgorithmError, ConfigError
from megatron_daro.plugins.core import DifficultyStep
from megatron_daro.plugins.megatron_host import carry
from megatron_daro.plugins.megatron_rl_session import TESTED, PackedBin, Session, probe
from megatron_daro.plugins.options import read_options

logger = logging.getLogger(__name__)

MODULE = "megatron_daro.plugins.megatron_rl"


class Arguments(Protocol):
    """What is read of Megatron-LM's options."""

    grpo_group_size: int
    calculate_per_token_loss: bool
    rl_use_sequence_packing: bool
    perform_rl_step: bool


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


def start(args: Arguments) -> Session:
    """Check Megatron-LM's options and make the state.

    Raises:
        ConfigError: lists every option that DARO does not go with.
    """
    global _session
    wanted = {"perform_rl_step": True, "calculate_per_token_loss": True, "rl_use_sequence_packing": True}
    problems = [
        f"--{name.replace('_', '-')}: missing, needed with DARO: add it"
        for name, value in wanted.items()
        if bool(getattr(args, name, False)) is not value
    ]
    if int(getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        problems.append("--num-layers-per-virtual-pipeline-stage: given, DARO was not tested with it: remove it")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"Megatron-LM's options do not go with DARO:\n{lines}")
    options = read_options()
    step = DifficultyStep(options.algorithm(args.grpo_group_size))
    _session = Session(step, options)
    carry(lambda: (session().step, session().options.start_fresh))
    logger.warning("DARO is on: %d bins, weights %s", args.grpo_group_size + 1, step.algorithm.weights)
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
        ConfigError: a function is not there: another version.
    """
    _wrap(arguments, "parse_and_validate_args", _parse)
    _wrap(rl_utils, "calculate_grpo_advantages", lambda own, rewards, num_turns: session().score(rewards, num_turns))
    _wrap(rl_utils, "prepare_data_for_update", functools.partial(_prepare, rl_utils))
    _wrap(rl_utils, "load_packed_data_by_index", _load)
    _wrap(rl_utils, "calculate_grpo_loss", _loss)
    _wrap(training, "train_step", functools.partial(_train_step, rl_utils, training))


def _wrap(module: Namespace, name: str, around: Callable[..., object]) -> None:
    """Replace a function by `around`, whose first argument is the function."""
    own = getattr(module, name, None)
    if own is None:
        raise ConfigError(
            f"{getattr(module, '__name__', module)} has no {name}, allowed is Megatron-LM at commit {TESTED} or near"
        )
    setattr(module, name, functools.wraps(own)(functools.partial(around, own)))


def _parse(own: Callable[..., Arguments], *arguments: object, **options: object) -> Arguments:
    args = own(*arguments, **options)
    start(args)
    return args


def _prepare(rl_utils: Namespace, own: Callable[..., object], *arguments: object, **options: object) -> object:
    """Megatron's rows, and which rollout each is of: one for a rollout, or one for each turn that stands alone."""
    rollouts = options.get("rollouts", arguments[2] if len(arguments) > 2 else None)
    assert isinstance(rollouts, Sequence)
    result = own(*arguments, **options)
    flat = [rollout for group in rollouts for rollout in group]
    collapsible: Callable[[object], bool] = rl_utils._is_collapsible_rollout  # type: ignore[attr-defined]
    rows = [
        number
        for number, rollout in enumerate(flat)
        for _ in range(1 if rollout.trajectory and collapsible(rollout) else len(rollout.trajectory))
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
