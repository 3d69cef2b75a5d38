"""The command line: what each command prints, its exit codes, and that help stays light."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny_task
import yaml
from weightless import save_weights

import megatron_daro.runtime
from megatron_daro import cli
from megatron_daro.config import Config, resolve
from megatron_daro.controller import RunOutcome
from megatron_daro.errors import NonFiniteError, WorkerError

HEAVY = ("torch", "ray", "megatron", "transformers", "numpy", "yaml", "plotly")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_task.save_tokenizer(directory, tiny_task.SYMBOLS)
    return directory


@pytest.fixture
def config_file(tmp_path: Path, tokenizer: Path) -> Path:
    model, train = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    shape = {"model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(shape))
    save_weights(model)
    shutil.copytree(tokenizer, model, dirs_exist_ok=True)
    train.write_text('{"problem": "1=", "answer": "1"}\n')
    path = tmp_path / "tiny.yaml"
    data = {"train": [str(train)], "prompt_template": "plain"}
    content = {"model": {"path": str(model)}, "data": data, "trainer": {"run_dir": str(tmp_path / "run")}}
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Calls that reach the runtime, in place of Ray; `launched.fail` is raised there if set."""

    class Calls(list):
        fail: BaseException | None = None
        status, step = "finished", 3

    calls = Calls()

    def record(name):
        def function(config: Config, **options):
            calls.append((name, config, options))
            if calls.fail is not None:
                raise calls.fail
            return RunOutcome(calls.status, calls.step)

        return function

    launch = types.ModuleType("megatron_daro.runtime.launch")
    launch.train = record("train")
    monkeypatch.setattr(megatron_daro.runtime, "launch", launch, raising=False)
    monkeypatch.setitem(sys.modules, "megatron_daro.runtime.launch", launch)
    return calls


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    done = run_python(
        f"import sys; from megatron_daro.cli import main; code = main({arguments!r}); "
        f"print('loaded', sorted(set({HEAVY!r}) & set(sys.modules)), code)"
    )
    assert "Usage: megatron-daro" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded [] 0", done.stdout + done.stderr


def test_a_wrong_configuration_loads_no_torch_and_exits_with_2(config_file):
    done = run_python(
        "import sys; from megatron_daro.cli import main; "
        f"code = main(['train', {str(config_file)!r}, 'rollout.rollouts_per_prompt=1', "
        "'actor.sequence_parallel=maybe']); "
        "print('loaded', sorted({'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)), code)"
    )
    assert done.stdout == "loaded [] 2\n"
    assert "Traceback" not in done.stderr
    assert "rollout.rollouts_per_prompt" in done.stderr and "actor.sequence_parallel" in done.stderr


