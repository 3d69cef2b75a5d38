"""One measurement from its configuration to its scores: starts engine and verifiers, asks them, and shuts them down.

This is a composition root beside runtime/launch.py, without a policy: engines keep the weights they started with.
No engine is started if every answer is already on disk.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_daro.config import Config, EvalSet, detect, resolve_tree
from megatron_daro.config.base import filled
from megatron_daro.config.placement import engines_of
from megatron_daro.config.problems import Problem, config_error
from megatron_daro.config.rules.data import templates
from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.data.tokenizer import load_tokenizer
from megatron_daro.engine.sglang.engine import SGLangEngine
from megatron_daro.errors import ConfigError, DaroError, EngineError
from megatron_daro.garbage import spare_event_loop
from megatron_daro.observe.phases import Phases
from megatron_daro.reward.base import VerifierSpec
from megatron_daro.reward.pool import RewardPool
from megatron_daro.rollout.protocol import Notices
from megatron_daro.runtime import parts, provenance
from megatron_daro.runtime.cluster import cluster
from megatron_daro.runtime.context import RunContext
from megatron_daro.runtime.embedded_engines import EmbeddedEngines
from megatron_daro.runtime.inputs import answer_stops, held_out_sets
from megatron_daro.runtime.node_pools import VerifierPools
from megatron_daro.runtime.placement import Placement
from megatron_daro.runtime.run_directory import owned
from megatron_daro.workshop.evaluate import answers, identity, results
from megatron_daro.workshop.evaluate.answers import AnswerStore
from megatron_daro.workshop.evaluate.asking import Parts, ask
from megatron_daro.workshop.evaluate.models import MeasuredModel
from megatron_daro.workshop.evaluate.questions import Question, questions_of, requests
from megatron_daro.workshop.evaluate.suites import check_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        model: the model that answers. sets: what is asked. out: where answers go.
        base: values of a configuration file, or a few of them; the rest has defaults that suit a measurement.
        overrides: texts `a.b=c`, which replace values of `base` but not model, sets, out or servers. source: for
            messages.

    Raises:
        ConfigError: lists every wrong field.
    """
    kind = "sglang" if model.urls or detect().kind == "gpu" else "embedded"
    # A measurement trains on nothing, but the section requires a file.
    data = {"train": [str(one.path) for one in sets], "max_prompt_tokens": LONGEST_PROMPT}
    tree: dict[str, Any] = {"model": {"path": str(model.path)}, "engine": {"kind": kind}, "data": data} | dict(base)
    tree["actor"] = {**tree.get("actor", {}), "precision": model.dtype}
    measured = {
        "model.path": str(model.path),
        "data.eval": [one.model_dump(mode="json") for one in sets],
        "trainer.run_dir": str(out),
        "engine.sglang.urls": list(model.urls),
        # No weights are sent to these servers, so no sender has to share GPU memory with them.
        "engine.sglang.sync": "distributed",
    }
    measured |= {"engine.kind": "sglang"} if model.urls else {}
    fixed = [f"{path}={json.dumps(value)}" for path, value in measured.items()]
    config = resolve_tree(tree, [*overrides, *fixed], source=source)
    if problems := list(templates(config)):
        raise config_error(source, problems)
    titles = [section.title for section in config.all_environments if section.has_turns]
    if titles:
        fix = "environments=[]" if config.environments else "environment.kind=single_turn"
        raise ConfigError(
            f"{titles[0]}: allowed: single_turn, since {source} measures single answers; fix: evaluate in the run, "
            f"with data.eval and trainer.eval_every_steps, or set {fix} to measure single answers"
        )
    return config


UNDER_WAY = 256
"""Requests in flight for each server, which batches as many of them as its cache holds."""
_SAY_S = 30.0
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """An evaluation. config: engine, verifier, sets (data.eval), tokenizer (model.path) and directory
    (trainer.run_dir). weights: plain values that identify the weights that answer. ks: of pass@k and maj@k."""

    config: Config
    weights: Mapping[str, Any]
    ks: tuple[int, ...]

    @property
    def out(self) -> Path:
        """Where everything goes."""
        return filled(self.config.trainer.run_dir)


