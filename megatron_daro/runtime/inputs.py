"""What a run reads from files before it generates: model shape, tokenizer, stop tokens, and the problems in their
order.

A start and its dry run both read here, before Ray or any process of the run is started. Everything that was dropped
from the data is reported, and so are pass rates that were measured with a model other than the one to be trained. An
evaluation set that would lose rows is rejected, unless its `drop_unusable` is set.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_daro.config import Config
from megatron_daro.config.sections import DataSection, EvalSet, EvalTemplate
from megatron_daro.convert.transformers_shape import read_compared_shape
from megatron_daro.data.formats import PassRate
from megatron_daro.data.orders import Curriculum, Epochs, Mix, Prioritised
from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import Stops, read_stops
from megatron_daro.data.templates import TEMPLATES, HeldOut, check_tokenizer, trained_with
from megatron_daro.data.tokenizer import TokenizeReport, load_tokenizer, tokenize_prompts
from megatron_daro.environments.own import is_agent, try_turns
from megatron_daro.errors import ConfigError, DataError, ModelError
from megatron_daro.rollout import protocol
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import provenance
from megatron_daro.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_source(
    config: Config, prompts: Sequence[Prompt], known: Mapping[str, PassRate], notices: Notices
) -> protocol.PromptSource:
    """Return the endless stream of training prompts in the order of the configuration.

    Args:
        config: checked. prompts: tokenised. known: pass rates of the files, by prompt id.
        notices: told with which model pass rates were measured.

    Raises:
        DataError: the order, or data.pass_rates, needs pass rates that the files do not have, or no problem is left.
    """
    data = config.data
    if data.pass_rates is not None:
        prompts = _inside(data.pass_rates, prompts, known, notices)
    if known:
        _say_whose(config, prompts, known, notices)
    rates = {prompt_id: one.rate for prompt_id, one in known.items()}
    weights = {one.name: one.weight for one in config.environments if one.weight is not None}
    if not weights:
        return _in_order(config, prompts, rates, planned_prompts(config))
    names, sources = config.environment_of_source, {}
    for name, weight in weights.items():
        own = [prompt for prompt in prompts if names[prompt.source] == name]
        if not own:
            raise DataError(
                f"environments: {name} has no problem in data.train; fix: remove it, or correct its sources"
            )
        share = weight / sum(weights.values())
        sources[name] = _in_order(config, own, rates, math.ceil(share * planned_prompts(config)))
    return Mix(sources, weights)


def _in_order(
    config: Config, prompts: Sequence[Prompt], rates: Mapping[str, float], planned: int
) -> Epochs | Curriculum | Prioritised:
    """Return the stream of these prompts alone. Args: planned: how many of them the run takes."""
    data, seed = config.data, config.trainer.seed
    if data.order == "curriculum":
        return Curriculum(prompts, rates, data.curriculum, seed=seed, ramp=planned // 2)
    if data.order == "prioritised":
        return Prioritised(prompts, rates, data.prioritised, seed=seed)
    return Epochs(prompts, seed=seed, shuffle=data.shuffle)


def _inside(
    band: tuple[float, float], prompts: Sequence[Prompt], known: Mapping[str, PassRate], notices: Notices
) -> Sequence[Prompt]:
    """Return the prompts whose pass rate lies in the band, ends included; one notice says how many were left out."""
    if missing := sum(prompt.id not in known for prompt in prompts):
        raise DataError(
            f"data.pass_rates: got {list(band)}, but {missing} of {len(prompts)} problems have no pass rate; allowed: "
            "files with the field pass_rate in every row; fix: measure them with megatron-daro curate FILE --hf MODEL "
            "--samples 10 --out DIR and train on DIR/curated.parquet, or leave it unset"
        )
    easier = sum(known[prompt.id].rate > band[1] for prompt in prompts)
    kept = [prompt for prompt in prompts if band[0] <= known[prompt.id].rate <= band[1]]
    harder = len(prompts) - len(kept) - easier
    left_out = f"{easier} easier and {harder} harder than data.pass_rates {list(band)}"
    if not kept:
        raise DataError(f"data.pass_rates: no problem of {len(prompts)} is left: {left_out}; allowed: a wider band")
    notices.notice(f"training data: left out {easier + harder} of {len(prompts)} problems, {left_out}")
    return kept


def planned_prompts(config: Config) -> int:
    """Return how many prompts the steps of the run take, not counting those that a filter rejects."""
    return math.ceil(config.trainer.steps / config.trainer.steps_per_batch) * config.rollout.prompts_per_batch


def weights_digest(model: Path) -> str:
    """Return a digest that identifies the weights of a Hugging Face directory; empty if there are none."""
    files = sorted(provenance.weight_files(model).items())
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16] if files else ""


def _say_whose(config: Config, prompts: Sequence[Prompt], known: Mapping[str, PassRate], notices: Notices) -> None:
    """Give one notice for each model with which pass rates were measured, and one if some problems have none."""
    model = config.model
    own = ("", model.megatron_weights.name) if model.megatron_weights else (weights_digest(model.path), model.path.name)
    counts: dict[tuple[str, str], int] = {}
    for prompt in prompts:
        one = known.get(prompt.id)
        if one is not None:
            counts[one.weights, one.model] = counts.get((one.weights, one.model), 0) + 1
    for (weights, name), count in counts.items():
        if weights and weights == own[0]:
            notices.notice(f"training data: pass rates of {count} problems were measured with this model ({name})")
            continue
        measured = f"{name or 'a model that the file does not name'} (weights {weights or 'not named'})"
        notices.notice(
            f"training data: pass rates of {count} problems were measured with another model: {measured}; this run "
            f"starts from {own[1]} (weights {own[0] or 'in Megatron form'})"
        )
    missing = len(prompts) - sum(counts.values())
    if missing:
        notices.notice(f"training data: {missing} of {len(prompts)} problems have no pass rate in their file")


def held_out_sets(section: DataSection, tokenizer: PreTrainedTokenizerBase, notices: Notices) -> list[HeldOut]:
    """Return every evaluation set, tokenised; repeated problems stay, since the size of a set is part of its score.

    Raises:
        DataError: a file cannot be used, or a set would lose rows (see data.eval.*.drop_unusable).
    """
    return [_held_out(section, f"data.eval.{index}", one, tokenizer, notices) for index, one in enumerate(section.eval)]


def training_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[HeldOut],
    *,
    notices: Notices,
    ends: int | None = None,
) -> tuple[protocol.PromptSource, TokenizeReport]:
    """Return the endless stream of training prompts, and the report of their tokenisation. Problems that are also in an
    evaluation set are reported.

    Args:
        ends: read only this many first and last rows of each file, for a quick look.
    """
    section = config.data
    problems, report = load_problems(
        section.train,
        section.format,
        section.problem_field,
        section.answer_field,
        environment_of_source=config.environment_of_source,
        with_turns={getattr(one, "name", "") for one in config.all_environments if one.has_turns},
        ends=ends,
        held_out={one.section.name: one.prompts for one in held_out},
    )
    _say(notices, "training data", report.summary())
    prompts, written = _tokenised(section, problems, tokenizer, "data")
    prompts = _begun(config, prompts, "data.train")
    _say(notices, "training data", written.summary())
    return prompt_source(config, prompts, report.pass_rates, notices), written


def _held_out(
    section: DataSection, field: str, one: EvalSet, tokenizer: PreTrainedTokenizerBase, notices: Notices
) -> HeldOut:
    problems, report = load_problems([one.path], one.format, one.problem_field, one.answer_field, repeats="keep")
    _say(notices, f"evaluation set {one.name}", report.summary())
    if one.rows is not None and report.rows != one.rows:
        raise DataError(
            f"{field} ({one.name}): {one.path} has {report.rows} rows; allowed: {one.rows}, since its accuracy would "
            f"be that of another set; fetch the file again, or set {field}.rows to the number that you mean"
        )
    problems = problems[: one.max_prompts]
    prompts, written = _tokenised(section, problems, tokenizer, one.template)
    summary = written.summary()
    _say(notices, f"evaluation set {one.name}", summary)
    lost = report.num_dropped + len(problems) - len(prompts)
    if lost and not one.drop_unusable:
        why = "; ".join(line for line in (*report.summary().splitlines(), *summary.splitlines()) if "dropped" in line)
        raise DataError(
            f"{field} ({one.name}): {lost} of {report.rows} rows of {one.path} cannot be used, so its accuracy would "
            f"be that of another set: {why}; repair the rows, or set {field}.drop_unusable=true to score the rest"
        )
    return HeldOut(one, tuple(prompts), trained_with(section), written.opens_thinking)


def _begun(config: Config, prompts: Sequence[Prompt], field: str) -> list[Prompt]:
    """Return the prompts; cut those for agents to their first token: the agent writes all others.

    Raises:
        DataError: a data source belongs to none of several environments.
    """
    names = config.environment_of_source
    if names and (strange := sorted({prompt.source for prompt in prompts} - names.keys())):
        raise DataError(
            f"{field}: got problems of the data source {', '.join(map(repr, strange))}, which none of environments "
            f"names; allowed: {', '.join(map(repr, names))}; fix: add it to the sources of an environment, or write "
            "its name into the rows' data_source (a file without that is called as its name says)"
        )
    agents = {getattr(one, "name", "") for one in config.all_environments if is_agent(one)}
    return [
        replace(prompt, tokens=prompt.tokens[:1]) if names.get(prompt.source, "") in agents else prompt
        for prompt in prompts
    ]


def _tokenised(
    section: DataSection, problems: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, name: EvalTemplate
) -> tuple[list[Prompt], TokenizeReport]:
    """Return the problems as the template of this name writes them; "data": as the section says."""
    form: Literal["chat", "plain"] = "chat" if section.prompt_template == "chat" else "plain"
    text, template = section.template, trained_with(section) if name == "data" else TEMPLATES[name]
    if template:
        check_tokenizer(section.prompt_template if name == "data" else name, tokenizer)
        form, text = template.form, template.text
    return tokenize_prompts(
        problems, tokenizer, prompt_template=form, template=text, max_prompt_tokens=section.max_prompt_tokens
    )


def _say(notices: Notices, what: str, summary: str) -> None:
    for line in summary.splitlines():
        notices.notice(f"{what}: {line}")


@dataclass(frozen=True, slots=True)
class Inputs:
    """stops: what ends an answer. tokenizer: of transformers. opens_thinking: whether training's prompts end with a
    <think>."""

    tokenizer: PreTrainedTokenizerBase
    stops: Stops
    held_out: list[HeldOut]
    prompts: protocol.PromptSource
    opens_thinking: bool = False


def read_inputs(config: Config, notices: Notices, *, ends: int | None = None) -> Inputs:
    """Read tokenizer and problems.

    Args:
        config: checked.
        notices: told what was found and what was left out.
        ends: read only this many first and last rows of each training file, for a quick look.

    Raises:
        ModelError: transformers, and so the engines, would build another model from config.json than the actor; or the
            tokenizer cannot be used. DataError: the problems cannot be used. ConfigError: the chat template cannot
            write the turns of an environment.
    """
    shape = read_compared_shape(config.model.path)
    tokenizer = load_tokenizer(
        config.model.path,
        config.model.trust_remote_code,
        chat_template=config.data.prompt_template == "chat",
        date=config.data.template_date,
    )
    try_turns(config.all_environments, tokenizer, config.data.prompt_template)
    stops = answer_stops(config, tokenizer)
    held_out = held_out_sets(config.data, tokenizer, notices)
    held_out = [
        replace(one, prompts=tuple(_begun(config, one.prompts, f"data.eval.{i}"))) for i, one in enumerate(held_out)
    ]
    prompts, written = training_prompts(config, tokenizer, held_out, notices=notices, ends=ends)
    _check_vocabulary(
        config, tokenizer, shape.vocab, [written.largest_id, *(max(p.tokens) for s in held_out for p in s.prompts)]
    )
    return Inputs(tokenizer, stops, held_out, prompts, written.opens_thinking)


def _check_vocabulary(
    config: Config, tokenizer: PreTrainedTokenizerBase, vocab: int, prompt_ids: Sequence[int]
) -> None:
    """Refuse prompts with a token that the model has no embedding for. prompt_ids: the largest ones."""
    largest = max(prompt_ids)
    if largest >= vocab:
        raise ModelError(
            f"model.path: the tokenizer in {config.model.path} writes prompts with token {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}); allowed: ids below {vocab} (vocab_size of config.json); "
            "fix: take tokenizer and weights that belong together"
        )


def answer_stops(config: Config, tokenizer: PreTrainedTokenizerBase) -> Stops:
    """Return what ends a training answer.

    Raises:
        ModelError: as in `read_stops`. ConfigError: SGLang servers without a tokenizer could not find the texts that
            end answers.
    """
    rollout, template = config.rollout, trained_with(config.data)
    stops = read_stops(
        tokenizer, stop=rollout.stop, extra_ids=rollout.stop_token_ids, model_path=config.model.path
    ).with_texts(template.stop if template else ())
    stops = replace(stops, repetition=rollout.repetition.looked_for)
    without_tokenizer = config.engine.sglang.named_arguments.get("skip_tokenizer_init")
    if config.engine.kind == "sglang" and without_tokenizer and ends_at_texts(config, stops):
        raise ConfigError(
            "engine.sglang.arguments.skip_tokenizer_init: got true, but answers end at texts (rollout.stop, a "
            "template's such as </answer>, or an agent's), which SGLang finds with its tokenizer only; allowed: false; "
            "fix: leave it out"
        )
    return stops


def ends_at_texts(config: Config, stops: Stops) -> bool:
    """Whether some answer of the run may end at a text; agents name their own. Args: stops: those of training."""
    of_sets = [TEMPLATES[one.template].stop for one in config.data.eval if one.template != "data"]
    return bool(stops.texts or any(of_sets) or any(map(is_agent, config.all_environments)))
