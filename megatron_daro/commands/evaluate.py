"""`megatron-daro eval`: measure a model on sets of problems, or compare two measurements.

Options -> the model that is asked, the sets, one configuration -> workshop/evaluate/measuring.py -> a
table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_daro.errors import ConfigError
from megatron_daro.observe.terminal import StderrNotices

if TYPE_CHECKING:
    from megatron_daro.config import Config, EvalSet
    from megatron_daro.rollout.protocol import Notices
    from megatron_daro.workshop.evaluate.models import MeasuredModel

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG|A.B=C", help="YAML file, then options that replace those of the file."),
]
HF = Annotated[Path | None, typer.Option("--hf", metavar="DIR", help="Hugging Face directory to evaluate.")]
Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="Checkpoint (RUN/checkpoints/step_...) to evaluate.")
]
Urls = Annotated[
    list[str] | None, typer.Option("--urls", metavar="URL,...", help="SGLang servers that run, as http://host:port.")
]
Suite = Annotated[str | None, typer.Option("--suite", metavar="NAME", help="Published sets: math6.")]
SuiteDir = Annotated[
    Path, typer.Option("--suite-dir", metavar="DIR", help="Where tools/fetch_eval_suite.py wrote their files.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=FILE", help="A set of your own; repeatable.")]
Samples = Annotated[
    list[str] | None,
    typer.Option("--samples", metavar="[SET=]N", help="Answers to each problem, of all sets or of one; repeatable."),
]
Temperature = Annotated[float | None, typer.Option("--temperature", min=0, help="Of sampling. Unset: as the set has.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus, in (0, 1]. Unset: as the set has.")]
TemplateName = Annotated[
    str | None, typer.Option("--template", metavar="A,B", help="data, chat, qwen-math, r1, none; several are compared.")
]
Ks = Annotated[
    list[int] | None, typer.Option("--k", metavar="K", help="Of pass@k and maj@k; repeatable. Unset: all samples.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="Where to write. Unset: evals/ and a name; B/compare.html.")
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="A B", help="Compare two evaluations, problem by problem; asks no model."),
]


def evaluate(
    arguments: Arguments = None,
    hf: HF = None,
    checkpoint: Checkpoint = None,
    urls: Urls = None,
    suite: Suite = None,
    suite_dir: SuiteDir = Path("eval_data"),
    sets: Sets = None,
    samples: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    template: TemplateName = None,
    k: Ks = None,
    out: Out = None,
    compare: Compare = None,
) -> None:
    """Evaluate a model (--hf, --checkpoint or --urls) on sets of problems; the same command resumes after a kill."""
    if compare:
        _compare(*compare, out)
        return
    from megatron_daro.runtime.interrupts import interruptible
    from megatron_daro.workshop.evaluate.tables import summary_text

    config_file, overrides = _split(arguments or [])
    servers = [url for text in urls or () for url in text.split(",") if url]
    target = out or _default_out(hf, checkpoint)
    with interruptible():
        notices = StderrNotices()
        model, base = _model_and_base(hf, checkpoint, servers, config_file, overrides, target, notices)
        chosen = _chosen_sets(base, suite, suite_dir, sets or [])
        _check_samples(samples or [], chosen)
        chosen = _under_templates(chosen, template, samples or [], temperature, top_p)

        from megatron_daro.workshop.evaluate.measuring import Plan, configuration, measure

        given = base.model_dump(mode="json") if base else {}
        config = configuration(model, chosen, target, base=given, overrides=overrides, source="eval")
        ks = tuple(sorted(set(k or [min(one.rollouts_per_prompt for one in chosen)])))
        summary = measure(Plan(config, model.weights, ks), notices)
    typer.echo(summary_text(summary))
    typer.echo(f"written: {target}/summary.json, problems.parquet, answers/")


def _compare(a: Path, b: Path, out: Path | None) -> None:
    from megatron_daro.observe.table import table_text
    from megatron_daro.workshop.evaluate import compare as comparing
    from megatron_daro.workshop.evaluate.compare import HEAD, line_cells, write_comparison

    target = out or b / "compare.html"
    comparison = comparing.compare(a, b)
    write_comparison(comparison, target)
    typer.echo(table_text(HEAD, [line_cells(line) for line in comparison.lines], left=2))
    typer.echo("B - A in percentage points, paired by problem; p: sign-flip permutation test")
    for remark in comparison.remarks:
        typer.echo(f"differs: {remark}")
    typer.echo(f"written: {target}")


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the configuration file, where the first argument is one, and the overrides."""
    if arguments and "=" not in arguments[0]:
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def _default_out(hf: Path | None, checkpoint: Path | None) -> Path:
    given = hf or checkpoint
    if given is None:
        return Path("evals") / "servers"
    name = given.absolute().name
    return Path("evals") / (f"{given.absolute().parent.parent.name}_{name}" if checkpoint else name)


