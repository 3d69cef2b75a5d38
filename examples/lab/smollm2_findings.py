"""What the results on a real language model say, as the tables of smollm2.md.

    python examples/lab/smollm2_findings.py examples/lab/results/smollm2                                # the tables
    python examples/lab/smollm2_findings.py examples/lab/results/smollm2 --into examples/lab/smollm2.md # into the page

Place in the data flow: RESULTS/*.parquet -> `findings` -> tables. Refuses folders without results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from findings import aligned, compared_worlds, over_tokens, points, show
from results import LEVEL, Interval, Outcome, benjamini_hochberg, differences, p_value
from smollm2 import PRIMARY, SmolDials

MARKS = ("<!-- smollm2 findings -->", "<!-- end of smollm2 findings -->")
WORLD = SmolDials.kind
Compared = Mapping[str, Mapping[int, Outcome]]


def rates(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return the search: final accuracy of each arm at each learning rate, one seed, in percent."""
    tuned = [outcome for outcome in outcomes if outcome.job.purpose == "tune"]
    columns = sorted({outcome.job.learning_rate for outcome in tuned})
    found = {(o.job.arm, o.job.learning_rate): "diverged" if o.ended else f"{100 * o.final:.1f}" for o in tuned}
    arms = dict.fromkeys(outcome.job.arm for outcome in tuned)
    rows = [[arm, *(found.get((arm, rate), "") for rate in columns)] for arm in arms]
    return ["arm", *(f"{rate:g}" for rate in columns)], rows


def secondary(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """Return the first arm of the primary contrast less every arm but the second, over the same tokens, with p values
    by Benjamini-Hochberg; an arm with a run that diverged, or with one seed, has no p value and is not counted."""
    others = [arm for arm in arms if arm not in PRIMARY]
    found = {arm: differences(arms[PRIMARY[0]], arms[arm], "tokens") for arm in others}
    tested = [arm for arm in others if len(found[arm]) > 1 and all(map(math.isfinite, found[arm]))]
    adjusted = dict(zip(tested, benjamini_hochberg([p_value(found[arm]) for arm in tested]), strict=True))
    rows = []
    for arm in others:
        tail = [f"{adjusted[arm]:.3f}", "yes" if adjusted[arm] < LEVEL else "no"] if arm in adjusted else ["", ""]
        rows.append([arm, str(len(found[arm])), points(Interval.of(found[arm])), *tail])
    return [f"{PRIMARY[0]} less", "seeds", "over tokens", "p", f"below {LEVEL}"], rows


def by_kind(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """Return the accuracy by kind of problem before training and after, in percent; mean over seeds."""
    first = [outcome.records[0]["bands"] for runs in arms.values() for outcome in runs.values()]
    last = {arm: [outcome.records[-1]["bands"] for outcome in runs.values()] for arm, runs in arms.items()}
    rows = []
    for index, kind in enumerate(SmolDials.bands):
        means = [fmean(row[index] for row in some) for some in (first, *last.values())]
        rows.append([kind, *(f"{100 * mean:.0f}" for mean in means)])
    return ["kind", "before", *arms], rows


def weights(arms: Compared) -> tuple[list[str], list[list[str]]]:
    """Return the learned weight of each pass rate at every other evaluation, mean over seeds, of arms with weights."""
    rows, size = [], 0
    for arm, runs in arms.items():
        records = [[r for r in outcome.records if r.get("weights")] for outcome in runs.values()]
        for index in range(1, len(records[0]), 2):
            found = [run[index]["weights"] for run in records]
            size = len(found[0]) - 1
            means = [f"{fmean(row[k] for row in found):.2f}" for k in range(1, size)]
            rows.append([arm, str(records[0][index]["step"]), *means])
    return ["weights of", "step", *(f"{k}/{size}" for k in range(1, size))], rows


def report(outcomes: Sequence[Outcome], arms: Compared) -> str:
    """Return all tables, as they are in the page.

    Args:
        outcomes: of the whole lab. arms: the compared runs.
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
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the tables of a folder of results, or put them into a page."""
    folder, *options = arguments
    tables, outcomes, _ = compared_worlds(Path(folder))
    return show(report(outcomes, tables[WORLD]), MARKS, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
