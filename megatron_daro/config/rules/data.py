"""Rules of `data`: every file exists and has its format, and templates fit the verifier of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_daro.config.data_file import why_no_file
from megatron_daro.config.problems import Problem, show, wrong
from megatron_daro.config.sections import Config

_PARQUET_MAGIC = b"PAR1"
_ALLOWED = "a file of problems that is not empty"
_WRITE = "write one problem per line, or name another file"


def data(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the files, the templates and the evaluation sets."""
    section = config.data
    for index, path in enumerate(section.train):
        yield from _file(f"data.train.{index}", path, section.format)
    for index, eval_set in enumerate(section.eval):
        yield from _file(f"data.eval.{index}.path", eval_set.path, eval_set.format)
    files = [path.resolve() for path in section.train if path.is_file()]
    for path in sorted({path for path in files if files.count(path) > 1}):
        got = f"{str(path)!r} {files.count(path)} times"
        allowed = "each file once: its problems would come twice as often"
        yield Problem("data.train", got, allowed, "remove one of them")
    names = [eval_set.name for eval_set in section.eval]
    for name in sorted({name for name in names if names.count(name) > 1}):
        allowed = "a different name for each set: it names the metric"
        yield Problem("data.eval", f"the name {name!r} {names.count(name)} times", allowed, "rename one of the sets")
    for index, eval_set in enumerate(section.eval):
        if eval_set.temperature == 0 and eval_set.rollouts_per_prompt > 1:
            field, beside = f"data.eval.{index}.temperature", f"data.eval.{index}.rollouts_per_prompt"
            allowed = "above 0 with several rollouts, which would all be equal"
            yield wrong(config, field, allowed, "raise it, or set rollouts_per_prompt to 1", beside=beside)
    yield from templates(config)


def templates(config: Config) -> Iterator[Problem]:
    """Yield options that cannot be combined with a named template: it is the whole text, and the answer between the
    tags of r1 is verified as mathematics."""
    section, verifier = config.data, config.reward.verifier
    if section.prompt_template not in ("chat", "plain") and section.template != "{prompt}":
        allowed = "{prompt}: a named template is the whole text"
        fix = "leave data.template out, or set data.prompt_template=plain"
        yield wrong(config, "data.template", allowed, fix, beside="data.prompt_template")
    named: dict[str, str] = {"data.prompt_template": section.prompt_template}
    named |= {f"data.eval.{index}.template": eval_set.template for index, eval_set in enumerate(section.eval)}
    for field, name in named.items():
        if name == "r1" and verifier in ("integer", "exact"):
            allowed = "r1 with the verifier math, or one of your own"
            yield wrong(config, field, allowed, "set reward.verifier=math", beside="reward.verifier")


def _file(field: str, path: Path, form: str) -> Iterator[Problem]:
    """Yield why a file cannot be read as a file of problems; at most one reason."""
    if why := why_no_file(path):
        fix = _WRITE if "empty" in why else "check the path; it is relative to the working directory"
        yield Problem(field, f"{str(path)!r}, which {why}", _ALLOWED, fix)
        return
    try:
        with path.open("rb") as file:
            start = file.read(4096)
            file.seek(-min(4, path.stat().st_size), 2)
            end = file.read()
    except OSError as error:
        yield Problem(field, f"{str(path)!r}: {error.strerror}", _ALLOWED, "make the file readable")
        return
    parquet = start.startswith(_PARQUET_MAGIC)
    if not start.strip():
        yield Problem(field, f"{str(path)!r}, which is an empty file", _ALLOWED, _WRITE)
    elif parquet and end != _PARQUET_MAGIC:  # Source: the format: a file begins and ends with its magic number.
        yield Problem(field, f"{str(path)!r}, a torn Parquet file", _ALLOWED, "copy or write the file again")
    elif form in ("jsonl", "parquet") and parquet != (form == "parquet"):
        got = f"{show(str(path))}, which is {'a' if parquet else 'no'} Parquet file, with format {form}"
        yield Problem(field, got, f"a {form} file", "set the format to auto", also=("data.format",))
