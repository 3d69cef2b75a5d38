"""Checks of what is trained on and how: data files, sampling, algorithm, run, and the division over the layout.

Called by checks.py, one function per subject; each yields every problem it finds. A model has to divide over its
layout (heads, layers over the stages, experts): Megatron would stop in the middle of a start and not say which option
to change.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_daro.config.actor import ActorSection
from megatron_daro.config.base import filled
from megatron_daro.config.data_file import why_no_file
from megatron_daro.config.model_files import ModelFiles
from megatron_daro.config.model_shape import ExpertShape, ModelShape
from megatron_daro.config.problems import Problem, show
from megatron_daro.config.sections import Config, EnvironmentSection

_PARQUET_MAGIC = b"PAR1"
_WRITE = "write one problem per line, or name another file"
_LEAST_TEMPERATURE = 1e-3
_GSPO_WIDEST = 0.01
"""Source: GSPO arXiv 2507.18071, section 5: 3e-4 below and 4e-4 above; this is far beyond any published setting."""
_STEPS_OF_A_BATCH = ("trainer.updates_per_batch", "trainer.epochs_per_batch")


def data_files(config: Config) -> Iterator[Problem]:
    """Every data file is there, not empty, and of a known kind."""
    data = config.data
    for index, path in enumerate(data.train):
        yield from _file_problems(f"data.train.{index}", path, data.format)
    for index, eval_set in enumerate(data.eval):
        yield from _file_problems(f"data.eval.{index}.path", eval_set.path, eval_set.format)
    files = [path.resolve() for path in data.train if path.is_file()]
    for path in sorted({path for path in files if files.count(path) > 1}):
        got = f"{str(path)!r} {files.count(path)} times"
        yield Problem("data.train", got, "each file once: its problems would come twice as often", "remove one of them")
    if (number := data.template.count("{prompt}")) != 1:
        got, fix = f"{show(data.template)}, with {number} times {{prompt}}", "leave one, where the problem goes"
        yield Problem("data.template", got, "a text with {prompt} once", fix)
    yield from named_templates(config)
    if data.pass_rates is not None and data.pass_rates[0] > data.pass_rates[1]:
        got, fix = show(list(data.pass_rates)), f"set data.pass_rates={sorted(data.pass_rates)}"
        yield Problem("data.pass_rates", got, "the lower one first", fix)
    names = [eval_set.name for eval_set in data.eval]
    for name in sorted({name for name in names if names.count(name) > 1}):
        allowed = "a different name for each set: it names the metric"
        yield Problem("data.eval", f"the name {name!r} {names.count(name)} times", allowed, "rename one of the sets")


def named_templates(config: Config) -> Iterator[Problem]:
    """Yield what does not go with a named template: it is the whole text, and its tags are verified as mathematics."""
    data, verifier = config.data, config.reward.verifier
    if data.prompt_template not in ("chat", "plain") and data.template != "{prompt}":
        allowed = f"{{prompt}} with data.prompt_template={data.prompt_template}, which is the whole text"
        fix = "leave data.template out, or set data.prompt_template=plain"
        yield Problem("data.template", show(data.template), allowed, fix, also=("data.prompt_template",))
    tagged: dict[str, str] = {"data.prompt_template": data.prompt_template}
    tagged |= {f"data.eval.{i}.template": one.template for i, one in enumerate(data.eval)}
    for field, name in tagged.items():
        if name == "r1" and verifier in ("integer", "exact"):
            got, fix = f"r1 with reward.verifier={verifier}", "set reward.verifier=math"
            yield Problem(field, got, "r1 with the verifier math, or one of your own", fix, also=("reward.verifier",))


def data_text(config: Config) -> str:
    """Return what there is, for the report."""
    return f"{len(config.data.train)} for training, {len(config.data.eval)} for evaluation"


def _file_problems(field: str, path: Path, form: str) -> Iterator[Problem]:
    allowed = "a file of problems that is not empty"
    if why := why_no_file(path):
        fix = _WRITE if "empty" in why else "check the path; it is relative to the working directory"
        yield Problem(field, f"{str(path)!r}, which {why}", allowed, fix)
        return
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        yield Problem(field, f"{str(path)!r}: {error.strerror}", allowed, "make the file readable")
        return
    if not start.strip():
        yield Problem(field, f"{str(path)!r}, which is an empty file", allowed, _WRITE)
        return
    parquet = start.startswith(_PARQUET_MAGIC)
    if parquet and not _ends_with(path, _PARQUET_MAGIC):
        yield Problem(field, f"{str(path)!r}, a torn Parquet file", allowed, "copy or write the file again")
    if (form == "parquet" and not parquet) or (form == "jsonl" and parquet):
        got = f"{str(path)!r}, which is {'a' if parquet else 'no'} Parquet file, with format {form}"
        yield Problem(field, got, f"a {form} file", "set the format to auto", also=("data.format",))


def _ends_with(path: Path, magic: bytes) -> bool:
    """Source: the Parquet format: a file begins and ends with its magic number."""
    with path.open("rb") as file:
        file.seek(-len(magic), 2)
        return file.read(len(magic)) == magic


def sampling(config: Config, model: ModelFiles) -> Iterator[Problem]:
    """Check that the rollouts of a group can differ, can end, and may be kept."""
    rollout = config.rollout
    temperatures = {"rollout": rollout.temperature}
    temperatures |= {f"data.eval.{i}": eval_set.temperature for i, eval_set in enumerate(config.data.eval)}
    for field, temperature in temperatures.items():
        if 0 < temperature < _LEAST_TEMPERATURE:
            allowed = f"0 (greedy), or at least {_LEAST_TEMPERATURE:g}: logits are divided by it"
            yield Problem(f"{field}.temperature", f"{temperature:g}", allowed, f"set {field}.temperature=1.0")
    if rollout.temperature == 0:
        got = f"0 with {rollout.rollouts_per_prompt} rollouts per prompt, which would all be equal"
        yield Problem("rollout.temperature", got, "> 0 for training", "set rollout.temperature=1.0")
    if rollout.keep_surplus and rollout.max_staleness == 0:
        fix = "set rollout.keep_surplus=false or rollout.max_staleness=1"
        yield Problem(
            "rollout.keep_surplus", "true with max_staleness 0, where kept groups would be too old",
            "true only with max_staleness >= 1", fix, also=("rollout.max_staleness",),
        )  # fmt: skip
    if model.shape:
        too_large = [token for token in rollout.stop_token_ids if token >= model.shape.vocab]
        if too_large:
            allowed = f"ids below {model.shape.vocab}, the model's vocabulary"
            fix = "use the ids of this model's tokenizer"
            yield Problem("rollout.stop_token_ids", str(too_large), allowed, fix, also=("model.path",))
        if not (model.has_end_token or rollout.stop or rollout.stop_token_ids):
            got = "nothing, and the model's files name no end token"
            fix = "set rollout.stop_token_ids, or eos_token_id in config.json"
            allowed = "at least one token that ends an answer"
            yield Problem("rollout.stop_token_ids", got, allowed, fix, also=("model.path", "rollout.stop"))
    for index, eval_set in enumerate(config.data.eval):
        if eval_set.temperature == 0 and eval_set.rollouts_per_prompt > 1:
            got = f"0 with {eval_set.rollouts_per_prompt} rollouts per prompt, which would all be equal"
            fix = "raise the temperature or set rollouts_per_prompt to 1"
            yield Problem(f"data.eval.{index}.temperature", got, "> 0 with several rollouts", fix)


def sampling_warnings(config: Config) -> Iterator[Problem]:
    """Return sampling that works but is probably not meant."""
    rollout, loss = config.rollout, config.algorithm
    if rollout.max_staleness > 0 and loss.correction.kind == "none" and loss.trust_region != "gspo":
        got = f"none with rollout.max_staleness {rollout.max_staleness}"
        fix = "set algorithm.correction.kind=tis"
        allowed = "tis or mis, or algorithm.trust_region=gspo, are advised off-policy"
        yield Problem("algorithm.correction.kind", got, allowed, fix, also=("rollout.max_staleness",))
    early = rollout.finishes_early(config.engine.kind)
    if early and config.engine.kind == "embedded":
        got = "enough with the embedded engine, which generates one group after the other then"
        allowed = "all or auto: larger batches of rows, and a run that repeats exactly"
        fix = "set rollout.finish_batch=auto"
        yield Problem("rollout.finish_batch", got, allowed, fix, also=("engine.kind",))


def algorithm(config: Config) -> Iterator[Problem]:
    """Check that the options of the loss fit each other."""
    section, updates = config.algorithm, config.trainer.steps_per_batch
    low, high = section.daro.clamp
    if not 0 < low <= 1 <= high or low == high:
        allowed = "[lower, upper] with 0 < lower <= 1 <= upper, lower < upper: weights start at 1"
        yield Problem("algorithm.daro.clamp", str([low, high]), allowed, "set algorithm.daro.clamp=[0.1,10]")
    yield from _daro(config)
    correction = section.correction
    if correction.kind == "mis" and not correction.low < correction.high:
        got = f"{correction.low:g} with high {correction.high:g}"
        also = ("algorithm.correction.high",)
        yield Problem("algorithm.correction.low", got, "below algorithm.correction.high", "exchange the two", also=also)
    if correction.kind != "none" and section.old_logprobs == "rollout":
        got = f"{correction.kind} with old_logprobs rollout, whose ratio to the engine is always 1"
        also, fix = ("algorithm.old_logprobs",), "set algorithm.old_logprobs=recompute"
        yield Problem("algorithm.correction.kind", got, "none with old_logprobs rollout", fix, also=also)
    if section.trust_region == "gspo" and correction.kind != "none" and correction.level == "token":
        got = f"token with trust_region gspo and kind {correction.kind}: one ratio, but a weight for each token"
        also, fix = ("algorithm.trust_region",), "set algorithm.correction.level=sequence"
        yield Problem("algorithm.correction.level", got, "sequence with trust_region gspo", fix, also=also)
    if section.dual_clip is not None and section.trust_region not in ("clip", "gspo"):
        got = f"{section.dual_clip:g} with trust_region {section.trust_region}, which does not read it"
        also, fix = ("algorithm.trust_region",), "set algorithm.dual_clip=null"
        yield Problem("algorithm.dual_clip", got, "unset, or trust_region clip or gspo", fix, also=also)
    if section.old_logprobs == "forward" and updates > 1:
        got = f"forward with {updates} updates per batch"
        fix = "set algorithm.old_logprobs=recompute"
        allowed = "recompute or rollout with several updates per batch"
        yield Problem("algorithm.old_logprobs", got, allowed, fix, also=_STEPS_OF_A_BATCH)
    if section.trust_region == "reinforce" and config.trainer.epochs_per_batch > 1:
        got = f"{config.trainer.epochs_per_batch} with trust_region reinforce, which has no ratio to the old policy"
        fix, also = "set algorithm.trust_region=clip", ("algorithm.trust_region",)
        yield Problem("trainer.epochs_per_batch", got, "1 with trust_region reinforce", fix, also=also)
    if section.name == "kimi" and (section.trust_region != "clip" or section.dual_clip is not None):
        field = "trust_region" if section.trust_region != "clip" else "dual_clip"
        got = f"{show(getattr(section, field))} with name kimi, which has a surrogate of its own"
        fix, also = f"remove algorithm.{field}", ("algorithm.name",)
        yield Problem(f"algorithm.{field}", got, "unset with name kimi", fix, also=also)
    place = section.kl.place
    if place != "loss" and section.kl.mean == "rollouts":
        got, fix = f"rollouts with place {place}, where nothing is averaged", "set algorithm.kl.mean=tokens"
        yield Problem("algorithm.kl.mean", got, f"tokens with place {place}", fix, also=("algorithm.kl.place",))
    if place == "token_reward" and not (section.has_critic or ":" in section.name):
        got = f"token_reward with name {section.name}, which has one advantage for all tokens of a rollout"
        allowed, fix = "loss or reward, or an algorithm with a critic", "set algorithm.kl.place=reward"
        yield Problem("algorithm.kl.place", got, allowed, fix, also=("algorithm.name",))
    yield from _overlong(config)


def _daro(config: Config) -> Iterator[Problem]:
    """Check that the forms of DARO's weights fit each other."""
    daro = config.algorithm.daro
    if daro.parameter == "linear" and daro.half_life is not None:
        also, fix = ("algorithm.daro.half_life",), "set algorithm.daro.parameter=log"
        yield Problem(
            "algorithm.daro.parameter", "linear with half_life", "log: w itself is not learnt there", fix, also=also
        )


