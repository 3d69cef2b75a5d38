"""From kept answers to scores: one row per problem, one summary per set, and the table that is printed.

OUT/evaluation.json says what an evaluation is made of (configuration, files, weights), and only the same evaluation
continues in a directory. More samples or other sets may be asked for later; what would mix answers of two models, two
ways of asking or two verifiers is rejected by name. For maj@k a problem's answers are put into classes: correct ones
are one class, since each was verified against a gold; others are equal where their normal form is, or where the
verifier accepts one with the other as gold (`\frac12` and `0.5`), which is asked for the most frequent forms only.
Rejects an evaluation of which answers are missing, and k larger than the samples.

Scores are avg@k, pass@k and maj@k, with intervals by bootstrap over problems.
Shape letters: P problems, n samples of a problem, D draws, B bootstrap resamples.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_daro import durable
from megatron_daro.config.sections import EvalSet, RewardSection
from megatron_daro.data.templates import HeldOut
from megatron_daro.errors import DataError
from megatron_daro.reward.base import StagedVerifier, VerifierSpec
from megatron_daro.reward.factory import verifier_of
from megatron_daro.rollout.protocol import Scorer
from megatron_daro.rollout.summary import pass_at_k
from megatron_daro.workshop.analyze.behaviour import Reflection, ending_of, has_code, reflects
from megatron_daro.workshop.evaluate import answers
from megatron_daro.workshop.evaluate.answers import Question

RESAMPLES = 10_000
DRAWS = 400
LEVEL = 0.95
_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its interval, both in [0, 1] for scores."""

    mean: float
    low: float
    high: float


def majority_at_k(votes: Sequence[int], right: int | None, k: int, *, seed: int, draws: int = DRAWS) -> float:
    """Return the probability that the most frequent answer among k of the samples is the right one.

    With all samples it is exact; for fewer, the mean over `draws` random subsets (seeded). Answers that tie share the
    vote: a right one among t tied ones counts 1 / t, the expectation of breaking the tie by lot. Samples without an
    answer have no vote; where nobody votes it is 0.

    Args:
        votes: the class of each sample's answer, -1 where there is none.
        right: the class of the right answers; None where no sample is right.
        k: how many vote.

    Raises:
        DataError: k is not between 1 and the number of votes.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise DataError(f"maj@{k}: got {n} samples of a problem; allowed: 1 to {n}; ask for more samples")
    if right is None:
        return 0.0
    votes_n = np.asarray(votes, dtype=np.int64)
    if k == n:
        drawn_Dk = votes_n[None]
    else:
        order_Dn = np.random.default_rng(seed).random((draws, n)).argsort(axis=1)
        drawn_Dk = votes_n[order_Dn[:, :k]]
    counts_DC = (drawn_Dk[:, :, None] == np.arange(votes_n.max() + 1)).sum(axis=1)
    most_D = counts_DC.max(axis=1)
    tied_D = (counts_DC == most_D[:, None]).sum(axis=1)
    wins_D = (counts_DC[:, right] == most_D) & (most_D > 0)
    return float((wins_D / tied_D).mean())


def bootstrap_means(values_P: np.ndarray, *, seed: int, name: str, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the means of resampled problems, float64 [B]: the same for the same seed, name and values.

    Args:
        values_P: one number a problem. name: of the set, so that sets are resampled independently.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    size, means = len(values_P), []
    step = max(1, _AT_ONCE // size)
    for start in range(0, resamples, step):
        chosen = rng.integers(0, size, (min(step, resamples - start), size))
        means.append(values_P[chosen].mean(axis=1))
    return np.concatenate(means)


def interval(means_B: np.ndarray) -> tuple[float, float]:
    """Return the ends of the central 95 % of resampled means (percentile bootstrap)."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means_B, [tail, 100 - tail])
    return float(low), float(high)


