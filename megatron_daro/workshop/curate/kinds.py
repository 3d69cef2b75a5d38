"""Drops kinds of problems that are unsuitable for training, found by their text or by the verifier.

A proof is not an answer, and a sentence is right only if it is repeated word for word; a verifier must read every gold
and find it equal to itself; an answer that is easily guessed (a letter, yes or no, a small number) teaches guessing.
Where a rule cannot tell, the row is kept.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Literal

from megatron_daro.reward.normal_form import canonical
from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.curate.decisions import Decisions
from megatron_daro.workshop.curate.rows import Row

_PROOF_GOLD = re.compile(
    r"(?:see\s+(?:the\s+)?)?(?:proof|solution|explanation|above|below)|(?:it\s+is\s+)?prove[nd]|q\.?\s*e\.?\s*d\.?"
    r"|(?:the\s+)?(?:statement|claim|assertion|inequality|equality|result)\s+(?:is\s+(?:true|proven?|proved)|holds)"
    r"|(?:\u89c1)?(?:\u8bc1\u660e|\u89e3\u6790)(?:\u89c1\u89e3\u6790|\u7565)?|\u7565",
    re.I,
)
_ASKS_PROOF = re.compile(
    r"\b(?:prove|show|demonstrate|verify|establish|justify)\b(?:\s+that\b|\s+the\s+(?:following|identity|inequality)|:"
    r"|\s*\\)|\b(?:prove|disprove)\b|\u6c42\u8bc1|\u8bc1\u660e",
    re.I,
)
_ASKS_ANSWER = re.compile(
    r"\?|\uff1f|\b(?:find|determine|compute|calculate|evaluate|solve|simplify|express|give|what|which|how\s+many|how\s+much"
    r"|list|write|state|estimate|deduce\s+the)\b|\u6c42(?!\u8bc1)|\u591a\u5c11|\u51e0|\u8ba1\u7b97",
    re.I,
)
_SPACE = re.compile(r"[\s.:!\u3002]+")


def _is_proof(statement: str, answers: Sequence[str]) -> bool:
    """Return whether a problem asks for a proof: its gold says so, or it asks for a proof and nothing else."""
    if any(_PROOF_GOLD.fullmatch(_SPACE.sub(" ", answer).strip()) for answer in answers):
        return True
    return bool(_ASKS_PROOF.search(statement)) and not _ASKS_ANSWER.search(statement)


def drop_proofs(rows: Sequence[Row], decisions: Decisions) -> None:
    """Drop rows that ask for a proof."""
    for row in decisions.kept():
        prompt = rows[row].prompt
        if _is_proof(prompt.statement, prompt.answers):
            decisions.drop(row, "proof", f"gold: {prompt.answer}")


_MATHS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


def _words_of(answer: str) -> int:
    """Return how many words an answer has; two characters of Chinese, Japanese or Korean count as one.

    Formulas, LaTeX commands and single letters do not count.
    """
    text = _TEXT.sub(r" \1 ", answer)
    text = _COMMAND.sub(" ", _MATHS.sub(" ", text))
    ideographs = len(_IDEOGRAPH.findall(text))
    return len(_WORD.findall(_IDEOGRAPH.sub(" ", text))) + math.ceil(ideographs / 2)


_MOST_WORDS = 3
"""Most words of an answer that is not a sentence."""


def drop_free_text(rows: Sequence[Row], decisions: Decisions) -> None:
    """Drop rows whose golds are all sentences."""
    for row in decisions.kept():
        words = [_words_of(answer) for answer in rows[row].prompt.answers]
        if min(words) > _MOST_WORDS:
            decisions.drop(row, "free_text", f"{words[0]} words: {rows[row].prompt.answer}")


ANSWER_FORMS = {"math": "\\boxed{{answer}}", "integer": "Answer: {answer}", "exact": "#### {answer}"}
"""Verifier -> how an answer is written for it."""
_MOST_WORKERS = 8
"""Most processes of the verifier; each takes about 100 MiB."""


def drop_unverifiable(rows: Sequence[Row], decisions: Decisions, verifier: str) -> None:
    """Drop rows with a gold that the verifier cannot read, or does not find equal to itself within its limits.

    Args:
        rows: every row that was read.
        decisions: what was dropped so far; written to.
        verifier: a key of ANSWER_FORMS.
    """
    kept = decisions.kept()
    golds = list(dict.fromkeys(answer for row in kept for answer in rows[row].prompt.answers))
    with RewardPool(verifier, min(len(os.sched_getaffinity(0)), _MOST_WORKERS)) as pool:
        problems = {golds[i]: reason for i, reason in pool.check_golds(golds).items()}
        usable = [gold for gold in golds if gold not in problems]
        verdicts = pool.score([(ANSWER_FORMS[verifier].replace("{answer}", gold), gold) for gold in usable])
    problems |= {gold: v.reason for gold, v in zip(usable, verdicts, strict=True) if not v.correct}
    for row in kept:
        wrong = next((answer for answer in rows[row].prompt.answers if answer in problems), None)
        if wrong is not None:
            decisions.drop(row, "unverifiable", f"{problems[wrong]}: {wrong}")


Guess = Literal["choice", "yes_no", "true_false", "small_integer"]
GUESSES: tuple[Guess, ...] = ("choice", "yes_no", "true_false", "small_integer")
_LARGEST_GUESS = 10
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf)\s*|[{}()\s.:*]|\\[()\[\]]")
_CHOICE = re.compile(r"[A-Ja-j]")
_OPTIONS = re.compile(r"\(\s*A\s*\).*\(\s*B\s*\)|\bA\s*[.):].*\bB\s*[.):]|\\text(?:bf)?\s*\{\s*\(?A\)?", re.DOTALL)
_WHOLE = re.compile(r"[-+]?\d+")


def drop_guessable(rows: Sequence[Row], decisions: Decisions, kinds: Sequence[str]) -> None:
    """Drop rows with a gold that a guess of one of these kinds hits."""
    for row in decisions.kept():
        prompt = rows[row].prompt
        guesses = ((guess_of(answer, prompt.statement), answer) for answer in prompt.answers)
        hit = next(((kind, answer) for kind, answer in guesses if kind in kinds), None)
        if hit:
            decisions.drop(row, "guessable", f"{hit[0]}: {hit[1]}")


def guess_of(answer: str, statement: str) -> Guess | None:
    """Return what kind of guess hits an answer; None: none does.

    A letter is a choice where it stands in brackets or a text wrapper, or the statement lists options: elsewhere it is
    a symbol.
    """
    text = canonical(answer)
    plain = _WRAPPER.sub("", text)
    word = plain.lower()
    if word in ("yes", "no"):
        return "yes_no"
    if word in ("true", "false"):
        return "true_false"
    if _CHOICE.fullmatch(plain) and (plain != text or (plain.isupper() and _OPTIONS.search(statement))):
        return "choice"
    if _WHOLE.fullmatch(text) and abs(int(text[:20])) <= _LARGEST_GUESS:
        return "small_integer"
    return None
