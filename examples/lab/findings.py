"""What the results say, as rows of text: the same tables for lab.html and for comparison.md.

    page=examples/lab/comparison.md
    python examples/lab/findings.py examples/lab/results                                # the tables as Markdown
    python examples/lab/findings.py examples/lab/results --into $page                   # put some of them into the page
    python examples/lab/findings.py examples/lab/results/fresh_seeds --against $page    # those against DAPO

Place in the data flow: outcomes -> rows. An arm that diverged is a row like any other, and says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import results
from arms import BASELINE, LADDER, is_control, is_daro
from results import Interval, Outcome
from smollm2 import PRIMARY
from worlds import LADDER_WORLD, WORLDS

Runs = Mapping[int, Outcome]

HEADER = ["arm", "note", "rate", "final accuracy", "less grpo", "steps", "answers", "pass@k", "hardest", "at clamp"]
VERDICT_HEADER = [
    "world",
    "best DARO",
    "DARO's steps",
    "grpo, other rate",
    "best rival",
    "DARO less rival",
    "goal",
]
SPEED = 0.7
"""The goal: at most this share of the baseline's steps."""
MARKS = (
    "<!-- findings: python examples/lab/findings.py examples/lab/results --into examples/lab/comparison.md -->",
    "<!-- end of findings -->",
)
AGAINST_MARKS = (
    "<!-- against dapo: python examples/lab/findings.py examples/lab/results/fresh_seeds "
    "--against examples/lab/comparison.md -->",
    "<!-- end of against dapo -->",
)
COMPARED = ["dapo", "daro", "daro_shared", "daro_shared_half_life", "ha_dw", "ppo", "grpo@0.08"]
"""The arms whose speed comparison.md shows."""


