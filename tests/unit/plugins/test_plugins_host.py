"""What an adapter asks of its host at its start: names, options, and the line that says that DARO is on."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest

from megatron_daro.algo.weighting import make_algorithm
from megatron_daro.errors import CheckpointError, ConfigError
from megatron_daro.plugins.core import DifficultyStep, resume, save_state
from megatron_daro.plugins.host import ANY, Host, fields_of
from megatron_daro.plugins.options import read_options

K = 4


@pytest.fixture
def host(monkeypatch):
    package, module = ModuleType("somehost"), ModuleType("somehost.loss")
    package.__version__, package.__path__, module.Worker = "1.3", [], type("Worker", (), {"train": print})
    monkeypatch.setitem(sys.modules, "somehost", package)
    monkeypatch.setitem(sys.modules, "somehost.loss", module)
    return Host("SomeHost", "somehost", ("1.2", "1.3 at 0123abc"))


@dataclass
class Options:
    clip: float = 0.2
    mode: str = "vanilla"
    masks: list[str] = field(default_factory=list)
    new_term: float = 0.5
    old_term: float = 0.0


ALLOWED = {"clip": ANY, "mode": ("vanilla", "plain")}


def problems(host, config, words="", **given):
    values, defaults = fields_of(config)
    try:
        host.check(values | given, ALLOWED, defaults=defaults, options=read_options(words), prefix="actor.")
    except ConfigError as error:
        return str(error)
    return ""


def new_step():
    return DifficultyStep(make_algorithm("daro", rollouts_per_prompt=K, max_response_tokens=1))


def test_every_name_that_is_missing_is_named_with_the_versions(host):
    names = ["somehost.loss", "somehost.loss:Worker.train", "somehost.loss:Worker.tune", "somehost.observability:log"]
    assert host.look_up(names[:2])["somehost.loss:Worker.train"] is print
    with pytest.raises(ConfigError) as caught:
        host.look_up(names)
    message = str(caught.value)
    for part in ("SomeHost 1.3", "Worker.tune", "somehost.observability", "1.2", "1.3 at 0123abc"):
        assert part in message
    assert "Worker.train " not in message


def test_an_option_that_the_adapter_does_not_know_must_have_its_default(host):
    assert problems(host, Options(clip=9.0, mode="plain")) == ""
    assert "actor.new_term: got 0.7" in problems(host, Options(new_term=0.7))
    assert "actor.mode: got 'gspo'" in problems(host, Options(mode="gspo"))
    both = problems(host, Options(masks=["overlong"], old_term=1.0))
    assert "actor.masks" in both and "actor.old_term" in both


def test_an_option_without_a_known_default_must_be_off(host):
    assert problems(host, Options(), penalty=0.0, path=None, schedule={}) == ""
    assert "actor.penalty: got 0.1" in problems(host, Options(), penalty=0.1)


def test_a_user_may_vouch_for_an_option(host):
    assert problems(host, Options(old_term=1.0), "allow_host_options=[old_term]") == ""
    assert "actor.mode" in problems(host, Options(mode="gspo"), "allow_host_options=[mode]"), (
        "a known one stays refused"
    )


def test_one_line_says_that_daro_is_on_with_versions_and_options(host, caplog, monkeypatch):
    host.announce(new_step(), read_options("daro.learning_rate=0.03 correct_above=0.5"))
    monkeypatch.setattr(sys.modules["somehost"], "__version__", "1.4")
    host.announce(new_step(), read_options(""))
    first, second = (record.getMessage() for record in caplog.records)
    for part in ("SomeHost 1.3", "megatron_daro 0.1.0", "daro.learning_rate=0.03", "correct_above=0.5"):
        assert part in first
    assert "tested" not in first and "SomeHost 1.4 (tested" in second


def test_a_checkpoint_without_the_state_is_resumed_only_by_order_and_with_a_warning(tmp_path, caplog):
    with pytest.raises(CheckpointError, match="start_fresh"):
        resume(new_step(), tmp_path / "daro.json", start_fresh=False)
    resume(new_step(), tmp_path / "daro.json", start_fresh=True)
    assert caplog.records
    step = new_step()
    step.steps = 7
    save_state(step, tmp_path / "daro.json")
    resume(step := new_step(), tmp_path / "daro.json", start_fresh=True)
    assert step.steps == 7


def test_a_local_build_of_a_tested_version_is_a_tested_one(host, caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["somehost"], "__version__", "1.2+cu128")
    host.announce(new_step(), read_options(""))
    assert "SomeHost 1.2+cu128" in caplog.text and "tested" not in caplog.text


def test_a_checkout_is_announced_by_its_commit(tmp_path, caplog, monkeypatch):
    """slime, miles and ROLL are mostly run from a checkout in PYTHONPATH: no version there, nothing installed."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "checked_out").mkdir()
    (tmp_path / "checked_out" / "__init__.py").touch()
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("checked_out")
    monkeypatch.delitem(sys.modules, "checked_out")
    monkeypatch.setitem(sys.modules, "checked_out", module)
    for tested in (("1.2", f"main at {commit[:9]}"), ("1.2", "main at 012345678")):
        Host("Checked", "checked_out", tested).announce(new_step(), read_options(""))
    known, other = (record.getMessage() for record in caplog.records)
    assert f"Checked {commit[:12]}, " in known and f"Checked {commit[:12]} (tested" in other