def _overlong(config: Config) -> Iterator[Problem]:
    overlong, longest = config.algorithm.overlong, config.rollout.max_response_tokens
    if not overlong.penalizes:
        return
    prefix, length = "algorithm.overlong", "rollout.max_response_tokens"
    max_tokens, cache_tokens = filled(overlong.max_tokens), filled(overlong.cache_tokens)
    if max_tokens - cache_tokens >= longest:
        got = f"{max_tokens}, whose penalty begins at {max_tokens - cache_tokens} tokens"
        allowed = f"a penalty that begins below max_response_tokens {longest}"
        fix = f"set {prefix}.max_tokens={longest}"
        yield Problem(f"{prefix}.max_tokens", got, allowed, fix, also=(length, f"{prefix}.cache_tokens"))
    if cache_tokens >= max_tokens:
        got = f"{cache_tokens} with max_tokens {max_tokens}"
        fix = f"set {prefix}.cache_tokens={max(1, max_tokens // 5)}"
        wider = (length, f"{prefix}.max_tokens")
        yield Problem(f"{prefix}.cache_tokens", got, f"below {prefix}.max_tokens", fix, also=wider)


def model_warnings(shape: ModelShape | None) -> Iterator[Problem]:
    """Parts of config.json that training leaves out."""
    if shape and shape.experts and shape.experts.balancing:
        got = f"a config.json with a loss that balances experts (router_aux_loss_coef {shape.experts.balancing:g})"
        fix = "none needed; watch the experts' use, and set output_router_logits to false to silence this"
        yield Problem("model.path", got, "training without it: as rollouts chose the experts", fix)


