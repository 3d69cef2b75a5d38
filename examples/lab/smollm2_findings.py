"""What the results on a real language model say, as the tables of docs/lab_smollm2.md.

    python examples/lab/smollm2_findings.py examples/lab/results/smollm2                               # as text
    python examples/lab/smollm2_findings.py examples/lab/results/smollm2 --docs docs/lab_smollm2.md    # into the page

Place in the data flow: RESULTS/*.parquet -> `findings`, `by_pass_rate` -> tables. Refuses folders without results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import by_pass_rate
from by_pass_rate import Runs, quarter
from findings import aligned, compared_worlds, over_tokens, percent, points, show
from results import LEVEL, Interval, Outcome, benjamini_hochberg, differences_over, p_value, paired
from smollm2 import PRIMARY, SmolDials

MARKS = ("<!-- smollm2 findings -->", "<!-- end of smollm2 findings -->")
WORLD = SmolDials.kind
Compared = Mapping[str, Mapping[int, Outcome]]


def rates(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """The search: final accuracy of each arm at each learning rate, one seed, in percent."""
    tuned = [outcome for outcome in outcomes if outcome.job.purpose == "tune"]
    columns = sorted({outcome.job.learning_rate for outcome in tuned})
    found = {(o.job.arm, o.job.learning_rate): "diverged" if o.ended else f"{100 * o.final:.1f}" for o in tuned}
    arms = dict.fromkeys(outcome.job.arm for outcome in tuned)
    rows = [[arm, *(found.get((arm, rate), "") for rate in columns)] for arm in arms]
    return ["arm", *(f"{rate:g}" for rate in columns)], rows


def secondary(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """The first arm of the primary contrast less every arm but the second, over the same tokens, with p values by
    Benjamini-Hochberg; an arm with a run that diverged, or with one seed, has none and is not counted."""
    others = [arm for arm in arms if arm not in PRIMARY]
    found = {arm: differences_over(arms[PRIMARY[0]], arms[arm], "tokens") for arm in others}
    tested = [arm for arm in others if len(found[arm]) > 1 and all(map(math.isfinite, found[arm]))]
    adjusted = dict(zip(tested, benjamini_hochberg([p_value(found[arm]) for arm in tested]), strict=True))
    rows = []
    for arm in others:
        tail = [f"{adjusted[arm]:.3f}", "yes" if adjusted[arm] < LEVEL else "no"] if arm in adjusted else ["", ""]
        rows.append([arm, str(len(found[arm])), points(Interval.of(found[arm])), *tail])
    return [f"{PRIMARY[0]} less", "seeds", "over tokens", "p", f"below {LEVEL}"], rows


def by_kind(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """Accuracy by kind of problem before training and after, in percent; mean over seeds."""
    first = [outcome.records[0]["bands"] for runs in arms.values() for outcome in runs.values()]
    last = {arm: [outcome.records[-1]["bands"] for outcome in runs.values()] for arm, runs in arms.items()}
    rows = []
    for index, kind in enumerate(SmolDials.bands):
        means = [fmean(row[index] for row in some) for some in (first, *last.values())]
        rows.append([kind, *(f"{100 * mean:.0f}" for mean in means)])
    return ["kind", "before", *arms], rows


def weights(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """The learned weight of each pass rate at some evaluations, mean over seeds; arms without weights are left out."""
    rows, size = [], 0
    for arm, runs in arms.items():
        records = [[r for r in outcome.records if r.get("weights")] for outcome in runs.values()]
        for index in range(1, len(records[0]), 2):
            found = [run[index]["weights"] for run in records]
            size = len(found[0]) - 1
            means = [f"{fmean(row[k] for row in found):.2f}" for k in range(1, size)]
            rows.append([arm, str(records[0][index]["step"]), *means])
    return ["weights of", "step", *(f"{k}/{size}" for k in range(1, size))], rows


def shares(arms: Mapping[str, Runs]) -> tuple[list[str], list[list[str]]]:
    """For each arm, early and late: the share of each pass rate in the groups sampled and in the loss, in percent."""
    rows, size = [], 0
    for arm, runs in arms.items():
        for last in (False, True):
            steps = [step for run in runs.values() for step in quarter(run, last=last)]
            size = len(steps[0].groups) - 1
            found = (by_pass_rate.group_shares(steps), by_pass_rate.loss_shares(arm, steps))
            names = (f"{arm}, {'last' if last else 'first'} quarter", "")
            for name, what, row in zip(names, ("groups", "loss"), found, strict=True):
                rows.append([name, what, *(f"{100 * share:.1f}" for share in row)])
    return ["", "share of", *(f"{k}/{size}" for k in range(size + 1))], rows


def diversity(arms: Mapping[str, Runs]) -> tuple[list[str], list[list[str]]]:
    """For each arm: entropy early and late, and pass@k of the problems sampled in the last quarter, in percent."""

    def entropy(runs: Runs, last: bool) -> str:
        found = Interval.of([fmean(step.entropy for step in quarter(run, last=last)) for run in runs.values()])
        return f"{found.mean:.2f} ± {found.high - found.mean:.2f}"

    def chances(runs: Runs, k: int) -> dict[int, float]:
        return {seed: by_pass_rate.pass_at(quarter(run, last=True), k) for seed, run in runs.items()}

    ks = by_pass_rate.powers(arms)
    rows, rival = [], chances(arms[PRIMARY[1]], ks[-1])
    for arm, runs in arms.items():
        row = [arm, entropy(runs, False), entropy(runs, True)]
        own = {k: chances(runs, k) for k in ks}
        row += [percent(Interval.of(list(by_seed.values()))) for by_seed in own.values()]
        rows.append([*row, points(paired(own[ks[-1]], rival)) if arm != PRIMARY[1] else ""])
    header = ["arm", "entropy, first quarter", "last", *(f"pass@{k}" for k in ks)]
    return [*header, f"pass@{ks[-1]}, less {PRIMARY[1]}"], rows


def lengths(arms: Mapping[str, Runs]) -> tuple[list[str], list[list[str]]]:
    """For each arm, over whole runs: mean tokens of right and of wrong answers at each pass rate."""
    rows, size = [], 0
    for arm, runs in arms.items():
        steps = [step for run in runs.values() for step in run]
        size = len(steps[0].groups) - 1
        for name, verdict in ((arm, "right"), ("", "wrong")):
            means = [by_pass_rate.mean_length(steps, k, verdict) for k in range(1, size)]
            rows.append([name, verdict, *(f"{mean:.2f}" for mean in means)])
    return ["arm", "answers", *(f"{k}/{size}" for k in range(1, size))], rows


def report(outcomes: Sequence[Outcome], arms: Compared, training: Mapping[str, Runs]) -> str:
    """All tables, as they stand in the docs.

    Args:
        outcomes: of the whole lab. arms, training: the compared runs, and their steps.
    """
    parts = [
        f"Held-out accuracy in percent and differences to `{PRIMARY[1]}` in points: mean and 95 % interval over seeds.",
        aligned(*over_tokens(arms, PRIMARY[1])),
        f"Secondary: `{PRIMARY[0]}` less the others over the same tokens; p by Benjamini-Hochberg over these.",
        aligned(*secondary(arms)),
        "The search for the learning rate: final accuracy of one run on seed 1000, in percent.",
        aligned(*rates(outcomes)),
        "Accuracy by kind of problem, in percent, mean over seeds.",
        aligned(*by_kind(arms)),
        "Learned weights, mean over seeds.",
        aligned(*weights(arms)),
        "Share of each pass rate in the groups sampled and in the loss, in percent. The loss is counted without its "
        "sign, since that changes from step\nto step. Every measured L_k is what the lengths of right and wrong "
        f"answers predict, within {by_pass_rate.largest_error(training):.0e}.",
        aligned(*shares(training)),
        "Entropy of the sampled tokens in nats; pass@k in percent of the problems sampled in the last quarter of the "
        "steps, each seen for the first\ntime; mean and 95 % interval over seeds.",
        aligned(*diversity(training)),
        "Mean tokens of an answer, whole runs.",
        aligned(*lengths(training)),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the tables of a folder of results, or put them into a page of the docs."""
    folder, *options = arguments
    tables, outcomes, _ = compared_worlds(Path(folder))
    text = report(outcomes, tables[WORLD], by_pass_rate.read(Path(folder))[WORLD])
    return show(text, MARKS, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
