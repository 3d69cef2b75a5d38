"""Recorded rollouts summed per pass rate: against sums written out, over formats, and what is refused."""

from __future__ import annotations

import json
import math
import os
import random
import re
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.weighting import ALGORITHMS
from megatron_daro.cli import main
from megatron_daro.config.algorithm import DaroSection
from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.page import advice, headline
from megatron_daro.workshop.analyze.rows import Row, choose_columns, files_of, rows_of
from megatron_daro.workshop.analyze.views import infer_rollouts_per_prompt, read_dump, token_loss_sums, view_of
from megatron_daro.workshop.report.conversations import TurnSums

K = 4


def rollouts(seed, groups=12):
    """(group, length, right) in an order in which groups overlap."""
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        right = rng.randint(0, K)
        found += [(f"p{seed}-{group}", rng.randint(1, 60), i < right) for i in range(K)]
    for _ in range(30):
        i = rng.randrange(len(found) - 1)
        found[i], found[i + 1] = found[i + 1], found[i]
    return found


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps({"input": g, "output": "x" * n, "score": float(c)}) + "\n" for g, n, c in rows))


def read(path, **options):
    columns = choose_columns(files_of(path)[0], {}, None)
    files = files_of(path)
    k = infer_rollouts_per_prompt(rows_of(files[0], columns))
    return read_dump([rows_of(file, columns) for file in files], k)


@pytest.fixture
def verl_folder(tmp_path):
    for step in range(1, 12):
        write_jsonl(tmp_path / f"{step}.jsonl", rollouts(step))
    return tmp_path


def test_sums_and_losses_are_those_written_out(verl_folder):
    dump = read(verl_folder)
    everything = [row for step in range(1, 12) for row in rollouts(step)]
    assert dump.rollouts == len(everything) == 11 * 12 * K
    numbers = {group: i for i, group in enumerate(dict.fromkeys(g for g, _, _ in everything))}
    group_N = torch.tensor([numbers[g] for g, _, _ in everything])
    right_N = torch.tensor([float(c) for _, _, c in everything], dtype=torch.float64)
    length_N = torch.tensor([float(n) for _, n, _ in everything], dtype=torch.float64)
    bins_N = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, group_N, right_N)[group_N].long()
    advantages_N = group_advantages(right_N, group_N, eps=0.0)
    sums, sizes = token_loss_sums(dump.total)
    for k in range(K + 1):
        mine = bins_N == k
        assert float(dump.total.groups[k]) == int(mine.sum()) / K
        assert float(dump.total.tokens[k]) == float(length_N[mine].sum())
        assert float(sums[k]) == pytest.approx(-float((advantages_N * length_N)[mine].sum()), abs=1e-9)
        assert float(sizes[k]) == pytest.approx(float((advantages_N.abs() * length_N)[mine].sum()), abs=1e-9)


def test_shares_are_the_masses_of_coefficients_and_advantages(verl_folder):
    view = view_of(read(verl_folder), DaroSection(magnitude="token"))
    for share in view.shares.values():
        assert float(share.sum()) == pytest.approx(1)
        assert float(share[0]) == float(share[-1]) == 0
    inner = slice(1, K)
    # With magnitude "token" and weights at rest every difficulty has the same mass: the point of the method.
    torch.testing.assert_close(view.shares["daro"][inner], torch.full((K - 1,), 1 / (K - 1), dtype=torch.float64))
    by_name = {name: share for names, share in view.shares.items() for name in names.split(", ")}
    assert set(by_name) == set(ALGORITHMS)
    ratio = by_name["grpo"] / by_name["dr_grpo"]
    std = (view.pass_rate * (1 - view.pass_rate)).sqrt()
    torch.testing.assert_close((ratio * std)[inner] / (ratio * std)[1], torch.ones(K - 1).double(), rtol=1e-5, atol=0)
    # Each rule's factor of the centred reward, written out: relative to dr_grpo, whose factor is 1.
    mu = view.pass_rate[inner]
    factors = {
        "maxrl": 1 / mu,
        "f_grpo": (1 - mu) / (mu * (1 - mu)).sqrt(),
        "mgpo": torch.exp(-mu * (2 * mu).log() - (1 - mu) * (2 * (1 - mu)).log()) / (mu * (1 - mu)).sqrt(),
        "dgpo": torch.exp(-mu / 2) / (mu * (1 - mu)),
    }
    for name, factor in factors.items():
        relative = (by_name[name] / by_name["dr_grpo"])[inner] / factor
        torch.testing.assert_close(relative / relative[0], torch.ones(K - 1, dtype=torch.float64), rtol=1e-5, atol=0)