def algorithm_warnings(config: Config) -> Iterator[Problem]:
    """Options that work but are probably not meant."""
    section = config.algorithm
    yield from _other_than_published(config)
    if section.trust_region == "gspo" and section.clip_high > _GSPO_WIDEST:
        got = f"gspo with clip_low {section.clip_low:g} and clip_high {section.clip_high:g}"
        allowed = (
            "gspo's own range is about 3e-4 and 4e-4: a ratio per sequence, its tokens' geometric mean, moves little"
        )
        fix = "set algorithm.clip_low=3e-4 and algorithm.clip_high=4e-4"
        also = ("algorithm.clip_low", "algorithm.clip_high")
        yield Problem("algorithm.trust_region", got, allowed, fix, also=also)


def _other_than_published(config: Config) -> Iterator[Problem]:
    """Defaults that are not the published algorithm's under the other options of this run."""
    section, reward, updates = config.algorithm, config.reward, config.trainer.steps_per_batch
    shaped = (reward.correct_reward, reward.incorrect_reward) != (1, 0) or section.overlong.penalizes
    shaped = shaped or section.length_reward.weight > 0
    if section.name == "dgpo" and section.dgpo.deviation == "verdicts" and (shaped or section.kl.in_reward):
        got, fix = "verdicts with rewards other than 0 and 1", "set algorithm.dgpo.deviation=rewards"
        yield Problem("algorithm.dgpo.deviation", got, "rewards is the published DGPO", fix)
    if section.name == "ha_dw" and section.ha_dw.every == "step" and updates > 1:
        got = f"step with {updates} updates per batch"
        fix = "set algorithm.ha_dw.every=batch"
        yield Problem("algorithm.ha_dw.every", got, "batch is the published HA-DW", fix, also=_STEPS_OF_A_BATCH)
    if section.overlong.penalizes and reward.incorrect_reward == 0 and reward.correct_reward == 1:
        got, fix = f"0 with overlong.kind {section.overlong.kind}", "set reward.incorrect_reward=-1"
        allowed = (
            "-1 and 1, DAPO's: beside 0 and 1 the penalty weighs twice as much, and a right answer of full length is "
        )
        allowed += "worth no more than a wrong one"
        yield Problem("reward.incorrect_reward", got, allowed, fix, also=("algorithm.overlong.kind",))
    if section.name == "kimi" and updates == 1:
        got = "1 with algorithm.name kimi, whose tau weighs what moved since the batch began: nothing"
        allowed = "2 or more, as published; with 1 it is a plain policy gradient"
        fix, also = "set trainer.updates_per_batch=4", ("algorithm.name",)
        yield Problem("trainer.updates_per_batch", got, allowed, fix, also=also)
    kl_in_loss = section.kl.coefficient > 0 and section.kl.place == "loss"
    if section.name == "grpo_sequence" and kl_in_loss and section.kl.mean == "tokens":
        got, fix = "tokens with grpo_sequence", "set algorithm.kl.mean=rollouts"
        allowed = "rollouts is the published GRPO (eq. 3): the KL stands inside the mean over an answer's tokens"
        yield Problem("algorithm.kl.mean", got, allowed, fix, also=("algorithm.name",))