def table(arms: Mapping[str, Runs], searched: Sequence[float]) -> list[list[str]]:
    """Return one row for each arm of a world, the highest final accuracy first.

    Args:
        arms: arm -> seed -> outcome. searched: the learning rates of the search, in order.
    """
    baseline = arms[BASELINE]
    rows = []
    for arm, runs in arms.items():
        final, less = results.final_accuracy(runs), results.difference(runs, baseline)
        own = next(iter(runs.values())).job.learning_rate
        end = "<" if own in searched[:1] else ">" if own in searched[-1:] else ""
        last = [o.records[-1] for o in runs.values() if not o.ended]
        row = [arm, status(runs), f"{end}{own:g}", percent(final), points(less) if arm != BASELINE else ""]
        row += [spread(results.ratios_to_baseline(runs, baseline, axis)) for axis in ("step", "answers")]
        row += [_mean([r["pass_at"][-1] for r in last if r["pass_at"]]), _mean([r["bands"][0] for r in last])]
        row.append(f"{sum(r['clamped'] for r in last) / len(last):.1f}" if last and last[0].get("weights") else "")
        rows.append((final.mean if math.isfinite(final.mean) else -1.0, row))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def matrix(
    tables: Mapping[str, Mapping[str, Runs]],
    rival: str = BASELINE,
    difference: Callable[[Runs, Runs], Interval] = results.difference,
) -> tuple[list[str], list[list[str]]]:
    """Return, arm by world, final accuracy less the rival's in points, with a * where the interval excludes 0; without
    the world of the ladder, whose arms are in no other.

    Args:
        tables: world -> arm -> runs. rival: the arm to compare with. difference: another measure than final accuracy.

    Returns:
        (header, rows): arms that ran in every world come first, in order of their mean difference, the highest first.
    """
    tables = {world: table for world, table in tables.items() if world != LADDER_WORLD}
    arms = dict.fromkeys(arm for table in tables.values() for arm in table if not is_control(arm) and arm != rival)
    rows = []
    for arm in arms:
        found = [difference(t[arm], t[rival]) if arm in t else None for t in tables.values()]
        known = [f.mean for f in found if f and math.isfinite(f.mean)]
        order = (None in found, -sum(known) / len(known) if known else 1.0)
        rows.append((order, [arm, *(_cell(f) for f in found)]))
    return ["arm", *tables], [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if not math.isfinite(interval.mean):
        return "diverged"
    return f"{100 * interval.mean:+.1f}{'*' if interval.low > 0 or interval.high < 0 else ''}"


def searched_rates(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Return world -> the learning rates that were tried, in order."""
    found: dict[str, set[float]] = {}
    for outcome in outcomes:
        rates = found.setdefault(outcome.job.world, set())
        rates |= {outcome.job.learning_rate} if outcome.job.purpose == "tune" else set()
    return {world: sorted(rates) for world, rates in found.items()}


def verdict(world: str, arms: Mapping[str, Runs]) -> list[str]:
    """Return a row on the goal in one world: a DARO in at most 0.7 of GRPO's steps, not worse than the best rival."""
    means = {arm: results.final_accuracy(runs).mean for arm, runs in arms.items()}
    known = {arm: mean for arm, mean in means.items() if math.isfinite(mean) and not is_control(arm)}
    mine, others = ([a for a in known if is_daro(a) == own] for own in (True, False))
    if not mine or not others:
        return [world, *["-"] * (len(VERDICT_HEADER) - 1)]
    best, rival = max(mine, key=known.__getitem__), max(others, key=known.__getitem__)
    ratios, gap = _fastest(arms, mine), results.difference(arms[best], arms[rival])
    fast, level = _middle(ratios[1]) <= SPEED, not gap.high < 0
    said = {(True, True): "reached", (True, False): "fast, but worse than the rival", (False, True): "not fast enough"}
    words = said.get((fast, level), "missed")
    if world in WORLDS and not WORLDS[world].goal:
        words = f"none stated ({words})"
    speeds = [_named(*ratios), _named(*_fastest(arms, [a for a in arms if is_control(a)]))]
    return [world, best, *speeds, rival, points(gap), words]


def _fastest(arms: Mapping[str, Runs], names: Sequence[str]) -> tuple[str, list[float]]:
    """Return the arm that needs the smallest part of the baseline's steps, with its ratios."""
    found = {arm: results.ratios_to_baseline(arms[arm], arms[BASELINE]) for arm in names}
    return min(found.items(), key=lambda pair: _middle(pair[1]), default=("", []))


def _named(arm: str, ratios: list[float]) -> str:
    return f"{spread(ratios)} ({arm})" if math.isfinite(_middle(ratios)) else "-"


def status(runs: Runs) -> str:
    """Return how many of the seeds went wrong and how; empty if none did."""
    found = [o.status for o in runs.values() if o.status]
    return f"{len(found)} of {len(runs)} {found[0]}" if found else ""


def percent(interval: Interval) -> str:
    """Return mean and half-width in percent."""
    if not math.isfinite(interval.mean):
        return "diverged"
    reach = f" ± {100 * (interval.high - interval.mean):.1f}" if math.isfinite(interval.high) else ""
    return f"{100 * interval.mean:.1f}{reach}"


def points(interval: Interval) -> str:
    """Return a difference in percentage points with its interval."""
    if not math.isfinite(interval.mean):
        return "-"
    ends = f" ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})" if math.isfinite(interval.high) else ""
    return f"{100 * interval.mean:+.1f}{ends}"


def spread(ratios: list[float]) -> str:
    """Return median [smallest, largest] of some ratios; - where fewer than half of the seeds reach the mark."""
    middle = _middle(ratios)
    if not math.isfinite(middle):
        return "-"
    largest = f"{max(ratios):.2f}" if math.isfinite(max(ratios)) else "never"
    return f"{middle:.2f} [{min(ratios):.2f}, {largest}]"


def over_tokens(arms: Mapping[str, Runs], rival: str) -> tuple[list[str], list[list[str]]]:
    """Return each arm against one rival: accuracy averaged over the same generated tokens, and final accuracy, in
    points; tokens are in thousands, mean over seeds."""
    rows = []
    for arm, runs in arms.items():
        tokens = [outcome.records[-1]["tokens"] for outcome in runs.values()]
        row = [arm, str(len(runs)), f"{fmean(tokens) / 1e3:.1f}", percent(results.final_accuracy(runs))]
        if arm != rival:
            less = (results.difference_over_tokens, results.difference)
            row += [points(difference(runs, arms[rival])) for difference in less]
        rows.append([*row, *[""] * (6 - len(row))])
    differences = [f"over tokens, less {rival}", f"final, less {rival}"]
    return ["arm", "seeds", "thousand tokens", "final accuracy", *differences], rows


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def is_by_tokens(world: str) -> bool:
    """Return whether arms are compared for the same tokens generated there."""
    return world in WORLDS and WORLDS[world].kind == "smollm2"


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """Return a table as a block of text: a matrix of numbers is easier to read in aligned columns."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["```", *padded, "```"])


def speeds(tables: Mapping[str, Mapping[str, Runs]]) -> tuple[list[str], list[list[str]]]:
    """Return the steps to the baseline's final accuracy as a multiple of the baseline's, for the arms of `COMPARED`."""
    rows = [
        [world, *(spread(results.ratios_to_baseline(t[arm], t[BASELINE])) if arm in t else "" for arm in COMPARED)]
        for world, t in tables.items()
        if world != LADDER_WORLD
    ]
    return ["world", *COMPARED], rows


def ladder(rungs: Mapping[str, Runs]) -> tuple[list[str], list[list[str]]]:
    """Return DAPO's ladder, rung by rung: final accuracy in percent, and what each rung adds, in points."""
    rows, before = [], None
    for arm in LADDER:
        if arm in rungs:
            added = "" if before is None else points(results.difference(rungs[arm], before))
            answers = {outcome.records[-1]["answers"] for outcome in rungs[arm].values()}
            rows.append([arm, percent(results.final_accuracy(rungs[arm])), added, str(round(fmean(answers)))])
            before = rungs[arm]
    return ["rung", "final accuracy", "less the rung before", "answers"], rows


def comparison(tables: Mapping[str, Mapping[str, Runs]]) -> str:
    """Return what is between `MARKS` of comparison.md: each arm less the baseline."""
    rungs = tables.get(LADDER_WORLD, {})
    of_ladder = f"\nDAPO's ladder in `{LADDER_WORLD}`; answers are those sampled.\n\n{aligned(*ladder(rungs))}\n"
    return (
        "Final held-out accuracy less GRPO's, in points; `*`: the 95 % interval excludes 0.\n\n"
        f"{aligned(*matrix(tables))}\n\n"
        "Steps to GRPO's final accuracy as a multiple of GRPO's: median [smallest, largest] of the seeds; never: not "
        "within the run; -: fewer than half of the seeds.\n\n"
        f"{aligned(*speeds(tables))}\n{of_ladder if rungs else ''}"
    )


def against(tables: Mapping[str, Mapping[str, Runs]], rival: str = PRIMARY[1]) -> str:
    """Return what is between `AGAINST_MARKS` of comparison.md: each arm less one rival."""
    seeds = {len(runs) for table in tables.values() for runs in table.values()}
    of_seeds = f"{min(seeds)} seeds" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    counted = {world: table for world, table in tables.items() if _has_tokens(table)}
    return (
        f"Final held-out accuracy less `{rival}`'s, in points, on {of_seeds}; `*`: the 95 % interval excludes 0.\n\n"
        f"{aligned(*matrix(tables, rival))}\n\n"
        "The same, averaged over the tokens generated, up to where the first of the two ends.\n\n"
        f"{aligned(*matrix(counted, rival, results.difference_over_tokens))}\n{faster(counted, rival)}"
    )


FASTER = ("daro_shared_free", "daro_shared_half_life")
"""Arms that run at the rival's own rate and are compared with the rival at higher rates."""


def faster(tables: Mapping[str, Mapping[str, Runs]], rival: str) -> str:
    """Return a table of the rival at its two next higher rates, less the rival at its own, and of `FASTER` less the
    rival at these rates, in the worlds in which all have the most common rate. Empty if the rival ran at no higher
    rate."""
    rates = {world: _rate(table[rival]) for world, table in tables.items() if rival in table}
    own = max(rates.values(), key=list(rates.values()).count, default=0.0)
    worlds = {
        world: tables[world]
        for world, rate in rates.items()
        if rate == own and all(arm in tables[world] and _rate(tables[world][arm]) == own for arm in FASTER)
    }
    controls = {arm for table in worlds.values() for arm in table if arm.startswith(f"{rival}@")}
    controls = {arm for arm in controls if all(arm in t and _rate(t[arm]) > own for t in worlds.values())}
    pairs = [(c, other) for c in sorted(controls)[:2] for other in (rival, *FASTER)]
    named = [(c, rival) if other == rival else (other, c) for c, other in pairs]
    measures = {"over tokens": results.difference_over_tokens, "at the end": results.difference}
    rows = [
        [f"{one} less {other}", name, *(_cell(measure(table[one], table[other])) for table in worlds.values())]
        for one, other in named
        for name, measure in measures.items()
    ]
    if not rows:
        return ""
    title = f"`{rival}` at rates a little above its own {own:g}, and DARO less these, where all three took {own:g}."
    return f"\n{title}\n\n{aligned(['', '', *worlds], rows)}\n"


def _rate(runs: Runs) -> float:
    return next(iter(runs.values())).job.learning_rate


def _has_tokens(table: Mapping[str, Runs]) -> bool:
    return all("tokens" in outcome.records[-1] for runs in table.values() for outcome in runs.values())


def compared_worlds(folder: Path) -> tuple[dict[str, dict[str, Runs]], list[Outcome], dict[str, str]]:
    """Return world -> arm -> runs of a folder of results, with all outcomes and the note."""
    outcomes, note = results.read(folder)
    worlds = dict.fromkeys(o.job.world for o in outcomes)
    tables = {world: dict[str, Runs](results.compared(outcomes, world)) for world in worlds}
    return tables, outcomes, note


def put_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Put a text between two lines of a page, in place of what is there."""
    before, _, rest = page.read_text().partition(marks[0])
    page.write_text(f"{before}{marks[0]}\n{text}{marks[1]}{rest.partition(marks[1])[2]}")


def show(text: str, marks: tuple[str, str], options: Sequence[str]) -> int:
    """Print a text, or with the options --into PAGE put it between two lines of that page. Return the exit code."""
    if options[:1] == ["--into"]:
        put_between(Path(options[1]), marks, text)
    else:
        print(text)
    return 0


def main(arguments: list[str]) -> int:
    """Print the tables of a folder of results, or put those of a page into it."""
    folder, *options = arguments
    tables, outcomes, note = compared_worlds(Path(folder))
    blocks = {"--into": (MARKS, comparison), "--against": (AGAINST_MARKS, against)}
    if options and options[0] in blocks:
        marks, made = blocks[options[0]]
        put_between(Path(options[1]), marks, made(tables))
        return 0
    rates = searched_rates(outcomes)
    print(f"`{note.get('command', '')}`\n")
    print(markdown(VERDICT_HEADER, [verdict(world, arms) for world, arms in tables.items()]))
    print(f"\n{markdown(*matrix(tables))}")
    for world, arms in tables.items():
        print(f"\n{world}\n\n{markdown(HEADER, table(arms, rates[world]))}")
        if PRIMARY[1] in arms and is_by_tokens(world):
            print(f"\n{markdown(*over_tokens(arms, PRIMARY[1]))}")
    return 0


def _middle(ratios: list[float]) -> float:
    known = [r for r in ratios if not math.isnan(r)]
    return median(known) if known else math.inf


def _mean(values: list[float]) -> str:
    mean = sum(values) / len(values) if values else math.nan
    return f"{100 * mean:.1f}" if math.isfinite(mean) else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
