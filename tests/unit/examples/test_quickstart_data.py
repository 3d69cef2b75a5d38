"""The quickstart's sums, worked answers, slips, files and tokenizer."""

from __future__ import annotations

import json
import random
from collections import Counter

import problems
import pytest
import tokenizer
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.data.prompts import load_problems
from megatron_daro.data.stops import read_stops
from megatron_daro.data.tokenizer import load_tokenizer, tokenize_prompts
from megatron_daro.reward import build_verifier

numbers = st.integers(0, 99_999)
SHARES = {1: 1.0, 2: 1.0, 3: 1.0}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.SUMS.write(directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')  # transformers chooses its class by that
    return load_tokenizer(directory)


def test_worked_answer_by_hand():
    assert problems.worked_answer(problems.Sum(47, 85)) == "7+5=12;4+8+1=13;####132"
    assert problems.worked_answer(problems.Sum(5, 995)) == "5+5=10;0+9+1=10;0+9+1=10;####1000"
    assert problems.worked_answer(problems.Sum(0, 0)) == "0+0=0;####0"


@given(numbers, numbers)
def test_worked_answer_without_slips_passes_the_verifier(left, right):
    problem = problems.Sum(left, right)
    text = problems.worked_answer(problem)
    assert build_verifier("exact").verify(text, problem.answer).correct
    assert text.count(";") == problem.digits


@given(numbers, numbers, st.integers(0, 1000))
def test_a_repeated_step_lengthens_the_answer_and_leaves_it_right(left, right, seed):
    problem = problems.Sum(left, right)
    text = problems.worked_answer(problem, random.Random(seed), problems.Slips(repeat=1.0))
    assert text.count(";") == 2 * problem.digits
    assert text.endswith(f"####{problem.answer}")


def test_held_out_sums_are_in_no_training_data_in_either_order():
    held_out = problems.held_out_problems(seed=3)
    training = problems.training_problems(3, 3000, SHARES, held_out)
    assert Counter(p.digits for p in held_out) == problems.HELD_OUT
    assert len({p.key for p in held_out}) == len(held_out)
    assert not {p.key for p in training} & {p.key for p in held_out}
    assert len(set(training)) == len(training) > 1000


def test_the_same_seed_gives_the_same_problems_and_another_one_others():
    first, again, other = (problems.held_out_problems(seed) for seed in (1, 1, 2))
    assert first == again != other
    makers = [problems.training_problems(seed, 50, SHARES, first) for seed in (1, 1, 2)]
    assert makers[0] == makers[1] != makers[2]


def test_files_load_with_categories(tmp_path, loaded):
    path = tmp_path / "held_out.jsonl"
    held_out = problems.held_out_problems(seed=0)
    problems.write_problems(path, held_out)
    prompts, report = load_problems([path])
    assert report.num_dropped == report.duplicates == 0
    assert [p.answer for p in prompts] == [p.answer for p in held_out]
    assert {p.category for p in prompts} == {f"digits_{d}" for d in problems.HELD_OUT}
    tokenised, _ = tokenize_prompts(prompts, loaded, prompt_template="plain", max_prompt_tokens=16)
    assert len(tokenised) == len(prompts)
    assert set(json.loads(path.read_text().splitlines()[0])) == {"problem", "answer", "category"}


@given(numbers, numbers)
def test_own_encoding_is_that_of_the_written_tokenizer(loaded, left, right):
    problem = problems.Sum(left, right)
    text = problem.text + problems.worked_answer(problem)
    ids = tokenizer.SUMS.encode(text)
    assert loaded(text)["input_ids"] == [tokenizer.SUMS.ids["<bos>"], *ids]
    assert loaded.decode([*ids, tokenizer.SUMS.ids["<eos>"]], skip_special_tokens=True) == text


def test_tokenizer_has_what_a_run_needs(loaded):
    assert max(loaded(text)["input_ids"][1] for text in (*tokenizer.SUMS.alphabet, "####")) == 23
    assert len(tokenizer.SUMS.ids) == 24
    assert read_stops(loaded).token_ids == (tokenizer.SUMS.ids["<eos>"],)
    assert tokenizer.SUMS.encode("####7") == [tokenizer.SUMS.ids["####"], tokenizer.SUMS.ids["7"]]
