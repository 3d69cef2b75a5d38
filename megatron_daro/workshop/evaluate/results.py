"""From kept answers to scores: one row per problem (problems.parquet) and one summary per set (summary.json).

Scores are avg@k, pass@k and maj@k with intervals; with them come how answers end, how long they are, and how many
reflect. Rejects an evaluation with missing answers, and a k larger than the number of samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.config.sections import EvalSet, RewardSection
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import DataError
from megatron_daro.reward.factory import answer_reader
from megatron_daro.rollout.protocol import Scorer
from megatron_daro.rollout.summary import pass_at_k
from megatron_daro.workshop.analyze.behaviour import Reflection, ending_of, has_code, reflects
from megatron_daro.workshop.evaluate import answers
from megatron_daro.workshop.evaluate.intervals import Estimate, estimate, estimate_of_sets
from megatron_daro.workshop.evaluate.questions import Question
from megatron_daro.workshop.evaluate.votes import Sample, Votes, majority_at_k, votes_of

SUMMARY_FILE, PROBLEMS_FILE = "summary.json", "problems.parquet"
_ROWS = ("text", "length", "finish_reason", "correct", "reason")
_RATES = (
    (0.0, "0"),
    (0.25, "up to 1/4"),
    (0.5, "up to 1/2"),
    (0.75, "up to 3/4"),
    (1.0 - 1e-12, "below 1"),
    (1.0, "1"),
)


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """Scores of one problem. set, problem: its names. majority: the most frequent answer, empty if no sample voted.
    Lengths are tokens, means over samples, None if there is no such sample. From `reflecting` on: how many answers
    have a word of self-reflection (and are right), have code, ran on after their answer, stopped without one."""

    set: str
    problem: str
    level: str
    statement: str
    gold: str
    samples: int
    correct: int
    majority: str
    majority_right: float
    length: float
    length_right: float | None
    length_wrong: float | None
    truncated: int
    no_answer: int
    reflecting: int = 0
    reflecting_right: int = 0
    code: int = 0
    ran_on: int = 0
    stopped_without_answer: int = 0

    @property
    def rate(self) -> float:
        """Share of right answers."""
        return self.correct / self.samples


@dataclass(frozen=True, slots=True)
class Scored:
    """A problem's numbers with its votes."""

    score: ProblemScore
    votes: Votes


def check_k(sets: Sequence[EvalSet], ks: Sequence[int]) -> None:
    """Check that every set has at least k samples of a problem. Raises DataError."""
    for one in sets:
        wrong = [k for k in ks if not 1 <= k <= one.rollouts_per_prompt]
        if wrong:
            raise DataError(
                f"--k: got {wrong[0]} with {one.rollouts_per_prompt} samples of each problem of {one.name}; allowed: 1 "
                f"to {one.rollouts_per_prompt}; raise --samples, or lower --k"
            )


async def score_problems(
    out: Path, questions: Sequence[Question], reward: RewardSection, scorer: Scorer
) -> list[Scored]:
    """Return every problem's numbers, in order.

    Args:
        out: directory of the evaluation. questions: all of the evaluation. reward: the verifier. scorer: asked whether
            two wrong answers are the same.

    Raises:
        DataError: answers are missing, or a part cannot be read.
    """
    reader, of_group = answer_reader(reward), {question.group_id: question for question in questions}
    found: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in answers.rows(out, _ROWS):
        question = of_group.get(row["group_id"])
        if question is not None and row["index"] < question.samples:
            text = row.pop("text")
            answer = reader.answer_of(question.held_out.verified_text(text))
            fields = {"answer": answer, "reflects": reflects(text), "code": has_code(text)}
            fields["ending"] = ending_of(answer is not None, row["finish_reason"] != "stop")
            found[row["group_id"]][row["index"]] = row | fields
    missing = sum(question.samples - len(found[question.group_id]) for question in questions)
    if missing:
        total = sum(question.samples for question in questions)
        raise DataError(f"{out}: {missing} of {total} answers are missing; the same command asks for them")
    samples = [[found[q.group_id][index] for index in range(q.samples)] for q in questions]
    votes = await votes_of(
        [[Sample(row["answer"], row["correct"]) for row in some] for some in samples], scorer, verifier=reward.verifier
    )
    return [_scored(*one) for one in zip(questions, samples, votes, strict=True)]


