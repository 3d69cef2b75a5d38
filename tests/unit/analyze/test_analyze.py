"""`megatron-daro analyze`: its numbers against sums written out, over formats, and what is refused."""

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

from megatron_daro.algo.difficulty_weights import DifficultyWeights
from megatron_daro.algo.weighting import ALGORITHMS
from megatron_daro.cli import main

K = 4
INNER = range(1, K)
STEPS = range(1, 12)


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


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_jsonl(path, rows):
    """As verl does."""
    write_lines(path, [{"input": g, "output": "x" * n, "score": float(c)} for g, n, c in rows])


@pytest.fixture
def verl_folder(tmp_path):
    for step in STEPS:
        write_jsonl(tmp_path / f"{step}.jsonl", rollouts(step))
    return tmp_path


@pytest.fixture
def printed(capsys):
    """Runs the command; what it prints, in one line."""

    def run(path, *options):
        assert main(["analyze", str(path), *options]) == 0
        run.lines = capsys.readouterr().out.splitlines()
        return " ".join(" ".join(run.lines).split())

    return run


@pytest.fixture
def table(printed):
    """The numbers printed for each pass rate: groups, tokens, mean lengths, then loss and weights where there are."""

    def of(path, *options):
        printed(path, *options)
        rows = {}
        for line in printed.lines:
            first, *numbers = re.findall(r"-?\d[\d./]*", line.replace(",", "")) or [""]
            if re.fullmatch(r"\d+/\d+", first) and len(numbers) > 2:
                rows.setdefault(first, list(map(float, numbers)))
        return rows

    return of


@pytest.fixture
def traces(tmp_path_factory):
    """The numbers of the page's figures: name -> {pass rate in right answers: value}."""

    def of(path, *options):
        page = tmp_path_factory.mktemp("page") / "page.html"
        assert main(["analyze", str(path), "--html", str(page), *options]) == 0
        (figures,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.S)
        found = {}
        for figure in json.loads(figures):
            for trace in figure["data"]:
                values = dict(zip(trace["x"], trace["y"], strict=True))
                found |= dict.fromkeys(trace["name"].split(", "), values)
        return found

    return of


def refused(capsys, path, *options):
    """The command's exit status and its words."""
    code = main(["analyze", str(path), *options])
    return code, " ".join(capsys.readouterr().err.split())


class Sums:
    """Of rollouts, answer by answer: tokens, sums of loss (-A at ratio 1) and of |A|, mean lengths, for each bin."""

    def __init__(self, rows):
        rights = {}
        for group, _, right in rows:
            rights[group] = rights.get(group, 0) + right
        self.lengths = {(k, right): [] for k in range(K + 1) for right in (False, True)}
        self.tokens, self.losses, self.sizes, self.groups = ([0.0] * (K + 1) for _ in range(4))
        for group, length, right in rows:
            k = rights[group]
            self.groups[k] += 1 / K
            self.tokens[k] += length
            self.lengths[k, right].append(length)
            if 0 < k < K:
                advantage = (right - k / K) / math.sqrt(k / K * (1 - k / K))
                self.losses[k] -= advantage * length
                self.sizes[k] += abs(advantage) * length


EVERYTHING = [row for step in STEPS for row in rollouts(step)]


def test_groups_tokens_lengths_and_losses_are_those_written_out(verl_folder, table):
    found, sums = table(verl_folder), Sums(EVERYTHING)
    for k in range(K + 1):
        means = [np.mean(sums.lengths[k, right]) for right in (True, False) if sums.lengths[k, right]]
        groups, tokens, *rest = found[f"{k}/{K}"]
        assert (groups, tokens) == (round(sums.groups[k]), sums.tokens[k])
        assert rest[: len(means)] == pytest.approx(means, abs=0.5)
        learnt = rest[len(means) :]  # loss, and the two weights: none where a pass rate teaches nothing
        assert len(learnt) == (3 if k in INNER else 0)
        if learnt:
            assert learnt[0] == pytest.approx(sums.losses[k] / sums.tokens[k], abs=5e-4)


