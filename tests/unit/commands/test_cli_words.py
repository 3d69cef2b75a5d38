"""Exit codes, last lines, and what the composition root hands on, in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from megatron_daro import __version__, cli
from megatron_daro.config import CheckReport
from megatron_daro.config.problems import Problem
from megatron_daro.errors import ConfigError, DataError


def test_the_version_ends_the_program(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-daro {__version__}\n"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (["convert", "--check", "c.json", "--world", "2"], ["check-layout", "c.json", "--world", "2"]),
        (["convert", "c.json", "--check"], ["check-layout", "c.json"]),
        (["convert", "--out", "x"], ["convert", "--out", "x"]),
        (["plan", "--check"], ["plan", "--check"]),
        ([], []),
    ],
)
def test_convert_check_is_another_command(given, asked):
    assert cli._respelled(given) == asked


@pytest.mark.parametrize(
    ("text", "shown"), [("a\nb é", "a\nb é"), ("\x1b[2J", r"\x1b[2J"), ("\u202e", r"\u202e"), ("a\tb", r"a\tb")]
)
def test_control_characters_are_shown_and_not_sent(text, shown):
    assert cli.printable(text) == shown


@pytest.fixture
def ending(monkeypatch):
    """Makes the command line end with an error."""

    def end(error: BaseException) -> int:
        def fail(**_):
            raise error

        monkeypatch.setattr(cli, "app", fail)
        return cli.main(["x"])

    return end


def exit_of(code, context=None) -> SystemExit:
    error = SystemExit(code)
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (exit_of(0), 0, None),
        (exit_of(2), 2, None),
        (exit_of(None), 0, None),
        (exit_of("text"), 0, None),
        (exit_of(130), 130, "interrupted"),
        (ConfigError("x: 1 problem\n  a"), 2, "  a"),
        (DataError("one\n\n  two \nthree"), 1, "DataError: one; two; three"),
        (OSError(28, "No space left on device"), 1, "the system refused: No space left on device; look at free space, "
         "permissions and `ulimit -a`"),
        (OSError("odd"), 1, "the system refused: odd; look at free space, permissions and `ulimit -a`"),
        (ModuleNotFoundError("no", name="plotly.offline"), 1, f"this command needs the package plotly, which "
         f"{sys.prefix} does not have; install it there, or type the command where megatron_daro was installed with "
         "its own requirements (pip install megatron_daro)"),
    ],
)  # fmt: skip
def test_an_end_has_a_code_and_a_last_line(ending, capsys, error, code, last):
    assert ending(error) == code
    err = capsys.readouterr().err
    assert err.splitlines()[-1:] == ([] if last is None else [last])


@pytest.mark.parametrize("name", [None, "megatron_daro.plan"])
def test_a_module_of_our_own_that_is_missing_is_a_bug(ending, name):
    with pytest.raises(ModuleNotFoundError):
        ending(ModuleNotFoundError("no", name=name))


def test_a_reader_that_went_away_is_said_once(ending, monkeypatch, capsys):
    dropped = []
    monkeypatch.setattr(cli, "_drop_stdout", lambda: dropped.append(1))
    assert ending(exit_of(1, BrokenPipeError())) == 1
    assert capsys.readouterr().err == "stdout was closed by its reader\n" and dropped == [1]


def test_a_closed_stdout_becomes_the_null_device(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "open", lambda path, flags: calls.append(("open", path, flags)) or 77)
    monkeypatch.setattr(cli.os, "dup2", lambda *given: calls.append(("dup2", *given)))
    monkeypatch.setattr(cli.os, "close", lambda number: calls.append(("close", number)))
    cli._drop_stdout()
    assert calls == [("open", os.devnull, os.O_WRONLY), ("dup2", 77, 1), ("close", 77)]


def test_a_stdout_that_cannot_be_flushed_hides_no_error(monkeypatch, capsys):
    def fail():
        raise BrokenPipeError

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", SimpleNamespace(flush=fail))
        assert cli._fail("a\x07", 5) == 5
    assert capsys.readouterr().err == "a\\x07\n"


def test_the_program_knows_that_the_process_is_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "app", lambda **given: asked.append(given))
    monkeypatch.setattr(sys, "argv", ["megatron-daro", "plan"])
    assert (cli.main(), cli.main(["a"])) == (0, 0)
    assert asked == [
        {"args": ["plan"], "prog_name": "megatron-daro", "obj": True},
        {"args": ["a"], "prog_name": "megatron-daro", "obj": False},
    ]


def test_checks_are_comments_of_a_configuration_file():
    warning = Problem("a", "\x07", "2", "3")
    checks = CheckReport((("one", "fine"), ("two", "too")), (warning,), ())
    assert cli._check_list(checks) == (
        "# Checks\n#   ok       one: fine\n#   ok       two: too\n"
        r"#   warning  a: got \x07; allowed: 2; fix: 3" + "\n"
    )


@pytest.fixture
def resolved(monkeypatch):
    """What `train` finds in its configuration, in place of a file."""
    from megatron_daro import config

    asked = []
    warning = Problem("a", "\x07", "2", "3")
    checks = CheckReport((("one", "fine"),), (warning,), ())
    monkeypatch.setattr(config, "resolve_and_check", lambda *given: asked.append(given) or (SimpleNamespace(), checks))
    monkeypatch.setattr(config, "to_yaml", lambda _: "a: 1\n")
    return asked


def test_a_run_is_checked_against_the_cluster_of_its_environment(resolved, monkeypatch, capsys):
    from megatron_daro.runtime import cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cli._resolve(Path("f"), None, dry_run=False)
    assert resolved[0] == (Path("f"), (), None)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "warning: a: got \\x07; allowed: 2; fix: 3\n")
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    monkeypatch.setattr(cluster, "ask", lambda: "hardware")
    cli._resolve(Path("f"), ["x=1"], dry_run=True)
    assert resolved[1] == (Path("f"), ["x=1"], "hardware")
    assert capsys.readouterr().out.startswith("a: 1\n# Checks\n#   ok       one: fine\n")


def test_a_cluster_that_does_not_answer_ends_a_dry_run_after_the_configuration_was_looked_at(resolved, monkeypatch):
    from megatron_daro.runtime import cluster

    def ask():
        raise ConfigError("no answer")

    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    monkeypatch.setattr(cluster, "ask", ask)
    cli._resolve(Path("f"), None, dry_run=False)
    assert resolved[0][2].place == "a Ray cluster that does not answer"
    with pytest.raises(ConfigError, match="no answer"):
        cli._resolve(Path("f"), None, dry_run=True)


@pytest.mark.parametrize(
    ("owns", "resume", "needs", "hidden"),
    [(True, False, False, True), (False, False, False, False), (True, True, False, False), (True, False, True, False)],
)
def test_torch_is_hidden_only_from_a_dry_run_that_needs_none(monkeypatch, capsys, owns, resume, needs, hidden):
    from megatron_daro.runtime import preflight

    asked = []
    monkeypatch.setattr(preflight, "needs_torch", lambda config: needs)
    monkeypatch.setattr(preflight, "dry_run", lambda config, **options: asked.append(options) or ["one\x07", "two"])
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    del sys.modules["torch"]
    cli._dry_run(SimpleNamespace(), resume=resume, replay=None, owns_process=owns)
    assert ("torch" in sys.modules) is hidden and (os.environ.get("TRANSFORMERS_VERBOSITY") == "error") is hidden
    os.environ.pop("TRANSFORMERS_VERBOSITY", None)
    assert asked == [{"resume": resume, "replay": None}]
    assert capsys.readouterr().out == "# Start\n#   one\\x07\n#   two\n"


def test_a_report_goes_where_one_says(tmp_path, monkeypatch, capsys):
    from megatron_daro.workshop.report import report

    asked = []
    monkeypatch.setattr(report, "write_report", lambda *given, **options: asked.append((given, options)))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path), "--output", "x.html", "--from", "verl"]) == 0
    assert asked == [
        ((tmp_path, tmp_path / "report.html"), {"host": None}),
        ((tmp_path, Path("x.html")), {"host": "verl"}),
    ]
    assert capsys.readouterr().out == f"{tmp_path}/report.html\nx.html\n"


def test_every_command_has_its_name():
    names = {command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands}
    assert names == {
        *("plan", "check-layout", "analyze", "curate", "shorten", "submit", "doctor", "check-loss"),
        *("train", "eval", "report", "convert"),
    }
    assert isinstance(cli.app, typer.Typer) and cli.app.pretty_exceptions_enable is False