def test_weights_learnt_are_those_of_the_algorithm_step_by_step(verl_folder):
    from megatron_daro.algo.difficulty_weights import DifficultyWeights

    dump, weights = read(verl_folder), DifficultyWeights(K, learning_rate=0.1)
    for step in dump.steps:
        weights.update(token_loss_sums(step)[0], step.tokens)
    view = view_of(dump, DaroSection(learning_rate=0.1))
    torch.testing.assert_close(view.weight_learnt, weights.weights)
    measured = view.loss[1:K].abs()
    torch.testing.assert_close(view.weight_rest[1:K], (1 / measured).clamp(0.1, 10.0))


def test_every_measure_of_daro_is_that_of_the_answers_one_by_one(verl_folder):
    """Norms of the gradient: sqrt of the sum of A^2 over tokens, over the tokens; at rest their mean over the norm."""
    dump = read(verl_folder)
    everything = [row for step in range(1, 12) for row in rollouts(step)]
    rights = {}
    for group, _, right in everything:
        rights[group] = rights.get(group, 0) + right
    sizes, tokens = torch.zeros(K + 1).double(), torch.zeros(K + 1).double()
    for group, length, right in everything:
        k = rights[group]
        if 0 < k < K:
            advantage = (right - k / K) / math.sqrt(k / K * (1 - k / K))
            sizes[k] += abs(advantage) * length
        tokens[k] += length
    rest = view_of(dump, DaroSection(magnitude="advantage")).weight_rest[1:K]
    torch.testing.assert_close(rest, (tokens / sizes)[1:K], rtol=1e-12, atol=0)


def test_files_are_in_the_order_of_their_steps(verl_folder):
    assert [path.stem for path in files_of(verl_folder)] == [str(i) for i in range(1, 12)]


def test_memory_holds_open_groups_only(tmp_path):
    rows = [(f"p{i // K}", 3, i % 3 == 0) for i in range(K * 5000)]
    write_jsonl(tmp_path / "1.jsonl", rows)
    dump = read(tmp_path)
    assert dump.most_open == 1
    assert float(dump.total.groups.sum()) == 5000


def test_parquet_and_torch_files_say_the_same(tmp_path):
    rows = rollouts(3)
    write_jsonl(tmp_path / "dump.jsonl", rows)
    table = {"group_id": [hash(g) for g, _, _ in rows], "length": [n for _, n, _ in rows]}
    parquet.write_table(
        pyarrow.table({**table, "correct": [c for _, _, c in rows], "used": ["trained"] * len(rows)}),
        tmp_path / "step_000001.parquet",
    )
    samples = [{"group_index": hash(g), "response_length": n, "reward": float(c)} for g, n, c in rows]
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    first, *others = (read(tmp_path / name) for name in ("dump.jsonl", "step_000001.parquet", "0.pt"))
    for other in others:
        for name in ("groups", "right_tokens", "wrong_tokens"):
            assert torch.equal(getattr(first.total, name), getattr(other.total, name))


