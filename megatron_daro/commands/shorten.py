"""`megatron-daro shorten`: recorded rollouts become data for training a model to answer in fewer tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_daro.errors import ConfigError


def shorten(
    recorded: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run, an evaluation, or their files.", exists=True)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write: *.parquet or *.jsonl.")],
    kind: Annotated[
        Literal["sft", "dpo"],
        typer.Option("--for", help="sft: the shortest right answer; dpo: pairs of it with longer ones."),
    ] = "dpo",
    longer: Annotated[
        float, typer.Option("--longer", min=1.0, help="How many times as long a right answer is to be rejected.")
    ] = 1.5,
    most: Annotated[
        int | None, typer.Option("--most", min=1, help="Pairs of each group, longest first. Unset: all.")
    ] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="Write chats, without data.template, in place of the prompt's text.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Of the policy. Unset: what the run says.")
    ] = None,
) -> None:
    """Write the shortest right answers to recorded problems, or pairs of them with longer answers, for TRL."""
    from megatron_daro.workshop.shorten import Rules, recorded_files
    from megatron_daro.workshop.shorten import shorten as write

    if messages and tokenizer:
        raise ConfigError("--tokenizer: got one with --messages, which writes no tokens' text; fix: leave it out")
    files = recorded_files(recorded)
    prompt_text = None
    if not messages:
        from megatron_daro.data.tokenizer import load_tokenizer

        loaded = load_tokenizer(tokenizer or _tokenizer_of(recorded), option="--tokenizer")
        prompt_text = lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))
    counts = write(files, out, Rules(kind, longer, most, prompt_text))
    typer.echo(
        f"{counts.rows} rows from {counts.groups} groups; {counts.without_right} without a right answer that ended by "
        f"itself, {counts.without_longer} without a longer one; {counts.skipped} answers left out (several turns, or "
        "no verdict)"
    )
    mean = counts.chosen_tokens / counts.rows
    rejected = f", of rejected ones {counts.rejected_tokens / counts.rows:.1f}" if kind == "dpo" else ""
    typer.echo(f"mean tokens of chosen answers {mean:.1f}{rejected}; written: {out}")


def _tokenizer_of(recorded: Path) -> Path:
    """Return the model's directory that the run's or evaluation's record names. Raises ConfigError: there is none."""
    import json

    import yaml

    for folder in (recorded, recorded.parent, recorded.parent.parent):
        file = folder / "config.yaml"
        if file.is_file():
            return Path(yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["path"])
        if (folder / "evaluation.json").is_file():
            return Path(json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["notes"]["model"])
    raise ConfigError(
        f"--tokenizer: {recorded} does not say with which tokenizer it was recorded; allowed: the policy's directory; "
        "fix: --tokenizer DIR, or --messages to write chats"
    )