def summarise(scored: Sequence[Scored], sets: Sequence[HeldOut], ks: Sequence[int], *, seed: int) -> dict[str, Any]:
    """Return the summary: every metric with its interval, for each set and for the mean of the sets; if sets have
    different templates, for the mean of each template's sets instead.

    Args:
        scored: of all problems. ks: of pass@k and maj@k. seed: of bootstrap and vote draws.
    """
    of_set: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        of_set[one.score.set].append(one)
    values = {held_out.section.name: _values(of_set[held_out.section.name], ks, seed) for held_out in sets}
    summary: dict[str, Any] = {"sets": {}, "mean": {}}
    for held_out in sets:
        name, rows = held_out.section.name, [one.score for one in of_set[held_out.section.name]]
        estimates = {metric: estimate(v, seed=seed, name=name) for metric, v in values[name].items()}
        summary["sets"][name] = {
            "problems": len(rows),
            "samples": held_out.section.rollouts_per_prompt,
            "metrics": {metric: _plain(one) for metric, one in estimates.items()},
            "length": fmean(row.length for row in rows),
            "truncated": sum(row.truncated for row in rows) / sum(row.samples for row in rows),
            "no_answer": sum(row.no_answer for row in rows) / sum(row.samples for row in rows),
            "behaviour": behaviour(rows),
            "by_level": by_level(rows),
        }
    by_template: dict[str, list[str]] = defaultdict(list)
    for held_out in sets:
        by_template[held_out.section.template].append(held_out.section.name)
    if len(by_template) > 1:  # nobody uses a model with several templates, so no mean over them
        summary["templates"] = {
            template: _of_template([summary["sets"][name] for name in names])
            | {"metrics": _means({name: values[name] for name in names}, seed)}
            for template, names in by_template.items()
        }
    elif len(sets) > 1:
        summary["mean"] = _means(values, seed)
    return summary


def _means(values: Mapping[str, dict[str, list[float]]], seed: int) -> dict[str, dict[str, float]]:
    """Return, for each metric that all sets have, the mean of the sets, where every set counts the same."""
    common = [metric for metric in next(iter(values.values())) if all(metric in one for one in values.values())]
    return {
        metric: _plain(estimate_of_sets({name: one[metric] for name, one in values.items()}, seed=seed))
        for metric in common
    }


