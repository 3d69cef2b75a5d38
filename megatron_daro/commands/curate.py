"""`megatron-daro curate`: turns problem files into one set without duplicates, leaks and uncheckable answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megatron_daro.errors import ConfigError
from megatron_daro.observe.terminal import StderrNotices

if TYPE_CHECKING:
    from megatron_daro.workshop.curate.decisions import Decisions
    from megatron_daro.workshop.curate.pass_rates import Sampling
    from megatron_daro.workshop.curate.rows import Row
    from megatron_daro.workshop.evaluate.models import MeasuredModel

SUITE_DIR = Path("eval_data")
"""Where the evaluation suite is looked for when no set is named."""


Data = Annotated[
    list[str],
    typer.Argument(metavar="DATA... [A.B=C...]", help="Files of problems; options of sampling.", show_default=False),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the curated set goes; not there yet.")]
Against = Annotated[
    list[Path] | None,
    typer.Option("--against", metavar="PATH", help="Evaluation set, a file or a folder of them; repeatable."),
]
ProblemField = Annotated[str | None, typer.Option("--problem-field", metavar="NAME", help="Field with the problem.")]
AnswerField = Annotated[str | None, typer.Option("--answer-field", metavar="NAME", help="Field with the answer.")]
KeepField = Annotated[
    list[str] | None, typer.Option("--keep-field", metavar="NAME", help="Field to carry along; repeatable.")
]
Verifier = Annotated[
    Literal["math", "integer", "exact", "none"], typer.Option("--verifier", help="Must be able to check the answers.")
]
Drop = Annotated[
    str,
    typer.Option(
        "--drop",
        metavar="A,B",
        help="Of proof, free_text, overlap, near_duplicate, choice, yes_no, true_false, small_integer.",
    ),
]
HF = Annotated[Path | None, typer.Option("--hf", metavar="DIR", help="Model that is asked for pass rates.")]
Urls = Annotated[
    list[str] | None, typer.Option("--urls", metavar="URL,...", help="SGLang servers that run, as http://host:port.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Answers to each problem (K).")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Of sampling.")]
TopP = Annotated[float, typer.Option("--top-p", min=0, max=1, help="Nucleus, in (0, 1].")]
TemplateName = Annotated[
    Literal["data", "chat", "qwen-math", "r1", "none"], typer.Option("--template", help="How a problem is written.")
]
PassRateRange = Annotated[
    str, typer.Option("--pass-rate", metavar="LOW:HIGH", help="Keep problems with a pass rate in this range.")
]


def curate(
    data: Data,
    out: Out,
    against: Against = None,
    problem_field: ProblemField = None,
    answer_field: AnswerField = None,
    keep_field: KeepField = None,
    verifier: Verifier = "math",
    drop: Drop = "proof,near_duplicate",
    hf: HF = None,
    urls: Urls = None,
    samples: Samples = 8,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    template: TemplateName = "chat",
    pass_rate: PassRateRange = "",
) -> None:
    """Deduplicate, decontaminate, check and, with a model, sample problems; nothing is dropped without a record."""
    from megatron_daro.workshop.curate import output, pass_rates, stages, statistics
    from megatron_daro.workshop.curate.rows import Fields, read_all, read_evaluation_sets

    output.check_free(out)
    output.check_keep(keep_field or ())
    kinds = _kinds(drop, stages.OPTIONAL)
    paths, overrides = _split(data)
    servers = [url for text in urls or () for url in text.split(",") if url]
    bounds = pass_rates.read_range(pass_rate)
    sampling = pass_rates.Sampling(samples, temperature, top_p, template, verifier, overrides)
    model = None
    if hf or servers:
        _check_sampling(sampling, hf, servers)
        model = pass_rates.model_of(hf, servers)
    elif wanted := [*(["--pass-rate"] if pass_rate else []), *overrides]:
        raise ConfigError(
            f"curate: got {', '.join(wanted)} without a model; allowed: with --hf DIR or --urls URL, which measure "
            "pass rates; fix: name the model that is asked"
        )

    sets = read_evaluation_sets(against or ([SUITE_DIR] if SUITE_DIR.is_dir() else []))
    if not sets:
        typer.echo(
            f"warning: NOT compared with any evaluation set: none was given with --against, and there is no folder "
            f"{SUITE_DIR}. Problems of the benchmarks may stay in the set.",
            err=True,
        )
    rows, shared = read_all(paths, Fields(problem_field, answer_field, tuple(keep_field or ())))
    decisions, crowded = stages.decide(rows, sets, verifier, kinds, typer.echo)
    extra: Mapping[int, Mapping[str, Any]] = {}
    measured: Mapping[str, Any] = {}
    if model and decisions.kept():
        extra, measured = _sample(rows, decisions, model, sampling, bounds, output.partial_of(out) / "sampling")
    rules = {"verifier": verifier, "drop": ", ".join(kinds), "pass_rate": pass_rate}
    counted = statistics.collect(rows, decisions, sets=sets, rules=rules, shared=shared, crowded=crowded)
    output.write(out, rows, decisions, {**counted, **measured}, extra=extra, sets=sets)
    _print(out, counted)


def _kinds(text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a comma-separated list, in the order of `allowed`. Raises ConfigError for another name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(f"--drop: got {', '.join(unknown)}; allowed: {', '.join(allowed)}; fix: correct the name")
    return tuple(name for name in allowed if name in names)


def _split(data: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files, and the options `a.b=c` among them."""
    overrides = tuple(text for text in data if "=" in text and not Path(text).exists())
    return [Path(text) for text in data if text not in overrides], overrides


