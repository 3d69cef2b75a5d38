"""What the comparison of sign_weights.md says: paired differences, their intervals, and p values corrected as written.

    python examples/lab/sign_findings.py examples/lab/results/sign                                      # the tables
    python examples/lab/sign_findings.py examples/lab/results/sign --into examples/lab/sign_weights.md  # into the page

Place in the data flow: results of the lab -> text. Refuses results without the arms of the comparison.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from findings import Runs, aligned, compared_worlds, percent, points, show
from results import LEVEL, Interval, benjamini_hochberg, differences, final_accuracy, holm, p_value

from megatron_daro.errors import DataError

NEW = ("daro_taught_sign", "daro_taught", "daro_sign", "daro_taught_unfiltered")
RIVALS = ("dapo", "ha_dw", "grpo", "daro_shared_half_life")
PRIMARY = (("daro_taught_sign", "dapo"), ("daro_taught", "dapo"), ("daro_sign", "dapo"))
AFTERWARDS = (("daro_taught", "dapo@0.08"), ("daro_taught_unfiltered", "grpo@0.04"), ("daro_shared_half_life", "dapo"))
"""Contrasts that were made when the results had been seen: at equal rates, and what DARO without the sign does."""
MEASURES = ("tokens", "answers", "final")
MARKS = ("<!-- sign findings -->", "<!-- end of sign findings -->")


def report(tables: Mapping[str, Mapping[str, Runs]]) -> str:
    """The primary contrasts with Holm's p values, the others with a star by Benjamini-Hochberg, and the arms."""
    primary = [(world, arm, rival) for world in tables for arm, rival in PRIMARY]
    values = [differences(tables[w][arm], tables[w][rival], "tokens") for w, arm, rival in primary]
    rows = [
        [world, f"{arm} - {rival}", points(Interval.of(found)), f"{p:.3g}", "yes" if _beats(found, p) else "no"]
        for (world, arm, rival), found, p in zip(primary, values, holm([p_value(v) for v in values]), strict=True)
    ]
    first = aligned(["world", "contrast", "over tokens", "p (Holm)", "beats DAPO"], rows)
    cells = [(w, arm, rival, m) for w in tables for arm in NEW for rival in RIVALS for m in MEASURES]
    cells = [(w, arm, rival, m) for w, arm, rival, m in cells if m != "tokens" or (w, arm, rival) not in primary]
    found = {cell: differences(tables[cell[0]][cell[1]], tables[cell[0]][cell[2]], cell[3]) for cell in cells}
    adjusted = dict(zip(cells, benjamini_hochberg([p_value(found[cell]) for cell in cells]), strict=True))

    def entry(cell: tuple[str, str, str, str]) -> str:
        if cell not in found:
            return "above"
        return points(Interval.of(found[cell])) + ("*" if adjusted[cell] < LEVEL else "")

    second = [
        [w, arm, rival, *(entry((w, arm, rival, m)) for m in MEASURES)]
        for w in tables
        for arm in NEW
        for rival in RIVALS
    ]
    header = ["world", "arm", "less", "over tokens", "over answers", "final"]
    after = [
        [w, arm, rival, *(points(Interval.of(differences(t[arm], t[rival], m))) for m in MEASURES)]
        for w, t in tables.items()
        for arm, rival in AFTERWARDS
        if arm in t and rival in t
    ]
    stars = sum(p < LEVEL for p in adjusted.values())
    return (
        f"Primary: accuracy averaged over the same tokens, in points with 95 % intervals.\n\n{first}\n\n"
        f"Secondary; `*`: p < 0.05 by Benjamini-Hochberg over these {len(cells)} ({stars} are).\n\n"
        f"{aligned(header, second)}\n\n"
        f"Made after these had been seen.\n\n{aligned(header, after)}\n\n{_arms(tables)}\n\n"
        "Weights of wrong and of right answers, geometric mean over seeds, by step; with bands at pass rates of 1/4, "
        f"1/2 and 3/4.\n\n{aligned(*_weights(tables))}\n"
    )


def _weights(tables: Mapping[str, Mapping[str, Runs]]) -> tuple[list[str], list[list[str]]]:
    """What the taught arms learnt, at the evaluations whose weights are kept."""
    rows, steps = [], []
    for world, table in tables.items():
        for arm in ("daro_taught_sign", "daro_taught"):
            kept = {
                r["step"]: r["sign_weights"] for r in next(iter(table[arm].values())).records if "sign_weights" in r
            }
            steps = [step for step in kept if step]
            cells = len(kept[steps[0]])
            middle = cells // 4 * 2
            bins = (middle,) if arm == "daro_taught_sign" else (middle // 2, middle, middle + middle // 2)
            for place in bins:
                chosen = place - place % 2
                name = "" if len(bins) == 1 else f"{(chosen // 2) / (cells // 2 - 1):g}"
                pairs = [[_mean_weight(table[arm], step, chosen + right) for right in (0, 1)] for step in steps]
                rows.append([world, arm, name, *(f"{wrong:.2f} {right:.2f}" for wrong, right in pairs)])
    return ["world", "arm", "pass rate", *map(str, steps)], rows


def _mean_weight(runs: Runs, step: int, cell: int) -> float:
    found = [r["sign_weights"][cell] for o in runs.values() for r in o.records if r["step"] == step]
    return math.exp(fmean(map(math.log, found)))


def _arms(tables: Mapping[str, Mapping[str, Runs]]) -> str:
    """Rate, final accuracy, tokens and answers of each arm."""
    rows = []
    for world, table in tables.items():
        for arm, runs in table.items():
            last = [outcome.records[-1] for outcome in runs.values()]
            sizes = [f"{fmean(r[axis] for r in last) / 1e3:.0f}" for axis in ("tokens", "answers")]
            rate = next(iter(runs.values())).job.learning_rate
            rows.append([world, arm, f"{rate:g}", str(len(runs)), percent(final_accuracy(runs)), *sizes])
    return aligned(["world", "arm", "rate", "seeds", "final accuracy", "thousand tokens", "thousand answers"], rows)


def _beats(values: Sequence[float], p: float) -> bool:
    return fmean(values) > 0 and p < LEVEL


def main(arguments: list[str]) -> int:
    """Print the tables of a folder of results, or put them into a page."""
    folder, *options = arguments
    tables, _, _ = compared_worlds(Path(folder))
    lacking = [f"{arm} in {world}" for world, table in tables.items() for arm in (*NEW, *RIVALS) if arm not in table]
    if lacking or not tables:
        raise DataError(
            f"{folder}: got results without {', '.join(lacking) or 'worlds'}; sign_weights.md has the command"
        )
    text = report(tables)
    return show(text, MARKS, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
