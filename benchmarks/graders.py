"""The verifier beside other graders on recorded answers, with every disagreement.

    python benchmarks/graders.py [--answers OUT] [--math-grader FILE] [--write FILE.jsonl]

Graders: this package's `math`; math-verify with its defaults; DAPO's rule (verifier_classes.py); and, where FILE is the
`modeling/math_equivalence.py` of a clone of the MATH repository (hendrycks/math, not part of this project), its
`is_equiv`. All of them get the last box of the answer and the gold.

Recorded answers are those of an evaluation (--answers: a directory of `megatron-daro eval`), else what the published
files hold: the boxes of reference solutions, golds in another notation, and golds of other problems of the set (wrong
ones, unless two problems share their answer).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from verifier_classes import Judge, Triple, dapo_rule, math_verify_default, pool_judge, print_table  # noqa: E402
from verifiers import FILES, golds_of, respelled  # noqa: E402

from megatron_daro.reward import VerifierSpec  # noqa: E402
from megatron_daro.reward.extraction import last_box  # noqa: E402
from megatron_daro.workshop.evaluate.answers import rows  # noqa: E402

Case = tuple[str, str, Triple]
"""(set, kind of answer, what graders get)"""


def published(data: Path, wrong: int) -> Iterator[Case]:
    """Answers from the published files."""
    rng = random.Random(0)
    for name in FILES:
        if name == "gsm8k" or not (data / "eval" / FILES[name][0]).is_file():
            continue
        golds = golds_of(name, data)
        for gold in golds:
            yield name, "respelled", (respelled(gold), gold, "")
            for other in rng.sample(golds, min(len(golds), wrong)):
                if other != gold:
                    yield name, "of another problem", (other, gold, "")
        lines = [json.loads(line) for line in (data / "eval" / FILES[name][0]).read_text().splitlines()]
        for gold, line in zip(golds, lines, strict=True):
            box = last_box(str(line.get("solution", "")))
            if box and box != gold:
                yield name, "solution's box", (box, gold, "")


def recorded(out: Path) -> Iterator[Case]:
    """The answers of an evaluation that have a box."""
    for row in rows(out, ("source", "text", "answer")):
        box = last_box(row["text"] or "")
        if box:
            yield row["source"], "answer", (box, row["answer"], "")


def math_grader(path: Path) -> Judge:
    """`is_equiv` of a file that somebody else wrote."""
    spec = importlib.util.spec_from_file_location("math_equivalence", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda triples: [bool(module.is_equiv(answer, gold)) for answer, gold, _ in triples]


def compare(cases: Sequence[Case], judges: dict[str, Judge]) -> tuple[list[list[object]], list[dict[str, Any]]]:
    """(set, kind, cases, right by each grader, disagreements), and every case on which graders disagree."""
    triples = [triple for _, _, triple in cases]
    verdicts = {name: judge(triples) for name, judge in judges.items()}
    table: dict[tuple[str, str], Counter[str]] = {}
    different = []
    for i, (name, kind, (answer, gold, _)) in enumerate(cases):
        said = {grader: of_grader[i] for grader, of_grader in verdicts.items()}
        counts = table.setdefault((name, kind), Counter())
        counts.update({"cases": 1, **{grader: int(right) for grader, right in said.items()}})
        if len(set(said.values())) > 1:
            counts["disagree"] += 1
            different.append({"set": name, "kind": kind, "answer": answer, "gold": gold, **said})
    lines = [
        [name, kind, counts["cases"], *(counts[grader] for grader in judges), counts["disagree"]]
        for (name, kind), counts in table.items()
    ]
    return lines, different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, help="directory of an evaluation")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--math-grader", type=Path, help="math_equivalence.py of a clone of hendrycks/math")
    parser.add_argument("--wrong", type=int, default=2, help="answers of other problems for each gold")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="every disagreement, a JSON object a line")
    args = parser.parse_args()
    judges: dict[str, Judge] = {
        "math": pool_judge(VerifierSpec(), args.workers),
        "math-verify": math_verify_default,
        "DAPO's rule": dapo_rule,
    }
    if args.math_grader:
        judges["MATH's grader"] = math_grader(args.math_grader)
    cases = list(recorded(args.answers) if args.answers else published(args.data, args.wrong))
    lines, different = compare(cases, judges)
    print_table("Right verdicts", ["set", "answers", "cases", *judges, "disagree"], lines)
    pairs = Counter(
        tuple(name for name in judges if one[name]) for one in different
    )  # who called it right, the others not
    print_table("Who called it right where they disagree", ["right by", "cases"], (
        [", ".join(names), count] for names, count in pairs.most_common()
    ))  # fmt: skip
    if args.write:
        args.write.write_text("".join(json.dumps(one) + "\n" for one in different), encoding="utf-8")
        print(f"\n{len(different)} disagreements: {args.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
