"""The normal form: spellings that must agree, problems that must not, what is split off."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_words import named

from megatron_daro.workshop.curate.rows import Fields, read_all
from megatron_daro.workshop.curate.statements import (
    shared_lines,
    statement_of,
    tokens_of,
    without_figures,
    without_lines,
)

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
    ("12. Find $x$.", "Find $x$."),
    ("what is the largest number", "What is the greatest number?"),
    ("$\\sin x \\cdot y$", "$sin x \\times y$"),
    ("Find x²", "Find $x^{2}$"),
    ("$1, 2, \\ldots, n$", "$1,2,\\dots,n$"),
    ("value of \x0crac{1}{2}", "value of $\\frac{1}{2}$"),
    ("Solve it. ![x](http://a/b.png)", "Solve it."),
    ("$x \\in \\{1, 2\\}$", "$x\\in\\left\\{1,2\\right\\}$"),
]
OTHER = [
    ("Find $2(x+1)$", "Find $2x+1$"),
    ("Find $x+y$", "Find $x-y$"),
    ("the point $f(1,2)$", "the point $f(12)$"),
    ("Find $5!$", "Find $5$!"),
    ("from 3.5 to 4", "from 35 to 4"),
    ("segment $AB$", "segment $AC$"),
    ("$\\sin x$", "$\\cos x$"),
    ("$x^2$", "$x_2$"),
    ("$[0,1)$", "$(0,1]$"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_spellings_of_one_problem_agree(one, other):
    assert statement_of(one).tokens == statement_of(other).tokens


@pytest.mark.parametrize(("one", "other"), [case for case in OTHER if "5" not in case[0] or "." in case[0]])
def test_other_problems_differ(one, other):
    assert statement_of(one).tokens != statement_of(other).tokens


def test_numbers_in_order():
    assert statement_of("Add three and 1,000 to 2.50.").numbers == ("3", "1000", "2.50")


def test_what_is_said_of_the_answers_form_is_split_off():
    text = "Find the probability that both dice show a six."
    plain, asked = statement_of(text), statement_of(text + "The answer is in the form m/n. Please give m + n.")
    assert plain.tokens == asked.tokens and plain.form == () and asked.form[-3:] == ("m", "+", "n")


def test_a_drawing_behind_the_form_belongs_to_the_problem():
    text = "What is the area of the region drawn below? Express your answer as a fraction. [asy] draw({}); [/asy]"
    one, other = (statement_of(text.format(i)) for i in (1, 2))
    assert one.form == other.form != () and one.tokens != other.tokens


def test_drawings_can_be_left_out_where_enough_is_said():
    assert without_figures("What is it? [asy] x [/asy]") == "What is it? [asy] x [/asy]"
    assert "asy" not in without_figures("word " * 20 + "[asy] x [/asy]")


def test_instructions_shared_by_a_file_do_not_count():
    texts = [f"Solve the following.\n\nWhat is {i} + {i}?\n\nRemember the box." for i in range(20)]
    lines = shared_lines([*texts, "What is 1 + 1?"])
    assert lines == {"Solve the following.", "Remember the box."}
    assert without_lines(texts[3], lines).strip() == "What is 3 + 3?"
    assert without_lines("Remember the box.", lines) == "Remember the box."
    assert shared_lines(texts[:9]) == frozenset()


def test_the_lines_that_a_file_repeats_are_said_with_its_name(tmp_path):
    text = "Solve the following.\n\nWhat is {0} + {0}?"
    rows = [json.dumps({"problem": text.format(i), "answer": str(2 * i)}) for i in range(20)]
    (tmp_path / "one.jsonl").write_text("\n".join(rows))
    (tmp_path / "two.jsonl").write_text(json.dumps({"problem": "What is 1 + 1?", "answer": "2"}))
    read, shared = read_all([tmp_path / "one.jsonl", tmp_path / "two.jsonl"], Fields())
    assert len(read) == 21 and shared == {"one.jsonl": ["Solve the following."]}


@given(st.text(alphabet="\\{}$^_()ab1 .fracsqrt[],!é²\n\x0c", max_size=80))
def test_nothing_raises_and_white_space_never_counts(text):
    assert tokens_of(text) == tokens_of(text.replace(" ", "  ").replace("\n", "\n\n"))
    assert all(token and not token.isspace() for token in tokens_of(text))


def test_the_form_of_an_answer_is_split_off_a_problem_of_eight_tokens():
    form = "Please give " + " ".join(named(58))
    assert statement_of(" ".join(named(8)) + " " + form).tokens == named(8)
    assert len(statement_of(" ".join(named(7)) + " " + form).form) == 0
    assert statement_of(" ".join(named(8)) + " " + form + " wz").form == ()


def test_drawings_go_where_sixteen_words_are_left():
    drawing = " [asy] x [/asy]"
    assert "asy" not in without_figures(" ".join(named(16)) + drawing)
    assert "asy" in without_figures(" ".join(named(15)) + drawing)


def test_lines_are_shared_by_ten_problems_and_a_fifth():
    texts = [f"Do it.\nproblem {i}\n" for i in range(10)]
    assert shared_lines(texts) == {"Do it."} and shared_lines(texts[:9]) == frozenset()
    single = [f"word {i}" for i in range(40)]
    assert shared_lines(texts + single) == {"Do it."} and shared_lines([*texts, *single, "x"]) == frozenset()
    assert shared_lines(["Do it."] * 10) == frozenset() and shared_lines(["Do it.\n\nDo it."] * 10) == {"Do it."}
    assert without_lines("a\nb", frozenset()) == "a\nb" and without_lines(" a \nb", frozenset({"a"})) == "b"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ABCDE ABCDEF \u00c9A", ("A", "B", "C", "D", "E", "ABCDEF", "\u00e9a")),
        (".5 .. 0.5", ("0.5", "0.5")),
        ("twenty-one Ninety nine thousand", ("21", "99", "1000")),
        ("a\\colon b", ("a", "b")),
        ("sin max most percent", ("\\sin", "\\max", "\\max", "%")),
        ("\\frac{1}{\\frac{2}{3}}", ("1", "/", "2", "/", "3")),
        ("\\frac12", ("1", "/", "2")),
        ("x\\,y a\\;b c~d e\\!f", ("xy", "a", "b", "c", "d", "ef")),
        ("60^{\\circ} 30\\degree", ("60", "degrees", "30", "degrees")),
        ("1,000,000 1,00", ("1000000", "1", "00")),
        ("A man and a", ("a", "man", "and", "a")),
        ("A + B", ("A", "+", "B")),
        ("a well-known f''", ("a", "well", "known", "f")),
        ("5 \\over 6", ("5", "/", "6")),
        ("\\mathbb{R}^{n}", ("R", "^", "n")),
        ("x! y !", ("x", "!", "y")),
        ("\u7532\u4e59", ("\u7532", "\u4e59")),
    ],
)
def test_the_tokens_of_a_text(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Example 12: a b", "a b"),
        ("(5 points) a b", "a b"),
        ("3) a b", "a b"),
        ("3. 5 b", "3 5 b"),
        ("1234. a", "1234 a"),
    ],
)
def test_the_number_of_a_problem_is_no_part_of_it(text, plain):
    assert statement_of(text).tokens == tuple(plain.split())