def nemo_rl_lines(rows):
    """As its `log_batched_dict_as_jsonl`: lists of one, prompts only among the tokens, padding at the end."""
    prompts = {group: [1, i] for i, group in enumerate(dict.fromkeys(g for g, _, _ in rows))}
    for i, (group, length, right) in enumerate(rows):
        rest = 70 - length
        yield {
            "content": ["x"],
            "rewards": [0.0],
            "filtered_rewards": [float(right)],
            "input_lengths": [2 + length],
            "token_ids": [prompts[group] + [5] * length + [0] * rest],
            "token_loss_mask": [[0.0, 0.0] + [1.0] * length + [0.0] * rest],
            "idx": i,
        }


def roll_line(rows):
    """As its `dump_rollout_to_specific_path`: a step is one line of columns."""
    groups, lengths, rights = zip(*rows, strict=True)
    answers = ["x" * n for n in lengths]
    return {"global_step": [1] * len(rows), "prompt": groups, "responses": answers, "scores": list(map(float, rights))}


def test_lines_of_nemo_rl_and_roll_say_the_same(tmp_path):
    rows = rollouts(3)
    for name in ("verl", "nemo_rl", "roll"):
        (tmp_path / name).mkdir()
    write_jsonl(tmp_path / "verl" / "1.jsonl", rows)
    lines = "".join(json.dumps(line) + "\n" for line in nemo_rl_lines(rows))
    (tmp_path / "nemo_rl" / "train_data_step1.jsonl").write_text(lines)
    (tmp_path / "nemo_rl" / "val_data_step1.jsonl").write_text('{"content": ["x"], "rewards": [0.5]}\n')
    file = tmp_path / "roll" / "rollout_dump_data.step_1.jsonl"
    file.write_text(json.dumps(roll_line(rows)) + "\n")
    assert [path.name for path in files_of(tmp_path / "nemo_rl")] == ["train_data_step1.jsonl"]
    first, *others = (read(tmp_path / name) for name in ("verl", "nemo_rl", "roll"))
    for other in others:
        for name in ("groups", "right_tokens", "wrong_tokens"):
            assert torch.equal(getattr(first.total, name), getattr(other.total, name))
    file.write_text(json.dumps(roll_line(rows) | {"scores": [1.0]}) + "\n")
    with pytest.raises(DataError, match=r"step_1\.jsonl:1: columns of different lengths \(prompt 48, .*scores 1\)"):
        read(tmp_path / "roll")


def test_groups_that_are_not_whole_are_counted_and_left_out(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1)[:-1])
    dump = read(tmp_path)
    assert dump.incomplete == 1
    assert float(dump.total.groups.sum()) == 11


class Runs:
    """Unpickled by pickle it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Kept(dict):
    """A mapping of a framework's own class."""


def test_what_a_torch_file_names_is_never_run_and_read_past(tmp_path):
    rows, made = rollouts(3), tmp_path / "made"
    samples = [
        {
            "group_index": np.int64(hash(g)),
            "response_length": np.float32(n),
            "reward": {"score": np.float64(c), "format": 0.5},
            "tokens": torch.arange(n),
            "experts": np.zeros((2, 3), dtype=np.int32),
            "metadata": {"host": Runs(made), "own": Kept(a=1), "where": tmp_path, "names": {"a"}},
        }
        for g, n, c in rows
    ]
    path = tmp_path / "0.pt"
    torch.save({"samples": samples}, path)
    columns = choose_columns(path, {}, None, "score")
    dump = read_dump([rows_of(path, columns)], K)
    with pytest.raises(DataError, match="got a mapping with score, format; allowed is one of these with --reward-key"):
        read(path)
    with pytest.raises(DataError, match="--reward-key, not acc"):
        list(rows_of(path, choose_columns(path, {}, None, "acc")))
    assert not made.exists()
    write_jsonl(tmp_path / "same.jsonl", rows)
    same = read(tmp_path / "same.jsonl")
    assert torch.equal(dump.total.right_tokens, same.total.right_tokens)
    assert torch.equal(dump.total.groups, same.total.groups)