def _check_sampling(sampling: Sampling, hf: Path | None, servers: Sequence[str]) -> None:
    """Refuse options with which no pass rate can be measured. Raises ConfigError."""
    if hf and servers:
        raise ConfigError("curate: got --hf and --urls; allowed: one of them; fix: name the model that is asked")
    if sampling.verifier == "none":
        raise ConfigError(
            "--verifier: got none with a model to ask; allowed: math, integer or exact, which says what is right; fix: "
            "name one"
        )
    if sampling.temperature == 0 and sampling.samples > 1:
        raise ConfigError(
            f"--samples: got {sampling.samples} at temperature 0, which would all be equal; allowed: 1, or a "
            "temperature above 0; fix: --temperature 1, or --samples 1"
        )


def _sample(
    rows: Sequence[Row],
    decisions: Decisions,
    model: MeasuredModel,
    sampling: Sampling,
    bounds: tuple[float, float],
    folder: Path,
) -> tuple[Mapping[int, Mapping[str, Any]], Mapping[str, Any]]:
    """Ask the model about the rows that are left, and return their pass-rate fields and the statistics."""
    from megatron_daro.runtime.interrupts import interruptible
    from megatron_daro.workshop.curate import pass_rates

    kept = [rows[row] for row in decisions.kept()]
    typer.echo(f"asking for {sampling.samples} answers to each of {len(kept)} problems; kept in {folder} as they come")
    with interruptible():
        measured = pass_rates.measure(kept, model, sampling, folder, StderrNotices())
    return pass_rates.apply(rows, decisions, measured, bounds), {"pass_rates": measured.statistics()}


def _print(out: Path, statistics: Mapping[str, Any]) -> None:
    from megatron_daro.observe.table import table_text
    from megatron_daro.workshop.curate.decisions import NOTES, REASONS
    from megatron_daro.workshop.curate.output import CURATED, DROPPED, PAGE

    lines = [
        ["read", f"{len(statistics['files'])} files", f"{statistics['rows_read']:,}"],
        *([reason, REASONS[reason], f"{count:,}"] for reason, count in statistics["dropped"].items()),
        ["kept", "", f"{statistics['kept']:,}"],
        *([f"({note})", NOTES[note], f"{count:,}"] for note, count in statistics["notes"].items()),
    ]
    typer.echo(table_text(["", "", "rows"], lines, left=2))
    for name in (CURATED, DROPPED, PAGE):
        typer.echo(out / name)
