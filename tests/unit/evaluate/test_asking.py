"""Every answer is kept as it comes, asked for once, and the same whether the evaluation was killed or not."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from answering import SeededEngine, ask_for, digits, questions

from megatron_daro.errors import DataError, DeadlineError, EngineError
from megatron_daro.workshop.evaluate.answers import kept, part_files, rows

COLUMNS = ("source", "prompt_id", "text", "correct", "length", "finish_reason", "tokens")


def found(out):
    return sorted((row["group_id"], row["index"], *(str(row[name]) for name in COLUMNS)) for row in rows(out, COLUMNS))


@pytest.mark.parametrize("window", [None, 3])
def test_a_killed_evaluation_goes_on_and_gives_the_same_answers(tmp_path, window):
    asked = questions(digits("a"), digits("b"))
    assert ask_for(tmp_path / "unbroken", SeededEngine(), asked) == 80
    broken = tmp_path / "broken"
    with pytest.raises(EngineError):
        ask_for(broken, first := SeededEngine(fails_after=23), asked, window=window)
    there = len(kept(broken))
    assert there == 23  # every answer that came, also those that were still being verified
    assert ask_for(broken, second := SeededEngine(), asked, window=window) == 80 - there
    assert found(broken) == found(tmp_path / "unbroken")
    assert not set(second.asked) & (kept(broken) - set(second.asked)) and len(second.asked) == 80 - there
    assert len(set(first.asked)) == 23
    assert ask_for(broken, SeededEngine(), asked) == 0


def test_randomness_belongs_to_the_problem_and_not_to_its_place():
    both, one = questions(digits("a"), digits("b")), questions(digits("b"))
    assert [q.group_id for q in both[10:]] == [q.group_id for q in one]
    assert len({q.group_id for q in both}) == 20 and all(q.group_id < 0 for q in both)


def test_more_samples_ask_only_for_the_new_ones(tmp_path):
    ask_for(tmp_path, SeededEngine(), questions(digits(samples=2)))
    engine = SeededEngine()
    assert ask_for(tmp_path, engine, questions(digits(samples=5))) == 30
    assert {index for _, index in engine.asked} == {2, 3, 4}


def test_a_repeated_problem_is_asked_as_often_as_it_stands_there():
    held_out = digits()
    twice = type(held_out)(held_out.section, (*held_out.prompts, held_out.prompts[0]))
    assert len({q.group_id for q in questions(twice)}) == 11


def test_what_an_abort_cut_off_is_not_kept(tmp_path):
    ask_for(tmp_path, SeededEngine(aborted=(1,)), questions(digits(samples=3)))
    assert Counter(index for _, index in kept(tmp_path)) == {0: 10, 2: 10}


def test_an_answer_ends_at_the_stop_text_of_its_template(tmp_path):
    engine = SeededEngine(tail="</answer> and on")
    ask_for(tmp_path, engine, questions(digits(samples=1, template="r1")))
    for row in rows(tmp_path, COLUMNS):
        assert row["text"].endswith("</answer>") and row["length"] == len(row["text"]) == len(row["tokens"])


def test_silence_has_an_end(tmp_path):
    class Silent:
        async def generate(self, requests):
            await asyncio.Event().wait()
            yield ()

    with pytest.raises(DeadlineError, match="next_group"):
        ask_for(tmp_path, Silent(), questions(digits()), patience_s=0.05)


def test_a_torn_part_is_named_and_asked_for_again_without_it(tmp_path):
    ask_for(tmp_path, SeededEngine(), questions(digits()))
    (part,) = part_files(tmp_path)
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(DataError, match=part.name):
        kept(tmp_path)
    part.unlink()
    assert ask_for(tmp_path, SeededEngine(), questions(digits())) == 40


def test_a_part_never_takes_the_name_of_another(tmp_path):
    for samples in (1, 2, 3):
        ask_for(tmp_path, SeededEngine(), questions(digits(samples=samples)))
    first, _, last = part_files(tmp_path)
    content = last.read_bytes()
    first.unlink()
    ask_for(tmp_path, SeededEngine(), questions(digits(samples=4)))
    assert last.read_bytes() == content and len(kept(tmp_path)) == 40
