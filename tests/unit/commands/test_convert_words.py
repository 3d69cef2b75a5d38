"""`megatron-daro convert`: what its options become, what is printed, and the bars of progress; nothing is converted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_daro.cli import main
from megatron_daro.commands import convert
from megatron_daro.convert import plan
from megatron_daro.errors import ConfigError
from megatron_daro.workshop.convert import average, conversion, forward_check, model_config


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "mg", "cf"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def planned(folders, monkeypatch):
    """Plans that are asked for, and conversions that are carried out."""
    calls = []
    monkeypatch.setattr(
        plan, "plan_to_megatron", lambda *given, **named: calls.append(("to_megatron", given, named)) or "m"
    )
    monkeypatch.setattr(plan, "plan_to_hf", lambda *given: calls.append(("to_hf", given)) or "h")
    monkeypatch.setattr(model_config, "find_config", lambda path: calls.append(("find", path)) or Path("found"))
    monkeypatch.setattr(convert, "_carry_out", lambda *given, **named: calls.append(("carry_out", given, named)))
    monkeypatch.setattr(convert, "_start_workers_early", lambda number: calls.append(("start", number)) or number)
    return calls


def test_a_hugging_face_model_becomes_megatrons(planned):
    assert main(["convert", "--hf", "hf", "--out", "o", "--processes", "3", "--dtype", "bf16", "--verify"]) == 0
    assert planned == [
        ("start", 3),
        ("to_megatron", (Path("hf"), "daro", "bf16"), {"per_layer_keys": False}),
        ("carry_out", ("m", Path("o")), {"processes": 3, "verify": True}),
    ]
    planned.clear()
    assert main(["convert", "--hf", "hf", "--out", "o", "--format", "torch_dist", "--per-layer-keys"]) == 0
    assert planned[1] == ("to_megatron", (Path("hf"), "torch_dist", None), {"per_layer_keys": True})
    assert 1 <= planned[0][1] <= 4 and planned[2][2]["verify"] is False


@pytest.mark.parametrize(("cores", "processes"), [(None, 1), (2, 2), (64, 4)])
def test_processes_are_as_many_as_cores_and_at_most_four(planned, monkeypatch, cores, processes):
    monkeypatch.setattr(convert.os, "cpu_count", lambda: cores)
    assert main(["convert", "--hf", "hf", "--out", "o"]) == 0
    assert planned[0] == ("start", processes)


def test_a_megatron_checkpoint_becomes_hugging_faces_or_another_of_its_own(planned):
    assert main(["convert", "--megatron", "mg", "--out", "o", "--max-shard-size", "1MB", "--dtype", "fp32"]) == 0
    assert planned[1:3] == [("find", Path("mg")), ("to_hf", (Path("mg"), Path("found"), "fp32", 10**6))]
    planned.clear()
    assert main(["convert", "--megatron", "mg", "--out", "o", "--hf-config", "cf", "--format", "daro"]) == 0
    options = {"per_layer_keys": False, "megatron_config": Path("cf")}
    assert planned[1] == ("to_megatron", (Path("mg"), "daro", None), options)
    planned.clear()
    assert main(["convert", "--megatron", "mg", "--out", "o", "--format", "hf", "--hf-config", "cf"]) == 0
    assert planned[1] == ("to_hf", (Path("mg"), Path("cf"), None, 5 * 10**9))


def test_a_dry_run_starts_no_process_and_says_what_would_be_written(planned, monkeypatch, capsys):
    looked = []
    monkeypatch.setattr(conversion, "replaceable", lambda out: looked.append(out))
    monkeypatch.setattr(convert, "_announcement", lambda *given: f"{given}")
    assert main(["convert", "--hf", "hf", "--out", "o", "--dry-run"]) == 0
    assert [call[0] for call in planned] == ["to_megatron"] and looked == [Path("o")]
    assert capsys.readouterr().out == f"('m', {Path('o')!r})\n"


def test_what_is_left_out_is_announced_without_extra_states():
    names = ("a._extra_state", *(f"n{i}" for i in range(12)))
    found = convert._announcement(
        SimpleNamespace(ignored=names, num_tensors=3, num_bytes=1_234_000_000, jobs=[1, 2], format="hf", source="s"),
        Path("o"),
    )
    assert found.splitlines() == [
        "would write o: 3 tensors, 1.23 GB in 2 files, format hf",
        "from s; every tensor of config.json is there with its shape",
        *(f"left out: n{i}" for i in range(10)),
    ]


def test_several_workers_are_forked_from_one_that_has_imported(monkeypatch):
    calls = []
    monkeypatch.setattr(convert, "use_own_sockets", lambda: calls.append("sockets"))
    monkeypatch.setattr(convert.multiprocessing, "set_forkserver_preload", calls.append)
    monkeypatch.setattr(convert.forkserver, "ensure_running", lambda: calls.append("running"))
    assert convert._start_workers_early(1) == 1 and calls == []
    assert convert._start_workers_early(2) == 2
    assert calls == ["sockets", ["megatron_daro.workshop.convert.conversion"], "running"]


def test_a_mean_is_written_alone(folders, monkeypatch, capsys):
    calls = []
    for name, size in (("a", 3), ("b", 5)):
        (folders / name).mkdir()
        (folders / name / "x.safetensors").write_bytes(bytes(size))
        (folders / name / "y.txt").write_bytes(bytes(100))
    sizes = []
    bar = convert._ProgressBar
    monkeypatch.setattr(convert, "_ProgressBar", lambda size: sizes.append(size) or bar(size))
    monkeypatch.setattr(average, "average", lambda *given, **named: calls.append((given, named)) or 1_500_000_000)
    sources = ["--average", "a", "--average", "b"]
    assert main(["convert", *sources, "--weights", "0.25,0.75", "--out", "o", "--max-shard-size", "2KB"]) == 0
    ((given, named),) = calls
    assert given == ([Path("a"), Path("b")], average.read_weights("0.25,0.75", 2), Path("o")) and sizes == [3]
    assert named.pop("progress").__name__ == "show" and named == {"max_shard_bytes": 2000}
    assert capsys.readouterr().out == "written: o, 1.50 GB: 0.25 x a + 0.75 x b\n"
    everything = "--hf hf --megatron mg --hf-config cf --format hf --dtype bf16 --per-layer-keys --verify --dry-run"
    assert main(["convert", *sources, "--out", "o", *everything.split()]) == 2
    names = ", ".join(word for word in everything.split() if word.startswith("--"))
    assert f"--average: got it with {names}; allowed: alone;" in capsys.readouterr().err
    assert main(["convert", "--weights", "1", "--out", "o"]) == 2 and len(calls) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("1k", 1000), ("1 KiB", 1024), ("1.5MB", 1_500_000), ("1MiB", 2**20), ("0.1", 1), ("2g", 2 * 10**9)],
)
def test_sizes_have_units(text, number):
    assert convert.parse_size(text) == number


@pytest.mark.parametrize(
    ("hf", "megatron", "words"),
    [(None, None, "convert: give one of --hf DIR"), (Path("hf"), Path("mg"), "convert: give one of --hf DIR")],
)
def test_there_is_one_source(folders, hf, megatron, words):
    with pytest.raises(ConfigError, match=words):
        convert.make_plan(
            hf, megatron, hf_config=None, format_=None, dtype=None, max_shard_size="1", per_layer_keys=False
        )


def test_a_folder_that_is_none_is_said_with_the_one_around_a_file(folders, capsys):
    (folders / "hf" / "f").touch()
    assert main(["convert", "--hf", "hf/f", "--out", "o"]) == 2
    assert "--hf: got 'hf/f', which is a file; allowed: a directory; fix: give 'hf'\n" in capsys.readouterr().err
    assert main(["convert", "--megatron", "x", "--out", "o"]) == 2
    assert "--megatron: got 'x', which is not there; allowed: a directory\n" in capsys.readouterr().err


class Card:
    """Of a conversion."""

    num_bytes, source, format = 2_500_000_000, "s", "hf"

    def summary(self):
        return [("decoder.layers.0." + "x" * 60, 12, "[3, 4]", "bf16", "cut", "hashed")]


@pytest.mark.parametrize("verify", [False, True])
def test_a_conversion_prints_its_card_and_what_the_forward_pass_said(monkeypatch, capsys, verify):
    calls = []
    monkeypatch.setattr(convert, "_forward_check", lambda *given: f"forward {given}")

    def carry_out(plan, out, *, processes, verify, progress, last_check):
        calls.append((plan.num_bytes, out, processes, verify))
        progress("write", 5)
        if last_check:
            last_check(Path("written"))
        return Card()

    monkeypatch.setattr(conversion, "convert", carry_out)
    monkeypatch.delenv("COLUMNS", raising=False)
    convert._carry_out(SimpleNamespace(num_bytes=10), Path("o"), processes=3, verify=verify)
    assert calls == [(10, Path("o"), 3, verify)]
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith(("written: ", "forward "))]
    assert said[0] == "written: o, 2.50 GB; every tensor with its hashes: o/conversion.json"
    assert len(said) == 1 + verify and (not verify or ("num_bytes=10" in said[1] and "written" in said[1]))
    table = "\n".join(lines)
    assert lines[0].strip() == "s -> hf" and lines[0].startswith("s"), "a title on the left"
    assert all(word in table for word in ("Megatron parameter", "how many", "12", "[3, 4]", "bf16", "cut", "hashed"))
    assert max(map(len, lines[:6])) > 100 and "…" not in table and table.count("x") >= 60


def test_a_bar_is_made_for_each_phase_and_ends_at_its_whole():
    with convert._ProgressBar(10) as bar:
        assert bar._bar.live.is_started and bar._bar.console.stderr
        bar.show("read", 4)
        bar.show("read", 15)
        bar.show("write", 3)
        assert [(task.description, task.completed, task.total) for task in bar._bar.tasks] == [
            ("read", 10, 10),
            ("write", 3, 10),
        ]
        assert len(bar._bar.columns) == 5
    assert not bar._bar.live.is_started


@pytest.mark.parametrize(
    ("source", "target", "compared"),
    [("hf", "daro", ("s", "w")), ("daro", "hf", ("w", "s")), ("daro", "torch_dist", None)],
)
def test_the_forward_pass_of_both_is_compared_where_one_is_hugging_faces(monkeypatch, source, target, compared):
    calls = []
    monkeypatch.setattr(forward_check, "compare_logits", lambda *given: calls.append(given) or "said")
    made = SimpleNamespace(format=target, source_format=source, source="s", cast="bf16")
    said = convert._forward_check(made, "w")
    assert calls == ([(*compared, "bf16")] if compared else [])
    both = "forward pass not compared: both are Megatron checkpoints, and every tensor is the same"
    assert said == ("said" if compared else both)