def _model_and_base(
    hf: Path | None,
    checkpoint: Path | None,
    urls: Sequence[str],
    config_file: Path | None,
    overrides: Sequence[str],
    out: Path,
    notices: Notices,
) -> tuple[MeasuredModel, Config | None]:
    """Return the model to measure, and the configuration that was given, or else that of the checkpoint's run."""
    from megatron_daro.config import resolve
    from megatron_daro.workshop.convert.model_config import find_config_folder
    from megatron_daro.workshop.evaluate import models

    if sum(map(bool, (hf, checkpoint, urls))) != 1:
        given = [name for name, one in (("--hf", hf), ("--checkpoint", checkpoint), ("--urls", urls)) if one]
        raise ConfigError(
            f"eval: got {' and '.join(given) or 'no model'}; allowed: one of --hf DIR, --checkpoint DIR, --urls URL; "
            "fix: name the model to evaluate"
        )
    if checkpoint:
        require_checkpoint(checkpoint)
        run_config = checkpoint.absolute().parent.parent / "config.yaml"
        config_file = config_file or (run_config if run_config.is_file() else None)
    base = resolve(config_file, overrides) if config_file else None
    if checkpoint:
        folder = base.model.path if base else find_config_folder(checkpoint)
        return models.of_checkpoint(checkpoint, folder, out, notices), base
    if hf:
        return models.of_directory(hf), base
    named = any(text.startswith("model.path=") for text in overrides)
    path = Path(_value(overrides, "model.path")) if named else base.model.path if base else None
    return models.of_servers(urls, path), base


def _chosen_sets(base: Config | None, suite: str | None, folder: Path, texts: Sequence[str]) -> list[EvalSet]:
    """Return the sets of the command line; without any, those of the configuration."""
    from megatron_daro.workshop.evaluate.suites import check_names, named_sets, suite_sets

    chosen = [*(suite_sets(suite, folder) if suite else []), *named_sets(texts)]
    chosen = chosen or list(base.data.eval if base else ())
    if not chosen:
        raise ConfigError("data.eval: got no set; allowed: at least one for eval; fix: --suite, --set or data.eval")
    check_names(chosen)
    return chosen


def _under_templates(
    chosen: Sequence[EvalSet],
    templates: str | None,
    samples: Sequence[str],
    temperature: float | None,
    top_p: float | None,
) -> list[EvalSet]:
    """Return the sets with the command line's options; with several templates, each set once for each template, named
    SET.TEMPLATE.

    Raises:
        ConfigError: a value that no set can have, or a template twice.
    """
    names: list[str | None] = [None] if templates is None else [name.strip() for name in templates.split(",")]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"--template: got {twice[0]} twice; allowed: each name once; fix: leave one out")
    summaries = []
    for name in names:
        under = [_changed(one, samples, temperature, top_p, name) for one in chosen]
        summaries += (
            [one.model_copy(update={"name": f"{one.name}.{name}"}) for one in under] if len(names) > 1 else under
        )
    return summaries


def _changed(
    one: EvalSet, samples: Sequence[str], temperature: float | None, top_p: float | None, template: str | None
) -> EvalSet:
    """Return a set with the command line's options."""
    from pydantic import ValidationError

    changes: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "template": template}
    for text in samples:
        name, _, number = text.rpartition("=")
        if name in ("", one.name):
            changes["rollouts_per_prompt"] = int(number) if number.isdecimal() else number
    try:
        changed = type(one)(
            **{**one.model_dump(), **{key: value for key, value in changes.items() if value is not None}}
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = {"rollouts_per_prompt": "--samples", "top_p": "--top-p"}.get(
            str(first["loc"][0]), f"--{first['loc'][0]}"
        )
        raise ConfigError(f"{option}: got {first['input']!r}; {first['msg']}; fix: write an allowed value") from error
    if changed.temperature == 0 and changed.rollouts_per_prompt > 1:
        raise ConfigError(
            f"--samples: got {changed.rollouts_per_prompt} for {changed.name} at temperature 0, which would all be "
            "equal; allowed: 1, or a temperature above 0; fix: --temperature 0.6, or --samples 1"
        )
    return changed


def _check_samples(samples: Sequence[str], chosen: Sequence[EvalSet]) -> None:
    """Refuse a number for a set that is not measured."""
    names = [one.name for one in chosen]
    for text in samples:
        name, equals, _ = text.rpartition("=")
        if equals and name not in names:
            raise ConfigError(f"--samples: got {text!r}; allowed: the sets {', '.join(names)}; fix: name one of them")


def _value(overrides: Sequence[str], name: str) -> str:
    return next(text.partition("=")[2] for text in reversed(overrides) if text.startswith(f"{name}="))


def require_checkpoint(checkpoint: Path) -> None:
    """Refuse what is not a checkpoint; of a run directory or its folder of checkpoints, name the checkpoints."""
    allowed = "a checkpoint directory such as RUN/checkpoints/step_000020"
    if not checkpoint.is_dir():
        raise ConfigError(
            f"--checkpoint: got {str(checkpoint)!r}, which is not there; allowed: {allowed}; fix: check the path"
        )
    folder = checkpoint / "checkpoints" if (checkpoint / "checkpoints").is_dir() else checkpoint
    names = sorted(path.name for path in folder.glob("step_*") if path.is_dir() and path.suffix == "")
    if names:
        raise ConfigError(
            f"--checkpoint: got {str(checkpoint)!r}, which holds {len(names)} checkpoints; allowed: one of "
            f"{', '.join(names)}; fix: --checkpoint {folder / names[-1]}"
        )
