"""The options of `megatron-daro curate`: what each becomes, what is printed, and who is asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.cli import main
from megatron_daro.commands import curate
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.curate import output, pass_rates
from megatron_daro.workshop.curate.offline import Rules
from megatron_daro.workshop.curate.rows import Decisions


def problems(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"problem": text, "answer": "1", "level": 2}) + "\n" for text in texts))
    return path


@pytest.fixture
def works(tmp_path, monkeypatch):
    """What is to be done, in place of doing it."""
    monkeypatch.chdir(tmp_path)
    problems(tmp_path / "a.jsonl", "a?", "b?")
    found = []
    monkeypatch.setattr(curate, "_curate", lambda *given: found.append(given))
    return found


def test_without_options_rules_are_their_defaults(works):
    assert main(["curate", "a.jsonl", "--out", "out"]) == 0
    ((work, rows, _),) = works
    assert work == curate._Work(Path("out"), {}, Rules(), None, ("parquet",))
    assert [row.prompt.text for row in rows] == ["a?", "b?"]


def test_every_option_reaches_the_rules(works):
    options = (
        "--conflicts majority --no-near --ngram 7 --drop-overlaps --verifier exact --workers 3 --drop-guesses "
        "yes_no,choice --largest-integer 5 --proofs --most-gold-words 4 --languages en,zh --most-per-topic 0.5 "
        "--paraphrases --alike 0.7 --write jsonl,parquet --format jsonl --keep-field level --problem-field answer "
        "--answer-field problem"
    )
    assert main(["curate", "a.jsonl", "--out", "out", *options.split()]) == 0
    ((work, rows, _),) = works
    assert work.rules == Rules(
        conflicts="majority", near=False, ngram=7, drop_overlaps=True, verifier="exact", workers=3,
        guesses=("choice", "yes_no"), largest_integer=5, proofs=False, most_gold_words=4, languages=("zh", "en"),
        most_per_topic=0.5, paraphrases=True, alike=0.7,
    )  # fmt: skip
    assert work.formats == ("parquet", "jsonl")
    assert [(row.prompt.text, row.prompt.answer) for row in rows] == [("1", "a?"), ("1", "b?")]


def test_a_model_that_is_asked_has_its_sampling(works):
    options = "--urls http://h:1,,http://h:2 --urls http://h:3 --samples 3 --temperature 0.5 --top-p 0.9 --template r1"
    more = ["--pass-rate", "0:0.5", "--guess-tries", "2", "engine.seed=1"]
    assert main(["curate", "a.jsonl", *more, "--out", "out", "--verifier", "exact", *options.split()]) == 0
    sampling = pass_rates.Sampling(3, 0.5, 0.9, "r1", "exact", ("engine.seed=1",))
    urls = ["http://h:1", "http://h:2", "http://h:3"]
    assert works[0][0].model == curate._Model(None, urls, sampling, "0:0.5", 2)
    assert main(["curate", "a.jsonl", "--out", "out", "--hf", "m", "--temperature", "0", "--samples", "1"]) == 0
    assert works[1][0].model.hf == Path("m") and works[1][0].model.sampling.samples == 1
    assert works[1][0].model.sampling.template == "chat" and works[1][0].model.sampling.top_p == 1.0


def test_a_file_with_an_equals_sign_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems(tmp_path / "a=b.jsonl", "a?")
    assert curate._split(["a=b.jsonl", "x.y=1", "c.jsonl"]) == ([Path("a=b.jsonl"), Path("c.jsonl")], ("x.y=1",))


@pytest.mark.parametrize(("text", "names"), [("", ()), ("b, a,", ("a", "b")), ("a", ("a",)), (" c,c", ("c",))])
def test_names_of_a_list_come_in_their_own_order(text, names):
    assert curate._listed("--x", text, ("a", "b", "c")) == names


def test_an_unknown_name_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"^--x: got d, e; allowed: a, b; fix: correct the name$"):
        curate._listed("--x", "d,a,e", ("a", "b"))


KINDS = ("x.jsonl", "y.json", "z.parquet", "w.txt")


def test_evaluation_sets_are_files_and_folders_of_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    problems(tmp_path / "sets" / "one.x.jsonl", "a?")
    problems(tmp_path / "sets" / "two.jsonl", "b?", "c?")
    (tmp_path / "sets" / "read.me").touch()
    problems(tmp_path / "three.jsonl", "d?")
    sets = curate._evaluation_sets([Path("three.jsonl"), Path("sets")])
    assert {name: [row.prompt.text for row in rows] for name, rows in sets.items()} == {
        "three": ["d?"],
        "one": ["a?"],
        "two": ["b?", "c?"],
    }
    assert capsys.readouterr().err == ""
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"^--against: got 'none', a folder without problem files; allowed: files of"):
        curate._evaluation_sets([Path("none")])
    problems(tmp_path / "sets" / "one.y.jsonl", "a?")
    with pytest.raises(ConfigError, match=r"^--against: got two sets named 'one'; allowed: names that differ before"):
        curate._evaluation_sets([Path("sets")])


@pytest.mark.parametrize("there", [False, True])
def test_the_suite_is_looked_for_where_no_set_is_named(tmp_path, monkeypatch, capsys, there):
    monkeypatch.chdir(tmp_path)
    if there:
        problems(tmp_path / "eval_data" / "a.jsonl", "a?")
    assert list(curate._evaluation_sets(None)) == ["a"] * there
    assert capsys.readouterr().err.startswith("warning: NOT compared with any evaluation set") is not there


def test_what_was_decided_is_written_with_its_rules(tmp_path, monkeypatch, capsys):
    from megatron_daro.workshop.curate import offline

    asked = []
    decisions = Decisions(2)
    monkeypatch.setattr(offline, "decide", lambda *given: asked.append(given) or (decisions, "crowded"))
    monkeypatch.setattr(output, "collect", lambda *given, **named: asked.append((given, named)) or {"a": 1, "b": 1})
    monkeypatch.setattr(output, "write", lambda *given, **named: asked.append((given, named)))
    monkeypatch.setattr(curate, "_print", lambda *given: asked.append(given))
    monkeypatch.setattr(curate, "_sample", lambda *given: asked.append(given) or ({0: {"x": 1}}, {"b": 2}))
    exam = [SimpleNamespace(place="f:e.jsonl:3")]
    work = curate._Work(tmp_path, {"exam": exam}, Rules(ngram=9), None, ("jsonl",))
    curate._curate(work, ["row"], {"id": ["a"]})
    decided, collected, wrote, printed = asked
    assert decided[:3] == (["row"], {"exam": exam}, Rules(ngram=9))
    rules = collected[1].pop("rules")
    assert (rules["ngram"], rules["pass_rate"], rules["guess_tries"], "workers" in rules) == (9, "", 0, False)
    assert collected == ((["row"], decisions), {"sets": {"exam": exam}, "shared": {"id": ["a"]}, "crowded": "crowded"})
    assert wrote == (
        (tmp_path, ["row"], decisions, {"a": 1, "b": 1}),
        {"formats": ("jsonl",), "extra": {}, "examples": {"exam:3": exam[0]}},
    )
    assert printed == (tmp_path, {"a": 1, "b": 1}, ("jsonl",))
    asked.clear()
    model = curate._Model(None, [], None, "0:1", 4)
    curate._curate(curate._Work(tmp_path, {}, Rules(), model, ()), ["row"], {})
    _, sampled, collected, wrote, _ = asked
    assert sampled == (model, ["row"], decisions, tmp_path)
    assert (collected[1]["rules"]["pass_rate"], collected[1]["rules"]["guess_tries"]) == ("0:1", 4)
    assert wrote[0][3] == {"a": 1, "b": 2} and wrote[1]["extra"] == {0: {"x": 1}}


@pytest.fixture
def model(monkeypatch):
    """A model that is asked, in place of engines; what it was asked, in order."""
    calls = []
    monkeypatch.setattr(pass_rates, "model_of", lambda *given: calls.append(("model_of", *given)) or "weights")
    for name in ("configuration", "guessing"):
        monkeypatch.setattr(pass_rates, name, lambda *given, name=name: calls.append((name, *given)) or name)
    measure = lambda *given: calls.append(("measure", *given[:2])) or ("measured", "settings")
    monkeypatch.setattr(pass_rates, "measure_pass_rates", measure)
    monkeypatch.setattr(pass_rates, "write_problems", lambda path, *_: calls.append(("write", path)) or 7)
    monkeypatch.setattr(pass_rates, "apply", lambda *given: calls.append(("apply", *given)) or {1: {}})
    monkeypatch.setattr(pass_rates, "summary_of", lambda *given: ("summary", *given))
    return calls


ASKED = pass_rates.Sampling(3, 1.0, 1.0, "chat", "math", ())


def test_a_model_is_asked_about_what_is_left(tmp_path, model, monkeypatch, capsys):
    decisions, out = Decisions(2), tmp_path / "out"
    folder = output.partial_of(out) / "sampling"
    asked = curate._Model(Path("m"), ["u"], ASKED, "0:0.5", 0)
    assert curate._sample(asked, ["row"], decisions, out) == (
        {1: {}},
        {"pass_rates": ("summary", "measured", "settings")},
    )
    assert model == [
        ("write", folder / "problems.jsonl"),
        ("model_of", Path("m"), ["u"]),
        ("configuration", "weights", folder / "problems.jsonl", folder, ASKED),
        ("measure", "configuration", "weights"),
        ("apply", ["row"], decisions, "measured", "settings", (0.0, 0.5)),
    ]
    line = f"asking for 3 answers to each of 7 problems; kept in {folder} as they come\n"
    assert capsys.readouterr().out == line


def test_guesses_are_asked_first_and_may_leave_nothing(tmp_path, model, monkeypatch, capsys):
    decisions, out = Decisions(1), tmp_path / "out"
    folder = output.partial_of(out) / "guesses"
    monkeypatch.setattr(
        pass_rates, "drop_guessed", lambda *given: model.append(("drop", *given)) or decisions.drop(0, "guessed")
    )
    assert curate._sample(curate._Model(None, ["u"], ASKED, "", 4), ["row"], decisions, out) == ({}, {})
    assert model == [
        ("write", folder / "problems.jsonl"),
        ("model_of", None, ["u"]),
        ("guessing", "weights", folder / "problems.jsonl", folder, ASKED, 4),
        ("measure", "guessing", "weights"),
        ("drop", ["row"], decisions, "measured", 4),
    ]
    assert capsys.readouterr().out == f"asking for 4 guesses at each of 7 problems; kept in {folder} as they come\n"
    model.clear()
    assert curate._sample(curate._Model(None, ["u"], ASKED, "", 4), ["row"], decisions, out) == ({}, {}) and not model


def test_numbers_and_files_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    statistics = {
        "kept": 12345,
        "dropped": {"leak": 1000},
        "notes": {"overlap": 2},
        "rows_read": 13347,
        "files": ["a", "b"],
    }
    curate._print(tmp_path, statistics, ("parquet", "jsonl"))
    *table, first, second, third, fourth = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if line.startswith("│")]
    from megatron_daro.workshop.curate.rows import NOTES, REASONS

    assert [row[:2] for row in rows] == [["kept", "12,345"], ["leak", "1,000"], ["(overlap)", "2"], ["read", "13,347"]]
    assert rows[1][2].startswith(REASONS["leak"][:20]) and rows[2][2].startswith(
        f"of the kept: {NOTES['overlap'][:20]}"
    )
    assert rows[3][2] == "2 files"
    names = ("curated.parquet", "curated.jsonl", "dropped.parquet", "page.html")
    assert [first, second, third, fourth] == [str(tmp_path / name) for name in names]


def test_a_person_is_told_on_stderr(capsys):
    curate._Terminal().notice("one")
    curate._Terminal().warn("two")
    assert capsys.readouterr() == ("", "one\nwarning: two\n")


def test_kinds_of_files_are_looked_for_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in KINDS:
        (tmp_path / name).write_text("{}")
    found = []
    from megatron_daro.workshop.curate import rows

    monkeypatch.setattr(rows, "read_all", lambda files, fields: found.append((files, fields)) or ([], {}))
    curate._evaluation_sets([tmp_path])
    assert [files[0].name for files, _ in found] == ["x.jsonl", "y.json", "z.parquet"]
    assert all(fields == rows.Fields() for _, fields in found)