def test_dry_run_prints_a_configuration_file_and_the_checks_and_starts_nothing(config_file, launched, capsys):
    assert cli.main(["train", str(config_file), "trainer.steps=3", "rollout.max_staleness=1", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert not launched
    again = config_file.with_name("again.yaml")
    again.write_text(printed.out)
    assert resolve(again) == resolve(config_file, ["trainer.steps=3", "rollout.max_staleness=1"])
    assert "world size" in printed.out and "1 prompts of up to 2 tokens" in printed.out
    assert not (config_file.parent / "run").exists()
    assert "algorithm.correction.kind" in printed.err


def test_a_dry_run_reads_tokenizer_and_problems_without_loading_ray_or_megatron(config_file):
    done = run_python(
        "import sys; from megatron_daro.cli import main; "
        f"sys.argv[1:] = ['train', {str(config_file)!r}, '--dry-run']; code = main(); "
        "print('loaded', sorted(m for m in ('ray', 'megatron') if sys.modules.get(m)), code)"
    )
    assert done.stdout.splitlines()[-1] == "loaded [] 0" and "1 prompts of up to 2 tokens" in done.stdout
    assert done.stderr == ""


def replaced(path: Path, by) -> None:
    path.unlink()
    by(path)


NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("file", "by", "words"),
    [
        ("model/model.safetensors", os.mkfifo, "is a pipe, a socket or a device"),
        ("model/config.json", os.mkfifo, "is a pipe, a socket or a device"),
        ("model/tokenizer.json", lambda path: path.symlink_to("/dev/zero"), "is a pipe, a socket or a device"),
        ("model/config.json", lambda path: path.write_bytes(NESTED), "config.json cannot be read as JSON"),
        ("model/tokenizer.json", lambda path: path.write_bytes(NESTED), "an unreadable tokenizer.json"),
        (
            "model/model.safetensors",
            lambda path: path.write_bytes(len(NESTED).to_bytes(8, "little") + NESTED),
            "is torn or not a safetensors file",
        ),
        ("train.jsonl", os.mkfifo, "which is not a file"),
        ("train.jsonl", lambda path: path.symlink_to("/proc/kmsg"), "which is an empty file"),
        ("train.jsonl", lambda path: path.symlink_to(path), "which cannot be reached (Too many levels of symbolic"),
    ],
)
def test_what_is_no_file_neither_hangs_nor_ends_in_a_traceback(config_file, file, by, words):
    replaced(config_file.parent / file, by)
    command = [sys.executable, "-m", "megatron_daro", "train", str(config_file), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_dry_run_ends_as_the_start_would(config_file, capsys):
    assert cli.main(["train", str(config_file), "--dry-run", "rollout.stop=['=<eos>']"]) == 1
    assert "rollout.stop" in capsys.readouterr().err.splitlines()[-1]
    assert cli.main(["train", str(config_file), "--dry-run", f"trainer.run_dir={config_file}/run"]) == 2
    assert "trainer.run_dir" in capsys.readouterr().err
    assert cli.main(["train", str(config_file), "--dry-run", "--resume"]) == 2
    assert str(config_file.parent / "run") in capsys.readouterr().err


def test_train_hands_the_configuration_to_the_runtime(config_file, launched, tmp_path):
    arguments = ["train", str(config_file), "trainer.steps=3", "--resume", "--replay", str(tmp_path)]
    assert cli.main(arguments) == 0
    ((name, config, options),) = launched
    assert (name, config.trainer.steps, options) == ("train", 3, {"resume": True, "replay": tmp_path})


@pytest.mark.parametrize(
    ("status", "step", "says"), [("stopped", 3, "step 3"), ("stopped", 0, "step 1"), ("interrupted", 3, "step 3")]
)
def test_a_run_that_a_signal_ended_has_its_own_exit_code(config_file, launched, capsys, status, step, says):
    launched.status, launched.step = status, step
    assert cli.main(["train", str(config_file)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert says in last and ("--resume" in last) == (status == "stopped")


def test_an_interrupted_run_says_to_resume_only_where_it_recorded_something(config_file, launched, capsys, tmp_path):
    launched.status = "interrupted"
    for name in ("metrics.jsonl", "checkpoints/step_000002"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        assert cli.main(["train", str(config_file), f"trainer.run_dir={tmp_path / 'run'}"]) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        assert "--resume" in last and ("step 0" in last) == (name == "metrics.jsonl")


@pytest.mark.parametrize(
    ("error", "code", "last_line"),
    [
        (WorkerError("rank 3 died\n  exit code: -9"), 1, "WorkerError: rank 3 died; exit code: -9"),
        (NonFiniteError("loss is nan at step 4"), 3, "NonFiniteError: loss is nan at step 4"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (WorkerError("model said \x1b[2J\x07"), 1, r"WorkerError: model said \x1b[2J\x07"),
    ],
)
def test_errors_become_exit_codes_with_the_cause_on_the_last_line(
    config_file, launched, capsys, error, code, last_line
):
    launched.fail = error
    assert cli.main(["train", str(config_file)]) == code
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == last_line
    assert "Traceback" not in err


def test_a_package_that_is_not_there_is_a_sentence(tmp_path, monkeypatch, capsys):
    """As in the environment of another framework, which has no plotly."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss/policy": 0.1}\n')
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert cli.main(["report", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "plotly" in last


def test_an_unexpected_error_keeps_its_traceback(config_file, launched):
    launched.fail = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train", str(config_file)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "CONFIG"),
        (["train", "x.yaml", "--dryrun"], "--dry-run"),
        (["tran"], "train"),
        (["eval", "x.yaml"], "--checkpoint"),
        (["train", "/nowhere.yaml"], "/nowhere.yaml"),
        (["train", "/nowhere.yaml", "--replay", "/nowhere"], "--replay"),
        (["report", "/nowhere"], "/nowhere"),
        (["report", __file__], "is no directory"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what(arguments, words, capsys):
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert "check-layout" in shown.out + shown.err


def test_a_job_is_checked_against_the_gpus_of_all_its_nodes(config_file, tmp_path, capsys):
    site = tmp_path / "cluster.yaml"
    site.write_text("{partition: gpu, gpus_per_node: 2, nodes: 2}")
    command = ["submit", str(config_file), "--cluster", str(site), "--dry-run"]
    assert cli.main([*command, "actor.data_parallel=3", "engine.replicas=1"]) == 0
    assert "--nodes=2" in capsys.readouterr().out
    assert cli.main([*command, "actor.data_parallel=8", "engine.replicas=1"]) == 2
    assert "8 GPUs" in capsys.readouterr().err


def test_report_of_a_directory_without_a_run_is_an_error_of_its_own(tmp_path, capsys):
    pytest.importorskip("megatron_daro.workshop.report.report")
    assert cli.main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("DataError: ")


def test_the_console_command_is_installed_and_answers():
    command = Path(sys.executable).with_name("megatron-daro")
    if not command.exists():
        pytest.skip(f"{command} is absent: the package is not installed with its console command")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "report" in done.stdout


def test_the_page_of_faults_has_every_exit_code():
    docs = Path(cli.__file__).parents[1]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (docs / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert {int(code) for code, _ in rows} == set(cli.EXIT_CODES)


def test_the_version_and_the_package_as_a_program():
    command = [sys.executable, "-m", "megatron_daro", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"megatron-daro {megatron_daro.__version__}\n", "")


def test_a_finished_run_names_itself_and_the_next_command(config_file, launched, capsys):
    assert cli.main(["train", str(config_file), "trainer.run_dir=some/run"]) == 0
    *_, model, last = capsys.readouterr().out.splitlines()
    assert "some/run" in last and "megatron-daro report some/run" in last and "trainer.export_hf=true" in model
    assert cli.main(["train", str(config_file), "trainer.run_dir=some/run", "trainer.export_hf=true"]) == 0
    *_, model, last = capsys.readouterr().out.splitlines()
    assert "some/run/hf" in model and "some/run" in last


def test_what_the_system_refuses_is_a_sentence(config_file, launched, capsys):
    launched.fail = PermissionError(13, "Permission denied", "/some/where")
    assert cli.main(["train", str(config_file)]) == 1
    assert "Permission denied (/some/where)" in capsys.readouterr().err.splitlines()[-1]


def test_a_reader_that_goes_away_ends_a_dry_run_with_a_sentence(config_file):
    # The reader is gone before anything is written; what is left in buffers must not be complained about either.
    script = (
        f"exec {{out}}> >(exit 0); sleep 0.3; {sys.executable} -m megatron_daro train {config_file} --dry-run >&$out"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) >= 1
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
