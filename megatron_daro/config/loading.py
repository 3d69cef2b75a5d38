"""A YAML file and overrides become one validated, fully resolved Config.

Reports every wrong value, not only the first. Values that depend on other sections (the run directory, the engine's
seed, ...) or on the model are filled in here, so that the resolved file shows them. Rejects what yaml_text rejects,
unknown keys, and values of another type ("3" is not a number). Messages and the configuration reference
(tools/config_reference.py) describe fields by their annotations, so no text can disagree with what is checked.
"""

from __future__ import annotations

import datetime
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_daro.config import yaml_text
from megatron_daro.config.base import OUT_OF_RANGE, OneOf, Section
from megatron_daro.config.checks import CheckReport, check
from megatron_daro.config.hardware import Hardware
from megatron_daro.config.model_files import read_model
from megatron_daro.config.problems import (
    Problem,
    concerns,
    config_error,
    did_you_mean,
    nearest_paths,
    show,
)
from megatron_daro.config.rules.lora import with_adapter_sync
from megatron_daro.config.sections import Config
from megatron_daro.config.yaml_text import apply_overrides

ITEM = "*"
"""Stands for the position in a list in a dotted path, as in `data.eval.*.name`."""

_SCALARS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    datetime.date: "a date such as 2026-07-31",
    Any: "anything",
}


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    """Whether the annotation is a Section class."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def strip(annotation: object) -> tuple[Any, list[Any]]:
    """Return an annotation without `Annotated` and `| None`, and the constraints that stood on it."""
    metadata: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            metadata += [m for e in extra for m in (e.metadata if isinstance(e, FieldInfo) else [e])]
        elif get_origin(annotation) in (Union, types.UnionType):
            (annotation,) = [a for a in get_args(annotation) if a is not type(None)]
        else:
            return annotation, metadata


def section_of(annotation: object) -> type[Section] | None:
    """Return the Section that an annotation is, or that its list items are."""
    plain, _ = strip(annotation)
    if get_origin(plain) is tuple:
        plain, _ = strip(get_args(plain)[0])
    return plain if is_section(plain) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every path below a section with its field; a nested section itself comes before its fields."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field
        inner = section_of(field.annotation)
        if inner is not None:
            item = "" if is_section(strip(field.annotation)[0]) else f"{ITEM}."
            yield from walk(inner, f"{path}.{item}")


def _bounds(metadata: list[Any]) -> str:
    words = []
    for kind, sign in (
        (annotated_types.Ge, ">="),
        (annotated_types.Gt, ">"),
        (annotated_types.Le, "<="),
        (annotated_types.Lt, "<"),
    ):
        bounds = [getattr(m, kind.__name__.lower()) for m in metadata if isinstance(m, kind)]
        words += [f"{sign} {bound if isinstance(bound, int) else f'{bound:.9g}'}" for bound in bounds]
    return " and ".join(words)


def _text(metadata: list[Any]) -> str:
    names = [m.words for m in metadata if isinstance(m, OneOf)]
    if names:
        return names[0]
    patterns = [m.pattern for m in metadata if getattr(m, "pattern", None)]
    if patterns:
        return f"text that matches {patterns[0]}"
    return "text, not empty" if any(isinstance(m, annotated_types.MinLen) for m in metadata) else "text"


def _list(items: tuple[Any, ...], metadata: list[Any]) -> str:
    if items[-1] is not Ellipsis:
        return f"a list of {len(items)}: {', '.join(allowed(item) for item in items)}"
    least = [m.min_length for m in metadata if isinstance(m, annotated_types.MinLen)]
    size = f" of at least {least[0]}" if least else ""
    return f"a list{size}, each {allowed(items[0])}"


def allowed(annotation: object, metadata: list[Any] | None = None) -> str:
    """Return what an annotation allows, in words."""
    optional = get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)
    plain, inner = strip(annotation)
    metadata = [*(metadata or []), *inner]
    if get_origin(plain) is Literal:
        text = f"one of {', '.join(map(str, get_args(plain)))}"
    elif get_origin(plain) is tuple:
        text = _list(get_args(plain), metadata)
    elif get_origin(plain) is dict:
        text = "a mapping"
    elif is_section(plain):
        text = f"a mapping with the keys {', '.join(plain.model_fields)}"
    elif plain is str:
        text = _text(metadata)
    else:
        text = " ".join(filter(None, [_SCALARS[plain], _bounds(metadata)]))
    return f"{text}, or null" if optional else text


def field_allowed(field: FieldInfo) -> str:
    """Return what a field allows, in words."""
    return allowed(field.annotation, field.metadata)


def choices(annotation: object, metadata: list[Any]) -> tuple[str, ...]:
    """Return the names that a Literal annotation or a `OneOf` knows, else nothing."""
    annotation, inner = strip(annotation)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((m.names for m in [*metadata, *inner] if isinstance(m, OneOf)), ())


_PLACEHOLDERS = {("model", "path"): ".", ("data", "train"): ["."]}
"""Stand-ins for required fields while the rest of a wrong file is judged; no Config with one leaves this file."""


def resolve(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and validate a configuration, without the checks (config/rules/).

    Args:
        path: YAML file.
        overrides: texts `a.b=c`, in order.

    Returns:
        The Config; open values but `rollout.finish_batch` are filled in.

    Raises:
        ConfigError: lists every wrong field.
    """
    config, problems, _ = _read(Path(path), overrides)
    if config is None or problems:
        raise config_error(str(path), problems)
    return config


