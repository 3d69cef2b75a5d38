"""Recorded rollouts summed per pass rate: against sums written out, over formats, and what is refused."""

from __future__ import annotations

import json
import math
import random

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from megatron_daro.algo.advantages import group_advantages
from megatron_daro.algo.weighting import ALGORITHMS
from megatron_daro.cli import main
from megatron_daro.config.algorithm import DaroSection
from megatron_daro.errors import AlgorithmError, DataError
from megatron_daro.workshop.analyze.rows import choose_columns, files_of, rows_of
from megatron_daro.workshop.analyze.views import infer_rollouts_per_prompt, read_dump, token_loss_sums, view_of

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
    squares, sizes, tokens = torch.zeros(K + 1).double(), torch.zeros(K + 1).double(), torch.zeros(K + 1).double()
    for group, length, right in everything:
        k = rights[group]
        if 0 < k < K:
            advantage = (right - k / K) / math.sqrt(k / K * (1 - k / K))
            squares[k] += advantage**2 * length
            sizes[k] += abs(advantage) * length
        tokens[k] += length
    norms = (squares.sqrt() / tokens)[1:K]
    rest = view_of(dump, DaroSection(magnitude="gradient")).weight_rest[1:K]
    torch.testing.assert_close(rest, norms.mean() / norms, rtol=1e-12, atol=0)
    rest = view_of(dump, DaroSection(magnitude="advantage")).weight_rest[1:K]
    torch.testing.assert_close(rest, (tokens / sizes)[1:K], rtol=1e-12, atol=0)
    with pytest.raises(AlgorithmError, match="length_edges"):
        view_of(dump, DaroSection(length_edges=(10,)))


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


def test_objects_in_a_torch_file_are_never_unpickled(tmp_path):
    torch.save({"samples": [math.inf, object()]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match="never unpickled"):
        read(tmp_path)


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


def test_a_torn_line_is_named(tmp_path):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"input": ')
    with pytest.raises(DataError, match=r"1\.jsonl:49 is no JSON"):
        read(tmp_path)


def test_the_command_prints_tables_and_writes_a_page(verl_folder, capsys):
    page = verl_folder / "page.html"
    arguments = ["analyze", str(verl_folder), "--html", str(page), "--tokens-per-gpu-hour", "1000"]
    assert main([*arguments, "--daro", "magnitude=token"]) == 0
    printed = capsys.readouterr().out
    assert "528 rollouts in 11 files, 132 whole groups of 4" in printed
    assert "GPU-hours" in printed
    assert "maxrl" in page.read_text()
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