def test_shares_are_the_masses_of_coefficients_and_advantages(verl_folder, traces):
    found, sums = traces(verl_folder, "--daro", "magnitude=token"), Sums(EVERYTHING)
    assert set(ALGORITHMS) <= set(found)
    # With magnitude "token" and weights at rest every difficulty has the same mass: the point of the method.
    assert list(found["daro"].values()) == pytest.approx([1 / (K - 1)] * (K - 1), abs=1e-4)
    # Each rule's factor of the centred reward, written out.
    factors = {
        "dr_grpo": lambda mu: 1,
        "grpo": lambda mu: 1 / math.sqrt(mu * (1 - mu)),
        "maxrl": lambda mu: 1 / mu,
        "f_grpo": lambda mu: (1 - mu) / math.sqrt(mu * (1 - mu)),
        "mgpo": lambda mu: (
            math.exp(-mu * math.log(2 * mu) - (1 - mu) * math.log(2 * (1 - mu))) / math.sqrt(mu * (1 - mu))
        ),
        "dgpo": lambda mu: math.exp(-mu / 2) / (mu * (1 - mu)),
    }
    for name, factor in factors.items():
        masses = [factor(k / K) * sums.sizes[k] * math.sqrt(k / K * (1 - k / K)) for k in INNER]
        expected = [mass / sum(masses) for mass in masses]
        assert [found[name][k] for k in INNER] == pytest.approx(expected, abs=1e-4), name


@pytest.mark.parametrize("magnitude", ["abs", "advantage"])
def test_weights_at_rest_follow_from_the_measure(verl_folder, traces, magnitude):
    found, sums = traces(verl_folder, "--daro", f"magnitude={magnitude}")["at rest"], Sums(EVERYTHING)
    of = {"abs": [abs(loss) for loss in sums.losses], "advantage": sums.sizes}[magnitude]
    expected = [min(max(sums.tokens[k] / of[k], 0.1), 10.0) for k in INNER]
    assert [found[k] for k in INNER] == pytest.approx(expected, rel=1e-4)


def test_a_negative_loss_has_the_weight_of_its_size(tmp_path, traces, table):
    write_jsonl(tmp_path / "1.jsonl", [(f"p{i // K}", 30 if i % K == 0 else 10, i % K == 0) for i in range(3 * K)])
    loss = -(0.1875**0.5) * 20 / 15
    assert table(tmp_path)["1/4"][4] == pytest.approx(loss, abs=5e-4)
    assert traces(tmp_path)["at rest"][1] == pytest.approx(-1 / loss, rel=1e-4)
    assert traces(tmp_path, "--daro", "magnitude=signed")["at rest"][1] == 10


def test_weights_learnt_are_those_of_the_algorithm_step_by_step(verl_folder, traces):
    """Steps are files in the order of their numbers: 2 before 10."""
    weights = DifficultyWeights(K, learning_rate=0.1)
    for step in STEPS:
        sums = Sums(rollouts(step))
        weights.update(*(torch.tensor(values, dtype=torch.float64) for values in (sums.losses, sums.tokens)))
    found = traces(verl_folder, "--daro", "learning_rate=0.1")["learnt"]
    assert [found[k] for k in INNER] == pytest.approx(weights.weights[1:K].tolist(), rel=1e-4)


