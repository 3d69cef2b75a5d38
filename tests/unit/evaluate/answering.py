"""An engine of this process whose answers follow from the request alone, as those of a seeded engine do; and
evaluations of what it answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from megatron_daro.config.sections import EvalSet, RewardSection
from megatron_daro.data.stops import Stops, until_stop
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import EngineError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.types import GroupRequest, Prompt, Rollout
from megatron_daro.workshop.evaluate import identity, results
from megatron_daro.workshop.evaluate.answers import AnswerStore, kept
from megatron_daro.workshop.evaluate.asking import Parts, ask
from megatron_daro.workshop.evaluate.questions import Question, questions_of, requests

STOP = 0


def text_of(tokens: Sequence[int]) -> str:
    """A token is a character."""
    return "".join(chr(token) for token in tokens if token != STOP)


def draw(seed: int, request: GroupRequest, index: int) -> int:
    """0 to 9, from (seed, group, index) only."""
    words = f"{seed} {request.group_id} {index}"
    return hashlib.sha256(words.encode()).digest()[0] % 10


class SeededEngine:
    """Answers `####d` to the problem `d`, right as often as the digit drawn is above it. fails_after: requests after
    which it dies. tail: text behind each answer. aborted: samples that come back cut off."""

    def __init__(
        self, *, seed: int = 0, fails_after: int | None = None, tail: str = "", aborted: Sequence[int] = ()
    ) -> None:
        self._seed = seed
        self.asked: list[tuple[int, int]] = []
        self._left, self._tail, self._aborted = fails_after, tail, aborted

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        for request in requests:
            if self._left == 0:
                raise EngineError("all 2 SGLang servers are gone: killed")
            self._left = None if self._left is None else self._left - 1
            self.asked += [(request.group_id, index) for index in request.indices]
            yield tuple(self.rollout(request, index) for index in request.indices)

    def rollout(self, request: GroupRequest, index: int) -> Rollout:
        wanted, drawn = int(request.prompt.answer), draw(self._seed, request, index)
        said = f"####{wanted if drawn >= wanted else drawn}{self._tail}"
        ids = [*map(ord, said), STOP]
        prompt = request.prompt.tokens
        rollout = Rollout(
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            attempt=0,
            index=index,
            tokens=np.array([*prompt, *ids], dtype=np.int32),
            prompt_length=len(prompt),
            loss_mask=np.ones(len(ids), dtype=np.uint8),
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            finish_reason="abort" if index in self._aborted else "stop",
            weight_version=0,
            text=said,
        )
        return until_stop(rollout, request.sampling.stop, text_of)


def digits(name: str = "digits", *, samples: int = 4, template: str = "data", level: bool = True) -> HeldOut:
    """The problems 0 to 9, easy ones first."""
    prompts = tuple(
        Prompt(str(d), str(d), "file", text=f"echo {d}", tokens=(65, 66 + d), category=f"{d // 5}" if level else "")
        for d in range(10)
    )
    section = EvalSet(name=name, path=Path("x"), rollouts_per_prompt=samples, temperature=1.0, template=template)
    return HeldOut(section, prompts)


def questions(*sets: HeldOut) -> list[Question]:
    return questions_of(sets, max_new_tokens=8, stops=Stops((0,)))


def ask_for(
    out: Path, engine: object, asked: list[Question], *, window: int | None = None, patience_s: float = 60.0
) -> int:
    """Asks an engine for what is not there yet; returns how many answers that are."""
    pending = requests(asked, kept(out))
    with RewardPool("exact", workers=0) as pool:
        parts = Parts(engine, pool, AnswerStore(out), window, lambda answer: None, patience_s)
        asyncio.run(ask(parts, pending, asked))
    return len(pending)


def scored(out: Path, *sets: HeldOut, engine: object | None = None) -> list[results.Scored]:
    """Every problem's score; the answers are asked for before."""
    asked = questions(*sets)
    ask_for(out, engine or SeededEngine(), asked)
    with RewardPool("exact", workers=0) as pool:
        return asyncio.run(results.score_problems(out, asked, RewardSection(verifier="exact", workers=1), pool))


def evaluated(out: Path, *sets: HeldOut, seed: int, tail: str = "") -> Path:
    """The directory of a whole evaluation."""
    names = {one.section.name: {"file": "ab", "samples": one.section.rollouts_per_prompt} for one in sets}
    out.mkdir()
    identity.check_or_write(out, {"weights": {"files": str(seed)}, "seed": seed, "sets": names})
    found = scored(out, *sets, engine=SeededEngine(seed=seed, tail=tail))
    results.write(out, results.summarise(found, sets, (1,), seed=0), found)
    return out
