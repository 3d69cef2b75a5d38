"""Problem files: every layout, every kind of bad row and bad file, repeats, contamination."""

import json
import math
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_daro.boxed import last_box
from megatron_daro.data.containers import WrittenNumber
from megatron_daro.data.formats import answer_text
from megatron_daro.data.prompts import find_overlap, load_problems, normalized_text
from megatron_daro.errors import DataError

SHARED = Path(__file__).parents[4] / "shared" / "data"


def write(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def dapo_row(text: str, gold: str) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
    }


def test_layouts_in_one_file(tmp_path):
    rows = [
        {"problem": "1+1?", "answer": 2},
        {"question": "2+2?", "answer": "two and two <<2+2=4>>4\n#### 1,004"},
        dapo_row("3+3?", "6"),
        {"question": "4+4?", "final_answer": ["8"]},
        {"problem": "5+5?", "solution": r"so \boxed{\frac{1}{2}} no, \boxed{\sqrt{\frac{10}{1}}}."},
        {"problem": "6+6?", "answer": 12.0},
    ]
    prompts, report = load_problems([write(tmp_path / "mixed.jsonl", *rows)])
    assert [p.answer for p in prompts] == ["2", "1004", "6", "8", r"\sqrt{\frac{10}{1}}", "12"]
    assert prompts[0].text == "1+1?" and prompts[0].messages is None and prompts[0].source == "mixed"
    assert prompts[2].text is None and prompts[2].messages == ({"role": "user", "content": "3+3?"},)
    assert prompts[2].source == "math_dapo"
    assert (report.rows, report.kept, report.num_dropped) == (6, 6, 0)


@pytest.mark.parametrize("data_format", ["auto", "parquet", "dapo"])
def test_parquet_in_dapos_layout(tmp_path, data_format):
    path = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([dapo_row("a?", "1"), dapo_row("b?", "-2")]), path)
    prompts, _ = load_problems([path], data_format)
    assert [p.answer for p in prompts] == ["1", "-2"]


def test_json_array_and_byte_order_mark(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps([{"problem": "a?", "answer": "1"}], indent=1).encode())
    assert load_problems([path])[0][0].answer == "1"
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + b'{"problem": "a?", "answer": "1"}\n')
    assert load_problems([lines])[1].num_dropped == 0


def test_named_fields_with_dots(tmp_path):
    path = write(tmp_path / "own.jsonl", {"q": {"text": "a?"}, "gold": {"value": 3}, "answer": "wrong"})
    prompts, _ = load_problems([path], problem_field="q.text", answer_field="gold.value")
    assert (prompts[0].text, prompts[0].answer) == ("a?", "3")


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "a?"},
        {"problem": "a?", "answer": "   "},
        {"problem": "a?", "answer": []},
        {"problem": "a?", "answer": {"x": 1}},
        {"problem": "a?", "answer": ["1", ["2", "3"]]},
        {"problem": "a?", "answer": [None, " "]},
        {"problem": "a?", "answer": list(range(65))},
        {"problem": "a\ud800?", "answer": "1"},
        {"problem": "a?", "answer": ["1", "\udfff"]},
        {"problem": "a?", "answer": "1", "level": "\ud800"},
        dapo_row("\udc80", "1"),
        {"problem": "a?", "answer": True},
        '{"problem": "a?", "answer": NaN}',
        {"problem": "a?", "answer": "work\n####"},
        {"problem": "a?", "solution": "no box"},
        {"answer": "1"},
        {"problem": " ", "answer": "1"},
        {"problem": 7, "answer": "1"},
        {"prompt": [], "answer": "1"},
        {"prompt": [{"role": "assistant", "content": "x"}], "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"},
        "[1]",
        '{"problem": "a?", "answer": ',
        "[" * 100_000,
    ],
    ids=lambda row: type(row).__name__,
)
def test_bad_row_is_counted_with_its_line(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", {"problem": "good?", "answer": "1"}, "", row)
    prompts, report = load_problems([path])
    assert len(prompts) == 1
    assert list(report.dropped.values()) == [["rows.jsonl:3"]]
    assert report.rows == 2 and report.rows == report.kept + report.num_dropped
    assert "rows.jsonl:3" in report.summary()
    with pytest.raises(DataError, match=r"rows.jsonl:3"):
        load_problems([path], strict=True)


def test_line_that_is_not_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"problem": "a?", "answer": "1"}\n\xff\xfe\n')
    assert list(load_problems([path])[1].dropped.values()) == [["rows.jsonl:2"]]