def measure(plan: Plan, notices: Notices) -> Mapping[str, Any]:
    """Ask for what is missing, score everything, and return the summary, which is also written to OUT.

    Raises:
        DaroError: a set, a tokenizer or a directory cannot be used, or the engine failed. Answers so far are kept, and
            the message says how to continue.
    """
    config, out = plan.config, plan.out
    check_names(config.data.eval)
    results.check_k(config.data.eval, plan.ks)
    with owned(out, resume=True, option="--out"):
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
    date = identity.template_date(plan.out, config.data.template_date)
    own_templates = any(one.template == "data" for one in config.data.eval)
    tokenizer = load_tokenizer(
        config.model.path,
        config.model.trust_remote_code,
        chat_template=own_templates and config.data.prompt_template == "chat",
        date=date,
    )
    stops = answer_stops(config, tokenizer)
    sets = held_out_sets(config.data, tokenizer, notices)
    identity.check_or_write(plan.out, _made_of(plan, stops, date))
    questions = questions_of(sets, max_new_tokens=config.rollout.max_response_tokens, stops=stops)
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
    """Start engine and verifiers, ask, and shut both down whatever happens."""
    run = RunContext.of(plan.config, _AsProgress(notices), Phases())
    placement = Placement.of_engines(engines_of(plan.config), run.deadlines)
    engine = parts.rollout_engine(run, tokenizer, placement)
    scorer = VerifierPools(run)
    try:
        await parts.start_engine(run, placement, engine, scorer)
        window = None
        if isinstance(engine, SGLangEngine | EmbeddedEngines):
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
            await ask(Parts(engine, scorer, store, window, told, run.deadlines.next_group), pending, questions)
        left = len(requests(questions, answers.kept(plan.out)))
        if left:
            raise EngineError(f"the engine gave no answer to {left} requests, though it was asked {_TRIES} times")
    finally:
        await engine.close()
        await scorer.close()
        placement.close()


class _AsProgress:
    """Reports the stages of a start as notices."""

    def __init__(self, notices: Notices) -> None:
        self.notice, self.warn = notices.notice, notices.warn

    def stage(self, name: str, text: str = "") -> None:
        """Report what the start waits for."""
        if text:
            self.notice(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Not called: nothing is trained."""


class _Told:
    """Reports progress every half minute, and when all answers are there."""

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


def _made_of(plan: Plan, stops: Stops, date: datetime.date) -> dict[str, Any]:
    """Return what decides the answers and their verdicts."""
    config = plan.config
    verifier = VerifierSpec.of_section(config.reward)
    return {
        "weights": dict(plan.weights),
        "tokenizer": provenance.tokenizer_files(config.model.path),
        "sets": {
            one.name: {
                "file": provenance.digest(one.path),
                "template": one.template,
                "temperature": one.temperature,
                "top_p": one.top_p,
                "samples": one.rollouts_per_prompt,
            }
            for one in config.data.eval
        },
        "template_date": date.isoformat(),
        "max_response_tokens": config.rollout.max_response_tokens,
        "stop_token_ids": list(stops.token_ids),
        **({"stop": list(stops.texts)} if stops.texts else {}),
        **({"repetition": list(stops.repetition)} if stops.repetition else {}),
        "seed": config.engine.seed,
        "engine": config.engine.kind,
        "verifier": {"verifier": verifier.name}
        | {name: getattr(verifier, name) for name in ("strict", "marker", "after_thinking")}
        | ({"options": dict(config.reward.options)} if config.reward.is_own else {}),
        "notes": {"model": str(config.model.path), "urls": list(config.engine.sglang.urls)},
    }