def test_a_torch_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "0.pt"
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"no file of torch\.save"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0/constants.pkl", b"")
    with pytest.raises(DataError, match="TorchScript"):
        read(path)
    torch.save({"samples": [1.0]}, path)
    with pytest.raises(DataError, match="no list `samples` of mappings"):
        read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("0/data.pkl", b"\x80\x02}q")
        archive.writestr("0/version", b"3")
    with pytest.raises(DataError, match="the file is torn"):
        read(path)


def test_a_torn_parquet_file_is_named_also_where_it_is_the_first(tmp_path):
    (tmp_path / "step_000001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(tmp_path)


def test_bad_utf_8_is_named(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1))
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"1\.jsonl:49 is no UTF-8"):
        read(tmp_path)


def test_a_chat_is_a_group(tmp_path):
    lines = [{"q": [{"role": "user", "content": g}], "n": n, "r": c} for g, n, c in rollouts(1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = choose_columns(tmp_path / "a.jsonl", {"group": "q", "length": "n", "right": "r"}, None)
    assert float(read_dump([rows_of(tmp_path / "a.jsonl", columns)], K).total.groups.sum()) == 12


@pytest.mark.parametrize(
    ("length", "column", "size"),
    [
        ("57", "n", 57),
        ([1, 2, 3], "n", 3),
        ("57 tok", "len(n)", 6),
        ("57 tok", "n", None),
        (True, "n", None),
        (-1, "n", None),
    ],
)
def test_lengths_are_numbers_or_lists_and_texts_only_where_one_says_so(tmp_path, length, column, size):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "a", "n": length, "r": 1}) + "\n")
    columns = choose_columns(path, {"group": "q", "length": column, "right": "r"}, None)
    if size is None:
        with pytest.raises(DataError, match=r"n: got .*allowed are numbers of tokens and lists of tokens; .*len\(n\)"):
            list(rows_of(path, columns))
    else:
        assert [row.length for row in rows_of(path, columns)] == [size]
        assert columns.unit == ("characters" if column == "len(n)" else "tokens")


def test_a_second_format_in_a_folder_is_read_and_what_has_no_length_is_counted(tmp_path, capsys):
    samples = [{"group_index": hash(g), "response_length": n, "reward": float(c)} for g, n, c in rollouts(2)]
    torch.save({"samples": samples}, tmp_path / "1.pt")
    lines = [{"group_id": g, "length": n, "correct": c} for g, n, c in rollouts(3)]
    lines.append({"group_id": "x", "correct": True})
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["analyze", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "96 rollouts in 2 files, 24 whole groups of 4" in printed and "1 records without a length" in printed
    write_jsonl(tmp_path / "3.jsonl", rollouts(4))
    assert main(["analyze", str(tmp_path)]) != 0
    assert "3.jsonl in characters; allowed is one unit" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([{"input": "a", "output": "b"}], "needed are a group"),
        ([{"input": "a", "output": "b", "score": 0.3}] * 2, "--correct-above"),
        ([{"input": f"a{i}", "output": "b", "score": 1} for i in range(3)], "no prompt has more than one"),
    ],
)
def test_a_dump_that_cannot_be_read_is_refused(tmp_path, lines, match):
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=match):
        read(tmp_path)


