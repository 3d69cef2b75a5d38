"""`megatron-daro eval`: the model that is measured, engine and verifiers started, asked and ended; then the scores.

The model is a Hugging Face directory, a checkpoint made into one, or servers that run (--hf, --checkpoint, --urls).
This is a composition root beside runtime/launch.py, without a policy: engines keep the weights they started with.
Nothing is started where every answer is kept already. Rejects torn checkpoints, directories without a model, and
servers that serve different models or do not say which.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_daro import durable, recovery
from megatron_daro.config import Config, EvalSet, detect, resolve_tree
from megatron_daro.config.hardware import engines_of
from megatron_daro.config.problems import Problem, config_error
from megatron_daro.config.rules.data import templates
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.data.tokenizer import load_tokenizer
from megatron_daro.engine.sglang.client import SGLangClient
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.errors import ConfigError, DaroError, EngineError, ModelError
from megatron_daro.garbage import spare_event_loop
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import parts, restart_audit
from megatron_daro.runtime.cluster import Placement, cluster
from megatron_daro.runtime.embedded_group import EngineGroup
from megatron_daro.runtime.inputs import answer_stops, held_out_sets
from megatron_daro.runtime.node_workers import Verdicts
from megatron_daro.runtime.run_directory import owned
from megatron_daro.workshop.evaluate import answers, asking, results
from megatron_daro.workshop.evaluate.answers import AnswerStore, Question, questions_of, requests
from megatron_daro.workshop.evaluate.asking import Parts, ask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CALL_S = 30.0
_MOST_PROCESSES = 4
_SHARD_BYTES = 5 * 10**9
CONVERTED, _NOTE = "model", "model_of.json"
"""In the directory of an evaluation: the Hugging Face form of the checkpoint, and of which it is."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """path: of config.json, tokenizer, and (but with urls) the weights. weights: what tells these weights from others.
    urls: servers that have them."""

    path: Path
    weights: Mapping[str, Any]
    urls: tuple[str, ...] = ()

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """In which the weights are kept: what is not float32 is computed in bfloat16."""
        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return "fp32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bf16"


def of_directory(path: Path) -> MeasuredModel:
    """Return the model of a Hugging Face directory. Raises ModelError where it is none."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"--hf: {path} has no config.json; give a Hugging Face directory (megatron-daro convert writes one)"
        )
    files = restart_audit.weight_files(path)
    if not files:
        raise ModelError(f"--hf: {path} has no *.safetensors; give a directory with weights")
    return MeasuredModel(path, {"files": files})


def of_checkpoint(checkpoint: Path, config: Path, out: Path, notices: Notices) -> MeasuredModel:
    """Return the model of a Megatron checkpoint, written as a Hugging Face directory to OUT/model unless it is there.

    Args:
        checkpoint: of a run (RUN/checkpoints/step_N), or of `megatron-daro convert`, or torch_dist of Megatron-LM.
        config: folder of its model's config.json and tokenizer. out: directory of the evaluation.

    Raises:
        CheckpointError, ModelError: the checkpoint is torn, is of another model, or cannot be converted.
    """
    manifest, target, note = checkpoint / recovery.MANIFEST, out / CONVERTED, out / _NOTE
    if manifest.is_file():
        recovery.verify(checkpoint)
        _check_tokenizer(checkpoint, config)
        weights: dict[str, Any] = {"manifest": restart_audit.digest(manifest)}
    else:
        weights = {"files": {p.name: restart_audit.digest(p) for p in sorted(checkpoint.glob("*")) if p.is_file()}}
    if _read_note(note) != weights:
        from megatron_daro.convert.plan import plan_to_hf
        from megatron_daro.workshop.convert.conversion import convert

        notices.notice(f"{checkpoint} is written as a Hugging Face directory to {target}")
        if target.is_dir():
            shutil.rmtree(target)  # of another checkpoint
        out.mkdir(parents=True, exist_ok=True)
        processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
        plan = plan_to_hf(checkpoint, config, None, _SHARD_BYTES)
        convert(plan, target, processes=processes, verify=False, progress=lambda phase, done: None)
        durable.write(note, json.dumps(weights))
    return MeasuredModel(target, {"checkpoint": weights})