def test_formats_insist(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", {"question": "a?", "answer": "no hashes"}, {"question": "b?", "answer": "#### 2"}
    )
    assert [p.answer for p in load_problems([path], "gsm8k")[0]] == ["2"]
    with pytest.raises(DataError, match="Parquet"):
        load_problems([path], "parquet")
    with pytest.raises(DataError, match=r"field prompt"):
        load_problems([path], "dapo")
    with pytest.raises(DataError, match="csv"):
        load_problems([path], "csv")


def test_unusable_files(tmp_path):
    with pytest.raises(DataError, match=r"gone.jsonl: "):
        load_problems([tmp_path / "gone.jsonl"])
    with pytest.raises(DataError, match=str(tmp_path)):
        load_problems([tmp_path])
    for content in (b"", b"\n \n"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"empty.jsonl: "):
            load_problems([tmp_path / "empty.jsonl"])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match=r"list\.json"):
        load_problems([tmp_path / "list.json"])
    (tmp_path / "torn.json").write_text('[{"problem": "a?", "ans')
    with pytest.raises(DataError, match=r"torn.json: "):
        load_problems([tmp_path / "torn.json"])
    path = tmp_path / "whole.parquet"
    pq.write_table(pa.Table.from_pylist([dapo_row("a?", "1")] * 100), path)
    (tmp_path / "torn.parquet").write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn.parquet: "):
        load_problems([tmp_path / "torn.parquet"])
    with pytest.raises(DataError):
        load_problems([])


def test_file_without_one_usable_row_names_file_and_reasons(tmp_path):
    good = write(tmp_path / "good.jsonl", {"problem": "a?", "answer": "1"})
    bad = write(tmp_path / "bad.jsonl", {"problem": "a?"}, {"problem": "b?"}, {"answer": "1"})
    with pytest.raises(DataError, match=r"bad.jsonl: .*bad.jsonl:1, bad.jsonl:2"):
        load_problems([good, bad])


def test_repeats_and_conflicts(tmp_path):
    rows = [
        {"problem": "a b?", "answer": "1"},
        {"problem": " a  b?", "answer": 1.0},
        {"problem": "c?", "answer": "2"},
        {"problem": "c?", "answer": "3"},
        {"problem": "C?", "answer": "4"},
    ]
    path = write(tmp_path / "rows.jsonl", *rows)
    prompts, report = load_problems([path])
    assert [p.answer for p in prompts] == ["1", "4"]
    assert (report.rows, report.kept, report.duplicates) == (5, 2, 1)
    assert (report.conflicting, report.conflicting_problems) == (2, 1)
    kept, report = load_problems([path], repeats="keep")
    assert len(kept) == 5 == report.kept
    assert len({p.id for p in kept}) == 5
    with pytest.raises(DataError, match=r"0 .*conflicting"):
        load_problems([write(tmp_path / "two.jsonl", *rows[2:4])])


def test_ids_depend_on_source_and_problem_only(tmp_path):
    first = write(tmp_path / "x.jsonl", {"problem": "b?", "answer": "1"}, {"problem": "a?", "answer": "1"})
    (tmp_path / "deep").mkdir()
    moved = write(tmp_path / "deep" / "x.jsonl", {"problem": "a?", "answer": "9"})
    other = write(tmp_path / "y.jsonl", {"problem": "a?", "answer": "1"})
    assert load_problems([first])[0][1].id == load_problems([moved])[0][0].id
    assert load_problems([first])[0][1].id != load_problems([other])[0][0].id
    assert load_problems([moved])[0][0].id == "3017df4920d25423"


def test_contamination_is_reported_not_dropped(tmp_path):
    train = write(tmp_path / "train.jsonl", dapo_row("What is  $1+1$?", "2"), {"problem": "new?", "answer": "1"})
    held_out, _ = load_problems([write(tmp_path / "eval.jsonl", {"problem": "What is $1 + 1$? ", "answer": "2"})])
    prompts, report = load_problems([train], held_out={"tiny": held_out, "none": []})
    assert report.kept == 2
    assert dict(report.contaminated) == {"tiny": [prompts[0].id], "none": []}
    assert "tiny" in report.summary()
    assert find_overlap(prompts[1:], {"tiny": held_out}) == {"tiny": []}