def run(config: Config) -> Iterator[Problem]:
    """Return steps, rewards, evaluation, reporting."""
    trainer, reward, optimizer = config.trainer, config.reward, config.actor.optimizer
    if reward.correct_reward <= reward.incorrect_reward:
        got = f"{reward.correct_reward:g} with incorrect_reward {reward.incorrect_reward:g}"
        fix = "set reward.correct_reward=1 and reward.incorrect_reward=0 (or -1)"
        allowed = "above reward.incorrect_reward"
        yield Problem("reward.correct_reward", got, allowed, fix, also=("reward.incorrect_reward",))
    if reward.options and not reward.is_own:
        got = f"{', '.join(reward.options)} with reward.verifier {reward.verifier}"
        yield Problem("reward.options", got, "options of module:Class only", "remove them", also=("reward.verifier",))
    fresh = type(reward)()
    unread = [
        n for n in ("strict", "marker", "refuse_restated", "after_thinking") if getattr(reward, n) != getattr(fresh, n)
    ]
    if unread and reward.is_own:
        got = f"{', '.join(unread)} with reward.verifier {reward.verifier}, which would not use them"
        fix = "remove them, or hand them to the class by reward.options"
        yield Problem("reward.verifier", got, "reward.options only", fix, also=tuple(f"reward.{n}" for n in unread))
    yield from _environment(config.environment, config.algorithm.turn_rewards)
    if optimizer.warmup_steps > trainer.steps:
        got = f"{optimizer.warmup_steps}, but the run has {trainer.steps} optimizer steps"
        fix = "lower it or raise trainer.steps"
        yield Problem("actor.optimizer.warmup_steps", got, f"at most {trainer.steps}", fix, also=("trainer.steps",))
    if trainer.eval_every_steps and not config.data.eval:
        fix = "add a set to data.eval, or set trainer.eval_every_steps=0"
        got = f"{trainer.eval_every_steps} without a set in data.eval"
        yield Problem("trainer.eval_every_steps", got, "0 without data.eval", fix, also=("data.eval",))
    if config.observe.wandb.enabled and importlib.util.find_spec("wandb") is None:
        fix = 'run pip install "megatron_daro[wandb]", or set observe.wandb.enabled=false'
        yield Problem("observe.wandb.enabled", "true without the package wandb", "true where it is installed", fix)
    if config.actor.logprob_kernel == "triton" and importlib.util.find_spec("triton") is None:
        fix = "install a CUDA build of torch, which brings it, or set actor.logprob_kernel=torch"
        yield Problem("actor.logprob_kernel", "triton without the package triton", "triton where it is installed", fix)


