"""Count what check-loss finds among the losses of tests/parallel/loss_cases.py, and write their table.

    python benchmarks/check_loss_counts.py --run [tuned|held-out|right|NAME ...]   runs them, half a minute each
    python benchmarks/check_loss_counts.py --docs benchmarks/results/check_loss_counts.md   writes the table

What was found of each is kept in check_loss_counts.jsonl beside this file; `first` is the cause that was named before
the tool was changed for any of those that were held out. A loss is explained if the pattern that
stands beside it in loss_cases, written before the tool was changed for it, is found in the cause.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "tests" / "parallel"))

from loss_cases import RIGHT, WRONG, Right, Wrong  # noqa: E402

KEPT = HERE.with_suffix(".jsonl")
START, END = (
    "<!-- counts: python benchmarks/check_loss_counts.py --docs benchmarks/results/check_loss_counts.md -->",
    "<!-- end of counts -->",
)


def key_of(loss: Wrong | Right) -> str:
    """Name a loss; a right one is told from the same one with whole samples."""
    return loss.name if isinstance(loss, Wrong) else f"right {loss.name}{' whole' if loss.whole else ''}"


def kept() -> dict[str, dict[str, Any]]:
    """Return what was found of each loss."""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.is_file() else []
    return {record["loss"]: record for record in map(json.loads, lines)}


def chosen(words: Iterable[str]) -> list[Wrong | Right]:
    """Return the losses that the words name; all of them without a word."""
    every: list[Wrong | Right] = [*WRONG, *RIGHT]
    parts = {
        "tuned": [w for w in WRONG if not w.held_out],
        "held-out": [w for w in WRONG if w.held_out],
        "right": list(RIGHT),
    }
    named = [loss for word in words for loss in parts.get(word, [one for one in every if key_of(one) == word])]
    return list(named) or every


def run(losses: Iterable[Wrong | Right]) -> None:
    """Check losses and keep what was found of each."""
    from megatron_daro.workshop.check_loss import pool as pools
    from megatron_daro.workshop.check_loss.search import check

    pools.ANSWER_S = 40  # ranks that wait for ever; a case takes less than a second
    with pools.CasePool() as pool:
        for loss in losses:
            uses = (loss.uses,) if isinstance(loss, Wrong) else loss.uses
            function = f"{loss.module}:{loss.name}"
            options = {"flags": loss.flags, "uses": uses, "whole": loss.whole, "to_the_end": isinstance(loss, Right)}
            report = check(function, pool=pool, seconds=0, **options)
            record = {"loss": key_of(loss), "cause": report.cause, "cases": len(report.rows)}
            print(f"{key_of(loss):26} {report.seconds:4.0f} s  {report.cause[:160]}", flush=True)
            if report.error and not report.cause.startswith("ranks wait"):
                print(report.error[-800:])
            before = kept()
            if "first" in before.get(key_of(loss), {}):
                record["first"] = before[key_of(loss)]["first"]
            found = before | {key_of(loss): record}
            order = [key_of(one) for one in [*WRONG, *RIGHT]]
            lines = [json.dumps(found[name]) + "\n" for name in order if name in found]
            KEPT.write_text("".join(lines), encoding="utf-8")


def verdict(loss: Wrong, record: Mapping[str, Any], which: str = "cause") -> str:
    """Return what became of a wrong loss."""
    if not record[which]:
        return "not found"
    return "explained" if loss.words and re.search(loss.words, record[which]) else "found, other cause"


def table() -> str:
    """Return the table of the page.

    Raises:
        SystemExit: a loss was not run.
    """
    found = kept()
    missing = [key_of(loss) for loss in [*WRONG, *RIGHT] if key_of(loss) not in found]
    if missing:
        raise SystemExit(f"{KEPT.name}: not run yet: {', '.join(missing)}; run them with --run")
    lines = ["| wrong losses | planted | found | explained rightly |", "|---|---|---|---|"]
    held_out = [w for w in WRONG if w.held_out]
    halves = [
        ("held out, first run", held_out, "first"),
        ("held out, after it", held_out, "cause"),
        ("tuned on", [w for w in WRONG if not w.held_out], "cause"),
        ("all", list(WRONG), "cause"),
    ]
    for name, losses, which in halves:
        verdicts = [verdict(loss, found[loss.name], which) for loss in losses]
        flagged, explained = len(losses) - verdicts.count("not found"), verdicts.count("explained")
        shares = [f"{count} ({100 * count / len(losses):.0f} %)" for count in (flagged, explained)]
        lines.append(f"| {name} | {len(losses)} | {' | '.join(shares)} |")
    alarms = sum(bool(found[key_of(right)]["cause"]) for right in RIGHT)
    frameworks = sorted({right.framework for right in RIGHT} - {"by hand"}, key=str.lower)
    lines += ["", f"{len(RIGHT)} right losses ({', '.join(frameworks)}; some by hand): {alarms} false alarms.", ""]
    public = sum("#" in loss.source for loss in WRONG)
    lines += [f"{public} shipped in public repositories, {len(WRONG) - public} were planted by hand."]
    for wanted in ("not found", "found, other cause"):
        names = [_name(loss) for loss in WRONG if verdict(loss, found[loss.name]) == wanted]
        lines += [f"{wanted.capitalize()}: {', '.join(names) or 'none'}."]
    return "\n".join(lines)


def _name(loss: Wrong) -> str:
    return loss.source if "#" in loss.source else loss.name.replace("_", " ")


def page(text: str) -> str:
    """Return a page with the table of now."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Run losses, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", metavar="NAME")
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    if given.run is not None:
        run(chosen(given.run))
    if given.docs:
        given.docs.write_text(page(given.docs.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