def resolve_tree(tree: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> Config:
    """Return the Config of values that stand in no file, as `resolve` does.

    Args:
        tree: as a YAML file would hold it. overrides: texts `a.b=c`, in order. source: what it is of, for messages.

    Raises:
        ConfigError: lists every wrong field.
    """
    config, problems, _ = _from_tree(dict(tree), overrides, {}, Path(source))
    if config is None or problems:
        raise config_error(source, problems)
    return config


def resolve_and_check(
    path: str | Path, overrides: Sequence[str] = (), hardware: Hardware | None = None
) -> tuple[Config, CheckReport]:
    """Read, override, validate and check against files and hardware: what a command does before it starts anything.

    Args:
        path: YAML file.
        overrides: texts `a.b=c`, in order.
        hardware: what the run may use; detected if not given.

    Returns:
        The Config, and the report of the checks (with warnings).

    Raises:
        ConfigError: lists every wrong field and every failed check together.
    """
    config, problems, broken = _read(Path(path), overrides)
    if config is None:
        raise config_error(str(path), problems)
    report = check(config, hardware)
    problems = problems + [problem for problem in report.problems if not concerns(problem, broken)]
    if problems:
        raise config_error(str(path), problems)
    return config, report


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML text; `resolve` of that text gives an equal Config."""
    return yaml_text.dump(config.model_dump(mode="json"))


def known_paths() -> tuple[str, ...]:
    """Every dotted path of the configuration, sections included; `*` stands for a position in a list."""
    return tuple(path for path, _ in walk(Config))


def _read(path: Path, overrides: Sequence[str]) -> tuple[Config | None, list[Problem], set[str]]:
    """Return the Config (as far as it could be made), the problems so far, and the fields they concern."""
    document = _read_file(path)
    if document.problems or not isinstance(document.value, dict):
        return None, document.problems, set()
    places = {field: f"{path.name}:{line}" for field, line in document.lines.items()}
    return _from_tree(document.value, overrides, places, path)


def _from_tree(
    tree: dict[str, Any], overrides: Sequence[str], places: dict[str, str], path: Path
) -> tuple[Config | None, list[Problem], set[str]]:
    """Return what `_read` returns. Args: places: where fields were written. path: names the run."""
    tree, problems = apply_overrides(tree, overrides)
    for field in (text.partition("=")[0].strip() for text in overrides):
        places = {other: place for other, place in places.items() if not other.startswith(f"{field}.")}
        places[field] = "command line"
    tree = _with_lists_of_one(_without_empty_sections(tree))
    config, wrong, broken = _validate(tree, places)
    return (_fill_in(config, path) if config else None), problems + wrong, broken


def _read_file(path: Path) -> yaml_text.Document:
    def failed(got: str, fix: str) -> yaml_text.Document:
        return yaml_text.Document(problems=[Problem(str(path), got, "a YAML file with a configuration", fix)])

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return failed("no such file", "check the path")
    except UnicodeDecodeError as error:
        return failed(f"bytes that are not UTF-8 at position {error.start}", "save the file as UTF-8")
    except OSError as error:
        return failed(error.strerror or str(error), "check the path and its permissions")
    document = yaml_text.parse(text, path.name)
    if not document.problems and document.value is None:
        return failed("an empty file", "write at least model.path and data.train")
    if not document.problems and not isinstance(document.value, dict):
        return failed(f"{show(document.value)} at the top", "write sections such as `model:` at the top")
    return document


def _without_empty_sections(tree: Mapping[str, Any], model: type[Section] = Config) -> dict[str, Any]:
    """`rollout:` with nothing below it means its defaults; a missing required section means its missing fields."""
    result = dict(tree)
    for name, field in model.model_fields.items():
        annotation, _ = strip(field.annotation)
        if not is_section(annotation):
            continue
        if result.get(name) is None and (name in result or field.is_required()):
            result[name] = {}
        elif isinstance(result.get(name), dict):
            result[name] = _without_empty_sections(result[name], annotation)
    return result


def _with_lists_of_one(tree: Mapping[str, Any], model: type[Section] = Config) -> dict[str, Any]:
    """Where a list of any length is due, `train: a.jsonl` means `train: [a.jsonl]`."""
    result = dict(tree)
    for name in result.keys() & model.model_fields.keys():
        annotation, _ = strip(model.model_fields[name].annotation)
        items, value = get_args(annotation), result[name]
        if is_section(annotation) and isinstance(value, dict):
            result[name] = _with_lists_of_one(value, annotation)
        elif get_origin(annotation) is tuple and items[-1] is Ellipsis:
            of_sections = is_section(items[0])
            one = isinstance(value, dict) if of_sections else isinstance(value, (str, int, float))
            values = [value] if one else value
            if of_sections and isinstance(values, list):
                values = [_with_lists_of_one(v, items[0]) if isinstance(v, dict) else v for v in values]
            result[name] = values
    return result


def _validate(tree: dict[str, Any], places: Mapping[str, str]) -> tuple[Config | None, list[Problem], set[str]]:
    """Validate; on errors, set the wrong fields to their defaults so that the rest can still be judged."""
    problems: list[Problem] = []
    broken: set[str] = set()
    for _ in range(3):
        try:
            return Config.model_validate_json(json.dumps(tree), strict=True), problems, broken
        except ValidationError as error:
            all_details = error.errors()
            for details in all_details:
                loc = details["loc"]
                # A list whose items are wrong also counts as too short.
                if any(other["loc"][: len(loc)] == loc != other["loc"] for other in all_details):
                    continue
                path = ".".join(map(str, loc))
                place = "" if details["type"] == "missing" else _place(path, places)
                problems.append(_problem(details, path, place))
                field = ".".join(_keys(loc))
                if details["type"] != "extra_forbidden" or field != path:
                    broken.add(field)
                _remove(tree, _keys(loc))
    return None, problems, broken


def _place(path: str, places: Mapping[str, str]) -> str:
    """Where the path was written, or the list that it is a position of."""
    around, _, last = path.rpartition(".")
    return places.get(path) or (places.get(around, "") if last.isdecimal() else "")


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys up to the first list: a wrong item spoils its whole list. One may have dots in it."""
    return list(takewhile(lambda part: isinstance(part, str), loc))  # type: ignore[arg-type]


def _remove(tree: dict[str, Any], keys: list[str]) -> None:
    *parents, leaf = keys
    for part in parents:
        if not isinstance(tree.get(part), dict):
            return
        tree = tree[part]
    tree.pop(leaf, None)
    for (section, name), stand_in in _PLACEHOLDERS.items():
        if keys == [section, name]:
            tree[leaf] = stand_in
        elif keys == [section]:
            tree[leaf] = {name: stand_in}


def _problem(details: ErrorDetails, path: str, place: str) -> Problem:
    """Pydantic's finding in this package's words."""
    if details["type"] == "extra_forbidden":
        return _unknown_key(details["loc"], details["input"], place)
    loc = details["loc"]
    too_short = details["type"] == "missing" and isinstance(loc[-1], int)
    if too_short:
        path, loc = path.rpartition(".")[0], loc[:-1]
    annotation, metadata = _annotation_at(loc)
    words = details["msg"] if details["type"] == OUT_OF_RANGE else allowed(annotation, metadata)
    if details["type"] == "missing" and not too_short:
        return Problem(path, "nothing", words, f"set it in the file, or give {path}=... on the command line")
    return Problem(path, show(details["input"]), words, _fix(annotation, metadata, details["input"], path), place=place)


def _annotation_at(loc: tuple[int | str, ...]) -> tuple[Any, list[Any]]:
    annotation: object = Config
    metadata: list[Any] = []
    for part in loc:
        annotation, _ = strip(annotation)
        if isinstance(part, int):
            items = get_args(annotation)
            annotation, metadata = items[0] if items[-1] is Ellipsis else items[min(part, len(items) - 1)], []
        elif is_section(annotation):
            field = annotation.model_fields[part]
            annotation, metadata = field.annotation, field.metadata
        elif get_origin(annotation) is dict:
            annotation, metadata = get_args(annotation)[1], []
    return annotation, metadata


def _fix(annotation: object, metadata: list[Any], value: object, path: str) -> str:
    plain, _ = strip(annotation)
    names = choices(annotation, metadata)
    if names and isinstance(value, str):
        return did_you_mean(nearest_paths(value, names, at_most=1), "write one of these names")
    if plain is bool and isinstance(value, str):
        return "write true or false"
    if plain in (int, float) and isinstance(value, str):
        return "write a plain number, without quotes, units or leading zeros"
    if (plain is str or names) and not isinstance(value, str):
        return "put the text in quotes"
    example = _defaults().get(path)
    example = list(example) if isinstance(example, tuple) else example
    return f"write an allowed value, such as {path}={show(example)}" if example else "write an allowed value"


def _unknown_key(loc: tuple[int | str, ...], value: object, place: str) -> Problem:
    section = ".".join(map(str, loc[:-1]))
    *around, key = (ITEM if isinstance(part, int) else part for part in loc)
    names = [name for name, _ in walk(Config) if name.rpartition(".")[0] == ".".join(around)]
    words = ", ".join(name.rpartition(".")[2] for name in names)
    where = f"the keys of {section}: {words}" if section else f"the sections {words}"
    fix = "write the keys of a section below its name: one has no dots"
    if "." not in key:
        near = nearest_paths(".".join([*around, key]), known_paths())
        fix = did_you_mean(near, "remove it; docs/configuration.md has every option")
    return Problem(".".join(map(str, loc)), f"an unknown key with value {show(value)}", where, fix, place=place)


@cache
def _defaults() -> dict[str, Any]:
    fields = ((path, field) for path, field in walk(Config) if not field.is_required())
    return {path: field.default for path, field in fields if not isinstance(field.default, Section)}


def _fill_in(config: Config, path: Path) -> Config:
    """Give a value to fields whose default depends on other sections or on the model. `rollout.finish_batch` stays
    open: it depends on the engine's class (runtime/parts.py)."""
    trainer, rollout, overlong = config.trainer, config.rollout, config.algorithm.overlong
    max_tokens = overlong.max_tokens or rollout.max_response_tokens
    overlong = overlong.model_copy(
        update={"max_tokens": max_tokens, "cache_tokens": overlong.cache_tokens or max(1, max_tokens // 5)}
    )
    old_logprobs = config.algorithm.old_logprobs
    if old_logprobs == "auto":
        old_logprobs = "forward" if trainer.steps_per_batch == 1 else "recompute"
    update = {
        "trainer": trainer.model_copy(update={"run_dir": trainer.run_dir or Path("runs") / path.stem}),
        "algorithm": config.algorithm.model_copy(update={"overlong": overlong, "old_logprobs": old_logprobs}),
        "actor": config.actor.model_copy(update={"sequence_parallel": config.actor.use_sequence_parallel}),
    }
    if config.engine.seed is None:
        update["engine"] = config.engine.model_copy(update={"seed": trainer.seed})
    config = config.model_copy(update=update)
    return with_adapter_sync(config, read_model(config.model.path).shape) if config.lora.rank else config