def _environment(section: EnvironmentSection, turn_rewards: bool) -> Iterator[Problem]:
    """Options belong to a class of the user's own, which is given the tokenizer by the run."""
    for name in ("options", "reward_weights"):
        if (values := getattr(section, name)) and not section.is_own:
            got = f"{', '.join(values)} with environment.kind {section.kind}"
            also = ("environment.kind",)
            yield Problem(f"environment.{name}", got, f"{name} of module:Class only", "remove them", also=also)
    if turn_rewards and not section.is_own:
        got = f"true with environment.kind {section.kind}, which has one turn"
        also = ("environment.kind",)
        yield Problem(
            "algorithm.turn_rewards", got, "false, or an environment of several turns", "remove it", also=also
        )
    if "tokenizer" in section.options:
        yield Problem("environment.options", "tokenizer", "other names: the run fills this in", "remove it")


FIRST_STAGE, LAST_STAGE = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_MEGATRON = "actor.megatron"
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_RANKS = ("actor.tensor_parallel", "actor.context_parallel", "actor.data_parallel", "actor.expert_tensor_parallel")


def division_problems(actor: ActorSection, shape: ModelShape) -> Iterator[Problem]:
    """Return what of the model the layout cannot divide."""
    tensor = ("actor.tensor_parallel", actor.tensor_parallel)
    yield from _divides(*tensor, shape.heads, "attention heads")
    if shape.kv_heads % actor.tensor_parallel and actor.tensor_parallel % shape.kv_heads:
        got = f"{actor.tensor_parallel}, but the model has {shape.kv_heads} key-value heads"
        allowed = f"a divisor or a multiple of {shape.kv_heads}"
        yield Problem("actor.tensor_parallel", got, allowed, "choose one that also divides the heads", ("model.path",))
    if shape.expert_layers < shape.layers:
        yield from _divides(*tensor, shape.ffn, "MLP columns (intermediate_size)")
    yield from _stage_problems(actor, shape.layers)
    yield from _expert_problems(actor, shape.experts) if shape.experts else _dense_problems(actor)


