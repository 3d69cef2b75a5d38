"""Deterministic stand-ins for everything outside the loop: engine, scorer, prompts, policy, phases.

The engine's tokens depend on (seed, group id, attempt, index) and its weights; the policy's weights depend on every bit
of every batch. So one wrong bit anywhere shows in all later batches. Recorder, metrics log, checkpoints and batch
builder are the real ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from weight_fakes import FakeUpdate

from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.checkpoints import Checkpoints, find_latest_valid, set_newer_aside
from megatron_daro.config.sections import RolloutSection, TrainerSection
from megatron_daro.controller import Controller, Evaluations, LoopParts
from megatron_daro.data.batch import build_step_batch
from megatron_daro.deadlines import Deadlines
from megatron_daro.errors import EngineError, NonFiniteError
from megatron_daro.observe.metrics import MetricsLog
from megatron_daro.rollout.batch_filler import RolloutParts
from megatron_daro.rollout.collector import RolloutCollector
from megatron_daro.rollout.ledger import Ledger
from megatron_daro.rollout.recorder import Recorder
from megatron_daro.rollout.rollouter import SingleTurn
from megatron_daro.rollout.sampler import Sampler
from megatron_daro.sync.plan import SendReport
from megatron_daro.types import PreparedStep, Prompt, Rollout, SamplingParams, StepResult, Verdict

K = 4
GRPO = make_algorithm("grpo", rollouts_per_prompt=K, max_response_tokens=64)
NEVER = 10_000.0
FAST = Deadlines(**dict.fromkeys(("next_group", "train", "sync", "score", "close", "save", "abort"), 20.0))
EVALUATE = {"eval_every_steps": 3}
"""Of a trainer."""


class Crash(BaseException):
    """Ends a run as abruptly as an exception can."""


def digest(*parts: object) -> int:
    """64 bits that depend on everything given."""
    text = hashlib.sha256()
    for part in parts:
        text.update(part if isinstance(part, bytes) else repr(part).encode())
        text.update(b"|")
    return int.from_bytes(text.digest()[:8], "big")


class FakeSource:
    """Endless prompts; every third one is always solved and every fourth never."""

    def __init__(self) -> None:
        self.cursor = 0
        self.given: list[str] = []
        self.observed: list[int] = []

    def next(self, n: int) -> list[Prompt]:
        prompts = []
        for i in range(self.cursor, self.cursor + n):
            kind = "easy" if i % 3 == 0 else "hard" if i % 4 == 0 else "mixed"
            prompts.append(Prompt(f"p{i}", kind, "fake", text=f"problem {i}", tokens=(1, 2 + i % 5)))
        self.cursor += n
        self.given += [p.id for p in prompts]
        return prompts

    def observe(self, groups) -> None:
        self.observed += [group.group_id for group in groups]

    def state_dict(self) -> dict:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict) -> None:
        self.cursor = state["cursor"]


class FakeScorer:
    """Verdict from text and gold alone; answers after a random number of turns of the event loop."""

    failed_starts = 0

    def __init__(self, order_seed: int = 0) -> None:
        self.random = random.Random(order_seed)
        self.hang = False

    async def score_async(self, pairs):
        if self.hang:
            await asyncio.sleep(NEVER)
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)
        return [verdict(text, gold) for text, gold, _ in pairs]


def verdict(text: str, gold: str) -> Verdict:
    correct = {"easy": True, "hard": False}.get(gold, digest("verdict", text) % 2 == 0)
    return Verdict(correct, 1.0 if correct else -0.1, "match" if correct else "no_match")


class FakeEngine:
    """Yields the groups of a request in an order drawn from order_seed."""

    def __init__(self, order_seed: int = 0, events: list | None = None) -> None:
        self.random = random.Random(order_seed)
        self.weights = b""
        self.version = -1
        self.events = events if events is not None else []
        self.abort_rollouts: set[tuple[int, int, int]] = set()  # (group, attempt, index): finish reason "abort"
        self.lose_groups: set[tuple[int, int]] = set()  # (group, attempt): no answer at all
        self.late: list[Rollout] = []  # Yielded once more at the beginning of the next pass.
        self.keep_late = False
        self.hang_after: int | None = None
        self.stubborn = False
        self.fail_after: int | None = None
        self.gate: asyncio.Event | None = None
        self.requests = []
        self.closed = self.started = self.iterators_closed = 0
        self.yields = 0

    async def start(self) -> None:
        self.started += 1

    async def generate(self, requests):
        self.requests.append(list(requests))
        self.events.append(("generate", self.version))
        try:
            late, self.late = self.late, []
            for rollout in late:
                yield (rollout,)
            order = self.random.sample(list(requests), len(requests))
            for request in order:
                await self._trouble()
                if (request.group_id, request.attempt) not in self.lose_groups:
                    self.yields += 1
                    yield self.answer(request)
        finally:
            self.iterators_closed += 1
            self.events.append(("generated", self.version))

    async def _trouble(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.hang_after is not None and self.yields >= self.hang_after:
            while True:
                try:
                    await asyncio.sleep(NEVER)
                except asyncio.CancelledError:
                    if not self.stubborn:
                        raise
        if self.fail_after is not None and self.yields >= self.fail_after:
            raise EngineError("replica 0 died")
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)

    def answer(self, request) -> tuple[Rollout, ...]:
        rollouts = []
        for index in request.indices:
            rollout = make_rollout(request.group_id, request.attempt, index, request.prompt, self.version, self.weights)
            if (request.group_id, request.attempt, index) in self.abort_rollouts:
                if self.keep_late:
                    self.late.append(rollout)
                rollout = make_rollout(
                    request.group_id, request.attempt, index, request.prompt, self.version, self.weights, "abort"
                )
            rollouts.append(rollout)
        return tuple(rollouts)

    async def abort(self, group_ids=None) -> None:
        self.events.append(("abort", self.version))

    def when_back(self, call) -> None:
        """Nothing of it ever goes away."""

    def begin_update(self, version: int, only=None) -> FakeUpdate:
        return FakeUpdate(self, version)

    async def close(self) -> None:
        self.closed += 1


def make_rollout(group_id, attempt, index, prompt, version, weights=b"", finish=None, length=None) -> Rollout:
    seed = digest("rollout", group_id, attempt, index, prompt.tokens, weights)
    generator = np.random.default_rng(seed)
    length = length or int(generator.integers(1, 9))
    tokens = generator.integers(3, 50, length).astype(np.int32)
    return Rollout(
        prompt_id=prompt.id,
        group_id=group_id,
        attempt=attempt,
        index=index,
        tokens=np.concatenate([np.asarray(prompt.tokens, np.int32), tokens]),
        prompt_length=len(prompt.tokens),
        loss_mask=np.ones(length, np.uint8),
        logprobs=-generator.random(length, dtype=np.float32),
        finish_reason=finish or ("length" if length == 8 else "stop"),
        weight_version=version,
        text=" ".join(map(str, tokens)),
    )


class FakePolicy:
    """Its weights are a hash over everything it was ever trained on."""

    def __init__(self, events: list | None = None) -> None:
        self.weights = b"start"
        self.steps = 0
        self.events = events if events is not None else []
        self.nonfinite_steps: dict[int, str] = {}  # step -> "raise" or "skip"
        self.batches: list[tuple[int, int]] = []
        self.begun = False  # as actor.step.TrainState's
        self.prepared: dict[int, int] = {}  # group id -> steps when its old log-probs were taken
        self.gate: asyncio.Event | None = None
        self.hang = False
        self.closed = 0
        self.save_error: OSError | None = None
        self.save_gate: asyncio.Event | None = None

    async def prepare(self, batch):
        self.events.append(("prepare", self.steps))
        await asyncio.sleep(0)
        self.prepared |= dict.fromkeys(batch.group_ids_N.tolist(), self.steps)
        return PreparedStep(replace(batch, old_logprobs_R=self._old_logprobs(batch)))

    def _old_logprobs(self, batch):
        """Another number for each token, and the steps that were done when its group was prepared."""
        steps = np.array([self.prepared[i] for i in batch.group_ids_N.tolist()], np.float32)
        return batch.rollout_logprobs_R + np.repeat(steps, batch.response_lengths_N)

    async def train(self, prepared: PreparedStep, step: int) -> StepResult:
        batch = prepared.batch
        self.events.append(("train", step))
        if self.hang:
            await asyncio.sleep(NEVER)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        np.testing.assert_array_equal(batch.old_logprobs_R, self._old_logprobs(batch))
        self.begun |= batch.opens_batch
        seen = digest(batch_digest(batch), batch.old_logprobs_R.tobytes(), self.begun)
        self.batches.append((step, seen))
        if step in self.nonfinite_steps:
            if self.nonfinite_steps[step] == "raise":
                raise NonFiniteError("loss is nan in micro-batch 3")
            return StepResult({"loss/policy": float("nan")}, skipped=True, reason="gradient norm is inf")
        self.weights = str(digest(self.weights, seen, step)).encode()
        self.steps += 1
        self.begun = False
        self.events.append(("trained", step))
        loss = int(self.weights) % 1000003 / 1000003
        return StepResult({"loss/policy": loss, "difficulty/weight/2": 1 + loss})

    @asynccontextmanager
    async def hold(self):
        yield

    async def export(self, plan) -> SendReport:
        """plan: a list, into which the weights go."""
        self.events.append(("sync", self.version))
        plan.append(self.weights)
        return SendReport(len(self.weights))

    async def save(self, directory: Path, captured) -> None:
        self.events.append(("save", self.steps))
        (directory / "shards").mkdir()
        (directory / "shards" / "0.json").write_text(json.dumps([self.weights.decode(), self.steps]))
        captured()
        if self.save_gate:
            await self.save_gate.wait()
        if self.save_error:
            raise self.save_error

    async def load(self, directory: Path) -> None:
        weights, self.steps = json.loads((directory / "shards" / "0.json").read_text())
        self.weights = weights.encode()

    async def close(self) -> None:
        self.closed += 1


def batch_digest(batch) -> int:
    names = ("tokens_T", "lengths_N", "loss_mask_R", "rollout_logprobs_R", "advantages_N", "bins_N", "group_ids_N")
    return digest(*(getattr(batch, name).tobytes() for name in names))


class FakePhases:
    """Phases that can raise at a chosen border: (name, n-th time, "enter" or "exit")."""

    def __init__(self, crash: tuple[str, int, str] | None = None) -> None:
        self.crash = crash
        self.counts: dict[str, int] = {}
        self.borders: list[tuple[str, int, str]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        number = self.counts[name] = self.counts.get(name, 0) + 1
        self._border((name, number, "enter"))
        yield
        self._border((name, number, "exit"))

    def _border(self, border: tuple[str, int, str]) -> None:
        self.borders.append(border)
        if border == self.crash:
            raise Crash(f"crash at {border}")

    def collect(self) -> dict[str, float]:
        return {}


class FakeProgress:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[int] = []
        self.on_step = None

    def notice(self, text: str) -> None:
        self.messages.append(text)

    def warn(self, text: str) -> None:
        self.messages.append(f"warning: {text}")

    def stage(self, name: str, text: str = "") -> None:
        pass

    def step(self, step: int, metrics) -> None:
        self.steps.append(step)
        if self.on_step:
            self.on_step(step)


def make_sampler(
    engine, source, progress, phases, *, rollout=None, order_seed=0, steps_per_batch=1, **options
) -> Sampler:
    section = RolloutSection(
        **({"prompts_per_batch": 3, "rollouts_per_prompt": K, "oversampling": 1.5} | (rollout or {}))
    )
    bins, ledger = range(section.rollouts_per_prompt + 1), Ledger()
    kept_bins = bins[1:-1] if options.pop("filter_groups", True) else bins
    shared = {"deadlines": options.pop("deadlines", FAST), "notices": progress}
    scorer, size = options.pop("scorer", None) or FakeScorer(order_seed), section.rollouts_per_prompt
    rollouter = options.pop("rollouter", None) or SingleTurn(engine, scorer)
    collector = RolloutCollector(
        ledger,
        rollouter=rollouter,
        sampling=SamplingParams(),
        rollouts_per_prompt=size,
        phases=phases,
        segment_tokens=section.segment_tokens,
        template=options.pop("template", None),
        teacher=options.pop("teacher", None),
        **shared,
    )
    parts = RolloutParts(
        section=section, rollouter=rollouter, prompts=source, ledger=ledger, collector=collector, **shared
    )
    options = {"finish_batch": "all"} | options | {"kept_bins": kept_bins, "steps_per_batch": steps_per_batch}
    return Sampler(parts, scorer, **options)


def make_stack(run: Path, *, order_seed=0, crash=None, rollout=None, trainer=None, deadlines=FAST, **sampler_options):
    """A whole loop over fakes; attributes of the result are the parts. engine_class: FakeEngine, or another one."""
    events, beside = [], sampler_options.pop("evaluate_beside", False)
    engine_class = sampler_options.pop("engine_class", FakeEngine)
    engine, policy = engine_class(order_seed, events), FakePolicy(events)
    source, phases, progress = sampler_options.pop("source", None) or FakeSource(), FakePhases(crash), FakeProgress()
    section = TrainerSection(**({"steps": 6, "save_every_steps": 2, "keep_checkpoints": 2} | (trainer or {})))
    options = {"order_seed": order_seed, "steps_per_batch": section.steps_per_batch, "deadlines": deadlines}
    sampler = make_sampler(engine, source, progress, phases, rollout=rollout, **options | sampler_options)
    metrics = MetricsLog(run, tensorboard=False)

    async def evaluate(step: int):
        events.append(("evaluate", step))
        await asyncio.sleep(0)
        return {"eval/held_out/accuracy": digest(engine.weights) % 100 / 100}

    parts = LoopParts(
        policy=policy,
        batches=sampler,
        build=lambda groups, step: build_step_batch(groups, GRPO),
        metrics=metrics,
        progress=progress,
        phases=phases,
        engine=engine,
        checkpoints=Checkpoints(run, keep=section.keep_checkpoints),
        recorder=Recorder(run),
        evaluations=Evaluations(evaluate, section, phases, deadlines, beside=beside),
        deadlines=deadlines,
    )
    ahead = RolloutSection(**(rollout or {})).batches_ahead
    controller = Controller(section, parts, batches_ahead=ahead)
    return SimpleNamespace(
        controller=controller,
        parts=parts,
        engine=engine,
        policy=policy,
        source=source,
        sampler=sampler,
        phases=phases,
        progress=progress,
        events=events,
        metrics=metrics,
        section=section,
        batches_ahead=ahead,
        run=run,
    )


def with_parts(stack, **changes):
    """The same loop with other parts."""
    stack.parts = replace(stack.parts, **changes)
    stack.controller = Controller(stack.section, stack.parts, batches_ahead=stack.batches_ahead)
    return stack


def run_stack(stack):
    """Runs to the end; returns the outcome."""
    return asyncio.run(stack.controller.run())


def resume_stack(stack):
    """What `--resume` does: the newest whole checkpoint, or the beginning."""
    found = find_latest_valid(stack.run, stack.progress)
    if found:
        set_newer_aside(found[0])

    async def go():
        if found:
            await stack.controller.resume(*found)
        else:
            await stack.controller.truncate_files()
        return await stack.controller.run()

    return asyncio.run(go())
