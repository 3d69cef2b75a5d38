"""`megatron-daro convert`: Hugging Face checkpoints to Megatron's and back, with a card that says what was checked.

tools/convert_hf_to_megatron.py and tools/convert_megatron_to_hf.py are the same command. convert/plan.py and
workshop/convert/ do the work.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_daro.errors import ConfigError
from megatron_daro.temporary import use_own_sockets

if TYPE_CHECKING:
    from megatron_daro.convert.plan import Plan

_MOST_PROCESSES = 4
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1024, "MI": 1024**2, "GI": 1024**3}


def convert(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write; must not exist, or be empty.")],
    hf: Annotated[
        Path | None, typer.Option("--hf", metavar="DIR", help="Hugging Face checkpoint to convert to Megatron.")
    ] = None,
    megatron: Annotated[
        Path | None,
        typer.Option("--megatron", metavar="DIR", help="Megatron checkpoint to convert to Hugging Face, or --format."),
    ] = None,
    average: Annotated[
        list[Path] | None,
        typer.Option("--average", metavar="DIR", help="Write the mean of these Hugging Face models; two or more."),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", metavar="A,B", help="Of each --average, adding up to 1. Unset: equal.")
    ] = "",
    merge: Annotated[
        Path | None,
        typer.Option(
            "--merge", metavar="DIR", help="Write --hf with this adapter (PEFT's) added, rounded to its dtype."
        ),
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", metavar="DIR", help="config.json and tokenizer for --megatron. Unset: looked for."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="daro (ours, no pickle), torch_dist (Megatron-LM's), hf. Unset: daro or hf.",
        ),
    ] = None,
    per_layer_keys: Annotated[
        bool,
        typer.Option("--per-layer-keys", help="A key for each layer, as Megatron wants with a list as moe_layer_freq."),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="fp32, bf16 or fp16. Unset: as it is.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file of a Hugging Face checkpoint.")
    ] = "5GB",
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", min=1, help="Unset: as many as cores, at most 4.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read everything back and compare; and run both models, if memory allows."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at the source and say what would be written; write nothing.")
    ] = False,
) -> None:
    """Convert a checkpoint between Hugging Face's format and Megatron's, average several, or merge an adapter."""
    if average or weights or merge:
        others: dict[str, object] = {"--megatron": megatron, "--hf-config": hf_config}
        others |= {"--format": format_, "--dtype": dtype}
        others |= {"--per-layer-keys": per_layer_keys, "--verify": verify, "--dry-run": dry_run}
        others |= {"--average": average, "--weights": weights} if merge else {"--hf": hf}
        given = [name for name, value in others.items() if value]
        if merge:
            _merge(merge, hf, out, max_shard_size, given)
        else:
            _average(average or [], weights, out, max_shard_size, given)
        return
    num_processes = processes or min(os.cpu_count() or 1, _MOST_PROCESSES)
    if num_processes > 1 and not dry_run:
        _start_workers_early()
    plan = make_plan(
        hf,
        megatron,
        hf_config=hf_config,
        format_=format_,
        dtype=dtype,
        max_shard_size=max_shard_size,
        per_layer_keys=per_layer_keys,
    )
    if dry_run:
        from megatron_daro.workshop.convert.partial import replaceable

        replaceable(out)
        typer.echo(_announcement(plan, out))
        return
    _carry_out(plan, out, processes=num_processes, verify=verify)


def _average(sources: list[Path], weights: str, out: Path, max_shard_size: str, others: list[str]) -> None:
    """Write the mean of checkpoints. Raises ConfigError: options that do not go with it."""
    if others:
        raise ConfigError(
            f"--average: got it with {', '.join(others)}; allowed: alone; fix: convert before or after it"
        )
    from megatron_daro.workshop.convert.average import average, read_weights

    shares = read_weights(weights, len(sources))
    size = sum(path.stat().st_size for path in sources[0].glob("*.safetensors")) if sources else 0
    with _ProgressBar(size) as bar:
        num_bytes = average(sources, shares, out, max_shard_bytes=parse_size(max_shard_size), progress=bar.show)
    mean = " + ".join(f"{share:g} x {source}" for share, source in zip(shares, sources, strict=True))
    typer.echo(f"written: {out}, {num_bytes / 1e9:.2f} GB: {mean}")


def _merge(adapter: Path, base: Path | None, out: Path, max_shard_size: str, others: list[str]) -> None:
    """Write a checkpoint with an adapter added to it. Raises ConfigError: options that do not go with it."""
    if others or base is None:
        got = f"it with {', '.join(others)}" if others else "it without --hf"
        fix = "convert before or after it" if others else "give --hf DIR"
        raise ConfigError(f"--merge: got {got}; allowed: with --hf, the adapter's base; fix: {fix}")
    from megatron_daro.workshop.convert.merging import merge

    changed = merge(adapter, base, out, max_shard_bytes=parse_size(max_shard_size))
    typer.echo(f"written: {out}: {base} with {changed} matrices changed by {adapter}")


def _carry_out(plan: Plan, out: Path, *, processes: int, verify: bool) -> None:
    """Write the target; print the card and the result of the forward pass."""
    from megatron_daro.workshop.convert.conversion import convert as carry_out

    forward_checks: list[str] = []

    def check(written: Path) -> None:
        forward_checks.append(_forward_check(plan, written))

    last_check = check if verify else None
    with _ProgressBar(plan.num_bytes) as bar:
        card = carry_out(plan, out, processes=processes, verify=verify, progress=bar.show, last_check=last_check)
    typer.echo(f"{card.source} -> {card.format}")
    for line in card.summary():
        typer.echo(line)
    typer.echo(f"written: {out}, {card.num_bytes / 1e9:.2f} GB; every tensor: {out / 'conversion.json'}")
    for sentence in forward_checks:
        typer.echo(sentence)


def _start_workers_early() -> None:
    """Start the process that workers are forked from, so that it imports what they need while this one does."""
    use_own_sockets()
    multiprocessing.set_forkserver_preload(["megatron_daro.workshop.convert.conversion"])
    forkserver.ensure_running()


def make_plan(
    hf: Path | None,
    megatron: Path | None,
    *,
    hf_config: Path | None,
    format_: str | None,
    dtype: str | None,
    max_shard_size: str,
    per_layer_keys: bool,
) -> Plan:
    """Return the plan that the options ask for.

    Raises:
        ConfigError: options that do not go together. ModelError, CheckpointError: the source cannot be converted.
    """
    if (hf is None) == (megatron is None):
        raise ConfigError(
            "convert: give one of --hf DIR (to Megatron) and --megatron DIR (to Hugging Face, or to another --format)"
        )
    from megatron_daro.convert import plan

    if dtype is not None and dtype not in plan.DTYPES:
        raise ConfigError(f"--dtype: got {dtype!r}; allowed: {', '.join(plan.DTYPES)}")
    allowed = plan.FORMATS if megatron is None else ("hf", *plan.FORMATS)
    if format_ not in (None, *allowed):
        raise ConfigError(f"--format: got {format_!r}; allowed: {', '.join(allowed)}")
    if hf is not None and hf_config is not None:
        raise ConfigError("--hf-config: the configuration of --hf lies beside it; leave --hf-config out")
    for option, folder in (("--hf", hf), ("--megatron", megatron), ("--hf-config", hf_config)):
        if folder is not None and not folder.is_dir():
            got = f"{str(folder)!r}, which is {'a file' if folder.exists() else 'not there'}"
            raise ConfigError(f"{option}: got {got}; allowed: a directory{_in_directory(folder)}")
    if hf is not None:
        return plan.plan_to_megatron(hf, _megatron_format(format_), dtype, per_layer_keys=per_layer_keys)
    if megatron is None:
        raise AssertionError
    from megatron_daro.workshop.convert.model_config import find_config

    config = hf_config or find_config(megatron)
    if format_ in plan.FORMATS:
        return plan.plan_to_megatron(
            megatron, _megatron_format(format_), dtype, per_layer_keys=per_layer_keys, megatron_config=config
        )
    return plan.plan_to_hf(megatron, config, dtype, parse_size(max_shard_size))


def _in_directory(path: Path) -> str:
    return f"; fix: give {str(path.parent)!r}" if path.exists() else ""


def _megatron_format(name: str | None) -> Literal["daro", "torch_dist"]:
    return "torch_dist" if name == "torch_dist" else "daro"


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 5GB, 500MB or 2GiB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--max-shard-size: got {text!r}; allowed: a size such as 5GB, 500MB or 2GiB")
    return max(1, int(float(match[1]) * _UNITS[match[2] or ""]))


class _ProgressBar:
    """A bar on stderr for each phase; nothing where stderr is not a terminal."""

    def __init__(self, num_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._total = num_bytes
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, phase: str, done_bytes: int) -> None:
        """Show how far a phase has come."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=self._total)
        self._bar.update(self._tasks[phase], completed=min(done_bytes, self._total))  # type: ignore[arg-type]


def _announcement(plan: Plan, out: Path) -> str:
    ignored = [f"left out: {name}" for name in plan.ignored if "_extra_state" not in name][:10]
    if further := plan.further():
        ignored.append(f"{len(further)} tensors that predict tokens after the next go along as they are: {further[0]}")
    return "\n".join(
        [
            f"would write {out}: {plan.num_tensors} tensors, {plan.num_bytes / 1e9:.2f} GB in {len(plan.jobs)} files, "
            f"format {plan.format}",
            f"from {plan.source}; every tensor of config.json is there with its shape",
            *ignored,
        ]
    )


def _forward_check(plan: Plan, written: Path) -> str:
    """Run the HF model and the Megatron model of the two checkpoints on the same tokens, if both fit into memory."""
    if plan.format != "hf" and plan.source_format != "hf":
        return "forward pass not compared: both are Megatron checkpoints, of which every tensor was compared"
    from megatron_daro.workshop.convert.forward_check import compare_logits

    hf, megatron = (written, plan.source) if plan.format == "hf" else (plan.source, written)
    return compare_logits(hf, megatron, plan.cast)
