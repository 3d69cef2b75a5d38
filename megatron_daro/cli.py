"""The console command `megatron-daro`: train, report, and those of commands/.

Reads the configuration, calls the runtime or the report, turns errors
into exit codes. What a sub-command needs is imported inside it, so that `--help` stays fast.

`EXIT_CODES` says how a command can end; the last line of stderr has the cause.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_daro import __version__
from megatron_daro.commands.analyze import analyze
from megatron_daro.commands.check_layout import check_layout
from megatron_daro.commands.check_loss import check_loss
from megatron_daro.commands.convert import convert
from megatron_daro.commands.curate import curate
from megatron_daro.commands.doctor import doctor
from megatron_daro.commands.evaluate import evaluate
from megatron_daro.commands.plan import plan
from megatron_daro.commands.shorten import shorten
from megatron_daro.commands.submit import submit
from megatron_daro.errors import EXIT_INTERRUPTED, ConfigError, DaroError, NonFiniteError, how_to_go_on
from megatron_daro.observe.logs import safe_text

if TYPE_CHECKING:
    from megatron_daro.config import CheckReport, Config, Hardware

EXIT_ERROR, EXIT_CONFIG, EXIT_NONFINITE = 1, 2, 3

EXIT_CODES = {
    0: "done",
    EXIT_ERROR: "an error, its cause on the last line",
    EXIT_CONFIG: "wrong configuration or usage, nothing was started",
    EXIT_NONFINITE: "a loss or gradient was not finite",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C, SIGTERM or a closed terminal; the last line says what was saved",
}
"""What the documentation's table of exit codes says; a test compares the two."""

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file (docs/configuration.md).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="A.B=C", help="Options that replace those of the file, such as trainer.steps=5."),
]

_ENDED = {
    "stopped": "stopped after step {step}, whose state is saved; --resume goes on",
    "stopped before": "stopped before step 1, with nothing to save; --resume goes on",
    "interrupted": "interrupted after step {step}, without a checkpoint; to go on: {how}",
}


class _EndedEarlyError(Exception):
    """A signal ended the run; the message says what was kept."""


