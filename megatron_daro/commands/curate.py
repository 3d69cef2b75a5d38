"""`megatron-daro curate`: problem files become one set without repeats, leaks and answers that nothing can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from megatron_daro.observe.terminal import StderrNotices

if TYPE_CHECKING:
    from megatron_daro.config.sections import EvalTemplate
    from megatron_daro.workshop.curate.offline import Rules
    from megatron_daro.workshop.curate.pass_rates import Sampling
    from megatron_daro.workshop.curate.rows import Decisions, Row

_Name = TypeVar("_Name", bound=str)
SUITE_DIR = Path("eval_data")
"""Where the evaluation suite is looked for when no set is named."""
_KINDS = ("*.jsonl", "*.json", "*.parquet", "*.jsonl.gz", "*.jsonl.zst", "*.json.gz")


Data = Annotated[
    list[str],
    typer.Argument(metavar="DATA... [A.B=C...]", help="Files of problems; options of sampling.", show_default=False),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the curated set goes; not there yet.")]
Against = Annotated[
    list[Path] | None,
    typer.Option("--against", metavar="PATH", help="Evaluation set, a file or a folder of them; repeatable."),
]
Format = Annotated[
    Literal["auto", "jsonl", "parquet", "gsm8k", "dapo"], typer.Option("--format", help="Layout of the files.")
]
ProblemField = Annotated[str | None, typer.Option("--problem-field", metavar="NAME", help="Field with the problem.")]
AnswerField = Annotated[str | None, typer.Option("--answer-field", metavar="NAME", help="Field with the answer.")]
KeepField = Annotated[
    list[str] | None, typer.Option("--keep-field", metavar="NAME", help="Field to carry along; repeatable.")
]
OnConflict = Annotated[
    Literal["drop", "keep_first", "majority"],
    typer.Option("--conflicts", help="What becomes of equal problems with different answers."),
]
Near = Annotated[bool, typer.Option("--near/--no-near", help="Drop problems that differ in a few words.")]
Ngram = Annotated[int, typer.Option("--ngram", min=5, help="Words of the run that makes an overlap.")]
DropOverlaps = Annotated[
    bool, typer.Option("--drop-overlaps", help="Also drop what only shares such a run with an evaluation set.")
]
Verifier = Annotated[
    Literal["math", "integer", "exact", "none"], typer.Option("--verifier", help="Must be able to check the answers.")
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes of the verifier.")]
DropGuesses = Annotated[
    str, typer.Option("--drop-guesses", metavar="A,B", help="choice, yes_no, true_false, small_integer.")
]
LargestInteger = Annotated[int, typer.Option("--largest-integer", min=0, help="Of small_integer.")]
Proofs = Annotated[bool, typer.Option("--proofs/--no-proofs", help="Keep problems that ask for a proof.")]
MostGoldWords = Annotated[
    int | None, typer.Option("--most-gold-words", min=0, help="Drop answers of more words than this.")
]
Languages = Annotated[
    str, typer.Option("--languages", metavar="A,B", help="Keep problems in these, such as en,zh. Unset: all.")
]
MostPerTopic = Annotated[
    float | None, typer.Option("--most-per-topic", min=0.01, max=1, help="Largest share of a topic. Unset: any.")
]
Paraphrases = Annotated[
    bool, typer.Option("--paraphrases", help="Drop what a kept problem says in other words (needs scikit-learn).")
]
Alike = Annotated[float, typer.Option("--alike", min=0.05, max=1, help="Of --paraphrases: least cosine.")]
GuessTries = Annotated[
    int, typer.Option("--guess-tries", min=0, help="Drop what the model guesses within so many tries. 0: no test.")
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
Write = Annotated[str, typer.Option("--write", metavar="A,B", help="parquet, jsonl.")]


def curate(
    data: Data,
    out: Out,
    against: Against = None,
    data_format: Format = "auto",
    problem_field: ProblemField = None,
    answer_field: AnswerField = None,
    keep_field: KeepField = None,
    conflicts: OnConflict = "drop",
    near: Near = True,
    ngram: Ngram = 13,
    drop_overlaps: DropOverlaps = False,
    verifier: Verifier = "math",
    workers: Workers = 2,
    drop_guesses: DropGuesses = "",
    largest_integer: LargestInteger = 10,
    proofs: Proofs = False,
    most_gold_words: MostGoldWords = None,
    languages: Languages = "",
    most_per_topic: MostPerTopic = None,
    paraphrases: Paraphrases = False,
    alike: Alike = 0.4,
    guess_tries: GuessTries = 0,
    hf: HF = None,
    urls: Urls = None,
    samples: Samples = 8,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    template: TemplateName = "chat",
    pass_rate: PassRateRange = "",
    write: Write = "parquet",
) -> None:
    """Deduplicate, decontaminate, check and, with a model, sample problems; nothing is dropped without a record."""
    from megatron_daro.workshop.curate import output
    from megatron_daro.workshop.curate.kinds import LANGUAGES
    from megatron_daro.workshop.curate.offline import GUESSES, Rules
    from megatron_daro.workshop.curate.rows import Fields, read_all

    output.check_free(out)
    output.check_keep(keep_field or ())
    servers = [url for text in urls or () for url in text.split(",") if url]
    paths, overrides = _split(data)
    sampling = _sampling(
        hf, servers, samples, temperature, top_p, template, verifier, overrides, pass_rate, guess_tries
    )
    rules = Rules(
        conflicts=conflicts,
        near=near,
        ngram=ngram,
        drop_overlaps=drop_overlaps,
        verifier=verifier,
        workers=workers,
        guesses=_listed("--drop-guesses", drop_guesses, GUESSES),
        largest_integer=largest_integer,
        proofs=not proofs,
        most_gold_words=most_gold_words,
        languages=_listed("--languages", languages, LANGUAGES),
        most_per_topic=most_per_topic,
        paraphrases=paraphrases,
        alike=alike,
    )
    formats = _listed("--write", write, output.FORMATS) or ("parquet",)
    fields = Fields(data_format, problem_field, answer_field, tuple(keep_field or ()))
    model = _Model(hf, servers, sampling, pass_rate, guess_tries) if sampling else None
    _curate(_Work(out, _evaluation_sets(against), rules, model, formats), *read_all(paths, fields))


@dataclass(frozen=True)
class _Model:
    """Who is asked for pass rates, how, and which rates stay; and how often it guesses first."""

    hf: Path | None
    urls: Sequence[str]
    sampling: Sampling
    pass_rate: str
    guess_tries: int


@dataclass(frozen=True)
class _Work:
    """What one call does. sets: evaluation sets by name."""

    out: Path
    sets: Mapping[str, Sequence[Row]]
    rules: Rules
    model: _Model | None
    formats: Sequence[str]


def _curate(work: _Work, rows: Sequence[Row], shared: Mapping[str, Sequence[str]]) -> None:
    from megatron_daro.workshop.curate import output
    from megatron_daro.workshop.curate.offline import decide
    from megatron_daro.workshop.curate.output import collect

    decisions, crowded = decide(rows, work.sets, work.rules, typer.echo)
    extra, measured = _sample(work.model, rows, decisions, work.out) if work.model else ({}, {})
    settings = {name: value for name, value in asdict(work.rules).items() if name != "workers"}
    settings["pass_rate"] = work.model.pass_rate if work.model else ""
    settings["guess_tries"] = work.model.guess_tries if work.model else 0
    statistics = collect(rows, decisions, sets=work.sets, rules=settings, shared=shared, crowded=crowded) | measured
    examples = {f"{name}:{row.place.rsplit(':', 1)[-1]}": row for name, one in work.sets.items() for row in one}
    output.write(work.out, rows, decisions, statistics, formats=work.formats, extra=extra, examples=examples)
    _print(work.out, statistics, work.formats)


def _split(data: Sequence[str]) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files, and the options `a.b=c` among them."""
    overrides = tuple(text for text in data if "=" in text and not Path(text).exists())
    return [Path(text) for text in data if text not in overrides], overrides