def test_a_gold_may_be_a_list_of_alternatives(tmp_path):
    """Rows as Dr. GRPO's Minerva file has them: 75 of 272 golds are lists."""
    rows = [{"problem": f"{i}?", "answer": [f"{i}", f"{i}.0 m", f"{i}"] if i < 75 else f"{i}"} for i in range(272)]
    prompts, report = load_problems([write(tmp_path / "minerva.jsonl", *rows)], repeats="keep")
    assert (report.kept, report.num_dropped) == (272, 0)
    assert prompts[3].answers == ("3", "3.0 m") and prompts[3].answer == "3"
    assert prompts[80].answers == ("80",) and prompts[80].alternatives == ()


def test_alternatives_decide_whether_a_repeat_agrees(tmp_path):
    rows = [{"problem": "a?", "answer": ["1", "2"]}, {"problem": "a?", "answer": [1.0, 2]}]
    _, report = load_problems([write(tmp_path / "a.jsonl", *rows)])
    assert (report.kept, report.duplicates) == (1, 1)
    with pytest.raises(DataError, match="conflicting"):
        load_problems([write(tmp_path / "b.jsonl", rows[0], {"problem": "a?", "answer": "1"})])


def test_chats_in_text_and_in_a_column_of_messages(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [
        {"messages": chat, "answer": "2"},
        {"prompt": json.dumps(chat), "answer": "2"},
        {"prompt": '[1, 2] is a list of "role"s?', "answer": "2"},
        {"prompt": "[[1, 2], [3]]", "answer": "2"},
    ]
    prompts, _ = load_problems([write(tmp_path / "rows.jsonl", *rows)], repeats="keep")
    assert prompts[0].messages == prompts[1].messages == tuple(chat)
    assert [p.text for p in prompts] == [None, None, rows[2]["prompt"], rows[3]["prompt"]]


def test_an_empty_field_says_nothing(tmp_path):
    rows = [
        {"problem": "a?", "answer": "", "solution": r"so \boxed{7}"},
        {"problem": " ", "question": "b?", "answer": [], "final_answer": 8},
        {"problem": "c?", "answer": None, "reward_model": {"ground_truth": ""}, "ground_truth": "9"},
    ]
    prompts, _ = load_problems([write(tmp_path / "rows.jsonl", *rows)])
    assert [(p.text, p.answer) for p in prompts] == [("a?", "7"), ("b?", "8"), ("c?", "9")]


@pytest.mark.parametrize(
    ("written", "gold"),
    [
        ("6.02e23", "6.02e23"),
        ("9007199254740993.0", "9007199254740993"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("1e22", "1e22"),
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("1.6e-19", "1.6e-19"),
        ("-27.0", "-27"),
        ("-0.0", "0"),
        ("0.50", "0.5"),
        ("1e3", "1000"),
        ("1e400", "1e400"),
    ],
)
def test_a_number_of_a_json_file_keeps_its_own_digits(tmp_path, written, gold):
    path = write(tmp_path / "rows.jsonl", f'{{"problem": "a?", "answer": {written}}}')
    assert load_problems([path])[0][0].answer == gold
    (tmp_path / "rows.json").write_text(f'[{{"problem": "a?", "answer": [{written}]}}]')
    assert load_problems([tmp_path / "rows.json"])[0][0].answer == gold


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_a_gold_is_exactly_the_number_that_was_written(value):
    written = json.dumps(value)
    gold = answer_text(WrittenNumber(written)) if isinstance(value, float) else answer_text(value)
    assert Decimal(gold) == Decimal(written)


def test_parquet_decimals_and_floats(tmp_path):
    golds = [Decimal("27.00"), Decimal("0.50"), Decimal("12345678901234567890.12"), Decimal("-3.14")]
    for type_, values, wanted in [
        (pa.decimal128(38, 2), golds, ["27", "0.5", "12345678901234567890.12", "-3.14"]),
        (pa.decimal128(38, 0), [Decimal(10**30)], ["1" + "0" * 30]),
        (pa.float64(), [6.02e23, 27.0, 2.0**60, 0.1], ["6.02e+23", "27", "1.152921504606847e+18", "0.1"]),
        (pa.float32(), [0.3, 6.02e23, 27.0, -1e-5], ["0.3", "6.02e+23", "27", "-1e-05"]),
        (pa.float16(), [0.3, 27.0], ["0.3", "27"]),
        (pa.list_(pa.float32()), [[0.3]], ["0.3"]),
        (pa.struct({"gold": pa.large_list(pa.float32())}), [{"gold": [0.3]}], ["0.3"]),
    ]:
        problems = [f"{i}?" for i in range(len(values))]
        pq.write_table(pa.table({"problem": problems, "answer": pa.array(values, type_)}), tmp_path / "n.parquet")
        field = "answer.gold" if pa.types.is_struct(type_) else "answer"
        prompts, _ = load_problems([tmp_path / "n.parquet"], answer_field=field)
        assert [p.answer for p in prompts] == wanted


@given(st.floats())
def test_any_float_answer(value):
    text = answer_text(value)
    assert (text is None) == (not math.isfinite(value))
    assert text is None or float(text) == value


def test_answer_text_by_hand():
    assert [answer_text(v) for v in (27.0, 3, "  x ", ["7"], [[5]], 0.5, -0.0, 1e300)][:7] == [
        "27", "3", "x", "7", "5", "0.5", "0",
    ]  # fmt: skip
    assert [answer_text(v) for v in (None, True, [], [1, 2], {}, "", float("inf"))] == [None] * 7


@given(st.recursive(st.text("ab \\", max_size=3), lambda inner: inner.map(lambda t: "{" + t + "}"), max_leaves=4))
def test_the_last_box_has_balanced_content(content):
    content = content.replace("\\", "")
    assert last_box(rf"\boxed{{0}} then \boxed{{{content}}} done") == content.strip()


def test_the_last_box_by_hand():
    assert last_box(r"\boxed{a} \boxed{b_{1}}") == "b_{1}"
    assert last_box(r"\boxed {\{1,2\}}") == r"\{1,2\}"
    assert last_box(r"\boxed{good} and torn \boxed{x_{1}") is None
    assert last_box(r"\fbox{7}") == "7"
    assert last_box("none") is None


def test_normalized_text_keeps_what_matters():
    assert normalized_text("a  b\n") == normalized_text("ab")
    assert normalized_text("1  12") == normalized_text("1\n12 ") != normalized_text("11 2")
    assert normalized_text("x") != normalized_text("X")
    assert normalized_text("x²") != normalized_text("x2")
    assert normalized_text("é") == normalized_text("é")


EVAL_SETS = [
    ("aime24.qwen25math.jsonl", 30, "204"),
    ("aime25.areal.jsonl", 30, "70"),
    ("amc23_40.qwen25math.jsonl", 40, "27"),
    ("math500.simplerl.jsonl", 500, r"\left( 3, \frac{\pi}{2} \right)"),
    ("minerva_math.qwen25math.jsonl", 272, "1.6"),
    ("olympiadbench.qwen25math.jsonl", 675, "2"),
    ("gsm8k_test.openai.jsonl", 1319, "18"),
]


def shared_file(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not in {SHARED}")
    return SHARED / name


@pytest.mark.shared
@pytest.mark.parametrize(("name", "rows", "first"), EVAL_SETS)
def test_evaluation_sets_load_whole(name, rows, first):
    prompts, report = load_problems([shared_file(f"eval/{name}")], repeats="keep", strict=True)
    assert (len(prompts), report.rows, prompts[0].answer) == (rows, rows, first)
    assert all(p.answer and p.text for p in prompts)


@pytest.mark.shared
def test_gsm8k_answers_are_numbers():
    prompts, report = load_problems([shared_file("train/gsm8k_train.openai.jsonl")], "gsm8k")
    assert report.kept == 7473
    assert all(math.isfinite(float(p.answer)) for p in prompts)


@pytest.mark.heavy
@pytest.mark.shared
def test_dapo_17k_counts():
    held_out = {name: load_problems([shared_file(f"eval/{name}")], repeats="keep")[0] for name, *_ in EVAL_SETS[:6]}
    _, report = load_problems([shared_file("train/dapo_math_17k.svs.parquet")], held_out=held_out)
    # 17,917 rows, 16,921 distinct problems, 15 of them with conflicting answers; counted by hand before.
    assert report.rows == 17917
    assert report.kept + report.conflicting_problems == 16921
    assert report.conflicting_problems == 15
    found = {name.split(".")[0]: len(ids) for name, ids in report.contaminated.items()}
    assert found == {"aime24": 0, "aime25": 0, "amc23_40": 6, "math500": 4, "minerva_math": 0, "olympiadbench": 4}


@pytest.mark.shared
def test_rows_without_answer_in_a_json_array():
    _, report = load_problems([shared_file("train/math_7k.deepscaler.json")])
    places = [f"math_7k.deepscaler.json:{n}" for n in (887, 1010, 5329, 5331)]
    assert list(report.dropped.values()) == [places]


def test_lines_are_asked_for_and_a_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"problem": "a?", "answer": "1"}]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"jsonl.*Parquet"):
        load_problems([tmp_path / "x.parquet"], "jsonl")
