"""Turns files of problems, as their authors publish them, into the data of the recipes: one JSON object a line.

    python examples/recipes/prepare_data.py --out data --name dapo_math_17k dapo-math-17k.parquet
    python examples/recipes/prepare_data.py --out data --name aime24 aime24.jsonl
    python examples/recipes/prepare_data.py --out data --name math500 math500.jsonl

Reads what docs/data.md lists (Parquet, JSON, JSON lines; fields by name). DAPO's instructions around a problem are
removed, since the recipe's template has its own; repeated problems are written once, those with two answers not at all.
Says what was left out. Downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

from megatron_daro.data.containers import read_rows
from megatron_daro.data.formats import ParsedRow, parse_row

BEFORE = re.compile(r"^Solve the following math problem step by step\..*?\n\n", re.DOTALL)
AFTER = re.compile(r'\n\nRemember to put your answer on its own line after "Answer:"\.?\s*$')


def problem_of(row: ParsedRow) -> str:
    """Return the problem alone: the last message of a chat, or the text, without DAPO's instructions."""
    text = row.text if row.text is not None else (row.messages or ({"content": ""},))[-1]["content"]
    return AFTER.sub("", BEFORE.sub("", text)).strip()


def prepared(files: list[Path]) -> tuple[dict[str, str], Counter[str]]:
    """Return answers by problem, and how many rows were left out for which reason."""
    answers: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    contradicted: set[str] = set()
    for file in files:
        for _, raw in read_rows(file):
            row = parse_row(raw)
            if not isinstance(row, ParsedRow):
                left_out[row.reason] += 1
                continue
            problem, answer = problem_of(row), row.answers[0]
            if answers.setdefault(problem, answer) != answer:
                contradicted.add(problem)
            left_out["repeated"] += 1
    left_out["repeated"] -= len(answers)
    left_out["two answers"] = len(contradicted)
    return {problem: answer for problem, answer in answers.items() if problem not in contradicted}, +left_out


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Problems as published -> the data of the recipes.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data"), help="directory of the result (data)")
    parser.add_argument("--name", required=True, help="name of the result, without .jsonl")
    options = parser.parse_args()
    rows, left_out = prepared(options.files)
    if not rows:
        parser.error(f"no usable problem in {', '.join(map(str, options.files))}: {dict(left_out)}")
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{options.name}.jsonl"
    with target.open("w", encoding="utf-8") as file:
        for problem, answer in rows.items():
            file.write(json.dumps({"problem": problem, "answer": answer}, ensure_ascii=False) + "\n")
    print(f"{target}: {len(rows)} problems; left out: {dict(left_out) or 'nothing'}")


if __name__ == "__main__":
    main()