def _sampling(
    hf: Path | None,
    urls: Sequence[str],
    samples: int,
    temperature: float,
    top_p: float,
    template: EvalTemplate,
    verifier: str,
    overrides: tuple[str, ...],
    pass_rate: str,
    guess_tries: int,
) -> Sampling | None:
    """Return how pass rates are measured; None where they are not. Raises ConfigError for options that need more."""
    from megatron_daro.errors import ConfigError
    from megatron_daro.workshop.curate.pass_rates import read_range

    read_range(pass_rate)
    if not hf and not urls:
        given = {"--pass-rate": pass_rate, "--guess-tries": guess_tries}
        options = [*(name for name, value in given.items() if value), *overrides]
        if options:
            raise ConfigError(
                f"curate: got {', '.join(options)} without a model; allowed: with --hf DIR or --urls URL, which "
                "measure pass rates; fix: name the model that is asked"
            )
        return None
    from megatron_daro.workshop.curate.pass_rates import Sampling

    if hf and urls:
        raise ConfigError("curate: got --hf and --urls; allowed: one of them; fix: name the model that is asked")
    if verifier == "none":
        raise ConfigError(
            "--verifier: got none with a model to ask; allowed: math, integer or exact, which says what is right; fix: "
            "name one"
        )
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"--samples: got {samples} at temperature 0, which would all be equal; allowed: 1, or a temperature above "
            "0; fix: --temperature 1, or --samples 1"
        )
    return Sampling(samples, temperature, top_p, template, verifier, overrides)