def _read_note(note: Path) -> object:
    """Return which checkpoint was converted; None where nothing readable says it: then it is converted again."""
    try:
        return json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_tokenizer(checkpoint: Path, config: Path) -> None:
    """Refuse a folder whose tokenizer is not the one that the checkpoint's run had. Raises ModelError."""
    saved = recovery.read_provenance(checkpoint)
    if saved is None:
        return
    was, is_ = saved["bound_files"], restart_audit.tokenizer_files(config)
    other = [name for name, digest in is_.items() if was.get(name, digest) != digest]
    if other:
        raise ModelError(
            f"--checkpoint: {checkpoint} was trained with another tokenizer than that of {config} ({', '.join(other)} "
            "differs); allowed: the model that the run began with; set model.path to it"
        )


def of_servers(urls: Sequence[str], path: Path | None) -> MeasuredModel:
    """Return the model that servers have.

    Args:
        urls: of SGLang servers that run. path: of its config.json and tokenizer; None: where the servers say.

    Raises:
        EngineError: a server does not answer. ConfigError: they serve different models, or the model's files are not
            on this machine.
    """
    facts = asyncio.run(_told(urls))
    different = {url: fact for url, fact in facts.items() if fact != facts[urls[0]]}
    if different:
        shown = "; ".join(
            f"{url}: {fact['model_path']}, weights {fact['weight_version']}" for url, fact in facts.items()
        )
        raise ConfigError(
            f"--urls: got servers with different models ({shown}); allowed: one model; fix: evaluate each"
        )
    directory = path or Path(str(facts[urls[0]]["model_path"]))
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--urls: the servers say that their model is {directory}, which is not on this machine; allowed: a "
            "directory with its config.json and tokenizer; fix: model.path=DIR"
        )
    return MeasuredModel(directory, {"served": facts[urls[0]]}, tuple(urls))


async def _told(urls: Sequence[str]) -> dict[str, dict[str, str]]:
    facts = {}
    for url in urls:
        async with SGLangClient(url) as client:
            try:
                info = await client.model_info(timeout_s=_CALL_S)
            except EngineError as error:
                raise EngineError(
                    f"--urls: {url} does not answer ({error}); allowed: SGLang servers that run"
                ) from error
        facts[url] = {key: str(info.get(key, "")) for key in ("model_path", "weight_version")}
    return facts


LONGEST_PROMPT = 2048


def configuration(
    model: MeasuredModel,
    sets: Sequence[EvalSet],
    out: Path,
    *,
    base: Mapping[str, Any],
    overrides: Sequence[str],
    source: str,
) -> Config:
    """Return the configuration of a measurement, validated as that of a run.

    Args:
        model: who answers. sets: what is asked. out: where answers go.
        base: values of a configuration file, or a few of them; the rest has defaults that suit a measurement.
        overrides: texts `a.b=c`; they replace those of base, not what is measured. source: for messages.

    Raises:
        ConfigError: lists every wrong field.
    """
    kind = "sglang" if model.urls or detect().kind == "gpu" else "embedded"
    # A measurement trains on nothing; the section wants a file.
    data = {"train": [str(one.path) for one in sets], "max_prompt_tokens": LONGEST_PROMPT}
    tree: dict[str, Any] = {"model": {"path": str(model.path)}, "engine": {"kind": kind}, "data": data} | dict(base)
    tree["actor"] = {**tree.get("actor", {}), "precision": model.dtype}
    measured = {
        "model.path": str(model.path),
        "data.eval": [one.model_dump(mode="json") for one in sets],
        "trainer.run_dir": str(out),
        "engine.sglang.urls": list(model.urls),
        # Nobody sends weights to these servers, so nothing is to share GPU memory with them.
        "engine.sglang.sync": "distributed",
    }
    measured |= {"engine.kind": "sglang"} if model.urls else {}
    fixed = [f"{path}={json.dumps(value)}" for path, value in measured.items()]
    config = resolve_tree(tree, [*overrides, *fixed], source=source)
    if problems := list(templates(config)):
        raise config_error(source, problems)
    if config.environment.is_own:
        raise ConfigError(
            f"environment.kind: got {config.environment.kind}; allowed: single_turn, since {source} measures single "
            "answers; fix: evaluate in the run, with data.eval and trainer.eval_every_steps, or set "
            "environment.kind=single_turn to measure single answers"
        )
    return config