def test_each_torch_file_is_loaded_once(tmp_path, capsys, monkeypatch):
    from megatron_daro.workshop.analyze import rows

    for step in range(2):
        samples = [{"group_index": i // K, "response_length": 10, "reward": float(i % 2)} for i in range(4 * K)]
        torch.save({"samples": samples}, tmp_path / f"{step}.pt")
    loaded, load = [], rows.load_torch_file
    monkeypatch.setattr(rows, "load_torch_file", lambda path: loaded.append(path.name) or load(path))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "8 whole groups" in capsys.readouterr().out
    assert loaded == ["0.pt", "1.pt"]


def test_a_torn_line_is_named(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"input": ')
    with pytest.raises(DataError, match=r"1\.jsonl:49 is no JSON"):
        read(tmp_path)


def test_the_command_prints_tables_and_writes_a_page(verl_folder, tmp_path_factory, capsys):
    page, folder = verl_folder / "page.html", tmp_path_factory.mktemp("tokens")
    for step in range(1, 12):
        lines = [{"group_id": g, "length": n, "correct": c} for g, n, c in rollouts(step)]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cost = ["--tokens-per-gpu-hour", "1000"]
    assert main(["analyze", str(verl_folder), *cost]) == 2
    assert "lengths in characters; allowed with lengths in tokens" in " ".join(capsys.readouterr().err.split())
    arguments = ["analyze", str(folder), "--html", str(page), *cost]
    assert main([*arguments, "--daro", "magnitude=token"]) == 0
    printed = capsys.readouterr().out
    assert "528 rollouts in 11 files, 132 whole groups of 4" in printed
    assert "GPU-hours" in printed
    assert "maxrl" in page.read_text() and "What to try" in page.read_text()
    assert main([*arguments, "--daro", "magnitude=tokens"]) == 2
    assert "--daro" in capsys.readouterr().err


def test_named_columns_and_a_threshold(tmp_path, capsys):
    lines = [{"q": g, "n": n, "r": 0.9 if c else 0.2} for g, n, c in rollouts(1)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["analyze", str(tmp_path), "--columns", "group=q,length=n,right=r", "--correct-above", "0.5"]
    assert main(arguments) == 0
    assert "12 whole groups of 4" in capsys.readouterr().out


def test_verdicts_of_minus_one_are_wrong_answers(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1))
    signed = [{"input": g, "output": "x" * n, "score": 1 if c else -1} for g, n, c in rollouts(1)]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in signed))
    zero, minus = (read(tmp_path / name) for name in ("1.jsonl", "2.jsonl"))
    assert torch.equal(zero.total.right_tokens, minus.total.right_tokens)
    assert torch.equal(zero.total.groups, minus.total.groups)


def test_a_negative_loss_has_the_weight_of_its_size(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", [(f"p{i // K}", 30 if i % K == 0 else 10, i % K == 0) for i in range(3 * K)])
    view = view_of(read(tmp_path), DaroSection())
    assert float(view.loss[1]) == pytest.approx(-(0.1875**0.5) * 20 / 15)
    assert float(view.weight_rest[1]) == pytest.approx(1 / (0.1875**0.5 * 20 / 15))
    assert float(view_of(read(tmp_path), DaroSection(magnitude="signed")).weight_rest[1]) == 10


def view_for(counts, right=10, wrong=10):
    """Groups per number of right answers."""
    rows = [
        Row((k, i), right if j < k else wrong, j < k) for k, n in enumerate(counts) for i in range(n) for j in range(K)
    ]
    return view_of(read_dump([iter(rows)], K), DaroSection())


def test_the_headline_says_what_was_wasted_and_where_the_gradient_is():
    assert headline(view_for([2, 1, 0, 7, 0]), K, "tokens") == (
        "20.0% of your tokens taught nothing; most of GRPO's gradient comes from problems that were solved 3 of 4 "
        "times."
    )
    spread = headline(view_for([0, 1, 1, 1, 0]), K, "tokens")
    assert "0.0% of your tokens taught nothing; 37%, the largest part, of GRPO's gradient" in spread
    assert headline(view_for([1, 0, 0, 0, 1]), K, "characters") == (
        "100.0% of your characters taught nothing: no group has both right and wrong answers."
    )


@pytest.mark.parametrize(
    ("counts", "lengths", "words"),
    [
        ([4, 1, 1, 1, 0], (10, 10), ["Leave out groups", "never solved"]),
        ([0, 1, 1, 1, 4], (10, 10), ["Leave out groups", "always solved"]),
        ([0, 1, 1, 5, 0], (10, 10), ["times the gradient of another"]),
        ([0, 1, 1, 1, 0], (10, 20), ["2.0 times as long as right ones"]),
        ([0, 1, 1, 1, 0], (10, 10), ["Nothing stands out"]),
    ],
)
def test_advice_follows_from_the_numbers(counts, lengths, words):
    found = advice(view_for(counts, *lengths), K)
    assert len(found) == len(words)
    for text, wanted in zip(found, words, strict=True):
        assert wanted in text


def test_a_line_of_nemo_rl_without_tokens_has_no_length(tmp_path):
    *first, last = nemo_rl_lines(rollouts(1))
    (tmp_path / "train_data_step1.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (*first, last | {"token_ids": [None]}))
    )
    assert read(tmp_path).unreadable == 1


def test_pass_rates_that_teach_nothing_have_no_loss_and_no_weight(tmp_path, capsys):
    lines = [{"g": f"{k}{group}", "n": 7, "c": i < k} for k in range(3) for group in range(3) for i in range(2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["analyze", str(tmp_path), "--columns", "group=g,length=n,right=c"]) == 0
    printed = [re.findall(r"[^\s│┃]+", line) for line in capsys.readouterr().out.splitlines()]
    cells = {words[0]: len(words) for words in printed if words and re.fullmatch(r"\d/2", words[0]) and len(words) > 2}
    of_one_length, of_both_lengths, learnt = 4, 5, 3  # pass rate, groups, tokens, and the lengths there are
    assert {rate: cells.get(rate) for rate in ("0/2", "2/2")} == dict.fromkeys(("0/2", "2/2"), of_one_length), printed
    first_tables = next(words for words in printed if words and words[0] == "1/2")
    assert len(first_tables) == of_both_lengths + learnt


def test_conversations_are_counted_by_turn_and_by_what_was_generated(tmp_path, capsys):
    two = [{"observed": 0, "generated": 5}, {"observed": 30, "generated": 7}]
    said = [{"reward": r, "tool_calls": 1, "tool_errors": i, "seconds": 0.5 + i} for i, r in enumerate((0.25, 1.0))]
    table = {
        "group_id": [1] * K,
        "length": [42, 42, 9, 9],
        "correct": [True, False, True, False],
        "turns": [two, two, None, None],
        "reports": [said, said, None, None],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "step_000001.parquet")
    dump = read(tmp_path)
    assert dump.total.right_tokens[2] == dump.total.wrong_tokens[2] == 12 + 9
    assert dump.turns == [TurnSums(2, 0, 10, 2, 0, 0.5, 1.0), TurnSums(2, 60, 14, 2, 2, 2.0, 3.0)]
    del table["reports"]
    parquet.write_table(pyarrow.table(table), tmp_path / "step_000002.parquet")
    assert read(tmp_path).turns[1] == TurnSums(4, 120, 28, 2, 2, 2.0, 3.0)
    assert main(["analyze", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "30.0" in capsys.readouterr().out and "rollouts that have it" in (tmp_path / "page.html").read_text()


def test_answers_that_reflect_are_counted_file_by_file(tmp_path, capsys):
    said = ["so 2", "Let me reconsider", "I DOUBLE-CHECK", "so 3"]
    for step in (1, 2):
        rows = [{"input": f"p{g}", "output": said[i], "score": float(i == step)} for g in range(3) for i in range(4)]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["analyze", str(tmp_path), "--reflection"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"1\.jsonl\W+12\W+50\.0%\W+50\.0%\W+0\.0%", shown)
    table = pyarrow.table({"group_id": [1, 1], "length": [3, 4], "correct": [True, False]})
    parquet.write_table(table, tmp_path / "step.parquet")
    assert main(["analyze", str(tmp_path / "step.parquet"), "--reflection"]) == 1
    assert "--reflection needs answers as text: one of text, output" in capsys.readouterr().err
