"""Spellings of one problem count as one, other problems do not; what a file repeats around its problems does not
count."""

from __future__ import annotations

import random

from curated_rows import PLAIN

SAME = [
    ("Find $\\frac{1}{2}+x^2$.", "find  \\( \\dfrac12 + x^{2} \\)"),
    ("Is $\\frac{\\sqrt{a+b}}{c}$ real?", "Is $\\tfrac{\\sqrt{ a + b }}{c}$ real"),
    ("Let $\\left( x+1 \\right) \\le 5$", "let $(x+1) \\leqslant 5$"),
    ("Let $x \\leq 5$", "Let x ≤ 5"),
    ("the triangle $A B C$", "the triangle $ABC$"),
    ("It costs \\$1,000 or 20\\%", "It costs $1{,}000$ or 20 percent"),
    ("an angle of $60^\\circ$", "an angle of 60°"),
    ("three dogs and twenty-five cats", "3 dogs and 25 cats"),
    ("Tom's 6-sided die", "Tom’s $6$-sided die"),
    ("Problem 3. Find $x$.", "Find $x$."),
    ("12. Find $y$.", "Find $y$."),
    ("(5 points) Find $z$.", "Example 12: find $z$"),
    ("what is the largest number", "What is the greatest number?"),
    ("$\\sin x \\cdot y$", "$sin x \\times y$"),
    ("Find x²", "Find $x^{2}$"),
    ("$1, 2, \\ldots, n$", "$1,2,\\dots,n$"),
    ("value of \x0crac{1}{2}", "value of $\\frac{1}{2}$"),
    ("Solve it. ![x](http://a/b.png)", "Solve it."),
    ("$x \\in \\{1, 2\\}$", "$x\\in\\left\\{1,2\\right\\}$"),
    ("Is $\\mathbb{R}^{n}$ open?", "Is $R^n$ open"),
]
OTHER = [
    ("Find $2(x+1)$", "Find $2x+1$"),
    ("Find $x+y$", "Find $x-y$"),
    ("the point $f(1,2)$", "the point $f(12)$"),
    ("from 3.5 to 4", "from 35 to 4"),
    ("segment $AB$", "segment $AC$"),
    ("$\\sin x$", "$\\cos x$"),
    ("$x^3$", "$x_3$"),
    ("$[0,1)$", "$(0,1]$"),
]


def test_spellings_of_one_problem_are_equal_and_other_problems_are_not(curate):
    rows = [(text, str(i)) for i, pair in enumerate([*SAME, *OTHER]) for text in pair]
    found = curate(*rows, options="--drop proof")
    assert found.dropped == {number: ("duplicate", number - 1) for number in range(2, 2 * len(SAME) + 1, 2)}


def test_a_drawing_behind_the_form_of_the_answer_belongs_to_the_problem(curate):
    text = "What is the area of the region drawn below? Express your answer as a fraction. [asy] draw({}); [/asy]"
    assert curate((text.format(1), "1"), (text.format(2), "1"), options="--drop proof").kept == [1, 2]


def test_lines_that_a_file_repeats_do_not_count(curate):
    """They belong to ten problems of a file at least, and to a fifth."""
    frame = "Solve the following.\n\n{}\n\nRemember the box."
    rows = [(frame.format(f"What is {i} + {i}?"), str(2 * i)) for i in range(20)]
    held_out = [("What is 3 + 3?", "6")]
    assert curate(*rows, ("What is 4 + 4?", "8"), options="--drop proof", held_out=held_out).dropped == {
        4: ("leak", "exam:1"),
        21: ("duplicate", 5),
    }
    found = curate(*rows[:9], ("What is 4 + 4?", "8"), options="--drop proof", held_out=held_out)
    assert 10 in found.kept


def test_a_drawing_does_not_hide_a_leak_where_enough_is_said(curate):
    text = "A square of side 4 stands on a circle of radius 3 and touches it in two points. What is its whole area?"
    held_out = [(f"{text} [asy] draw(3); [/asy]", "16")]
    found = curate((text, "16"), (f"{text} [asy] draw(8); [/asy]", "16"), PLAIN, held_out=held_out)
    assert found.reasons == {1: "leak", 2: "leak"}


def test_no_text_breaks_it(curate):
    rng, alphabet = random.Random(0), "\\{}$^_()ab1 .fracsqrt[],!é²\n\x0c"
    texts = dict.fromkeys("".join(rng.choices(alphabet, k=rng.randint(1, 80))).strip() or "a" for _ in range(300))
    found = curate(*((text, "1") for text in texts), PLAIN)
    assert found.kept