def _sample(
    model: _Model, rows: Sequence[Row], decisions: Decisions, out: Path
) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Ask the model about the rows that are left; returns their pass-rate fields and the statistics."""
    from megatron_daro.runtime.interrupts import interruptible
    from megatron_daro.workshop.curate import pass_rates
    from megatron_daro.workshop.curate.output import partial_of
    from megatron_daro.workshop.curate.pass_rates import configuration, measure_pass_rates, model_of

    folder = partial_of(out) / "sampling"
    if not decisions.kept():
        return {}, {}
    if model.guess_tries:
        _guess(model, rows, decisions, partial_of(out) / "guesses")
    if not decisions.kept():
        return {}, {}
    count = pass_rates.write_problems(folder / "problems.jsonl", rows, decisions)
    typer.echo(
        f"asking for {model.sampling.samples} answers to each of {count} problems; kept in {folder} as they come"
    )
    with interruptible():
        weights = model_of(model.hf, model.urls)
        config = configuration(weights, folder / "problems.jsonl", folder, model.sampling)
        measured, settings = measure_pass_rates(config, weights, StderrNotices())
    fields = pass_rates.apply(rows, decisions, measured, settings, pass_rates.read_range(model.pass_rate))
    return fields, {"pass_rates": pass_rates.summary_of(measured, settings)}


def _guess(model: _Model, rows: Sequence[Row], decisions: Decisions, folder: Path) -> None:
    """Drop what the model guesses."""
    from megatron_daro.runtime.interrupts import interruptible
    from megatron_daro.workshop.curate import pass_rates

    count = pass_rates.write_problems(folder / "problems.jsonl", rows, decisions)
    typer.echo(f"asking for {model.guess_tries} guesses at each of {count} problems; kept in {folder} as they come")
    with interruptible():
        weights = pass_rates.model_of(model.hf, model.urls)
        config = pass_rates.guessing(weights, folder / "problems.jsonl", folder, model.sampling, model.guess_tries)
        measured, _ = pass_rates.measure_pass_rates(config, weights, StderrNotices())
    pass_rates.drop_guessed(rows, decisions, measured, model.guess_tries)


def _evaluation_sets(against: Sequence[Path] | None) -> dict[str, list[Row]]:
    """Return the evaluation sets by name; says aloud where there are none."""
    from megatron_daro.errors import ConfigError
    from megatron_daro.workshop.curate.rows import Fields, read_all

    paths = list(against or ([SUITE_DIR] if SUITE_DIR.is_dir() else []))
    files: list[Path] = []
    for path in paths:
        inside = sorted({file for kind in _KINDS for file in path.glob(kind)}) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(
                f"--against: got {str(path)!r}, a folder without problem files; allowed: files of problems or folders "
                f"with {', '.join(_KINDS)}; fix: check the path"
            )
        files += inside
    if not files:
        typer.echo(
            f"warning: NOT compared with any evaluation set: none was given with --against, and there is no folder "
            f"{SUITE_DIR}. Problems of the benchmarks may stay in the set.",
            err=True,
        )
    sets: dict[str, list[Row]] = {}
    for file in files:
        name = file.name.split(".")[0]
        if name in sets:
            raise ConfigError(
                f"--against: got two sets named {name!r}; allowed: names that differ before the first dot; fix: "
                "rename one of the files"
            )
        sets[name] = read_all([file], Fields())[0]
    return sets


def _listed(option: str, text: str, allowed: Sequence[_Name]) -> tuple[_Name, ...]:
    """Return the names of a list with commas, in the order of `allowed`. Raises ConfigError for another name."""
    from megatron_daro.errors import ConfigError

    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(f"{option}: got {', '.join(unknown)}; allowed: {', '.join(allowed)}; fix: correct the name")
    return tuple(name for name in allowed if name in names)


def _print(out: Path, statistics: Mapping[str, Any], formats: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from megatron_daro.workshop.curate.rows import NOTES, REASONS

    table = Table("", "rows", "", highlight=False)
    table.add_row("kept", f"{statistics['kept']:,}", "")
    for reason, count in statistics["dropped"].items():
        table.add_row(reason, f"{count:,}", REASONS[reason])
    for note, count in statistics["notes"].items():
        table.add_row(f"({note})", f"{count:,}", f"of the kept: {NOTES[note]}")
    table.add_row("read", f"{statistics['rows_read']:,}", f"{len(statistics['files'])} files")
    Console().print(table)
    for name in (*(f"curated.{form}" for form in formats), "dropped.parquet", "page.html"):
        typer.echo(out / name)
