"""The loop of an evaluation: asks an engine for answers, has each verified, and keeps it; and the sets that are asked.

Works with any engine and scorer of rollout/protocol.py. Answers are verified and written while others are generated;
no wait is without a limit, and an answer that an abort cut off is not kept. Evaluation sets come from suites of
published problem sets (`--suite math6 --suite-dir DIR`; tools/fetch_eval_suite.py writes their files, and the number
of rows that each must have stands here) and from `--set name=path`. Rejects missing files, files that could be two
sets, and sets that share a name.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_daro.config.problems import did_you_mean, nearest_paths
from megatron_daro.config.sections import EvalSet
from megatron_daro.errors import ConfigError, DeadlineError
from megatron_daro.rollout.deadlines import first_cause
from megatron_daro.rollout.protocol import Engine, Scorer
from megatron_daro.rollout.rollouter import judge
from megatron_daro.types import GroupRequest, Rollout
from megatron_daro.workshop.evaluate.answers import Answer, AnswerStore, Question

_VERIFIED_TOGETHER = 256
_WATCH_S = 1.0
# For verdicts under way when an evaluation ends early: what a model has answered is not asked for twice.
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What an evaluation drives. window: requests under way at once; None: all of them in
    one call, for an engine that puts its own batches together. told: called after each kept answer. patience_s: most
    time without any answer."""

    engine: Engine
    scorer: Scorer
    store: AnswerStore
    window: int | None
    told: Callable[[Answer], None]
    patience_s: float


async def ask(parts: Parts, requests: Sequence[GroupRequest], questions: Sequence[Question]) -> None:
    """Ask for every request; what came is kept when this ends, however it ends.

    Raises:
        DeadlineError: no answer came for `patience_s`. Whatever engine, scorer and disk raise, the first of them.
    """
    answers = _AnswerRecorder(parts, {question.group_id: question for question in questions})
    try:
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(answers.watch())
            if parts.window is None:
                await answers.stream(requests)
            else:
                left = iter(requests)
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(parts.window, len(requests))):
                        workers.create_task(answers.work(left))
            watcher.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    finally:
        await answers.drain()
        parts.store.flush()


class _AnswerRecorder:
    """Has rollouts verified, and keeps the answers that are whole."""

    def __init__(self, parts: Parts, questions: dict[int, Question]) -> None:
        self._parts, self._questions = parts, questions
        self._room = asyncio.Semaphore(_VERIFIED_TOGETHER)
        self._last = time.monotonic()
        self._writing = asyncio.Lock()
        self._verifying: set[asyncio.Task[None]] = set()

    async def stream(self, requests: Sequence[GroupRequest]) -> None:
        """All requests in one call."""
        async with asyncio.TaskGroup() as verifying:
            async for rollouts in self._parts.engine.generate(requests):
                await self._room.acquire()
                verifying.create_task(self._release_after(self._begin(self._take(rollouts))))

    async def work(self, left: Iterator[GroupRequest]) -> None:
        """One request after the other."""
        for request in left:
            async for rollouts in self._parts.engine.generate([request]):
                await asyncio.shield(self._begin(self._take(rollouts)))

    async def drain(self) -> None:
        """Finish what came before the end, within some seconds."""
        if self._verifying:
            await asyncio.wait(self._verifying, timeout=_DRAIN_S)
        for task in self._verifying:
            task.cancel()

    async def watch(self) -> None:
        """Write what waits from time to time; end everything where nothing comes any more."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._write_if_due()
            silent = time.monotonic() - self._last
            if silent > self._parts.patience_s:
                raise DeadlineError(
                    f"deadline 'generate': no answer came for {silent:.0f} s; if the engine is only slow, raise "
                    "trainer.deadline_scale; else look at its log"
                )

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Begin work that goes on to its end, also where the one who waits for it (shielded) is cancelled."""
        task = asyncio.create_task(work)
        self._verifying.add(task)
        task.add_done_callback(self._verifying.discard)
        return task

    async def _take(self, rollouts: Sequence[Rollout]) -> None:
        """Verify and keep what is whole."""
        self._last = time.monotonic()
        whole = [one for one in rollouts if one.finish_reason != "abort"]
        questions = [self._questions[one.group_id] for one in whole]
        texts = [(q.held_out.verified_text(one.text), q.prompt) for one, q in zip(whole, questions, strict=True)]
        verdicts = await judge(self._parts.scorer, texts)
        for one, question, verdict in zip(whole, questions, verdicts, strict=True):
            answer = Answer(question.prompt, one, verdict)
            self._parts.store.add(answer)
            self._parts.told(answer)
        await self._write_if_due()

    async def _release_after(self, work: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(work)
        finally:
            self._room.release()

    async def _write_if_due(self) -> None:
        if self._parts.store.due and not self._writing.locked():
            async with self._writing:
                await asyncio.shield(self._begin(asyncio.to_thread(self._parts.store.write, self._parts.store.take())))


TEMPERATURE, TOP_P = 0.6, 0.95
"""How suites are sampled unless said otherwise: as DeepSeek-R1 reports (arXiv 2501.12948, section 3)."""
_KINDS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, slots=True)
class Member:
    """One set of a suite. stem: with what its file's name begins. rows: that it has."""

    name: str
    stem: str
    rows: int


