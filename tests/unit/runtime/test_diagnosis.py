"""`megatron-daro doctor`: what works is ok, what is broken is said with a fix and an exit code."""

from __future__ import annotations

import pytest

from megatron_daro.cli import main
from megatron_daro.config import Hardware, precision
from megatron_daro.runtime import diagnosis
from megatron_daro.runtime.diagnosis import _Package, _package


@pytest.fixture
def few_packages(monkeypatch):
    """One package that is there: the real list takes half a minute to import."""
    monkeypatch.setattr(diagnosis, "_PACKAGES", (_Package("numpy", "import numpy; print(numpy.__version__)", "x"),))


def test_a_library_that_works_says_its_version():
    found = _package(_Package("numpy", "import numpy; print(numpy.__version__)", "x"))
    assert found.state == "ok" and found.found[0].isdigit()


@pytest.mark.parametrize(
    ("trial", "needed", "state", "said"),
    [
        ("import no_such_module", True, "broken", "No module named 'no_such_module'"),
        ("import no_such_module", False, "absent", "No module named 'no_such_module'"),
        ("raise ImportError('undefined symbol')", False, "broken", "undefined symbol"),
        ("import os; os.abort()", True, "broken", "ended with code -6"),
    ],
)
def test_a_library_that_does_not_work_is_a_finding(trial, needed, state, said):
    found = _package(_Package("x", trial, "install it", needed))
    assert found.state == state and said in found.found and found.fix == "install it"


def test_a_library_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(diagnosis, "_IMPORT_LIMIT_S", 0.5)
    found = _package(_Package("x", "import time; time.sleep(60)", "y"))
    assert found.state == "broken" and found.found == "no answer in 0.5 s"


def test_every_trial_is_python():
    for package in diagnosis._PACKAGES:
        compile(package.trial, package.name, "exec")


@pytest.mark.usefixtures("few_packages")
def test_the_machine_alone(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "numpy" in out and "open files" in out and "nothing is broken" in out


@pytest.mark.usefixtures("few_packages")
def test_a_recipe_whose_files_are_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"model: {{path: {tmp_path}/none}}\ndata: {{train: [{tmp_path}/none.jsonl]}}\n")
    assert main(["doctor", str(recipe), f"trainer.run_dir={tmp_path}/run"]) == 1
    said = capsys.readouterr()
    assert "recipe: model.path" in said.out and "give the local directory of the model" in said.out
    assert "are broken" in said.err and "recipe: model.path" in said.err


@pytest.mark.parametrize(
    ("capability", "engine", "said"),
    [
        (9.0, (2, 20, 2), "8, fp8 recipes tensorwise, blockwise"),
        (8.0, (2, 20, 2), "8, no fp8: a GPU has compute capability 8, it needs 8.9 or newer"),
        (9.0, None, "8, no fp8: Transformer Engine is not installed"),
    ],
)
def test_gpus_say_which_recipes_of_fp8_run_there(monkeypatch, capability, engine, said):
    monkeypatch.setattr(diagnosis, "detect", lambda: Hardware("gpu", 8, capability=capability))
    monkeypatch.setattr(precision, "_version", {"transformer_engine": engine}.get)
    monkeypatch.setattr(precision, "torch_cuda", lambda: (13, 0))
    assert diagnosis._gpus(None).found == said