def _divides(field: str, size: int, count: int, what: str) -> Iterator[Problem]:
    if count % size:
        divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0 and n <= 64)
        got = f"{size}, which does not divide the model's {count} {what}"
        yield Problem(field, got, f"one of {divisors}", "choose a divisor", also=("model.path",))


def stage_layers(layers: int, stages: int, options: Mapping[str, object]) -> list[int] | None:
    """Return the layers of each pipeline stage; None where they do not divide, or an option is no number of layers.

    Args:
        layers: of the model. stages: of the pipeline. options: of `actor.megatron`; those that name stages count.
    """
    first, last = options.get(FIRST_STAGE), options.get(LAST_STAGE)
    given = [count for count in (first, last) if count is not None]
    if any(type(count) is not int or count < 1 for count in given):
        return None
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    if given and (any(extra) or stages < 2):
        return None
    middle, remaining_layers = (
        stages - len(given),
        layers + sum(extra) - sum(count for count in given if isinstance(count, int)),
    )
    if remaining_layers < 0 or (remaining_layers if middle == 0 else remaining_layers % middle):
        return None
    counts = [remaining_layers // middle if middle else 0] * stages
    counts[0] = first if isinstance(first, int) else counts[0] - extra[0]
    counts[-1] = last if isinstance(last, int) else counts[-1] - extra[1]
    return counts if min(counts) >= 0 else None


def part_layers(layers: int, stages: int, virtual: int, options: Mapping[str, object]) -> list[list[range]] | None:
    """Return for each pipeline stage the layers of each of its virtual parts; None where they do not divide, or where
    Megatron-core cannot say which they are.

    Args:
        layers, stages, options: of `stage_layers`. virtual: parts of a stage; part i of stage p is at i * stages + p.
    """
    counts = stage_layers(layers, stages, options)
    if counts is None or any(count % virtual for count in _counted(counts, options)):
        return None
    if virtual > 1 and _names_every_stage(stages, options):
        return None
    each = [count // virtual for count in _counted(counts, options)]
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    parts: list[list[range]] = [[] for _ in counts]
    at = 0
    for part in range(virtual):
        for stage, size in enumerate(each):
            # The embedding and the loss, where they count as layers, are in the first and the last part of all.
            size -= extra[0] * (part == stage == 0) + extra[1] * (part == virtual - 1 and stage == stages - 1)
            parts[stage].append(range(at, at + size))
            at += size
    return parts


def _names_every_stage(stages: int, options: Mapping[str, object]) -> bool:
    """Whether both of two stages have their number of layers. Megatron-core (0.16 to 0.19) then divides what is left by
    the number of other stages, none, where stages have virtual parts."""
    return stages == 2 and all(options.get(name) is not None for name in (FIRST_STAGE, LAST_STAGE))


def _counted(counts: list[int], options: Mapping[str, object]) -> list[int]:
    """Return what is divided over the parts of each stage: its layers, and what is accounted as one."""
    extra = [1 if options.get(name) else 0 for name in _ACCOUNTED]
    return [n + extra[0] * (i == 0) + extra[1] * (i == len(counts) - 1) for i, n in enumerate(counts)]


def _stage_problems(actor: ActorSection, layers: int) -> Iterator[Problem]:
    stages, named = actor.pipeline_parallel, {n: v for n, v in actor.megatron.items() if n in _STAGE_OPTIONS and v}
    if not named:
        yield from _divides("actor.pipeline_parallel", stages, layers, "layers")
    elif stage_layers(layers, stages, named) is None:
        options = ", ".join(f"{name} {show(value)}" for name, value in named.items())
        got = f"{stages} with {options}, which does not divide the model's {layers} layers"
        allowed = "numbers that leave the same number of layers, 1 or more, for each other stage"
        fix = "change the layers of the first or last stage (of two stages give one)"
        also = ("model.path", *(f"{_MEGATRON}.{name}" for name in named))
        yield Problem("actor.pipeline_parallel", got, allowed, fix, also=also)
    yield from _virtual_stage_problems(actor, layers, named)


def _virtual_stage_problems(actor: ActorSection, layers: int, options: Mapping[str, object]) -> Iterator[Problem]:
    field, virtual, stages = "actor.virtual_pipeline_parallel", actor.virtual_pipeline_parallel, actor.pipeline_parallel
    if virtual > 1 and stages == 1:
        got = f"{virtual} with pipeline_parallel 1"
        yield Problem(field, got, "1 without pipeline stages", "remove it", also=("actor.pipeline_parallel",))
    elif virtual > 1 and _names_every_stage(stages, options):
        got, allowed = f"{virtual} with {FIRST_STAGE} and {LAST_STAGE} of two stages", "1, or one of the two numbers"
        yield Problem(field, got, allowed, f"remove actor.megatron.{LAST_STAGE}", also=("actor.pipeline_parallel",))
    elif virtual > 1:
        counts = _counted(stage_layers(layers, stages, options) or [], options)
        for count in sorted({count for count in counts if count % virtual}):
            got = f"{virtual}, but a stage has {count} layers"
            fix = "choose one of them, or another pipeline_parallel"
            also = ("actor.pipeline_parallel", "model.path", *(f"{_MEGATRON}.{name}" for name in options))
            yield Problem(field, got, f"a divisor of {count}", fix, also=also)


_STAGE_OPTIONS = (FIRST_STAGE, LAST_STAGE, *_ACCOUNTED)


def _dense_problems(actor: ActorSection) -> Iterator[Problem]:
    if actor.expert_parallel > 1:
        got = f"{actor.expert_parallel}, but the model has no experts"
        yield Problem("actor.expert_parallel", got, "1", "remove it", also=("model.path",))
    if actor.expert_tensor_parallel is not None:
        got = f"{actor.expert_tensor_parallel}, but the model has no experts"
        yield Problem("actor.expert_tensor_parallel", got, "nothing", "remove it", also=("model.path",))


def _expert_problems(actor: ActorSection, experts: ExpertShape) -> Iterator[Problem]:
    tensor, cut = actor.tensor_parallel, actor.expert_tensor_size
    yield from _divides("actor.expert_parallel", actor.expert_parallel, experts.number, "experts")
    cut_field = "actor.tensor_parallel" if cut == tensor else "actor.expert_tensor_parallel"
    yield from _divides(cut_field, cut, experts.ffn, "columns of an expert")
    group, ranks = actor.expert_group_size, tensor * actor.context_parallel * actor.data_parallel
    if ranks % group:
        got = f"{actor.expert_parallel}; with ETP {cut} experts need groups of {group} ranks"
        allowed = f"ETP * EP that divides TP * CP * DP = {ranks}"
        yield Problem("actor.expert_parallel", got, allowed, "raise actor.data_parallel or lower it", also=_RANKS)
    elif group % tensor and tensor % group:
        got = f"{actor.expert_parallel}; with ETP {cut} experts have groups of {group} ranks"
        allowed = f"ETP * EP that is a divisor or a multiple of TP {tensor}"
        yield Problem("actor.expert_parallel", got, allowed, "use powers of 2", also=_RANKS)
    if tensor > 1 and not actor.use_sequence_parallel:
        got = f"false with tensor_parallel {tensor} and experts"
        allowed = "true: Megatron-core trains experts under tensor parallelism with it only"
        yield Problem("actor.sequence_parallel", got, allowed, "leave it unset", also=("actor.tensor_parallel",))
