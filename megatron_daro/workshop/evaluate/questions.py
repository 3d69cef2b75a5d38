"""The questions of an evaluation: each problem of each set, and one request for each answer that is not there yet.

Sets with their prompts -> Question -> GroupRequests. A question's id depends on the set and the problem, not on the
run, so an evaluation that continues after a kill makes the same requests as an uninterrupted one. An engine that draws
from seeds also gives the same answers, since a seed follows from (seed, set, problem, sample) only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_daro.data.stops import Stops
from megatron_daro.data.templates import HeldOut
from megatron_daro.types import GroupRequest, Prompt, SamplingParams
from megatron_daro.workshop.evaluate.answers import Key


@dataclass(frozen=True, slots=True)
class Question:
    """One problem of one set. prompt: its id identifies the problem, its source is the name of the set."""

    held_out: HeldOut
    group_id: int
    prompt: Prompt
    sampling: SamplingParams

    @property
    def samples(self) -> int:
        """How many answers are wanted."""
        return self.held_out.section.rollouts_per_prompt

    @property
    def keys(self) -> Iterator[Key]:
        """Every answer that is wanted."""
        return ((self.group_id, index) for index in range(self.samples))


def questions_of(sets: Sequence[HeldOut], *, max_new_tokens: int, stops: Stops) -> list[Question]:
    """Return every problem of every set, in order.

    Args:
        sets: with distinct names. max_new_tokens: longest answer. stops: what ends an answer, besides the stops of its
            template.
    """
    questions = []
    for held_out in sets:
        section, seen = held_out.section, Counter[str]()
        ends = held_out.stops(stops)
        sampling = SamplingParams(
            section.temperature,
            section.top_p,
            max_new_tokens,
            ends.token_ids,
            stop=ends.texts,
            repetition=ends.repetition,
        )
        for prompt in held_out.prompts:
            problem = _problem_id(prompt)
            seen[problem] += 1
            name = problem if seen[problem] == 1 else f"{problem}-{seen[problem]}"
            own = replace(prompt, id=name, source=section.name)
            questions.append(Question(held_out, _group_id(section.name, name), own, sampling))
    return questions


def requests(questions: Sequence[Question], kept: Collection[Key]) -> list[GroupRequest]:
    """Return one request for each answer that is not kept yet, problem by problem (they share the prompt's cache)."""
    return [
        GroupRequest(question.group_id, 0, question.prompt, (index,), question.sampling)
        for question in questions
        for group_id, index in question.keys
        if (group_id, index) not in kept
    ]


def _problem_id(prompt: Prompt) -> str:
    """Return 16 hex digits of a hash of the statement and the golds, which do not depend on the file's path."""
    text = "\0".join((" ".join(prompt.statement.split()), *prompt.answers))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _group_id(set_name: str, problem: str) -> int:
    """Return a negative number of at most 62 bits, so that no group of training has it: those count from 0."""
    digest = hashlib.sha256(f"{set_name}\0{problem}".encode()).digest()
    return -1 - (int.from_bytes(digest[:8], "big") >> 2)
