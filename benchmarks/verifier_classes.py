"""Which classes of answers each verifier judges rightly, and how often boxing an expression of the problem pays.

Classes: the pairs of tests/unit/reward/answer_classes.py, judged by `math` here, by math-verify as it comes, and by
DAPO's rule. Restating: every formula of a problem's statement is boxed as the answer; a problem counts when one of them
is called right. Data from a data folder (default `../shared/data`), which is not part of this repository.
Usage: python benchmarks/verifier_classes.py [--problems 500] [--no-restating]. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit" / "reward"))  # the classes of answers of the tests

import pyarrow.parquet as pq  # noqa: E402
from answer_classes import RIGHT, WRONG  # noqa: E402
from math_verify import parse, verify  # noqa: E402

from megatron_daro.reward.base import VerifierSpec  # noqa: E402
from megatron_daro.reward.extraction import last_answer_line  # noqa: E402
from megatron_daro.reward.pool import RewardPool  # noqa: E402

Triple = tuple[str, str, str]
"""(extracted answer, gold, statement)"""
Judge = Callable[[Sequence[Triple]], list[bool]]
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline|boxed|mbox)\s*\{([^{}]*)\}")


def pool_judge(spec: VerifierSpec, workers: int) -> Judge:
    """This package's verifier behind its pool."""

    def judge(triples: Sequence[Triple]) -> list[bool]:
        with RewardPool(spec, workers, timeout_s=20.0) as pool:
            return [v.correct for v in pool.score([(f"\\boxed{{{a}}}", gold, text) for a, gold, text in triples])]

    return judge


def math_verify_default(triples: Sequence[Triple]) -> list[bool]:
    """math-verify with its defaults; gold and answer both in a box."""
    return [bool(verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{a}}}"))) for a, gold, _ in triples]


def dapo_rule(triples: Sequence[Triple]) -> list[bool]:
    """DAPO's rule: the last `Answer:` line, normalised as Minerva's answers are, equals the gold as text.

    Source: arXiv 2503.14476, section 3.4 and its released reward; normalisation arXiv 2206.14858, appendix D.1.
    """
    return [normalised(last_answer_line(f"Answer: {a}") or "") == normalised(gold) for a, gold, _ in triples]


def normalised(text: str) -> str:
    """An answer as Minerva's rule writes it: right side of the last `=`, no wrappers, units, spaces, dollar signs."""
    text = WRAPPER.sub(r"\1", text.split("=")[-1])
    for part in ("\\left", "\\right", "\\!", "\\,", "\\ ", "\\%", "%", "\\$", "$", "^\\circ", "^{\\circ}", "~"):
        text = text.replace(part, "")
    for unit in (
        "square",
        "units",
        "dollars",
        "degrees",
        "cents",
        "inches",
        "feet",
        "cm",
        "points",
        "hours",
        "minutes",
    ):
        text = re.sub(rf"(?<![a-zA-Z\\]){unit}(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dt]?frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}", text.replace("\\dfrac", "\\frac").replace(" ", ""))
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text).strip().rstrip(".")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def formulas(statement: str) -> Iterator[str]:
    """The formulas of a statement, each once."""
    found = (next(g for g in m.groups() if g is not None).strip().rstrip(".,;") for m in FORMULA.finditer(statement))
    yield from dict.fromkeys(formula for formula in found if formula)


def problems(data: Path, num: int) -> dict[str, list[tuple[str, str]]]:
    """set -> (statement, gold), at most `num` each, drawn with a fixed seed."""
    math500 = [json.loads(line) for line in (data / "eval" / "math500.simplerl.jsonl").read_text().splitlines()]
    math_train = json.loads((data / "train" / "math_7k.deepscaler.json").read_text())
    dapo = pq.read_table(data / "train" / "dapo_math_17k.svs.parquet").to_pylist()
    sets = {
        "MATH-500": [(row["problem"], row["answer"]) for row in math500],
        "MATH train (deepscaler)": [(row["problem"], str(row["answer"])) for row in math_train if row.get("answer")],
        "DAPO-17k": [(row["prompt"][-1]["content"], str(row["reward_model"]["ground_truth"])) for row in dapo],
    }
    return {name: random.Random(0).sample(rows, min(num, len(rows))) for name, rows in sets.items()}


def restating(rows: Sequence[tuple[str, str]], judge: Judge) -> int:
    """Problems of which some formula of the statement is called right."""
    triples = [(i, (formula, gold, text)) for i, (text, gold) in enumerate(rows) for formula in formulas(text)]
    verdicts = judge([triple for _, triple in triples])
    return len({i for (i, _), correct in zip(triples, verdicts, strict=True) if correct})


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints each row as soon as it is there."""
    print(f"\n{title}\n")
    for row in chain((header, ["---"] * len(header)), rows):
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--problems", type=int, default=500, help="problems per set")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-restating", action="store_true")
    args = parser.parse_args()
    ours = pool_judge(VerifierSpec(), args.workers)
    judges: dict[str, Judge] = {"`math`, strict": ours, "math-verify": math_verify_default, "DAPO's rule": dapo_rule}
    classes = [(wanted, *entry) for wanted, group in ((False, WRONG), (True, RIGHT)) for entry in group.items()]
    everything = [(answer, gold, "") for _, _, pairs in classes for gold, answer in pairs]
    verdicts = [iter(judge(everything)) for judge in judges.values()]
    table: list[list[object]] = []
    for wanted, name, pairs in classes:
        right = [sum(next(of_judge) is wanted for _ in pairs) for of_judge in verdicts]
        table.append([name, "match" if wanted else "no match", len(pairs), *right])
    table.append(["all", "", *(sum(int(str(row[i])) for row in table) for i in range(2, 3 + len(judges)))])
    print_table("Right verdicts by class", ["class", "should", "pairs", *judges], table)
    if args.no_restating or not (args.data / "train").is_dir():
        return 0
    judges = {
        "`math`, lenient": pool_judge(VerifierSpec(strict=False), args.workers),
        "`math`, strict": ours,
        "`refuse_restated`": pool_judge(VerifierSpec(refuse_restated=True), args.workers),
        "math-verify": math_verify_default,
        "DAPO's rule": dapo_rule,
    }
    rates = (
        [name, len(rows), *(restating(rows, judge) for judge in judges.values())]
        for name, rows in problems(args.data, args.problems).items()
    )
    print_table("Problems on which boxing a formula of the statement pays", ["set", "problems", *judges], rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