def estimate(values_P: Sequence[float], *, seed: int, name: str) -> Estimate:
    """Return the mean over problems and its 95 % interval."""
    values = np.asarray(values_P, dtype=np.float64)
    return Estimate(float(values.mean()), *interval(bootstrap_means(values, seed=seed, name=name)))


def estimate_of_sets(values_of_sets: dict[str, Sequence[float]], *, seed: int) -> Estimate:
    """Return the mean of the sets' means, each set counting the same, resampled within each set."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in values_of_sets.items()}
    means_B = np.mean([bootstrap_means(array, seed=seed, name=name) for name, array in arrays.items()], axis=0)
    return Estimate(float(np.mean([array.mean() for array in arrays.values()])), *interval(means_B))


FILE = "evaluation.json"
_FORMAT = 1
_FREE_OF_SET = ("samples",)


def check_or_write(out: Path, made_of: Mapping[str, Any]) -> None:
    """Compare with what the directory holds, and write what it will hold.

    Args:
        out: directory of the evaluation. made_of: plain values; "sets" by name, "notes" are not compared.

    Raises:
        DataError: it holds answers of another evaluation; names each difference.
    """
    path = out / FILE
    saved = read(out) if path.is_file() else {}
    if saved:
        wrong = list(_differences(saved, made_of))
        if wrong:
            raise DataError(
                f"{out}: holds answers of another evaluation: {'; '.join(wrong)}; allowed: more samples, other sets. "
                "Use another --out"
            )
    sets = dict(saved.get("sets", {})) | dict(made_of["sets"])
    beside = path.with_name(f"{FILE}.tmp")
    durable.write(beside, json.dumps({"format": _FORMAT, **made_of, "sets": sets}, indent=2) + "\n")
    beside.replace(path)


def read(out: Path) -> dict[str, Any]:
    """Return what an evaluation is made of. Raises DataError where the directory holds none."""
    path = out / FILE
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{out}: is no directory of an evaluation ({error}); give one that megatron-daro eval wrote"
        ) from error
    if not isinstance(summary, dict) or summary.get("format") != _FORMAT:
        raise DataError(f"{path}: is of another format; allowed: {_FORMAT}; evaluate again with another --out")
    return summary


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*saved, *now} - {"format", "sets", "notes"}):
        yield from _changed(key, saved.get(key), now.get(key))
    for name in sorted(saved["sets"].keys() & now["sets"].keys()):
        was, is_ = ({k: v for k, v in one["sets"][name].items() if k not in _FREE_OF_SET} for one in (saved, now))
        yield from _changed(f"set {name}", was, is_)


def _changed(name: str, was: object, is_: object) -> Iterator[str]:
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        for key in sorted({*was, *is_}):
            yield from _changed(f"{name} {key}", was.get(key), is_.get(key))
    elif was != is_:
        yield f"{name} was {json.dumps(was)}, is {json.dumps(is_)}"


MOST_COMPARED = 32
"""Different wrong answers of a problem that are compared with each other; rarer ones count as different."""
_BOXED = "math"


@dataclass(frozen=True, slots=True)
class Sample:
    """What of an answer decides its vote. answer: its normal form, None where it has none."""

    answer: str | None
    correct: bool


@dataclass(frozen=True, slots=True)
class Votes:
    """classes: of each sample, -1 without an answer. right: the class of right ones, None where there is none. answer:
    the form of each class."""

    classes: tuple[int, ...]
    right: int | None
    answers: tuple[str, ...]


def answer_reader(section: RewardSection) -> StagedVerifier:
    """Return the verifier, which also says what an answer's final form is."""
    verifier = verifier_of(
        VerifierSpec(
            section.verifier,
            section.strict,
            marker=section.marker,
            options=section.options,
            after_thinking=section.after_thinking,
        )
    )
    assert isinstance(verifier, StagedVerifier)
    return verifier