UNDER_WAY = 256
"""Answers that each server is asked for at once; it batches as many of them as its cache holds."""
_SAY_S = 30.0
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """An evaluation. config: engine, verifier, sets (data.eval), tokenizer (model.path) and directory
    (trainer.run_dir). weights: says which weights answer, as plain values. ks: of pass@k and maj@k."""

    config: Config
    weights: Mapping[str, Any]
    ks: tuple[int, ...]

    @property
    def out(self) -> Path:
        """Where everything goes."""
        return parts.run_directory(self.config)


def measure(plan: Plan, notices: Notices) -> Mapping[str, Any]:
    """Ask for what is missing, score everything, and return the summary, which also lies in OUT.

    Raises:
        DaroError: a set, a tokenizer or a directory that cannot be used; an engine that failed. What was answered
        until then is kept, and the message says how to go on.
    """
    config, out = plan.config, plan.out
    asking.check_names(config.data.eval)
    results.check_k(config.data.eval, plan.ks)
    with owned(out, resume=True):
        sets, questions = ask_all(plan, notices)
        with RewardPool.from_section(config.reward) as pool:
            scored = asyncio.run(results.score_problems(out, questions, config.reward, pool))
        return _finish(out, scored, sets, plan.ks, config.engine.seed or 0)


def ask_all(plan: Plan, notices: Notices) -> tuple[list[HeldOut], list[Question]]:
    """Ask for what is missing in a directory that the caller owns, and return the sets and every question.

    Raises:
        DaroError: as `measure`.
    """
    config = plan.config
    if config.engine.sglang.fp8_blocks:
        allowed = "false: nobody sends weights here, and servers that wait for blocks start with random ones"
        problem = Problem("engine.sglang.fp8_blocks", "true", allowed, "set engine.sglang.fp8_blocks=false")
        raise config_error("an evaluation", [problem])
    own_templates = any(one.template == "data" for one in config.data.eval)
    tokenizer = load_tokenizer(
        config.model.path,
        config.model.trust_remote_code,
        chat_template=own_templates and config.data.prompt_template == "chat",
        date=config.data.template_date,
    )
    stops = answer_stops(config, tokenizer)
    sets = held_out_sets(config.data, tokenizer, notices)
    results.check_or_write(plan.out, _made_of(plan, stops))
    seed = config.engine.seed or 0
    questions = questions_of(sets, seed=seed, max_new_tokens=config.rollout.max_response_tokens, stops=stops)
    _ask_until_whole(plan, tokenizer, questions, notices)
    return sets, questions


def _finish(
    out: Path, scored: Sequence[results.Scored], sets: Sequence[HeldOut], ks: Sequence[int], seed: int
) -> dict[str, Any]:
    summary = results.summarise(scored, sets, ks, seed=seed)
    results.write(out, summary, scored)
    return summary


def _ask_until_whole(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], notices: Notices
) -> None:
    wanted = sum(question.samples for question in questions)
    pending = requests(questions, answers.kept(plan.out))
    if not pending:
        notices.notice(f"{plan.out} has all {wanted} answers already")
        return
    if len(pending) < wanted:
        notices.notice(f"{plan.out} has {wanted - len(pending)} of {wanted} answers; asking for the others")
    try:
        with cluster(max(engines_of(plan.config).processes, 1), tell=notices.notice):
            asyncio.run(_run(plan, tokenizer, questions, notices))
    except KeyboardInterrupt:
        notices.notice(_kept_text(plan.out, questions, wanted))
        raise
    except DaroError as error:
        raise type(error)(f"{error}; {_kept_text(plan.out, questions, wanted)}") from error


