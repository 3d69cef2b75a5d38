"""The command: files in, a set that training reads out; books that add up, bytes that repeat, bad input."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_daro.cli import main
from megatron_daro.data.prompts import load_problems

SHARED = Path(__file__).parents[4] / "shared" / "data"
QUESTION = "A bag holds 12 red marbles and 5 blue ones. How many marbles does it hold in total?"


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path):
    """Two files with a row of each kind, and an evaluation set."""
    write(
        tmp_path / "one.jsonl",
        {"problem": QUESTION, "answer": 17, "level": 3, "id": "a"},
        {"problem": QUESTION.replace("bag", "box"), "answer": "17.0"},
        {"problem": QUESTION.replace("12", "13"), "answer": [18, "eighteen"]},
        {"problem": "No answer here"},
        "not json",
        {"problem": "What is the capital of the number $x$ if $x=5$?", "answer": "1"},
        {"problem": "What is the capital of the number $x$ if $x = 5$", "answer": "2"},
        {"problem": "Which of these is right? (A) one (B) two", "answer": "B"},
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"  {QUESTION}"}]
    other = [{"role": "user", "content": "A farmer has 30 cows and sells 4 of them on Monday. How many are left?"}]
    table = pa.Table.from_pylist(
        [
            {"prompt": chat, "data_source": "dapo", "reward_model": {"ground_truth": "17"}},
            {"prompt": other, "data_source": "dapo", "reward_model": {"ground_truth": "26"}},
        ]
    )
    pq.write_table(table, tmp_path / "two.parquet")
    write(tmp_path / "exam.jsonl", {"problem": "Task: a farmer has 30 cows and sells 4 of them.", "answer": "26"})
    return tmp_path


def curate(folder, *options, out="out"):
    return main(
        ["curate", f"{folder}/one.jsonl", f"{folder}/two.parquet", "--out", f"{folder}/{out}", "--verifier", "integer"]
        + list(options)
    )


def statistics(out):
    return json.loads((out / "statistics.json").read_text())


def test_every_row_is_kept_or_has_a_record(files):
    cows = "A farmer has 30 cows and sells 4 of them on Monday. How many are left?"
    exam = write(files / "exam.jsonl", {"problem": cows, "answer": "26"})
    assert curate(files, "--against", str(exam), "--keep-field", "level") == 0
    out = files / "out"
    found = statistics(out)
    dropped = pq.read_table(out / "dropped.parquet").to_pylist()
    assert {row["origin"]: row["reason"] for row in dropped} == {
        "one.jsonl:2": "near_duplicate",
        "one.jsonl:3": "unverifiable",
        "one.jsonl:4": "unusable",
        "one.jsonl:5": "unusable",
        "one.jsonl:6": "conflict",
        "one.jsonl:7": "conflict",
        "one.jsonl:8": "unverifiable",
        "two.parquet:1": "duplicate",
        "two.parquet:2": "leak",
    }
    assert found["rows_read"] == 10 == found["kept"] + len(dropped) and found["decontaminated"]
    assert found["held_out"] == {"exam": {"problems": 1, "rows_dropped": 1, "rows_with_overlap": 0}}
    assert dropped[-1]["other"] == "exam:1" and dropped[0]["problem"] == QUESTION.replace("bag", "box")
    prompts, report = load_problems([out / "curated.parquet"], strict=True)
    assert [(p.text, p.answer, p.source) for p in prompts] == [(QUESTION, "17", "one")] and report.rows == 1
    original, _ = load_problems([files / "one.jsonl"], repeats="keep")
    assert prompts[0].id == original[0].id
    (row,) = pq.read_table(out / "curated.parquet").to_pylist()
    assert row["level"] == 3 and row["origin"] == "one.jsonl:1" and row["answer"] == ["17"]
    page = (out / "page.html").read_text()
    assert QUESTION.replace("bag", "box") in page


def test_chats_and_alternatives_survive(files):
    assert curate(files, "--verifier", "none", "--drop", "proof") == 0
    prompts, _ = load_problems([files / "out" / "curated.parquet"], strict=True)
    by_answer = {prompt.answers: prompt for prompt in prompts}
    assert by_answer["18", "eighteen"].text == QUESTION.replace("12", "13")
    assert by_answer[("26",)].messages[0]["content"].startswith("A farmer") and by_answer[("26",)].source == "dapo"


def test_the_same_input_gives_the_same_bytes(files):
    assert curate(files, out="first") == curate(files, out="second") == 0
    names = sorted(path.name for path in (files / "first").iterdir())
    assert names == ["curated.parquet", "dropped.parquet", "notes.parquet", "page.html", "statistics.json"]
    assert all((files / "first" / n).read_bytes() == (files / "second" / n).read_bytes() for n in names)


def test_without_an_evaluation_set_it_is_said_aloud(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    assert curate(files) == 0
    assert "--against" in capsys.readouterr().err
    assert not statistics(files / "out")["decontaminated"]


def test_a_suite_at_its_place_is_used(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    (files / "eval_data").mkdir()
    write(files / "eval_data" / "exam.x.jsonl", {"problem": QUESTION, "answer": "17"})
    assert curate(files, out="out") == 0
    assert "--against" not in capsys.readouterr().err and statistics(files / "out")["dropped"]["leak"] == 3


def test_a_place_that_is_taken_is_refused_and_stays(files, capsys):
    (files / "out").mkdir()
    assert curate(files) == 2
    assert f"{files}/out" in capsys.readouterr().err and list((files / "out").iterdir()) == []


def test_a_failure_leaves_nothing_that_looks_finished(files, capsys, monkeypatch):
    real = Path.write_text

    def write_text(path, *given, **options):
        if path.suffix == ".html":
            raise OSError(28, "No space left on device")
        return real(path, *given, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    assert curate(files) == 1
    assert not (files / "out").exists() and (files / "out.partial" / "curated.parquet").exists()
    monkeypatch.undo()
    assert curate(files) == 0 and not (files / "out.partial").exists()


def test_nothing_left_is_an_error(tmp_path, capsys):
    write(tmp_path / "one.jsonl", {"problem": "What?", "answer": "x + + ("})
    assert main(["curate", f"{tmp_path}/one.jsonl", "--out", f"{tmp_path}/out", "--verifier", "integer"]) == 1
    assert "1 unverifiable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--drop", "choice,luck"], "--drop: got luck"),
        (["--keep-field", "answer"], "--keep-field"),
        (["--against", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_options(files, capsys, options, named):
    assert curate(files, *options) in (1, 2)
    assert named in capsys.readouterr().err and not (files / "out").exists()


def test_fields_are_named_where_they_have_other_names(tmp_path, capsys):
    write(tmp_path / "one.jsonl", *({"q": f"What is {i} + {i}?", "r": str(2 * i)} for i in range(3)))
    command = ["curate", f"{tmp_path}/one.jsonl", "--out", f"{tmp_path}/out", "--verifier", "none", "--drop", "proof"]
    assert main(command) == 1
    words = capsys.readouterr().err
    assert "q, r" in words and "--problem-field" in words
    assert main([*command, "--problem-field", "q", "--answer-field", "r"]) == 0
    assert statistics(tmp_path / "out")["kept"] == 3


def test_sets_that_share_a_name_and_files_given_twice(files, capsys):
    (files / "more").mkdir()
    write(files / "more" / "exam.jsonl", {"problem": "x", "answer": "1"})
    assert curate(files, "--against", f"{files}/exam.jsonl", "--against", f"{files}/more") == 2
    assert "'exam'" in capsys.readouterr().err
    twice = [f"{files}/one.jsonl"] * 2
    assert main(["curate", *twice, "--out", f"{files}/out"]) == 1
    assert "one.jsonl" in capsys.readouterr().err


def test_text_of_the_data_is_escaped_on_the_page(tmp_path):
    hostile = "</script><script>alert(1)</script> How many of the 12 boxes are there \u202e?"
    write(tmp_path / "one.jsonl", {"problem": hostile, "answer": "4"}, {"problem": hostile + " ", "answer": "4"})
    assert main(["curate", f"{tmp_path}/one.jsonl", "--out", f"{tmp_path}/out", "--verifier", "none"]) == 0
    page = (tmp_path / "out" / "page.html").read_text()
    assert "<script>alert" not in page and "\u202e" not in page and "&lt;/script&gt;" in page


@pytest.mark.heavy
@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data folder beside the project")
def test_duplicates_and_leaks_of_dapo(tmp_path):
    sets = [f"--against={SHARED / 'eval' / name}" for name in ("amc23_40.qwen25math.jsonl", "math500.simplerl.jsonl")]
    file = SHARED / "train" / "dapo_math_17k.svs.parquet"
    assert main(["curate", str(file), "--out", f"{tmp_path}/out", "--verifier", "none", *sets]) == 0
    found = statistics(tmp_path / "out")
    print(found["dropped"], found["held_out"])
    assert found["rows_read"] == 17917 and found["dropped"]["duplicate"] > 981
    assert found["held_out"]["amc23_40"]["rows_dropped"] > 6 and found["held_out"]["math500"]["rows_dropped"] > 4