async def votes_of(problems: Sequence[Sequence[Sample]], scorer: Scorer, *, verifier: str) -> list[Votes]:
    """Return the votes of each problem.

    Args:
        problems: the samples of each. scorer: says whether two wrong answers are the same. verifier: its name; only
            `math` knows more than the normal form.
    """
    asked = [_pairs(samples) if verifier == _BOXED else [] for samples in problems]
    flat = [(f"\\boxed{{{b}}}", a, "") for pairs in asked for a, b in pairs]
    verdicts = iter(await scorer.score_async(flat) if flat else [])
    same = [[pair for pair in pairs if next(verdicts).correct] for pairs in asked]
    return [_votes(samples, pairs) for samples, pairs in zip(problems, same, strict=True)]


def _pairs(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    forms = Counter(one.answer for one in samples if one.answer and not one.correct)
    return list(combinations([form for form, _ in forms.most_common(MOST_COMPARED)], 2))


def _votes(samples: Sequence[Sample], same: Sequence[tuple[str, str]]) -> Votes:
    parent: dict[str, str] = {}

    def root(form: str) -> str:
        while parent.setdefault(form, form) != form:
            form = parent[form]
        return form

    for a, b in same:
        parent[root(b)] = root(a)
    numbers: dict[tuple[bool, str], int] = {}
    names: list[str] = []
    classes = []
    for one in samples:
        if one.answer is None and not one.correct:
            classes.append(-1)
            continue
        name = (True, "") if one.correct else (False, root(one.answer or ""))
        if name not in numbers:
            numbers[name] = len(numbers)
            names.append(one.answer or "")
        classes.append(numbers[name])
    return Votes(tuple(classes), numbers.get((True, "")), tuple(names))


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
    """What one problem gave. set, problem: its names; majority: the most frequent answer, empty where none voted.
    Lengths are tokens, means over samples, None where there is no such sample. From reflecting on: how many answers
    have a word of self-reflection (and are right), have code, ran on behind their answer, stopped without one."""

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
    """Refuse k that some set has fewer samples than. Raises DataError."""
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
        out: directory of the evaluation. questions: all of it. reward: the verifier. scorer: asked whether two wrong
            answers are the same.

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
            fields["ending"] = ending_of(answer is not None, row["finish_reason"] == "length")
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
    """Return the summary: for each set, and for the mean of the sets, every metric with its interval.

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
    if len(by_template) > 1:  # a mean over templates would be that of no model as anybody uses it
        summary["templates"] = {
            template: _of_template([summary["sets"][name] for name in names])
            | {"metrics": _means({name: values[name] for name in names}, seed)}
            for template, names in by_template.items()
        }
    elif len(sets) > 1:
        summary["mean"] = _means(values, seed)
    return summary


def _means(values: Mapping[str, dict[str, list[float]]], seed: int) -> dict[str, dict[str, float]]:
    """Return, for each metric that all sets have, the mean of the sets, each counting the same."""
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
    """Return how the answers of a set end, as shares of them, and how many reflect, with the accuracy of these and of
    the others (None where there are none)."""
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
    beside = out / f"{SUMMARY_FILE}.tmp"
    durable.write(beside, json.dumps(summary, indent=2) + "\n")
    beside.replace(out / SUMMARY_FILE)
    durable.sync(out)


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
        truncated=sum(row["finish_reason"] == "length" for row in rows),
        no_answer=sum(row["reason"] == "no_answer" for row in rows),
        reflecting=sum(row["reflects"] for row in rows),
        reflecting_right=sum(row["reflects"] and row["correct"] for row in rows),
        code=sum(row["code"] for row in rows),
        ran_on=sum(row["ending"] == "ran on" for row in rows),
        stopped_without_answer=sum(row["ending"] == "without answer" for row in rows),
    )
    return Scored(score, votes)


def _values(scored: Sequence[Scored], ks: Sequence[int], seed: int) -> dict[str, list[float]]:
    """Return metric -> one number a problem."""
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
    except UnicodeEncodeError:  # half a character, which no file takes
        return pa.array([str(value).encode("utf-8", "replace").decode() for value in values])