def test_what_taught_nothing_is_summed_and_has_its_cost(verl_folder, tmp_path_factory, printed, capsys):
    folder, sums = tmp_path_factory.mktemp("tokens"), Sums(EVERYTHING)
    for step in STEPS:
        lines = [{"group_id": g, "length": n, "correct": c} for g, n, c in rollouts(step)]
        write_lines(folder / f"{step}.jsonl", lines)
    wasted = sums.tokens[0] + sums.tokens[K]
    text = printed(folder, "--tokens-per-gpu-hour", "1000")
    assert "528 rollouts" in text and "11 files" in text and "132 whole groups" in text
    assert {f"{wasted:.0f}", f"{wasted / 1000:.1f}"} <= set(re.findall(r"\d+(?:\.\d+)?", text))
    assert f"{100 * wasted / sum(sums.tokens):.1f} %" in text
    page = folder / "page.html"
    assert main(["analyze", str(folder), "--html", str(page)]) == 0
    assert f"{100 * wasted / sum(sums.tokens):.1f}%" in page.read_text()
    capsys.readouterr()
    code, words = refused(capsys, verl_folder, "--tokens-per-gpu-hour", "1000")  # lengths in characters
    assert code == 2 and "--tokens-per-gpu-hour" in words
    code, words = refused(capsys, folder, "--daro", "magnitude=tokens")
    assert code == 2 and "magnitude" in words


