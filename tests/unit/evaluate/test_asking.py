"""Every answer is kept as it comes, asked for once, and the same whether the evaluation was killed or not."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from answering import SeededEngine, digits

from megatron_daro.data.stops import Stops
from megatron_daro.errors import DataError, DeadlineError, EngineError
from megatron_daro.reward.pool import RewardPool
from megatron_daro.workshop.evaluate import answers, asking
from megatron_daro.workshop.evaluate.answers import AnswerStore, kept, part_files, questions_of, requests, rows
from megatron_daro.workshop.evaluate.asking import Parts, ask

COLUMNS = ("source", "prompt_id", "text", "correct", "length", "finish_reason", "tokens")


def questions(*sets, seed=0):
    return questions_of(sets, seed=seed, max_new_tokens=8, stops=Stops((0,)))


def run(out, engine, asked, *, window=None, patience_s=60.0):
    """Asks for what is not there yet; returns how many were asked for."""
    pending = requests(asked, kept(out))
    with RewardPool("exact", workers=0) as pool:
        parts = Parts(engine, pool, AnswerStore(out), window, lambda answer: None, patience_s)
        asyncio.run(ask(parts, pending, asked))
    return len(pending)


def found(out):
    return sorted((row["group_id"], row["index"], *(str(row[name]) for name in COLUMNS)) for row in rows(out, COLUMNS))


@pytest.mark.parametrize("window", [None, 3])
def test_a_killed_evaluation_goes_on_and_gives_the_same_answers(tmp_path, window):
    asked = questions(digits("a"), digits("b"))
    assert run(tmp_path / "unbroken", SeededEngine(), asked) == 80
    broken = tmp_path / "broken"
    with pytest.raises(EngineError, match="are gone"):
        run(broken, first := SeededEngine(fails_after=23), asked, window=window)
    there = len(kept(broken))
    assert there == 23  # every answer that came, also those that were still being verified
    assert run(broken, second := SeededEngine(), asked, window=window) == 80 - there
    assert found(broken) == found(tmp_path / "unbroken")
    assert not set(second.asked) & (kept(broken) - set(second.asked)) and len(second.asked) == 80 - there
    assert len(set(first.asked)) == 23
    assert run(broken, SeededEngine(), asked) == 0


def test_randomness_belongs_to_the_problem_and_not_to_its_place(tmp_path):
    both, one = questions(digits("a"), digits("b")), questions(digits("b"))
    assert [q.group_id for q in both[10:]] == [q.group_id for q in one]
    assert len({q.group_id for q in both}) == 20 and all(q.group_id < 0 for q in both)
    assert [q.sampling.seed for q in questions(digits(), seed=5)] == [5] * 10


def test_more_samples_ask_only_for_the_new_ones(tmp_path):
    run(tmp_path, SeededEngine(), questions(digits(samples=2)))
    engine = SeededEngine()
    assert run(tmp_path, engine, questions(digits(samples=5))) == 30
    assert {index for _, index in engine.asked} == {2, 3, 4}


def test_a_repeated_problem_is_asked_as_often_as_it_stands_there():
    held_out = digits()
    twice = type(held_out)(held_out.section, (*held_out.prompts, held_out.prompts[0]))
    asked = questions(twice)
    assert len({q.group_id for q in asked}) == 11
    assert asked[10].prompt.id == f"{asked[0].prompt.id}-2"


def test_what_an_abort_cut_off_is_not_kept(tmp_path):
    run(tmp_path, SeededEngine(aborted=(1,)), questions(digits(samples=3)))
    assert Counter(index for _, index in kept(tmp_path)) == {0: 10, 2: 10}


def test_an_answer_ends_at_the_stop_text_of_its_template(tmp_path):
    engine = SeededEngine(tail="</answer> and on")
    run(tmp_path, engine, questions(digits(samples=1, template="r1")))
    texts = {row["text"] for row in rows(tmp_path, COLUMNS)}
    assert all(text.endswith("</answer>") for text in texts)
    (row, *_) = rows(tmp_path, COLUMNS)
    assert row["length"] == len(row["text"]) == len(row["tokens"])


def test_silence_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "_WATCH_S", 0.01)

    class Silent:
        async def generate(self, requests):
            await asyncio.Event().wait()
            yield ()

    for window in (None, 2):
        with pytest.raises(DeadlineError, match="no answer came"):
            run(tmp_path, Silent(), questions(digits()), window=window, patience_s=0.05)


def test_answers_are_on_disk_while_others_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "_FIRST_FLUSH_S", 0.0)
    monkeypatch.setattr(asking, "_WATCH_S", 0.01)

    class Watching(SeededEngine):
        async def generate(self, requests):
            async with asyncio.timeout(30):
                for number, request in enumerate(requests):
                    while len(list(rows(tmp_path, ()))) < number:  # no further answer before the last is on disk
                        await asyncio.sleep(0.01)
                    async for one in super().generate([request]):
                        yield one

    run(tmp_path, Watching(), questions(digits(samples=1)))
    assert len(part_files(tmp_path)) == 10


def test_a_torn_part_is_named_with_what_to_do(tmp_path):
    run(tmp_path, SeededEngine(), questions(digits()))
    (part,) = part_files(tmp_path)
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"part_000000.parquet: .*remove this file: the same command asks again"):
        kept(tmp_path)
    part.unlink()
    assert run(tmp_path, SeededEngine(), questions(digits())) == 40


def test_a_part_never_takes_the_name_of_another(tmp_path):
    for samples in (1, 2, 3):
        run(tmp_path, SeededEngine(), questions(digits(samples=samples)))
    first, _, last = part_files(tmp_path)
    content = last.read_bytes()
    first.unlink()
    run(tmp_path, SeededEngine(), questions(digits(samples=4)))
    assert last.read_bytes() == content and len(kept(tmp_path)) == 40