def _kept_text(out: Path, questions: Sequence[Question], wanted: int) -> str:
    there = wanted - len(requests(questions, answers.kept(out)))
    return f"{there} of {wanted} answers are kept in {out}: the same command goes on from there"


async def _run(plan: Plan, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], notices: Notices) -> None:
    """Start engine and verifiers, ask, and end both whatever happened."""
    config, limits = plan.config, parts.deadlines(plan.config)
    placement = Placement.of_engines(engines_of(config), limits)
    engine = parts.rollout_engine(config, tokenizer, placement, notices, loads=notices.notice)
    scorer = Verdicts(
        config.reward,
        beside_driver=config.engine.kind == "embedded",
        logs=parts.log_folder(config),
        warn=notices.warn,
        deadlines=limits,
    )
    try:
        await parts.start_engine(placement, engine, scorer)
        window = None
        if isinstance(engine, SGLangEngine | EngineGroup):
            engine.serve_as_loaded()
        if isinstance(engine, SGLangEngine):
            window = UNDER_WAY * len(engine.fleet.servers)
        spare_event_loop()
        for _ in range(_TRIES):
            pending = requests(questions, answers.kept(plan.out))
            if not pending:
                return
            told = _Told(len(pending), notices.notice)
            store = AnswerStore(plan.out)
            await ask(Parts(engine, scorer, store, window, told, limits.generate), pending, questions)
        left = len(requests(questions, answers.kept(plan.out)))
        if left:
            raise EngineError(f"the engine gave no answer to {left} requests, though it was asked {_TRIES} times")
    finally:
        await engine.close()
        await scorer.close()
        placement.close()


class _Told:
    """Says every half minute how far it is."""

    def __init__(self, wanted: int, say: Callable[[str], None]) -> None:
        self._wanted, self._say = wanted, say
        self._began = self._said = time.monotonic()
        self._count: Counter[str] = Counter()

    def __call__(self, answer: answers.Answer) -> None:
        self._count.update(answers=1, right=answer.verdict.correct, tokens=answer.rollout.response_length)
        now, done = time.monotonic(), self._count["answers"]
        if now - self._said < _SAY_S and done < self._wanted:
            return
        self._said = now
        seconds = max(now - self._began, 1e-3)
        left_s = seconds * (self._wanted - done) / done
        self._say(
            f"{done} of {self._wanted} answers, {self._count['right'] / done:.1%} right, "
            f"{self._count['tokens'] / seconds:,.0f} tokens/s, {left_s / 60:.0f} min left"
        )


def _made_of(plan: Plan, stops: Stops) -> dict[str, Any]:
    """Return what decides the answers and their verdicts."""
    config = plan.config
    return {
        "weights": dict(plan.weights),
        "tokenizer": restart_audit.tokenizer_files(config.model.path),
        "sets": {
            one.name: {
                "file": restart_audit.digest(one.path),
                "template": one.template,
                "temperature": one.temperature,
                "top_p": one.top_p,
                "samples": one.rollouts_per_prompt,
            }
            for one in config.data.eval
        },
        "max_response_tokens": config.rollout.max_response_tokens,
        "stop_token_ids": list(stops.token_ids),
        **({"stop": list(stops.texts)} if stops.texts else {}),
        "seed": config.engine.seed,
        "engine": config.engine.kind,
        "verifier": {
            name: getattr(config.reward, name)
            for name in ("verifier", "strict", "marker", "refuse_restated", "after_thinking")
        }
        | ({"options": dict(config.reward.options)} if config.reward.is_own else {}),
        "notes": {"model": str(config.model.path), "urls": list(config.engine.sglang.urls)},
    }