def test_text_of_a_dump_is_escaped_on_the_page(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", rollouts(1))
    assert main(["analyze", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def slime_samples(rows):
    return [{"group_index": hash(g), "response_length": n, "reward": float(c)} for g, n, c in rows]


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


def test_dumps_of_every_framework_say_the_same(tmp_path, table, capsys):
    rows, folders = rollouts(3), {}
    for name in ("verl", "signed", "parquet", "slime", "nemo_rl", "roll"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    write_jsonl(folders["verl"] / "1.jsonl", rows)
    signed = [{"input": g, "output": "x" * n, "score": 1 if c else -1} for g, n, c in rows]
    write_lines(folders["signed"] / "1.jsonl", signed)
    columns = {"group_id": [hash(g) for g, _, _ in rows], "length": [n for _, n, _ in rows]}
    columns |= {"correct": [c for _, _, c in rows], "used": ["trained"] * len(rows)}
    parquet.write_table(pyarrow.table(columns), folders["parquet"] / "step_000001.parquet")
    torch.save({"rollout_id": 0, "samples": slime_samples(rows)}, folders["slime"] / "0.pt")
    write_lines(folders["nemo_rl"] / "train_data_step1.jsonl", nemo_rl_lines(rows))
    # Of validation, which is no training.
    (folders["nemo_rl"] / "val_data_step1.jsonl").write_text('{"content": ["x"], "rewards": [0.5]}\n')
    (folders["parquet"] / "eval_000001.parquet").touch()
    write_lines(folders["roll"] / "rollout_dump_data.step_1.jsonl", [roll_line(rows)])
    first, *others = (table(folder) for folder in folders.values())
    assert set(first) == {f"{k}/{K}" for k in range(K + 1)} and others == [first] * len(others)
    write_lines(folders["roll"] / "rollout_dump_data.step_1.jsonl", [roll_line(rows) | {"scores": [1.0]}])
    code, words = refused(capsys, folders["roll"])
    assert code == 1 and "step_1.jsonl:1" in words and "scores" in words


def test_what_is_not_whole_is_counted_and_left_out(tmp_path, printed):
    rows = [{"input": g, "output": "x" * n, "acc": c} for g, n, c in rollouts(1)]
    rows += [{"input": g, "output": "x" * n, "acc": c, "used": "dropped"} for g, n, c in rollouts(2)]
    rows[0] |= {"acc": None}
    rows[1] |= {"output": None}
    write_lines(tmp_path / "1.jsonl", rows)
    incomplete = len({rows[0]["input"], rows[1]["input"]})
    text = printed(tmp_path)
    assert f"{12 - incomplete} whole groups" in text and f"{incomplete} incomplete groups" in text
    assert "1 rollouts without a verdict" in text and "1 records without a group or a length" in text


def test_a_prompt_may_come_up_again_once_its_group_is_whole(tmp_path, printed):
    write_jsonl(tmp_path / "1.jsonl", [*rollouts(1), *rollouts(1)])
    assert "24 whole groups of 4" in printed(tmp_path, "--rollouts-per-prompt", "4")


def test_prompts_that_come_twice_do_not_double_k_in_silence(tmp_path, printed, capsys):
    """Prompt by prompt the file shows it; in another order only the user can say."""
    one = sorted(rollouts(1), key=lambda row: row[0])
    write_jsonl(tmp_path / "1.jsonl", [*one, *one])
    code, words = refused(capsys, tmp_path)
    assert code == 1 and "--rollouts-per-prompt 8 or 4" in words
    assert "24 whole groups of 4" in printed(tmp_path, "--rollouts-per-prompt", "4")
    write_jsonl(tmp_path / "1.jsonl", sorted([*one, *one], key=lambda row: row[1]))
    assert re.search(r"K = 8.*--rollouts-per-prompt.*12 whole groups of 8", printed(tmp_path))
    assert "K =" not in printed(tmp_path, "--rollouts-per-prompt", "8")


def test_a_blank_line_and_a_byte_order_mark_are_no_damage(tmp_path, table):
    write_jsonl(tmp_path / "1.jsonl", rollouts(1))
    expected = table(tmp_path)
    text = (tmp_path / "1.jsonl").read_text()
    (tmp_path / "1.jsonl").write_text("\ufeff\n" + text.replace("\n", "\n\n") + " \r\n")
    assert table(tmp_path) == expected


class Runs:
    """Unpickled by pickle it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Kept(dict):
    """A mapping of a framework's own class."""


def test_what_a_torch_file_names_is_never_run_and_read_past(tmp_path, table, capsys):
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
    write_jsonl(tmp_path / "same.jsonl", rows)
    assert table(path, "--reward-key", "score") == table(tmp_path / "same.jsonl")
    assert not made.exists()
    for options in ((), ("--reward-key", "acc")):
        code, words = refused(capsys, path, *options)
        assert code == 1 and "--reward-key" in words and "score" in words


def torn_zip(path, **content):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(f"0/{name}", data)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("0.pt", lambda path: path.write_bytes(b"no archive")),
        ("0.pt", lambda path: torch.save({"samples": [1.0]}, path)),
        ("0.pt", lambda path: torn_zip(path, **{"constants.pkl": b""})),  # TorchScript
        ("0.pt", lambda path: torn_zip(path, **{"data.pkl": b"\x80\x02}q", "version": b"3"})),
        ("step_000001.parquet", lambda path: path.write_bytes(b"PAR1 and no more")),
        ("1.jsonl:49", lambda path: path.write_bytes(path.read_bytes() + b'{"input": "\xff"}\n')),
        ("1.jsonl:49", lambda path: path.write_bytes(path.read_bytes() + b'{"input": ')),
        *((name, lambda path: (path.unlink(), os.mkfifo(path))) for name in ("0.jsonl", "0.pt", "0.parquet")),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, name, write):
    path = tmp_path / name.partition(":")[0]
    write_jsonl(path, rollouts(1))
    write(path)
    code, words = refused(capsys, tmp_path)
    assert code == 1 and name in words


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([{"input": "a", "output": "b"}], "input, output"),
        ([{"input": "a", "output": "b", "score": 0.3}] * 2, "--correct-above"),
        ([{"input": "a", "output": "b", "score": 2}] * 2, "score"),
        ([{"input": f"a{i}", "output": "b", "score": 1} for i in range(3)], "--columns group="),
        ([], "1.jsonl"),
    ],
)
def test_a_dump_that_says_too_little_is_refused(tmp_path, capsys, lines, named):
    write_lines(tmp_path / "1.jsonl", lines)
    code, words = refused(capsys, tmp_path)
    assert code == 1 and named in words


def test_columns_can_be_named_and_verdicts_have_a_threshold(tmp_path, table):
    """A chat is a group; lengths are numbers, or lists of tokens."""
    rows = rollouts(1)
    write_jsonl(tmp_path / "same.jsonl", rows)
    expected = table(tmp_path / "same.jsonl")
    for number, length in enumerate((int, str, lambda n: [1] * n)):
        chats = [[{"role": "user", "content": g}] for g, _, _ in rows]
        lines = [{"q": q, "n": length(n), "r": 0.9 if c else 0.2} for q, (_, n, c) in zip(chats, rows, strict=True)]
        write_lines(tmp_path / f"{number}.jsonl", lines)
        options = ["--columns", "group=q,length=n,right=r", "--correct-above", "0.5"]
        assert table(tmp_path / f"{number}.jsonl", *options) == expected


def test_of_a_chat_the_assistants_characters_are_counted_and_not_its_messages(tmp_path, table, capsys):
    """As TRL writes completions of chats."""
    rows = rollouts(1)
    write_jsonl(tmp_path / "same.jsonl", rows)
    chats = [
        [{"role": "assistant", "content": "x" * (n // 2)}, {"role": "tool", "content": "said"}]
        + [{"role": "assistant", "content": "x" * (n - n // 2)}]
        for _, n, _ in rows
    ]
    path = tmp_path / "completions.parquet"
    named = {"prompt": [g for g, _, _ in rows], "completion": chats, "reward": [float(c) for *_, c in rows]}
    parquet.write_table(pyarrow.table(named | {"ids": [[1] * n for _, n, _ in rows]}), path)
    options = "group=prompt,right=reward,length="
    assert table(path, "--columns", options + "len(completion)") == table(tmp_path / "same.jsonl")
    code, words = refused(capsys, path, "--columns", options + "completion")
    assert code == 1 and "length=len(completion)" in words
    code, words = refused(capsys, path, "--columns", options + "len(ids)")
    assert code == 1 and "length=ids" in words
    lines = [{"prompt": "a", "completion": [{"role": "assistant", "content": None}], "reward": i} for i in range(2)]
    write_lines(tmp_path / "calls.jsonl", lines)
    code, words = refused(capsys, tmp_path / "calls.jsonl", "--columns", options + "len(completion)")
    assert code == 1 and "text as content" in words


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("group", "length", "right", "named"),
    [
        ('"a"', "9" * 400, "1", "n: got 999"),
        ('"a"', "3", "9" * 400, "r: got 999"),
        ('"a"', "3", "NaN", "r: got nan"),
        ('"a"', DEEP, "1", "a.jsonl:2"),
        (DEEP, "3", "1", "a.jsonl:2"),
    ],
)
def test_a_value_beyond_what_can_be_read_is_named(tmp_path, capsys, group, length, right, named):
    lines = ('{"q": "a", "n": 3, "r": 0}', f'{{"q": {group}, "n": {length}, "r": {right}}}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for options in ((), ("--correct-above", "0.5")):
        code, words = refused(capsys, tmp_path, "--columns", "group=q,length=n,right=r", *options)
        assert code == 1 and named in words and "Traceback" not in words


def test_a_group_nested_without_end_in_a_torch_file_is_named(tmp_path, capsys):
    """{"samples": [{"q": [[...]], "n": 3, "r": 1}]} in opcodes: pickle's own writer would need as deep a stack."""
    depth = 100_000
    group = b"X\1\0\0\0q" + b"]" * depth + b"a" * (depth - 1) + b"s"
    rest = b"X\1\0\0\0nK\3sX\1\0\0\0rK\1s"
    data = b"\x80\2}X\7\0\0\0samples]}" + group + rest + b"as."
    torn_zip(tmp_path / "0.pt", **{"data.pkl": data, "version": b"3", "byteorder": b"little"})
    code, words = refused(capsys, tmp_path, "--columns", "group=q,length=n,right=r")
    assert code == 1 and "0.pt, record 1" in words


@pytest.mark.parametrize(
    "option",
    ["groups=q,length=n,right=r", "input", "group=", "group=q,group=p", "group=q,,right=r"],
)
def test_columns_that_name_nothing_known_are_refused(tmp_path, capsys, option):
    write_lines(tmp_path / "a.jsonl", [{"q": g, "n": n, "r": c} for g, n, c in rollouts(1)])
    code, words = refused(capsys, tmp_path, "--columns", option)
    assert code == 2 and "group=A" in words


def test_a_rollout_without_a_group_belongs_to_none(tmp_path, printed):
    lines = [{"input": g, "output": "x" * n, "score": float(c)} for g, n, c in rollouts(1)]
    write_lines(tmp_path / "1.jsonl", [*lines, *({"output": "x", "score": 1.0} for _ in range(K))])
    text = printed(tmp_path)
    assert "12 whole groups of 4" in text and f"{K} records without a group or a length" in text


@pytest.mark.parametrize("length", ["57 tok", True, -1, float("nan")])
def test_what_is_no_length_is_refused(tmp_path, capsys, printed, length):
    write_lines(tmp_path / "a.jsonl", [{"q": "a", "n": length, "r": i} for i in range(2)])
    code, words = refused(capsys, tmp_path, "--columns", "group=q,length=n,right=r")
    assert code == 1 and "len(n)" in words
    if isinstance(length, str):  # where one says so
        assert "1 whole groups of 2" in printed(tmp_path, "--columns", "group=q,length=len(n),right=r")


def test_formats_may_be_mixed_in_a_folder_but_not_units(tmp_path, printed, capsys):
    torch.save({"samples": slime_samples(rollouts(2))}, tmp_path / "1.pt")
    lines = [{"group_id": g, "length": n, "correct": c} for g, n, c in rollouts(3)]
    write_lines(tmp_path / "2.jsonl", lines)
    assert "96 rollouts in 2 files, 24 whole groups of 4" in printed(tmp_path)
    write_jsonl(tmp_path / "3.jsonl", rollouts(4))
    code, words = refused(capsys, tmp_path)
    assert code == 1 and "3.jsonl in characters" in words


def test_conversations_are_counted_by_turn_and_by_what_was_generated(tmp_path, table, printed):
    two = [{"observed": 0, "generated": 5}, {"observed": 30, "generated": 7}]
    said = [{"reward": r, "tool_calls": 1, "tool_errors": i, "seconds": 0.5 + i} for i, r in enumerate((0.25, 1.0))]
    columns = {
        "group_id": [1] * K,
        "length": [42, 42, 9, 9],
        "correct": [True, False, True, False],
        "turns": [two, two, None, None],
        "reports": [said, said, None, None],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "step_000001.parquet")
    assert table(tmp_path)["2/4"][:2] == [1, 2 * (12 + 9)]
    numbers = [re.findall(r"\d[\d.]*", line) for line in printed.lines]
    first, second = ([row for row in numbers if row[:2] == [turn, "2"]] for turn in "12")
    assert len(first) == len(second) == 1 and "30.0" in second[0] and "30.0" not in first[0]


def test_answers_that_reflect_are_counted_file_by_file(tmp_path, printed, capsys):
    said = ["so 2", "Let me reconsider", "I DOUBLE-CHECK", "so 3"]
    for step in (1, 2):
        rows = [{"input": f"p{g}", "output": said[i], "score": float(i == step)} for g in range(3) for i in range(4)]
        write_lines(tmp_path / f"{step}.jsonl", rows)
    assert re.search(r"1\.jsonl\W+12\W+50\.0%\W+50\.0%\W+0\.0%", printed(tmp_path, "--reflection"))
    columns = pyarrow.table({"group_id": [1, 1], "length": [3, 4], "correct": [True, False]})
    parquet.write_table(columns, tmp_path / "step.parquet")
    code, words = refused(capsys, tmp_path / "step.parquet", "--reflection")
    assert code == 1 and "--reflection" in words