def _of_template(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shares = ("answered", "ran_on", "cut_off", "without_answer", "code", "reflecting")
    return {
        "length": fmean(one["length"] for one in sets),
        "behaviour": {name: fmean(one["behaviour"][name] for one in sets) for name in shares},
    }


def behaviour(rows: Sequence[ProblemScore]) -> dict[str, float | None]:
    """Return shares of a set's answers: how they end, how many have code or reflect; and the accuracy of those that
    reflect and of the others (None if there are none)."""
    total = sum(row.samples for row in rows)
    shown = Reflection(
        sum(row.reflecting for row in rows),
        sum(row.reflecting_right for row in rows),
        sum(row.samples - row.reflecting for row in rows),
        sum(row.correct - row.reflecting_right for row in rows),
    )
    ran_on, without = (sum(getattr(row, name) for row in rows) for name in ("ran_on", "stopped_without_answer"))
    cut = sum(row.truncated for row in rows)
    return {
        "answered": (total - without - cut) / total,
        "ran_on": ran_on / total,
        "cut_off": (cut - ran_on) / total,
        "without_answer": without / total,
        "code": sum(row.code for row in rows) / total,
        "reflecting": shown.share,
        "reflecting_problems": sum(row.reflecting > 0 for row in rows) / len(rows),
        "accuracy_reflecting": shown.accuracy_with,
        "accuracy_others": shown.accuracy_without,
    }


def by_level(rows: Sequence[ProblemScore]) -> list[dict[str, Any]]:
    """Return accuracy and length by difficulty: the set's own level where it has one, else the measured pass rate."""
    own = any(row.level for row in rows)
    groups: dict[str, list[ProblemScore]] = defaultdict(list)
    for row in rows:
        groups[row.level if own else _rate_name(row.rate)].append(row)
    order = sorted(groups) if own else [name for _, name in _RATES if name in groups]
    return [
        {
            "by": "level" if own else "pass rate",
            "level": name,
            "problems": len(groups[name]),
            "accuracy": fmean(row.rate for row in groups[name]),
            "length": fmean(row.length for row in groups[name]),
            "length_right": _mean(row.length_right for row in groups[name]),
            "length_wrong": _mean(row.length_wrong for row in groups[name]),
        }
        for name in order
    ]


def write(out: Path, summary: Mapping[str, Any], scored: Sequence[Scored]) -> None:
    """Write summary.json and problems.parquet. Raises OSError."""
    names = [field.name for field in fields(ProblemScore)]
    columns = {name: [getattr(one.score, name) for one in scored] for name in names}
    table = pa.table({name: _column(values) for name, values in columns.items()})
    temporary = out / f"{PROBLEMS_FILE}.tmp"
    pq.write_table(table, temporary, compression="zstd")
    durable.sync(temporary)
    temporary.replace(out / PROBLEMS_FILE)
    durable.replace(out / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def _scored(question: Question, rows: Sequence[Mapping[str, Any]], votes: Votes) -> Scored:
    right, wrong = ([row["length"] for row in rows if row["correct"] is verdict] for verdict in (True, False))
    counts = [votes.classes.count(number) for number in range(len(votes.answers))]
    most = votes.answers[counts.index(max(counts))] if counts else ""
    score = ProblemScore(
        set=question.prompt.source,
        problem=question.prompt.id,
        level=question.prompt.category,
        statement=question.prompt.statement,
        gold=question.prompt.answer,
        samples=len(rows),
        correct=len(right),
        majority=most,
        majority_right=majority_at_k(votes.classes, votes.right, len(rows), seed=0),
        length=fmean(row["length"] for row in rows),
        length_right=_mean(right),
        length_wrong=_mean(wrong),
        truncated=sum(row["finish_reason"] != "stop" for row in rows),
        no_answer=sum(row["reason"] == "no_answer" for row in rows),
        reflecting=sum(row["reflects"] for row in rows),
        reflecting_right=sum(row["reflects"] and row["correct"] for row in rows),
        code=sum(row["code"] for row in rows),
        ran_on=sum(row["ending"] == "ran on" for row in rows),
        stopped_without_answer=sum(row["ending"] == "without answer" for row in rows),
    )
    return Scored(score, votes)


def _values(scored: Sequence[Scored], ks: Sequence[int], seed: int) -> dict[str, list[float]]:
    """Return metric -> one number per problem."""
    samples = scored[0].score.samples
    values = {f"avg@{samples}": [one.score.rate for one in scored]}
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(samples, one.score.correct, k) for one in scored]
    for k in ks:
        if k > 1:
            values[f"maj@{k}"] = [
                majority_at_k(one.votes.classes, one.votes.right, k, seed=seed + i) for i, one in enumerate(scored)
            ]
    return values


def _rate_name(rate: float) -> str:
    return next(name for most, name in _RATES if rate <= most)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _plain(one: Estimate) -> dict[str, float]:
    return {"mean": one.mean, "low": one.low, "high": one.high}


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 cannot encode
        return pa.array([str(value).encode("utf-8", "replace").decode() for value in values])
