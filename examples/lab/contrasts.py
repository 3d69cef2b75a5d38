"""The primary contrasts of the lab, as the table of docs/lab.md.

    python examples/lab/contrasts.py examples/lab/results                       # the table
    python examples/lab/contrasts.py examples/lab/results --into docs/lab.md    # into the page

Place in the data flow: RESULTS and its folders for fresh seeds, sign and smollm2 -> `results` -> a row for each
contrast. Refuses folders without results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import smollm2
from findings import aligned, compared_worlds, points, show
from results import Interval, differences

MARKS = (
    "<!-- contrasts: python examples/lab/contrasts.py examples/lab/results --into docs/lab.md -->",
    "<!-- end of contrasts -->",
)


@dataclass(frozen=True, slots=True)
class Contrast:
    """One arm less another in a world. folder: of the results. measure: as in `results.differences`.
    registered: whether contrast, measure and seeds were written down before the first run."""

    folder: str
    world: str
    arm: str
    rival: str
    measure: str
    registered: bool = False


PRIMARY = (
    Contrast("smollm2", "smollm2", *smollm2.PRIMARY, "tokens", registered=True),
    *(
        Contrast("sign", world, arm, "dapo", "tokens", registered=True)
        for world in ("skewed", "u_shape")
        for arm in ("daro_taught_sign", "daro_taught", "daro_sign")
    ),
    Contrast(".", "skewed", "daro", "grpo", "final"),
    Contrast(".", "skewed", "daro_shared", "daro", "final"),
    Contrast(".", "chains", "daro_shared", "daro", "final"),
    Contrast("fresh_seeds", "skewed", "daro_shared_half_life", "dapo", "tokens"),
    Contrast("fresh_seeds", "chains", "daro_shared_half_life", "dapo", "tokens"),
    Contrast("fresh_seeds", "skewed", "ha_dw", "dapo", "final"),
)
"""The contrasts that were written down before their runs, then those that comparison.md concludes from."""


def table(folder: Path) -> str:
    """Return a table with the estimate of each primary contrast, in points."""
    worlds = {name: compared_worlds(folder / name)[0] for name in dict.fromkeys(c.folder for c in PRIMARY)}
    rows = []
    for contrast in PRIMARY:
        arms = worlds[contrast.folder][contrast.world]
        by_seed = differences(arms[contrast.arm], arms[contrast.rival], contrast.measure)
        estimate, _, interval = points(Interval.of(by_seed)).partition(" ")
        row = [contrast.world, f"{contrast.arm} - {contrast.rival}", contrast.measure, estimate, interval.strip("()")]
        rows.append([*row, str(len(by_seed)), "yes" if contrast.registered else "no"])
    header = ["world", "contrast", "accuracy", "points", "95 % interval", "seeds", "pre-registered"]
    return f"{aligned(header, rows)}\n"


def main(arguments: Sequence[str]) -> int:
    """Print the table of the lab's results, or put it into a page."""
    folder, *options = arguments
    return show(table(Path(folder)), MARKS, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