SUITES: dict[str, tuple[Member, ...]] = {
    "math6": (
        Member("aime24", "aime24", 30),
        Member("aime25", "aime25", 30),
        Member("amc23", "amc23", 40),
        Member("math500", "math500", 500),
        Member("minerva", "minerva", 272),
        Member("olympiadbench", "olympiadbench", 675),
    )
}
"""AIME 2024 and 2025, AMC 2023, MATH-500, Minerva's OCW problems, OlympiadBench's open text-only mathematics."""


def suite_sets(suite: str, folder: Path) -> list[EvalSet]:
    """Return the sets of a suite.

    Args:
        suite: a name of SUITES. folder: where tools/fetch_eval_suite.py wrote its files.

    Raises:
        ConfigError: no such suite, or a file is missing or there twice.
    """
    if suite not in SUITES:
        near = did_you_mean(nearest_paths(suite, tuple(SUITES)), "write one of these names")
        raise ConfigError(f"--suite: got {suite!r}; allowed: {', '.join(SUITES)}; fix: {near}")
    return [
        EvalSet(
            name=member.name,
            path=_file(member.stem, folder, suite),
            rows=member.rows,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            template="chat",
        )
        for member in SUITES[suite]
    ]


def named_sets(texts: Sequence[str]) -> list[EvalSet]:
    """Return the sets of texts `name=path`. Raises ConfigError for another form."""
    sets = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ConfigError(f"--set: got {text!r}; allowed: NAME=FILE; fix: --set mine=problems.jsonl")
        if not Path(path).is_file():
            raise ConfigError(f"--set {name}: {path} is not there; allowed: a file of problems; fix: check the path")
        try:
            one = EvalSet(name=name, path=Path(path), temperature=TEMPERATURE, top_p=TOP_P, template="chat")
        except ValueError as error:
            raise ConfigError(
                f"--set: got the name {name!r}; allowed: letters, digits, _ . and -; fix: give it another name"
            ) from error
        sets.append(one)
    return sets


def check_names(sets: Sequence[EvalSet]) -> None:
    """Refuse sets that share a name. Raises ConfigError."""
    shared = [name for name, count in Counter(one.name for one in sets).items() if count > 1]
    if shared:
        files = "; ".join(f"{one.name}: {one.path}" for one in sets if one.name in shared)
        raise ConfigError(
            f"evaluation sets: got the name {', '.join(shared)} more than once ({files}); allowed: names that differ, "
            "since results are kept by name; fix: rename one with --set NAME=FILE"
        )


def _file(stem: str, folder: Path, suite: str) -> Path:
    files = sorted(path for path in folder.glob(f"{stem}*") if path.name.endswith(_KINDS))
    if len(files) == 1:
        return files[0]
    got = f"{len(files)} files {stem}* ({', '.join(path.name for path in files)})" if files else f"no file {stem}*"
    raise ConfigError(
        f"--suite {suite}: got {got} in {folder}; allowed: one; fix: python tools/fetch_eval_suite.py --out {folder}, "
        "and --suite-dir with that folder"
    )
