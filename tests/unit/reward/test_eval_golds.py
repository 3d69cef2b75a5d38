"""Every gold of seven real evaluation sets against itself, and against the same value in another notation."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from megatron_daro.boxed import last_box
from megatron_daro.reward import build_verifier
from megatron_daro.reward.extraction import after_marker
from megatron_daro.reward.math import MathVerifier

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.shared,
    pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation files of ../shared/data/eval are not on this machine"),
]
VERIFIER = build_verifier("math")
SETS = {
    "aime24": ("aime24.qwen25math.jsonl", "answer", 30),
    "aime25": ("aime25.areal.jsonl", "answer", 30),
    "amc23": ("amc23_40.qwen25math.jsonl", "answer", 40),
    "math500": ("math500.simplerl.jsonl", "answer", 500),
    "minerva": ("minerva_math.qwen25math.jsonl", "solution", 272),
    "olympiadbench": ("olympiadbench.qwen25math.jsonl", "final_answer", 675),
    "gsm8k": ("gsm8k_test.openai.jsonl", "answer", 1319),
}


def golds_of(name: str) -> list[str]:
    file, field, _ = SETS[name]
    values: list[Any] = [json.loads(line)[field] for line in (DATA / file).read_text().splitlines()]
    if name == "minerva":
        return [last_box(value) or "" for value in values]
    if name == "gsm8k":
        return [after_marker(value, "####") or "" for value in values]
    return [value[0] if isinstance(value, list) else str(value) for value in values]


def correct(answer: str, gold: str) -> bool:
    return VERIFIER.verify(f"\\boxed{{{answer}}}", gold).correct


@pytest.mark.parametrize("name", SETS)
def test_every_gold_matches_itself_and_not_itself_plus_one(name: str) -> None:
    golds = golds_of(name)
    assert sum(correct(gold, gold) for gold in golds) == SETS[name][2] == len(golds)
    numbers = [gold for gold in golds if re.fullmatch(r"-?\d+(\.0)?", gold)]
    assert not [gold for gold in numbers if correct(str(Decimal(gold) + 1), gold)]
    assert not [gold for gold in numbers if correct(f"{gold}\\%", gold) and float(gold) != 0]


@pytest.mark.parametrize("name", ["math500", "minerva", "olympiadbench"])
def test_fractions_and_roots_in_another_notation(name: str) -> None:
    # No equations, text or floors: `+1-1` behind them is not the same, or math-verify cannot tell.
    pattern = r"\$?[-\d\s\\a-z{}+^]*\\(?:frac|sqrt)[^,=]*\$?"
    golds = [gold.strip("$") for gold in golds_of(name) if re.fullmatch(pattern, gold)]
    golds = [gold for gold in golds if "text" not in gold and "floor" not in gold and "_" not in gold][:60]
    assert len(golds) >= 8
    for gold in golds:
        assert correct(f"\\left({gold}\\right)+1-1".replace("\\frac", "\\dfrac"), gold), gold
        assert not correct(f"{gold}+1", gold), gold


def test_e_notation_golds_of_minerva() -> None:
    golds = [gold for gold in golds_of("minerva") if re.fullmatch(r"[\d.]+e-?\d+", gold)]
    assert len(golds) == 58
    for gold in golds:
        mantissa, exponent = gold.split("e")
        assert correct(f"{mantissa} \\times 10^{{{exponent}}}", gold), gold
        assert not correct(f"{mantissa} \\times 10^{{{int(exponent) + 1}}}", gold), gold


@pytest.mark.parametrize(("name", "expected"), [("math500", 0), ("minerva", 4), ("olympiadbench", 3)])
def test_few_golds_can_be_matched_literally_only(name: str, expected: int) -> None:
    assert isinstance(VERIFIER, MathVerifier)
    problems = [gold for gold in golds_of(name) if VERIFIER.gold_problem(gold)]
    assert len(problems) == expected, problems