app = typer.Typer(
    name="megatron-daro",
    help="Difficulty-aware reinforcement learning (DARO) on Megatron-core.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"megatron-daro {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def train(
    context: typer.Context,
    config_file: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and check everything; start nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="RUN", help="Train on the rollouts recorded in RUN, without engines."),
    ] = None,
) -> None:
    """Train as CONFIG says."""
    if replay:
        _require_directory("--replay", replay, "a run directory")
    config = _resolve(config_file, overrides, dry_run=dry_run)
    if dry_run:
        _dry_run(config, resume=resume, replay=replay)
        return
    from megatron_daro import garbage
    from megatron_daro.config.base import filled
    from megatron_daro.runtime.interrupts import interruptible

    with interruptible():
        if config.observe.progress:
            typer.echo("loading torch, Megatron-core and Ray")
        with garbage.paused():
            import megatron_daro.runtime.launch as launch

        outcome = launch.train(config, resume=resume, replay=replay)
    if outcome.status != "finished":
        status = "stopped before" if (outcome.status, outcome.step) == ("stopped", 0) else outcome.status
        how = how_to_go_on(filled(config.trainer.run_dir))
        raise _EndedEarlyError(_ENDED[status].format(step=outcome.step, how=how))
    run_dir, hf_dir = config.trainer.run_dir, config.trainer.hf_dir
    model = f"{hf_dir}, a Hugging Face directory (transformers, vLLM and SGLang load it)"
    if not config.trainer.export_hf:
        model = (
            f"in the checkpoints; the same command with --resume trainer.export_hf=true writes {hf_dir}, for vLLM etc."
        )
    typer.echo(safe_text(f"model: {model}"))
    report_file = f"{run_dir}/report.html"
    last = f"run: {run_dir}, {outcome.step} steps; next: megatron-daro report {run_dir}, which writes {report_file}"
    typer.echo(safe_text(last))


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write. Unset: RUN/report.html.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="HOST", help="RUN holds metric files of a host with DARO: verl, slime or nemo-rl."
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML report of a run."""
    _require_directory("RUN", run, "a run directory")
    from megatron_daro.workshop.report.report import write_report

    target = output or run / "report.html"
    write_report(run, target, host=host)
    typer.echo(target)


# In the order in which a newcomer meets them; `train` stands above.
app.command()(report)
app.command(name="eval")(evaluate)
app.command()(plan)
app.command()(doctor)
app.command()(convert)
app.command()(check_layout)
app.command()(submit)
app.command()(curate)
app.command()(check_loss)
app.command()(analyze)
app.command()(shorten)


def _require_directory(name: str, path: Path, allowed: str) -> None:
    if not path.is_dir():
        why = "is no directory" if path.exists() else "is not there"
        raise ConfigError(f"{name}: got {str(path)!r}, which {why}; allowed: {allowed}; fix: check the path")


def _resolve(config_file: Path, overrides: Sequence[str] | None, *, dry_run: bool) -> Config:
    """Return the checked configuration; prints it with its checks on a dry run, and warnings always."""
    from megatron_daro.config import resolve_and_check, to_yaml

    hardware, silent = _cluster_hardware()
    config, checks = resolve_and_check(config_file, overrides or (), hardware)
    if dry_run:
        if silent:
            raise silent
        typer.echo(to_yaml(config), nl=False)
        typer.echo(_check_list(checks), nl=False)
    for warning in checks.warnings:
        typer.echo(f"warning: {safe_text(str(warning))}", err=True)
    return config


def _cluster_hardware() -> tuple[Hardware | None, ConfigError | None]:
    """Return the hardware of the cluster at RAY_ADDRESS (None without one; Ray is then not imported), and the error if
    it does not answer. That is not raised here: errors of the configuration come first, and some runs need no
    cluster."""
    if not os.environ.get("RAY_ADDRESS"):
        return None, None
    from megatron_daro.config.hardware import unknown
    from megatron_daro.runtime.cluster import ask

    try:
        return ask(), None
    except ConfigError as error:
        return unknown("a Ray cluster that does not answer"), error


def _dry_run(config: Config, *, resume: bool, replay: Path | None) -> None:
    """Do the part of a start that needs no process of the run, and print what it finds."""
    from megatron_daro.runtime.preflight import dry_run

    lines = dry_run(config, resume=resume, replay=replay)
    typer.echo(safe_text("\n".join(["# Start", *(f"#   {line}" for line in lines)])))


def _check_list(checks: CheckReport) -> str:
    """Return the checks as YAML comments, so that the whole output of --dry-run is a configuration file."""
    lines = [f"#   ok       {subject}: {found}" for subject, found in checks.passed]
    lines += [f"#   warning  {warning}" for warning in checks.warnings]
    return safe_text("\n".join(["# Checks", *lines])) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program name; those of the process if not given.

    Returns:
        The exit code, see `EXIT_CODES`.
    """
    try:
        app(args=arguments, prog_name="megatron-daro", obj=arguments is None)
    except SystemExit as exit_:  # typer ends this way: help 0, wrong usage 2, Ctrl-C 130
        code = exit_.code if isinstance(exit_.code, int) else 0
        if isinstance(exit_.__context__, BrokenPipeError):  # typer then ends silently
            _drop_stdout()
            return _fail("stdout was closed by its reader", EXIT_ERROR)
        return _fail("interrupted", code) if code == EXIT_INTERRUPTED else code
    except _EndedEarlyError as ended:
        return _fail(str(ended), EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except ConfigError as error:
        return _fail(f"configuration error: {error}", EXIT_CONFIG)
    except NonFiniteError as error:
        return _fail(_one_line(error), EXIT_NONFINITE)
    except DaroError as error:
        return _fail(_one_line(error), EXIT_ERROR)
    except OSError as error:
        return _fail(_system_fault(error), EXIT_ERROR)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "megatron_daro"):
            raise
        return _fail(_missing(package), EXIT_ERROR)
    return 0


def _missing(package: str) -> str:
    """Return what to do about a requirement that is not installed, as in the environment of a host framework."""
    return (
        f"this command needs the package {package}, which {sys.prefix} does not have; install it there, or type the "
        "command where megatron_daro was installed with its own requirements (pip install megatron_daro)"
    )


def _system_fault(error: OSError) -> str:
    """Return what the system refused, in a sentence: a full disk, a missing permission, a limit of this shell."""
    where = f" ({error.filename})" if error.filename else ""
    return f"the system refused: {error.strerror or error}{where}; look at free space, permissions and `ulimit -a`"


def _drop_stdout() -> None:
    """Send what is still buffered for a closed pipe to the null device; else Python complains when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _one_line(error: DaroError) -> str:
    """Return name and message on one line: people who watch a log look at its last line."""
    return f"{type(error).__name__}: " + "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # nobody may be reading
        sys.stdout.flush()
    print(safe_text(message), file=sys.stderr, flush=True)
    return code
